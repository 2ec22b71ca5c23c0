"""A plan predicts the bytes that are written, names every module, and refuses what a run would refuse."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from schemes import coded, encoded, rounding

import compress
from compress import GPTQ, RTN, SmoothQuant, Wanda
from compress.checkpoint.formats import FORMATS
from compress.checkpoint.formats.compressed_tensors import CompressedTensors
from compress.checkpoint.opened import Weights
from compress.checkpoint.tensors import StoredTensors
from compress.errors import RecipeError, TargetError
from compress.layers.parts.codes import CodesPart
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS, IntGrid
from compress.pipeline.plan import plan


def written_bytes(folder) -> int:
    """The bytes of all tensors in a folder, counted without the package."""
    found = [load_file(path) for path in Path(folder).glob("*.safetensors")]
    return sum(t.numel() * t.element_size() for tensors in found for t in tensors.values())


# ---- bytes ----


# most formats refuse most grids
@settings(max_examples=60)
@given(
    name=st.sampled_from(list(FORMATS)),
    grid=st.sampled_from(list(GRIDS)),
    shape=st.tuples(st.integers(1, 20), st.integers(1, 150)),
    group_size=st.integers(1, 160) | st.sampled_from(["channel", "tensor"]),
    symmetric=st.booleans(),
    activations=st.sampled_from([None, "int8"]),
    storage=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_bytes_of_a_layer(name, grid, shape, group_size, symmetric, activations, storage):
    format_, kind = FORMATS[name], GRIDS[grid]
    symmetric = not kind.offset and (symmetric or not isinstance(kind, IntGrid))
    if kind.block > 1:
        shape, symmetric = (shape[0], kind.block * (1 + shape[1] % 2)), not kind.offset
    group_size = (
        GRIDS[grid].group_size or group_size
    )  # that of the grid, for grids that have one: a pass takes no other
    transforms = () if activations is None else (rounding(activations),)
    scheme = coded(grid, group_size, symmetric, *transforms, shape=shape)
    assume(format_.refuses(scheme) is None)
    part = CodesPart.of(quantize(torch.ones(shape), GRIDS[grid], group_size, symmetric, dtype=storage))
    part = format_.adapt_part(part.in_storage(storage))
    if format_.adapt(scheme) is None:
        wanted = shape[0] * shape[1] * storage.itemsize
    else:
        inputs = None if activations is None else GRIDS[activations]
        wanted = sum(t.numel() * t.element_size() for t in encoded(format_, part, inputs).values())
    assert format_.size_bytes(scheme, storage) == wanted


RUNS = {
    "group": ("compressed-tensors", [RTN(group_size=16)], {}),
    "short last group": ("compressed-tensors", [RTN(group_size=32, weights="int3", symmetric=False)], {}),
    "channel": ("compressed-tensors", [RTN(group_size="channel", weights="int8", activations="int8")], {}),
    "tensor": ("compressed-tensors", [RTN(group_size="tensor", weights="int8")], {}),
    "some dense": ("compressed-tensors", [RTN(group_size=16, targets="*.mlp.*")], {"dtype": "bfloat16"}),
    "native, ragged": ("native", [RTN(group_size=20, weights="nf4")], {}),
    "native, index": ("native", [GPTQ(group_size=20, act_order="group", symmetric=False)], {}),
    "dense": ("dense", [Wanda(pattern="2:4"), RTN(group_size=7)], {"dtype": "bfloat16"}),
}


# gpt2: transposed layers, biases, a tied head
ON_GPT2 = ["short last group", "some dense", "native, index", "dense"]


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "family"), [*((n, "llama") for n in RUNS), *((n, "gpt2") for n in ON_GPT2)])
def test_the_predicted_bytes_are_written(name, family, recipe, tiny_folder, tmp_path):
    format_, steps, save = RUNS[name]
    asked = recipe(*steps, model=tiny_folder(family), save={"format": format_, "verify": "own", **save})
    planned = plan(asked)
    compress.run(asked, tmp_path)
    assert written_bytes(tmp_path) == planned.checkpoint_bytes
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == planned.checkpoint_bytes


def test_the_dense_bytes_are_those_of_the_model(pico, recipe):
    assert plan(recipe(RTN())).dense_bytes == written_bytes(pico)
    assert plan(recipe(RTN(), save={"dtype": "bfloat16"})).dense_bytes == written_bytes(pico) // 2


def test_a_run_that_writes_other_bytes_than_planned_is_no_success(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(CompressedTensors, "size_bytes", lambda *_: 1)
    with pytest.raises(compress.errors.VerificationError, match="but the plan predicted"):
        compress.run(recipe(RTN(), save={"verify": "own"}), tmp_path)


# ---- layers ----


def test_every_module_is_listed_with_its_passes(recipe):
    rounding = [RTN(targets="*.down_proj", group_size=32), RTN(ignore=("*.down_proj", "*.up_proj"), group_size=32)]
    steps = [Wanda(targets="*.mlp.*"), SmoothQuant(ignore="*.up_proj"), *rounding]
    layers = {layer.name: layer for layer in plan(recipe(*steps)).layers}
    assert len(layers) == 21 and next(iter(layers)) == "model.layers.0.self_attn.q_proj"
    down, up, query = (layers[f"model.layers.2.{n}"] for n in ("mlp.down_proj", "mlp.up_proj", "self_attn.q_proj"))
    assert down.passes == ("passes[0] wanda", "passes[1] smoothquant", "passes[2] rtn")
    assert up.passes == ("passes[0] wanda",) and query.passes == ("passes[1] smoothquant", "passes[3] rtn")
    assert (down.shape, up.shape, query.shape) == ((128, 288), (288, 128), (128, 128))
    assert down.scheme == coded("int4", 32, shape=(128, 288)) and up.scheme.plain
    assert up.size_bytes == 288 * 128 * 4
    assert down.size_bytes == 128 * 288 // 2 + 128 * 9 * 4 + 16  # codes, scales, shape


def test_no_weight_of_a_block_is_read(recipe, monkeypatch):
    read = []
    real = StoredTensors.read_raw

    def recorded(self, names, reading=None):
        read.extend(names := list(names))
        return real(self, names, reading)

    monkeypatch.setattr(StoredTensors, "read_raw", recorded)
    monkeypatch.setattr(Weights, "bring", lambda *_: pytest.fail("a block was brought"))
    plan(recipe(Wanda(), GPTQ()))
    assert read and not [name for name in read if ".layers." in name]


def test_memory_grows_with_the_model_and_the_text(recipe):
    few = recipe(GPTQ(), calibration=compress.Calibration(sequences=1, length=64))
    many = recipe(GPTQ(), calibration=compress.Calibration(sequences=4096, length=64))
    hidden = 4095 * 64 * 128 * 4
    assert plan(many).memory_bytes - plan(few).memory_bytes > hidden


# ---- what is refused ----


@pytest.mark.parametrize(
    ("step", "save", "message"),
    [
        (
            RTN(targets="*.q_porj"),
            {},
            r"passes\[0\] rtn: targets pattern '\*\.q_porj' matches no.*did you mean 'q_proj'",
        ),
        (RTN(ignore="*.lm_head"), {}, r"ignore pattern '\*\.lm_head' matches no linear inside the blocks"),
        (RTN(ignore="*"), {}, "the targets and ignore patterns select none of the 21 linears"),
        (
            RTN(group_size=256),
            {},
            r"model\.layers\.0\.self_attn\.q_proj: group_size 256 is larger than its 128 inputs; use group_size: channel, or a smaller one",
        ),
        (RTN(group_size=256), {"format": "native"}, "group_size 256 is larger"),
        (
            RTN(group_size=100),
            {},
            r"model\.layers\.0\.self_attn\.q_proj: group_size 100 does not divide the 128 inputs; use 16, 32, 64, 128, channel",
        ),
        (
            RTN(weights="nf4"),
            {},
            "weights nf4 have no layout; use int2 to int8, fp8_e4m3, mxfp4, mxfp8 or nvfp4, or format: native",
        ),
        (GPTQ(act_order="group"), {}, "use act_order: static, or format: native"),
        (RTN(symmetric=False, group_size="tensor"), {}, "use group_size: channel, or symmetric: true"),
        (
            RTN(weights="int8", activations="fp8_e4m3"),
            {},
            "cannot be combined with these integer weights; use int8 .*native",
        ),
        (RTN(activations="int8"), {"format": "dense"}, "cannot state that activations are rounded; use format"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_remedy(step, save, message, recipe):
    with pytest.raises(TargetError, match=message) as caught:
        plan(recipe(step, save=save))
    assert str(caught.value).startswith("passes[0] ") and caught.value.exit_code == 2


def test_a_short_last_group_is_stored_in_groups_of_the_common_divisor(recipe):
    down = plan(recipe(RTN(group_size=112, targets="*.down_proj"))).layers[6]  # 112 and 288 have 16 in common
    assert down.size_bytes == 128 * 288 // 2 + 128 * 18 * 4 + 16


@settings(max_examples=60)
@given(width=st.integers(16, 600), group_size=st.integers(16, 600))
def test_the_group_sizes_that_an_error_names_work(width, group_size):
    format_ = FORMATS["compressed-tensors"]
    message = format_.refuses(coded("int4", group_size, shape=(8, width)))
    assume(message is not None)
    named = message.split("use ")[1].removesuffix(", or format: native").split(", ")
    assert named[-1] == "channel"
    for size in named:
        asked = "channel" if size == "channel" else int(size)
        assert format_.refuses(coded("int4", asked, shape=(8, width))) is None


def test_a_device_that_is_not_there(recipe, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        RecipeError, match="device: cuda does not exist: this machine has no CUDA.*write device: auto, or cpu"
    ):
        plan(recipe(RTN(), device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RecipeError, match="cuda:2 does not exist: this machine has only cuda:0 to cuda:1; write"):
        plan(recipe(RTN(), device="cuda:2"))
    assert plan(recipe(RTN(), device="cuda:1")).layers


def test_a_plan_of_a_path_is_that_of_its_recipe(recipe, tmp_path):
    asked = recipe(RTN())
    (tmp_path / "a.yaml").write_text(asked.to_yaml(), encoding="utf-8")
    assert plan(tmp_path / "a.yaml").to_json() == plan(str(tmp_path / "a.yaml")).to_json() == plan(asked).to_json()


def test_linears_with_a_forward_pass_of_their_own_are_named_by_the_plan(tiny_folder, tmp_path):
    ids = np.arange(32).reshape(2, 16)
    np.save(tmp_path / "ids.npy", ids)
    asked = compress.Recipe(
        model=tiny_folder("falcon"),
        passes=[compress.RTN(weights="int4", group_size=32)],
        calibration={"source": str(tmp_path / "ids.npy"), "sequences": 2, "length": 16},
        save={"format": "compressed-tensors"},
        eval=None,
    )
    assert any("linears override `forward`" in note for note in compress.plan(asked).notes)
    assert compress.run(asked, tmp_path / "out", progress=False).report["verified"]["own"] < 1e-3
