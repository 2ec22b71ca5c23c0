"""Chat templates are rendered as transformers renders them, within limits of time, memory and length."""

import multiprocessing
import os
import time

import pytest
from transformers import AutoTokenizer

import compress.models.chat_template as chat_template
from compress.errors import CannotRun, ModelError
from compress.models.chat_template import prompt_inputs, render_chat

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'.", "name": None},
    {"role": "user", "content": [{"type": "text", "text": "Hi ☺\n"}, {"type": "image"}]},
    {"role": "assistant", "content": "Ho", "tool_calls": [{"name": "f", "arguments": {"b": 1, "a": 2.5}}]},
]
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "{%- for m in messages -%}\n  {% if loop.first %}\n {{ m }}\n {%- endif %}\n{% if loop.last %}{% break %}{% endif %}"
    "{{ m.content | tojson }}\n{% endfor %}",
    "{% set n = namespace(k=0) %}{% for m in messages %}{% set n.k = n.k + m.content | length %}{% endfor %}{{ n.k }}"
    "{% generation %}x{% endgeneration %}{% if add_generation_prompt %}<assistant>{% endif %}{{ thinking }}",
]
NEVER = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 10 ** (10 ** 8) }}",
    "{{ 7 ** (messages | length * 10 ** 8) }}",
]
TOO_LARGE = [
    "{{ 'a' * 10 ** 10 }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ 'a'.ljust(10 ** 10) }}",
    "{{ '%9999999999d' % 1 }}",
    "{% set n = namespace(k='aa') %}{% for i in range(60) %}{% set n.k = n.k ~ n.k %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'a' * 5000 }}{% endfor %}",
]


@pytest.fixture
def tokenizer(pico):
    return AutoTokenizer.from_pretrained(pico)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True, "thinking": True}])
def test_the_text_is_that_of_transformers(tokenizer, template, options):
    tokenizer.chat_template = template
    assert render_chat(tokenizer, MESSAGES, **options) == tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, **options
    )


def test_several_templates_have_names(tokenizer):
    tokenizer.chat_template = {"default": "one", "other": "two"}
    assert render_chat(tokenizer, MESSAGES) == "one"
    assert render_chat(tokenizer, MESSAGES, "other") == "two"
    assert render_chat(tokenizer, MESSAGES, "three") == "three"


@pytest.mark.parametrize("template", NEVER)
def test_a_template_without_end(tokenizer, template, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.5)
    render_chat(tokenizer, MESSAGES, "ready")
    begin = time.monotonic()
    with pytest.raises(CannotRun, match=r"did not finish within 0\.5 seconds"):
        render_chat(tokenizer, MESSAGES, template)
    assert time.monotonic() - begin < 10
    assert render_chat(tokenizer, MESSAGES, "next") == "next"


@pytest.mark.parametrize("template", TOO_LARGE)
def test_a_text_without_end(tokenizer, template):
    with pytest.raises(CannotRun, match=r"more than 1 GiB of memory|has more than \d+ characters|finish within"):
        render_chat(tokenizer, MESSAGES, template)
    assert render_chat(tokenizer, MESSAGES, "next") == "next"


def test_a_long_text_that_fits_into_memory(tokenizer):
    with pytest.raises(CannotRun, match=r"its text has more than \d+ characters"):
        render_chat(tokenizer, MESSAGES, "{{ 'a' * 20000000 }}")
    assert len(render_chat(tokenizer, MESSAGES, "{{ 'a' * 1000000 }}")) == 1_000_000


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "Expected an expression"),
        ("{% include 'a' %}", "no loader"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_an_error_of_a_template_is_its_message(tokenizer, template, message):
    with pytest.raises(CannotRun, match=message):
        render_chat(tokenizer, MESSAGES, template)


def test_a_prompt_is_put_into_the_template(tokenizer):
    tokenizer.chat_template = TEMPLATES[0] + "{% if add_generation_prompt %}<assistant>{% endif %}"
    chat = [{"role": "user", "content": "Hi"}]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = prompt_inputs(tokenizer, "Hi")
    assert inputs["input_ids"].tolist() == expected["input_ids"].tolist()
    assert inputs["attention_mask"].tolist() == expected["attention_mask"].tolist()
    assert prompt_inputs(tokenizer, "Hi", plain=True)["input_ids"].tolist() == [tokenizer("Hi")["input_ids"]]


def test_a_prompt_says_that_the_template_cannot_be_rendered(tokenizer):
    tokenizer.chat_template = TOO_LARGE[0]
    with pytest.raises(
        ModelError, match=r"chat template of its tokenizer cannot be rendered \(it takes more than 1 GiB"
    ):
        prompt_inputs(tokenizer, "Hi")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_renders_by_itself(tokenizer):
    assert render_chat(tokenizer, MESSAGES, "parent") == "parent"
    process = multiprocessing.get_context("fork").Process(target=render_chat, args=(tokenizer, MESSAGES, "child"))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert render_chat(tokenizer, MESSAGES, "parent again") == "parent again"
