"""Sparse checkpoints: planned and written bytes, equal logits and masks after reloading, resume, damage."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tolerances import LOGITS, near
from transformers import AutoModelForCausalLM

import compress
from compress import GPTQ, RTN, Calibration, Recipe, Save, SmoothQuant, Wanda
from compress.errors import ModelError, NumericError, RecipeError
from compress.layers.linear import CompressedLinear, linears
from compress.layers.parts.sparse import SparsePart
from compress.passes.contract.journal import Journal
from compress.passes.contract.layers import Layer
from compress.pipeline.finish import finish
from compress.pipeline.prepare import prepare
from compress.pipeline.run import compress as work

UP, QUERY = "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj"


def written_bytes(folder) -> int:
    found = [load_file(path) for path in Path(folder).glob("*.safetensors")]
    return sum(t.numel() * t.element_size() for tensors in found for t in tensors.values())


def run_and_watch(recipe, folder):
    """(report, name -> (mask, weight) of every masked linear, as the run has them when it has written a block)."""
    found, journal = {}, Journal()
    job = prepare(recipe, folder, False, journal)

    def hear(entry):
        if entry.kind == "block":
            for name, layer in linears(job.opened.model.get_submodule(entry.message)).items():
                if isinstance(layer, CompressedLinear) and layer.mask is not None:
                    found[f"{entry.message}.{name}"] = (layer.mask.clone(), layer.weight.clone())

    journal.listeners.append(hear)
    work(job)
    return finish(job).report, found


RUNS = {
    "2:4": ([Wanda(pattern="2:4")], {"dtype": "bfloat16"}, "2:4"),
    "3:7, ragged": (
        [Wanda(pattern="3:7")],
        {},
        None,
    ),  # 9 bits of indexes for 7 columns: a bitmask, but for whole words
    "1:7, ragged": ([Wanda(pattern="1:7")], {}, "1:7"),
    "row": ([Wanda(sparsity=0.6)], {"dtype": "bfloat16"}, "bitmask"),
    "layer": ([Wanda(sparsity=0.55, pattern="layer")], {"dtype": "float16"}, "bitmask"),
    "few of a row": ([Wanda(sparsity=0.9)], {}, None),  # 'N of the width' where that is smaller than a bitmask
    "2:4 and int4": ([Wanda(pattern="2:4"), GPTQ(group_size=20)], {}, "2:4"),
    "row and int3": ([Wanda(sparsity=0.6), RTN(weights="int3", symmetric=False, group_size=16)], {}, "bitmask"),
    "2:4 and nf4": (
        [Wanda(pattern="2:4"), SmoothQuant(), RTN(weights="nf4_dq", group_size=16)],
        {"dtype": "bfloat16"},
        "2:4",
    ),
    "some layers": ([Wanda(pattern="2:4", targets="*mlp*"), RTN(weights="int8", group_size="channel")], {}, None),
    "all masks": ([Wanda(sparsity=0.05), RTN(group_size=16)], {"sparse": "always"}, "bitmask"),
    "too few": ([Wanda(sparsity=0.05), RTN(group_size=16)], {}, "plain"),
    "off": ([Wanda(pattern="2:4"), RTN(group_size=16)], {"sparse": "off"}, "plain"),
}


# gpt2: transposed layers, biases, a tied head
@pytest.mark.few(4, slow=12)
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RUNS)
def test_the_checkpoint_is_as_planned_and_reads_back_bit_for_bit(name, family, recipe, one_block, tmp_path):
    steps, save, stored = RUNS[name]
    asked = recipe(*steps, model=one_block(family), save={"format": "native", **save})
    planned = compress.plan(asked)
    report, before = run_and_watch(asked, tmp_path)
    assert written_bytes(tmp_path) == planned.checkpoint_bytes == report["size"]["tensor_bytes"]
    assert report["predicted"]["tensor_bytes"] == planned.checkpoint_bytes
    touched = [layer for layer in planned.layers if layer.passes]
    bits = 8 * sum(layer.size_bytes for layer in touched) / sum(layer.shape[0] * layer.shape[1] for layer in touched)
    assert report["size"]["bits_per_weight"] == bits
    assert report["verified"]["own"] <= LOGITS
    model, _ = compress.load(tmp_path)
    assert before
    for layer_name, (mask, weight) in before.items():
        layer = model.get_submodule(layer_name)
        assert torch.equal(layer.weight.float(), weight.float())
        assert not bool(layer.weight[~mask].any())
        if stored == "plain":
            assert not isinstance(layer, CompressedLinear) or layer.mask is None
        else:
            assert torch.equal(layer.mask, mask)
            assert layer.scheme.parts[0].sparsity.kept == int(mask.sum())
            assert stored is None or layer.scheme.parts[0].sparsity.text == stored


def test_two_of_four_is_smaller_than_the_dense_model_by_the_bits_it_saves(recipe, tmp_path):
    size = {}
    for name, steps in {"floats": [Wanda(pattern="2:4")], "codes": [Wanda(pattern="2:4"), GPTQ(group_size=32)]}.items():
        asked = recipe(*steps, save={"format": "native", "dtype": "bfloat16"})
        size[name] = compress.run(asked, tmp_path / name).report["size"]["bits_per_weight"]
    assert size == {"floats": 8 + 1, "codes": 2 + 1 + 16 / 32}


@pytest.mark.slow
def test_a_plain_export_loads_with_transformers_with_zeros_in_place(recipe, tmp_path):
    steps = [Wanda(pattern="2:4"), RTN(group_size=32)]
    native = compress.run(recipe(*steps, save={"format": "native"}), tmp_path / "native").folder
    dense = compress.run(recipe(*steps, save={"format": "dense"}), tmp_path / "dense").report
    assert dense["verified"]["transformers"] <= LOGITS
    ours, _ = compress.load(native)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    for name, layer in ours.named_modules():
        if isinstance(layer, CompressedLinear):
            weight = theirs.get_submodule(name).weight
            assert torch.equal(weight, layer.weight) and not bool(weight[~layer.mask].any())
    ids = torch.arange(32)[None]
    with torch.no_grad():
        assert near(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)


def test_kept_weights_stay_alone_and_get_the_dtype_that_is_computed_in(recipe, tmp_path):
    compress.run(recipe(Wanda(pattern="2:4"), save={"format": "native"}), tmp_path)
    exact, half = compress.load(tmp_path)[0], compress.load(tmp_path, dtype="bfloat16")[0]
    layer = exact.get_submodule(UP)
    assert [type(part) for part in layer.all_parts] == [SparsePart]
    assert set(layer.tensors()) == {"weight_values", "weight_kept"} and layer.all_parts[0].dtype == torch.float32
    assert half.get_submodule(UP).all_parts[0].dtype == torch.bfloat16
    assert torch.equal(half.get_submodule(UP).weight, layer.weight.bfloat16())
    with torch.no_grad():
        assert half(input_ids=torch.arange(8)[None]).logits.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "steps", [[Wanda(pattern="2:4")], [Wanda(sparsity=0.5), GPTQ(group_size=32)]], ids=["floats", "codes"]
)
def test_a_run_that_was_stopped_ends_with_the_same_bytes(steps, recipe, tmp_path, stop):
    asked = recipe(*steps, save={"format": "native"})
    whole = compress.run(asked, tmp_path / "whole").report
    stop(asked, tmp_path / "stopped")
    resumed = compress.run(asked, tmp_path / "stopped").report
    assert resumed["checkpoint_sha256"] == whole["checkpoint_sha256"]
    assert resumed["verified"]["own"] <= LOGITS


@pytest.mark.slow
def test_passes_that_follow_on_a_loaded_checkpoint_keep_its_masks(recipe, tmp_path):
    compress.run(recipe(Wanda(sparsity=0.5), save={"format": "native"}), tmp_path)
    model, _ = compress.load(tmp_path)
    masks = {name: layer.mask for name, layer in model.named_modules() if isinstance(layer, CompressedLinear)}
    assert len(masks) == 21
    compress.apply(model, [SmoothQuant(), GPTQ(group_size=32)], torch.arange(256).reshape(4, 64))
    for name, mask in masks.items():
        layer = model.get_submodule(name)
        assert layer.quantized and torch.equal(layer.mask, mask) and not bool(layer.weight[~mask].any())


def test_two_pruning_passes_are_settled_to_what_they_leave(recipe, tmp_path):
    """What the second leaves of the first's mask is no regular pattern any more; the report has the true bytes."""
    asked = recipe(Wanda(sparsity=0.6), Wanda(pattern="2:4"), save={"format": "native"})
    report = compress.run(asked, tmp_path).report
    assert written_bytes(tmp_path) == report["size"]["tensor_bytes"] != report["predicted"]["tensor_bytes"]
    assert compress.load(tmp_path)[0].get_submodule(UP).scheme.parts[0].sparsity.text == "bitmask"


def test_what_was_planned_sparse_may_end_dense(recipe, tmp_path, monkeypatch):
    """The bytes of the report are those of the checkpoint also then."""
    monkeypatch.setattr("compress.checkpoint.codec.store_as_planned", lambda *_: None)
    asked = recipe(Wanda(pattern="2:4"), save={"format": "native"})
    report = compress.run(asked, tmp_path).report
    assert written_bytes(tmp_path) == report["size"]["tensor_bytes"] > report["predicted"]["tensor_bytes"]


# ---- mistakes ----


class Regrow(RTN):
    """Rounds to nearest and forgets the mask."""

    def codes(self, weight, seen, layer):
        return super().codes(weight + 1, seen, Layer(layer.name, None, layer.storage, layer.log))


def test_a_pass_that_forgets_the_mask_is_an_error(recipe, tmp_path):
    with pytest.raises(
        NumericError, match=r"regrow model\.layers\.0\.\S+: weights that were pruned are no longer zero"
    ):
        compress.run(recipe(Wanda(sparsity=0.5), Regrow(), save={"format": "native"}), tmp_path)


def test_a_format_without_sparse_layers_cannot_keep_every_mask():
    for name in ("dense", "compressed-tensors"):
        with pytest.raises(
            RecipeError,
            match=f"save sparse: 'always' is not possible: format {name} stores the zeros; use format: native",
        ):
            Recipe(model="x", passes=[Wanda()], save={"format": name, "sparse": "always"}, calibration=Calibration())
    assert Save(format="native", sparse="always").sparse == "always"
    with pytest.raises(RecipeError, match=r"save sparse: input should be 'auto', 'always' or 'off', not 'on'"):
        Recipe(model="x", passes=[Wanda()], save={"format": "native", "sparse": "on"})


@pytest.fixture(scope="module")
def stored(recipe, tmp_path_factory):
    """MLPs 2:4 in floats, attention in int4 under a bitmask."""
    steps = [
        Wanda(pattern="2:4", targets="*mlp*"),
        Wanda(sparsity=0.6, targets="*attn*"),
        RTN(targets="*attn*", group_size=32),
    ]
    return compress.run(recipe(*steps, save={"format": "native"}), tmp_path_factory.mktemp("sparse") / "out").folder


def shorter(tensor):
    return tensor[: tensor.shape[0] - 1].clone()


def emptied(tensor):
    return torch.zeros_like(tensor)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            f"{UP}.weight_values",
            shorter,
            r"weight_values is torch.float32 \[287, 64\], but it must be torch.float32 \[288, 64\]",
        ),
        (f"{UP}.weight_kept", shorter, r"weight_kept is torch.int32 \[287, 4\], but it must be torch.int32 \[288, 4\]"),
        (f"{UP}.weight_kept", emptied, "weight_kept holds indexes that are not 2 different ones below 4, ascending"),
        (f"{UP}.weight_kept", None, "lacks its tensor weight_kept"),
        (f"{QUERY}.weight_packed", shorter, "weight_packed is torch.int32"),
        (f"{QUERY}.weight_kept", emptied, "weight_kept marks 0 weights as kept, but there are 6528"),
        (f"{QUERY}.weight_scale", shorter, r"weight_scale is torch.float32 \[127, 4\]"),
    ],
)
def test_damaged_tensors_are_named(name, change, message, stored, tmp_path):
    folder = Path(shutil.copytree(stored, tmp_path / "model"))
    shard = folder / "model-00003-of-00004.safetensors"
    tensors = load_file(shard)
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name])
    save_file(tensors, shard, metadata={"format": "pt"})
    layer = name.rpartition(".")[0].replace(".", r"\.")
    with pytest.raises(ModelError, match=rf"model: {layer}[. ]{message}.*; write the checkpoint again"):
        compress.load(folder)


def test_a_layer_of_another_shape_than_the_model(stored, tmp_path):
    folder = Path(shutil.copytree(stored, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] = 256
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r"mlp\.gate_proj is \[288, 128\] in the checkpoint, but \[256, 128\] by its config\.json"
    ):
        compress.load(folder)
