"""The cache of recorded decoding keeps transformers' contract: the operations of its layers, and all kinds of `generate`."""

import copy
import inspect
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from compress.decode import accelerate_generation
from compress.decode import caches as caches_module
from compress.decode import generation as generation_module
from compress.native.library import available

pytestmark = pytest.mark.skipif(not available(), reason="no C++ library")
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
IDS = torch.arange(1, 8)[None]


def generated(model, ids=IDS, tokens=12, **options):
    """The tokens and the cache of `model.generate`."""
    found = model.generate(ids, max_new_tokens=tokens, return_dict_in_generate=True, **GREEDY, **options)
    return found.sequences, found.past_key_values


SHORT = 32


@pytest.fixture
def short_caches(monkeypatch):
    """Let the lengths of caches be multiples of a smaller number, so that they grow within short texts."""
    for module in (caches_module, generation_module):
        monkeypatch.setattr(module, "LENGTHS", SHORT)


@pytest.fixture
def recorded_model(pico_model):
    """The pico model whose `generate` decodes by recorded steps."""
    accelerate_generation(pico_model)
    return pico_model


def sure(draft):
    """A draft that ends its texts for no lack of confidence."""
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft


@pytest.fixture
def dense(pico):
    """The pico model as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(pico).eval()


def caches(model, plain, ids=IDS, tokens=12):
    """The cache of recorded decoding, and that of transformers, after the same text."""
    ours, theirs = generated(model, ids, tokens)[1], generated(plain, ids, tokens)[1]
    assert type(theirs) is DynamicCache and type(ours) is not DynamicCache
    return ours, theirs


def states(layer):
    """Keys and values of the tokens that a layer has seen, as a growing layer holds them."""
    return layer.keys[:, :, : layer.get_seq_length()], layer.values[:, :, : layer.get_seq_length()]


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert one.get_seq_length() == other.get_seq_length()
        if other.get_seq_length():
            for mine, wanted in zip(states(one), states(other), strict=True):
                assert torch.allclose(mine, wanted, atol=1e-4)


def members(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def test_every_member_of_the_growing_cache_is_there(recorded_model, dense, tiny):
    ours, theirs = caches(recorded_model, dense)
    assert members(Cache) <= members(ours)
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert members(other) <= members(one)
        for name in members(DynamicLayer):
            mine, wanted = getattr(type(one), name), getattr(DynamicLayer, name)
            if inspect.isfunction(wanted):
                ask = [list(inspect.signature(f).parameters)[1:] for f in (mine, wanted)]
                assert ask[0] == ask[1], name
    gemma = tiny("gemma3", sliding_window=10)
    accelerate_generation(gemma)
    window = next(layer for layer in generated(gemma)[1].layers if layer.is_sliding)
    assert members(DynamicSlidingWindowLayer) - {"activate_past_recording", "sliding_window"} <= members(type(window))


def test_what_a_cache_states(recorded_model, dense):
    ours, theirs = caches(recorded_model, dense)
    assert ours.get_seq_length() == 18 and type(ours.get_seq_length()) is int
    for name in ("is_initialized", "is_sliding", "is_croppable", "is_linear", "is_dummy"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.batch_size == 1 and ours.is_compileable
    for name in ("get_max_length", "get_query_offset"):
        assert getattr(ours, name)() == getattr(theirs, name)(), name
    size, offset = ours.get_mask_sizes(3, 0)
    assert size >= theirs.get_mask_sizes(3, 0)[0] and offset == 0
    same(ours, theirs)


REPEATED = torch.tensor([2, 0])
CHANGES = {
    "crop": lambda cache: cache.crop(-5),
    "crop nothing": lambda cache: cache.crop(0),
    "crop all": lambda cache: cache.crop(-18),
    "repeat": lambda cache: cache.batch_repeat_interleave(3),
    "select": lambda cache: (cache.batch_repeat_interleave(3), cache.batch_select_indices(REPEATED)),
    "reorder": lambda cache: (cache.batch_repeat_interleave(3), cache.reorder_cache(torch.tensor([1, 1, 0]))),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("outside", [False, True], ids=["no grad", "inference mode"])
@pytest.mark.parametrize("change", CHANGES)
def test_operations_are_those_of_the_growing_cache(change, outside, recorded_model, dense):
    with torch.inference_mode(outside):
        ours, theirs = caches(recorded_model, dense)
    for cache in (ours, theirs):
        CHANGES[change](cache)
    same(ours, theirs)
    rows = max(1, *(0 if layer.keys is None else layer.keys.shape[0] for layer in theirs.layers))
    more = torch.tensor([[20, 21, 22]]).repeat(rows, 1)
    found = []
    for cache in (ours, theirs):  # one prompt of three tokens more, then steps of one
        with torch.no_grad():
            logits = [dense(more, past_key_values=cache).logits]
            logits += [dense(more[:, :1], past_key_values=cache).logits for _ in range(3)]
        found.append(torch.cat(logits, dim=1))
    assert torch.allclose(*found, atol=1e-3)
    same(ours, theirs)


def test_a_positive_number_is_refused_as_transformers_does(recorded_model, dense):
    for cache in caches(recorded_model, dense):
        with pytest.raises(ValueError, match="positive value"):
            cache.crop(5)
        assert cache.get_seq_length() == 18


def test_rows_that_are_reordered_continue_as_they_should(recorded_model, dense):
    """With rows of different padding: the mask of the step before is not that of the next one."""
    ids, mask = torch.arange(1, 15).view(2, 7), torch.ones(2, 7, dtype=torch.int64)
    mask[0, :3] = 0
    found = []
    for model in (recorded_model, dense):
        text, cache = generated(model, ids, 6, attention_mask=mask)
        order = torch.tensor([1, 0])
        cache.reorder_cache(order)
        grown = torch.cat([mask[order], mask.new_ones(2, 6)], dim=1)
        found.append(generated(model, text[order], 6, attention_mask=grown, past_key_values=cache)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "made", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["copy", "pickle"]
)
def test_a_copy_is_independent(made, recorded_model, dense):
    wanted = generated(dense, tokens=24)[0]
    text, cache = generated(recorded_model, tokens=12)
    other = made(cache)
    for past in (cache, other):
        assert torch.equal(generated(recorded_model, text, 12, past_key_values=past)[0], wanted)
    assert cache.get_seq_length() == other.get_seq_length() == wanted.shape[1] - 1


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cache_that_is_continued_grows(family, mode, tiny, short_caches):
    """Beyond its first length, and beyond a sliding window that is longer than that."""
    changes = {"max_position_embeddings": 256, **({"sliding_window": SHORT + 20} if family == "gemma3" else {})}
    model = tiny(family, **changes)
    total = SHORT + 40
    wanted = generated(model, tokens=total)[0]
    accelerate_generation(model)
    with mode():
        text, cache = generated(model, tokens=10)
    while text.shape[1] < wanted.shape[1]:
        text, cache = generated(model, text, min(30, wanted.shape[1] - text.shape[1]), past_key_values=cache)
    assert torch.equal(text, wanted)
    assert cache.get_seq_length() == wanted.shape[1] - 1
    decoding = model.get_compiled_call(None)
    assert decoding.reason is None and len(decoding.decoders) >= 2


def test_early_initialization(recorded_model):
    cache = generated(recorded_model)[1]
    other = copy.deepcopy(cache)
    for layer in other.layers:
        layer.stored, layer.is_initialized = torch.bfloat16, False
        layer.cumulative_length.zero_()
    other.early_initialization(1, 2, 32, torch.float32, torch.device("cpu"))
    assert other.is_initialized and {layer.keys.dtype for layer in other.layers} == {torch.bfloat16}
    with torch.no_grad():
        recorded_model(IDS, past_key_values=other)
    assert other.get_seq_length() == 7


@pytest.mark.parametrize("tokens", [12, SHORT + 30])
def test_a_draft_decodes_by_recorded_steps_and_changes_no_token(tokens, recorded_model, dense, short_caches):
    wanted = generated(dense, tokens=tokens)[0]
    assert torch.equal(generated(dense, tokens=tokens, assistant_model=sure(recorded_model))[0], wanted)
    decoding = recorded_model.get_compiled_call(None)
    assert decoding.reason is None and decoding.decoders


def test_a_model_that_checks_drafts(recorded_model, dense):
    wanted = generated(dense)[0]
    assert torch.equal(generated(recorded_model, assistant_model=sure(dense))[0], wanted)


@pytest.mark.parametrize("window", [10, 200])
def test_drafts_of_a_model_with_windows(window, tiny):
    model, draft = tiny("gemma3", sliding_window=window), tiny("gemma3", sliding_window=window)
    wanted = generated(model, tokens=20)[0]
    accelerate_generation(model)
    accelerate_generation(draft)
    assert torch.equal(generated(model, tokens=20, assistant_model=sure(draft))[0], wanted)


@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 9, 12])
@pytest.mark.parametrize("window", [10, 200])
def test_a_window_that_records_its_past_can_be_cropped(window, tokens, tiny):
    model = tiny("gemma3", sliding_window=window)
    theirs = generated(model, tokens=tokens)[1]
    plain = tiny("gemma3", sliding_window=window)
    accelerate_generation(model)
    ours = generated(model, tokens=tokens)[1]
    more, found = torch.arange(20, 32)[None], []
    for cache in (ours, theirs):
        cache.activate_past_recording()
        with torch.no_grad():
            plain(more, past_key_values=cache)
            cache.crop(-11)
            found.append(plain(more[:, 1:4], past_key_values=cache).logits)
        assert cache.get_seq_length() == 7 + tokens - 1 + 12 - 11 + 3
    assert torch.allclose(*found, atol=1e-4)


def test_a_full_window_cannot_be_cropped(tiny):
    model = tiny("gemma3", sliding_window=10)
    accelerate_generation(model)
    cache = generated(model, tokens=2)[1]
    cache.crop(-1)
    assert cache.get_seq_length() == 7
    with pytest.raises(RuntimeError, match="sliding window"):
        generated(model, tokens=12)[1].crop(-1)


KINDS = {
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "beams": {"num_beams": 3},
    "beams of two": {"num_beams": 4, "num_return_sequences": 2},
}


@pytest.mark.parametrize("continued", [False, True], ids=["new cache", "continued cache"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_searches(kind, continued, recorded_model, dense):
    found = []
    for model in (recorded_model, dense):
        text, cache = generated(model, tokens=6)
        given = {"past_key_values": cache} if continued else {}
        if continued and "num_beams" in KINDS[kind]:
            cache.batch_repeat_interleave(KINDS[kind]["num_beams"])
        found.append(generated(model, text, 10, **KINDS[kind], **given)[0])
    assert torch.equal(*found)
