"""Teachers: predictions for the calibration sequences that are computed once and stored, or computed in every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compress.checkpoint.containers.files import atomic
from compress.errors import NumericError
from compress.models.kinds.batch import IGNORED, Examples
from compress.models.kinds.causal import CAUSAL
from compress.models.kinds.contract import ModelKind
from compress.numerics.metrics import SoftTargets, rows_of_chunk, soft_targets
from compress.passes.contract.processes import Processes
from compress.train.checkpoint import digest

FIELDS = ("log_probs", "index", "log_rest", "text")
VALUES = "values"
"""The name of stored `Features`."""

OpenTeacher = Callable[[], AbstractContextManager[nn.Module]]
"""Opens the teacher as a context manager of a runnable model."""


@dataclass(frozen=True, eq=False)
class Features:
    """Answers of a teacher that are not distributions (`ModelKind.values`): hidden states, or the scores of a batch.

    Attributes:
        values: the answers.
    """

    values: Float[Tensor, "*rows width"]


Targets = SoftTargets | Features


class Teacher(Protocol):
    """Computes targets for sequences of the calibration text."""

    def __call__(self, examples: Examples, rows: Sequence[int]) -> Targets:
        """Return the targets of all tokens of some sequences.

        Args:
            examples: the sequences.
            rows: indices of the sequences.
        """
        ...


def targets_of_output(
    output: Any,
    lm_objective: ModelKind,
    examples: Examples,
    rows: Sequence[int],
    temperature: float,
    top_k: int | None,
    label: str,
) -> Targets:
    """Convert an output of the teacher to targets.

    Args:
        output: output of the teacher.
        lm_objective: inputs and targets of the text.
        examples: the sequences.
        rows: indices of the sequences.
        temperature: temperature of the distributions.
        top_k: number of most likely tokens; None for all.
        label: prefix of error messages.

    Raises:
        NumericError: for outputs that are not finite.
    """
    logits = lm_objective.predictions(output)
    if logits is not None:
        text_targets = lm_objective.targets(examples, rows) if lm_objective.learns else None
        return soft_targets_of_logits(logits, text_targets, temperature, top_k, label)
    values = lm_objective.values(output)
    if not bool(values.isfinite().all()):
        raise NumericError(f"{label}: the teacher's outputs are not finite")
    return Features(values)


def soft_targets_of_logits(
    logits: Float[Tensor, "rows length vocabulary"],
    text_targets: Int[Tensor, "rows length"] | None,
    temperature: float,
    top_k: int | None,
    label: str,
) -> SoftTargets:
    """Compute soft targets from logits in chunks.

    Args:
        logits: logits of the teacher.
        text_targets: `ModelKind.targets` of the text; None for an objective without targets.
        temperature: temperature of the distributions.
        top_k: number of most likely tokens; None for all.
        label: prefix of error messages.

    Raises:
        NumericError: for logits that are not finite.
    """
    flat = logits.flatten(0, 1)
    rows = rows_of_chunk(flat.shape[-1])
    parts = [soft_targets(part, temperature, top_k) for part in flat.split(rows)]
    pieces_by_field = {
        name: [getattr(p, name) for p in parts] for name in FIELDS if getattr(parts[0], name) is not None
    }
    target_fields = {name: torch.cat(pieces) for name, pieces in pieces_by_field.items()}
    if not bool(target_fields["log_probs"].isfinite().all()):
        raise NumericError(f"{label}: the teacher's logits are not finite")
    if text_targets is None:
        return SoftTargets(**target_fields)
    text = torch.cat([_log_p(*pair) for pair in zip(flat.split(rows), text_targets.flatten().split(rows), strict=True)])
    return SoftTargets(**target_fields, text=text)


def _log_p(logits: Float[Tensor, "tokens vocabulary"], ids: Int[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    log_probs = -nn.functional.cross_entropy(logits.float(), ids, ignore_index=IGNORED, reduction="none")
    return log_probs.masked_fill(ids == IGNORED, math.inf)


class OnlineTeacher:
    """A teacher that runs in every step."""

    def __init__(self, model: nn.Module, temperature: float, label: str, lm_objective: ModelKind = CAUSAL) -> None:
        self.model, self.temperature, self.label, self.lm_objective = model, temperature, label, lm_objective

    @torch.no_grad()
    def __call__(self, examples: Examples, rows: Sequence[int]) -> Targets:
        return self.with_states(examples, rows, False)[0]

    @torch.no_grad()
    def with_states(
        self, examples: Examples, rows: Sequence[int], needs_states: bool = True
    ) -> tuple[Targets, Sequence[Tensor]]:
        """Return targets, and the hidden states before the first block and after each block [rows, length, width]."""
        with torch.autocast(next(self.model.parameters()).device.type, enabled=False):
            output = self.lm_objective.read(self.model, examples, rows, output_hidden_states=needs_states)
        targets = targets_of_output(output, self.lm_objective, examples, rows, self.temperature, None, self.label)
        return targets, output.hidden_states if needs_states else ()


class CachedTeacher:
    """A teacher whose targets are computed in advance, one sequence at a time, and stored in files or in memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._items: list[dict[str, Tensor] | Path] = []

    def append(self, item: dict[str, Tensor] | Path) -> None:
        """Add the targets of the next sequence, as the fields of `SoftTargets` or `Features` by name."""
        self._items.append(item)

    def __call__(self, examples: Examples, rows: Sequence[int]) -> Targets:
        items = [item if isinstance(item := self._items[row], dict) else load_file(item) for row in rows]
        if VALUES in items[0]:  # the rows of a batch of hidden states, or the scores of a batch as one row
            values = [item[VALUES] for item in items]
            return Features(torch.cat(values, dim=0 if values[0].dim() == 3 else 1).to(self.device))
        targets = {name: torch.cat([item[name] for item in items]).to(self.device) for name in items[0]}
        return SoftTargets(**targets)


@dataclass(frozen=True)
class TeacherOptions:
    """Options of a cached teacher.

    Attributes:
        temperature: temperature of the distributions.
        top_k: number of most likely tokens.
        source: source of the teacher; None for the uncompressed model.
        lm_objective: model inputs for the text.
    """

    temperature: float
    top_k: int
    source: str | None = None
    lm_objective: ModelKind = CAUSAL


def cached_teacher(
    open_teacher: OpenTeacher,
    examples: Examples,
    options: TeacherOptions,
    work: Path | None,
    device: torch.device,
    label: str,
    report_progress: Callable[[int, int], None],
) -> CachedTeacher:
    """Compute the teacher's most likely tokens for every token of every sequence; the teacher is opened only if needed.

    Several processes fill the folder together; without a folder, each process computes all targets.

    Args:
        open_teacher: opens the teacher.
        examples: the sequences.
        options: options of the targets.
        work: folder for the targets, or None for memory. Files of an interrupted run with the same options are reused.
        device: device of the teacher and the targets.
        label: prefix of error messages.
        report_progress: called with the number of completed and of all missing sequences.

    Raises:
        NumericError: for outputs that are not finite.
        SaveError: if the targets cannot be written.
    """
    stored, folder = CachedTeacher(device), None
    if work is not None:
        record = {**vars(options), "lm_objective": repr(options.lm_objective)}
        folder = work / f"teacher-{digest(record, examples.tensors())[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
    paths = [None if folder is None else folder / f"{i:06d}.safetensors" for i in range(len(examples))]
    missing = [i for i, path in enumerate(paths) if path is None or not _is_complete(path)]
    processes = Processes.launched(cpu=device.type == "cpu")
    processes.wait()  # so that all processes see the same missing files
    if folder is not None:
        missing = processes.share(missing)
    computed: dict[int, dict[str, Tensor]] = {}
    if missing:
        with open_teacher() as model, torch.no_grad():
            for count_done, i in enumerate(missing):
                report_progress(count_done, len(missing))
                row = examples[i : i + 1].to(device)
                output = options.lm_objective.read(model, row, [i])
                targets = targets_of_output(
                    output, options.lm_objective, row, [i], options.temperature, options.top_k, label
                )
                computed[i] = {name: t.cpu().contiguous() for name, t in vars(targets).items() if t is not None}
                if (path := paths[i]) is not None:
                    with atomic(path) as part:
                        save_file(computed.pop(i), part)
            report_progress(len(missing), len(missing))
    processes.wait()
    for i, path in enumerate(paths):
        stored.append(computed[i] if path is None else path)
    return stored


def _is_complete(path: Path) -> bool:
    """Return whether a file exists and is complete."""
    try:
        with safe_open(path, framework="pt") as file:
            return not {"log_probs", VALUES}.isdisjoint(file.keys())
    except (FileNotFoundError, SafetensorError):
        return False
