"""RPTQ: round inputs with a scale for each cluster of channels, and reorder the channels by cluster (Yuan 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from compress.errors import NumericError
from compress.layers.linear import CompressedLinear, replace_linear
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.permutation import PermutationScheme
from compress.layers.transforms.rounding import InputRounding, RoundingScheme
from compress.models.structure.links import Group
from compress.models.structure.permutations import Permutation, permute
from compress.numerics.kmeans import clusters
from compress.numerics.quant.grids import GRIDS, Grid
from compress.numerics.quant.inputs import group_ranges
from compress.passes.contract.facts import Effects, Fact, Log, Preparation
from compress.passes.contract.layers import BlockInputs
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import InputRange
from compress.passes.contract.passes import BlockPass

Grouping = Literal["kmeans", "equal"]


class RPTQ(BlockPass):
    """Quantize activations with a scale and a zero point for each cluster of channels; a quantizing pass follows.

    Channels with similar ranges share a cluster: k-means of the points (max X_j, min X_j), over all calibration tokens.
    Each cluster has a static scale and zero point, from the least and the largest value of its channels.

    Then channels are reordered so that clusters are contiguous. If linears of the block write the channels and may
    write them in any order (those between the matrices of a feed-forward layer), their rows are permuted. This costs
    nothing at run time and is verified in float32. Other inputs, such as those that come from a norm, are permuted by
    the layer.

    grouping: 'equal' is per-embedding-group quantization (PEG, Bondarenko 2021, section 4): channels are sorted by max
    X_j - min X_j and divided into groups of equal size. That paper also quantizes outputs of linears and sums of
    residual streams, and RPTQ the inputs of attention's products; here only the inputs of linears are quantized.

    Kernels: plain torch computes the quantized activations and their product with dequantized weights. One case has
    integer kernels: grouping: equal, activation_scale: token, symmetric: true, activations: int8, in contiguous groups
    of as many columns as those of the weights. These are the groups of `activation_scale: group` of other passes.
    """

    use_for: ClassVar[str] = (
        "Activations in 8 bits, before rtn or gptq. Static scales of clusters lose far less than one static scale, "
        "for accelerators without scales per token. With activation_scale: token they lose less than one scale per "
        "token."
    )
    not_for: ClassVar[str] = (
        "Speed on a CPU or GPU in compress. Static scales where scales per token are possible, or for text of another"
        " kind than the calibration."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2304.01089"
    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized", "activations_quantized", "cache_quantized"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"activations_quantized"})

    activations: Literal["int8", "int6", "int4", "int3"] = Field(default="int8", description="grid of the inputs")
    clusters: int = Field(default=32, gt=0, description="number of clusters of the input channels of each layer")
    grouping: Grouping = Field(
        default="kmeans",
        description="'kmeans': clusters of similar ranges, of any size; 'equal': groups of equal size, in the order of "
        "the size of the range (PEG)",
    )
    activation_scale: Literal["static", "token"] = Field(
        default="static", description="'static': scales from calibration; 'token': computed for each token at run time"
    )
    symmetric: bool = Field(default=False, description="no zero points")
    reorder: Literal["all", "folded", "none"] = Field(
        default="all",
        description="'all': permute channels so that clusters are contiguous, at run time where no layer before can "
        "absorb it; 'folded': only where one can; 'none': keep their order and store the cluster of each channel",
    )

    @property
    def grid(self) -> Grid:
        """The grid of the inputs."""
        return GRIDS[self.activations]

    def memory(self, size: ProblemSize) -> int:
        return super().memory(size) + InputRange.block_bytes(size)

    def effects(self, layer: LayerScheme) -> Effects:
        problem, width = None, layer.shape[1]
        if self.clusters > width:
            problem = f"its {width} inputs have no {self.clusters} clusters; use clusters: {width} or fewer"
        return replace(
            super().effects(layer),
            scheme=layer.with_transform(self.rounding_scheme(width, self.reorder == "all")),
            transforms=(PermutationScheme(),) if self.reorder == "all" else (),
            problem=problem,
            prepares=Preparation("quantized", _mismatch, "rounds inputs"),
        )

    def rounding_scheme(self, width: int, contiguous: bool) -> RoundingScheme:
        """Return the scheme of inputs of this width.

        Args:
            contiguous: whether the channels are in the order of their clusters.
        """
        per_token, size = self.activation_scale == "token", width // self.clusters
        if contiguous and per_token and self.symmetric and self.grouping == "equal" and size * self.clusters == width:
            return RoundingScheme(self.grid, "group", group=size)
        kind = "token" if per_token else "static"
        return RoundingScheme(self.grid, kind, symmetric=self.symmetric, groups=self.clusters)

    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        statistics = inputs.observe(InputRange)
        links = inputs.permutations if self.reorder != "none" else []
        for group in inputs.groups:
            names = [name for name in group.linears if name in inputs.names]
            observer = statistics[group]
            if not observer.tokens:
                raise NumericError(
                    f"{inputs.name}.{names[0]}: no calibration token reached this layer, so its inputs have no ranges; "
                    "use more calibration text, or name the layer in ignore"
                )
            low, high = observer.low, observer.high
            index = cluster(low, high, self.clusters, self.grouping)
            order = index.argsort(stable=True)
            moved = self._reordered(block, inputs, group, names, links, order, log)
            if moved:
                low, high, index = low[order], high[order], index[order]
            for name in names:
                layer = replace_linear(block, name)
                layer.round_inputs(self._rounding(index, low, high, moved, inputs.layer(name).storage))
            reader_names = f"{', '.join(names)}: inputs in {self.clusters} clusters"
            log("note", reader_names, largest_cluster=int(index.bincount().max()), **self._ranges(index, low, high))

    def _rounding(
        self, index: Int[Tensor, " in"], low: Tensor, high: Tensor, contiguous: bool, dtype: torch.dtype
    ) -> InputRounding:
        """Return the rounding of inputs with these clusters and ranges of channels."""
        scheme = self.rounding_scheme(len(index), contiguous)
        if scheme.scale == "group":
            return InputRounding(scheme, (0, len(index)), {})
        ranges = None
        if self.activation_scale == "static":
            ranges = group_ranges(low, index, self.clusters)[0], group_ranges(high, index, self.clusters)[1]
        return InputRounding.of_groups(self.grid, index, self.clusters, self.symmetric, ranges, dtype)

    def _ranges(self, index: Int[Tensor, " in"], low: Tensor, high: Tensor) -> dict[str, float]:
        """Figures for the journal: the mean over channels of the range of their cluster, relative to that of all."""
        bottom, _ = group_ranges(low, index, self.clusters)
        _, top = group_ranges(high, index, self.clusters)
        span = (top - bottom)[index]
        return {"mean_relative_range": float(span.mean() / span.max().clamp(min=1e-30))}

    def _reordered(
        self,
        block: nn.Module,
        inputs: BlockInputs,
        group: Group,
        names: Sequence[str],
        links: Sequence[Permutation],
        order: Int[Tensor, " in"],
        log: Log,
    ) -> bool:
        """Bring the inputs of a group into an order; returns whether they are in it."""
        reader_names = ", ".join(names)
        if self.reorder == "none":
            return False
        if any(_masked(block, name) for name in names):
            log("note", f"{reader_names}: not reordered, so that its pruned weights stay in their places")
            return False
        link = next((permutation for permutation in links if set(permutation.readers) & set(group.linears)), None)
        if link is not None and self._foldable(block, link, names):
            slots = torch.empty(len(order), dtype=torch.int64)
            slots[link.slots] = link.slots[order.cpu()]
            rewrite = permute(block, link, slots, inputs.probe)
            if rewrite.is_kept:
                log("note", f"{reader_names}: reordered, folded into {', '.join(link.sources)}")
                return True
            log("fallback", f"{reader_names}: folding the order would change the output", relative_error=rewrite.error)
        if self.reorder == "folded":
            log("note", f"{reader_names}: not reordered: no linear of the block writes its channels in any order")
            return False
        for name in names:
            replace_linear(block, name).permute_input(order)
        log("note", f"{reader_names}: reordered at run time")
        return True

    def _foldable(self, block: nn.Module, link: Permutation, names: Sequence[str]) -> bool:
        """Whether any order of the columns can be folded: one part, a slot per column, no other readers, no codes."""
        free = len(link.parts.unique()) == 1 and len(link.parts) == len(link.slots)
        packed = any(_quantized(block, name) or _masked(block, name) for name in link.sources)
        return free and not packed and set(link.readers) == set(names)


def _mismatch(later: Effects) -> str | None:
    if later.scheme.rounding is None:
        return None
    return "it would round the inputs in another way; leave activations out of it"


def cluster(
    low: Float[Tensor, " in"], high: Float[Tensor, " in"], count: int, grouping: Grouping
) -> Int[Tensor, " in"]:
    """Return the cluster of each channel, numbered by ascending size of their ranges.

    kmeans: of the points (high, low), as RPTQ. equal: channels in the order of high - low, divided into groups whose
    sizes differ by at most 1, as PEG's range-based permutation; of equal ranges the first channels come first.

    Args:
        low, high: the range of each channel.
    """
    span = (high - low).cpu()
    if grouping == "equal":
        index = torch.empty(len(span), dtype=torch.int64)
        index[span.argsort(stable=True)] = torch.arange(len(span)) * count // len(span)
        return index.to(low.device)
    index = clusters(torch.stack([high, low], 1), count)
    mean = torch.zeros(count).index_add_(0, index, span) / index.bincount(minlength=count).clamp(min=1)
    rank = mean.argsort(stable=True).argsort()
    return rank[index].to(low.device)


def _masked(block: nn.Module, name: str) -> bool:
    module = block.get_submodule(name)
    return isinstance(module, CompressedLinear) and module.positions is not None


def _quantized(block: nn.Module, name: str) -> bool:
    module = block.get_submodule(name)
    return isinstance(module, CompressedLinear) and module.quantized
