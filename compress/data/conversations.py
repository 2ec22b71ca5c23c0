"""The tokens of a chat template around messages that a model samples itself."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from compress.errors import CalibrationError, CannotRun, one_line
from compress.models.chat_template import render_chat

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
        CalibrationError: without a template, for one that cannot be rendered or does not begin with a token, and for
            one that ends a message with ordinary text, which a model may write in a message, too.
    """
    if tokenizer.chat_template is None:
        raise CalibrationError("calibration: conversations: the tokenizer has no chat template; remove the option")
    try:
        text = render_chat(tokenizer, [{"role": "user", "content": MESSAGE}], add_generation_prompt=True)
    except CannotRun as error:
        raise CalibrationError(
            f"calibration: conversations: the chat template cannot be rendered ({one_line(error.cause)}); remove the "
            "option"
        ) from error
    before, found, after = text.partition(MESSAGE)
    opening, reply = (tuple(tokenizer(part, add_special_tokens=False).input_ids) for part in (before, after))
    if not (found and opening and reply) or reply[0] not in tokenizer.added_tokens_decoder:
        raise CalibrationError(
            "calibration: conversations: the chat template does not put tokens before a user's message and end it with "
            "a special token, so the model cannot write one; use a .jsonl file of conversations"
        )
    return Turns(opening, reply)
