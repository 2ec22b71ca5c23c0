"""Importance matrices of llama.cpp: both forms are read, ours are sums of squares, and rtn weighs its scales by them."""

import struct

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from gguf_families import gguf_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import compress
from compress import RTN
from compress.checkpoint.containers.imatrix import Squares, read_imatrix, write_imatrix
from compress.cli import main
from compress.errors import ModelError, RecipeError, TargetError
from compress.layers.linear import linears
from compress.recipe.schema import read_passes

FIRST = "blk.0.attn_q.weight"


def dat_file(path, entries, calls=2, tail=b""):
    """Write the form .dat, as llama.cpp's imatrix.cpp states it. entries: mean squares by name."""
    with path.open("wb") as file:
        file.write(struct.pack("<i", len(entries)))
        for name, means in entries.items():
            file.write(struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(means)))
            file.write((np.asarray(means, dtype="<f4") * calls).tobytes())
        file.write(tail)
    return path


def entries_of(folder, squares):
    """The mean squares by the names in GGUF of all linears in the blocks of the pico model. squares: of a width."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    found = linears(AutoModelForCausalLM.from_pretrained(folder))
    layers = {name: layer.weight.shape[1] for name, layer in found.items() if name.startswith("model.layers.")}
    return {names.get_name(f"{name}.weight", (".weight",)): squares(width) for name, width in layers.items()}


def test_both_forms_hold_the_mean_squares(tmp_path):
    sums = torch.tensor([[2.0, 8.0], [3.0, 6.0]])
    write_imatrix(tmp_path / "new.gguf", {"a.weight": Squares(sums, torch.tensor([2.0, 3.0]))}, "text", 4, 64)
    old = dat_file(tmp_path / "old.dat", {"a.weight": [1, 4, 1, 2]}, tail=struct.pack("<ii", 7, 4) + b"text")
    for path in (tmp_path / "new.gguf", old):
        assert read_imatrix(path)["a.weight"]().tolist() == [1, 4, 1, 2]
    stored = gguf.GGUFReader(tmp_path / "new.gguf")
    names = ("general.type", "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size")
    values = [stored.get_field(name).contents() for name in names]  # llama-quantize refuses a file without one of them
    assert values == ["imatrix", ["text"], 4, 64]
    shapes = {tensor.name: [int(size) for size in tensor.shape] for tensor in stored.tensors}
    assert shapes == {"a.weight.in_sum2": [2, 2], "a.weight.counts": [1, 2]}


def test_an_expert_that_no_token_reached_counts_all_inputs_alike(tmp_path):
    squares = Squares(torch.tensor([[2.0, 8.0], [0.0, 0.0]]), torch.tensor([2.0, 0.0]))
    write_imatrix(tmp_path / "new.gguf", {"a.weight": squares}, "text", 1, 8)
    assert read_imatrix(tmp_path / "new.gguf")["a.weight"]().tolist() == [1, 4, 1, 1]


def test_the_matrix_of_a_model_is_the_sum_of_the_squares_of_its_inputs(pico, texts, tmp_path):
    made = compress.imatrix(pico, tmp_path / "out.gguf", text=texts["calibration"], sequences=6, length=64)
    assert made.entries == made.layers == 21 and made.tokens == 384 and made.unreached == ()
    model = AutoModelForCausalLM.from_pretrained(pico).eval()
    seen = []
    layer = model.model.layers[1].mlp.down_proj
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].reshape(-1, args[0].shape[-1])))
    model(torch.from_numpy(np.load(texts["calibration"]).astype(np.int64)))
    expected = torch.cat(seen).square().mean(0)
    assert torch.allclose(read_imatrix(tmp_path / "out.gguf")["blk.1.ffn_down.weight"](), expected, rtol=1e-3)


def test_experts_have_one_entry(pico, tmp_path):
    gguf_model("qwen2-moe").save_pretrained(tmp_path / "mixture")
    AutoTokenizer.from_pretrained(pico).save_pretrained(tmp_path / "mixture")
    done = CliRunner().invoke(
        main,
        ["imatrix", str(tmp_path / "mixture"), "-o", str(tmp_path / "out.gguf"), "--sequences", "1", "--length", "16"],
    )
    assert done.exit_code == 0 and "16 tokens" in done.output
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    sums, counts = (stored[f"blk.0.ffn_gate_exps.weight.{kind}"] for kind in ("in_sum2", "counts"))
    assert [int(size) for size in sums.shape] == [64, 4] and float(counts.data.sum()) == 2 * 16  # two of four experts
    step = RTN(weights="int4_signed", group_size=32, imatrix=str(tmp_path / "out.gguf"), ignore=["*.gate"])
    model = gguf_model("qwen2-moe")
    compress.apply(model, step)
    assert any(".experts.3." in name for name in linears(model))


def test_an_input_that_counts_more_has_a_smaller_error(pico, tmp_path):
    """The first input of each group of 32 counts as much as all others together, or nothing."""

    def weighted(width):
        squares = torch.ones(width)
        squares[::32] = 1000.0
        return squares.tolist()

    file = dat_file(tmp_path / "old.dat", entries_of(pico, weighted))
    errors = {}
    for label, options in (("weighted", {"imatrix": str(file)}), ("plain", {"scale": "mse"})):
        model = AutoModelForCausalLM.from_pretrained(pico)
        before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
        compress.apply(model, RTN(weights="int4_signed", group_size=32, **options))
        error = (linears(model)["model.layers.0.mlp.up_proj"].weight - before).square()
        errors[label] = error[:, ::32].sum(), (error * torch.tensor(weighted(128))).sum()
    assert errors["weighted"][0] < 0.5 * errors["plain"][0] and errors["weighted"][1] < errors["plain"][1]


@pytest.mark.parametrize("weights", ["uint4", "iq4_nl"])
def test_other_grids_are_weighed_too(weights, pico, tmp_path):
    file = dat_file(tmp_path / "old.dat", entries_of(pico, lambda width: [1.0 + (i % 32 == 0) for i in range(width)]))
    model = AutoModelForCausalLM.from_pretrained(pico)
    compress.apply(model, RTN(weights=weights, group_size=32, imatrix=str(file)))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def plan_with(recipe, file, **options):
    step = RTN(weights="int4_signed", group_size=32, imatrix=str(file), **options)
    return compress.plan(recipe(step, save={"format": "gguf"}, eval=None))


def test_a_file_of_another_model_is_an_error_before_the_run(recipe, pico, tmp_path):
    full = entries_of(pico, lambda width: [1.0] * width)
    missing = {name: means for name, means in full.items() if name != FIRST}
    with pytest.raises(TargetError, match=rf"has no entry {FIRST} for model.layers.0.self_attn.q_proj, but 20 others"):
        plan_with(recipe, dat_file(tmp_path / "missing.dat", missing))
    with pytest.raises(
        TargetError, match=rf"{FIRST} has 64 values, but .*q_proj has 128 inputs; it is of another model"
    ):
        plan_with(recipe, dat_file(tmp_path / "narrow.dat", full | {FIRST: [1.0] * 64}))
    with pytest.raises(ModelError, match=rf"{FIRST} has values that are no squares: negative or not finite"):
        plan_with(recipe, dat_file(tmp_path / "negative.dat", full | {FIRST: [-1.0] * 128}))
    assert plan_with(recipe, dat_file(tmp_path / "ignored.dat", missing), ignore=["*.0.*.q_proj"]).checkpoint_bytes


@pytest.mark.parametrize("change", ["cut", "count", "name", "values", "text", "no type", "none"])
def test_a_damaged_file_is_an_error(change, recipe, pico, tmp_path):
    path = dat_file(tmp_path / "old.dat", entries_of(pico, lambda width: [1.0] * width))
    data = bytearray(path.read_bytes())
    if change == "cut":
        data = data[:-100]
    elif change == "count":
        data[:4] = struct.pack("<i", 1 << 30)
    elif change == "name":
        data[4:8] = struct.pack("<i", -5)
    elif change == "values":
        place = 4 + 4 + struct.unpack("<i", data[4:8])[0] + 4
        data[place : place + 4] = struct.pack("<i", 1 << 30)
    elif change == "text":
        data = bytearray(b"These are words, not numbers, and more words.")
    elif change == "no type":
        writer = gguf.GGUFWriter(path, "llama")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        data = bytearray(path.read_bytes())
    path.write_bytes(data)
    if change == "none":
        path.unlink()
    with pytest.raises(ModelError, match="imatrix .*old.dat: it is no importance matrix that can be read: "):
        plan_with(recipe, path)


def test_options_that_do_not_go_together():
    with pytest.raises(RecipeError, match="imatrix has no effect|imatrix: it weighs|weighs the search"):
        read_passes([{"rtn": {"weights": "int4", "imatrix": "f", "scale": "mse"}}])
    with pytest.raises(RecipeError, match="does not weigh rows that share their scales; leave block_rows out"):
        read_passes([{"rtn": {"weights": "fp8_e4m3", "group_size": 32, "imatrix": "f", "block_rows": 8}}])
    [step] = read_passes([{"rtn": {"weights": "int4", "imatrix": "f"}}])
    assert step.scale == "importance"
