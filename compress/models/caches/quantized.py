"""The KV cache of attention modules: observe the keys and values that enter it, or round them to a grid first.

A module is recognized as an attention with a cache by its forward pass: it takes a cache argument and passes every key
and value to `cache.update(keys, values, ...)` before attention reads the result. A forward pre-hook wraps the cache (or
replaces a missing one) and so sees all keys and values: in training, in the sweep over blocks, in evaluation, and in
`generate` with any cache class. Each is rounded once, when it enters. Rounded keys and values stay in the model's dtype
in memory: they have the values of a quantized cache, but not its size.

Keys with a scale per channel and group of tokens (KIVI, Liu 2024, arXiv 2402.02750, section 3.2), and tokens of a
residual window, are rounded only after later tokens entered. So exact keys and values enter the cache, and attention
reads them rounded: the same numbers each time, because the tokens of a complete group do not change. In a forward pass
over a whole text all complete groups are rounded for all tokens, so its loss is an upper bound of that of generation.

    <attention>.k_scale, <attention>.v_scale   float [1]   only with static scales
    config.json: compress_kv_cache = {<attention>: {keys, values, scale, symmetric, key_group?, residual?, hadamard?}}
                 grids by name, or null; scale token or static. Omitted where the format states it (`Format.states`)
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache

from compress.layers.transforms.rounding import InputRounding
from compress.models.caches.scheme import CacheScheme
from compress.numerics.hadamard import largest_block, transformed
from compress.numerics.quant.fake import straight

NAMES = ("past_key_values", "past_key_value", "layer_past")
"""transformers' names of the cache among the arguments of an attention."""

SCALES = ("k_scale", "v_scale")
"""The static scales of keys and values: buffers of the module and tensors of a checkpoint."""

SCHEME = "cache_scheme"
"""The attribute that holds the scheme of a module with a quantized cache."""

CONFIG_KEY = "compress_kv_cache"

Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(keys, values), [batch, heads, length, width] each -> the keys and values that enter the cache."""

Read = Callable[[Tensor, Tensor, "int | Tensor"], tuple[Tensor, Tensor]]
"""(keys, values, tokens seen so far) that the cache returns -> the keys and values that attention reads."""


@cache
def _cache_argument(kind: type[nn.Module]) -> tuple[str, int] | None:
    """The name and position of the cache argument in a class's forward pass; None when it has none."""
    parameters = list(inspect.signature(kind.forward).parameters)[1:]
    return next(((name, parameters.index(name)) for name in NAMES if name in parameters), None)


def attentions_with_cache(root: nn.Module) -> dict[str, nn.Module]:
    """The innermost modules that pass keys to a cache argument, by name, without attention that is not causal."""
    takers = {name: module for name, module in root.named_modules() if _cache_argument(type(module)) is not None}
    inner = {name: module for name, module in takers.items() if not any(_inside(n, name) for n in takers if n != name)}
    causal = {name: module for name, module in inner.items() if getattr(module, "is_causal", True)}
    return {name: module for name, module in causal.items() if _has_keys(type(module))}


@cache
def _has_keys(kind: type[nn.Module]) -> bool:
    """Whether the forward pass calls `cache.update`: convolutions and state spaces keep other states in the cache."""
    forward = inspect.unwrap(kind.forward)
    return "update" in forward.__code__.co_names


def attentions_containing(root: nn.Module, names: Collection[str]) -> dict[str, nn.Module]:
    """The modules of `attentions_with_cache` that contain one of the modules `names`."""
    return {name: m for name, m in attentions_with_cache(root).items() if any(_inside(inner, name) for inner in names)}


def _inside(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


class CacheProxy:
    """A wrapper of a cache, or of None, that changes keys and values on their way in and delegates everything else.

    read: changes them on their way out, too. Without a cache, `update` returns the changed keys and values and stores
    nothing, and all other attributes are those of an empty cache.
    """

    def __init__(self, kept: Any, change: Change, read: Read | None = None) -> None:
        self._kept, self._change, self._read = kept, change, read

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Change the keys and values, append them to the cache, and return all that attention reads."""
        keys, values = self._change(key_states, value_states)
        seen: int | Tensor = keys.shape[-2]
        if self._kept is not None:
            keys, values = self._kept.update(keys, values, *args, **kwargs)
            if self._read is not None:
                seen = self._kept.get_seq_length(args[0] if args else kwargs["layer_idx"])
        return (keys, values) if self._read is None else self._read(keys, values, seen)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_kept", "_change", "_read"):
            raise AttributeError(name)
        return getattr(DynamicCache() if self._kept is None else self._kept, name)


def _wrap_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], change: Change, read: Read | None = None
) -> tuple[Any, Any]:
    """Wrap the cache among the arguments of the module's forward pass in a `CacheProxy`."""
    place = _cache_argument(type(module))
    assert place is not None
    name, position = place
    given = args[position] if len(args) > position else kwargs.get(name)
    if isinstance(given, EncoderDecoderCache):  # self-attention uses this part of it
        given = given.self_attention_cache
    proxy = CacheProxy(given, change, read)
    if len(args) > position:
        return (*args[:position], proxy, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: proxy}


# Observation


@contextmanager
def watching(modules: Mapping[str, nn.Module], see: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """Call see(name, keys, values) for everything that enters the caches of modules, before it is rounded."""
    handles = [m.register_forward_pre_hook(partial(_watch, name, see), with_kwargs=True) for name, m in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(name: str, see: Callable[[str, Tensor, Tensor], None], module: nn.Module, args: Any, kwargs: Any) -> Any:
    def seen(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        see(name, keys, values)
        return keys, values

    return _wrap_cache(module, args, kwargs, seen)


# Rounding


def round_cache(
    module: nn.Module, scheme: CacheScheme, scales: tuple[Float[Tensor, " 1"] | None, Float[Tensor, " 1"] | None]
) -> None:
    """Round the keys and values that enter the module's cache from now on; scales: static ones, of keys and of values.

    The hook is a plain function, and its state is in the module, so that copies of the module round as well.
    """
    assert scheme_of(module) is None, "the module's cache is already quantized"
    setattr(module, SCHEME, scheme)
    for name, scale in zip(SCALES, scales, strict=True):
        module.register_buffer(name, scale)
    module.register_forward_pre_hook(_round, with_kwargs=True)


def copy_rounding(module: nn.Module, other: nn.Module) -> None:
    """Copy the rounding of a module's cache to another module."""
    scheme = scheme_of(module)
    assert scheme is not None
    of_keys, of_values = (getattr(module, name) for name in SCALES)
    round_cache(other, scheme, (of_keys, of_values))


def _round(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    def rounded(keys: Tensor, values: Tensor, seen: int | Tensor | None = None) -> tuple[Tensor, Tensor]:
        of_keys, of_values = roundings(module)
        return _rounded(of_keys, keys, seen), _rounded(of_values, values, seen)

    def unchanged(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values

    scheme = scheme_of(module)
    if scheme is not None and scheme.late:
        return _wrap_cache(module, args, kwargs, unchanged, rounded)
    return _wrap_cache(module, args, kwargs, rounded)


def _rounded(rounding: CacheRounding | None, x: Tensor, seen: int | Tensor | None) -> Tensor:
    """The rounded tensor, with the gradient of `x` (LLM-QAT, Liu 2023, section 2.2)."""
    if rounding is None:
        return x
    with torch.no_grad():
        rounded = rounding(x, seen)
    return straight(x, rounded) if x.requires_grad else rounded


def spread(x: Float[Tensor, "*batch width"], inverse: bool = False) -> Float[Tensor, "*batch width"]:
    """Multiply runs of channels by the largest orthonormal Hadamard matrix whose order divides the head's width."""
    return transformed(x, largest_block(x.shape[-1]), inverse)


@dataclass(frozen=True)
class CacheRounding:
    """The rounding of an attention's keys, or of its values; called with [batch, heads, length, width].

    inputs: rounds along the last axis. group: tokens that share a scale per channel; None: each token has its own
    scales. residual: latest tokens that stay exact. hadamard: round `spread(x)`, and transform that back.
    """

    inputs: InputRounding
    group: int | None = None
    residual: int = 0
    hadamard: bool = False

    def __call__(self, x: Float[Tensor, "batch heads length width"], seen: int | Tensor | None = None) -> Tensor:
        """The rounded tensor. seen: tokens since the beginning of the text; None: the given ones.

        A sliding window holds the latest of them, a static cache all from the first on and room for later ones.
        """
        if self.group is None and not self.residual:
            return self._transformed(x, self.inputs)
        length = x.shape[-2]
        seen = length if seen is None else seen
        first = 0 if isinstance(seen, Tensor) else max(seen - length, 0)  # the position of the first token of x
        group = self.group or 1
        end = (seen - self.residual) // group * group  # positions before it are rounded
        inside = torch.arange(first, first + length, device=x.device) < end
        alike = self.inputs if self.group is None else partial(self._by_channel, ahead=first % group, group=group)
        return torch.where(inside[:, None], self._transformed(x, alike), x)

    def _transformed(self, x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        """The rounding, if asked for between two Hadamard transforms, which run in float32.

        (q H)^T (k H) = q^T k, so attention may read what was transformed back: the numbers of QuaRot (section 4.4),
        which transforms queries instead, without a change of the attention.
        """
        return spread(rounding(spread(x.float())), inverse=True).to(x.dtype) if self.hadamard else rounding(x)

    def _by_channel(self, x: Tensor, ahead: int, group: int) -> Tensor:
        """All tokens rounded in groups, the first of which began `ahead` tokens before x."""
        length = x.shape[-2]
        behind = -(ahead + length) % group
        # copies of the first and the last token do not change the range of an incomplete group
        whole = torch.cat(
            [x[..., :1, :].expand(*x.shape[:-2], ahead, -1), x, x[..., -1:, :].expand(*x.shape[:-2], behind, -1)], -2
        )
        channels = whole.unflatten(-2, (-1, group)).transpose(-1, -2)
        rounded = self.inputs(channels).transpose(-1, -2).flatten(-3, -2)
        return rounded[..., ahead : ahead + length, :]


def roundings(module: nn.Module) -> tuple[CacheRounding | None, CacheRounding | None]:
    """The rounding of the keys and of the values that enter a module's cache; None: not rounded."""
    scheme = scheme_of(module)
    if scheme is None:
        return None, None
    scales = (getattr(module, name) for name in SCALES)
    parts = zip(scheme.grids, scales, scheme.groups, scheme.transformed, strict=True)
    of_keys, of_values = (
        g and CacheRounding(InputRounding.of(g, scale, symmetric=scheme.symmetric), group, scheme.residual, hadamard)
        for g, scale, group, hadamard in parts
    )
    return of_keys, of_values


def scheme_of(module: nn.Module) -> CacheScheme | None:
    """The scheme of a module's quantized cache, or None."""
    return getattr(module, SCHEME, None)


def rounded_caches(root: nn.Module) -> dict[str, CacheScheme]:
    """The schemes of all modules below root that have a quantized cache, by name."""
    found = {name: scheme_of(module) for name, module in root.named_modules()}
    return {name: scheme for name, scheme in found.items() if scheme is not None}


def cache_records(name: str, block: nn.Module) -> dict[str, dict[str, Any]]:
    """{scheme, sha256} of every attention with a quantized cache in the block `name`, as JSON values, by full name."""
    found = {inner: block.get_submodule(inner) for inner in rounded_caches(block)}
    full = {f"{name}.{inner}" if inner else name: module for inner, module in found.items()}
    return {n: {"scheme": getattr(m, SCHEME).to_json(), "sha256": cache_sha256(m)} for n, m in full.items()}


def cache_sha256(module: nn.Module) -> str:
    """A digest of the scheme and the scales of a module's quantized cache."""
    scheme, scales = scheme_of(module), [getattr(module, name) for name in SCALES]
    assert scheme is not None
    record = (scheme.to_json(), [None if scale is None else scale.float().tolist() for scale in scales])
    return hashlib.sha256(repr(record).encode()).hexdigest()
