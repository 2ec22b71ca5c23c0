"""Every pass that compensates errors can fit the output of the uncompressed model."""

import pytest
import torch
from draws import random

import compress
from compress.numerics.quant.codes import Codes
from compress.passes.contract.observers import CrossGram, Gram
from compress.passes.families.compensation import CompensatingPass

ROWS, WIDTH, TOKENS = 32, 64, 400
SMALL = {
    "aqlm": {"bits": 4, "length": 2},
    "billm": {},
    "bcq": {"group_size": 16},
    "gptq": {"weights": "int4", "group_size": 16},
    "owq": {"weights": "int4", "group_size": 16},
    "pb_llm": {"group_size": 16},
    "qtip": {"bits": 4, "states": 6},
    "quantease": {"weights": "int4", "group_size": 16},
    "quip_sharp": {},
    "spqr": {},
}
"""Options of the passes that quantize, for a small layer."""


def problem(seed):
    """(weight, inputs of the compressed model, inputs of the uncompressed model)."""
    reference = random(TOKENS, WIDTH, seed=seed) @ random(WIDTH, WIDTH, seed=seed + 1) / WIDTH**0.5
    rows = reference @ (torch.eye(WIDTH) + 0.1 * random(WIDTH, WIDTH, seed=seed + 2))
    return random(ROWS, WIDTH, seed=seed + 3), rows, reference


def statistics(observer, rows, reference):
    seen = observer(WIDTH, torch.device("cpu"))
    if isinstance(seen, CrossGram):
        seen.compare(rows, reference)
    else:
        seen.update(rows)
    return seen


def test_every_quantizing_pass_of_the_family_is_tested():
    family = {key for key in compress.PASSES if issubclass(compress.PASSES[key], CompensatingPass)}
    assert {key for key in family if compress.PASSES.kind(key) == "quantize"} == set(SMALL)


@pytest.mark.parametrize("key", SMALL)
def test_asymmetric_brings_the_output_nearer_to_that_of_the_uncompressed_model(key, layer_of):
    away = {}
    for seed in (0, 10, 20):
        weight, rows, reference = problem(seed)
        for error in ("symmetric", "asymmetric"):
            options = {"error": error, "alpha": 1.0} if error == "asymmetric" else {}
            step = compress.PASSES[key](**SMALL[key], **options, normalize_tokens=False)
            assert step.observer is (Gram if error == "symmetric" else CrossGram)
            assert step.requires.reference == (error == "asymmetric")
            solution = step.solve(weight, statistics(step.observer, rows, reference), layer_of())
            inputs = rows
            for transform in solution.transforms:
                inputs = transform(inputs)
            parts = [solution.weight] if isinstance(solution.weight, Codes) else solution.weight
            dense = sum(part.dense() if isinstance(part, Codes) else part.dense(torch.float32) for part in parts)
            away[error] = away.get(error, 0) + float((inputs @ dense.T - reference @ weight.T).norm())
    assert away["asymmetric"] < 0.95 * away["symmetric"]
