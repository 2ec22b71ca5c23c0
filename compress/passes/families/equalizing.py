"""Passes that equalize the channels of activations by a scale that the module before them, or the layer, divides by."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from compress.layers.linear import CompressedLinear, linears, replace_linear
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.scale import ScaleScheme
from compress.models.structure.links import Group, Link, fold
from compress.passes.contract.facts import Effects, Fact, Log, Preparation
from compress.passes.contract.layers import BlockInputs
from compress.passes.contract.memory import ProblemSize, return_freed_memory
from compress.passes.contract.observers import InputAbsMax
from compress.passes.contract.passes import COPIES, BlockPass

SMALLEST = 1e-5  # SmoothQuant, reference code (smooth.py): scales and weight maxima are kept above this
Equalize = Callable[[Tensor], Tensor]
"""Make a scale equal on columns that belong to one channel."""


@dataclass(frozen=True)
class Readers:
    """The modules whose input columns share a scale per channel.

    Attributes:
        names: linears, and routers of experts.
        statistics: of their inputs.
        link: the path to the module that can absorb the scale, or None.
        inputs: of the block.
    """

    block: nn.Module
    names: Sequence[str]
    statistics: Mapping[Group, Any]
    link: Link | None
    inputs: BlockInputs
    log: Log

    @property
    def where(self) -> str:
        """Their names, for the journal."""
        return ", ".join(self.names)

    def equalize(self, scale: Float[Tensor, " in"]) -> Float[Tensor, " in"]:
        """`Link.equalize`, if there is a link."""
        return scale if self.link is None else self.link.equalize(scale)

    @property
    def absmax(self) -> Float[Tensor, " in"]:
        """The largest magnitude in each channel over all tokens."""
        return torch.stack([observer.absmax for observer in self.statistics.values()]).amax(0)

    @property
    def linears(self) -> dict[str, CompressedLinear]:
        """The readers that are linears, by name; dense ones as a `CompressedLinear` that shares the weight."""
        linear_of = linears(self.block)
        return {name: CompressedLinear.of(linear_of[name]) for name in self.names if name in linear_of}

    def fold(self, scale: Float[Tensor, " in"]) -> None:
        """Divide the inputs by a scale: in the module before, which is proved, or else in the readers' transforms.

        A fold that changes the block's output is undone and journaled.
        """
        if self.link is None:
            for name in self.names:
                replace_linear(self.block, name).rescale_input(scale)
        elif not (folded := fold(self.block, self.link, scale, self.inputs.probe)).is_kept:
            message = f"folding the scale into {self.link.source} changed the block's output, so it was undone"
            self.log("fallback", f"{self.where}: {message}", relative_error=folded.error)
            return
        for observer in self.statistics.values():  # another link may have the same readers
            observer.divide(scale)


class EqualizingPass(BlockPass):
    """A pass that divides each input channel by a scale and multiplies the weights by it; a quantizing pass follows.

    The division is folded into the module that writes the input: a norm, or a linked linear. Each fold is proved in
    float32, and undone if it changes the block's output. Linears without a link are left alone, or, with
    unlinked: scale, divide their inputs at run time (format native stores such a scale).
    """

    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized", "cache_quantized"})

    unlinked: Literal["leave", "scale"] = Field(
        default="leave",
        description="linears whose scale no earlier module can absorb: 'leave': skip them; 'scale': divide their "
        "inputs at run time",
    )

    @property
    def statistics(self) -> type[InputAbsMax]:
        """The statistics of the inputs."""
        return InputAbsMax

    def memory(self, size: ProblemSize) -> int:
        return self.statistics.block_bytes(size) + max(COPIES * 4 * size.largest, size.beginning_bytes)

    def effects(self, layer: LayerScheme) -> Effects:
        transforms = (ScaleScheme(),) if self.unlinked == "scale" else ()
        return replace(
            super().effects(layer), transforms=transforms, prepares=Preparation("quantized", change="rescales channels")
        )

    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        self.equalize(block, inputs, inputs.observe(self.statistics), log)

    def equalize(self, block: nn.Module, inputs: BlockInputs, statistics: Mapping[Group, Any], log: Log) -> None:
        """Equalize the inputs of all groups; `statistics` then describes the divided inputs."""
        linked = {name for link in inputs.links for name in link.readers}
        for group in inputs.groups:
            if linked & set(group.linears):
                continue
            if self.unlinked == "leave":
                reader_names = ", ".join(group.linears)
                log("note", f"{reader_names}: no module before them can absorb a scale, so they are not smoothed")
            else:
                self._equalize(Readers(block, group.linears, {group: statistics[group]}, None, inputs, log))
        for link in inputs.links:
            groups = [group for group in inputs.groups if set(group.linears) & set(link.readers)]
            self._equalize(
                Readers(block, link.readers, {group: statistics[group] for group in groups}, link, inputs, log)
            )
            return_freed_memory()  # of the weights before the scale

    def _equalize(self, readers: Readers) -> None:
        if any(observer.tokens for observer in readers.statistics.values()):
            scale = self.scale(readers)
            if scale is not None:
                readers.fold(scale)
        else:
            message = "no calibration token reached them, so they are not smoothed"
            readers.log("fallback", f"{readers.where}: {message}")

    @abstractmethod
    def scale(self, readers: Readers) -> Float[Tensor, " in"] | None:
        """The scale of the readers' input, positive and equal on columns of one channel; None: it does not change."""


def smoothing(inputs: Float[Tensor, " in"], weights: Float[Tensor, " in"], alpha: float) -> Float[Tensor, " in"]:
    """s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)  (Xiao 2022, equation 4); 1 for channels that were always zero."""
    scale = inputs.pow(alpha) / weights.clamp(min=SMALLEST).pow(1 - alpha)
    return torch.where(inputs > 0, scale.clamp(min=SMALLEST), torch.ones_like(scale))


def weight_absmax(block: nn.Module, readers: Sequence[str]) -> Float[Tensor, " in"]:
    """Return the largest magnitude in each input column over all readers that are linears, in float32."""
    linear_of = linears(block)
    weights = [CompressedLinear.of(linear_of[name]).weight for name in readers if name in linear_of]
    return torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
