"""What is in a checkpoint, as values: its modules with their grids, groups, bits and bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from compress.layers.names import kind_of


@dataclass(frozen=True)
class Module:
    """A module of a checkpoint, or, of `groups`, all alike.

    stored_as: grid and parts in words. shape: (out, in), None if unknown. weights: their number. dtypes: of its
    tensors. size_bytes: of its tensors without the bias. zeros: the share of zeros, None if it was not asked for.
    """

    name: str
    stored_as: str
    grid: str
    shape: tuple[int, ...] | None
    group_size: int | str | None
    parts: tuple[str, ...]
    dtypes: tuple[str, ...]
    weights: int
    size_bytes: int
    zeros: float | None = None
    count: int = 1

    @property
    def bits_per_weight(self) -> float:
        """Bits of storage per weight."""
        return self.size_bytes * 8 / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class Inspection:
    """A checkpoint. method: its format in words. files: bytes by file. modules: in the order of the files."""

    source: str
    method: str
    files: dict[str, int]
    modules: list[Module]
    notes: list[str] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors but biases of modules with weights."""
        return sum(module.size_bytes for module in self.modules)

    @property
    def weights(self) -> int:
        """The number of all weights."""
        return sum(module.weights for module in self.modules)

    @property
    def bits_per_weight(self) -> float:
        """Bits of storage per weight."""
        return self.size_bytes * 8 / max(1, self.weights)

    def groups(self) -> list[Module]:
        """Return the modules by kind: those that differ in the numbers of their names only."""
        modules_by_kind: dict[Any, list[Module]] = {}
        for module in self.modules:
            kind = replace(module, name=kind_of(module.name), zeros=None)
            modules_by_kind.setdefault(kind, []).append(module)
        summaries = []
        for kind, members in modules_by_kind.items():
            zeros = [m.zeros for m in members if m.zeros is not None]
            weights, size = sum(m.weights for m in members), sum(m.size_bytes for m in members)
            share = sum(zeros) / len(zeros) if zeros else None
            summaries.append(replace(kind, weights=weights, size_bytes=size, zeros=share, count=len(members)))
        return summaries

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        modules = [{**asdict(m), "bits_per_weight": round(m.bits_per_weight, 4)} for m in self.modules]
        totals = {"weights": self.weights, "bytes": self.size_bytes, "file_bytes": sum(self.files.values())}
        shown = {"source": self.source, "method": self.method, "files": self.files, "modules": modules}
        return {**shown, "totals": {**totals, "bits_per_weight": round(self.bits_per_weight, 4)}, "notes": self.notes}
