"""A size as the budget of a checkpoint: what it leaves for the layers, which types the ends get, and the file's bytes."""

import re

import pytest
from gguf_families import gguf_model
from transformers import AutoTokenizer

import compress
from compress import RTN, Recipe
from compress.checkpoint.containers.gguf import FILE
from compress.errors import RecipeError, TargetError
from compress.layers.linear import CompressedLinear, linears
from compress.recipe.starts import quantize_line

PLAIN = [{"weights": name, "group_size": 32} for name in ("int4_signed", "int5_signed", "int8")]
WIDE = [{"weights": "uint4_k", "fallback": "int4_signed"}, {"weights": "int6_k", "fallback": "int8"}]


def stored_grids(folder):
    """Name of each layer with codes -> the name of its grid."""
    layers = linears(compress.load(folder)[0]).items()
    return {name: m.scheme.codes.grid.name for name, m in layers if isinstance(m, CompressedLinear) and m.quantized}


def of_size(size, choices=PLAIN, **options):
    return RTN(allocate={"size": size, "choices": choices, "by": "sensitivity", **options})


def sized(recipe, size, choices=PLAIN, **save):
    return recipe(of_size(size, choices), save={"format": "gguf", **save}, eval=None)


@pytest.mark.parametrize("size", ["450KB", 500_000])
def test_the_file_is_at_most_as_large_and_near_it(size, recipe, tmp_path):
    compress.run(sized(recipe, size), tmp_path / "out", progress=False)
    target = 450_000 if size == "450KB" else size
    assert 0.98 * target < (tmp_path / "out" / FILE).stat().st_size <= target
    grids = set(stored_grids(tmp_path / "out").values())
    assert len(grids) > 1
    assert any("types" in note or "bits per weight" in note for note in compress.plan(sized(recipe, size)).notes)


def test_the_plan_states_the_size(recipe):
    planned = compress.plan(sized(recipe, "450KB"))
    assert planned.target_bytes == planned.to_json()["target_bytes"] == 450_000
    assert compress.plan(recipe(RTN(weights="int8"), save={"format": "dense"}, eval=None)).target_bytes is None


def test_an_impossible_size_names_the_smallest_and_the_largest_one(recipe):
    with pytest.raises(TargetError, match=r"size 100KB is too small: the smallest choices take 0\.\d+ MB, .* or more"):
        compress.plan(sized(recipe, "100KB"))
    with pytest.raises(
        TargetError, match=r"size 9MB is more than the 0\.\d+ MB that the largest choices take"
    ) as error:
        compress.plan(sized(recipe, "9MB"))
    largest = re.search(r"the (0\.\d+) MB", str(error.value))[1]
    assert compress.plan(sized(recipe, f"{largest}MB")).target_bytes == round(1e6 * float(largest))


@pytest.mark.parametrize(("size", "head"), [("600KB", "Q6_K"), ("390KB", "Q3_K")])
def test_the_types_of_the_ends_suit_the_layers(size, head, recipe):
    notes = " ".join(compress.plan(sized(recipe, size)).notes)
    assert re.search(rf"bits per weight; embedding and head {head}", notes)


def test_stated_types_of_the_ends_stay(recipe):
    notes = " ".join(compress.plan(sized(recipe, "900KB", embedding="Q8_0", head="dense")).notes)
    assert "embedding and head dense" in notes


def test_layers_whose_width_a_type_does_not_fit_get_its_fallback(recipe, tmp_path):
    """No width of the pico model is a multiple of 256."""
    compress.run(sized(recipe, "460KB", WIDE), tmp_path / "out", progress=False)
    grids = set(stored_grids(tmp_path / "out").values())
    assert grids == {"int4_signed", "int8"}


def test_experts_stay_alike_and_other_layers_are_decided_alone(pico, recipe, tmp_path):
    gguf_model("qwen2-moe").save_pretrained(tmp_path / "mixture")
    AutoTokenizer.from_pretrained(pico).save_pretrained(tmp_path / "mixture")
    asked = recipe(
        of_size("250KB"), model=str(tmp_path / "mixture"), save={"format": "gguf", "verify": "own"}, eval=None
    )
    compress.run(asked, tmp_path / "out", progress=False)
    grids = stored_grids(tmp_path / "out")
    for number in range(4):
        for kind in ("gate_proj", "up_proj", "down_proj"):
            experts = "model.layers.1.mlp.experts"
            assert grids[f"{experts}.{number}.{kind}"] == grids[f"{experts}.0.{kind}"]
    assert (tmp_path / "out" / FILE).stat().st_size <= 250_000


def test_one_pass_has_the_size(recipe):
    half = {"targets": ["*.mlp.*"]}, {"targets": ["*.self_attn.*"]}
    budget = {"size": "450KB", "choices": PLAIN, "by": "sensitivity"}
    passes = [RTN(allocate=budget, **targets) for targets in half]
    with pytest.raises(TargetError, match=r"passes\[1\] rtn allocate: passes\[0\] rtn has a size already; write bits"):
        compress.plan(recipe(*passes, save={"format": "gguf"}, eval=None))


def test_a_line_with_a_size(pico):
    data, folder = quantize_line(pico, "GGUF", None, None, "450KB")
    step = Recipe.from_data(data).passes[0]
    assert (
        step.allocate.size == "450KB"
        and {"weights": "iq4_nl", "group_size": 32} in data["passes"][0]["gptq"]["allocate"]["choices"]
    )
    assert data["save"] == {"format": "gguf"} and "450KB" in str(folder)
    plain, _ = quantize_line(pico, None, None, 64, "700KB")
    assert Recipe.from_data(plain).passes[0].allocate.size == "700KB" and "save" not in plain


@pytest.mark.parametrize(
    ("scheme", "bits", "size", "message"),
    [
        ("gguf", None, None, "scheme gguf: needs the size of the file, such as size='90MB'"),
        (
            "Q4_K_M",
            None,
            "90MB",
            "size: scheme Q4_K_M has fixed bits; write scheme gguf for a file of llama.cpp, or no",
        ),
        (None, 4, "90MB", "size: chooses the bits of each layer; leave bits out"),
    ],
)
def test_a_line_that_means_nothing(scheme, bits, size, message):
    with pytest.raises(RecipeError, match=message):
        quantize_line("m", scheme, bits, None, size)
