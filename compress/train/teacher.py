"""Teachers: their predictions for the calibration sequences, computed once and stored, or computed in every step."""

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
from compress.models.kinds.objective import IGNORED, NEXT_TOKENS, LMObjective, Outputs
from compress.numerics.metrics import SoftTargets, rows_of_chunk, soft_targets
from compress.passes.contract.processes import Processes
from compress.train.checkpoint import digest

PARTS = ("log_probs", "index", "log_rest", "text")
VALUES = "values"
"""The name of stored `Features`."""

Teach = Callable[[], AbstractContextManager[nn.Module]]
"""Open the teacher as a context manager of a runnable model."""


@dataclass(frozen=True, eq=False)
class Features:
    """The teacher's answers without distributions, `Outputs.features`: hidden states, or the scores of a batch."""

    values: Float[Tensor, "*rows width"]


Targets = SoftTargets | Features


class Teacher(Protocol):
    """Targets for sequences of the calibration text."""

    def __call__(self, ids: Int[Tensor, "rows length"], rows: Sequence[int]) -> Targets:
        """The targets of all tokens of these sequences; rows: their numbers."""
        ...


def taught(
    output: Any,
    lm_objective: LMObjective,
    ids: Int[Tensor, "rows length"],
    rows: Sequence[int],
    temperature: float,
    top_k: int | None,
    where: str,
) -> Targets:
    """The targets in an output of the teacher. Raises NumericError."""
    logits = lm_objective.predictions(output)
    if logits is not None:
        wanted = lm_objective.targets(ids, rows) if lm_objective.learns else None
        return reduced(logits, wanted, temperature, top_k, where)
    assert isinstance(lm_objective, Outputs)
    values = lm_objective.features(output)
    if not bool(values.isfinite().all()):
        raise NumericError(f"{where}: the teacher's outputs are not finite")
    return Features(values)


def reduced(
    logits: Float[Tensor, "rows length vocabulary"],
    wanted: Int[Tensor, "rows length"] | None,
    temperature: float,
    top_k: int | None,
    where: str,
) -> SoftTargets:
    """Compute soft targets from logits, in chunks. Raises NumericError.

    wanted: `LMObjective.targets` of the text; None: the objective has none.
    """
    flat = logits.flatten(0, 1)
    rows = rows_of_chunk(flat.shape[-1])
    parts = [soft_targets(part, temperature, top_k) for part in flat.split(rows)]
    cells = {name: [getattr(p, name) for p in parts] for name in PARTS if getattr(parts[0], name) is not None}
    found = {name: torch.cat(pieces) for name, pieces in cells.items()}
    if not bool(found["log_probs"].isfinite().all()):
        raise NumericError(f"{where}: the teacher's logits are not finite")
    if wanted is None:
        return SoftTargets(**found)
    text = torch.cat([_log_p(*pair) for pair in zip(flat.split(rows), wanted.flatten().split(rows), strict=True)])
    return SoftTargets(**found, text=text)


def _log_p(logits: Float[Tensor, "tokens vocabulary"], ids: Int[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    found = -nn.functional.cross_entropy(logits.float(), ids, ignore_index=IGNORED, reduction="none")
    return found.masked_fill(ids == IGNORED, math.inf)


class OnlineTeacher:
    """A teacher that runs in every step."""

    def __init__(
        self, model: nn.Module, temperature: float, where: str, lm_objective: LMObjective = NEXT_TOKENS
    ) -> None:
        self.model, self.temperature, self.where, self.lm_objective = model, temperature, where, lm_objective

    @torch.no_grad()
    def __call__(self, ids: Int[Tensor, "rows length"], rows: Sequence[int]) -> Targets:
        return self.with_states(ids, rows, False)[0]

    @torch.no_grad()
    def with_states(
        self, ids: Int[Tensor, "rows length"], rows: Sequence[int], wanted: bool = True
    ) -> tuple[Targets, Sequence[Tensor]]:
        """Targets, and the hidden states before the first block and after each block, [rows, length, width]."""
        with torch.autocast(ids.device.type, enabled=False):
            found = self.lm_objective.read(self.model, ids, rows, output_hidden_states=wanted)
        targets = taught(found, self.lm_objective, ids, rows, self.temperature, None, self.where)
        return targets, found.hidden_states if wanted else ()


class CachedTeacher:
    """A teacher whose targets are computed in advance, one sequence at a time, in files or in memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._items: list[dict[str, Tensor] | Path] = []

    def append(self, item: dict[str, Tensor] | Path) -> None:
        """Add the targets of the next sequence, as the fields of `SoftTargets` or `Features` by name."""
        self._items.append(item)

    def __call__(self, ids: Int[Tensor, "rows length"], rows: Sequence[int]) -> Targets:
        found = [item if isinstance(item := self._items[row], dict) else load_file(item) for row in rows]
        if VALUES in found[0]:  # the rows of a batch of hidden states, or the scores of a batch as one row
            values = [part[VALUES] for part in found]
            return Features(torch.cat(values, dim=0 if values[0].dim() == 3 else 1).to(self.device))
        whole = {name: torch.cat([part[name] for part in found]).to(self.device) for name in found[0]}
        return SoftTargets(**whole)


@dataclass(frozen=True)
class TeacherOptions:
    """Options of a cached teacher: its `top_k` most likely tokens at a temperature.

    source: of the teacher; None: the uncompressed model. lm_objective: the model inputs for the text.
    """

    temperature: float
    top_k: int
    source: str | None = None
    lm_objective: LMObjective = NEXT_TOKENS


def cached_teacher(
    open_teacher: Teach,
    ids: Int[Tensor, "sequences length"],
    options: TeacherOptions,
    work: Path | None,
    device: torch.device,
    where: str,
    report_progress: Callable[[int, int], None],
) -> CachedTeacher:
    """Compute the teacher's most likely tokens for every token of every sequence; open the teacher only if needed.

    work: a folder that stores them; files of an interrupted run with the same options are reused. Several processes
    fill the folder together; without a folder, each process computes all. report_progress: called with (done, of).

    Raises NumericError, SaveError.
    """
    stored, folder = CachedTeacher(device), None
    if work is not None:
        record = {**vars(options), "lm_objective": repr(options.lm_objective)}
        folder = work / f"teacher-{digest(record, {'ids': ids})[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
    paths = [None if folder is None else folder / f"{i:06d}.safetensors" for i in range(len(ids))]
    missing = [i for i, path in enumerate(paths) if path is None or not _whole(path)]
    processes = Processes.launched(cpu=device.type == "cpu")
    processes.wait()  # so that all processes see the same missing files
    if folder is not None:
        missing = processes.share(missing)
    made: dict[int, dict[str, Tensor]] = {}
    if missing:
        with open_teacher() as model, torch.no_grad():
            for done, i in enumerate(missing):
                report_progress(done, len(missing))
                row = ids[i : i + 1].to(device)
                output = options.lm_objective.read(model, row, [i])
                targets = taught(output, options.lm_objective, row, [i], options.temperature, options.top_k, where)
                made[i] = {name: t.cpu().contiguous() for name, t in vars(targets).items() if t is not None}
                if (path := paths[i]) is not None:
                    with atomic(path) as part:
                        save_file(made.pop(i), part)
            report_progress(len(missing), len(missing))
    processes.wait()
    for i, path in enumerate(paths):
        stored.append(made[i] if path is None else path)
    return stored


def _whole(path: Path) -> bool:
    """Whether a file exists and is complete."""
    try:
        with safe_open(path, framework="pt") as file:
            return not {"log_probs", VALUES}.isdisjoint(file.keys())
    except (FileNotFoundError, SafetensorError):
        return False
