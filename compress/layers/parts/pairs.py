"""Outlier-victim pairs: 4-bit codes. One weight of each pair of neighbours may be an outlier; the other is then zero.

packed   int32 [O, ceil(I*4/32)]   the codes of each row (`numerics.quant.pairs`), as a dense bit stream
scale    float [O, G]              [1, 1] per tensor
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import Self

from compress.layers.base import PartScheme, TensorSpec, WeightPart, stored_name
from compress.numerics.quant.bits import pack, packed_width, unpack
from compress.numerics.quant.codes import GroupSize, grouped, groups_in, spread
from compress.numerics.quant.pairs import BITS, VICTIM, decode


@dataclass(frozen=True)
class PairsScheme(PartScheme):
    """Outlier-victim pairs with a scale per group of columns.

    Attributes:
        group_size: an even number of columns, 'channel' or 'tensor'.
    """

    kind: ClassVar[str] = "pairs"

    group_size: GroupSize

    @property
    def quantized(self) -> bool:
        return True

    @property
    def free_scales(self) -> bool:
        return True

    @property
    def scale_groups(self) -> GroupSize:
        return self.group_size

    @property
    def text(self) -> str:
        return f"outlier-victim pairs, 4 bits, group {self.group_size}"

    def refuses(self, shape: tuple[int, int]) -> str | None:
        width, size = shape[1], self.group_size
        if width % 2:
            return f"its {width} inputs are no pairs; leave the layer out (ignore)"
        if isinstance(size, int) and (width % size or size % 2):
            return f"groups of {size} columns are no pairs, or do not divide its {width} inputs; use another group_size"
        return None

    def tensors(self, shape: tuple[int, int], lattice: tuple[int, ...] | None = None) -> dict[str, TensorSpec]:
        rows, width = shape
        lines = 1 if self.group_size == "tensor" else rows
        packed = TensorSpec((rows, packed_width(width, BITS)), torch.int32)
        return {"packed": packed, "scale": TensorSpec((lines, groups_in(width, self.group_size)))}


class PairsPart(WeightPart[PairsScheme]):
    """Packed codes of pairs with their scales."""

    kind: ClassVar[str] = "pairs"
    names: ClassVar[Mapping[str, str]] = {"words": "packed", "scale": "scale"}

    words: Int[Tensor, "out words"]
    scale: Float[Tensor, "out groups"]

    @classmethod
    def of(cls, codes: Int[Tensor, "out in"], scale: Float[Tensor, "out groups"], group_size: GroupSize) -> Self:
        """Pack codes."""
        shape = codes.shape[0], codes.shape[1]
        return cls(PairsScheme(group_size), shape, {"words": pack(codes, BITS), "scale": scale})

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype

    @property
    def codes(self) -> Int[Tensor, "out in"]:
        """The unpacked codes."""
        return unpack(self.words, BITS, self.shape[1])

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        return decode(self.codes, dtype) * self.spread(self.scale.to(dtype))

    def rows_at(self, ids: Int[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, "n in"]:
        scale = self.scale.to(dtype)
        codes = unpack(self.words[ids], BITS, self.shape[1])
        return decode(codes, dtype) * self.spread(scale if len(scale) == 1 else scale[ids])

    def in_storage(self, dtype: torch.dtype) -> PairsPart:
        return self.with_scale(self.scale.to(dtype))

    def validate(self, prefix: str) -> None:
        super().validate(prefix)
        pairs = self.codes.view(self.shape[0], -1, 2)
        marked = pairs == VICTIM
        if bool(marked.all(-1).any()) or bool((marked.flip(-1) & (pairs == 0)).any()):
            raise ValueError(f"{stored_name(prefix, 'packed')} holds a pair with a victim but without an outlier")

    @property
    def free_scale(self) -> Float[Tensor, "out groups"]:
        return self.scale

    def with_scale(self, scale: Float[Tensor, "out groups"]) -> PairsPart:
        return PairsPart(self.scheme, self.shape, {"words": self.words, "scale": scale})

    def spread(self, per_group: Float[Tensor, "out groups"]) -> Float[Tensor, "out in"]:
        return spread(per_group, self.shape[1], self.scheme.group_size)

    def sum_groups(self, values: Float[Tensor, "out in"]) -> Float[Tensor, "out groups"]:
        return grouped(values, self.scheme.group_size).sum(-1)
