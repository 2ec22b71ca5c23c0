"""The memory that a plan tells: every part of it worked out by hand, and observers against the tensors that they hold."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import compress
from compress import AWQ, GPTQ, LKD, RTN, Calibration, Evaluate, Finetune, SignRound, SmoothQuant, Wanda
from compress.checkpoint.opening import open_model
from compress.checkpoint.save import outside_state
from compress.layers.scheme import LayerScheme
from compress.numerics.linalg import Regularization
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import CrossGram, Gram, InputAbsMax, InputNorm, Nothing, OutlierFrequency
from compress.passes.contract.samples import Rows, Sample
from compress.passes.quantize.awq import Moments
from compress.pipeline.footprint import LINEAR_BYTES, Footprint
from compress.pipeline.plan import plan
from compress.pipeline.resolve import layer_shapes, resolve

# pico: 3 blocks in float32, hidden 128, feed-forward 288; the text: 8 sequences of 64 tokens in batches of 4
TOKENS, BATCH = 8 * 64, 4 * 64
STATES = TOKENS * 128 * 4
STOPPED = TOKENS * 4 * (2 * 128 + 288)  # the residual, the output of the norm, the input of down
FORWARD = BATCH * 4 * (3 * 128 + 3 * 288)
INPUTS = (128, 128, 288)  # of attention (its output is taken to read the same), of gate and up, and of down
# the upper triangle in float64, in slabs of up to 256 rows, and the factor in float32
SLABS = {128: 128 * 128, 288: 256 * 288 + 32 * 32}
SAMPLED = 2 * 64  # rows of a sample: 64 of each batch
OBSERVED = {w: 8 * SLABS[w] + 4 * w * w + SAMPLED * w * 4 for w in (128, 288)}
CROSS = (8 + 4) * 288 * 288
SAMPLES = sum(SAMPLED * w * 4 for w in INPUTS)
FACTOR = 6 * 288 * 288  # the factorization of the Hessian of down, without the factor
REFINED = 4 * (288 * 288 + 4 * 128 * 288)
# a working copy of the weight, ratios and errors of 128 columns, the weight in its order, and its codes
SWEPT = 4 * 128 * 288 + 4 * 128 * (288 + 2 * 128) + 7 * 128 * 288
SOLVER = max(4 * 4 * 128 * 288, FACTOR, SWEPT, REFINED)  # or copies of the weight of down, as it is installed
TEXT = Calibration(sequences=8, length=64, batch=4)


@pytest.fixture
def footprint(recipe, pico):
    """footprint(passes, store_bytes): the estimate for pico, whose layers stay dense as far as it is told."""
    opened = open_model(str(pico))

    def make(*passes, store_bytes=1 << 30, **options):
        asked = recipe(*passes, **{"calibration": TEXT, **options})
        resolved = resolve(asked, opened)
        return Footprint(resolved, lambda count, name: LayerScheme(resolved.shapes[name]), store_bytes)

    return make


def dense(opened):
    """Bytes of the linears of one block in float32."""
    return 4 * sum(r * w for name, (r, w) in layer_shapes(opened).items() if ".layers.0." in name)


MODULES = LINEAR_BYTES * 3 * 7  # of the linears of all blocks


def test_a_pass_in_lockstep(footprint):
    found = footprint(GPTQ())
    assert found.peak_bytes() == STATES + STOPPED + OBSERVED[288] + SOLVER + MODULES + dense(found.opened)


def test_a_pass_that_is_not_sequential_stops_no_batch(footprint):
    flat = footprint(GPTQ(true_sequential=False))
    weights, more = dense(flat.opened), OBSERVED[128] - 4 * 128**2  # only one input has its factor
    held = [OBSERVED[288], OBSERVED[288] + more, OBSERVED[288] + 2 * more]
    attention = 4 * sum(r * w for name, (r, w) in layer_shapes(flat.opened).items() if ".layers.0.self_attn" in name)
    compressed = [4 * 128 * 288, 4 * 128 * 288 + attention, weights]  # of down, of attention too, of all
    for inputs_at_once, (statistics, freed) in enumerate(
        zip([*held, held[-1]], [*compressed, weights], strict=True), 1
    ):
        # statistics of inputs that are observed together are freed as their layers are compressed
        both = statistics + weights - min(statistics, freed)
        needed = STATES + both + max(SOLVER, FORWARD) + MODULES
        assert replace(flat, inputs_at_once=inputs_at_once).peak_bytes() == needed
    assert replace(flat, inputs_at_once=3).peak_bytes() == flat.peak_bytes()
    norms = sum(8 * w for w in INPUTS)
    wanda = footprint(Wanda(repair=0))
    assert wanda.peak_bytes() == STATES + FORWARD + MODULES + max(norms + SAMPLES, weights)


def test_the_uncompressed_model_runs_beside(footprint):
    more = footprint(GPTQ(error="asymmetric")).peak_bytes() - footprint(GPTQ()).peak_bytes()
    assert (
        more == 2 * STATES + STOPPED + CROSS
    )  # its activations before and after the block, and inside; a second matrix


def test_what_is_recomputed_waits_nowhere(footprint):
    held = footprint(GPTQ())
    assert held.recomputing_steps() == {"passes[0] gptq": 3}
    again = max(SOLVER, FORWARD) - SOLVER  # of a batch from the start of the block
    assert held.peak_bytes() - replace(held, recomputes=True).peak_bytes() == STOPPED - again
    compared = footprint(GPTQ(error="asymmetric"))  # the uncompressed model runs along
    assert not compared.recomputing_steps() and replace(compared, recomputes=True).peak_bytes() == compared.peak_bytes()


def test_beyond_its_limit_a_store_is_in_files(footprint):
    wanda = footprint(Wanda()).peak_bytes() - footprint(Wanda(), store_bytes=1000).peak_bytes()
    assert wanda == STATES - 1000
    # in lockstep what was read from files is held until its batch goes on
    assert footprint(GPTQ()).peak_bytes() == footprint(GPTQ(), store_bytes=1000).peak_bytes()


def test_without_data_one_sequence_goes_along(footprint):
    many = Calibration(sequences=4000, length=64, batch=4)
    assert footprint(RTN()).tokens == footprint(RTN(), calibration=many).tokens == 64
    assert footprint(GPTQ(), calibration=many).tokens == 4000 * 64


def test_what_a_block_that_learns_holds(footprint):
    adam, sign = (footprint(SignRound(optimizer=name)).peak_bytes() for name in ("adam", "sign"))
    weights = dense(footprint(RTN()).opened) // 4
    assert adam - sign == 2 * 4 * weights  # two moments
    own = footprint(SignRound(error="symmetric")).peak_bytes()
    assert adam - own == 2 * STATES - STATES  # two stores of the uncompressed model; or a list of what is aimed at
    options = {"train": "weights", "batch": 1}
    lkd, lion = (footprint(Wanda(), LKD(**options, optimizer=o)).peak_bytes() for o in ("adamw", "lion"))
    assert lkd - lion == 4 * weights


def test_the_whole_model_is_there_for_passes_that_train_it(footprint):
    small, whole = footprint(Finetune()), footprint(Finetune(optimizer="lion"))
    assert small.peak_bytes() - whole.peak_bytes() == 3 * dense(small.opened)


def test_ids_in_a_file_are_counted_there(recipe, tmp_path):
    np.save(tmp_path / "ids.npy", np.zeros((8, 64), dtype=np.int64))
    given = Calibration(source=str(tmp_path / "ids.npy"), sequences=None, length=None)
    assert (
        plan(recipe(AWQ(), RTN(), calibration=given)).memory_bytes
        == plan(recipe(AWQ(), RTN(), calibration=TEXT)).memory_bytes
    )
    missing = given.model_copy(update={"source": str(tmp_path / "none.npy")})
    with pytest.raises(compress.errors.CalibrationError, match="cannot read"):
        plan(recipe(GPTQ(), calibration=missing))


@pytest.mark.parametrize(
    ("name", "sequences", "expected"),
    [
        ("a.txt", 8, 0),  # drawn from pieces, which other needs hold as well
        ("a.txt", 1024, 6 * (64 * 1024 * 64 - 2**21)),
        ("a.txt", 10**6, 6 * (30_000_000 - 2**21)),
        ("a.json", 8, 4 * 30_000_000),
    ],
)
def test_the_text_of_the_calibration_is_counted(name, sequences, expected, footprint, tmp_path):
    with (tmp_path / name).open("wb") as file:
        file.truncate(30_000_000)
    given = Calibration(source=str(tmp_path / name), sequences=sequences, length=64)
    found = footprint(GPTQ(), calibration=given, eval=None).needs()
    assert [need.parts["the text"] for need in found if "the text" in need.parts] == [expected]


def test_the_text_of_the_evaluation_is_counted(footprint, tmp_path):
    with (tmp_path / "a.txt").open("wb") as file:
        file.truncate(30_000_000)
    for windows, expected in ((None, 24 * 10_000_000), (1000, 24 * 1000 * 64)):
        asked = Evaluate(perplexity=(str(tmp_path / "a.txt"),), agreement=(), windows=windows, length=64)
        found = footprint(RTN(), eval=asked).needs()
        assert [need.parts["the text"] for need in found if "the text" in need.parts] == [expected]


def test_views_of_a_file_are_not_counted(pico, pico_model, in_memory):
    outside = sum(t.numel() for t in outside_state(open_model(str(pico))).values())
    for dtype, held in (("float32", 0), ("bfloat16", 2 * outside)):
        opened = open_model(str(pico), dtype)
        assert opened.resident_bytes(outside_state(opened)) == held
    opened = in_memory(pico_model)
    assert opened.resident_bytes(outside_state(opened)) == 4 * outside


def test_weights_that_are_stored_narrower_are_copies(footprint):
    found, narrow = footprint(RTN()), footprint(RTN(), save={"dtype": "bfloat16"})
    assert (found.held(found.outside), narrow.held(narrow.outside)) == (
        0,
        sum(t.nbytes for t in found.outside.values()),
    )


@pytest.mark.parametrize(
    ("options", "new"),
    [
        ({}, 7 * 16),  # int4 is stored in the words of the layers, with the shape of each weight in two numbers
        ({"weights": "int8", "group_size": "channel", "activations": "int8"}, 3 * 128 * 128 + 3 * 128 * 288),
    ],
)
def test_the_stored_form_of_a_block_is_counted_where_it_is_no_view(options, new, recipe):
    needs = plan(recipe(RTN(**options), calibration=TEXT)).fit.needs
    assert [need.parts["its stored form"] for need in needs if need.where.startswith("writing")] == [new]


EXPERTS, CHOSEN, WIDTH = 32, 2, 64
MIXTURE_TOKENS = 4 * 32  # in batches of two sequences


@pytest.fixture
def mixture(recipe, tmp_path):
    """mixture(pass, *later passes, **calibration): the parts of a pass in the only block of a mixture, where everything is 64 wide."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "moe_intermediate_size": WIDTH, "vocab_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen3MoeConfig(**sizes, **heads, num_experts=EXPERTS, num_experts_per_tok=CHOSEN)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(32, size=(4, 32)))

    def parts(step, *later, **options):
        text = Calibration(source=str(tmp_path / "ids.npy"), sequences=None, length=None, batch=2, **options)
        asked = recipe(step, *later, model=tmp_path / "model", calibration=text, eval=None, save={"verify": "own"})
        needs = {need.where: need.parts for need in plan(asked).fit.needs}
        return needs[f"passes[0] {step.key()} on model.layers.0"]

    return parts


def test_inputs_of_experts_are_sampled_from_the_tokens_that_they_get(mixture):
    rows = 2 * 64 + CHOSEN * MIXTURE_TOKENS  # of attention in two batches; of all experts together
    statistics = 4 * WIDTH * (1 + EXPERTS)  # the largest magnitudes
    solution = 4 * 4 * WIDTH**2  # more than what the probe needs beyond the weights that are replaced later
    expected = statistics + 4 * rows * WIDTH + solution
    assert mixture(SmoothQuant(), RTN())["the pass"] == expected
    searched = mixture(SmoothQuant(alpha="search"), RTN())["the pass"]
    assert searched == expected + 4 * rows * WIDTH  # the observer samples in float32 as well


def test_links_are_searched_before_linears_are_replaced():
    size = ProblemSize(10, 0, 0, 0, 0, 0, itemsize=2, probed=100, forward_bytes=50)
    links = 4 * 10 + 3 * 4 * 100  # a copy in float32, and the inputs of three forward passes
    assert size.beginning_bytes == links
    assert replace(size, replaced_bytes=200).beginning_bytes == links - 200
    assert replace(size, replaced_bytes=5000).beginning_bytes == 0
    assert replace(size, itemsize=4, probed=1).beginning_bytes == 50


def test_gradients_of_experts_pass_only_the_tokens_that_they_get(mixture):
    routed, every = (mixture(SignRound(), experts=name)["the pass"] for name in ("routed", "all"))
    in_and_out = 3 * 2 * WIDTH  # of an expert, per token
    assert every - routed == 4 * 2 * 32 * (EXPERTS - CHOSEN) * in_and_out


def test_losses_are_computed_in_chunks_beside_the_logits(footprint):
    scored = Evaluate(perplexity=("embedded",), windows=2, length=16)
    (need,) = [need for need in footprint(RTN(), eval=scored).needs() if need.where == "evaluation"]
    logits = 4 * 16 * 1024  # fewer than a chunk
    assert need.parts["logits of a text"] == logits
    assert need.parts["temporaries of the loss"] == 3 * logits  # the base model, whose weights are not packed


def tensor_bytes(value) -> int:
    """Bytes of all tensors in an observer's attributes."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(tensor_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(tensor_bytes, value))
    return tensor_bytes(vars(value)) if isinstance(value, Sample) else 0


@pytest.mark.parametrize("kind", [Nothing, InputNorm, InputAbsMax, OutlierFrequency, Gram, CrossGram, Rows, Moments])
def test_observers_hold_what_they_say(kind):
    rows = torch.randn(8 * 64, 12)
    seen = kind(12, torch.device("cpu"), *([1.0] if kind is OutlierFrequency else []))
    for part in rows.split(64):
        seen.compare(part, part + 1) if kind is CrossGram else seen.update(part)
    if kind is CrossGram:
        seen.shift(Regularization())
    if kind is Gram:
        seen.factor(Regularization())
    assert tensor_bytes(vars(seen)) == kind.memory_bytes(12)
