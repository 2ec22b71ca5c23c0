"""Counted work by hand, rates that are fitted to it, and what follows for other devices."""

import pytest
import torch

from compress import ALPS, GPTQ, RTN, SparseGPT, Wanda
from compress.errors import RecipeError
from compress.passes.contract.observers import CrossGram, Gram, InputNorm, Nothing
from compress.pipeline.hardware import read_hardware
from compress.roofline.devices import devices, named_device
from compress.roofline.rates import OPERATIONS, UTILIZATION, Rates, fitted_seconds, measured_limits, reference_rates
from compress.roofline.work import KINDS, Work, total

ROWS, WIDTH = 6, 4
WEIGHTS = ROWS * WIDTH


def test_works_are_added_and_multiplied():
    work = Work(products=2, layers=1) + Work(products=3) * 2
    assert work == Work(products=8, layers=1) == total({"a": Work(products=8), "b": Work(layers=1)})
    assert list(work.amounts) == list(KINDS)


def test_the_statistics_of_a_narrow_input():
    """One slab holds all of X^T X: 2 * tokens * width^2 operations, added once per 256 tokens."""
    gram = Gram.work(WIDTH, 300)
    assert (gram.statistics, gram.elements) == (2 * 300 * WIDTH**2, 2 * 2 * WIDTH**2)
    assert CrossGram.work(WIDTH, 300).statistics == 2 * gram.statistics
    assert InputNorm.work(WIDTH, 300) == Work(elements=2 * 300 * WIDTH)
    assert Nothing.work(WIDTH, 300) == Work()


def test_a_wide_hessian_takes_a_triangle():
    """512 columns are two slabs: 256 x 512 and 256 x 256."""
    assert Gram.work(512, 1).statistics == 2 * (256 * 512 + 256 * 256)


def test_the_operations_of_gptq_by_hand():
    step = GPTQ(group_size=4, refine=0, scale="absmax")
    assert step.work((ROWS, WIDTH)) == Work(updates=ROWS * WIDTH**2, columns=WEIGHTS, roundings=WEIGHTS)
    assert step.shared_work(WIDTH).factors == pytest.approx(2 * WIDTH**3 / 3)
    refined = GPTQ(group_size=4, refine=1, scale="absmax").work((ROWS, WIDTH))
    # W H once, and in each of two turns two products of a part of 128 columns with itself
    assert refined.updates == WEIGHTS * WIDTH + 2 * WEIGHTS * WIDTH + 2 * 2 * 2 * 128 * WEIGHTS
    assert refined.columns == 3 * WEIGHTS
    fitted = GPTQ(group_size=4, refine=0, scale="absmax", error="asymmetric", alpha=0.5)
    assert fitted.work((ROWS, WIDTH)).updates == WEIGHTS * WIDTH + 2 * WEIGHTS * WIDTH
    assert fitted.shared_work(WIDTH).updates == 4 * WIDTH**3


def test_the_operations_of_pruning_by_hand():
    plain = Wanda(pattern="2:4", repair=0)
    assert plain.work((ROWS, WIDTH)) == Work(scores=WEIGHTS) and plain.shared_work(WIDTH) == Work()
    once, twice = (Wanda(pattern="2:4", repair=rounds).work((ROWS, WIDTH)).updates for rounds in (1, 2))
    assert once == 2 * WEIGHTS * WIDTH + 4 * 2 * 256 * WEIGHTS and twice == 2 * once
    swept = SparseGPT(pattern="2:4", repair=0)
    assert swept.work((ROWS, WIDTH)) == Work(scores=WEIGHTS, updates=ROWS * WIDTH**2, columns=WEIGHTS)
    assert swept.shared_work(WIDTH).factors > 0
    assert ALPS(pattern="2:4").work((ROWS, WIDTH)) is None


def test_rounding_to_nearest_rounds_twice():
    assert RTN(group_size=4).work((ROWS, WIDTH)) == Work(roundings=2 * WEIGHTS)


def test_rates_are_found_again():
    rates = {"products": 1e-10, "scores": 2e-8, "runs": 0.5}
    works = [Work(products=1e9 * i, scores=1e6 * (7 - i * i % 5), runs=1) for i in range(1, 6)]
    samples = [(work, sum(rates[kind] * work.amounts[kind] for kind in rates)) for work in works]
    fitted = fitted_seconds(samples)
    assert {kind: fitted[kind] for kind in rates} == pytest.approx(rates)
    assert all(fitted[kind] == 0 for kind in KINDS if kind not in rates)


def test_no_kind_is_faster_than_the_machine():
    samples = [(Work(products=1e9, runs=1), 1.0), (Work(products=2e9, runs=1), 1.0)]
    fitted = fitted_seconds(samples, operations=1e12, bandwidth=4e9)
    assert fitted["products"] == pytest.approx(1e-12) and fitted["columns"] == 1e-9
    assert fitted["runs"] == pytest.approx(1.0, rel=0.01)


def test_limits_are_measured():
    operations, bandwidth = measured_limits()
    assert operations > 1e6 and bandwidth > 1e6


def test_rates_of_a_device_by_hand():
    here = Rates(dict.fromkeys(KINDS, 1e-9), 2e9, 1e9, "here")
    device = named_device("H100")
    there = here.on(device, 4)
    assert there.seconds["updates"] == pytest.approx(1e-9 * 2e9 / 67e12)
    assert there.seconds["columns"] == pytest.approx(1e-9 * 1e9 / 3350e9)
    assert there.seconds["layers"] == there.seconds["stored"] == 1e-9
    narrow = Rates({**here.seconds, "products": 1e-15}, 2e9, 1e9, "here").on(device, 2)
    assert narrow.seconds["products"] == pytest.approx(1 / (UTILIZATION * 989e12))


def test_reference_rates_are_slower_than_the_limits():
    rates = reference_rates()
    assert Rates.from_json(rates.to_json()) == rates
    assert all(rates.seconds[kind] >= 0.99 / rates.operations for kind in OPERATIONS)


@pytest.mark.parametrize(
    ("text", "count", "name", "ram"),
    [
        ("8xH100", 8, "H100-SXM", None),
        ("1x4090,64GB", 1, "RTX-4090", 64 * 10**9),
        ("2 X rtx 3090 , 128 GB", 2, "RTX-3090", 128 * 10**9),
        ("4*a100", 4, "A100-80GB", None),
        ("1xepyc-9654,768GB", 1, "EPYC-9654", 768 * 10**9),
    ],
)
def test_hardware_is_read(text, count, name, ram):
    hardware = read_hardware(text)
    assert (hardware.count, hardware.device.name, hardware.ram_bytes) == (count, name, ram)
    assert name in hardware.text


def test_this_machine_is_a_hardware():
    hardware = read_hardware("this")
    assert hardware.device is None and hardware.count == 1
    assert hardware.computes_on == torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xH10", "unknown device 'H10'; did you mean 'H100'?"),
        ("1x4091", "did you mean '4090'?"),
        ("H100", "the count is missing; write 1xH100"),
        ("0xH100", "0 devices; write a count from 1 to"),
        ("99999xH100", "99999 devices"),
        ("axH100", "write a count and a device, such as"),
        ("8xH100,", "at most one size of RAM"),
        ("8xH100,1TB,2TB", "at most one size of RAM"),
        ("1xEPYC-9654", "the RAM of a machine with EPYC-9654 is missing; write 1xEPYC-9654,256GB"),
        ("1xM3-Max", "the RAM of a machine with M3-Max is missing"),
        ("this,64GB", "the RAM of this machine is not stated; write this alone"),
    ],
)
def test_a_wrong_hardware_is_named(text, message):
    with pytest.raises(RecipeError, match=r"^hardware ") as caught:
        read_hardware(text)
    assert message in str(caught.value)


def test_every_device_has_what_a_plan_needs():
    names = [name.lower() for device in devices().values() for name in (device.name, *device.other_names)]
    assert len(set(names)) == len(names)
    for device in devices().values():
        assert device.kind in ("gpu", "cpu", "apple") and device.rate("float32") <= device.rate("float16")
