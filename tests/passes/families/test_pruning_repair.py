"""The repair of one-shot pruning: the same for every pass, towards the least squares of its own mask."""

import pytest
import torch
from draws import correlated, random, seen_of
from transformers import AutoModelForCausalLM

import compress
from compress import ALPS, PASSES, Magnitude, SparseGPT, Wanda
from compress.errors import CalibrationError, NumericError
from compress.layers.linear import linears
from compress.passes.contract.layers import Layer
from compress.passes.contract.observers import CrossGram, Gram, InputNorm, Nothing, UnitGram
from compress.passes.contract.options import OptionError
from compress.passes.families.pruning import PruningPass

WIDTH = 40
PRUNERS = [step for step in PASSES.values() if issubclass(step, PruningPass)]
every_pruner = pytest.mark.parametrize("step", PRUNERS, ids=lambda step: step.key())


def a_layer(mask=None):
    return Layer("model.layers.0.mlp.up_proj", mask, torch.float32, lambda *_, **__: None)


def least_squares(weight, mask, rows):
    """The best values of each row's kept weights, by lstsq of the inputs."""
    found, rows = torch.zeros_like(weight, dtype=torch.float64), rows.double()
    for i, kept in enumerate(mask):
        target = rows @ weight[i].double()
        found[i, kept] = torch.linalg.lstsq(rows[:, kept], target[:, None]).solution[:, 0]
    return found.float()


def error(found, weight, rows):
    return float(((found - weight) @ rows.T).norm())


def test_there_are_several_and_all_have_the_option():
    assert {step.key() for step in PRUNERS} >= {"magnitude", "wanda", "ria", "sparsegpt"}
    repaired = {step.key() for step in PRUNERS if step().repair_rounds}
    assert repaired == {step.key() for step in PRUNERS if step.observes is not Nothing}


@pytest.mark.parametrize("pattern", ["row", "layer", "2:4", "4x1"])
@every_pruner
def test_with_enough_steps_it_is_the_least_squares_of_the_mask(step, pattern):
    rows, weight = correlated(), random(8, WIDTH, seed=1)
    made = step(pattern=pattern, repair=400, damping=1e-6)
    found = made.solve(weight, seen_of(rows, made.observer), a_layer())
    assert bool((found.weight[~found.mask] == 0).all())
    best = least_squares(weight, found.mask, rows)
    assert error(found.weight, weight, rows) < 1.01 * error(best, weight, rows)


@every_pruner
def test_the_mask_is_that_without_repair_and_the_error_is_less(step):
    rows, weight = correlated(), random(16, WIDTH, seed=1)
    plain, some = step(repair=0), step(repair=8)
    before = plain.solve(weight, seen_of(rows, plain.observer), a_layer())
    after = some.solve(weight, seen_of(rows, some.observer), a_layer())
    assert torch.equal(before.mask, after.mask) and before.zeros == after.zeros
    least_gain = 0 if step is ALPS else 0.03  # its iterations end near the optimum of the mask
    assert error(after.weight, weight, rows) < (1 - least_gain) * error(before.weight, weight, rows)


@every_pruner
def test_asymmetric_is_the_least_squares_of_the_uncompressed_output(step):
    """Kept weights map the compressed model's inputs X to the outputs W X~ of the uncompressed one."""
    rows, weight = correlated(), random(8, WIDTH, seed=1)
    others = rows + 0.5 * random(*rows.shape, seed=4)
    made = step(repair=400, damping=1e-6, error="asymmetric", alpha=1.0)
    seen = made.observer(WIDTH, torch.device("cpu"))
    seen.compare(rows, others)
    found = made.solve(weight, seen, a_layer())
    best, inputs = torch.zeros_like(weight), rows.double()
    for i, kept in enumerate(found.mask):
        target = others.double() @ weight[i].double()
        best[i, kept] = torch.linalg.lstsq(inputs[:, kept], target[:, None]).solution[:, 0].float()
    errors = [float((rows @ each.T - others @ weight.T).norm()) for each in (found.weight, best)]
    plain = step(repair=400, damping=1e-6).solve(weight, seen_of(rows), a_layer())
    assert errors[0] < 1.01 * errors[1] < float((rows @ plain.weight.T - others @ weight.T).norm())


def test_tokens_of_unit_length_count_alike():
    rows, weight = correlated(), random(8, WIDTH, seed=1)
    made, other = (Wanda(repair=400, damping=1e-6, normalize_tokens=unit) for unit in (True, False))
    found = made.solve(weight, seen_of(rows, made.observer), a_layer())
    wanted = other.solve(weight, seen_of(torch.nn.functional.normalize(rows), other.observer), a_layer())
    assert made.observer is UnitGram and torch.equal(found.weight, wanted.weight)


def test_tokens_of_unit_length_count_alike_beside_the_uncompressed_model():
    """Each token of both models is divided by the length of the compressed model's."""
    rows, weight = correlated(), random(8, WIDTH, seed=1)
    rows[3] = 0
    others, lengths = rows + 0.5 * random(*rows.shape, seed=4), rows.norm(dim=-1, keepdim=True)
    options = {"repair": 400, "damping": 1e-6, "error": "asymmetric"}
    made, other = (Wanda(**options, normalize_tokens=unit) for unit in (True, False))
    seen, plain = (step.observer(WIDTH, torch.device("cpu")) for step in (made, other))
    seen.compare(rows, others)
    plain.compare(torch.nan_to_num(rows / lengths), torch.nan_to_num(others / lengths, posinf=0, neginf=0))
    found, wanted = (step.solve(weight, each, a_layer()) for step, each in ((made, seen), (other, plain)))
    assert issubclass(made.observer, CrossGram) and not torch.equal(seen.cross, 0 * seen.cross)
    torch.testing.assert_close(found.weight, wanted.weight, rtol=1e-3, atol=1e-4)


@every_pruner
def test_what_was_pruned_before_stays_zero(step):
    rows, mask = correlated(), random(16, WIDTH, seed=2) > -1
    weight = random(16, WIDTH, seed=1) * mask
    made = step(repair=8)
    found = made.solve(weight, seen_of(rows, made.observer), a_layer(mask))
    assert not (found.mask & ~mask).any() and bool((found.weight[~found.mask] == 0).all())


def test_only_a_repair_asks_for_the_hessian():
    assert (Wanda(repair=0).observer, Wanda(repair=1).observer) == (InputNorm, Gram)
    assert (Magnitude().observer, Magnitude(repair=1).observer) == (Nothing, Gram)
    assert not Magnitude().requires.data and Magnitude(repair=1).requires.data


def test_the_hessian_gives_the_norms_of_the_inputs():
    rows = correlated()
    torch.testing.assert_close(seen_of(rows, Gram).norm, seen_of(rows, InputNorm).norm)


def test_magnitude_without_a_text_is_an_error_only_with_repair(pico_model):
    compress.apply(pico_model, [Magnitude(targets="*.0.mlp.*")])
    with pytest.raises(CalibrationError, match="need token ids"):
        compress.apply(pico_model, [Magnitude(targets="*.1.mlp.*", repair=4)])


def test_a_model_loses_less(pico, pico_ids):
    def logits(model):
        with torch.no_grad():
            return model(input_ids=pico_ids[4:]).logits

    found, owl = [], {"allocate": "owl"}
    for steps in ([], [Wanda(repair=0)], [Wanda()], [Wanda(repair=0, **owl)], [Wanda(**owl)]):
        model = AutoModelForCausalLM.from_pretrained(pico).eval()
        found.append(logits(compress.apply(model, steps, pico_ids[:4]) if steps else model))
        if steps:
            zeros = [float((layer.weight == 0).float().mean()) for n, layer in linears(model).items() if "layers" in n]
            assert sum(zeros) / len(zeros) == pytest.approx(0.5, abs=0.02)
    errors = [float((each - found[0]).norm()) for each in found[1:]]
    assert errors[1] < 0.95 * errors[0] and errors[3] < 0.95 * errors[2]


def test_experts_without_tokens_keep_their_values(tiny, ids):
    """Their inputs are assumed to be uncorrelated, so nothing can be compensated."""
    model = compress.apply(tiny("mixtral"), [Magnitude(repair=4)], ids(1, 2))
    kept = [layer for name, layer in linears(model).items() if "experts" in name]
    assert kept and all(torch.isfinite(layer.weight).all() for layer in kept)


def test_inputs_that_are_not_finite_are_an_error():
    rows = correlated()
    rows[3, 5] = float("nan")
    with pytest.raises(NumericError, match="holds NaN or infinity"):
        Magnitude(repair=2).solve(random(8, WIDTH), seen_of(rows, Gram), a_layer())


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (Wanda, {"repair": -1}, "repair: input should be greater than or equal to 0"),
        (Wanda, {"repair": 0, "damping": 0.1}, "damping has no effect with repair: 0; add repair: 3, or leave it"),
        (Wanda, {"repair": 0, "shrinkage": 0.2}, "shrinkage has no effect with repair: 0; add repair: 3, or leave it"),
        (Magnitude, {"damping": 0.1}, "damping has no effect with repair: 0; add repair: 3, or leave it out"),
        (Magnitude, {"error": "asymmetric"}, "error has no effect with repair: 0"),
        (Wanda, {"repair": 0, "normalize_tokens": True}, "normalize_tokens has no effect with repair: 0"),
        (SparseGPT, {"alpha": 0.5}, "alpha has no effect with error: symmetric"),
        (SparseGPT, {"weights": "int4", "repair": 8}, "repair has no effect with weights"),
        (Wanda, {"damping": 0}, "damping: input should be greater than 0"),
    ],
)
def test_a_wrong_option_says_what_is_right(step, options, message):
    with pytest.raises(OptionError, match=message):
        step(**options)
