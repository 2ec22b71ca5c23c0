"""Rotate the values of attention, head by head: the rows that write them, and the columns that read them.

Attention adds the values of tokens with weights that all channels of a head share, so an orthogonal matrix per head
commutes with it (QuaRot, arXiv 2404.00456, section 4, stage 1c). The channels of each head are found as permutation
links: channels that may be permuted within a head. That they may be rotated too is proved by a rotation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jaxtyping import Float
from torch import Tensor, nn

from compress.models.structure.links import Fold, apply_verified
from compress.models.structure.permutations import Permutation
from compress.models.structure.probes import Forward
from compress.models.structure.rewrite import remember, rewrite_rows, rewrite_weight


def head_size(link: Permutation) -> int | None:
    """Return the number of channels per head if the link may be one from values; None for other links."""
    runs, sizes = link.runs(1), link.parts.unique(return_counts=True)[1]
    single = len(link.sources) == len(link.readers) == 1
    return int(sizes[0]) if single and runs is not None and bool((sizes == sizes[0]).all()) else None


def rotate_values(block: nn.Module, link: Permutation, rotation: Float[Tensor, "head head"], forward: Forward) -> Fold:
    """Multiply the values of each head by a rotation, and the columns that read them: (v R) (W R)^T = v W^T.

    The rewrite is verified numerically (`apply_verified`).
    """
    assert head_size(link) == len(rotation), "the rotation must have the size of a head"
    return apply_verified(block, forward, {"rotation": partial(_rewrite, link=link, rotation=rotation)})


def _rewrite(block: nn.Module, link: Permutation, rotation: Tensor) -> Callable[[], None]:
    """Write a rotation into the weights; return a function that undoes it."""
    source, reader = (block.get_submodule(name) for name in (link.sources[0], link.readers[0]))
    undo, runs = remember(source, reader), link.runs(1)
    assert runs is not None

    def rows(tensor: Tensor) -> Tensor:
        turned = tensor.clone()
        for slots, _ in runs:
            index = link.channels[0][slots].to(tensor.device)
            turned[index] = (rotation.T.to(tensor.device) @ tensor[index].double()).to(tensor)
        return turned

    def columns(weight: Tensor) -> Tensor:
        turned = weight.clone()
        for _, read in runs:
            for run in read:
                turned[:, run] = (weight[:, run].double() @ rotation.to(weight.device)).to(weight)
        return turned

    rewrite_rows(source, rows)
    rewrite_weight(reader, columns)
    return undo
