"""KV-cache quantization: round keys per channel and values per token as attention reads them (Liu 2024, KIVI)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from compress.errors import NumericError
from compress.layers.scheme import LayerScheme
from compress.models.caches.quantized import attentions_containing, round_cache, spread, watching
from compress.models.caches.scheme import CacheScheme, Transformed
from compress.numerics.quant.grids import GRIDS, Grid
from compress.passes.contract.facts import Effects, Fact, Log, Requirements
from compress.passes.contract.layers import BlockInputs
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.passes import BlockPass

UNROUNDED = "none"
KEY_GROUP = 64  # tokens; the paper has 32, which takes twice the bytes for scales
ALLOWED = tuple(n for n, g in GRIDS.items() if g.group_size is None and not g.averaged and g.scaling.stored is None)
"""Grids whose scale is a plain float that covers the largest magnitude, for any head width."""


def _cache_grid(value: Any) -> Any:
    name = value.name if isinstance(value, Grid) else value
    if name != UNROUNDED and name not in ALLOWED:
        raise ValueError(f"grid {name!r} cannot hold keys and values; use {', '.join(ALLOWED)}, or {UNROUNDED}")
    return name


CacheGrid = Annotated[str, BeforeValidator(_cache_grid)]


class KVCache(BlockPass):
    """Quantize the KV cache: attention reads rounded keys and values, in all later passes too.

    Keys have channels that are much larger than the others in all tokens, values have none. So keys get one scale per
    channel and group of `key_group` tokens, and values one per token and head (section 3 of the paper); the tokens of
    an incomplete group, and the latest `residual` tokens, are exact. key_group: null rounds keys as values, as they
    enter the cache (LLM-QAT, Liu 2023, arXiv 2305.17888, section 2.2). The rounding stays in the model. Passes that
    calibrate or train later (gptq, qat, distill, ...) run through it, with a straight-through gradient; a teacher runs
    without it. Keys are rounded in their cached form, which includes rotary position embeddings. `hadamard` rounds them
    transformed, where no channel is much larger than others (QuaRot, Ashkboos 2024, arXiv 2404.00456, section 4.4; R3
    of SpinQuant); it is for keys with a scale per token (key_group: null). An attention module is rounded if it
    contains one of the targets. Passes that rewrite attention modules and prove the rewrite (smoothquant, awq,
    channel_permutation) must come before this pass, because rounding turns the smallest difference into a whole step,
    so proofs fail.

    The cache does not become smaller here, because rounded numbers keep the model's dtype. Servers store small caches:
    vLLM with --kv-cache-dtype fp8 (automatic for a checkpoint with static fp8_e4m3 scales), transformers with
    cache_implementation="quantized" (integers of 2 or 4 bits).
    """

    use_for: ClassVar[str] = (
        "Long contexts and many requests at once: 8 bits cost nearly nothing, 4 bits little with keys per channel."
    )
    not_for: ClassVar[str] = "Short contexts, where weights are most of the memory."
    paper: ClassVar[str] = "https://arxiv.org/abs/2402.02750"
    never_after: ClassVar[frozenset[Fact]] = frozenset({"cache_quantized"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"cache_quantized"})

    keys: CacheGrid = Field(default="int8", description=f"grid of the keys: {', '.join(ALLOWED)}, or {UNROUNDED}")
    values: CacheGrid = Field(default="int8", description="grid of the values, from the same list")
    scale: Literal["token", "static"] = Field(
        default="token",
        description="'token': one scale per token and head, computed at run time; 'static': one calibrated scale for "
        "the keys and one for the values of each attention module",
    )
    symmetric: bool = Field(default=True, description="no zero point; false: one zero point per scale (integer grids)")
    key_group: int | None = Field(
        default=KEY_GROUP,
        ge=2,
        description="tokens whose keys share one scale per channel; null: one scale per token and head",
    )
    residual: int = Field(default=0, ge=0, description="number of latest tokens whose keys and values stay exact")
    hadamard: Transformed | None = Field(
        default=None,
        description="keys, values or both are rounded after a Hadamard transform of each head (QuaRot), which spreads "
        "large channels over all, and are transformed back as attention reads them; null: none",
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.keys == self.values == UNROUNDED:
            raise ValueError(f"keys and values: {UNROUNDED} leaves nothing to round; set a grid for one of them")
        if not self.symmetric and self.scale == "static":
            raise ValueError("symmetric: false needs scale: token; a static scale has no zero point")
        symmetric = [g.name for g in self.cache.grids if g is not None and g.symmetric_only]
        if not self.symmetric and symmetric:
            raise ValueError(f"symmetric: false needs integer grids; {symmetric[0]} has no zero point")
        idle = [kind for kind, name in (("keys", self.keys), ("values", self.values)) if name == UNROUNDED]
        if idle and self.hadamard in (*idle, "both"):
            quantized_kind = "values" if idle == ["keys"] else "keys"
            reason = f"hadamard: {self.hadamard} has no effect on {idle[0]}, which stay exact"
            raise ValueError(f"{reason}; write hadamard: {quantized_kind}, or leave it out")

    def without_effect(self) -> dict[str, str]:
        reason = "with scale: static; leave it out" if self.scale == "static" else "with keys: none; leave it out"
        idle = self.scale == "static" or self.keys == UNROUNDED
        return super().without_effect() | ({"key_group": reason} if idle else {})

    @property
    def cache(self) -> CacheScheme:
        """The quantization of keys and values."""
        keys, values = (None if name == UNROUNDED else GRIDS[name] for name in (self.keys, self.values))
        group = self.key_group if self.scale == "token" and keys is not None else None
        return CacheScheme(keys, values, self.scale, self.symmetric, group, self.residual, self.hadamard)

    def effects(self, layer: LayerScheme) -> Effects:
        return replace(super().effects(layer), cache=self.cache)

    @property
    def requires(self) -> Requirements:
        return Requirements(data=self.scale == "static")

    def memory(self, size: ProblemSize) -> int:
        return size.forward_bytes

    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        attention_of, scheme = attentions_containing(block, inputs.names), self.cache
        if self.scale == "token":
            for attention in attention_of.values():
                round_cache(attention, scheme, (None, None))
            return
        dtype, tops = next(block.parameters()).dtype, largest(block, attention_of, inputs, scheme.transformed)
        for name, attention in attention_of.items():
            pairs = zip(scheme.grids, tops[name], strict=True)
            of_keys, of_values = (g and fitted(g, top, inputs.storage).to(dtype) for g, top in pairs)
            round_cache(attention, scheme, (of_keys, of_values))
            key, value = (float(top) for top in tops[name])
            log("note", f"{name}: keys and values have static scales", largest_key=key, largest_value=value)


def largest(
    block: nn.Module, attentions: Mapping[str, nn.Module], inputs: BlockInputs, transformed: tuple[bool, bool]
) -> dict[str, list[Tensor]]:
    """Return the largest magnitudes [keys, values] on the calibration text, by attention module.

    Args:
        transformed: whether keys, and whether values, are rounded after a Hadamard transform.

    Raises:
        NumericError: if one is not finite, or if no token reached the module.
    """
    largest_of: dict[str, list[Tensor]] = {}

    def see(name: str, keys: Tensor, values: Tensor) -> None:
        pairs = zip((keys, values), transformed, strict=True)
        tops = [(spread(x.float()) if turned else x).abs().amax().float() for x, turned in pairs]
        largest_of[name] = [torch.maximum(*pair) for pair in zip(largest_of.get(name, tops), tops, strict=True)]

    with watching(attentions, see):
        for batch in range(inputs.batches):
            inputs.forward(block, batch)
    for process_values in inputs.processes.gather(dict(largest_of)):
        for name, tops in process_values.items():
            largest_of[name] = [torch.maximum(*pair) for pair in zip(largest_of.get(name, tops), tops, strict=True)]
    for name in attentions:
        if name not in largest_of:
            raise NumericError(f"{inputs.label}.{name}: no calibration token reached its cache; use scale: token")
        for kind, top in zip(("keys", "values"), largest_of[name], strict=True):
            if not bool(top.isfinite()):
                raise NumericError(f"{inputs.label}.{name}: {kind} contain NaN or infinity on the calibration text")
    return largest_of


def fitted(grid: Grid, top: Float[Tensor, ""], storage: torch.dtype) -> Float[Tensor, " 1"]:
    """Return the stored scale of a grid that covers the range from -top to top."""
    return grid.fit(-top.reshape(1), top.reshape(1), True, storage)[0]
