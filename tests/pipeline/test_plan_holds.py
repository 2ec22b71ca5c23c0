"""A plan without an error is a run without one, and what the run would refuse, the plan refuses, in the same words."""

import re

import pytest
from planned_chains import CHAINS

import compress
from compress import GPTQ, RTN, DropBlocks, Narrow, Rotate, SliceGPT
from compress.checkpoint.formats import FORMATS
from compress.errors import CompressError


def holds(asked, out) -> tuple[str, str] | None:
    """Run a recipe if its plan has no error; otherwise the run has one, too, and the errors are the result."""
    asked = asked.model_copy(update={"eval": compress.Evaluate(perplexity=())})
    try:
        planned = compress.plan(asked)
    except CompressError as error:
        with pytest.raises(type(error)) as caught:
            compress.run(asked, out)
        return str(error), str(caught.value)
    assert compress.run(asked, out).report["predicted"]["tensor_bytes"] == planned.checkpoint_bytes
    return None


@pytest.mark.few(83, slow=83)  # a prime number
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("format_", FORMATS)
def test_what_is_planned_runs_and_what_is_refused_is_refused_at_once(format_, chain, one_block, recipe, tmp_path):
    asked = recipe(*CHAINS[chain], model=one_block("llama"), save={"format": format_, "verify": "own"})
    if errors := holds(asked, tmp_path / "out"):
        assert errors[0] == errors[1] and not (tmp_path / "out").exists()


RESHAPED = {
    "rotated": Rotate(),
    "rotated when run": Rotate(online=["*.down_proj"]),
    "fewer blocks": DropBlocks(count=1),
    "fewer channels of feed-forward": Narrow(ffn=0.34, multiple=32),
    "fewer heads and hidden channels": Narrow(heads=0.5, hidden=0.5, multiple=16),
    "fewer components": SliceGPT(sparsity=0.5, multiple=16),
}
AFTERWARDS = {
    "alike": GPTQ(group_size=16),
    "v dense": RTN(group_size=16, overrides={"*.v_proj": {"weights": "none"}}),
    "up in 8 bits": RTN(group_size=16, overrides={"*.up_proj": {"weights": "int8"}}),
    "k left out": GPTQ(group_size=16, ignore=["*.k_proj"]),
}


SERVED = ("compressed-tensors", "gptq", "awq")


@pytest.mark.few(7, slow=37)  # prime numbers, so that no parameter keeps one value
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("after", AFTERWARDS)
@pytest.mark.parametrize("before", RESHAPED)
@pytest.mark.parametrize("family", ["pico", "gemma2", "qwen3-moe"])
def test_reshaped_models_are_quantized_as_planned(family, before, after, format_, pico, tiny_folder, recipe, tmp_path):
    steps, model = (RESHAPED[before], AFTERWARDS[after]), pico if family == "pico" else tiny_folder(family)
    errors = holds(recipe(*steps, model=model, save={"format": format_, "verify": "own"}), tmp_path / "out")
    if errors:  # of a structure that a pass refuses; relative errors depend on the weights
        planned, raised = (re.sub(r"relative error [\d.e-]+", "", error) for error in errors)
        assert planned == raised and not list((tmp_path / "out").glob("*.safetensors"))
    if family == "pico" and format_ in SERVED:
        assert (errors is not None) == (before == "rotated when run" or (format_, after) == ("awq", "up in 8 bits"))


def test_a_token_between_two_experts_does_not_decide_about_the_structure(tiny_folder, recipe, tmp_path):
    """With random weights, the narrow model routes one of the tokens of the rehearsal to another expert."""
    step = Narrow(heads=0.5, hidden=0.5, multiple=2)
    asked = recipe(step, model=tiny_folder("mixtral"), save={"format": "native"})
    assert holds(asked, tmp_path / "out") is None


@pytest.mark.few(5)
@pytest.mark.parametrize("format_", ["compressed-tensors", "native", "dense"])
@pytest.mark.parametrize("before", RESHAPED)
def test_a_scheme_follows_a_change_of_the_shape(before, format_, recipe, tmp_path):
    asked = recipe(RESHAPED[before], {"scheme": "W4A16"}, save={"format": format_, "verify": "own"})
    errors = holds(asked, tmp_path / "out")
    smaller = before in ("fewer heads and hidden channels", "fewer components")  # 64 channels, groups of 128
    online = before == "rotated when run" and format_ == "compressed-tensors"
    assert (errors is not None) == (smaller or online)


@pytest.mark.parametrize(
    ("format_", "chain", "message"),
    [
        (
            "dense",
            "scales",
            r"passes\[1\] distill: .*save.format dense stores no scales; use .*compressed-tensors.*, "
            r"or train: \[norms, weights\]",
        ),
        ("dense", "scales of blocks", r"passes\[1\] lkd: .*save.format dense stores no scales"),
        (
            "native",
            "scales that are no floats",
            r"train: scales matches no parameter: none of the targeted modules is packed with scales .* write train: \[norms\]",
        ),
        (
            "native",
            "weights",
            r"train: weights matches no parameter: none of the targeted modules is dense; write train: \[scales, norms\]",
        ),
        ("native", "scales of dense layers", r"train: scales matches no parameter"),
        (
            "compressed-tensors",
            "float zeros",
            r"passes\[0\] hqq: .*zero points of format compressed-tensors are integers",
        ),
        ("compressed-tensors", "low rank", r"passes\[1\] lorc: .*holds only codes"),
        ("dense", "inputs", r"passes\[0\] rtn: .*format dense cannot state that activations are rounded"),
    ],
)
def test_it_says_what_to_write_instead(format_, chain, message, one_block, recipe):
    with pytest.raises(CompressError, match=message):
        compress.plan(recipe(*CHAINS[chain], model=one_block("llama"), save={"format": format_, "verify": "own"}))
