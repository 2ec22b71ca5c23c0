"""Permutation links: output channels of linears that can be permuted together with the columns that read them.

Coded perturbations find them: half of a linear's channels are shifted, once per bit of the channel's number, and the
columns that move spell the channel that they depend on. A second probe gives all channels the same values: columns that
are then equal are computed in the same way, so that their channels may be permuted (columns of different attention
heads differ; the channels between the matrices of a feed-forward layer do not).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor, nn

from compress.layers.linear import CompressedLinear
from compress.models.experts import in_experts
from compress.models.structure.links import FOLD_TOLERANCE, Fold, apply_verified
from compress.models.structure.probes import Forward, Probe, in_float32, width_in, width_out
from compress.models.structure.rewrite import remember, rewrite_rows, rewrite_weight
from compress.numerics.metrics import relative_error

MOVED = 1e-4  # relative to a column's size: an unreached column is equal to 1e-6
ALIKE = 1e-4


@dataclass(frozen=True, eq=False)
class Permutation:
    """Channels that can be permuted.

    Attributes:
        sources: linears whose output channels are permuted, all in the same way.
        readers: linears whose input columns are permuted with them.
        channels: for each source and slot, the output channel of the source.
        slots: for each input column of the readers, its slot.
        parts: for each slot, the number of its part; slots are permuted within their part only.
    """

    sources: tuple[str, ...]
    readers: tuple[str, ...]
    channels: Int[Tensor, "sources slots"]
    slots: Int[Tensor, " in"]
    parts: Int[Tensor, " slots"]

    def runs(self, m: int) -> list[tuple[Int[Tensor, " part"], list[Int[Tensor, " part"]]]] | None:
        """Return for each part its slots, and the runs of input columns that hold them, in that order.

        A channel that several query heads share is in several runs. Returns None when there are several parts and their
        runs are not whole groups of m columns, or when the runs of a part hold its slots in different orders.
        """
        turns, columns, parts = _turns(self.slots), torch.arange(len(self.slots)), self.parts.unique()
        runs_by_part = []
        for part in parts:
            inside = self.parts[self.slots] == part
            column_runs = [columns[inside & (turns == turn)] for turn in turns[inside].unique()]
            slots = self.slots[column_runs[0]]
            for run in column_runs:
                together = torch.equal(run, run[0] + torch.arange(len(run))) and torch.equal(self.slots[run], slots)
                if not together or int(run[0]) % m or (len(slots) % m and len(slots) < len(self.slots)):
                    return None
            runs_by_part.append((slots, column_runs))
        return runs_by_part

    def columns(self, order: Int[Tensor, " slots"]) -> Int[Tensor, " in"]:
        """Return for each input column the column that replaces it when slot i takes the content of slot order[i]."""
        turn = _turns(self.slots)
        place = {(int(t), int(s)): j for j, (t, s) in enumerate(zip(turn, self.slots, strict=True))}
        return torch.tensor([place[int(t), int(order[s])] for t, s in zip(turn, self.slots, strict=True)])


def _turns(slots: Int[Tensor, " in"]) -> Int[Tensor, " in"]:
    """Return for each column the number of earlier columns with the same slot."""
    count_by_slot: dict[int, int] = {}
    turns = []
    for slot in slots.tolist():
        turns.append(count_by_slot.get(slot, 0))
        count_by_slot[slot] = turns[-1] + 1
    return torch.tensor(turns)


def find_permutations(block: nn.Module, forward: Forward, similar: Sequence[Permutation] = ()) -> list[Permutation]:
    """Find all permutation links of a block that hold, in the order of their readers; also inside experts.

    The search takes two passes per linear and bit of a channel's number, and one more per reader. Readers that permute
    their own inputs are skipped.

    Args:
        block: block of a model.
        forward: forward pass of the block on fixed inputs.
        similar: links of a block of the same `links.block_signature`; if they all hold here, one pass per link
            suffices.
    """
    with in_float32(block) as proof:
        experts = in_experts(proof)
        inside = tuple(f"{name}." for name in experts)
        similar_links = [link for link in similar if not link.readers[0].startswith(inside)]
        links = _within(Probe(proof, forward), inside, similar_links)
        for prefix, expert in experts.items():
            start = f"{prefix}."
            similar_links = [_renamed(link, start, "") for link in similar if link.readers[0].startswith(start)]
            links += [_renamed(link, "", start) for link in _within(Probe(expert, expert.probe), (), similar_links)]
        return links


def _renamed(link: Permutation, old_prefix: str, new_prefix: str) -> Permutation:
    """Return the same link with another prefix of the module names."""
    names_of_both = link.sources, link.readers
    sources, readers = (tuple(new_prefix + name.removeprefix(old_prefix) for name in names) for names in names_of_both)
    return replace(link, sources=sources, readers=readers)


def _within(probe: Probe, excluded: tuple[str, ...], similar: Sequence[Permutation]) -> list[Permutation]:
    if similar and all(_free(probe, link.readers[0]) and _holds(probe, link) for link in similar):
        return list(similar)
    names = [name for name in probe.linears if name in probe.ran and not name.startswith(excluded)]
    spelled = {name: _spell(probe, name) for name in names}
    links: list[Permutation] = []
    for reader in names:
        sources = {name: read[reader] for name, read in spelled.items() if reader in read and name != reader}
        if not _free(probe, reader):
            continue
        link = _link(probe, reader, sources)
        if link is not None and _holds(probe, link):
            links.append(link)
    return links


def _free(probe: Probe, reader: str) -> bool:
    """Return whether a reader stores a column for each input channel, in their order."""
    module = probe.linears[reader]
    if not isinstance(module, CompressedLinear):
        return True
    return module.input_permutation is None and not module.scheme.mixes


def _spell(probe: Probe, source: str) -> dict[str, Int[Tensor, " in"]]:
    """Return reader -> the one channel of the source that each of its columns depends on, without other readers."""
    width = width_out(probe.linears[source])
    channels: dict[str, Tensor] = {}
    for bit in range(max(width - 1, 1).bit_length()):
        ones = (torch.arange(width) >> bit) & 1
        moved = []
        for half in (ones, 1 - ones):
            probe.run({source: lambda y, h=half: y + h.to(y) * y.std()})
            moved.append({name: _moved(*pair) for name, pair in probe.reached().items()})
        bits = {n: m.long() << bit for n, m in moved[0].items() if n in moved[1] and bool((m ^ moved[1][n]).all())}
        channels = {n: channels.get(n, 0) + b for n, b in bits.items() if bit == 0 or n in channels}
        if not channels:
            return {}
    return {name: numbers for name, numbers in channels.items() if int(numbers.max()) < width}


def _moved(plain: Tensor, probed: Tensor) -> Tensor:
    return ((probed - plain).norm(dim=0) > MOVED * plain.norm(dim=0).clamp(min=1e-30)).cpu()


def _link(probe: Probe, reader: str, sources: dict[str, Tensor]) -> Permutation | None:
    """Return the link to one reader; its parts are found by giving all channels of each source the same values."""
    if not sources:
        return None
    keys, slots = torch.unique(torch.stack(list(sources.values())), dim=1, return_inverse=True)
    if any(len(torch.unique(row)) != keys.shape[1] for row in keys):
        return None  # one channel of a source pairs with two channels of another
    probe.run({name: lambda y: y[..., :1].expand_as(y).clone() for name in sources})
    columns = probe.inputs[reader]
    heads = _classes(columns)
    sets: dict[int, list[int]] = {}
    for slot, head in zip(slots.tolist(), heads, strict=True):
        sets.setdefault(slot, []).append(head)
    kinds = {kind: i for i, kind in enumerate(dict.fromkeys(tuple(sets[s]) for s in range(keys.shape[1])))}
    if len(kinds) == keys.shape[1]:
        return None  # no two channels are computed in the same way
    parts = torch.tensor([kinds[tuple(sets[s])] for s in range(keys.shape[1])])
    return Permutation(tuple(sources), (reader,), keys, slots, parts)


def _classes(columns: Tensor) -> list[int]:
    """Return a number for each column of [tokens, in]; equal columns have equal numbers."""
    representatives: list[int] = []
    numbers = []
    for j in range(columns.shape[1]):
        size = columns[:, j].norm().clamp(min=1e-30)
        distances = (columns[:, representatives] - columns[:, j : j + 1]).norm(dim=0)
        equal_columns = (distances < ALIKE * size).nonzero()
        numbers.append(int(equal_columns[0, 0]) if len(equal_columns) else len(representatives))
        if not len(equal_columns):
            representatives.append(j)
    return numbers


def _random_order(link: Permutation) -> Int[Tensor, " slots"]:
    """Return a random order of the slots that keeps each slot in its part."""
    draw = torch.Generator().manual_seed(0)
    order = torch.arange(len(link.parts))
    for part in link.parts.unique():
        inside = (link.parts == part).nonzero()[:, 0]
        order[inside] = inside[torch.randperm(len(inside), generator=draw)]
    return order


def _holds(probe: Probe, link: Permutation) -> bool:
    """Return whether a random order leaves the output unchanged.

    A linear that never ran could read the same channels, so one with as many inputs refuses the link.
    """
    silent = [m for name, m in probe.readers.items() if name not in probe.ran]
    if any(width_in(module) == len(link.slots) for module in silent):
        return False
    order = _random_order(link)
    outputs = {}
    for source, channels in zip(link.sources, link.channels, strict=True):
        outputs[source] = _row_order(channels, order, width_out(probe.linears[source]))
    back = link.columns(order).argsort()
    inputs = {name: lambda x: x[..., back.to(x.device)] for name in link.readers}
    changes = {name: lambda y, i=index: y[..., i.to(y.device)] for name, index in outputs.items()}
    return relative_error(probe.run(changes, inputs), probe.output) < FOLD_TOLERANCE


def _row_order(channels: Tensor, order: Tensor, width: int) -> Int[Tensor, " out"]:
    """Return the order of all output channels of a source."""
    rows = torch.arange(width)
    rows[channels] = channels[order]
    return rows


def permute(block: nn.Module, link: Permutation, order: Int[Tensor, " slots"], forward: Forward) -> Fold:
    """Move the content of slot order[i] to slot i: rows and biases of the sources, columns of the readers.

    The order must keep each slot in its part. The rewrite is verified numerically (`apply_verified`).
    """
    assert torch.equal(order.sort().values, torch.arange(len(order))), "an order must hold every slot once"
    assert torch.equal(link.parts[order], link.parts), "slots must stay in their part"
    for name, expert in in_experts(block).items():
        if all(place.startswith(name + ".") for place in (*link.sources, *link.readers)):
            block, link, forward = expert, _renamed(link, name + ".", ""), expert.probe
            break
    return apply_verified(block, forward, {"permutation": partial(_reorder, link=link, order=order)})


def _reorder(block: nn.Module, link: Permutation, order: Tensor) -> Callable[[], None]:
    """Write an order into the weights; return a function that undoes it."""
    modules = [block.get_submodule(name) for name in (*link.sources, *link.readers)]
    undo = remember(*modules)
    for module, channels in zip(modules, link.channels, strict=False):
        rows = _row_order(channels, order, width_out(module))
        rewrite_rows(module, lambda tensor, r=rows: tensor[r.to(tensor.device)])
    columns = link.columns(order)
    for module in modules[len(link.sources) :]:
        rewrite_weight(module, lambda weight: weight[:, columns.to(weight.device)])
    return undo
