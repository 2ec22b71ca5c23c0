"""Passes that follow a preparation and leave the weights as they are, so that a test sees the preparation alone."""

from dataclasses import replace
from typing import ClassVar

from compress import AWQ, ChannelPermutation, SmoothQuant
from compress.layers.parts.codes import CodesScheme
from compress.numerics.quant.grids import GRIDS
from compress.numerics.sparse.positions import SparseLayout
from compress.passes.contract.layers import Solution
from compress.passes.contract.passes import LayerPass
from compress.passes.families.weight_grid import WeightGrid


class Unpruned(LayerPass):
    """Says that it prunes N:M, and does not."""

    paper: ClassVar[str] = "https://example.org/unpruned"
    makes: ClassVar[frozenset] = frozenset({"masked"})
    n_of_m: tuple[int, int] = (2, 4)

    def effects(self, layer):
        return replace(super().effects(layer), sparsities=(SparseLayout.regular(layer.shape, *self.n_of_m),))

    def solve(self, weight, seen, layer):
        return Solution()


class Unrounded(WeightGrid, LayerPass):
    """Says that it rounds to a grid, and does not."""

    paper: ClassVar[str] = "https://example.org/unrounded"
    makes: ClassVar[frozenset] = frozenset({"quantized"})

    def effects(self, layer):
        codes = CodesScheme(GRIDS[self.weights], self.group_size, self.symmetric)
        return replace(super().effects(layer), scheme=layer.with_parts(codes))

    def solve(self, weight, seen, layer):
        return Solution()


# Preparations that need no later pass, for chains in any order.


class SmoothQuantAlone(SmoothQuant):
    """SmoothQuant that any pass may follow."""

    def effects(self, layer):
        return replace(super().effects(layer), prepares=None)


class AWQAlone(AWQ):
    """AWQ that any pass may follow."""

    def effects(self, layer):
        return replace(super().effects(layer), prepares=None)


class ChannelPermutationAlone(ChannelPermutation):
    """Channel permutation that any pass may follow."""

    def effects(self, layer):
        return replace(super().effects(layer), prepares=None)
