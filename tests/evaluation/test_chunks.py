"""Windows that are read in chunks through the KV cache, as decoding does."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

import compress
from compress.errors import CompressError
from compress.evaluation.chunks import check_chunk, prove_chunks, read_in_chunks
from compress.evaluation.perplexity import score_of
from compress.evaluation.store import Results
from compress.evaluation.windows import WindowTask, measure_windows
from compress.models.caches.attentions import attentions_with_cache, cache_policies, set_policy, without_policies
from compress.models.caches.grid import GridCache
from compress.models.kinds.batch import IDS, Batch, Examples
from compress.numerics.quant.grids import GRIDS
from compress.results.measurements.perplexity import TextQuality

RESIDUAL = 4
POLICY = GridCache(GRIDS["int2"], GRIDS["int2"], symmetric=False, residual=RESIDUAL)


def with_policy(model, policy=POLICY):
    for module in attentions_with_cache(model).values():
        set_policy(module, policy)
    return model


@torch.no_grad()
def at_once(model, ids):
    return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_exact_keys_and_values_give_the_same_logits(chunk, pico_model, pico_ids):
    ids = pico_ids[:1, :24]
    torch.testing.assert_close(read_in_chunks(pico_model, ids, chunk), at_once(pico_model, ids), rtol=1e-3, atol=1e-3)


def test_token_by_token_each_token_reads_the_text_so_far(tiny, ids):
    """In a model of one block, whose keys depend on no attention: as one pass over each beginning of the text."""
    model, text = with_policy(tiny("llama", num_hidden_layers=1)), ids(1, 12)
    wanted = torch.cat([at_once(model, text[:, : end + 1])[:, -1:] for end in range(12)], 1)
    torch.testing.assert_close(read_in_chunks(model, text, 1), wanted, rtol=1e-4, atol=1e-4)
    assert (at_once(model, text) - wanted)[:, RESIDUAL:8].abs().max() > 1e-3  # at once their latest tokens are rounded


def test_the_residual_window_lowers_the_loss_in_chunks(pico_model, pico_ids):
    examples, exact = Examples.of_ids(pico_ids[:2, :48]), copy.deepcopy(pico_model)

    def loss(model, chunk=None):
        return score_of(measure_windows(model, examples, WindowTask(chunk=chunk), Results(None)), "next tokens").loss

    model = with_policy(pico_model, GridCache(GRIDS["int2"], GRIDS["int2"], residual=16))
    assert loss(exact) == pytest.approx(loss(exact, 8), rel=1e-4)
    assert loss(model, 1) - loss(exact) < 0.8 * (loss(model) - loss(exact))


def test_results_of_chunks_and_of_whole_windows_are_kept_apart():
    assert WindowTask(chunk=4).key(0) != WindowTask().key(0) != WindowTask(chunk=1).key(0)


def test_policies_are_off_and_then_on_again(pico_model, pico_ids):
    model, ids = with_policy(copy.deepcopy(pico_model)), pico_ids[:1, :16]
    policies = cache_policies(model)
    with without_policies(model):
        assert not cache_policies(model)
        assert torch.equal(at_once(model, ids), at_once(pico_model, ids))
    assert cache_policies(model) == policies
    assert not torch.equal(at_once(model, ids), at_once(pico_model, ids))


class Forgets(LlamaForCausalLM):
    """Returns a cache of the last tokens alone, as a state that a longer pass begins anew."""

    def forward(self, input_ids=None, past_key_values=None, **options):
        return super().forward(input_ids=input_ids, past_key_values=None, **options)


class Uncached(LlamaForCausalLM):
    """Returns no cache."""

    def forward(self, use_cache=None, **options):
        return super().forward(use_cache=False, **options)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Forgets, "computes other logits in chunks than at once"), (Uncached, "returns no cache; write chunk: null")],
)
def test_models_without_such_a_cache_are_refused(kind, message, tiny, ids):
    model = kind(tiny("llama").config).eval()
    model.load_state_dict(tiny("llama").state_dict())
    with pytest.raises(CompressError, match=message):
        prove_chunks(model, Batch({IDS: ids(1, 16)}), 2)


def test_a_cache_policy_is_no_reason_to_refuse(tiny, ids):
    model = with_policy(tiny("llama"))
    prove_chunks(model, Batch({IDS: ids(1, 16)}), 2)
    assert len(cache_policies(model)) == len(attentions_with_cache(model))


def test_masked_language_models_have_no_chunks(tiny):
    check_chunk(tiny("bert"), None)
    with pytest.raises(CompressError, match="chunk 2 needs a KV cache: .*; write chunk: null"):
        check_chunk(tiny("bert"), 2)


def test_a_plan_refuses_chunks_of_masked_language_models(recipe, tiny_folder):
    asked = recipe(compress.RTN(group_size=16), model=tiny_folder("bert"), eval=compress.Evaluate(chunk=1, length=32))
    with pytest.raises(CompressError, match="needs a KV cache"):
        compress.plan(asked)


def test_a_report_states_the_chunks(recipe, tmp_path):
    settings = compress.Evaluate(windows=2, length=24, chunk=4)
    steps = compress.KVCache(keys="int2", values="int2", residual=8)
    done = compress.run(recipe(steps, eval=settings), tmp_path / "out", overwrite=True)
    (text,) = [TextQuality.model_validate(row) for row in done.report["perplexity"]]
    assert text.chunk == 4 and text.divergence is not None and text.divergence.mean > 0
    assert "2 x 24 tokens, 4 at a time" in (tmp_path / "out" / "report.md").read_text()


def test_chunks_as_long_as_a_window_have_no_effect():
    with pytest.raises(ValueError, match="chunk: 32 has no effect with length: 32; write a smaller one"):
        compress.Evaluate(length=32, chunk=32)
