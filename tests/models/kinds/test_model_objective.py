"""What models are asked for: shares of masks by count, what they depend on, and which models predict what."""

import pytest
import torch
from encoders import MASK, VOCAB, tokenizer
from transformers import BartConfig, BartForConditionalGeneration, BertConfig, BertForMaskedLM, BertLMHeadModel

from compress.errors import CalibrationError, ModelError
from compress.models.kinds.batch import IGNORED, Examples
from compress.models.kinds.causal import CAUSAL
from compress.models.kinds.contract import is_masked, without_cache
from compress.models.kinds.kinds import objective_of
from compress.models.kinds.masked import MaskedLM, special_ids


def drawn_by(lm_objective, text, rows):
    """The masked inputs and the targets of rows."""
    shown = lm_objective.shown(Examples.of_ids(text), rows).batch()
    return shown.inputs["input_ids"], shown.labels


MANY = 1 << 40  # a random token is never the one that stands there, nor the mask


@pytest.fixture(scope="module")
def text():
    """[500, 100] tokens, none of them special."""
    return torch.randint(10, MANY, (500, 100), generator=torch.Generator().manual_seed(1))


def test_the_shares_are_those_of_the_paper(text):
    """Of 100 tokens exactly 15; of these 7500, 80% are shown as the mask and 10% as they are, give or take 3 sigma."""
    shown, targets = drawn_by(MaskedLM(MASK, MANY), text, range(500))
    asked = targets != IGNORED
    assert bool((asked.sum(1) == 15).all())
    assert torch.equal(targets[asked], text[asked]) and torch.equal(shown[~asked], text[~asked])
    masked, same = float((shown[asked] == MASK).float().mean()), float((shown == text)[asked].float().mean())
    assert masked == pytest.approx(0.8, abs=0.014) and same == pytest.approx(0.1, abs=0.0105)
    # every place is as likely: 75 of 500, give or take 4 sigma of a hypergeometric count
    counts = asked.sum(0)
    assert counts.min() > 75 - 32 and counts.max() < 75 + 32
    drawn = shown[asked & (shown != text) & (shown != MASK)].double()
    assert float(drawn.mean()) / MANY == pytest.approx(0.5, abs=0.04) and len(drawn.unique()) == len(drawn)


@pytest.mark.parametrize(("length", "share", "count"), [(2, 0.15, 1), (3, 0.5, 2), (10, 0.25, 2), (40, 0.15, 6)])
def test_as_many_are_asked_for_as_the_share_says_and_one_at_least(text, length, share, count):
    targets = MaskedLM(MASK, MANY, probability=share).targets(Examples.of_ids(text[:5, :length]), range(5))
    assert (targets != IGNORED).sum(1).tolist() == [count] * 5


def test_special_tokens_are_not_asked_for_and_do_not_count():
    ids = torch.tensor([[2, *range(10, 20), 3, 0, 0, 0, 0, 0, 0, 0, 0]])
    shown, targets = drawn_by(MaskedLM(MASK, MANY, special=(0, 2, 3), probability=0.9), ids, [0])
    at = (targets[0] != IGNORED).nonzero()[:, 0]
    assert len(at) == 9 and int(at.min()) >= 1 and int(at.max()) <= 10
    assert torch.equal(shown[0, 11:], ids[0, 11:])
    with pytest.raises(CalibrationError, match="sequence 7 holds only special tokens"):
        drawn_by(MaskedLM(MASK, MANY, special=(0, 2, 3)), ids[:, 11:], [7])


def test_masks_depend_on_the_seed_and_the_number_of_a_sequence_alone(text):
    lm_objective, same = MaskedLM(MASK, MANY), text[:1].expand(4, -1)
    shown, targets = drawn_by(lm_objective, text[:4], range(4))
    for rows in ([2, 0], [3], [1, 1]):
        again = drawn_by(lm_objective, text[rows], rows)
        assert torch.equal(again[0], shown[rows]) and torch.equal(again[1], targets[rows])
    places = lm_objective.targets(Examples.of_ids(same), range(4)) != IGNORED
    assert torch.equal(places, targets != IGNORED)  # of other tokens the same places
    assert len({tuple(row.tolist()) for row in places}) == 4
    other = MaskedLM(MASK, MANY, seed=1).targets(Examples.of_ids(same), range(4)) != IGNORED
    assert not bool((places == other).all(1).any())


@pytest.mark.parametrize("lm_objective", [CAUSAL, MaskedLM(MASK, VOCAB)])
def test_answers_are_the_logits_where_targets_are(lm_objective, ids):
    logits = torch.randn(3, 16, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = [4, 0, 9]
    targets = lm_objective.targets(Examples.of_ids(ids(3)), rows)
    found, tokens = lm_objective.answers(logits, Examples.of_ids(ids(3)), rows)
    assert torch.equal(found, logits[targets != IGNORED]) and torch.equal(tokens, targets[targets != IGNORED])


def test_next_tokens_by_hand():
    targets = CAUSAL.targets(Examples.of_ids(torch.tensor([[5, 6, 7], [8, 9, 5]])), [0, 1])
    assert targets.tolist() == [[6, 7, IGNORED], [9, 5, IGNORED]]


# Which model predicts what


def test_what_is_predicted_is_known_by_the_class(tiny):
    assert is_masked(BertForMaskedLM, BertConfig())
    assert not is_masked(BertLMHeadModel, BertConfig(is_decoder=True))
    assert not is_masked(BartForConditionalGeneration, BartConfig())  # writes text; listed all the same
    assert not is_masked(torch.nn.Linear, None)
    assert objective_of(tiny("llama"), None) is CAUSAL and objective_of(tiny("gpt2"), None) is CAUSAL
    assert objective_of(tiny("bert"), tokenizer(), 3) == MaskedLM(MASK, VOCAB, (0, 1, 2, 3, 4), seed=3)
    assert objective_of(tiny("bert"), tokenizer(40), 3) == MaskedLM(MASK, 40, (0, 1, 2, 3, 4), seed=3)


def test_special_tokens_are_those_that_the_tokenizer_says():
    assert special_ids(tokenizer()) == (0, 1, 2, 3, 4)
    assert special_ids(tokenizer(cls_token=None, sep_token="w9")) == (0, 1, 4, 9)


@pytest.mark.parametrize(
    ("known", "message"),
    [
        (None, r"BertForMaskedLM predicts masked tokens, but it has no tokenizer; .* pass one to compress.apply"),
        (tokenizer(mask_token=None), "but its tokenizer has no mask token; save a tokenizer with a mask token in"),
        (
            tokenizer(80, mask_token="w70"),
            "the mask token of its tokenizer is 70, outside the model's vocabulary of 64 tokens",
        ),
    ],
)
def test_a_mask_that_is_not_known_is_an_error(tiny, known, message):
    with pytest.raises(ModelError, match=message):
        objective_of(tiny("bert"), known)


def test_a_model_that_sees_the_next_tokens_is_not_asked_for_them(tiny, ids):
    with pytest.raises(ModelError, match="BertForMaskedLM does not predict next tokens; use objective_of"):
        CAUSAL.read(tiny("bert"), Examples.of_ids(ids(1)), [0])


def test_a_model_that_knows_no_cache_is_not_told_of_it(tiny):
    assert without_cache(tiny("llama")) == {"use_cache": False}
    model = torch.nn.Identity()
    model.config = object()
    assert without_cache(model) == {}
