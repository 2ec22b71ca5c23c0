"""Generation: greedy answers to fixed prompts before and after; perplexity does not show that a model loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.errors import NumericError
from compress.evaluation.base import EvaluationContext, Evaluator
from compress.evaluation.store import digest_of
from compress.models.chat_template import prompt_inputs
from compress.models.kinds.kinds import answers_prompts, prompt_length
from compress.numerics.statistics import mean
from compress.results.measurements.generation import GeneratedAnswer, GenerationResult

TOKENS = 96  # of an answer; enough to see a loop
GRAM = 4  # tokens of the n-grams that are counted; Welleck 2019 (arXiv 1908.04319), section 6.1, counts 4-grams

PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "List five fruits, one per line.",
    "What is 17 plus 25?",
    "Translate to French: Where is the train station?",
    "Give me three tips for sleeping better.",
    "Who wrote Romeo and Juliet, and what is it about?",
    "Write a Python function that reverses a string.",
    "Summarize: The cat sat on the mat because it was warm in the sun.",
    "Is a tomato a fruit or a vegetable? Answer in one sentence.",
    "Tell me a story about a robot that learns to cook.",
)


class Generation(Evaluator):
    """Greedy answers to `PROMPTS`; None if the settings do not request it, or the model generates no text."""

    needs_base: ClassVar[bool] = True

    def measure(self, model: PreTrainedModel, context: EvaluationContext) -> dict[str, Any] | None:
        """Compute the token ids and texts of all answers.

        Raises:
            NumericError: for logits that are NaN.
        """
        if not context.settings.generation or context.tokenizer is None or not answers_prompts(model):
            return None
        report_progress = context.progress(f"answers of {context.model}")
        results = context.store.results("generation")

        def compute(missing: list[str]) -> None:
            for count, prompt in enumerate(missing, start=1):
                results.put([(key(prompt), greedy_answer(model, context.tokenizer, prompt))])
                report_progress(count, len(missing))

        def key(prompt: str) -> str:
            return digest_of("answer", prompt, TOKENS)

        return {"answers": results.fill(PROMPTS, key, compute)}

    def combine(self, compressed: dict[str, Any] | None, base: dict[str, Any] | None) -> dict[str, Any] | None:
        """A `GenerationResult` as JSON."""
        if compressed is None or base is None:
            return None
        base_answers, compressed_answers = base["answers"], compressed["answers"]
        equal = [agreement(a["ids"], b["ids"]) for a, b in zip(base_answers, compressed_answers, strict=True)]
        equal_tokens = mean(equal)
        pairs = [
            [_answer(prompt, answer) for prompt, answer in zip(PROMPTS, side, strict=True)]
            for side in (base_answers, compressed_answers)
        ]
        ended, repeated = (
            tuple(sum(getattr(answer, name) for answer in side) / len(side) for side in pairs)
            for name in ("ended", "repetition")
        )
        return GenerationResult(
            prompts=len(PROMPTS),
            longest=TOKENS,
            agreement=equal_tokens.value,
            agreement_stderr=equal_tokens.stderr,
            same=sum(a["ids"] == b["ids"] for a, b in zip(base_answers, compressed_answers, strict=True))
            / len(base_answers),
            ended=(ended[0], ended[1]),
            repetition=(repeated[0], repeated[1]),
            base=pairs[0],
            compressed=pairs[1],
        ).model_dump(mode="json")


def greedy_answer(model: PreTrainedModel, tokenizer: Any, prompt: str) -> dict[str, Any]:
    """Generate a greedy answer, with the chat template if there is one.

    Raises:
        NumericError: for logits that are NaN.
        ModelError: for a chat template that cannot be rendered.
    """
    ids = cast("Tensor", prompt_inputs(tokenizer, prompt)["input_ids"]).to(model.device)
    run: Any = model.generate
    with torch.no_grad():
        output = run(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=tokenizer.eos_token_id,
            output_logits=True,
            return_dict_in_generate=True,
        )
    if bool(output.logits[0].isnan().any()):
        raise NumericError("the model's logits are NaN on a prompt; evaluate it with dtype float32")
    answer = output.sequences[0, prompt_length(model, ids) :].tolist()
    text = str(tokenizer.decode(answer, skip_special_tokens=True))
    return {"ids": answer, "text": text, "ended": len(answer) < TOKENS or answer[-1] == tokenizer.eos_token_id}


def agreement(a_ids: Sequence[int], b_ids: Sequence[int]) -> int:
    """Count the tokens before two answers differ."""
    pairs = enumerate(zip(a_ids, b_ids, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(a_ids), len(b_ids)))


def repetition(ids: Sequence[int]) -> float:
    """Compute the fraction of the 4-grams of an answer that occurred in it before; 0 for short answers."""
    grams = [tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _answer(prompt: str, generated: dict[str, Any]) -> GeneratedAnswer:
    return GeneratedAnswer(
        prompt=prompt,
        text=generated["text"],
        tokens=len(generated["ids"]),
        ended=generated["ended"],
        repetition=repetition(generated["ids"]),
    )
