"""The tokens of a chat template around messages that a model samples itself."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from compress.errors import CalibrationError
from compress.models.chat_template import prompt_text

MESSAGE = "message of the user"
"""A text that no template changes or contains."""


@dataclass(frozen=True)
class Turns:
    """Token ids that frame a conversation of one question and one answer.

    Attributes:
        opening: Before the user's message.
        reply: Between the user's message and the model's answer; the first one ends the message.
    """

    opening: tuple[int, ...]
    reply: tuple[int, ...]


def turns_of(tokenizer: PreTrainedTokenizerBase) -> Turns:
    """Return what the chat template of a tokenizer puts before a user's message and before the answer.

    Raises:
        ModelError: for a template that cannot be rendered.
        CalibrationError: without a template, for one that does not begin with a token, and for one that ends a message
            with ordinary text, which a model may write in a message, too.
    """
    if tokenizer.chat_template is None:
        raise CalibrationError("calibration: conversations: the tokenizer has no chat template; remove the option")
    before, separator, after = prompt_text(tokenizer, MESSAGE).partition(MESSAGE)
    opening, reply = (tuple(tokenizer(part, add_special_tokens=False).input_ids) for part in (before, after))
    if not (separator and opening and reply) or reply[0] not in tokenizer.added_tokens_decoder:
        raise CalibrationError(
            "calibration: conversations: the chat template does not put tokens before a user's message and end it with "
            "a special token, so the model cannot write one; use a .jsonl file of conversations"
        )
    return Turns(opening, reply)
