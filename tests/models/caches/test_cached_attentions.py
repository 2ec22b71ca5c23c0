"""What enters a cache is quantized once, whatever the model, the cache, and the way in which the model is run."""

import copy
import pickle

import pytest
import torch
from tolerances import near
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from compress.models.caches.attentions import (
    CacheProxy,
    attentions_containing,
    attentions_with_cache,
    cache_digests,
    cache_policies,
    cache_sha256,
    copy_policy,
    policy_tensors,
    read_keys_and_values,
    set_policy,
    watching,
)
from compress.models.caches.base import AttentionCache, tensor_names
from compress.models.caches.grid import GridCache
from compress.numerics.quant.grids import GRIDS

FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "gpt2",
    "opt",
    "opt-post-norm",
    "gpt-neox",
    "gpt-neox-parallel",
    "gemma2",
    "phi3",
    "bloom",
    "falcon",
    "mixtral",
    "qwen3-moe",
]
INT4 = GridCache(GRIDS["int4"], GRIDS["int4"])
FP8 = GridCache(GRIDS["fp8_e4m3"], GRIDS["fp8_e4m3"])
"""Its largest level is a power of two times 7, so that a token's largest number is on no border between two levels."""


def quantized(model, policy=INT4, **scales):
    for attention in attentions_with_cache(model).values():
        set_policy(attention, policy, scales)
    return model


def nearest(x, levels):
    """The nearest level times a scale that reaches the largest magnitude of each token of each head; written plainly."""
    scale = x.abs().amax(-1, keepdim=True) / levels.abs().max()
    at = (x / scale.clamp(min=1e-20)).unsqueeze(-1)
    return levels[(at - levels).abs().argmin(-1)] * scale


def is_quantized(keys, model):
    """Quantizing what was quantized to 8-bit floats changes nothing."""
    again, _ = read_keys_and_values(next(iter(attentions_with_cache(model).values())), keys, keys)
    return torch.allclose(again, keys, rtol=1e-5)


class Oracle(DynamicCache):
    """Keeps NF4."""

    def update(self, keys, values, *args, **kwargs):
        levels = torch.tensor(GRIDS["nf4"].levels)
        assert keys.ndim == 4 and len(keys.unique()) > 1
        return super().update(nearest(keys, levels), nearest(values, levels), *args, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_what_it_would_with_a_cache_that_rounds(family, tiny, ids):
    model, text = tiny(family), ids(2, 12)
    with torch.no_grad():
        dense = model(input_ids=text, use_cache=False).logits
        wanted = model(input_ids=text, past_key_values=Oracle(config=model.config), use_cache=True).logits
        quantized(model, GridCache(GRIDS["nf4"], GRIDS["nf4"]))
        alone = model(input_ids=text, use_cache=False).logits
        cached = model(input_ids=text, use_cache=True)
    assert len(cache_policies(model)) == 3
    torch.testing.assert_close(alone, wanted, rtol=1e-4, atol=1e-4)
    assert near(alone, cached.logits) and cached.past_key_values.get_seq_length() == 12
    assert float((dense - wanted).abs().max()) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_token_by_token_is_the_whole_text(family, tiny, ids):
    model, text = quantized(tiny(family), FP8), ids(2, 9)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "output_logits": True}
    options["attention_mask"] = torch.ones_like(text)
    found = model.generate(text, return_dict_in_generate=True, **options)
    with torch.no_grad():
        logits = model(input_ids=found.sequences, use_cache=False).logits[:, 8:-1]
    torch.testing.assert_close(torch.stack(found.logits, 1), logits, rtol=1e-3, atol=1e-3)
    assert torch.equal(found.sequences[:, 9:], logits.argmax(-1))
    assert is_quantized(found.past_key_values.layers[0].keys, model)


def test_any_cache_class_will_do(tiny, ids):
    model, text = quantized(tiny("llama"), FP8), ids(1, 8)
    static = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        wanted = model(input_ids=text, use_cache=False).logits
        assert torch.allclose(model(input_ids=text, past_key_values=static).logits, wanted, atol=1e-4)


def test_a_cache_for_two_models_is_used_in_the_part_of_this_one(tiny, ids):
    model, text = quantized(tiny("gpt2", add_cross_attention=True), FP8), ids(1, 8)
    with torch.no_grad():
        found = model(input_ids=text, use_cache=True)
        wanted = model(input_ids=text, use_cache=False).logits
    assert isinstance(found.past_key_values, EncoderDecoderCache) and near(found.logits, wanted)
    assert is_quantized(found.past_key_values.self_attention_cache.layers[0].keys, model)
    assert all("crossattention" not in name for name in attentions_with_cache(model))


@pytest.mark.parametrize("family", ["llama", "gpt-neox"])
def test_checkpointed_gradients_are_those_of_plain_training(family, tiny, ids):
    grads = []
    for checkpointed in (False, True):
        model = quantized(tiny(family)).requires_grad_(True).train()
        if checkpointed:
            model.activation_checkpointing_enable()
        model(input_ids=ids(2, 8), labels=ids(2, 8)).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.allclose(grads[0][name], grads[1][name], atol=1e-6) for name in grads[0])


def test_the_gradient_goes_straight_through():
    keys, values = (torch.randn(1, 2, 3, 8, requires_grad=True) for _ in range(2))
    attention = Attention()
    set_policy(attention, INT4)
    found = attention(keys, values)
    assert not torch.equal(found[0], keys)
    (found[0].sum() + 2 * found[1].sum()).backward()
    assert torch.equal(keys.grad, torch.ones_like(keys)) and torch.equal(values.grad, 2 * torch.ones_like(values))


class Attention(nn.Module):
    """Gives back what its cache does."""

    def forward(self, keys, values, past_key_values=None, **kwargs):
        return (keys, values) if past_key_values is None else past_key_values.update(keys, values, 0)


class Attending(nn.Module):
    """A block whose attention is called by position."""

    def __init__(self, causal):
        super().__init__()
        self.attention = Attention()
        self.attention.is_causal = causal

    def forward(self, keys, values, layer_past=None):
        return self.attention(keys, values, layer_past)


def test_a_cache_may_be_given_by_position():
    block, keys, kept = Attending(True), torch.randn(1, 2, 3, 8), DynamicCache()
    assert list(attentions_with_cache(block)) == ["attention"]
    set_policy(block.attention, INT4)
    wanted, _ = read_keys_and_values(block.attention, keys, keys)
    assert not torch.equal(wanted, keys)
    for given in (kept, None):
        found, _ = block(keys, keys, given)
        assert torch.equal(found, wanted)
    assert torch.equal(kept.layers[0].keys, wanted)


def test_what_sees_later_tokens_keeps_no_cache(tiny):
    assert attentions_with_cache(tiny("bert")) == {} and attentions_with_cache(Attending(False)) == {}


def test_attentions_are_found_by_what_is_in_them(tiny):
    model = tiny("llama")
    assert list(attentions_containing(model, ["model.layers.1.self_attn.k_proj", "model.layers.2.mlp.up_proj"])) == [
        "model.layers.1.self_attn"
    ]
    assert list(attentions_containing(Attention(), ["anything"])) == [""]


def test_copies_round_too_and_what_is_copied_from_does_not(tiny, ids):
    model = tiny("llama")
    before = copy.deepcopy(model)
    quantized(model, GridCache(GRIDS["int8"], None, "static"), k_scale=torch.tensor([0.01]))
    again = copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(model.model.layers[0].self_attn))
    with torch.no_grad():
        logits = [m(input_ids=ids()).logits for m in (before, model, again)]
    assert near(logits[1], logits[2]) and not torch.allclose(logits[0], logits[1], atol=1e-4)
    for module in (again.model.layers[0].self_attn, pickled):
        assert cache_sha256(module) == cache_sha256(model.model.layers[0].self_attn)
    copy_policy(model.model.layers[0].self_attn, before.model.layers[0].self_attn)
    assert policy_tensors(before.model.layers[0].self_attn) == {"k_scale": torch.tensor([0.01])}
    assert list(cache_policies(before)) == ["model.layers.0.self_attn"]


def test_digests_tell_grids_and_scales_apart():
    digests = set()
    for policy, scale in [(INT4, None), (FP8, None), (GridCache(INT4.keys, INT4.values, symmetric=False), None)] + [
        (GridCache(INT4.keys, INT4.values, "static"), torch.tensor([s])) for s in (0.5, 0.25)
    ]:
        attention = Attention()
        set_policy(attention, policy, {"k_scale": scale, "v_scale": scale})
        digests.add(cache_sha256(attention))
    assert len(digests) == 5 and cache_digests(attention) == {"": cache_sha256(attention)}
    assert tensor_names({"": policy, "a.b": policy}) == ["k_scale", "v_scale", "a.b.k_scale", "a.b.v_scale"]


def test_watching_sees_what_enters_before_it_is_quantized_and_ends():
    attention, seen = Attention(), []
    set_policy(attention, INT4)
    keys, values = torch.randn(2, 1, 2, 3, 8)
    with watching({"a": attention}, lambda *found: seen.append(found)):
        found = attention(keys, values)
    attention(keys, values)
    assert [(name, torch.equal(k, keys), torch.equal(v, values)) for name, k, v in seen] == [("a", True, True)]
    assert not torch.equal(found[0], keys)


def test_where_there_is_no_cache_it_answers_as_an_empty_one():
    entering = CacheProxy(None, AttentionCache.append)
    assert entering.get_seq_length() == 0 and not hasattr(entering, "nothing_of_this_name")
    kept = DynamicCache()
    kept.update(torch.ones(1, 1, 5, 2), torch.ones(1, 1, 5, 2), 0)
    assert CacheProxy(kept, AttentionCache.append).get_seq_length() == 5


def test_a_module_has_one_policy():
    attention = Attention()
    set_policy(attention, INT4)
    with pytest.raises(AssertionError, match="has a cache policy already"):
        set_policy(attention, FP8)


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (INT4, 2 * (8 * 4 / 8 + 2)),
        (GridCache(INT4.keys, INT4.values, symmetric=False), 2 * (8 * 4 / 8 + 2 + 0.5)),
        (GridCache(INT4.keys, INT4.values, "static"), 2 * 8 * 4 / 8),
    ],
)
def test_the_bytes_of_a_token(policy, wanted):
    """2 heads of 8 numbers; scales, and what is not rounded, in 2 bytes."""
    assert policy.token_bytes("keys", 2, 8, 2) == wanted
    assert GridCache(None, policy.values).token_bytes("keys", 2, 8, 2) == 2 * 8 * 2
