"""The dtype of untouched tensors: 16 bits unless the source needs float32."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import compress
from compress.checkpoint.opening import open_model
from compress.checkpoint.sources.narrow import RECORD, narrow_dtype, record_narrow, rounding_error
from compress.checkpoint.sources.stored import stored_tensors
from compress.pipeline.resolve import storage_dtype


def opened_as(tiny, tmp_path, dtype):
    tiny("llama").to(dtype).save_pretrained(tmp_path / "model")
    return open_model(str(tmp_path / "model"), "float32")


@pytest.mark.parametrize(
    ("stored", "narrow"), [(torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)]
)
def test_the_dtype_of_the_source(stored, narrow, tiny, tmp_path, recipe):
    opened = opened_as(tiny, tmp_path, stored)
    built = recipe(compress.RTN(group_size=16), model=str(tmp_path / "model"), dtype="float32")
    assert opened.narrow is narrow and storage_dtype(built, opened) is (narrow or torch.float32)
    explicit = built.model_copy(update={"save": compress.Save(dtype="float32")})
    assert storage_dtype(explicit, opened) is torch.float32


@pytest.mark.parametrize(
    ("stored", "stated", "asked", "rounded"),
    [
        (torch.float32, "float16", "auto", "float16"),
        (torch.float32, "bfloat16", "auto", "bfloat16"),
        (torch.float32, "float16", "float16", None),
        (torch.float32, "float16", "float32", None),
        (torch.float32, "float32", "auto", None),
        (torch.float16, "float16", "auto", None),
        (torch.bfloat16, "bfloat16", "auto", None),
    ],
)
def test_weights_that_the_stated_dtype_rounds_are_a_note(stored, stated, asked, rounded, tiny, tmp_path):
    opened_as(tiny, tmp_path, stored)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": stated}))
    notes = [note for note in open_model(str(tmp_path / "model"), asked).notes if "stored in float32" in note]
    assert len(notes) == (rounded is not None)
    if notes:
        assert f"rounded to {rounded}, the dtype of config.json; set dtype: float32 to keep them" in notes[0]


def test_one_matrix_in_float32_or_two_dtypes_are_no_narrow_source(tmp_path):
    for kinds in ((torch.float16, torch.float32), (torch.float16, torch.bfloat16)):
        tensors = {str(i): torch.ones(2, 2, dtype=kind) for i, kind in enumerate(kinds)}
        save_file({**tensors, "norm": torch.ones(2)}, tmp_path / "model.safetensors")
        assert narrow_dtype(tmp_path, stored_tensors(tmp_path)) is None


def test_a_run_in_float32_stores_16_bits_and_loads_as_it_was_evaluated(tiny, tmp_path, recipe):
    opened_as(tiny, tmp_path, torch.bfloat16)
    built = recipe(compress.RTN(group_size=16), model=str(tmp_path / "model"), dtype="float32")
    result = compress.run(built, tmp_path / "out", progress=False)
    dtypes = {t.dtype for file in (tmp_path / "out").glob("*.safetensors") for t in load_file(file).values()}
    assert torch.bfloat16 in dtypes and torch.float32 not in dtypes
    assert result.report["reproduce"]["storage_dtype"] == "bfloat16"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert next(compress.load(tmp_path / "out")[0].parameters()).dtype == torch.float32


def test_the_error_of_rounding():
    # 1 + 2^-10 is a number of float16 and not of bfloat16, whose steps at 1 are 2^-7
    weight = [torch.tensor([1 + 2**-10, 1.0])]
    assert rounding_error(weight, torch.float16) == 0
    assert rounding_error(weight, torch.bfloat16) == pytest.approx(2**-10 / (1 + (1 + 2**-10) ** 2) ** 0.5)
    assert rounding_error([torch.tensor([1e6, 1.0])], torch.float16) == float("inf")  # beyond its largest number


@pytest.mark.parametrize(
    ("kind", "scale", "dtype"),
    [
        ("F16", 1.0, "float16"),
        ("BF16", 1.0, "bfloat16"),
        ("Q8_0", 1.0, "float16"),
        ("Q8_0", 1e6, "bfloat16"),
        ("F32", 1.0, None),
    ],
)
def test_the_record_of_a_gguf_file(kind, scale, dtype, tmp_path):
    gguf = pytest.importorskip("gguf")
    weight = (torch.randn(4, 32) * scale).numpy()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    own = gguf.GGMLQuantizationType[kind]
    data = weight if kind == "F32" else gguf.quants.quantize(weight, own)
    writer.add_tensor("w", data, raw_dtype=own)
    writer.add_tensor("norm", torch.ones(4).numpy())
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    record_narrow(tmp_path, tmp_path / "m.gguf", {"w": torch.from_numpy(weight)})
    assert (tmp_path / RECORD).exists() == (dtype is not None)
    if dtype is not None:
        assert json.loads((tmp_path / RECORD).read_text())["dtype"] == dtype
        assert str(narrow_dtype(tmp_path, {})) == f"torch.{dtype}"
