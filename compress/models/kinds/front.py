"""The front of a model that hears recordings: what its encoder reads before its blocks, found by its modules.

Convolutions shorten the recording. If the encoder has a table of positions, all recordings have the one length that
gives as many positions; otherwise they may have any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import CannotRun, CompressError, ModelError, call_foreign
from compress.models.kinds.contract import SUPPORTED
from compress.models.structure.blocks import find_blocks

POSITIONS = 16  # of a sample for an encoder that reads recordings of any length
SECONDS, SAMPLES, FRAMES = 30, 16000, 100  # of a usual recording for an estimate, and its usual rates per second
Order = Literal["first", "last"]


@dataclass(frozen=True)
class Front:
    """What an encoder reads.

    channels: numbers of a frame, such as mel bins; 1 for samples of sound. frames: of every recording; None: any number
    of them. stride: frames of one position of the blocks. fewest: frames that the convolutions need for one position.
    orders: whether the channels are the first axis of the features, the last one, or either.
    """

    channels: int
    frames: int | None
    stride: int
    fewest: int = 1
    orders: tuple[Order, ...] = ("first", "last")

    @property
    def positions(self) -> int:
        """The positions of a recording in the blocks; an estimate if recordings may have any length."""
        return (self.frames or SECONDS * (SAMPLES if self.channels == 1 else FRAMES)) // self.stride

    @property
    def size(self) -> int:
        """The numbers of the features of a recording; an estimate if recordings may have any length."""
        return self.channels * (self.frames or self.positions * self.stride)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes that the features of a sample may have."""
        count = self.frames or max(self.stride * POSITIONS, self.fewest)
        count += count == self.channels and self.frames is None  # the two axes are told by their sizes
        shape_by_order: dict[Order, tuple[int, ...]] = {"first": (self.channels, count), "last": (count, self.channels)}
        return [(count,)] if self.channels == 1 else [shape_by_order[order] for order in self.orders]

    @property
    def time(self) -> int | None:
        """The axis of the features along which recordings have several lengths; None: they have one length."""
        if self.frames is not None:
            return None
        return 0 if self.channels == 1 or self.orders == ("last",) else 1

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether the features of a recording can be read."""
        if self.channels == 1:
            return len(shape) == 1 and self._counts(shape[0])
        if len(shape) != 2:
            return False
        sizes_by_order: dict[Order, tuple[int, int]] = {"first": (shape[0], shape[1]), "last": (shape[1], shape[0])}
        pairs = [sizes_by_order[order] for order in self.orders]
        return any(channels == self.channels and self._counts(count) for channels, count in pairs)

    def _counts(self, frames: int) -> bool:
        return frames == self.frames or (self.frames is None and frames >= self.fewest)

    def __str__(self) -> str:
        count = f"{self.fewest} or more" if self.frames is None else str(self.frames)
        return f"{count} samples" if self.channels == 1 else f"{self.channels} bins and {count} frames"


def front_of(model: PreTrainedModel) -> Front:
    """Return the front of a model. Raises ModelError for one whose encoder has none of convolutions over time."""
    inside = {id(module) for block in find_blocks(model) for module in block.module.modules()}
    front_modules = [module for module in model.get_encoder().modules() if id(module) not in inside]
    convolutions = [module for module in front_modules if isinstance(module, nn.Conv1d)]
    if not convolutions:
        raise ModelError(f"model: the encoder of {type(model).__name__} begins with no convolution; {SUPPORTED}")
    stride = prod(module.stride[0] for module in convolutions)
    tables = [module for module in front_modules if isinstance(module, nn.Embedding)]
    frames = stride * tables[0].num_embeddings if tables else None
    fewest = fewest_frames(convolutions)
    front = Front(convolutions[0].in_channels, frames, stride, fewest)
    if front.channels == 1:
        return front
    reached: list[Order] = [
        order for order, shape in zip(front.orders, front.shapes, strict=True) if reaches(model, convolutions[0], shape)
    ]
    return replace(front, orders=tuple(reached) or front.orders)


def fewest_frames(convolutions: Sequence[nn.Conv1d]) -> int:
    """The frames from which convolutions, one after the other, make one position."""
    count = 1
    for module in reversed(convolutions):
        (kernel,), (stride,), (dilation,), padding = module.kernel_size, module.stride, module.dilation, module.padding
        span = dilation * (kernel - 1)
        padded = (span if padding == "same" else 0) if isinstance(padding, str) else 2 * padding[0]
        count = max(1, (count - 1) * stride + span + 1 - padded)
    return count


class _Reached(CompressError):  # noqa: N818 - not an error
    """Ends a forward pass before the first convolution. fits: whether its input has the channels that it reads."""

    def __init__(self, fits: bool) -> None:
        super().__init__()
        self.fits = fits


@torch.no_grad()
def reaches(model: PreTrainedModel, convolution: nn.Conv1d, shape: Sequence[int]) -> bool:
    """Whether features of a shape come to the first convolution as it reads them; no weight is read."""

    def stop(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        size: Sequence[int] = inputs[0].shape if inputs and isinstance(inputs[0], Tensor) else ()
        raise _Reached(len(size) > 1 and size[-2] == convolution.in_channels)

    encoder: nn.Module = model.get_encoder()
    handle = convolution.register_forward_pre_hook(stop)
    try:
        features = torch.zeros(1, *shape, device=convolution.weight.device, dtype=convolution.weight.dtype)
        call_foreign(encoder, features)
    except _Reached as reached:
        return reached.fits
    except CannotRun:
        return False
    finally:
        handle.remove()
    return False


def target_positions(model: PreTrainedModel) -> int | None:
    """Return the positions of a model's decoder; None if its configuration states no limit."""
    config = model.config.get_text_config(decoder=True)
    limits = (getattr(config, name, None) for name in ("max_target_positions", "max_position_embeddings"))
    return next((count for count in limits if count is not None and count > 0), None)
