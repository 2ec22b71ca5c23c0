"""Every way to quantize to few bits in one line fits the output of the uncompressed model; more bits do not."""

import pytest
import yaml

from compress import Recipe
from compress.numerics.quant.grids import GRIDS
from compress.recipe.presets import presets
from compress.recipe.starts import FITTED, FITTED_BITS, quantize_line
from compress.recipe.targets import starts


def gptq_of(passes):
    steps = Recipe.from_data({"model": "m", "passes": passes}).passes
    return [step for step in steps if step.key() == "gptq"]


def check(step):
    fitted = {name: getattr(step, name) for name in FITTED} == FITTED
    assert fitted == (GRIDS[step.weights].bits <= FITTED_BITS), step


@pytest.mark.parametrize("name", presets())
def test_schemes(name):
    for step in gptq_of([{"scheme": name}]):
        check(step)


@pytest.mark.parametrize("bits", range(2, 9))
def test_bits(bits):
    (step,) = gptq_of(quantize_line("m", None, bits, None)[0]["passes"])
    check(step)


def test_targets():
    found = [step for start in starts().values() for step in gptq_of(yaml.safe_load(start.body)["passes"])]
    for step in found:
        check(step)
    assert len(found) >= 15
