"""QLLM: the search on a case with a known optimum, updates that reduce the error of a block, and the refusals."""

import pytest
import torch
from draws import random
from tolerances import CROSSED_LOGITS

import compress
from compress import QLLM, RTN
from compress.errors import TargetError
from compress.layers.linear import CompressedLinear, linears
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.journal import Journal
from compress.passes.contract.options import OptionError
from compress.train.options import TrainingOptions

BLOCK = "model.layers.0"
GRID = {"weights": "int4", "group_size": 64, "activations": "int4"}


def test_an_outlier_is_split_and_equal_channels_are_merged(layer_of):
    """Channel 2 is 16 times as large as the others; 4 and 5, 8 and 9, ... are equal, so that merging them is exact."""
    rows, weight = random(64, 24), random(8, 24, seed=1)
    rows[:, 2] *= 16
    for even in range(4, 24, 2):
        rows[:, even + 1] = rows[:, even]
    step = QLLM(weights="int8", group_size="channel", activations="int4", extra=0.45)
    found, error, before = step.search(rows, {"a": weight}, rows.abs().amax(0), {"a": layer_of()})
    assert error < 0.6 * before
    split = found.first.bincount(minlength=24)
    assert split.argmax() == 2 and int(split[2]) > 4
    merged = (found.first != found.second).nonzero()[:, 0]
    assert torch.equal(found.second[merged], found.first[merged] + 1) and int(merged.min()) >= 4
    exact = (found(rows) @ found.adapted(weight).T - rows @ weight.T).norm() / (rows @ weight.T).norm()
    assert float(exact) < 1e-5
    rounded = quantize(found.adapted(weight), GRIDS["int8"]).dense()
    wanted = (step.rounding(found(rows)) @ rounded.T - rows @ weight.T).norm() / (rows @ weight.T).norm()
    assert error == pytest.approx(float(wanted), rel=1e-5)


def test_channels_stay_where_none_is_large(layer_of):
    rows, weight = random(64, 24).sign(), random(8, 24, seed=1)
    found, error, before = QLLM(**GRID).search(rows, {"a": weight}, rows.abs().amax(0), {"a": layer_of()})
    assert found is None and error == before


def test_updates_reduce_the_error_of_the_block(pico_model, pico_ids):
    before = {name: CompressedLinear.of(layer).weight.clone() for name, layer in linears(pico_model).items()}
    journal = Journal()
    steps = [QLLM(**GRID, targets=f"{BLOCK}.*", extra=0, rank=2, steps=6), RTN(**GRID, targets=f"{BLOCK}.*")]
    learned = compress.apply(pico_model, steps, pico_ids, journal=journal)
    (told,) = [e for e in journal.entries if e.message == "error of the block's output"]
    assert told.figures["learned"] < told.figures["start"] and told.figures["steps"] == 6
    layer = learned.get_submodule(f"{BLOCK}.mlp.up_proj")
    plain = quantize(before[f"{BLOCK}.mlp.up_proj"], GRIDS["int4"], 64).dense()
    assert layer.codes is not None and not torch.equal(layer.weight, plain)
    other = CompressedLinear.of(learned.get_submodule("model.layers.1.mlp.up_proj"))
    assert torch.equal(other.weight, before["model.layers.1.mlp.up_proj"])


def test_updates_have_the_rank_that_is_asked_for(pico_model, pico_ids):
    """The learned difference of a dense weight, before it is rounded, has rank 2."""
    name = f"{BLOCK}.mlp.up_proj"
    before = pico_model.get_submodule(name).weight.detach().clone()
    seen = {}

    class Watching(RTN):
        def codes(self, weight, seen_, layer):
            seen[layer.name] = weight.clone()
            return super().codes(weight, seen_, layer)

    options = {**GRID, "targets": name}
    steps = [QLLM(**options, extra=0, rank=2, steps=30, hold_out=0), Watching(**options)]
    compress.apply(pico_model, steps, pico_ids)
    values = torch.linalg.svdvals((seen[name] - before).double())
    assert values[1] > 1e-3 * values[0] > 0 and values[2] < 1e-5 * values[0]


@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": 1, "steps": 2}], ids=["split", "learned"])
def test_a_checkpoint_computes_what_was_compressed(recipe, tmp_path, options):
    steps = QLLM(**GRID, **options), RTN(**GRID)
    result = compress.run(recipe(*steps, save={"format": "native"}, eval=None), tmp_path / "out")
    assert result.report["verified"]["own"] <= CROSSED_LOGITS
    kinds = {t.kind for m in compress.load(tmp_path / "out")[0].modules() for t in getattr(m, "transforms", ())}
    assert kinds == {"reassembly", "rounding"}


# ---- refusals ----


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"weights": "int4"}, "it needs activations: int4 with a scale per token; write the same in both passes"),
        ({**GRID, "weights": "int8"}, "it needs weights: int4, group_size: 64, symmetric: true"),
        ({**GRID, "activations": "int8"}, "it needs activations: int4 with a scale per token"),
    ],
)
def test_a_later_pass_that_rounds_otherwise_is_refused(pico_model, pico_ids, later, message):
    with pytest.raises(TargetError, match=message):
        compress.apply(pico_model, [QLLM(**GRID), RTN(**later)], pico_ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra": 0, "rank": 0}, "extra: 0 and rank: 0 leave nothing to do; set one of them"),
        ({"train": "norms"}, "train must be weights: the low-rank updates of weights are what is learned"),
        ({"weight_rate": 1.0}, "weight_rate has no effect on low-rank updates, which learn at learning_rate"),
        ({"rank": 0, "epochs": 3}, "epochs has no effect with rank: 0, which learns nothing; leave it out"),
        ({"steps": 2, "epochs": 3}, "steps and epochs both set the length of training; leave out one of them"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        QLLM(**options)


def test_every_option_of_training_has_no_effect_without_updates():
    idle = QLLM(rank=0).without_effect()
    assert set(TrainingOptions.model_fields) - {"train"} <= set(idle)


def test_other_formats_refuse_channels_that_are_split(recipe, tmp_path):
    grid = {**GRID, "activations": "int8"}
    steps = QLLM(**grid, rank=0), RTN(**grid)
    message = "its input channels are split and merged when it runs, and format compressed-tensors cannot state this"
    with pytest.raises(TargetError, match=message):
        compress.run(recipe(*steps, save={"format": "compressed-tensors"}), tmp_path / "out")
