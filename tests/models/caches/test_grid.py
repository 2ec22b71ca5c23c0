"""Keys with a scale per channel and group of tokens, and tokens that stay exact for a while, in every kind of cache."""

import pytest
import torch
from draws import random
from torch import nn
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from compress.models.caches.attentions import attentions_with_cache, set_policy
from compress.models.caches.base import read_policy
from compress.models.caches.grid import GridCache, transform_heads
from compress.models.terms import CACHE_KEY
from compress.numerics.quant.grids import GRIDS

INT4, INT8 = GRIDS["int4"], GRIDS["int8"]
GROUP = 4
KIVI = GridCache(INT4, INT4, symmetric=False, key_group=GROUP)


class Attention(nn.Module):
    """Gives back what its cache does."""

    def forward(self, keys, values, past_key_values=None):
        return (keys, values) if past_key_values is None else past_key_values.update(keys, values, 0)


def attention(policy=KIVI, **scales):
    module = Attention()
    set_policy(module, policy, scales)
    return module


def to_levels(x, bits=4):
    """Asymmetric rounding along the last axis, written plainly."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-20)
    zero = (-low / scale).round()
    return ((x / scale + zero).round().clamp(0, 2**bits - 1) - zero) * scale


def by_group(keys, group=GROUP):
    """Complete groups of tokens are rounded channel by channel; the rest is exact."""
    found = keys.clone()
    for start in range(0, keys.shape[-2] - group + 1, group):
        part = keys[..., start : start + group, :]
        found[..., start : start + group, :] = to_levels(part.transpose(-1, -2)).transpose(-1, -2)
    return found


@pytest.mark.parametrize("length", [1, 3, 4, 10, 12])
def test_complete_groups_are_rounded_by_channel_and_values_by_token(length):
    keys, values = random(2, 3, length, 8), random(2, 3, length, 8, seed=1)
    found = attention()(keys, values)
    torch.testing.assert_close(found[0], by_group(keys))
    torch.testing.assert_close(found[1], to_levels(values))


def test_a_channel_that_is_large_in_all_tokens_harms_no_other():
    """What the paper finds in keys (section 3.1)."""
    keys = random(1, 2, 64, 8)
    keys[..., 3] += 30
    rest = [i for i in range(8) if i != 3]
    errors = []
    for group in (None, 64):
        found, _ = attention(GridCache(INT4, None, symmetric=False, key_group=group))(keys, keys)
        errors.append(float((found - keys)[..., rest].norm() / keys[..., rest].norm()))
    assert errors[0] > 0.5 and errors[1] < 0.12


SYLVESTER = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2


def turned(x):
    """Each run of four channels times the matrix, which is its own inverse."""
    return (x.unflatten(-1, (-1, 4)) @ SYLVESTER).flatten(-2)


@pytest.mark.parametrize("hadamard", ["keys", "values", "both"])
@pytest.mark.parametrize("group", [None, GROUP])
def test_transformed_keys_and_values_are_rounded_and_transformed_back(hadamard, group):
    policy = GridCache(INT4, INT4, symmetric=False, key_group=group, hadamard=hadamard)
    keys, values = random(2, 3, 10, 4), random(2, 3, 10, 4, seed=1)
    plain = (to_levels if group is None else by_group), to_levels
    found = attention(policy)(keys, values)
    for x, rounded, one, kind in zip((keys, values), found, plain, ("keys", "values"), strict=True):
        wanted = turned(one(turned(x))) if hadamard in (kind, "both") else one(x)
        torch.testing.assert_close(rounded, wanted)
    if group is not None:
        assert torch.equal(found[0][..., 8:, :], keys[..., 8:, :])  # of an incomplete group


@pytest.mark.parametrize(("width", "order"), [(6, 2), (12, 12), (8, 8), (7, 1)])
def test_a_head_is_transformed_in_the_largest_runs_that_fit(width, order):
    spike = torch.zeros(1, 1, 1, width)
    spike[..., 0] = 1
    found = transform_heads(spike)
    assert int((found.abs() > 1e-6).sum()) == order
    torch.testing.assert_close(transform_heads(found, inverse=True), spike)


def test_a_large_channel_harms_no_other_after_a_transform():
    """With one scale per token: QuaRot, section 4.4."""
    keys = random(1, 2, 64, 64)
    keys[..., 3] += 30
    errors = []
    for hadamard in (None, "keys"):
        policy = GridCache(INT4, None, symmetric=False, hadamard=hadamard)
        errors.append(float((attention(policy)(keys, keys)[0] - keys).norm()))
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize("residual", [0, 3, 6])
@pytest.mark.parametrize("chunks", [[1] * 11, [5, 1, 1, 4], [11], [3, 8]])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_that_grows_reads_as_the_text_so_far(kind, chunks, residual, tiny):
    policy = GridCache(INT4, INT4, symmetric=False, key_group=GROUP, residual=residual)
    keys, values = random(1, 2, 11, 8), random(1, 2, 11, 8, seed=1)
    config = tiny("llama").config
    kept = DynamicCache() if kind == "dynamic" else StaticCache(config=config, max_cache_len=16)
    module, done = attention(policy), 0
    for count in chunks:
        part = slice(done, done + count)
        found = module(keys[:, :, part], values[:, :, part], kept)
        done += count
        rounded, exact = max(done - residual, 0), slice(max(done - residual, 0), done)
        wanted = torch.cat([by_group(keys[:, :, :rounded]), keys[:, :, exact]], 2)
        torch.testing.assert_close(found[0][:, :, :done], wanted)
        torch.testing.assert_close(found[1][:, :, :rounded], to_levels(values[:, :, :rounded]))
        assert torch.equal(found[1][:, :, exact], values[:, :, exact])
        assert not found[0][:, :, done:].any() and not found[1][:, :, done:].any()


def test_a_sliding_window_keeps_the_groups_of_the_whole_text():
    """Groups begin at multiples of their size from the first token on, wherever the window begins."""
    kept, module = DynamicCache(), attention()
    kept.layers, kept.layer_class_to_replicate = [DynamicSlidingWindowLayer(sliding_window=9)], None
    keys = random(1, 2, 30, 8)
    for i in range(30):
        found, _ = module(keys[:, :, i : i + 1], keys[:, :, i : i + 1], kept)
    first = 30 - found.shape[2]
    assert first == 21
    torch.testing.assert_close(found[:, :, 24 - first :], by_group(keys)[:, :, 24:])
    assert torch.equal(found[:, :, 28 - first :], keys[:, :, 28:])  # a group that is not complete
    assert not torch.equal(found[:, :, : 24 - first], keys[:, :, 21:24])  # the rest of one that began before the window


def test_static_scales_may_leave_the_latest_tokens_exact():
    scale = torch.tensor([0.1])
    found, _ = attention(GridCache(INT8, INT8, "static", residual=2), k_scale=scale, v_scale=scale)(
        *[random(1, 1, 5, 4)] * 2
    )
    keys = random(1, 1, 5, 4)
    torch.testing.assert_close(found[:, :, :3], ((keys / 0.1).round() * 0.1)[:, :, :3])
    assert torch.equal(found[:, :, 3:], keys[:, :, 3:])


def test_the_gradient_goes_straight_through():
    keys = random(1, 2, 6, 8).requires_grad_()
    found, _ = attention()(keys, keys.detach())
    found.sum().backward()
    assert not torch.equal(found, keys) and torch.equal(keys.grad, torch.ones_like(keys))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt-neox"])
def test_generation_reads_groups_as_they_complete(family, tiny, ids):
    """The first new token reads the prompt as one pass over it does."""
    model, text = tiny(family), ids(2, 9)
    for module in attentions_with_cache(model).values():
        set_policy(module, KIVI)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "output_logits": True}
    options |= {"attention_mask": torch.ones_like(text), "return_dict_in_generate": True}
    found = model.generate(text, **options)
    static = model.generate(text, **options, cache_implementation="static")
    with torch.no_grad():
        wanted = model(input_ids=text, use_cache=False).logits[:, -1]
    torch.testing.assert_close(found.logits[0], wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.sequences, static.sequences)


@pytest.mark.parametrize(
    ("policy", "group", "wanted"),
    [
        (KIVI, GROUP, 2 * (8 * 4 / 8 + 8 * 2.5 / GROUP)),  # a scale of 2 bytes and a zero point of 4 bits per channel
        (KIVI, None, 2 * (8 * 4 / 8 + 2.5)),
    ],
)
def test_the_bytes_of_a_token(policy, group, wanted):
    assert policy.token_bytes("values" if group is None else "keys", 2, 8, 2) == wanted


def test_the_description_of_older_checkpoints_is_the_same():
    plain = GridCache(INT4, INT8)
    assert set(plain.to_json()) == {"keys", "values", "scale", "symmetric"}
    late = GridCache(INT4, None, key_group=32, residual=7), GridCache(None, INT4, residual=1)
    for policy in (plain, KIVI, *late, GridCache(INT4, INT4, hadamard="both")):
        assert read_policy(policy.to_json()) == policy
    assert CACHE_KEY == "compress_kv_cache"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_group": 1}, "key_group of grid is 1; it needs scale 'token' and 2 or more tokens"),
        ({"key_group": "64"}, "key_group of grid is '64': Input should be a valid integer"),
        ({"key_group": True}, "key_group of grid is True: Input should be a valid integer"),
        ({"residual": -1}, "residual of grid is -1, but it must be at least 1"),
        ({"residual": 1.5}, "residual of grid is 1.5: Input should be a valid integer"),
        ({"residual": None}, "residual of grid is None: Input should be a valid integer"),
        ({"scale": "static", "key_group": 4}, "key_group of grid is 4; it needs scale 'token'"),
        ({"scale": "channel"}, "scale of grid is 'channel': Input should be 'token' or 'static'"),
        ({"symmetric": 1}, "symmetric of grid is 1: Input should be a valid boolean"),
        ({"hadamard": "queries"}, "hadamard of grid is 'queries': Input should be 'keys', 'values' or 'both'"),
        ({"hadamard": True}, "hadamard of grid is True: Input should be"),
        ({"hadamard": ["keys"]}, "hadamard of grid is .*: Input should be"),
        ({"axis": 1}, "grid has no field 'axis'"),
        ({"keys": "int99"}, "grid 'int99' is not known"),
        ({"kind": "paged"}, "describes no cache policy; kinds: .*grid"),
    ],
)
def test_a_damaged_description_is_an_error(change, message):
    with pytest.raises(ValueError, match=message):
        read_policy({**KIVI.to_json(), **change})


@pytest.mark.parametrize("values", [None, ["int4"], "grid"])
def test_what_is_no_object_describes_no_policy(values):
    with pytest.raises(ValueError, match="describes no cache policy"):
        read_policy(values)


def test_a_missing_field_is_an_error():
    with pytest.raises(ValueError, match="grid lacks its field 'values'"):
        read_policy({"keys": "int4"})


def test_exact_keys_stay_exact():
    keys, values = random(1, 2, 5, 8), random(1, 2, 5, 8, seed=1)
    found = attention(GridCache(None, INT4, residual=1))(keys, values)
    assert torch.equal(found[0], keys) and not torch.equal(found[1], values)


def test_a_policy_tells_how_it_stores_keys_and_values():
    assert KIVI.text == "keys int4 per channel and 4 tokens, values int4 per token and head"
    assert GridCache(None, INT8, "static", hadamard="values").text == "keys exact, values int8 per attention, Hadamard"
    assert "as attention reads them" in KIVI.summary and "as they enter" in GridCache(INT4, INT4).summary
