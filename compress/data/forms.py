"""The forms of rows, and how a row becomes a document: plain text, or a conversation through a chat template.

    text           {"text": "..."}, or the column that the recipe names
    messages       {"messages": [{"role": "user", "content": "..."}]}; the content may be a list of text parts (OpenAI)
    conversations  {"conversations": [{"from": "human", "value": "..."}]} (ShareGPT)
    instruction    {"instruction": "...", "input": "...", "output": "..."} (Alpaca)
    completion     {"prompt": "...", "completion": "..."}; both may be lists of messages

The form of a row is found by its columns, in this order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from compress.errors import CalibrationError, CannotRun
from compress.models.chat_template import render_chat

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
"""Values of `from` in ShareGPT conversations, and their roles in chat templates."""

CONVERSATIONS = ("messages", "conversations", "conversation")
ANSWERS = ("completion", "response")
KNOWN = ("text", *CONVERSATIONS, "instruction", "output", "prompt", *ANSWERS)
"""Columns by which the form of a row is found."""

HOW = (
    'write {"text": "..."} or {"messages": [{"role": "user", "content": "..."}]}, or name the column of the text '
    "(column: NAME); other known columns: conversations, instruction with output, prompt with completion"
)

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Document:
    """The text of a row. form: of the row. template: whether a chat template made it from messages."""

    text: str
    form: str
    template: bool = False

    def checked(self, place: str) -> Document:
        """Return the document. Raises CalibrationError for a text that UTF-8 cannot encode; place: of the row."""
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            code = f"\\u{ord(self.text[error.start]):04x}"
            raise CalibrationError(
                f"{place}: its text holds {code}, half of a character, at position {error.start}; remove it, or write "
                "the character whole"
            ) from error
        return self


@dataclass(frozen=True)
class RowReader:
    """Makes documents of rows.

    column: of the text or the messages, or None. template: a chat template (Jinja) that replaces the tokenizer's.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    column: str | None = None
    template: str | None = None

    @property
    def templated(self) -> bool:
        """Return whether there is a chat template."""
        tokenizer_template = None if self.tokenizer is None else self.tokenizer.chat_template
        return self.template is not None or tokenizer_template is not None

    def document(self, row: Any, place: str) -> Document:
        """Return the document of a row.

        Args:
            row: the row.
            place: place of the row, for errors.

        Raises:
            CalibrationError: for a row without text, and a text that UTF-8 cannot encode.
        """
        return self._document(row, place).checked(place)

    def _document(self, row: Any, place: str) -> Document:
        if not isinstance(row, Mapping):
            raise CalibrationError(f"{place}: no text, but {type(row).__name__}; {HOW}")
        if self.column is not None:
            return self._of_column(row, self.column, place)
        if isinstance(row.get("text"), str):
            return Document(row["text"], "text")
        for column in CONVERSATIONS:
            if isinstance(row.get(column), list):
                return self._of_column(row, column, place)
        if isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
            return self._chat(_of_instruction(row), "instruction", place)
        answer = next((name for name in ANSWERS if row.get(name) is not None), None)
        if row.get("prompt") is not None and answer is not None:
            return self._completion(row["prompt"], row[answer], place)
        raise CalibrationError(f"{place}: no text in the columns {', '.join(map(str, row))}; {HOW}")

    def is_blank(self, row: Any) -> bool:
        """Whether the columns of the text are empty (null, blank, or no messages), so that the row may be skipped."""
        if not isinstance(row, Mapping):
            return False
        read = [row[name] for name in (KNOWN if self.column is None else (self.column,)) if name in row]
        return bool(read) and all(
            value is None or (isinstance(value, str) and not value.strip()) or value == [] for value in read
        )

    def _of_column(self, row: Mapping[str, Any], column: str, place: str) -> Document:
        if column not in row:
            columns = ", ".join(map(str, row))
            raise CalibrationError(f"{place}: no column {column!r}; its columns are {columns}")
        value = row[column]
        if isinstance(value, str):
            return Document(value, "text")
        messages = _messages(value, f"{place}: {column}")
        return self._chat(messages, "conversations" if "from" in value[0] else "messages", place)

    def _completion(self, prompt: Any, answer: Any, place: str) -> Document:
        if isinstance(prompt, str) and isinstance(answer, str):
            if not self.templated:
                return Document(prompt + answer, "completion")
            pair = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            return self._chat(pair, "completion", place)
        turns = [_messages(value, f"{place}: {name}") for name, value in (("prompt", prompt), ("completion", answer))]
        return self._chat([*turns[0], *turns[1]], "completion", place)

    def _chat(self, messages: Messages, form: str, place: str) -> Document:
        """Return the text of a conversation: by the chat template, or in lines `role: content` without one."""
        if not self.templated or self.tokenizer is None:
            return Document("\n".join(f"{m['role']}: {m['content']}" for m in messages), form)
        try:
            text = render_chat(self.tokenizer, messages, self.template)
        except CannotRun as error:
            reason = " ".join(str(error.cause).split())
            raise CalibrationError(
                f"{place}: the chat template refuses the conversation ({reason}); remove the row, or give another "
                "template (chat_template: FILE)"
            ) from error
        return Document(text, form, True)


def _of_instruction(row: Mapping[str, Any]) -> Messages:
    """Return the conversation of an Alpaca row; the input follows the instruction after a blank line."""
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    request = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]
    return [*system, {"role": "user", "content": request}, {"role": "assistant", "content": row["output"]}]


def _messages(value: Any, place: str) -> Messages:
    """Return messages with `role` and a text as `content`; other keys (tool calls) stay. Raises CalibrationError."""
    if not isinstance(value, list) or not value:
        raise CalibrationError(f"{place}: no text, but {_kind(value)}; {HOW}")
    return [_message(message, f"{place}[{i}]") for i, message in enumerate(value)]


def _message(message: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        raise CalibrationError(f"{place}: no text, but {_kind(message)}; {HOW}")
    if "from" in message and "role" not in message:
        role, content = SPEAKERS.get(message["from"]), message.get("value")
        if role is None:
            speakers = ", ".join(SPEAKERS)
            raise CalibrationError(f"{place}: from is {message['from']!r}, which has no known role; known: {speakers}")
        message = {"role": role, "content": content}
    role, content = message.get("role"), message.get("content")
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}
    if isinstance(content, list):
        content = "".join(_part(part, place) for part in content)
        message = {**message, "content": content}
    if not isinstance(role, str) or not isinstance(content, str):
        keys = ", ".join(map(str, message))
        raise CalibrationError(f"{place}: no text; its keys are {keys}; {HOW}")
    return message


def _part(part: Any, place: str) -> str:
    """Return the text of a part of a message's content."""
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        raise CalibrationError(f"{place}: a part of its content is {kind!r}; only parts with text can be read")
    return text


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else type(value).__name__
