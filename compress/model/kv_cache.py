"""The cache of keys and values as attention meets it: what enters can be watched, or rounded to a grid first.

Modules that keep keys and values are found by their forward pass: it takes a cache, and hands it every key and value in
`cache.update(keys, values, ...)` before attention reads what comes back. So a forward pre-hook that puts an object
around the cache (or in the place of none) sees them all, in training, in the sweep over blocks, in evaluation and in
`generate` with any cache class, and each is rounded once, as it enters. What is rounded stays in the model's dtype in
memory: the numbers are those of a quantized cache, its size is not.

    <attention>.k_scale, <attention>.v_scale   float [1]   only with static scales
    config.json: compress_kv_cache = {<attention>: {keys, values, scale, symmetric}}
                 grids by name, or null; scale token or static. Left out where the format says it (`Format.states`)
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from compress.formats.base import CacheScheme, Format
from compress.numerics.quant.fake import straight
from compress.weights.transforms.rounding import InputRounding

NAMES = ("past_key_values", "past_key_value", "layer_past")
"""What transformers calls a cache among the arguments of an attention."""

SCALES = ("k_scale", "v_scale")
"""The static scales of keys and of values, as buffers of the module and as tensors of a checkpoint."""

SCHEME = "cache_scheme"
"""The attribute of a module whose keys and values are rounded."""

CONFIG_KEY = "compress_kv_cache"

Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(keys, values), [batch, heads, length, width] each, on their way into the cache."""


@cache
def _place(kind: type[nn.Module]) -> tuple[str, int] | None:
    """The name of the argument of a class's forward pass that is a cache, and its position; None: it takes none."""
    parameters = list(inspect.signature(kind.forward).parameters)[1:]
    return next(((name, parameters.index(name)) for name in NAMES if name in parameters), None)


def caching(root: nn.Module) -> dict[str, nn.Module]:
    """The innermost modules that take a cache, by name, but for those whose tokens see later ones: they keep none."""
    takers = {name: module for name, module in root.named_modules() if _place(type(module)) is not None}
    inner = {name: module for name, module in takers.items() if not any(_inside(n, name) for n in takers if n != name)}
    return {name: module for name, module in inner.items() if getattr(module, "is_causal", True)}


def holding(root: nn.Module, names: Collection[str]) -> dict[str, nn.Module]:
    """Those of `caching` in which one of the modules `names` is."""
    return {name: m for name, m in caching(root).items() if any(_inside(inner, name) for inner in names)}


def _inside(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


class CacheProxy:
    """A cache, or none, whose keys and values are changed on their way in; all else about it is its own.

    Where there is none, keys and values come back as they were changed, and nothing is kept; to other questions it
    answers as an empty cache.
    """

    def __init__(self, kept: Any, change: Change) -> None:
        self._kept, self._change = kept, change

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """What attention reads: the given keys and values, changed, behind those that the cache holds."""
        keys, values = self._change(key_states, value_states)
        return (keys, values) if self._kept is None else self._kept.update(keys, values, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_kept", "_change"):
            raise AttributeError(name)
        return getattr(DynamicCache() if self._kept is None else self._kept, name)


def _through(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], change: Change) -> tuple[Any, Any]:
    """The arguments of the module's forward pass with `Entering` around the cache among them."""
    place = _place(type(module))
    assert place is not None
    name, position = place
    given = args[position] if len(args) > position else kwargs.get(name)
    if isinstance(given, EncoderDecoderCache):  # modules that look at themselves use this part of it
        given = given.self_attention_cache
    entering = CacheProxy(given, change)
    if len(args) > position:
        return (*args[:position], entering, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: entering}


# Watching


@contextmanager
def watching(modules: Mapping[str, nn.Module], see: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """see(name, keys, values) of all that enters the caches of modules, before it is rounded."""
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

    return _through(module, args, kwargs, seen)


# Rounding


def round_cache(
    module: nn.Module, scheme: CacheScheme, scales: tuple[Float[Tensor, " 1"] | None, Float[Tensor, " 1"] | None]
) -> None:
    """Round the keys and values that enter the module's cache from now on; scales: static ones, of keys and of values.

    The hook is a plain function, and all that it knows is in the module, so that copies of the module round, too.
    """
    assert scheme_of(module) is None, "its keys and values are rounded already"
    setattr(module, SCHEME, scheme)
    for name, scale in zip(SCALES, scales, strict=True):
        module.register_buffer(name, scale)
    module.register_forward_pre_hook(_round, with_kwargs=True)


def copy_rounding(module: nn.Module, other: nn.Module) -> None:
    """Round in another module as in this one."""
    scheme = scheme_of(module)
    assert scheme is not None
    of_keys, of_values = (getattr(module, name) for name in SCALES)
    round_cache(other, scheme, (of_keys, of_values))


def _round(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    def rounded(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        of_keys, of_values = roundings(module)
        return _rounded(of_keys, keys), _rounded(of_values, values)

    return _through(module, args, kwargs, rounded)


def _rounded(rounding: InputRounding | None, x: Tensor) -> Tensor:
    """Rounded, with the gradient of `x` (LLM-QAT, Liu 2023, section 2.2)."""
    if rounding is None:
        return x
    with torch.no_grad():
        found = rounding(x)
    return straight(x, found) if x.requires_grad else found


def roundings(module: nn.Module) -> tuple[InputRounding | None, InputRounding | None]:
    """How a module rounds keys, and values, that enter its cache; None: not at all."""
    scheme = scheme_of(module)
    if scheme is None:
        return None, None
    scales = (getattr(module, name) for name in SCALES)
    pairs = zip(scheme.grids, scales, strict=True)
    of_keys, of_values = (g and InputRounding.of(g, scale, symmetric=scheme.symmetric) for g, scale in pairs)
    return of_keys, of_values


def scheme_of(module: nn.Module) -> CacheScheme | None:
    """How the keys and values of a module are rounded; None: not at all."""
    return getattr(module, SCHEME, None)


def rounded_caches(root: nn.Module) -> dict[str, CacheScheme]:
    """How the keys and values of modules are rounded, by name, those that are."""
    found = {name: scheme_of(module) for name, module in root.named_modules()}
    return {name: scheme for name, scheme in found.items() if scheme is not None}


def cache_records(name: str, block: nn.Module) -> dict[str, dict[str, Any]]:
    """Of every attention of the block `name` whose cache is rounded: {scheme, sha256} as plain values, by full name."""
    found = {inner: block.get_submodule(inner) for inner in rounded_caches(block)}
    full = {f"{name}.{inner}" if inner else name: module for inner, module in found.items()}
    return {n: {"scheme": getattr(m, SCHEME).to_json(), "sha256": cache_sha256(m)} for n, m in full.items()}


def cache_sha256(module: nn.Module) -> str:
    """A digest of how a module rounds keys and values."""
    scheme, scales = scheme_of(module), [getattr(module, name) for name in SCALES]
    assert scheme is not None
    record = (scheme.to_json(), [None if scale is None else scale.float().tolist() for scale in scales])
    return hashlib.sha256(repr(record).encode()).hexdigest()


def stated_scheme(model: PreTrainedModel, caches: Mapping[str, CacheScheme], format_: Format) -> CacheScheme | None:
    """The scheme of a model whose caches are all rounded, alike, and in a way that the format states; None: not so."""
    kinds = set(caches.values())
    if len(kinds) != 1 or set(caches) != set(caching(model)):
        return None
    scheme = kinds.pop()
    return scheme if format_.states(scheme, model.config) else None
