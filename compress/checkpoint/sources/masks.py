"""Find linears that were pruned by their zeros.

No tensor of a dense checkpoint stores a mask. A linear counts as pruned if config.json lists it (`save.MASKED_KEY`), or
if more than `SHARE` of its weights are zero: trained weights are hardly ever exactly zero. Rows and columns that are
zero as a whole do not count; they are unused channels, which reshaping passes may remove.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxtyping import Bool
from torch import Tensor, nn

from compress.checkpoint.sources.opening import Mapped, OpenModel
from compress.checkpoint.sources.stored import opened_file
from compress.layers.linear import CompressedLinear, linears
from compress.numerics.sparse.positions import sparsities

MaskPolicy = Literal["keep", "forget"]
"""The treatment of the zeros of a pruned model: they stay zero, or they are ordinary weights."""

SHARE = 0.2  # rounding to 8 bits or 16-bit floats leaves far fewer zeros, a useful pruning more
SAMPLED_WEIGHTS = 2**15  # of a matrix that are read first, in whole rows: nearly all dense matrices are recognized by
FEWEST_ROWS = 16  # them, and torch counts no more on one thread; the start of threads takes longer than the rest


@dataclass(frozen=True)
class Zeros:
    """The zeros of a linear. share: of its weights. pattern: N:M if they have one. recorded: the checkpoint says so."""

    share: float
    pattern: str
    recorded: bool

    @classmethod
    def of(cls, mask: Bool[Tensor, "out in"], recorded: bool) -> Zeros:
        """The zeros outside of a mask."""
        found = min(sparsities(mask), key=lambda one: one.n_of_m[1] if one.n_of_m is not None else mask.shape[1] + 1)
        return cls(1 - int(mask.sum()) / mask.numel(), "" if found.n_of_m is None else found.text, recorded)


def mask_from_zeros(layer: CompressedLinear) -> None:
    """Make the zeros of a linear its mask."""
    layer.put(layer.all_parts, layer.weight != 0)


def zeros_of(opened: OpenModel, recorded: Collection[str], packed_names: Collection[str] = ()) -> dict[str, Zeros]:
    """The zeros of every pruned linear inside of the blocks that is dense or recorded, by full name.

    packed_names: the linears of a checkpoint that are not stored dense.
    """
    found: dict[str, Zeros] = {}
    for block in opened.blocks:
        for name, module in linears(block.module).items():
            full, layer = f"{block.name}.{name}", module if isinstance(module, CompressedLinear) else None
            known = full in recorded
            packed = full in packed_names
            if layer is not None and layer.positions is not None:
                continue
            if (packed or (layer is not None and layer.quantized)) and not known:
                continue
            if packed:
                found[full] = Zeros(0.0, "", True)  # counted when its block is loaded
            elif (mask := _mask(opened, full, module, known)) is not None:
                found[full] = Zeros.of(mask, known)
    return found


def _files(opened: OpenModel) -> Mapping[str, tuple[Path, str]]:
    return opened.weights.files if isinstance(opened.weights, Mapped) else {}


def _mask(opened: OpenModel, name: str, module: nn.Module, known: bool) -> Tensor | None:
    """The mask of a dense linear, or None if it does not count as pruned."""
    place = _files(opened).get(f"{name}.weight")
    if place is None:
        weight = CompressedLinear.of(module).weight
    else:
        path, key = place
        with opened_file(path) as file:
            weight = file.get_tensor(key)  # mapped, not read
        rows = max(FEWEST_ROWS, SAMPLED_WEIGHTS // weight.shape[1])
        if not known and _share(weight[:: -(-weight.shape[0] // rows)]) <= SHARE / 2:
            return None
        weight = weight.T if CompressedLinear.of(module).transposed else weight
    found = _share(weight) > 0 if known else _scattered(weight) > SHARE
    return weight != 0 if found else None


def _share(weight: Tensor) -> float:
    return 1 - int(weight.count_nonzero()) / weight.numel()


def _scattered(weight: Tensor) -> float:
    """The share of zeros among the rows and columns that are not zero as a whole: those are unused channels."""
    zero = weight == 0
    inside = zero[~zero.all(1)][:, ~zero.all(0)]
    return int(inside.sum()) / max(1, inside.numel())


def told(found: Mapping[str, Zeros], masks: MaskPolicy) -> Iterator[str]:
    """Notes about pruned linears, one for each share and pattern of zeros."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, zeros in found.items():
        origin = "pruned by an earlier run" if zeros.recorded else f"{zeros.share:.1%} zeros"
        groups[origin + (f", {zeros.pattern}" if zeros.pattern else "")].append(name)
    kept = "pruned weights stay zero (masks: forget makes them ordinary weights)"
    for text, names in groups.items():
        effect = kept if masks == "keep" else "zeros are ordinary weights now (masks: forget)"
        yield f"{len(names)} linears of the model are sparse ({text}); {effect}: {', '.join(names)}"
