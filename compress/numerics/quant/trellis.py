"""Trellis-coded quantization: sequences of weights as paths through the states of a bitshift trellis (QTIP).

Tseng 2024, arXiv 2406.11235. A (L, k, V) trellis has 2^L states, each with the values of V weights (section 2.3). A
step shifts k V new bits into the state from the right, so the state of every step is a window of L bits in one string
of bits (section 3.1):

    j = i 2^(kV) mod 2^L + c,  0 <= c < 2^(kV)

The paths are tail-biting (section 3.2): the string is a circle of k bits per weight, without extra bits for the
first state. It is stored from its most significant bit on; the window of step t starts at bit t k V. With two weights
a step, k can be a half: 3 bits for two weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.native import trellis as native

REACH = 8  # states after which the choice of a first state has no effect; constraint lengths, as in Viterbi decoders
MAX_COSTS = 1 << 26  # costs of sequences that are searched at once: 256 MiB in float32


@dataclass(frozen=True)
class Trellis:
    """The bitshift trellis.

    Attributes:
        states: bits of a state, L.
        bits: bits per weight, k.
        length: weights of a step, V.
    """

    states: int
    bits: float
    length: int = 1

    @property
    def step_bits(self) -> int:
        """The number of bits that a step shifts in, k V."""
        return int(self.bits * self.length)

    @property
    def branches(self) -> int:
        """The number of successors, and of predecessors, of a state."""
        return 1 << self.step_bits

    @property
    def overlaps(self) -> int:
        """The number of values of the L - k V bits that a state and its successor have in common."""
        return 1 << (self.states - self.step_bits)

    def __post_init__(self) -> None:
        assert self.bits * self.length == self.step_bits, "a step has whole bits"
        assert self.step_bits <= self.states, "a step must not shift out more bits than a state has"


def count_bytes(weights: int, bits: float) -> int:
    """Return the number of bytes of a tail-biting sequence of `weights` weights."""
    return int(weights * bits) // 8


def search_bytes(trellis: Trellis, steps: int, sequences: int) -> int:
    """Return the peak memory of a search, in bytes."""
    at_once = min(sequences, _at_once(trellis, steps))
    return 4 * at_once * ((steps + 1) * trellis.overlaps + (2 << trellis.states))


def _at_once(trellis: Trellis, steps: int) -> int:
    return max(1, MAX_COSTS // ((steps + 1) * trellis.overlaps))


class Viterbi:
    """Search of the trellis paths with the least squared error (section 2.3).

    A search takes 2^L multiplications and additions per step. Its buffer contains 2^(L - kV) costs per step; later
    searches reuse the buffer.

    Args:
        values: values of the states, [2^L, V].
        trellis: the trellis.
    """

    def __init__(self, values: Float[Tensor, "states length"], trellis: Trellis) -> None:
        self.trellis = trellis
        # |v - s|^2 = |v|^2 - 2 v s + |s|^2, and |s|^2 is equal for all states
        self._weights = torch.cat([values.square().sum(1, keepdim=True), values], dim=1)
        # stored as [last k V bits, first L - k V bits], so that what a step adds is one batched product, and the states
        # that have the same successors, of which the best one is kept, are slices
        by_last = self._weights.view(trellis.overlaps, trellis.branches, -1)
        self._by_last = by_last.transpose(0, 1).contiguous()
        self._buffer = values.new_empty(0)

    def paths(
        self, sequences: Float[Tensor, "n weights"], overlap: Int[Tensor, " n"] | None = None
    ) -> Int[Tensor, "n steps"]:
        """Return the states of the best path of each sequence.

        Args:
            sequences: weights of each sequence.
            overlap: first L - k V bits of the first state and last L - k V bits of the last state, which are then
                equal; None: not constrained.
        """
        trellis, steps = self.trellis, sequences.shape[1] // self.trellis.length
        if native.can_search(sequences, trellis.states, trellis.step_bits, trellis.length):
            return native.search(sequences, self._weights[:, 1:], trellis.step_bits, overlap)
        at_once = _at_once(trellis, steps)
        parts = sequences.split(at_once)
        overlaps = [None] * len(parts) if overlap is None else overlap.split(at_once)
        return torch.cat([self._paths(part, part_overlap) for part, part_overlap in zip(parts, overlaps, strict=True)])

    def tail_biting(self, sequences: Float[Tensor, "n weights"]) -> Int[Tensor, "n steps"]:
        """Return the states of tail-biting paths of small error (section 3.2, algorithm 4).

        The first search is of the sequence rotated by half; the state in its middle gives the overlap of the last and
        the first state. A part of the sequence is enough for it: states that are `REACH` L / (k V) steps away have no
        effect. The second search is exact for this overlap.
        """
        length, step_bits = self.trellis.length, self.trellis.step_bits
        steps = sequences.shape[1] // length
        reach = min(steps // 2, REACH * math.ceil(self.trellis.states / step_bits))
        rotated = torch.cat([sequences[:, -reach * length :], sequences[:, : reach * length]], dim=1)
        return self.paths(sequences, self.paths(rotated)[:, reach] >> step_bits)

    def _paths(self, sequences: Tensor, overlap: Tensor | None) -> Int[Tensor, "n steps"]:
        trellis, count = self.trellis, len(sequences)
        targets = sequences.T.reshape(-1, trellis.length, count)
        targets = torch.cat([torch.ones_like(targets[:, :1]), -2 * targets], dim=1)
        costs = self._least(targets, overlap)
        overlap_bits = costs[-1].argmin(0) if overlap is None else overlap
        first_bits = torch.arange(trellis.branches, device=overlap_bits.device)[:, None] * trellis.overlaps
        paths = torch.empty(len(targets), count, dtype=torch.int64, device=overlap_bits.device)
        for step in range(len(targets) - 1, -1, -1):
            states = overlap_bits + first_bits  # whose last L - k V bits are `overlap_bits`
            weights = self._weights.index_select(0, states.view(-1)).view(*states.shape, -1)
            error = (weights * targets[step].T).sum(-1)
            best = error.add_(costs[step].gather(0, states >> trellis.step_bits)).argmin(0, keepdim=True)
            paths[step] = states.gather(0, best)[0]
            overlap_bits = paths[step] >> trellis.step_bits
        return paths.T

    def _least(self, targets: Tensor, overlap: Tensor | None) -> Float[Tensor, "steps+1 overlaps n"]:
        """Return the least cost of a path before each step and after the last one, by the L - k V shared bits."""
        (steps, _, count), branches, overlaps = targets.shape, self.trellis.branches, self.trellis.overlaps
        size = (steps + 1) * overlaps * count
        if self._buffer.numel() < size:
            self._buffer = targets.new_empty(size)
        costs = self._buffer[:size].view(steps + 1, overlaps, count)
        costs[0] = 0 if overlap is None else torch.inf
        if overlap is not None:
            costs[0].scatter_(0, overlap[None], 0)
        cost = targets.new_empty(branches, overlaps, count)
        # a slice for each way to choose the first k V bits, which are shifted out
        if overlaps < branches:
            grouped = cost.view(-1, overlaps, overlaps, count)
            slices = [part for group in grouped.unbind(0) for part in group.unbind(1)]
            stays = costs
        else:
            slices = list(cost.view(branches, branches, -1, count).unbind(1))
            stays = costs.view(steps + 1, -1, branches, count).transpose(1, 2)
        best = torch.empty_like(slices[0])
        for step in range(steps):
            torch.baddbmm(costs[step].expand_as(cost), self._by_last, targets[step].expand(branches, -1, -1), out=cost)
            torch.minimum(slices[0], slices[1], out=best)
            for branch in slices[2:]:
                torch.minimum(best, branch, out=best)
            stays[step + 1].copy_(best)
        return costs


def pack(states: Int[Tensor, "n steps"], trellis: Trellis) -> Int[Tensor, "n bytes"]:
    """Pack tail-biting paths as circular bit strings: the first k V bits of each state, one after the other (uint8)."""
    shifted_out = states >> (trellis.states - trellis.step_bits)
    bits = shifted_out[..., None] >> torch.arange(trellis.step_bits - 1, -1, -1, device=states.device) & 1
    places = 1 << torch.arange(7, -1, -1, device=states.device)
    return (bits.reshape(len(states), -1, 8) * places).sum(-1).to(torch.uint8)


def unpack(codes: Int[Tensor, "n bytes"], trellis: Trellis) -> Int[Tensor, "n steps"]:
    """Return the states of all steps (int32); the inverse of `pack`."""
    size = codes.shape[1]
    starts = torch.arange(size * 8 // trellis.step_bits, device=codes.device) * trellis.step_bits
    first_byte, offset = starts // 8, starts % 8
    # a window of at most 16 bits begins in one byte and ends in one of the next two
    window = torch.zeros(len(codes), len(starts), dtype=torch.int32, device=codes.device)
    for place, shift in enumerate((16, 8, 0)):
        window |= codes[:, (first_byte + place) % size].to(torch.int32) << shift
    return window >> (24 - trellis.states - offset).to(torch.int32) & (2**trellis.states - 1)


def decode(
    codes: Int[Tensor, "n bytes"], values: Float[Tensor, "states length"], trellis: Trellis
) -> Float[Tensor, "n weights"]:
    """Decode packed paths.

    Args:
        codes: packed paths (`pack`).
        values: values of all states.
        trellis: the trellis.
    """
    if native.can_decode(codes, values):
        return native.decode(codes, values, trellis.step_bits)
    return values[unpack(codes, trellis)].flatten(1)
