"""The front of a model that hears recordings: what its encoder reads before its blocks, found by its modules.

Convolutions shorten the recording. If the encoder has a table of positions, all recordings have the one length that
gives as many positions; otherwise they may have any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import CalibrationError, ModelError
from compress.model.kinds import RECORDED, SUPPORTED, kind_of
from compress.model.recordings import row_of, shape_in, targets_in
from compress.model.structure.blocks import find_blocks
from compress.model.structure.ends import vocabulary_size

POSITIONS = 16  # of a sample for an encoder that reads recordings of any length
SECONDS, SAMPLES, FRAMES = 30, 16000, 100  # of a usual recording for an estimate, and its usual rates per second
TOKENS = 4  # of a sample, and of the transcript of a sample


@dataclass(frozen=True)
class Front:
    """What an encoder reads.

    channels: numbers of a frame, such as mel bins; 1 for samples of sound. frames: of every recording; None: any number
    of them. stride: frames of one position of the blocks.
    """

    channels: int
    frames: int | None
    stride: int

    @property
    def positions(self) -> int:
        """The positions of a recording in the blocks; an estimate if recordings may have any length."""
        return (self.frames or SECONDS * (SAMPLES if self.channels == 1 else FRAMES)) // self.stride

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes that the features of a sample may have: the channels are the first or the last axis."""
        count = self.frames or self.stride * POSITIONS
        return [(count,)] if self.channels == 1 else [(self.channels, count), (count, self.channels)]

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the features of a recording can be read."""
        if self.channels == 1:
            return len(shape) == 1 and self.frames in (None, shape[0])
        return len(shape) == 2 and any(
            channels == self.channels and self.frames in (None, count) for channels, count in (shape, reversed(shape))
        )

    def __str__(self) -> str:
        count = "any number of" if self.frames is None else str(self.frames)
        return f"{count} samples" if self.channels == 1 else f"{self.channels} bins and {count} frames"


def front_of(model: PreTrainedModel) -> Front:
    """The front of a model. Raises ModelError for one whose encoder has none of convolutions over time."""
    inside = {id(module) for block in find_blocks(model) for module in block.module.modules()}
    before = [module for module in model.get_encoder().modules() if id(module) not in inside]
    convolutions = [module for module in before if isinstance(module, nn.Conv1d)]
    if not convolutions:
        raise ModelError(f"model: the encoder of {type(model).__name__} begins with no convolution; {SUPPORTED}")
    stride = prod(module.stride[0] for module in convolutions)
    tables = [module for module in before if isinstance(module, nn.Embedding)]
    frames = stride * tables[0].num_embeddings if tables else None
    return Front(convolutions[0].in_channels, frames, stride)


def check_recordings(model: PreTrainedModel, ids: Int[Tensor, "rows length"], places: Sequence[str]) -> None:
    """Raise CalibrationError for recordings that a model cannot read. places: of each, for messages."""
    front, size, positions = front_of(model), vocabulary_size(model), target_positions(model)
    for place, row in zip(places, ids, strict=True):
        shape, tokens = shape_in(row), targets_in(row[None])[0]
        if not front.fits(shape):
            raise CalibrationError(
                f"{place}: has features of shape {list(shape)}, but {type(model).__name__} reads {front}; make them "
                "with the feature extractor of the model (preprocessor_config.json)"
            )
        if int(tokens.max()) >= size:
            raise CalibrationError(
                f"{place}: has the token id {int(tokens.max())}, but the model's vocabulary has {size}; use the "
                "model's own tokenizer"
            )
        if positions is not None and len(tokens) > positions:
            raise CalibrationError(
                f"{place}: its transcript has {len(tokens)} tokens, but the decoder has {positions} positions; cut the "
                f"recording into shorter ones, or use a length <= {positions}, to which transcripts are cut"
            )


def target_positions(model: PreTrainedModel) -> int | None:
    """The positions of a model's decoder; None if its configuration states no limit."""
    config = model.config.get_text_config(decoder=True)
    named = (getattr(config, name, None) for name in ("max_target_positions", "max_position_embeddings"))
    return next((count for count in named if count is not None and count > 0), None)


def samples_for(model: PreTrainedModel) -> list[Int[Tensor, "1 length"]]:
    """Sequences with which a model of its kind may run, of the fewest tokens; at least one of them must."""
    if kind_of(model) is not RECORDED:
        return [torch.arange(TOKENS)[None] % vocabulary_size(model)]
    draw = torch.Generator().manual_seed(0)
    tokens = [token % vocabulary_size(model) for token in range(TOKENS)]
    return [row_of(torch.randn(shape, generator=draw), tokens)[None] for shape in front_of(model).shapes]
