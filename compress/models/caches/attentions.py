"""Attention modules with a cache: find them, install cache policies, and observe the keys and values that enter.

A module is recognized as an attention with a cache by its forward pass: it takes a cache argument and passes all keys
and values to `cache.update(keys, values, ...)` before attention reads the result. A forward pre-hook replaces the
cache, or a missing one, by a `CacheProxy`.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache

from compress.models.caches.base import AttentionCache, CachePolicy

CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past")
"""transformers' names of the cache among the arguments of an attention."""

POLICY = "cache_policy"
"""The attribute that holds the policy of an attention module."""

Update = Callable[[AttentionCache, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(cache, keys, values), [batch, heads, length, width] each -> the keys and values that attention reads."""


@cache
def _cache_argument(module_class: type[nn.Module]) -> tuple[str, int] | None:
    """The name and position of the cache argument in a class's forward pass; None when it has none."""
    parameters = list(inspect.signature(module_class.forward).parameters)[1:]
    return next(((name, parameters.index(name)) for name in CACHE_ARGUMENTS if name in parameters), None)


@cache
def _updates_cache(module_class: type[nn.Module]) -> bool:
    """Whether the forward pass calls `cache.update`: convolutions and state spaces keep other states in the cache."""
    forward = inspect.unwrap(module_class.forward)
    return "update" in forward.__code__.co_names


def attentions_with_cache(root: nn.Module) -> dict[str, nn.Module]:
    """Return the innermost modules that pass keys to a cache argument, by name, except attention that is not causal."""
    takers = {name: module for name, module in root.named_modules() if _cache_argument(type(module)) is not None}
    inner = {name: module for name, module in takers.items() if not any(_inside(n, name) for n in takers if n != name)}
    causal = {name: module for name, module in inner.items() if getattr(module, "is_causal", True)}
    return {name: module for name, module in causal.items() if _updates_cache(type(module))}


def attentions_containing(root: nn.Module, names: Collection[str]) -> dict[str, nn.Module]:
    """Return the modules of `attentions_with_cache` that contain one of the modules `names`."""
    return {name: m for name, m in attentions_with_cache(root).items() if any(_inside(inner, name) for inner in names)}


def _inside(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


class CacheProxy:
    """The cache that an attention module gets: `update` calls a function, everything else is that of the cache.

    Without a cache, all other attributes are those of an empty cache.
    """

    def __init__(self, cache: Any, update: Update) -> None:
        self._cache, self._update = cache, update

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens, and return all that attention reads."""
        return self._update(AttentionCache(self._cache, args, kwargs), key_states, value_states)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_cache", "_update"):
            raise AttributeError(name)
        return getattr(DynamicCache() if self._cache is None else self._cache, name)


def _replace_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], update: Update
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the cache among the arguments of the module's forward pass by a `CacheProxy`."""
    argument = _cache_argument(type(module))
    assert argument is not None
    name, position = argument
    model_cache = args[position] if len(args) > position else kwargs.get(name)
    if isinstance(model_cache, EncoderDecoderCache):  # self-attention uses this part of it
        model_cache = model_cache.self_attention_cache
    proxy = CacheProxy(model_cache, update)
    if len(args) > position:
        return (*args[:position], proxy, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: proxy}


@contextmanager
def watching(modules: Mapping[str, nn.Module], see: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """Call see(name, keys, values) for all keys and values of modules, before their cache policies change them."""
    handles = [m.register_forward_pre_hook(partial(_watch, name, see), with_kwargs=True) for name, m in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(name: str, see: Callable[[str, Tensor, Tensor], None], module: nn.Module, args: Any, kwargs: Any) -> Any:
    def see_and_append(attention_cache: AttentionCache, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        see(name, keys, values)
        return attention_cache.append(keys, values)

    return _replace_cache(module, args, kwargs, see_and_append)


# Policies of modules


def set_policy(module: nn.Module, policy: CachePolicy, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Install a cache policy in an attention module.

    The hook is a plain function, and its state is in the module, so that copies of the module have the policy too.

    Args:
        tensors: tensors of the policy, by the names of `CachePolicy.tensors`.
    """
    assert policy_of(module) is None, "the module has a cache policy already"
    setattr(module, POLICY, policy)
    for name in policy.tensors():
        module.register_buffer(name, (tensors or {})[name])
    module.register_forward_pre_hook(_apply_policy, with_kwargs=True)


def _apply_policy(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    policy = policy_of(module)
    if policy is None:
        return args, kwargs

    def update(attention_cache: AttentionCache, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return policy.update(attention_cache, policy_tensors(module), keys, values)

    return _replace_cache(module, args, kwargs, update)


def policy_of(module: nn.Module) -> CachePolicy | None:
    """Return the cache policy of a module, or None."""
    return getattr(module, POLICY, None)


def policy_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the cache policy of a module, by their names inside of it."""
    policy = policy_of(module)
    return {} if policy is None else {name: module.get_buffer(name) for name in policy.tensors()}


@contextmanager
def without_policies(root: nn.Module) -> Iterator[None]:
    """Run all modules below `root` with exact keys and values inside of the context."""
    modules = {root.get_submodule(name): policy for name, policy in cache_policies(root).items()}
    for module in modules:
        setattr(module, POLICY, None)
    try:
        yield
    finally:
        for module, policy in modules.items():
            setattr(module, POLICY, policy)


def copy_policy(module: nn.Module, target: nn.Module) -> None:
    """Install the cache policy of a module in another module."""
    policy = policy_of(module)
    assert policy is not None
    set_policy(target, policy, policy_tensors(module))


def read_keys_and_values(module: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values that attention reads in a forward pass over a whole text, without a cache."""
    policy = policy_of(module)
    return (keys, values) if policy is None else policy.update(AttentionCache(), policy_tensors(module), keys, values)


def cache_policies(root: nn.Module) -> dict[str, CachePolicy]:
    """Return the cache policies of all modules below `root` that have one, by name."""
    policies = {name: policy_of(module) for name, module in root.named_modules()}
    return {name: policy for name, policy in policies.items() if policy is not None}


def cache_sha256(module: nn.Module) -> str:
    """Return a digest of the cache policy of a module and its tensors."""
    policy = policy_of(module)
    assert policy is not None
    record = (policy.to_json(), {name: tensor.float().tolist() for name, tensor in policy_tensors(module).items()})
    return hashlib.sha256(repr(record).encode()).hexdigest()


def cache_digests(root: nn.Module) -> dict[str, str]:
    """Return `cache_sha256` of all modules below `root` that have a cache policy, by name."""
    return {name: cache_sha256(root.get_submodule(name)) for name in cache_policies(root)}
