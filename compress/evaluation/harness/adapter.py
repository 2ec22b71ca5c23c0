"""The model as an LM of lm-eval: prompts and tokens by lm-eval's own backend, forward passes by a `Scorer`."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.errors import CannotRun, ModelError
from compress.evaluation.harness.scoring import Answer, Request, Scorer
from compress.evaluation.store import Results, digest_of
from compress.models.chat_template import render_chat

Progress = Callable[[int, int], None]
GENERATED = 16  # number of generated answers that are written to disk together


class Backend:
    """Answers the requests of lm-eval from stored results and by a `Scorer`."""

    def __init__(self, scorer: Scorer, results: Results, progress: Progress) -> None:
        self._scorer, self._results, self.progress = scorer, results, progress

    def loglikelihoods(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """Answer requests of token ids; stored answers are not computed again."""

        def compute(missing: list[Request]) -> None:
            count = 0
            for batch in self._scorer.score(missing):
                self._results.put((key(missing[index]), list(answer)) for index, answer in batch)
                count += len(batch)
                self.progress(count, len(missing))

        def key(request: Request) -> str:
            return digest_of("loglikelihood", request.context, request.continuation)

        return [(answer.loglikelihood, answer.greedy) for answer in self._fill(requests, key, compute)]

    def _fill(self, requests: Sequence[Request], key: Any, compute: Any) -> list[Answer]:
        return [Answer(*values) for values in self._results.fill(requests, key, compute)]

    @property
    def truncated(self) -> int:
        """The number of requests whose beginning was cut off."""
        return self._scorer.truncated

    def texts(self, arguments: Sequence[Any], generate: Callable[[list[Any]], list[str]]) -> list[str]:
        """Answer requests (context, options) of generated texts.

        Args:
            arguments: The requests.
            generate: Generates the texts of some requests.
        """

        def compute(missing: list[Any]) -> None:
            for start in range(0, len(missing), GENERATED):
                chunk = missing[start : start + GENERATED]
                self._results.put((key(args), text) for args, text in zip(chunk, generate(chunk), strict=True))
                self.progress(min(start + GENERATED, len(missing)), len(missing))

        def key(args: Any) -> str:
            return digest_of("generate", list(args))

        return self._results.fill(arguments, key, compute)


def harness_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    results: Results,
    progress: Progress,
    note: Callable[[str], None],
) -> Any:
    """Wrap a model as an `lm_eval.api.model.LM`.

    Args:
        model: Model to evaluate.
        tokenizer: Its tokenizer.
        results: Stored results.
        progress: Is called with (number of answers, number of requests).
        note: Receives notes.

    Raises:
        ModelError: if the package lm-eval is not installed.
    """
    base, instance = _lm_eval()

    class Harness(base):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
        """Its tokens, windows and chat template are those of lm-eval's backend for transformers."""

        def __init__(self) -> None:
            super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1)
            scorer = Scorer(model, self.max_length, note=note)
            self.answers = Backend(scorer, results, progress)
            self.items: list[Any] = []

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
            self.items = [(request.task_name, request.doc_id) for request in requests]
            return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> Any:
            self.items = []
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = True, override_bs: Any = None) -> Any:
            items = self.items if len(self.items) == len(requests) else range(len(requests))
            return self.answers.loglikelihoods(
                [
                    Request(item, tuple(context), tuple(continuation))
                    for item, (_, context, continuation) in zip(items, requests, strict=True)
                ]
            )

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            """Render a conversation; without its system messages where the template refuses them, as lm-eval does."""
            prompting = {
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": not add_generation_prompt,
            }
            options = {**prompting, **self.chat_template_args}
            try:
                return render_chat(tokenizer, chat_history, **options)
            except CannotRun:
                messages = [message for message in chat_history if message["role"] != "system"]
                return render_chat(tokenizer, messages, **options)

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> Any:
            def generate(arguments: list[Any]) -> list[str]:
                instances = [instance("generate_until", {}, tuple(args), 0) for args in arguments]
                return base.generate_until(self, instances, disable_tqdm=True)

            return self.answers.texts([request.args for request in requests], generate)

    with quiet():
        return Harness()


def _lm_eval() -> tuple[Any, Any]:
    """lm-eval's backend for transformers, and its class of requests."""
    try:
        from lm_eval.api.instance import Instance
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ModelError(
            f"eval: tasks need the package lm-eval, which cannot be imported ({error}); install it with "
            "pip install 'compress-llm[eval]'"
        ) from error
    return HFLM, Instance


@contextmanager
def quiet() -> Iterator[None]:
    """Show only errors of lm-eval, and no progress bars."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
