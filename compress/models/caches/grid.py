"""Keys and values on number grids: with a scale per token and head, a static scale, or a scale per channel of keys.

Keys with a scale per channel and group of tokens (KIVI, Liu 2024, arXiv 2402.02750, section 3.2), and tokens of a
residual window, are quantized only after later tokens entered. So exact keys and values enter the cache, and attention
reads them quantized: the same numbers each time, because the tokens of a complete group do not change. In a forward
pass over a whole text all complete groups are quantized for all tokens, so its loss is an upper bound of that of
generation, which an evaluation in chunks measures. Otherwise each token is quantized once, when it enters the cache.

These are options of one policy: keys and values have grids of their own, values have a scale per token also in KIVI,
and every kind of scale can have a residual window and a Hadamard transform.

    k_scale, v_scale   float [1]   static scales of keys and of values
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from compress.layers.base import TensorSpec
from compress.layers.fields import read_grid
from compress.layers.transforms.rounding import InputRounding
from compress.models.caches.base import CACHE_PARTS, AttentionCache, CachePart, CachePolicy
from compress.numerics.hadamard import largest_block, transformed
from compress.numerics.quant.fake import straight
from compress.numerics.quant.grids import Grid

Transformed = Literal["keys", "values", "both"]
"""What is quantized after a Hadamard transform."""

SCALE_NAMES: dict[CachePart, str] = {"keys": "k_scale", "values": "v_scale"}


@dataclass(frozen=True)
class GridCache(CachePolicy):
    """Quantize keys and values to number grids. They stay in the dtype of the model in memory.

    Attributes:
        keys: grid of the keys; None for exact keys.
        values: grid of the values; None for exact values.
        scale: 'token' for one scale per token and head, computed at run time; 'static' for one scale of all keys and
            one of all values, computed in calibration.
        symmetric: whether there is no zero point; False adds one to each scale of kind 'token'.
        key_group: with scale 'token', the number of consecutive tokens whose keys share one scale per channel, in place
            of one per token and head. They are quantized when the group is complete.
        residual: number of latest tokens that are not quantized.
        hadamard: what is quantized after a Hadamard transform of every head, and transformed back; None for nothing.
    """

    kind: ClassVar[str] = "grid"
    readers: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"keys": read_grid, "values": read_grid}

    keys: Grid | None
    values: Grid | None
    scale: Literal["token", "static"] = "token"
    symmetric: bool = True
    key_group: int | None = None
    residual: int = 0
    hadamard: Transformed | None = None

    def to_json(self) -> dict[str, Any]:
        """Convert the policy to plain JSON, without a kind; the last three fields are omitted if they are defaults."""
        values = {name: value for name, value in super().to_json().items() if name != "kind"}
        always = {"keys": None, "values": None, "scale": self.scale, "symmetric": self.symmetric}
        return always | values

    def check(self) -> None:
        super().check()
        if self.key_group is not None and (self.key_group < 2 or self.scale == "static"):
            raise ValueError(
                f"key_group of {self.kind} is {self.key_group}; it needs scale 'token' and 2 or more tokens"
            )

    def grid_of(self, part: CachePart) -> Grid | None:
        """Return the grid of keys, or of values; None if they are exact."""
        return self.keys if part == "keys" else self.values

    def group_of(self, part: CachePart) -> int | None:
        """Return the number of tokens that share a scale per channel; None for a scale per token and head."""
        return self.key_group if part == "keys" else None

    def is_transformed(self, part: CachePart) -> bool:
        """Return whether keys, or values, are quantized after a Hadamard transform."""
        return self.hadamard in (part, "both")

    @property
    def is_delayed(self) -> bool:
        """Whether some tokens are quantized only after later ones entered the cache."""
        return self.key_group is not None or self.residual > 0

    def tensors(self) -> dict[str, TensorSpec]:
        if self.scale == "token":
            return {}
        return {SCALE_NAMES[part]: TensorSpec((1,)) for part in CACHE_PARTS if self.grid_of(part) is not None}

    def refuses(self, name: str, tensor: Tensor) -> str | None:
        return None if bool((tensor > 0).all() and tensor.isfinite().all()) else "not one positive number"

    def token_bytes(self, part: CachePart, heads: int, width: int, itemsize: int) -> float:
        """Tokens that are not quantized yet do not count."""
        grid, group = self.grid_of(part), self.group_of(part)
        if grid is None:
            return heads * width * itemsize
        scale_bytes = itemsize + (0 if self.symmetric else grid.bits / 8) if self.scale == "token" else 0
        return heads * (width * grid.bits / 8 + scale_bytes * (1 if group is None else width / group))

    def text_of(self, part: CachePart) -> str | None:
        grid, group = self.grid_of(part), self.group_of(part)
        if grid is None:
            return None
        shared = "token and head" if self.scale == "token" else "attention"
        shared = shared if group is None else f"channel and {group} tokens"
        return f"{grid.name} per {shared}" + (", Hadamard" if self.is_transformed(part) else "")

    @property
    def summary(self) -> str:
        moment = "as attention reads them" if self.is_delayed else "as they enter the cache"
        return f"Keys and values are quantized {moment}. The quantization is simulated: they stay in the model's dtype."

    def update(
        self,
        cache: AttentionCache,
        tensors: Mapping[str, Tensor],
        keys: Float[Tensor, "batch heads length width"],
        values: Float[Tensor, "batch heads length width"],
    ) -> tuple[Tensor, Tensor]:
        count: int | Tensor = keys.shape[-2]
        if self.is_delayed:
            keys, values = cache.append(keys, values)
            count = cache.token_count(keys)
        keys, values = self._quantize("keys", tensors, keys, count), self._quantize("values", tensors, values, count)
        return (keys, values) if self.is_delayed else cache.append(keys, values)

    def _quantize(self, part: CachePart, tensors: Mapping[str, Tensor], x: Tensor, count: int | Tensor) -> Tensor:
        """The quantized and dequantized tensor, with the gradient of `x` (LLM-QAT, Liu 2023, section 2.2)."""
        grid = self.grid_of(part)
        if grid is None:
            return x
        rounding = InputRounding.of(grid, tensors.get(SCALE_NAMES[part]), symmetric=self.symmetric)
        with torch.no_grad():
            quantized = self._quantize_tokens(part, rounding, x, count)
        return straight(x, quantized) if x.requires_grad else quantized

    def _quantize_tokens(self, part: CachePart, rounding: InputRounding, x: Tensor, count: int | Tensor) -> Tensor:
        """All tokens except the residual window and the tokens of an incomplete group.

        A sliding window holds the latest of `count` tokens, a static cache all from the first on and room for later
        ones.
        """
        group = self.group_of(part)
        if group is None and not self.residual:
            return self._in_transformed_space(part, rounding, x)
        length, group_size = x.shape[-2], group or 1
        start = 0 if isinstance(count, Tensor) else max(count - length, 0)  # the position of the first token of x
        end = (count - self.residual) // group_size * group_size  # positions before it are quantized
        is_quantized = torch.arange(start, start + length, device=x.device) < end
        by_group = partial(_by_channel, rounding, start % group_size, group_size)
        quantized = self._in_transformed_space(part, rounding if group is None else by_group, x)
        return torch.where(is_quantized[:, None], quantized, x)

    def _in_transformed_space(self, part: CachePart, rounding: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The quantization, between two Hadamard transforms in float32 if the policy has them.

        (q H)^T (k H) = q^T k, so attention may read what was transformed back: the numbers of QuaRot (section 4.4),
        which transforms queries instead, without a change of the attention.
        """
        if not self.is_transformed(part):
            return rounding(x)
        return transform_heads(rounding(transform_heads(x.float())), inverse=True).to(x.dtype)


def _by_channel(rounding: Callable[[Tensor], Tensor], missing: int, group: int, x: Tensor) -> Tensor:
    """All tokens quantized in groups with a scale per channel. The first group lacks `missing` tokens before x."""
    length = x.shape[-2]
    lacking = -(missing + length) % group
    # copies of the first and the last token do not change the range of an incomplete group
    copies = x[..., :1, :].expand(*x.shape[:-2], missing, -1), x[..., -1:, :].expand(*x.shape[:-2], lacking, -1)
    channels = torch.cat([copies[0], x, copies[1]], -2).unflatten(-2, (-1, group)).transpose(-1, -2)
    return rounding(channels).transpose(-1, -2).flatten(-3, -2)[..., missing : missing + length, :]


def transform_heads(x: Float[Tensor, "*batch width"], inverse: bool = False) -> Float[Tensor, "*batch width"]:
    """Multiply runs of channels by the largest orthonormal Hadamard matrix whose order divides the head's width."""
    return transformed(x, largest_block(x.shape[-1]), inverse)
