"""The forms of rows: each becomes the same conversation, and a row without text says what it holds."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from compress.data.forms import RowReader
from compress.errors import CalibrationError

PICO = Path(__file__).parents[1] / "pico" / "model"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"

MESSAGES = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
PARTS = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": ["Ho"]},
    ]
}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}
ALPACA = {"instruction": "Hi", "input": "", "output": "Ho"}
COMPLETION = {"prompt": "Hi", "completion": "Ho"}
RESPONSE = {"prompt": "Hi", "response": "Ho", "id": 7}
BOTH_LISTS = {"prompt": MESSAGES["messages"][:1], "completion": MESSAGES["messages"][1:]}
FORMS = [
    (MESSAGES, "messages"),
    (PARTS, "messages"),
    (SHAREGPT, "conversations"),
    ({"conversation": MESSAGES["messages"]}, "messages"),
    (ALPACA, "instruction"),
    (COMPLETION, "completion"),
    (RESPONSE, "completion"),
    (BOTH_LISTS, "completion"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(PICO)


@pytest.fixture(scope="module")
def templated():
    found = AutoTokenizer.from_pretrained(PICO)
    found.chat_template = TEMPLATE
    return found


@pytest.mark.parametrize(("row", "form"), FORMS)
def test_every_form_is_one_conversation(templated, row, form):
    found = RowReader(templated).document(row, "here")
    assert (found.text, found.form, found.template) == ("<user>Hi<assistant>Ho", form, True)


@pytest.mark.parametrize(("row", "form"), FORMS)
def test_without_a_template_there_are_lines_of_roles(tokenizer, row, form):
    found = RowReader(tokenizer).document(row, "here")
    plain = row in (COMPLETION, RESPONSE)
    assert found.text == ("HiHo" if plain else "user: Hi\nassistant: Ho")
    assert (found.form, found.template) == (form, False)


def test_a_given_template_replaces_the_tokenizers(templated, tokenizer):
    given = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    for known in (templated, tokenizer):
        assert RowReader(known, template=given).document(SHAREGPT, "here").text == "[Hi][Ho]"


def test_an_instruction_has_its_input_and_its_system_prompt(tokenizer):
    row = {"system": "Be brief.", "instruction": "Add.", "input": "1 2", "output": "3"}
    assert RowReader(tokenizer).document(row, "here").text == "system: Be brief.\nuser: Add.\n\n1 2\nassistant: 3"


def test_keys_of_messages_reach_the_template(templated):
    templated = AutoTokenizer.from_pretrained(PICO)
    templated.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls }}{% endif %}{% endfor %}"
    )
    row = {"messages": [{"role": "assistant", "content": None, "tool_calls": ["f"]}]}
    assert RowReader(templated).document(row, "here").text == "['f']"


def test_a_named_column_wins(tokenizer):
    row = {"text": "no", "body": "yes", "chat": SHAREGPT["conversations"]}
    assert RowReader(tokenizer, column="body").document(row, "here").text == "yes"
    found = RowReader(tokenizer, column="chat").document(row, "here")
    assert (found.text, found.form) == ("user: Hi\nassistant: Ho", "conversations")


def test_text_comes_before_messages(tokenizer):
    assert RowReader(tokenizer).document({**MESSAGES, "text": "a"}, "here").text == "a"


@pytest.mark.parametrize(
    ("row", "column", "message"),
    [
        ({"body": "a", "id": 1}, None, "here: no text in the columns body, id; .*name the column of the text"),
        ({"body": "a", "id": 1}, "bdy", "here: no column 'bdy'; its columns are body, id"),
        ({"id": 1}, "id", "here: id: no text, but int"),
        (
            {"conversations": [{"from": "alien", "value": "a"}]},
            None,
            r"conversations\[0\]: from is 'alien'.*known: human",
        ),
        ({"messages": ["a"]}, None, r"messages\[0\]: no text, but str"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            None,
            r"messages\[0\]: a part of its content is 'image_url'; only parts with text can be read",
        ),
        ({"prompt": "a", "completion": MESSAGES["messages"]}, None, "here: prompt: no text, but str"),
    ],
)
def test_rows_without_text_say_what_they_hold(tokenizer, row, column, message):
    with pytest.raises(CalibrationError, match=message):
        RowReader(tokenizer, column).document(row, "here")


def test_a_conversation_that_the_template_refuses_is_named(tokenizer):
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        CalibrationError, match=r"row 3: the chat template refuses.*roles must alternate.*chat_template: FILE"
    ):
        RowReader(tokenizer, template=strict).document(MESSAGES, "row 3")


def test_a_template_without_end_is_named(tokenizer):
    endless = "{{ 'a' * 10 ** 10 }}"
    with pytest.raises(
        CalibrationError, match=r"row 3: the chat template refuses.*more than 1 GiB.*chat_template: FILE"
    ):
        RowReader(tokenizer, template=endless).document(MESSAGES, "row 3")


@pytest.mark.parametrize(
    ("row", "column", "blank"),
    [
        ({"text": ""}, None, True),
        ({"text": None, "id": 1}, None, True),
        ({"text": " \n"}, None, True),
        ({"messages": []}, None, True),
        ({"text": None, **MESSAGES}, None, False),
        ({"id": None}, None, False),
        ({"body": None, "text": "a"}, "body", True),
        ("", None, False),
    ],
)
def test_blank_rows(row, column, blank):
    assert RowReader(column=column).is_blank(row) is blank
