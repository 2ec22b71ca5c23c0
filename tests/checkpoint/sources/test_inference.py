"""Packed bfloat16 checkpoints on a CPU: float32 activations, weights as they are stored."""

import json

import pytest
import torch
from tolerances import same_logits

import compress
from compress import RTN
from compress.kernels import dispatch
from compress.layers.embedding import CompressedEmbedding
from compress.layers.linear import CompressedLinear
from compress.layers.parts.dense import DensePart
from compress.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels were not built")


@pytest.fixture
def packed(pico, recipe, tmp_path):
    """A packed checkpoint in bfloat16, with one linear left alone."""
    made = recipe(
        RTN(weights="int4", group_size=32, targets=["*.q_proj", "*.down_proj"]),
        dtype="bfloat16",
        save={"format": "native"},
    )
    compress.run(made, tmp_path / "out", progress=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    return tmp_path / "out"


def test_activations_are_float32_and_weights_stay_bfloat16(packed):
    model, _ = compress.load(packed)
    assert model.dtype == torch.float32
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert isinstance(head, CompressedLinear) and isinstance(embedding, CompressedEmbedding)
    assert embedding.table is head and head.weight.dtype == torch.bfloat16
    layers = [m for m in model.modules() if isinstance(m, CompressedLinear)]
    dense = [part for m in layers for part in m.all_parts if isinstance(part, DensePart)]
    assert dense and all(part.weight.dtype == torch.bfloat16 for part in dense)
    assert all(part.narrow_inputs for m in layers for part in m.all_parts)


@torch.no_grad()
def test_products_of_a_gguf_file_round_their_inputs_unless_a_dtype_is_named(recipe, tmp_path):
    asked = recipe(RTN(weights="int4_signed", group_size=32), save={"format": "gguf"}, eval=None)
    compress.run(asked, tmp_path / "out", progress=False)
    models = {dtype: compress.load(tmp_path / "out" / "model.gguf", dtype)[0] for dtype in ("auto", "float32")}
    for dtype, model in models.items():
        assert model.dtype == torch.float32
        layers = [m for m in model.modules() if isinstance(m, CompressedLinear)]
        assert layers and all(part.narrow_inputs == (dtype == "auto") for m in layers for part in m.all_parts)
    ids = torch.arange(1, 60).view(1, -1)
    with dispatch.plain_torch():
        wanted = models["float32"](ids).logits
    assert (models["auto"](ids).logits - wanted).abs().max() < 0.05
    torch.testing.assert_close(models["float32"](ids).logits, wanted, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_the_logits_are_those_of_float32(packed):
    ids = torch.arange(1, 60).view(1, -1)
    model, exact = compress.load(packed)[0], compress.load(packed, dtype="float32")[0]
    with dispatch.plain_torch():
        wanted = exact(ids).logits
        assert same_logits(model(ids).logits, wanted)
    near, far = (float((m(ids).logits - wanted).abs().max()) for m in (exact, compress.load(packed, "bfloat16")[0]))
    assert near < 1e-3
    assert float((model(ids).logits - wanted).abs().max()) <= far  # its products alone are rounded
    few = model(ids[:, :5]).logits
    torch.testing.assert_close(few, model(ids).logits[:, :5], rtol=0.05, atol=0.05)


def test_a_named_dtype_and_dense_models_are_as_they_were(packed, pico):
    model, _ = compress.load(packed, dtype="bfloat16")
    assert model.dtype == torch.bfloat16 and not isinstance(model.get_output_embeddings(), CompressedLinear)
    assert not any(isinstance(m, CompressedLinear) for m in compress.load(pico)[0].modules())


def test_saving_again_writes_the_dtype_of_the_checkpoint(packed, tmp_path):
    model, _ = compress.load(packed)
    compress.save(model, tmp_path / "again")
    again, _ = compress.load(tmp_path / "again", dtype="float32")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"
    size = sum(path.stat().st_size for path in packed.glob("*.safetensors"))
    assert sum(path.stat().st_size for path in (tmp_path / "again").glob("*.safetensors")) <= size * 1.01
    ids = torch.arange(1, 30).view(1, -1)
    with torch.no_grad(), dispatch.plain_torch():
        assert same_logits(again(ids).logits, model(ids).logits)


def test_evaluation_compares_in_the_dtype_of_the_recipe(packed):
    from compress.checkpoint.load import dtype_to_compare

    assert dtype_to_compare(packed, "float16", torch.device("cpu")) == "float16"
    wanted = "bfloat16" if compress.load(packed, dtype="auto")[0].dtype != torch.bfloat16 else "float32"
    assert dtype_to_compare(packed, "auto", torch.device("cpu")) in (wanted, "float32")
