"""Coupled channels: rows of some linears and columns of the next one that are removed or permuted only together.

In a feed-forward layer each set of coupled channels is one row and one column, found as permutation links. In attention
it is one group of heads: the rows that produce the group's queries, keys and values, and the columns that read its
output. Probes find which rows belong to which group. Every result is verified by permuting the sets.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn

from compress.models.structure.links import FOLD_TOLERANCE
from compress.models.structure.permutations import MOVED, Permutation, find_permutations
from compress.models.structure.probes import Forward, Probe, in_float32, width_out
from compress.numerics.metrics import relative_error

PROBE_FACTOR = 2.0  # the factor of rows whose effect is probed


@dataclass(frozen=True, eq=False)
class CoupledChannels:
    """The coupled channels of one reader.

    Attributes:
        sources: linears whose output channels are coupled.
        rows: per source, the output channels of each set.
        reader: linear whose input columns are coupled with them.
        columns: input columns of the reader in each set.
    """

    sources: tuple[str, ...]
    rows: tuple[Int[Tensor, "bundles rows"], ...]
    reader: str
    columns: Int[Tensor, "bundles columns"]

    def __len__(self) -> int:
        return len(self.columns)


def coupled_ffn_channels(block: nn.Module, forward: Forward, readers: Collection[str]) -> list[CoupledChannels]:
    """Find the coupled channels of feed-forward layers: of readers with a link that has one part.

    Args:
        block: block of a model.
        forward: forward pass of the block on fixed inputs.
        readers: names of linears inside the block.
    """
    coupled_channels = []
    for link in find_permutations(block, forward):
        (reader,) = link.readers
        if reader in readers and int(link.parts.max()) == 0:
            coupled_channels.append(
                CoupledChannels(link.sources, tuple(c[:, None] for c in link.channels), reader, _sorted(link.slots))
            )
    return coupled_channels


def coupled_heads(
    block: nn.Module, forward: Forward, readers: Collection[str], sources: Collection[str]
) -> list[CoupledChannels]:
    """Find the coupled channels of attention: per part of a link from values, the source rows that affect only it."""
    links = [link for link in find_permutations(block, forward) if link.readers[0] in readers]
    with in_float32(block) as proof:
        probe = Probe(proof, forward)
        head_channels = [_heads(probe, link, [s for s in probe.linears if s in sources]) for link in links]
        return [coupled for coupled in head_channels if coupled is not None and holds(probe, coupled)]


def still_hold(block: nn.Module, forward: Forward, coupled_channels: list[CoupledChannels]) -> bool:
    """Return whether coupled channels of a block with the same signature also hold in this block."""
    with in_float32(block) as proof:
        probe = Probe(proof, forward)
        return all(holds(probe, channels) for channels in coupled_channels)


def _sorted(of: Int[Tensor, " channels"]) -> Int[Tensor, "bundles channels"]:
    """Return the channels of each set in ascending order, given the set of each channel; all sets are equally large."""
    return of.argsort(stable=True).reshape(int(of.max()) + 1, -1)


def _even(of: Tensor, count: int) -> bool:
    """Return whether all sets have the same number of channels."""
    return bool((of >= 0).all()) and len(set(torch.bincount(of, minlength=count).tolist())) == 1


def _heads(probe: Probe, link: Permutation, sources: list[str]) -> CoupledChannels | None:
    part = link.parts[link.slots]
    count, reader = int(part.max()) + 1, link.readers[0]
    owners = {name: _owners(probe, name, reader, part) for name in sources if name in probe.ran}
    if len(owners) < len(sources) or not all(_even(of, count) for of in (part, *owners.values())):
        return None
    return CoupledChannels(tuple(owners), tuple(_sorted(of) for of in owners.values()), reader, _sorted(part))


def _owners(probe: Probe, source: str, reader: str, part: Tensor) -> Int[Tensor, " out"]:
    """Return the part of the reader's columns that each channel of the source affects; -1 if it affects several.

    Ranges of channels are halved until a range affects one part only.
    """
    owners = torch.full((width_out(probe.linears[source]),), -1)
    ranges = [(0, len(owners))]
    while ranges:
        start, end = ranges.pop()
        factor = torch.ones(len(owners))
        factor[start:end] = PROBE_FACTOR
        probe.run({source: lambda y, f=factor: y * f.to(y)})
        plain, probed = probe.reached([reader])[reader]
        moved = ((probed - plain).norm(dim=0) > MOVED * plain.norm(dim=0)).cpu()
        reached = part[moved].unique()
        if len(reached) == 1:
            owners[start:end] = reached
        elif end - start > 1:
            middle = (start + end) // 2
            ranges += [(start, middle), (middle, end)]
        else:
            return owners
    return owners


def holds(probe: Probe, channels: CoupledChannels) -> bool:
    """Return whether the output is unchanged when the sets are permuted cyclically at random."""
    if not {*channels.sources, channels.reader} <= probe.ran:
        return False
    ring = torch.randperm(len(channels), generator=torch.Generator().manual_seed(0))
    order = torch.empty_like(ring)
    order[ring] = ring.roll(1)
    outputs = {}
    for source, rows in zip(channels.sources, channels.rows, strict=True):
        index = torch.arange(width_out(probe.linears[source]))
        index[rows.flatten()] = rows[order].flatten()
        outputs[source] = lambda y, i=index: y[..., i.to(y.device)]
    back = torch.arange(channels.columns.numel())
    back[channels.columns[order].flatten()] = channels.columns.flatten()
    output = probe.run(outputs, {channels.reader: lambda x: x[..., back.to(x.device)]})
    return relative_error(output, probe.output) < FOLD_TOLERANCE
