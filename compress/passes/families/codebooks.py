"""What passes with dictionaries of single weights share: outliers apart, and zeros of pruned weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from compress.layers.base import WeightPart
from compress.layers.parts.codebook import CodebookPart, CodebookScheme
from compress.layers.parts.outliers import OutliersPart, OutliersScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.kmeans import assign
from compress.passes.contract.layers import Layer


@dataclass(frozen=True)
class Outliers:
    """The fraction of the weights that stay floats of a dtype."""

    fraction: float
    dtype: str

    def count(self, shape: tuple[int, ...]) -> int:
        """Their number in a layer of this shape (out, in)."""
        return round(self.fraction * shape[0] * shape[1])

    def choose(self, score: Float[Tensor, "out in"], mask: Bool[Tensor, "out in"] | None) -> Bool[Tensor, "out in"]:
        """Return the weights with the largest scores, among those that pruning kept."""
        # a new tensor is contiguous, also if the score is transposed
        is_outlier = torch.zeros(score.shape, dtype=torch.bool, device=score.device)
        count = self.count(score.shape)
        if count:
            flat = score.flatten() if mask is None else score.masked_fill(~mask, -torch.inf).flatten()
            is_outlier.view(-1)[flat.topk(count).indices] = True
        return is_outlier


def with_outliers(layer: LayerScheme, codebook: CodebookScheme, *outliers: Outliers) -> LayerScheme:
    """Return the scheme of a layer of indices, and of outliers if there are any."""
    count = sum(fraction.count(layer.shape) for fraction in outliers)
    outlier_parts = (OutliersScheme(count, "position", outliers[0].dtype),) if count else ()
    return layer.with_parts(codebook, *outlier_parts)


def look_up(
    weight: Float[Tensor, "out in"],
    centers: Float[Tensor, "tables entries"],
    layer: Layer,
    chosen: Bool[Tensor, "out in"],
    dtype: str,
) -> list[WeightPart]:
    """Return the parts of a layer whose weights become their nearest centers, and the chosen ones outliers.

    Args:
        centers: ascending; one row for all rows or one per row. If pruned weights exist, 0 joins the centers for them.
        dtype: of the outliers. What is stored of an outlier is its difference from its center.
    """
    books = centers.to(layer.storage)
    if layer.mask is not None:
        books = torch.cat([books, books.new_zeros(len(books), 1)], 1)
    books = books.sort(1).values
    tables = books.float()
    together = weight.reshape(1, -1) if len(tables) == 1 else weight
    codes = assign(together, tables).reshape(weight.shape)
    if layer.mask is not None:
        zero = (tables == 0).int().argmax(1, keepdim=True).expand(len(weight), 1)
        codes = torch.where(layer.mask, codes, zero)
    part = CodebookPart.of(codes[..., None], books[:, None, :, None])
    if not bool(chosen.any()):
        return [part]
    return [part, OutliersPart.of_positions(weight - part.dense(torch.float32), chosen, dtype)]
