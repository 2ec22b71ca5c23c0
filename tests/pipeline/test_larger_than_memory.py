"""A model that a process may not map as a whole is compressed, evaluated and reloaded under that limit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "eval" / "benchmarks" / "larger_than_memory.py"
LIMIT_MB, MODEL_MB = 780, 250  # safetensors would map the file whole, and more than once; 600 MB are for libraries


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon and RLIMIT_DATA are those of Linux")
def test_a_limited_process_compresses_and_reloads_a_model_of_one_large_file():
    size = ["--limit-mb", LIMIT_MB, "--model-mb", MODEL_MB, "--shard-mb", 2 * MODEL_MB]
    options = [*map(str, size), "--sequences", "2", "--length", "64"]
    done = subprocess.run([sys.executable, BENCHMARK, "rtn", *options], stdout=subprocess.PIPE, text=True, check=True)
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["model_mb"] > 0.95 * MODEL_MB
    assert line["peak_mb"] < line["bound_mb"] and line["reload_mb"] < line["bound_mb"]
    assert line["perplexity"] == line["reloaded"]
    assert line["read_mb"] >= 2 * line["model_mb"] and line["reading_seconds"] >= 0
