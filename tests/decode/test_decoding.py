"""Traced decoding of whole models: the tokens of the model itself, what is traced once, and what is refused."""

import copy
import gc
import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_families import FAMILIES, VOCAB
from transformers import DynamicCache, StaticCache

import compress
from compress import GPTQ, RTN
from compress.decode import accelerate_generation
from compress.decode import decoding as decoding_module
from compress.decode import generation as generation_module
from compress.decode.acceleration import compile_generation
from compress.decode.decoding import TracedDecoding
from compress.decode.generation import LENGTHS, cache_dtype, fixed_cache
from compress.kernels import dispatch
from compress.models.cache_size import cache_bytes
from compress.models.computation import remember_storage
from compress.native.library import available

pytestmark = pytest.mark.skipif(not available(), reason="no C++ library")
GREEDY = {"do_sample": False, "pad_token_id": 0}
OTHER_CACHES = {"mamba", "mamba2", "rwkv", "jamba", "bamba", "qwen3-next", "lfm2"}


def eager(model, ids, tokens: int = 12, **options):
    """Tokens of the model's own forward pass, with the same cache."""
    known = {"cache_implementation": "static", "disable_compile": True, **GREEDY, **options}
    return type(model).generate(model, ids, max_new_tokens=tokens, min_new_tokens=tokens, **known)


def generate_traced(model, ids, tokens: int = 12, **options):
    return model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **GREEDY, **options)


def traced_decoding(model) -> TracedDecoding:
    """The traced decoding of a model; steps that are not traced are those of the model."""
    compile_generation(model)
    found: Any = model.get_compiled_call(None)
    found.fallback = CountingFallback(model)
    return found


class CountingFallback:
    """Counts the steps that are not traced."""

    def __init__(self, model):
        self.model, self.count = model, 0

    def __call__(self, **inputs):
        self.count += 1
        return type(self.model).__call__(self.model, **inputs)


@pytest.fixture(scope="module")
def packed(recipe, tmp_path_factory) -> Callable[..., str]:
    """packed(name, *passes) -> the folder of the pico model after passes."""
    made: dict[str, str] = {}

    def run(name, *passes):
        if name not in made:
            made[name] = str(tmp_path_factory.mktemp("packed") / name)
            compress.run(recipe(*passes, save={"format": "native"}), made[name], progress=False)
        return made[name]

    return run


PASSES = {
    "int4": [RTN(weights="int4", group_size=32)],
    "w8a8": [RTN(weights="int8", group_size="channel", activations="int8")],
    "rotated": [compress.Rotate(online="down_proj"), RTN(weights="int4", group_size=32)],
    "lattice": [compress.QuipSharp()],
    "outliers": [compress.LLMInt8()],
}


@pytest.mark.few(4, slow=8)
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("rows", [1, 3])
def test_packed_models_decode_the_same_tokens(name, rows, packed):
    folder = packed(name, *PASSES[name])
    model, _ = compress.load(folder)
    ids = torch.arange(1, 1 + 9 * rows).view(rows, 9) % 200
    wanted = eager(model, ids)
    found = traced_decoding(model)
    assert torch.equal(generate_traced(model, ids), wanted)
    decoder = next(iter(found.decoders.values()))
    assert found.reason is None
    assert decoder is not None
    assert decoder.verified
    assert found.fallback.count == 0


@pytest.mark.parametrize("first", [True, False], ids=["inference mode first", "no grad first"])
@pytest.mark.parametrize("name", PASSES)
def test_inference_mode_and_no_grad_share_a_step(name, first, packed):
    model, _ = compress.load(packed(name, *PASSES[name]))
    ids = torch.arange(1, 10).view(1, 9)
    wanted = eager(model, ids)
    found = traced_decoding(model)
    for mode in (first, not first, first):
        with torch.inference_mode(mode):
            assert torch.equal(generate_traced(model, ids), wanted)
    assert found.reason is None
    assert (len(found.decoders), found.fallback.count) == (1, 0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in OTHER_CACHES | {"albert", "modernbert"}])
def test_families(family, mode, tiny):
    model = tiny(family)
    if not model.can_generate() or model.config.is_encoder_decoder:
        return
    ids, mask = torch.arange(2, 14).view(2, 6) % VOCAB, torch.ones(2, 6, dtype=torch.int64)
    mask[0, :2] = 0  # a shorter text, padded on the left
    wanted = eager(model, ids, attention_mask=mask)
    found = traced_decoding(model)
    with mode():
        assert torch.equal(generate_traced(model, ids, attention_mask=mask), wanted)
    assert found.reason is None
    assert found.decoders
    assert found.fallback.count == 0


@pytest.mark.parametrize("family", ["mamba", "lfm2"])
def test_other_caches_are_left_alone(family, tiny):
    model = tiny(family)
    ids = torch.arange(2, 8)[None]
    wanted = model.generate(ids, max_new_tokens=6, min_new_tokens=6, **GREEDY)
    found = traced_decoding(model)
    assert torch.equal(generate_traced(model, ids, 6), wanted)
    assert not found.decoders


def test_a_window_that_fills_needs_a_second_step(tiny):
    model = tiny("gemma3", sliding_window=10)
    ids = torch.arange(2, 8)[None]
    wanted = eager(model, ids, 16)
    found = traced_decoding(model)
    assert torch.equal(generate_traced(model, ids, 16), wanted)
    assert [decoder.verified for decoder in found.decoders.values()] == [True, True]
    assert found.fallback.count == 0


def test_a_step_is_traced_once_for_many_texts(pico_model):
    found = traced_decoding(pico_model)
    for length in (3, 20, 7):
        ids = torch.arange(1, 1 + length)[None]
        assert torch.equal(generate_traced(pico_model, ids, 10), eager(pico_model, ids, 10))
    assert len(found.decoders) == 1
    longer = torch.arange(1, 1 + 2 * LENGTHS)[None] % 200
    assert torch.equal(generate_traced(pico_model, longer, 5), eager(pico_model, longer, 5))
    assert len(found.decoders) == 2


def test_a_prompt_is_computed_without_the_places_behind_it(pico_model):
    """A prompt of 7 tokens in a cache of 1024 attends to 7 keys."""
    seen = []
    traced_decoding(pico_model)
    for block in pico_model.model.layers:
        block.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
    ids = torch.arange(1, 8)[None]
    found = generate_traced(pico_model, ids, 1000)
    prompt, step = seen[0], seen[len(pico_model.model.layers)]
    assert prompt is None or prompt.shape[-1] == 7
    assert step.shape[-1] == 1024
    assert torch.equal(found[:, :40], eager(pico_model, ids, 33))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_keys_and_values_have_the_dtype_of_the_checkpoint(family, tiny, monkeypatch):
    """They are rounded as the checkpoint's dtype has them, in traced steps and in those of the model."""
    model = tiny(family)
    if family == "gemma3":
        model = tiny(family, sliding_window=10)
    remember_storage(model, torch.bfloat16)
    ids = torch.arange(2, 8)[None]
    cache = fixed_cache(model, 128, cache_dtype(model))
    wanted = model.generate(
        ids, past_key_values=cache, disable_compile=True, max_new_tokens=16, min_new_tokens=16, **GREEDY
    )
    assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}
    found = traced_decoding(model)
    assert torch.equal(generate_traced(model, ids, 16), wanted)
    assert found.reason is None
    assert found.fallback.count == 0
    kept = model.generate(ids, max_new_tokens=2, return_dict_in_generate=True, **GREEDY).past_key_values
    assert {layer.keys.dtype for layer in kept.layers} == {torch.bfloat16}
    found.reason = "it cannot be traced"
    kept = model.generate(ids, max_new_tokens=2, return_dict_in_generate=True, **GREEDY).past_key_values
    assert {layer.keys.dtype for layer in kept.layers} == {torch.float32}
    remember_storage(model, torch.float32)
    assert cache_dtype(model) is torch.float32
    remember_storage(model, torch.bfloat16)
    model.set_attn_implementation("eager")
    assert cache_dtype(model) is torch.float32


def test_a_cache_is_freed_after_its_text(pico_model):
    found, ids = traced_decoding(pico_model), torch.arange(1, 8)[None]
    freed = []
    made = pico_model.generate(ids, max_new_tokens=8, return_dict_in_generate=True, **GREEDY)
    for layer in made.past_key_values.layers:
        for tensor in (layer.keys, layer.values):
            weakref.finalize(tensor, freed.append, True)
    count = 2 * len(made.past_key_values.layers)
    del made, layer, tensor
    gc.collect()
    assert len(freed) == count
    assert torch.equal(generate_traced(pico_model, ids), eager(pico_model, ids))
    assert len(found.decoders) == 1


def test_two_generations_in_turns_have_a_cache_each(pico_model):
    found = traced_decoding(pico_model)
    ids = [torch.arange(1, 8)[None], torch.arange(30, 37)[None]]
    wanted = [eager(pico_model, one, 8) for one in ids]
    caches = [StaticCache(pico_model.config, max_cache_len=64) for _ in ids]
    texts = list(ids)
    with torch.no_grad():
        for turn in range(8):
            for i, cache in enumerate(caches):
                given = texts[i] if turn == 0 else texts[i][:, -1:]
                step = found if turn else found.fallback
                logits = step(input_ids=given, past_key_values=cache, use_cache=True).logits
                texts[i] = torch.cat([texts[i], logits[:, -1:].argmax(-1)], -1)
    for text, other in zip(texts, wanted, strict=True):
        assert torch.equal(text, other)


def test_samples_are_those_of_the_model(pico_model):
    ids = torch.arange(1, 8)[None]
    torch.manual_seed(1)
    wanted = eager(pico_model, ids, do_sample=True, temperature=1.0)
    traced_decoding(pico_model)
    torch.manual_seed(1)
    found = pico_model.generate(
        ids, max_new_tokens=12, min_new_tokens=12, do_sample=True, temperature=1.0, pad_token_id=0
    )
    assert torch.equal(found, wanted)


def test_hidden_states_are_those_of_the_model(pico_model):
    ids = torch.arange(1, 8)[None]
    found = traced_decoding(pico_model)
    outputs = pico_model.generate(
        ids, max_new_tokens=4, output_hidden_states=True, return_dict_in_generate=True, **GREEDY
    )
    assert len(outputs.hidden_states) == 4
    assert found.reason == "outputs past_key_values, hidden_states"
    assert found.fallback.count == 3


OWN = {
    "beams": {"num_beams": 3},
    "no cache": {"use_cache": False},
    "a cache by name": {"cache_implementation": "dynamic"},
    "drafts": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("name", OWN)
def test_other_ways_to_generate_are_those_of_transformers(name, pico_model):
    ids = torch.arange(1, 8)[None]
    wanted = pico_model.generate(ids, max_new_tokens=8, **GREEDY, **OWN[name])
    found = traced_decoding(pico_model)
    assert torch.equal(pico_model.generate(ids, max_new_tokens=8, **GREEDY, **OWN[name]), wanted)
    assert not found.decoders
    assert found.fallback.count == 0


def test_a_cache_that_is_given_is_used(pico_model):
    ids, cache = torch.arange(1, 8)[None], DynamicCache(config=pico_model.config)
    found = traced_decoding(pico_model)
    assert torch.equal(generate_traced(pico_model, ids, past_key_values=cache), eager(pico_model, ids))
    assert not found.decoders
    assert cache.get_seq_length() == 7 + 11


def test_a_cache_that_would_be_too_large_grows_with_the_text(pico_model, monkeypatch):
    ids = torch.arange(1, 8)[None]
    largest = cache_bytes(pico_model, 1, 17, pico_model.dtype)
    monkeypatch.setattr(generation_module, "LARGEST_CACHE", largest)
    found = traced_decoding(pico_model)
    generate_traced(pico_model, ids, 12)
    assert not found.decoders, "a token more than fits"
    assert torch.equal(generate_traced(pico_model, ids, 11), eager(pico_model, ids, 11))
    assert len(found.decoders) == 1


def test_plain_torch_is_plain(pico_model):
    found = traced_decoding(pico_model)
    with dispatch.plain_torch():
        generate_traced(pico_model, torch.arange(1, 8)[None])
    assert not found.decoders


def test_loaded_models_record(packed):
    ids = torch.arange(1, 8)[None]
    folder = packed("int4", *PASSES["int4"])
    wanted = generate_traced(compress.load(folder, compile=False)[0], ids)
    model, _ = compress.load(folder)
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    assert layer.traced is None, "loading converts no weights"
    assert torch.equal(generate_traced(model, ids), wanted)
    assert layer.traced is not None
    found: Any = model.get_compiled_call(None)
    assert len(found.decoders) == 1


@pytest.mark.parametrize(
    "made", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_records_steps_of_its_own(made, pico_model):
    ids = torch.arange(1, 8)[None]
    found = traced_decoding(pico_model)
    wanted = generate_traced(pico_model, ids)
    other = made(pico_model)
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.zero_()
    assert torch.equal(generate_traced(other, ids), eager(other, ids))
    assert torch.equal(generate_traced(pico_model, ids), wanted)
    assert len(found.decoders) == 1
    assert other.get_compiled_call(None) is not found


def test_a_step_whose_tracing_fails_is_that_of_the_model(pico_model, monkeypatch, caplog):
    def fail(*_):
        raise KeyError("an operation that nobody thought of")

    ids = torch.arange(1, 8)[None]
    wanted = eager(pico_model, ids)
    found = traced_decoding(pico_model)
    monkeypatch.setattr(decoding_module, "TracedStep", fail)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(generate_traced(pico_model, ids), wanted)
    assert "decoding is not traced: KeyError('an operation that nobody thought of')" in caplog.text
    assert found.fallback.count == 11


def test_a_step_that_differs_is_not_used(pico_model, monkeypatch, caplog):
    ids = torch.arange(1, 8)[None]
    wanted = eager(pico_model, ids)
    found = traced_decoding(pico_model)
    real = decoding_module.TracedStep.__call__
    monkeypatch.setattr(
        decoding_module.TracedStep, "__call__", lambda self, *inputs: [2 * one for one in real(self, *inputs)]
    )
    with caplog.at_level(logging.WARNING):
        assert torch.equal(generate_traced(pico_model, ids), wanted)
    assert found.reason is not None
    assert "differ by 1" in found.reason
    assert "decoding is not traced" in caplog.text
    assert found.fallback.count == 9  # of 11 steps; the first is traced, the second is compared


def test_a_model_that_is_moved_is_traced_again(pico_model):
    ids = torch.arange(1, 8)[None]
    found = traced_decoding(pico_model)
    generate_traced(pico_model, ids)
    pico_model.double().float()
    for block in pico_model.model.layers:
        block.mlp.down_proj.weight.data.mul_(0.5)
    assert torch.equal(generate_traced(pico_model, ids), eager(pico_model, ids))
    assert len(found.decoders) == 2


def test_learned_scales_are_not_rounded(packed):
    """Scales of GPTQ in float32 are no bfloat16 numbers: the packed layer keeps them as they are."""
    model, _ = compress.load(packed("gptq", GPTQ(weights="int4", group_size=32)))
    ids = torch.arange(1, 8)[None]
    wanted = eager(model, ids)
    traced_decoding(model)
    assert torch.equal(generate_traced(model, ids), wanted)


def test_the_contract_accelerates_a_model_that_is_loaded(pico_model):
    ids = torch.arange(1, 8)[None]
    expected = eager(pico_model, ids)
    accelerate_generation(pico_model, compile=False)
    assert "get_compiled_call" not in vars(pico_model), "the decoding of transformers is unchanged"
    accelerate_generation(pico_model)
    decoding: Any = pico_model.get_compiled_call(None)
    assert torch.equal(generate_traced(pico_model, ids), expected)
    assert len(decoding.decoders) == 1
