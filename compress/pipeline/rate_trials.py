"""Measure the rates of this machine: short runs of passes on small random models, with their counted work."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
import transformers

from compress.checkpoint.containers.files import check_writable, write_text
from compress.checkpoint.sources.untrusted import read_json
from compress.evaluation.store import digest_of
from compress.models.quiet import quiet_transformers
from compress.pipeline.counted import counted
from compress.pipeline.run import run
from compress.pipeline.workload import workload
from compress.recipe.schema import Recipe
from compress.roofline.rates import Rates, fitted_seconds, measured_limits
from compress.roofline.work import Work, total
from compress.version import __version__

KEPT = "compress-rates"
"""The folder of kept rates, in the user's cache of models."""
VOCABULARY, HEAD = 512, 64
TURNS = 2
"""Runs of each trial, of which the fastest counts: another program can only make a run slower."""


@dataclass(frozen=True)
class Small:
    """A small random Llama, its calibration text (sequences, length) and its passes."""

    hidden: int
    intermediate: int
    blocks: int
    tokens: tuple[int, int]
    passes: tuple[Mapping[str, Any], ...]
    vocabulary: int = VOCABULARY


GPTQ_PLAIN = {"gptq": {"refine": 0, "scale": "absmax", "act_order": "none"}}
TRIALS = (
    Small(256, 512, 1, (1, 128), ({"rtn": {}},)),
    Small(1024, 3072, 1, (1, 128), ({"rtn": {}},)),
    Small(512, 1536, 4, (1, 128), ({"rtn": {}},)),
    Small(512, 512, 1, (1, 128), ({"rtn": {}},), vocabulary=32768),
    Small(1024, 2048, 1, (1, 128), ({"rtn": {"weights": "fp8_e4m3", "group_size": "channel"}},)),
    Small(512, 1536, 1, (16, 256), ({"wanda": {"pattern": "2:4", "repair": 0}},)),
    Small(1024, 2048, 1, (8, 128), ({"wanda": {"pattern": "2:4", "repair": 0}},)),
    Small(512, 1024, 2, (4, 128), ({"wanda": {"pattern": "2:4", "repair": 4}},)),
    Small(1024, 2048, 1, (4, 128), ({"wanda": {"pattern": "2:4", "repair": 4}},)),
    Small(512, 1536, 1, (16, 256), (GPTQ_PLAIN,)),
    Small(1024, 2048, 1, (4, 128), (GPTQ_PLAIN,)),
    Small(1536, 1536, 1, (4, 128), (GPTQ_PLAIN,)),
    Small(512, 1024, 1, (4, 128), ({"gptq": {"refine": 0}},)),
    Small(1024, 2048, 1, (4, 128), ({"gptq": {"refine": 0}},)),
    Small(512, 1536, 2, (4, 128), ({"gptq": {}},)),
    Small(1024, 2048, 1, (4, 128), ({"gptq": {}},)),
)
"""Runs in which each kind of work takes a large part of some run."""


def known_rates() -> Rates | None:
    """Return the rates of this machine that an earlier measurement has kept; None if there are none to be read."""
    try:
        return Rates.from_json(read_json(kept_rates_file()))
    except (ValueError, KeyError, TypeError):
        return None


def measured_rates() -> Rates:
    """Return the rates of this machine; measure and keep them unless an earlier measurement has."""
    rates = known_rates()
    if rates is None:
        path = kept_rates_file()
        check_writable(path.parent)
        rates = rates_of_samples(list(samples()))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(rates.to_json()))
    return rates


def rates_of_samples(measured: list[tuple[Work, float]]) -> Rates:
    """Fit rates to measured (work, processor seconds)."""
    operations, bandwidth = measured_limits()
    machine = platform.processor() or platform.machine()
    return Rates(
        fitted_seconds(measured, operations, bandwidth),
        operations,
        bandwidth,
        f"{machine}, {torch.get_num_threads()} threads",
    )


def samples(trials: tuple[Small, ...] = TRIALS) -> Iterator[tuple[Work, float]]:
    """Yield the counted work and the measured processor seconds of each trial."""
    with tempfile.TemporaryDirectory(prefix="compress-rates-") as work:
        run_of(TRIALS[0], Path(work) / "first")  # what the first run of a process imports
        for number, small in enumerate(trials):
            yield run_of(small, Path(work) / str(number))


def run_of(small: Small, folder: Path) -> tuple[Work, float]:
    """Return the counted work of a run on a small random model, and its measured processor seconds."""
    recipe = write_model(small, folder)
    counts = counted(recipe, torch.device("cpu"))
    assert counts.blocks is not None, counts.reason
    work = total(workload(counts.footprint, counts.blocks, counts.dense_bytes + counts.checkpoint_bytes).phases)
    seconds = []
    for turn in range(TURNS):
        begin = process_time()
        run(recipe, folder / f"out-{turn}", progress=False)
        seconds.append(process_time() - begin)
    return work, min(seconds)


def write_model(small: Small, folder: Path) -> Recipe:
    """Write a random model and its token ids into a folder, and return the recipe of the trial."""
    folder.mkdir(parents=True)
    config = transformers.LlamaConfig(
        vocab_size=small.vocabulary,
        hidden_size=small.hidden,
        intermediate_size=small.intermediate,
        num_hidden_layers=small.blocks,
        num_attention_heads=small.hidden // HEAD,
        num_key_value_heads=small.hidden // HEAD,
        max_position_embeddings=small.tokens[1],
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    with quiet_transformers():
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    torch.random.set_rng_state(state)
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(VOCABULARY, size=small.tokens))
    return Recipe.from_data(
        {
            "model": str(folder),
            "dtype": "float32",
            "calibration": {"source": str(folder / "ids.npy"), "sequences": small.tokens[0], "length": small.tokens[1]},
            "passes": [dict(step) for step in small.passes],
            "eval": None,
            "save": {"format": "native", "verify": "own"},
        }
    )


def kept_rates_file() -> Path:
    """Return the file of the rates of this machine and of these versions, in the user's cache of models."""
    from huggingface_hub.constants import HF_HOME

    machine = platform.node(), platform.machine(), torch.get_num_threads()
    return Path(HF_HOME) / KEPT / f"{digest_of(machine, __version__, torch.__version__, transformers.__version__)}.json"
