"""KV-cache quantization: quantize keys per channel and values per token as attention reads them (Liu 2024, KIVI)."""

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
from compress.models.caches.attentions import attentions_containing, set_policy, watching
from compress.models.caches.base import CACHE_PARTS
from compress.models.caches.grid import SCALE_NAMES, GridCache, Transformed, transform_heads
from compress.numerics.quant.grids import GRIDS, Grid
from compress.passes.contract.facts import Effects, Fact, Log, Requirements
from compress.passes.contract.layers import BlockInputs
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.passes import BlockPass

EXACT = "none"
KEY_GROUP = 64  # tokens; the paper has 32, which takes twice the bytes for scales
ALLOWED = tuple(n for n, g in GRIDS.items() if g.group_size is None and not g.averaged and g.scaling.stored is None)
"""Grids whose scale is a plain float that covers the largest magnitude, for any head width."""


def _cache_grid(value: Any) -> Any:
    name = value.name if isinstance(value, Grid) else value
    if name != EXACT and name not in ALLOWED:
        raise ValueError(f"grid {name!r} cannot hold keys and values; use {', '.join(ALLOWED)}, or {EXACT}")
    return name


CacheGrid = Annotated[str, BeforeValidator(_cache_grid)]


class KVCache(BlockPass):
    """Quantize the KV cache: attention reads quantized keys and values, in all later passes too.

    Scales: some channels of keys are much larger than the others in all tokens; those of values are not. So keys get
    one scale per channel and group of `key_group` tokens, and values one per token and head (section 3 of the paper).
    The tokens of an incomplete group, and the latest `residual` tokens, are exact. An evaluation of whole windows
    hardly shows this; `eval: {chunk: 1}` measures the model as it decodes. key_group: null quantizes keys as values,
    as they enter the cache (LLM-QAT, Liu 2023, arXiv 2305.17888, section 2.2).

    Keys are quantized in their cached form, which includes rotary position embeddings. `hadamard` transforms them
    before, so that no channel is much larger than others (QuaRot, Ashkboos 2024, arXiv 2404.00456, section 4.4; R3 of
    SpinQuant). It is for keys with a scale per token (key_group: null).

    Order: the cache policy stays in the model. Passes that calibrate or train later (gptq, qat, distill, ...) run
    through it, with a straight-through gradient; a teacher runs without it. Passes that rewrite attention modules and
    verify the rewrite (smoothquant, awq, channel_permutation) must come before this pass, because quantization turns
    the smallest difference into a whole step. An attention module is quantized if it contains one of the targets.

    Memory: the cache does not become smaller in compress, because quantized numbers keep the model's dtype. Servers
    store small caches: vLLM with --kv-cache-dtype fp8 (automatic for a checkpoint with static fp8_e4m3 scales),
    transformers with cache_implementation="quantized" (integers of 2 or 4 bits).
    """

    use_for: ClassVar[str] = (
        "Long contexts and many requests at once. 8 bits cost nearly nothing, 4 bits little with keys per channel."
    )
    not_for: ClassVar[str] = "Short contexts, where weights take most of the memory."
    paper: ClassVar[str] = "https://arxiv.org/abs/2402.02750"
    never_after: ClassVar[frozenset[Fact]] = frozenset({"cache_quantized"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"cache_quantized"})

    keys: CacheGrid = Field(default="int8", description=f"grid of the keys: {', '.join(ALLOWED)}, or {EXACT}")
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
        description="keys, values or both are quantized after a Hadamard transform of each head (QuaRot), which "
        "spreads large channels over all, and are transformed back as attention reads them; null: none",
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.keys == self.values == EXACT:
            raise ValueError(f"keys and values: {EXACT} leaves nothing to quantize; set a grid for one of them")
        if not self.symmetric and self.scale == "static":
            raise ValueError("symmetric: false needs scale: token; a static scale has no zero point")
        symmetric = [g.name for g in (self.cache.keys, self.cache.values) if g is not None and g.symmetric_only]
        if not self.symmetric and symmetric:
            raise ValueError(f"symmetric: false needs integer grids; {symmetric[0]} has no zero point")
        idle = [kind for kind, name in (("keys", self.keys), ("values", self.values)) if name == EXACT]
        if idle and self.hadamard in (*idle, "both"):
            quantized_kind = "values" if idle == ["keys"] else "keys"
            reason = f"hadamard: {self.hadamard} has no effect on {idle[0]}, which stay exact"
            raise ValueError(f"{reason}; write hadamard: {quantized_kind}, or leave it out")

    def without_effect(self) -> dict[str, str]:
        reason = "with scale: static; leave it out" if self.scale == "static" else "with keys: none; leave it out"
        idle = self.scale == "static" or self.keys == EXACT
        return super().without_effect() | ({"key_group": reason} if idle else {})

    @property
    def cache(self) -> GridCache:
        """The cache policy."""
        keys, values = (None if name == EXACT else GRIDS[name] for name in (self.keys, self.values))
        group = self.key_group if self.scale == "token" and keys is not None else None
        return GridCache(keys, values, self.scale, self.symmetric, group, self.residual, self.hadamard)

    def effects(self, layer: LayerScheme) -> Effects:
        return replace(super().effects(layer), cache=self.cache)

    @property
    def requires(self) -> Requirements:
        return Requirements(data=self.scale == "static")

    def memory(self, size: ProblemSize) -> int:
        return size.forward_bytes

    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        attentions, policy = attentions_containing(block, inputs.names), self.cache
        if self.scale == "token":
            for attention in attentions.values():
                set_policy(attention, policy)
            return
        dtype, largest_of = next(block.parameters()).dtype, largest(block, attentions, inputs, policy)
        for name, attention in attentions.items():
            tops = largest_of[name]
            tensors = {
                SCALE_NAMES[part]: fitted(grid, top, inputs.storage).to(dtype)
                for part, top in zip(CACHE_PARTS, tops, strict=True)
                if (grid := policy.grid_of(part)) is not None
            }
            set_policy(attention, policy, tensors)
            figures = {"largest_key": float(tops[0]), "largest_value": float(tops[1])}
            log("note", f"{name}: keys and values have static scales", **figures)


def largest(
    block: nn.Module, attentions: Mapping[str, nn.Module], inputs: BlockInputs, policy: GridCache
) -> dict[str, list[Tensor]]:
    """Return the largest magnitudes [keys, values] on the calibration text, by attention module.

    Args:
        policy: states whether keys, and whether values, are quantized after a Hadamard transform.

    Raises:
        NumericError: if one is not finite, or if no token reached the module.
    """
    largest_of: dict[str, list[Tensor]] = {}

    def include(name: str, tops: list[Tensor]) -> None:
        largest_of[name] = [torch.maximum(*pair) for pair in zip(largest_of.get(name, tops), tops, strict=True)]

    def see(name: str, *keys_and_values: Tensor) -> None:
        pairs = zip(CACHE_PARTS, keys_and_values, strict=True)
        inputs_of_grids = (transform_heads(x.float()) if policy.is_transformed(part) else x for part, x in pairs)
        include(name, [x.abs().amax().float() for x in inputs_of_grids])

    with watching(attentions, see):
        for batch in range(inputs.batches):
            inputs.forward(block, batch)
    for process_values in inputs.processes.gather(dict(largest_of)):
        for name, tops in process_values.items():
            include(name, tops)
    for name in attentions:
        if name not in largest_of:
            raise NumericError(f"{inputs.label}.{name}: no calibration token reached its cache; use scale: token")
        for part, top in zip(CACHE_PARTS, largest_of[name], strict=True):
            if not bool(top.isfinite()):
                raise NumericError(f"{inputs.label}.{name}: {part} contain NaN or infinity on the calibration text")
    return largest_of


def fitted(grid: Grid, top: Float[Tensor, ""], storage: torch.dtype) -> Float[Tensor, " 1"]:
    """Return the stored scale of a grid that covers the range from -top to top."""
    return grid.fit(-top.reshape(1), top.reshape(1), True, storage)[0]
