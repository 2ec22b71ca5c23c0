"""`make kill` at one random moment of each kind: the continued runs end with the bytes of the unbroken ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "eval" / "benchmarks" / "kills.py"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the benchmark forks its runs")
def test_runs_that_are_killed_at_a_random_moment_continue():
    command = [sys.executable, str(BENCHMARK), "--moments", "1", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()[2:]
    assert len(rows) == 6 and all(row.endswith("| yes |") for row in rows)
