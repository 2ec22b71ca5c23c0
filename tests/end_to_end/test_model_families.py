"""prune -> smooth -> quantize, saved and reloaded, on tiny models of several families; masks survive exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import LOGITS
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import compress
from compress.layers.linear import CompressedLinear, linears
from compress.passes.contract.layers import Layer
from compress.passes.contract.observers import Gram, InputNorm

FAMILIES = {
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {}),
    "opt-post-norm": ("opt-post-norm", {}),
    "gpt-neox": ("gpt-neox", {}),
    "gpt-neox-parallel": ("gpt-neox-parallel", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
}


NATIVE = ["gpt2", "qwen3-tied"]  # a format is handed packed weights, whatever the family; these two are odd


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "format_"), [*((name, "compressed-tensors") for name in FAMILIES), *((name, "native") for name in NATIVE)]
)
def test_the_chain_is_reloaded_as_it_was_computed(name, format_, tiny, recipe, texts, ids, tmp_path):
    family, changes = FAMILIES[name]
    model = tiny(family, **changes)
    model.save_pretrained(tmp_path / "model")
    tied = changes.get("tie_word_embeddings", model.config.tie_word_embeddings)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    passes = compress.Wanda(sparsity=0.5), compress.SmoothQuant(), compress.GPTQ(weights="int8", group_size=16)
    asked = recipe(
        *passes,
        model=str(tmp_path / "model"),
        save={"format": format_, "verify": "own" if family == "gpt2" else "full"},
    )
    result = compress.run(asked, tmp_path / "out")
    verified = result.report["verified"]
    layers = sum(len(linears(block)) for block in find(model))
    assert verified["layers"] == layers and verified["own"] <= LOGITS
    assert verified["skipped"] or verified["transformers"] <= LOGITS
    reloaded, _ = compress.load(tmp_path / "out")
    shared = reloaded.get_input_embeddings().weight is reloaded.get_output_embeddings().weight
    assert shared == tied
    packed = {n: m for n, m in reloaded.named_modules() if isinstance(m, CompressedLinear)}
    assert len(packed) == layers
    for full, layer in packed.items():
        kept = (layer.weight != 0).float().mean(1)
        assert float(kept.max()) <= 0.5, full
        assert float(kept.mean()) > 0.45, full  # int8 rounds few of the kept weights to zero
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        dense, found = plain(input_ids=ids()).logits, reloaded(input_ids=ids()).logits
        for full, layer in packed.items():  # the same weights in the family's own layers give the same logits
            own = plain.get_submodule(full)
            own.weight.copy_(layer.weight.T if isinstance(own, Conv1D) else layer.weight)
        state = {k: v for k, v in reloaded.state_dict().items() if k in plain.state_dict() and "weight" in k}
        plain.load_state_dict(state, strict=False)
        plain.load_state_dict({k: v for k, v in reloaded.state_dict().items() if k.endswith("bias")}, strict=False)
        torch.testing.assert_close(plain(input_ids=ids()).logits, found, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(dense, found, rtol=1e-2, atol=1e-2)


def find(model):
    from compress.models.structure.blocks import find_blocks

    return [block.module for block in find_blocks(model)]


@settings(max_examples=40)
@given(
    rows=st.integers(1, 12),
    width=st.integers(4, 40),
    sparsity=st.floats(0.05, 0.95),
    pattern=st.sampled_from(["row", "layer", "2:4", "1:4", "4:8"]),
    group_size=st.sampled_from([1, 4, 7, 16, "channel", "tensor"]),
    symmetric=st.booleans(),
    order=st.sampled_from(["none", "static"]),
    seed=st.integers(0, 99),
)
def test_masks_survive_quantization_exactly(rows, width, sparsity, pattern, group_size, symmetric, order, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=generator)
    inputs = torch.randn(64, width, generator=generator)
    norm, gram = InputNorm(width, inputs.device), Gram(width, inputs.device)
    norm.update(inputs)
    gram.update(inputs)
    log = lambda *_, **__: None  # noqa: E731
    options = {"pattern": pattern} if ":" in pattern else {"pattern": pattern, "sparsity": sparsity}
    pruned = compress.Wanda(**options, repair=0).solve(weight, norm, Layer("a", None, torch.float32, log))
    assert torch.equal(pruned.weight != 0, pruned.mask)
    layer = Layer("a", pruned.mask, torch.float32, log)
    quantized = {"group_size": group_size, "symmetric": symmetric}
    for step in (compress.GPTQ(act_order=order, **quantized), compress.RTN(**quantized)):
        solved = step.solve(pruned.weight, gram, layer)
        module = CompressedLinear.of(nn.Linear(width, rows))
        module.put(solved.weight, pruned.mask)
        assert bool((module.weight[~pruned.mask] == 0).all())
