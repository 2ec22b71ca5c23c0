"""Loglikelihoods with shared prefixes against one forward pass for each request."""

import random

import pytest
import torch

from compress.errors import NumericError
from compress.evaluation.harness.scoring import Input, Request, Scorer, answer, by_padding, by_prefix, common

FAMILIES = ["llama", "gpt2", "opt", "gpt-neox", "gemma2", "bloom", "falcon", "qwen3"]


def requests(items=6, seed=0):
    """Multiple choice of 2 to 4 continuations, single requests, equal inputs, and a choice that begins another."""
    draw = random.Random(seed)
    tokens = lambda count: tuple(draw.randrange(2, 64) for _ in range(count))  # noqa: E731
    made = []
    for item in range(items):
        context = tokens(draw.choice([6, 6, 11, 17]))
        made += [Request(item, context, tokens(draw.randint(1, 6))) for _ in range(draw.randint(2, 4))]
    start, rest = tokens(9), tokens(3)
    made += [Request("one token", start, (token,)) for token in (5, 6)]
    made += [Request("beginning", start, rest), Request("beginning", start, rest[:1])]
    made += [Request("contexts", (*start, token), rest) for token in (7, 8)]  # as in winogrande
    made += [Request(("single", i), tokens(5 + i), tokens(2)) for i in range(3)]
    return made


def alone(model, request, longest=64):
    tokens = torch.tensor([(request.context + request.continuation)[-(longest + 1) :]])
    with torch.no_grad():
        logs = model(input_ids=tokens[:, :-1]).logits[0, -len(request.continuation) :].float().log_softmax(-1)
    targets = torch.tensor(request.continuation)
    return float(logs.gather(1, targets[:, None]).sum()), bool((logs.argmax(-1) == targets).all())


def scored(scorer, asked):
    found = dict(pair for batch in scorer.score(asked) for pair in batch)
    return [found[i] for i in range(len(asked))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(4)
def test_shared_prefixes_give_the_loglikelihoods_of_single_requests(family, tiny):
    model, notes = tiny(family), []
    scorer = Scorer(model, 64, batch_tokens=60, note=notes.append)
    asked = requests()
    for request, found in zip(asked, scored(scorer, asked), strict=True):
        loglikelihood, greedy = alone(model, request)
        assert found.loglikelihood == pytest.approx(loglikelihood, rel=1e-4, abs=1e-4) and found.greedy == greedy
    assert scorer.shares and notes == []


def test_shared_prefixes_are_computed_once(tiny):
    model, seen = tiny("llama"), []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True)
    asked = [Request(0, tuple(range(2, 32)), (choice, 40, 41)) for choice in (50, 51, 52, 53)]
    scored(Scorer(model, 64, proven=True), asked)
    assert sum(seen) == 30 + 4 * 2
    scored(Scorer(model, 64, shares=False), asked)
    assert sum(seen) - 38 == 4 * 32


def test_items_that_prove_the_cache_are_answered_by_that(tiny):
    """The first item is computed both ways, and not again; the second one shares its prefix."""
    model, seen = tiny("llama"), []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True)
    first = [Request(0, tuple(range(2, 32)), (choice, 40, 41)) for choice in (50, 51, 52, 53)]
    scorer = Scorer(model, 64)
    scored(scorer, first)
    assert sum(seen) == 4 * 32 + (30 + 4 * 2) and scorer.proven and scorer.shares
    scored(scorer, [Request(1, *request[1:]) for request in first])
    assert sum(seen) == 4 * 32 + 2 * (30 + 4 * 2)


def test_a_model_whose_cache_is_wrong_does_not_share(tiny):
    model, notes = tiny("llama"), []

    def forget(module, args, kwargs):
        if kwargs.get("past_key_values") is not None and kwargs["past_key_values"].get_seq_length() > 0:
            kwargs["input_ids"] = kwargs["input_ids"].flip(1)
        return args, kwargs

    model.register_forward_pre_hook(forget, with_kwargs=True)
    asked = requests(2)
    scorer = Scorer(model, 64, note=notes.append)
    for request, found in zip(asked, scored(scorer, asked), strict=True):
        assert found.loglikelihood == pytest.approx(alone(model, request)[0], rel=1e-4, abs=1e-4)
    assert not scorer.shares and "prefixes are not shared: with the cache the logits differ" in notes[0]


def test_a_model_without_a_cache_does_not_share(tiny):
    model, notes = tiny("llama"), []
    plain = model.forward
    model.forward = lambda input_ids, **options: plain(input_ids=input_ids, use_cache=False)
    asked = requests(2)
    scorer = Scorer(model, 64, note=notes.append)
    assert scored(scorer, asked)[0].loglikelihood == pytest.approx(alone(model, asked[0])[0], rel=1e-4)
    assert not scorer.shares and "the model's cache cannot be used" in notes[0]


def test_long_contexts_lose_their_beginning(tiny):
    model = tiny("llama")
    request = Request(0, tuple(range(2, 40)), (41, 42))
    scorer = Scorer(model, 20)
    [found] = scored(scorer, [request])
    assert scorer.truncated == 1
    assert found.loglikelihood == pytest.approx(alone(model, request, longest=20)[0], rel=1e-5)


def test_logits_that_are_not_numbers_are_an_error(tiny):
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(NumericError, match="logits are NaN; evaluate it with dtype float32"):
        scored(Scorer(model, 64), requests(2))


def test_answers_by_hand():
    logs = torch.tensor([[0.0, 0.0, 0.0], [5.0, 1.0, 1.0], [0.0, 9.0, 0.0]])
    found = answer(Request(0, (1,), (0, 1)), logs)
    assert found.greedy and found.loglikelihood == pytest.approx(
        float(logs[1].log_softmax(0)[0] + logs[2].log_softmax(0)[1])
    )
    assert not answer(Request(0, (1,), (1, 1)), logs).greedy


def item(length, rests):
    """Inputs of one item: a common prefix of a length, and rests that begin differently."""
    return [Input(tuple(range(2, 2 + length)) + (60 + i,) * rest, length) for i, rest in enumerate(rests)]


def test_batches_hold_items_with_prefixes_of_similar_length():
    items = [item(8, [1, 2]), item(5, [2, 2]), item(8, [3, 3]), item(5, [1, 1])]
    lengths = lambda **limits: [[common(one) for one in batch] for batch in by_prefix(items, **limits)]  # noqa: E731
    assert lengths(max_tokens=1000, call=1) == [
        [8, 8],
        [5, 5],
    ]  # 3 tokens more for each of two other choices cost too much
    assert lengths(max_tokens=1000, call=4) == [[8, 8, 5, 5]]
    assert lengths(max_tokens=25, call=1) == [[8], [8], [5], [5]]  # tokens in the cache: 20, 22, 14, 12
    assert common(items[0][:1]) == 0


def test_rests_of_similar_length_are_padded_together():
    inputs = sorted(item(4, [9, 1, 8, 2]), key=lambda one: -len(one.tokens))
    assert [[len(one.tokens) for one in batch] for batch in by_padding(inputs, 4, 8)] == [[13, 12], [6, 5]]
    assert len(list(by_padding(inputs, 4, 100))) == 1
