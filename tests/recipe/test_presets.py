"""Presets: every one is a valid chain with a summary, expands in place, and keeps the model about as good."""

from importlib.resources import files

import pytest
from tolerances import CROSSED_LOGITS

import compress
from compress import Recipe
from compress.errors import RecipeError
from compress.recipe.presets import preset, presets
from compress.recipe.starts import quantize_data

WORDS = {
    "W8A8": ("int8", "int8"),
    "W8A16": ("int8", "none"),
    "W4A16": ("int4", "none"),
    "W4A16-asym": ("int4", "none"),
    "FP8": ("fp8_e4m3", "fp8_e4m3"),
    "FP8-dynamic": ("fp8_e4m3", "fp8_e4m3"),
    "NVFP4": ("nvfp4", "nvfp4"),
    "NVFP4A16": ("nvfp4", "none"),
    "MXFP4": ("mxfp4", "mxfp4"),
    "MXFP4A16": ("mxfp4", "none"),
    "MXFP8": ("mxfp8", "mxfp8"),
    "W4AFP8": ("int4", "fp8_e4m3"),
    "Q4_0": ("int4_signed", "none"),
    "Q4_1": ("uint4", "none"),
    "Q5_0": ("int5_signed", "none"),
    "Q5_1": ("uint5", "none"),
    "Q8_0": ("int8", "none"),
    "Q2_K": ("uint2_k", "none"),
    "Q3_K_S": ("int3_k", "none"),
    "Q3_K_M": ("int3_k", "none"),
    "Q3_K_L": ("int3_k", "none"),
    "Q4_K_S": ("uint4_k", "none"),
    "Q5_K_S": ("uint5_k", "none"),
    "Q4_K_M": ("uint4_k", "none"),
    "Q5_K_M": ("uint5_k", "none"),
    "Q6_K": ("int6_k", "none"),
    "IQ4_NL": ("iq4_nl", "none"),
    "IQ4_XS": ("iq4_xs", "none"),
    "IQ3_S": ("iq3_s", "none"),
    "IQ3_XXS": ("iq3_xxs", "none"),
    "IQ2_S": ("iq2_s", "none"),
    "IQ2_XS": ("iq2_xs", "none"),
    "IQ2_XXS": ("iq2_xxs", "none"),
}
GGUF = [name for name in WORDS if name.startswith(("Q", "IQ"))]
"""The weights and the inputs that a name promises."""


def test_each_is_a_file_that_begins_with_its_summary():
    stored = {path.name.removesuffix(".yaml") for path in files("compress.recipe").joinpath("presets").iterdir()}
    assert stored == set(presets()) == set(WORDS)
    for found in presets().values():
        assert found.summary.endswith(".") and len(found.summary) <= 120


@pytest.mark.parametrize("name", WORDS)
def test_a_name_keeps_its_promise(name):
    *_, last = Recipe(model="m", passes=[{"scheme": name}]).passes
    assert (last.weights, last.activations) == WORDS[name]
    assert last.symmetric == (not name.endswith("asym") and not last.weights.startswith("uint"))
    assert last.activation_scale == ("static" if name in ("FP8", "NVFP4") else "token")


def test_it_expands_where_it_stands():
    written = "model: m\npasses:\n  - wanda: {sparsity: 0.3}\n  - scheme: w4a16_ASYM\neval: null\n"
    recipe = Recipe.from_text(written)
    assert [step.key() for step in recipe.passes] == ["wanda", "awq", "gptq"]
    assert Recipe.from_text(recipe.to_yaml()) == recipe
    same = Recipe(model="m", passes=[compress.Wanda(sparsity=0.3), {"scheme": "W4A16-asym"}], eval=None)
    assert same == recipe


def test_a_mistake_after_a_preset_is_at_its_own_line():
    written = "model: m\npasses:\n  - scheme: W4A16-asym\n  - rtn:\n      weigths: int8\n"
    with pytest.raises(RecipeError, match=r"^f:5:7: passes\[2\] rtn weigths: unknown option; did you mean 'weights'"):
        Recipe.from_text(written, "f")
    with pytest.raises(
        RecipeError, match=r"^f:4:5: passes\[1\] gptq: the same layers would be quantized twice, by passes\[0\] gptq"
    ):
        Recipe.from_text("model: m\npasses:\n  - scheme: W4A16\n  - scheme: W8A16\n", "f")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("W4A61", r"^f:2:11: passes\[0\] scheme: scheme 'W4A61' is not known; did you mean 'W4A16'\?"),
        (
            "IQ1_S",
            r"^f:2:11: passes\[0\] scheme: scheme IQ1_S: this type of GGUF files is not written; use one of IQ2_S, IQ2_XS, ",
        ),
        ("[a]", r"^f:2:11: passes\[0\] scheme: scheme \['a'\] is not known; use one of FP8, "),
    ],
)
def test_an_unknown_preset_says_what_there_is(name, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.from_text(f"model: m\npasses: [{{scheme: {name}}}]\n", "f")


@pytest.mark.parametrize("name", ["Q2_K_S", "iq1_m", "TQ1_0", "BF16"])
def test_names_of_gguf_types_are_known_as_such(name):
    with pytest.raises(RecipeError, match="this type of GGUF files is not written; use one of IQ2_S, IQ2_XS, "):
        preset(name)


@pytest.mark.parametrize("name", GGUF)
def test_one_line_with_a_gguf_type_writes_a_gguf_file(name):
    recipe = Recipe.from_data(quantize_data("m", name))
    assert recipe.save.format == "gguf" and recipe.save.target().head in ("Q6_K", "Q8_0")


def types_of_layers(scheme, blocks):
    """The grid of each linear of a model with Llama's and with GPT-2's names, as (block, name) -> weights."""
    [step] = Recipe(model="m", passes=[{"scheme": scheme}]).passes
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    fused = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    grids = {}
    for index in range(blocks):
        for name in (*names, *fused):
            layer = f"model.layers.{index}.{name}"
            override = next((o for o in step.overrides if o.takes(layer)), None)
            applies = override is not None and (override.blocks is None or override.blocks.takes(index, blocks))
            grids[index, name] = override.options["weights"] if applies else step.weights
    return grids


@pytest.mark.parametrize(
    ("scheme", "base", "more", "blocks_of"),
    [
        ("Q3_K_S", "int3_k", "int3_k", {}),
        ("Q3_K_L", "int3_k", "uint5_k", {"v_proj": range(32), "o_proj": range(32), "down_proj": range(32)}),
        ("Q4_K_S", "uint4_k", "uint5_k", {"v_proj": range(4), "down_proj": range(4)}),
        ("Q5_K_S", "uint5_k", "uint5_k", {}),
    ],
)
def test_the_mixes_are_those_of_llama_cpp(scheme, base, more, blocks_of):
    """In a model of 32 blocks (llama.cpp, llama-quant.cpp, llama_tensor_get_type_impl)."""
    alike = {"attn.c_attn": "v_proj", "attn.c_proj": "o_proj", "mlp.c_fc": "up_proj", "mlp.c_proj": "down_proj"}
    for (index, name), grid in types_of_layers(scheme, 32).items():
        assert grid == (more if index in blocks_of.get(alike.get(name, name), ()) else base), (index, name)


def test_the_first_eighth_of_few_blocks_is_one_block():
    grids = types_of_layers("Q4_K_S", 3)
    assert [grids[index, "v_proj"] for index in range(3)] == ["uint5_k", "uint4_k", "uint4_k"]


def test_a_preset_is_not_changed_by_those_who_use_it():
    before = str(presets())
    Recipe.from_data({"model": "m", "passes": [{"scheme": "W4A16"}]})
    assert str(presets()) == before


@pytest.mark.few(2, slow=8)
@pytest.mark.parametrize("name", WORDS)
def test_it_compresses_and_others_read_it(name, pico, texts, tmp_path):
    texts = {"calibration": {"source": texts["calibration"], "sequences": None, "length": None}}
    own = name == "W4A16-asym"  # pico's widths need two group sizes, which transformers cannot load with zero points
    save = {"verify": "own"} if own else dict(preset(name).save)
    dtype = "bfloat16" if name in ("NVFP4", "MXFP4", "MXFP8") else "auto"  # the one in which transformers runs them
    settings = {"save": save, "dtype": dtype, "eval": {"windows": 4, "length": 128}}
    recipe = Recipe(model=pico, passes=[{"scheme": name}], **settings, **texts)
    report = compress.run(recipe, tmp_path, progress=False).report
    assert report["verified"]["own"] <= CROSSED_LOGITS
    assert (report["verified"]["transformers"] is None) == own
    quality = report["perplexity"][0]
    worse = 1.15 if name in ("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "NVFP4", "MXFP4") else 1.05
    assert quality["compressed"]["perplexity"] < worse * quality["base"]["perplexity"]
