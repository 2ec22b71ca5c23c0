"""Generate text with a checkpoint, to see that it works."""

from __future__ import annotations

from typing import Any

from compress.checkpoint.load import load
from compress.checkpoint.sources.gguf_codes import checkpoint_of
from compress.errors import ModelError
from compress.models.kinds.kinds import answers_prompts, described, prompt_length


def generate_text(
    source: str, prompt: str, tokens: int = 64, plain: bool = False, dtype: str = "auto", activations: str | None = None
) -> str:
    """Return the greedy answer of a model to a prompt, at most `tokens` tokens.

    source: a compressed checkpoint, another local folder, a hub id or a .gguf file. plain: continue the prompt as it
    is; otherwise the prompt is put into the chat template of the tokenizer, if there is one. activations: as in `load`.

    Raises ModelError for a model that generates no text or has no tokenizer, and for an empty prompt.
    """
    model, tokenizer = load(checkpoint_of(source), dtype, activations=activations)
    if not answers_prompts(model):
        raise ModelError(
            f"model: {described(model)} and generates no text from a prompt; measure it with compress eval"
        )
    if tokenizer is None:
        raise ModelError(f"model: {source} has no tokenizer; add its tokenizer files to the folder")
    if plain or tokenizer.chat_template is None:
        inputs: Any = tokenizer(prompt, return_tensors="pt")
    else:
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    if inputs["input_ids"].shape[1] == 0:
        raise ModelError("prompt: is empty; write some text")
    run: Any = model.generate
    output = run(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=tokenizer.eos_token_id,
    )
    return str(tokenizer.decode(output[0, prompt_length(model, inputs["input_ids"]) :], skip_special_tokens=True))
