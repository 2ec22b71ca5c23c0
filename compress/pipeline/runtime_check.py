"""Run an exported model once in the program that it is for, and compare it with the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from compress.checkpoint.load import load
from compress.data.installed_texts import embedded_text
from compress.errors import UserError, VerificationError
from compress.models.child_process import reason_of, run_function
from compress.pipeline.convert import ExportOptions
from compress.pipeline.runtime_files import SOURCE

TOKENS = 64
"""Token ids of the comparison; one less than its positions for a model with fewer."""
CHARACTERS = 1000
"""Of the text that they are taken from."""


@dataclass(frozen=True)
class RuntimeCheck:
    """The comparison of an exported model in another program with its checkpoint, for the same token ids.

    Attributes:
        program: Name and version of the program.
        nll: Mean negative log-likelihood of the tokens in the program, in nats.
        expected_nll: The same in `compress`.
        difference: Greatest difference of log-probabilities, relative to the largest.
        tokens: Number of tokens.
    """

    program: str
    nll: float
    expected_nll: float
    difference: float
    tokens: int

    @property
    def text(self) -> str:
        """Return the comparison in words."""
        return (
            f"{self.program} ran the model: negative log-likelihood of {self.tokens} tokens {self.nll:.4f}, and "
            f"{self.expected_nll:.4f} in compress"
        )


@dataclass(frozen=True)
class RuntimeComparison:
    """How an exported model is compared.

    Attributes:
        package: The program, by the name of its package.
        answer: A function of a module that writes the logits of (folder, file of token ids) to a third path. It is
            called in a child process.
        tolerance: Greatest difference of log-probabilities, relative to the largest.
    """

    package: str
    answer: Callable[[Path, Path, Path], None]
    tolerance: float

    def compare(self, place: Path, out: Path, tokenizer: PreTrainedTokenizerBase | None) -> RuntimeCheck:
        """Compare the log-probabilities of both models.

        Args:
            place: Folder for temporary files, with the folder `SOURCE` of the checkpoint.
            out: Folder of the exported model.
            tokenizer: Of the model; None: token ids are drawn.

        Raises:
            VerificationError: If the program cannot run the model, or computes other values.
        """
        model, _ = load(place / SOURCE, "float32")
        ids = _ids(tokenizer, model.config.get_text_config())
        with torch.no_grad():
            ours = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
        del model
        asked, answered = place / "ids.safetensors", place / "logits.safetensors"
        save_file({"ids": ids}, asked)
        result, program = run_function(self.answer, out, asked, answered), f"{self.package} {version_of(self.package)}"
        if result.returncode != 0:
            raise VerificationError(f"export: {program} cannot run the result: {reason_of(result)}")
        theirs = load_file(answered)["logits"].float().log_softmax(-1)
        difference = float((theirs - ours).abs().max() / ours.abs().max())
        check = RuntimeCheck(program, _nll(theirs, ids), _nll(ours, ids), difference, len(ids))
        if not difference <= self.tolerance:
            raise VerificationError(
                f"export: {check.text}; log-probabilities differ by {difference:.1e} of the largest, more than "
                f"{self.tolerance:.0e}; nothing was written"
            )
        return check


def check_possible(form: str, modules: Sequence[str], options: ExportOptions) -> None:
    """Check the options that runtimes share, and the packages of one.

    Args:
        form: Name of the format, and of the extra.
        modules: Modules of its packages.
        options: The options.

    Raises:
        UserError: For a number type of matrices, and for a missing package.
    """
    if options.type != "auto":
        raise UserError(f"export: type {options.type} is for format gguf; quantize the model first, or leave type out")
    missing = [name for name in modules if find_spec(name.partition(".")[0]) is None or find_spec(name) is None]
    if missing:
        listed = ", ".join(name.replace("_", "-").replace(".", "-") for name in missing)
        raise UserError(f"export: format {form} needs {listed}; install the extra: compress-llm[{form}]")


def version_of(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:  # a build for other devices has another name, such as onnxruntime-genai-cuda
        return "(unknown version)"


def _ids(tokenizer: PreTrainedTokenizerBase | None, config: PreTrainedConfig) -> Tensor:
    """Return token ids of a text; of a model without a tokenizer, ids from the whole vocabulary.

    The programs have a place for one more token in the context of the model.
    """
    positions = getattr(config, "max_position_embeddings", None)
    length = TOKENS if positions is None else min(TOKENS, positions - 1)
    if tokenizer is None:
        return torch.randint(0, int(config.vocab_size), (length,), generator=torch.Generator().manual_seed(0))
    text = embedded_text("test")[0][:CHARACTERS]
    return torch.tensor(tokenizer(text)["input_ids"][:length])


def _nll(log_probabilities: Tensor, ids: Tensor) -> float:
    return -float(log_probabilities[:-1].gather(1, ids[1:, None]).mean())
