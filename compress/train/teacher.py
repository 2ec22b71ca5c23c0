"""What a teacher says of the calibration sequences: computed once and kept, or asked in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compress.errors import NumericError
from compress.model.save import atomic
from compress.numerics.divergences import CHUNK, SoftTargets, soft_targets
from compress.train.checkpoint import digest

PARTS = ("log_probs", "index", "log_rest")

Teach = Callable[[], AbstractContextManager[nn.Module]]
"""Opens the teacher, runnable inside of the context."""


class Teacher(Protocol):
    """Targets for sequences of the calibration text, one after the other."""

    def __call__(self, ids: Int[Tensor, "rows length"], rows: Sequence[int]) -> SoftTargets:
        """Of all tokens of these sequences; rows: their numbers among all."""
        ...


def reduced(logits: Tensor, temperature: float, top_k: int | None, where: str) -> SoftTargets:
    """Targets from logits, [rows, length, vocabulary], some tokens at a time. Raises NumericError."""
    flat = logits.reshape(-1, logits.shape[-1])
    parts = [soft_targets(part, temperature, top_k) for part in flat.split(CHUNK)]
    cells = [torch.cat([getattr(p, name) for p in parts]) for name in PARTS if getattr(parts[0], name) is not None]
    if not bool(cells[0].isfinite().all()):
        raise NumericError(f"{where}: the logits of the uncompressed model are not finite")
    return SoftTargets(*cells)


class Beside:
    """A teacher that is asked in every step."""

    def __init__(self, model: nn.Module, temperature: float, where: str) -> None:
        self.model, self.temperature, self.where = model, temperature, where

    @torch.no_grad()
    def __call__(self, ids: Int[Tensor, "rows length"], rows: Sequence[int]) -> SoftTargets:
        with torch.autocast(ids.device.type, enabled=False):
            logits = self.model(input_ids=ids, use_cache=False).logits
        return reduced(logits, self.temperature, None, self.where)


class Stored:
    """A teacher whose likeliest tokens were computed beforehand, a sequence at a time: in files, or in memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._items: list[dict[str, Tensor] | Path] = []

    def append(self, item: dict[str, Tensor] | Path) -> None:
        """The targets of the next sequence, by the names of `SoftTargets`."""
        self._items.append(item)

    def __call__(self, ids: Int[Tensor, "rows length"], rows: Sequence[int]) -> SoftTargets:
        found = [item if isinstance(item := self._items[row], dict) else load_file(item) for row in rows]
        whole = {name: torch.cat([part[name] for part in found]).to(self.device) for name in found[0]}
        return SoftTargets(**whole)


def ask(
    open_teacher: Teach, ids: Int[Tensor, "sequences length"], temperature: float, top_k: int, work: Path | None,
    device: torch.device, where: str, tell: Callable[[int, int], None],
) -> Stored:  # fmt: skip
    """The teacher's `top_k` likeliest tokens for every token of every sequence; the teacher is opened only if needed.

    work: a folder to keep them in; those that are there already are of the same question, and are used. tell(done, of).

    Raises NumericError, SaveError.
    """
    stored, folder = Stored(device), None
    if work is not None:
        folder = work / f"teacher-{digest({'temperature': temperature, 'top_k': top_k}, {'ids': ids})[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
    paths = [None if folder is None else folder / f"{i:06d}.safetensors" for i in range(len(ids))]
    missing = [i for i, path in enumerate(paths) if path is None or not _whole(path)]
    made: dict[int, dict[str, Tensor]] = {}
    if missing:
        with open_teacher() as model, torch.no_grad():
            for done, i in enumerate(missing):
                tell(done, len(missing))
                logits = model(input_ids=ids[i : i + 1].to(device), use_cache=False).logits
                targets = reduced(logits, temperature, top_k, where)
                made[i] = {name: t.cpu().contiguous() for name in PARTS if (t := getattr(targets, name)) is not None}
                if (path := paths[i]) is not None:
                    with atomic(path) as part:
                        save_file(made.pop(i), part)
            tell(len(missing), len(missing))
    for i, path in enumerate(paths):
        stored.append(made[i] if path is None else path)
    return stored


def _whole(path: Path) -> bool:
    """Whether a file is there and complete."""
    try:
        with safe_open(path, framework="pt") as file:
            return "log_probs" in file.keys()  # noqa: SIM118  not a dict
    except (FileNotFoundError, SafetensorError):
        return False
