"""Generate text with a checkpoint, to see that it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from compress.checkpoint.load import load
from compress.checkpoint.sources.gguf_codes import checkpoint_of
from compress.errors import ModelError
from compress.models.chat_template import prompt_inputs
from compress.models.kinds.kinds import answers_prompts, described, prompt_length


@dataclass(frozen=True)
class Answering:
    """How an answer is generated.

    Attributes:
        tokens: The most tokens.
        plain: Continue the prompt as it is; otherwise it is put into the chat template of the tokenizer, if any.
        temperature: Of sampling; 0: the most likely token; None: 1 if `top_p` or `top_k` ask for sampling, else 0.
        top_p: Sample among the most likely tokens with this sum of probabilities.
        top_k: Sample among so many of the most likely tokens.
        seed: Of sampling.
    """

    tokens: int = 64
    plain: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """Return the arguments of transformers' `generate`."""
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        samples = self.temperature != 0 and any(value is not None for value in sampling.values())
        usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} if samples else dict.fromkeys(sampling)
        stated = {name: value for name, value in sampling.items() if value is not None} if samples else {}
        return {"max_new_tokens": self.tokens, "do_sample": samples, **usual, **stated}


class Stream(TextStreamer):
    """Pass the text of an answer on while it is generated."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)  # pyright: ignore[reportArgumentType]
        self.on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Pass a complete part of the text on."""
        self.on_text(text)


def generate_text(
    source: str,
    prompt: str,
    answering: Answering | None = None,
    dtype: str = "auto",
    device: str = "auto",
    activations: str | None = None,
    on_text: Callable[[str], None] | None = None,
) -> str:
    """Return the answer of a model to a prompt.

    Args:
        source: A compressed checkpoint, another local folder, a hub id or a .gguf file.
        prompt: The prompt.
        answering: Length and sampling; None: greedy.
        dtype: As of `load`.
        device: As of `load`.
        activations: As of `load`.
        on_text: Receives the text while it is generated.

    Raises:
        ModelError: for a model that generates no text or has no tokenizer, for a prompt that is empty or no text, and
            for a chat template that cannot be rendered.
    """
    answering = answering or Answering()
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ModelError("prompt: holds bytes that are no text in UTF-8; write it in UTF-8") from error
    model, tokenizer = load(checkpoint_of(source), dtype, device, activations=activations)
    if not answers_prompts(model):
        raise ModelError(
            f"model: {described(model)} and generates no text from a prompt; measure it with compress eval"
        )
    if tokenizer is None:
        raise ModelError(f"model: {source} has no tokenizer; add its tokenizer files to the folder")
    inputs: Any = prompt_inputs(tokenizer, prompt, answering.plain)
    if inputs["input_ids"].shape[1] == 0:
        raise ModelError("prompt: is empty; write some text")
    torch.manual_seed(answering.seed)
    run: Any = model.generate
    output = run(
        input_ids=inputs["input_ids"].to(model.device),
        attention_mask=inputs["attention_mask"].to(model.device),
        pad_token_id=tokenizer.eos_token_id,
        streamer=None if on_text is None else Stream(tokenizer, on_text),
        **answering.options(),
    )
    return str(tokenizer.decode(output[0, prompt_length(model, inputs["input_ids"]) :], skip_special_tokens=True))
