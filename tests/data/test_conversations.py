"""Conversations that a model samples in its chat template."""

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer

import compress
from compress import GPTQ, Calibration
from compress.data.conversations import MESSAGE, Turns, turns_of
from compress.data.self_sampling import DrawnConversations, Sampling, self_sampled
from compress.errors import CalibrationError, ModelError

TEMPLATE = (
    "{% for message in messages %}{{ eos_token }}{{ message['role'] }}:{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ eos_token }}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(pico):
    """Pico's tokenizer with a chat template, whose only special token opens each message."""
    tokenizer = AutoTokenizer.from_pretrained(pico)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def chosen(chooser, rows):
    """The next token of each row, where the model likes token 9 best, and token 2, which ends a message, next."""
    logits = torch.zeros(len(rows), 12)
    logits[:, 9], logits[:, 2] = 80.0, 40.0
    return chooser(torch.tensor(rows), logits).argmax(dim=-1).tolist()


def test_the_tokens_of_the_template(chatty):
    turns, end = turns_of(chatty), chatty.eos_token_id
    assert chatty.decode(turns.opening) == f"{chatty.eos_token}user:"
    assert chatty.decode(turns.reply) == f"{chatty.eos_token}assistant:"
    assert turns.opening[0] == turns.reply[0] == end


def test_the_template_frames_both_messages():
    """By hand: 5 6 opens a message of the user, 2 7 8 leads to the answer, and 2 or 3 ends it."""
    turns = Turns((5, 6), (2, 7, 8))
    chooser = DrawnConversations(torch.full((1, 20), 0.5), turns, torch.tensor([3]), 1.0)
    row = [5, 6]
    row += chosen(chooser, [row])  # written by the model
    row.append(2)  # the model ends its message
    for _ in range(3):
        row += chosen(chooser, [row])
    assert row == [5, 6, 9, 2, 7, 8, 9]
    row.append(2)
    for _ in range(3):
        row += chosen(chooser, [row])
    assert row == [5, 6, 9, 2, 7, 8, 9, 2, 5, 6, 9]
    row.append(3)  # the end of a document ends the conversation, also in the message of the user
    for _ in range(3):
        row += chosen(chooser, [row])
    assert row[-4:] == [3, 5, 6, 9]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [((2, 7), [5, 9, 2, 7, 9, 2, 5, 9, 2, 7, 9, 2, 5]), ((2,), [5, 9, 2, 9, 2, 5, 9, 2, 9, 2, 5, 9, 2])],
)
def test_no_message_is_empty(reply, expected):
    """The model would end every message at once."""
    chooser = DrawnConversations(torch.full((1, 20), 0.5), Turns((5,), reply), torch.tensor([3]), 1.0)
    logits = torch.zeros(1, 12)
    logits[0, 2], logits[0, 9] = 80.0, 40.0
    row = [5]
    while len(row) < len(expected):
        row.append(int(chooser(torch.tensor([row]), logits).argmax()))
    assert row == expected


def test_rows_are_in_different_messages():
    chooser = DrawnConversations(torch.full((2, 20), 0.5), Turns((5, 6), (2, 7)), torch.tensor([3]), 1.0)
    assert chosen(chooser, [[5, 6], [5, 6]]) == [9, 9]
    assert chosen(chooser, [[5, 6, 2], [5, 6, 9]]) == [7, 9]
    assert chosen(chooser, [[5, 6, 2, 7], [5, 6, 9, 2]]) == [9, 7]


def test_sampled_conversations(chatty, pico_model):
    turns = turns_of(chatty)
    ids = self_sampled(pico_model, chatty, 4, 64, 0, Sampling(turns=turns, max_repetition=1.0))
    opening = torch.tensor(turns.opening)
    assert ids.shape == (4, 64)
    assert torch.equal(ids[:, : len(opening)], opening.expand(4, -1))
    assert len({tuple(row) for row in ids.tolist()}) == 4
    for row in ids.tolist():
        text = chatty.decode(row)
        roles = [part.split(":")[0] for part in text.split(chatty.eos_token)[1:-1]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"] * (len(roles) % 2)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "the tokenizer has no chat template"),
        ("{{ messages[0]['content'] }}{{ eos_token }}", "does not put tokens before a user's message"),
        ("[INST]{{ messages[0]['content'] }}[/INST]", "end it with a special token"),
        ("{{ eos_token }}", "does not put tokens before a user's message"),
    ],
)
def test_templates_that_frame_no_message(pico, template, reason):
    tokenizer = AutoTokenizer.from_pretrained(pico)
    tokenizer.chat_template = template
    with pytest.raises(CalibrationError, match=reason):
        turns_of(tokenizer)


def test_a_template_that_fails_is_an_error_of_the_model(pico):
    tokenizer = AutoTokenizer.from_pretrained(pico)
    tokenizer.chat_template = "{{ raise_exception('no roles') }}"
    with pytest.raises(ModelError, match="cannot be rendered .no roles.; correct it"):
        turns_of(tokenizer)


def test_no_message_has_the_placeholder(chatty):
    assert chatty.decode(chatty(MESSAGE).input_ids) == MESSAGE


def test_a_recipe_samples_conversations(recipe, pico, chatty, tmp_path):
    shutil.copytree(pico, tmp_path / "model")
    chatty.save_pretrained(tmp_path / "model")
    shape = {"sequences": 4, "length": 64, "self_share": 0.5, "conversations": True}
    asked = recipe(
        GPTQ(weights="int4", group_size=32),
        model=str(tmp_path / "model"),
        calibration=Calibration(source="embedded", **shape),
        eval=None,
    )
    compress.plan(asked)
    compress.run(asked, tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert "conversations: true" in (tmp_path / "out" / "recipe.yaml").read_text()
    assert report["checkpoint_sha256"]


def test_a_plan_refuses_conversations_without_a_template(recipe):
    asked = recipe(GPTQ(), calibration=Calibration(source="self", sequences=2, length=32, conversations=True))
    with pytest.raises(CalibrationError, match="conversations: the tokenizer has no chat template"):
        compress.plan(asked)


def test_bos_has_no_effect_on_conversations():
    with pytest.raises(ValueError, match="bos has no effect: the chat template says how a conversation begins"):
        Calibration(source="self", conversations=True, bos=True)
    with pytest.raises(ValueError, match="conversations has no effect: embedded is not sampled"):
        Calibration(source="embedded", conversations=True)
