"""Find linears that were pruned by their zeros, and give them masks.

No tensor of a dense checkpoint stores a mask. A linear counts as pruned if config.json lists it (`MASKED_KEY`), or if
more than `SHARE` of its weights are zero: trained weights are hardly ever exactly zero. Rows and columns that are zero
as a whole do not count; they are unused channels, which reshaping passes may remove.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from jaxtyping import Bool
from torch import Tensor, nn

from compress.checkpoint.opened import OpenModel, Weights, mask_from_zeros
from compress.checkpoint.sources.stored import read_stored
from compress.layers.linear import CompressedLinear, linears, replace_linear
from compress.models.structure.blocks import Block
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
        """Return the zeros outside of a mask."""
        layouts = sparsities(mask)
        layout = min(
            layouts, key=lambda sparsity: sparsity.n_of_m[1] if sparsity.n_of_m is not None else mask.shape[1] + 1
        )
        return cls(1 - int(mask.count_nonzero()) / mask.numel(), "" if layout.n_of_m is None else layout.text, recorded)


def with_masks(opened: OpenModel, recorded: Collection[str] = (), policy: MaskPolicy = "keep") -> OpenModel:
    """Give linears the masks that their zeros state, and write a note about them. `opened` may change in place.

    Args:
        recorded: names of linears that are known to be pruned.
    """
    checkpoint = opened.weights.checkpoint
    zeros = zeros_of(opened, recorded, () if checkpoint is None else checkpoint.schemes)
    masked = frozenset(zeros if policy == "keep" else ())
    if checkpoint is not None:
        opened.weights = replace(opened.weights, masked=masked, keep=policy == "keep")
        if opened.weights.has_layers:
            for block in opened.blocks:
                opened.weights.bring(block)
                zeros |= _stored_masks(block, opened.weights, zeros)
                opened.weights.release(block)
    else:
        for name in masked:
            mask_from_zeros(replace_linear(opened.model, name))
    opened.notes.extend(notes_of(zeros, policy))
    if masked:
        digest = hashlib.sha256(repr((opened.fingerprint, sorted(masked))).encode())
        opened = replace(opened, fingerprint=digest.hexdigest())
    return opened


def _stored_masks(block: Block, weights: Weights, zeros: Mapping[str, Zeros]) -> dict[str, Zeros]:
    """Record the masks of a loaded block in `weights`; returns those that the checkpoint stores."""
    stored = {}
    for name, layer in linears(block.module).items():
        full = f"{block.name}.{name}"
        mask = layer.mask if isinstance(layer, CompressedLinear) else None
        if mask is not None:
            weights.sparsities[full] = sparsities(mask)
            if full not in zeros:
                stored[full] = Zeros.of(mask, recorded=True)
    return stored


def zeros_of(opened: OpenModel, recorded: Collection[str], packed_names: Collection[str] = ()) -> dict[str, Zeros]:
    """Return the zeros of every pruned linear inside of the blocks that is dense or recorded, by full name.

    Args:
        packed_names: linears of a checkpoint that are not stored dense.
    """
    zeros: dict[str, Zeros] = {}
    for block in opened.blocks:
        for name, module in linears(block.module).items():
            full, layer = f"{block.name}.{name}", module if isinstance(module, CompressedLinear) else None
            is_recorded, is_packed = full in recorded, full in packed_names
            if layer is not None and layer.positions is not None:
                continue
            if (is_packed or (layer is not None and layer.quantized)) and not is_recorded:
                continue
            if is_packed:
                zeros[full] = Zeros(0.0, "", True)  # counted when its block is loaded
            elif (mask := _mask(opened, full, module, is_recorded)) is not None:
                zeros[full] = Zeros.of(mask, is_recorded)
    return zeros


def _mask(opened: OpenModel, name: str, module: nn.Module, recorded: bool) -> Tensor | None:
    """The mask of a dense linear, or None if it does not count as pruned."""
    checkpoint = opened.weights.checkpoint
    place = None if checkpoint is None else checkpoint.tensors.files.get(f"{name}.weight")
    if place is None:
        weight = CompressedLinear.of(module).weight
    else:
        weight = read_stored(place)
        rows = max(FEWEST_ROWS, SAMPLED_WEIGHTS // weight.shape[1])
        if not recorded and _share(weight[:: -(-weight.shape[0] // rows)]) <= SHARE / 2:
            return None
        weight = weight.T if CompressedLinear.of(module).transposed else weight
    is_pruned = _share(weight) > 0 if recorded else _scattered(weight) > SHARE
    return weight != 0 if is_pruned else None


def _share(weight: Tensor) -> float:
    return 1 - int(weight.count_nonzero()) / weight.numel()


def _scattered(weight: Tensor) -> float:
    """The share of zeros among the rows and columns that are not zero as a whole: those are unused channels."""
    zero = weight == 0
    inside = zero[~zero.all(1)][:, ~zero.all(0)]
    return int(inside.count_nonzero()) / max(1, inside.numel())


def notes_of(zeros_by_name: Mapping[str, Zeros], policy: MaskPolicy) -> Iterator[str]:
    """Yield notes about pruned linears, one for each share and pattern of zeros."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, zeros in zeros_by_name.items():
        origin = "pruned by an earlier run" if zeros.recorded else f"{zeros.share:.1%} zeros"
        groups[origin + (f", {zeros.pattern}" if zeros.pattern else "")].append(name)
    unchanged = "pruned weights stay zero (masks: forget makes them ordinary weights)"
    for text, names in groups.items():
        effect = unchanged if policy == "keep" else "zeros are ordinary weights now (masks: forget)"
        yield f"{len(names)} linears of the model are sparse ({text}); {effect}: {', '.join(names)}"
