"""Decoding with a static cache: each kind of step is traced once, and then run by the C++ library."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from compress.decode.layout import UntraceableError
from compress.decode.prepared import prepare
from compress.decode.step import TracedStep
from compress.errors import CannotRun, call_foreign
from compress.layers.linear import CompressedLinear

MAX_STEPS = 8
"""Largest number of stored traced steps: one for each number of sequences and length of the cache."""
TOLERANCE, QUANTIZED_TOLERANCE = 0.05, 0.25
"""Largest relative error of the outputs of a traced step, compared with those of the model.

The second is for models with activation quantization: another order of summation changes some codes by one."""
COUNTER = "cumulative_length_int"  # number of tokens in a sliding-window layer of a cache of transformers

LOCK = threading.Lock()
"""A traced step has one memory, so only one thread runs a step at a time."""

log = logging.getLogger(__name__)


@dataclass
class Decoder:
    """A traced step of a model.

    Attributes:
        step: the instructions.
        counters: counters of the cache that the step increments: layer, name and increment.
        output: class of the outputs.
        names: names of the outputs that are tensors.
        caches: names of the outputs that are the cache.
        snapshot: state of the cache whose addresses the step uses.
        verified: whether the outputs were compared with those of the model.
    """

    step: TracedStep
    counters: list[tuple[int, str, int]]
    output: type[Any]
    names: list[str]
    caches: list[str]
    snapshot: CacheSnapshot | None
    verified: bool = False

    def run(self, tensors: list[Tensor], cache: StaticCache) -> Any:
        """Compute the outputs by the instructions."""
        outputs = self.step(*tensors)
        for layer, name, increment in self.counters:
            setattr(cache.layers[layer], name, getattr(cache.layers[layer], name) + increment)
        return self.output(**dict(zip(self.names, outputs, strict=True)), **dict.fromkeys(self.caches, cache))


class TracedDecoding:
    """The forward pass of a model for one more token per sequence.

    A step is traced when it is first computed for given shapes. The next step is computed twice, by the instructions
    and by the model, and compared.

    Weights are read in place. Constants that are computed from them, such as 1 + weight of a norm, keep the values of
    the trace.

    Attributes:
        model: the model.
        fallback: computes other calls, and steps that cannot be traced; None for the model.
        decoders: traced steps by cache key; None for a step that cannot be traced.
        reason: why the last step that cannot be traced was refused, or None.
        tolerance: largest relative error of a traced step.
        snapshot: state of the cache of the last step.
        parameter_place: module and name of a parameter, whose address changes when the model is moved.
    """

    def __init__(self, model: PreTrainedModel, fallback: Callable[..., Any] | None = None) -> None:
        self.model, self.fallback = model, fallback
        self.decoders: dict[Hashable, Decoder | None] = {}
        self.reason: str | None = None
        self.tolerance = QUANTIZED_TOLERANCE if any(quantizes_activations(m) for m in model.modules()) else TOLERANCE
        self.snapshot: CacheSnapshot | None = None
        self.parameter_place: tuple[torch.nn.Module, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the state of this process and this model; a copy traces its own steps."""
        return {**vars(self), "decoders": {}, "snapshot": None, "parameter_place": None, "fallback": None}

    def __call__(self, **inputs: Any) -> Any:
        """Compute the outputs of the model's forward pass."""
        with LOCK:
            return self.compute(inputs)

    def compute(self, inputs: Mapping[str, Any]) -> Any:
        """Compute the outputs by a traced step if possible, otherwise by the fallback."""
        leaves = flatten_arguments(inputs)
        cache = cache_of(leaves)
        if cache is None:
            return self.run_untraced(**inputs)
        if self.snapshot is None or not self.snapshot.is_of(cache):
            self.snapshot = CacheSnapshot.of(cache)
            weakref.finalize(cache, self.release, self.snapshot)
        snapshot = self.snapshot
        key = cache_key(leaves, snapshot), self.address()
        tensors = [leaf for leaf in leaves.values() if isinstance(leaf, Tensor)]
        if key not in self.decoders:
            return self.trace(leaves, tensors, cache, key)
        decoder = self.decoders[key]
        if decoder is None:
            return self.run_untraced(**inputs)
        if decoder.snapshot is not snapshot:
            decoder.step.bind(snapshot.state)
            decoder.snapshot = snapshot
        if not decoder.verified:
            return self.verify(decoder, inputs, tensors, cache, key)
        return decoder.run(tensors, cache)

    def forget(self) -> None:
        """Discard all traced steps, because modules of the model were replaced."""
        self.decoders, self.snapshot, self.parameter_place = {}, None, None

    def address(self) -> int:
        """Return the address of a parameter, which changes when the model is moved."""
        if self.parameter_place is None:  # the search takes longer than a layer
            name, _ = next(self.model.named_parameters())
            owner, _, leaf = name.rpartition(".")
            self.parameter_place = self.model.get_submodule(owner), leaf
        module, leaf = self.parameter_place
        parameter: Tensor = getattr(module, leaf)
        return parameter.data_ptr()

    def release(self, snapshot: CacheSnapshot) -> None:
        """Release the keys and values of a cache that was deleted."""
        self.snapshot = None if self.snapshot is snapshot else self.snapshot
        for decoder in self.decoders.values():
            if decoder is not None and decoder.snapshot is snapshot:
                decoder.step.release()
                decoder.snapshot = None

    def run_untraced(self, **inputs: Any) -> Any:
        """Compute the outputs of a step without tracing."""
        run = self.fallback or partial(type(self.model).__call__, self.model)
        return run(**inputs)

    def trace(
        self, leaves: Mapping[tuple[str, ...], Any], tensors: list[Tensor], cache: StaticCache, key: Hashable
    ) -> Any:
        """Trace a step, and return the outputs of the traced call."""
        result: list[Any] = []

        def step(*step_inputs: Tensor) -> list[Tensor]:
            outputs = type(self.model).__call__(self.model, **unflatten_arguments(leaves, step_inputs))
            names = [name for name, value in outputs.items() if isinstance(value, Tensor)]
            result[:] = type(outputs), names, {k: v for k, v in outputs.items() if k not in names}
            return [outputs[name] for name in names]

        scalars, state = scalars_of(cache), state_of(cache)
        saved_state = [tensor.clone() for tensor in state]
        try:
            prepare(self.model)
            traced_step = call_foreign(TracedStep, step, tensors, state)
            output, names, other_outputs = result
            if any(value is not None and value is not cache for value in other_outputs.values()):
                raise UntraceableError(f"outputs {', '.join(other_outputs)}")
            counters = counter_increments(scalars, scalars_of(cache))
            if [tensor.data_ptr() for tensor in state_of(cache)] != [tensor.data_ptr() for tensor in state]:
                raise UntraceableError("the cache gets other tensors in each step")
        except (UntraceableError, CannotRun) as error:
            is_untraceable = isinstance(error, UntraceableError)
            reason = str(error) if is_untraceable else repr(error.__cause__)
            self.refuse(key, reason, logging.INFO if is_untraceable else logging.WARNING)
            restore(cache, state, saved_state, scalars)
            return self.run_untraced(**unflatten_arguments(leaves, tensors))
        if len(self.decoders) >= MAX_STEPS:
            self.decoders.pop(next(iter(self.decoders)))
        caches = [name for name, value in other_outputs.items() if value is cache]
        self.decoders[key] = Decoder(traced_step, counters, output, names, caches, self.snapshot)
        return output(**dict(zip(names, traced_step.first_outputs, strict=True)), **other_outputs)

    def verify(
        self, decoder: Decoder, inputs: Mapping[str, Any], tensors: list[Tensor], cache: StaticCache, key: Hashable
    ) -> Any:
        """Compare the outputs of a traced step with those of the model, and return those of the model."""
        scalars, state = scalars_of(cache), state_of(cache)
        saved_state = [tensor.clone() for tensor in state]
        traced_outputs = decoder.run(tensors, cache)
        traced_state = [tensor.clone() for tensor in state]
        restore(cache, state, saved_state, scalars)
        model_outputs = type(self.model).__call__(self.model, **inputs)
        pairs = [(traced_outputs[name], model_outputs[name]) for name in decoder.names] + list(
            zip(traced_state, state, strict=True)
        )
        error = max(relative_error(actual, expected) for actual, expected in pairs)
        log.debug("a traced step differs by %.2g", error)
        decoder.verified = error <= self.tolerance
        if not decoder.verified:
            self.refuse(key, f"the outputs of a traced step differ by {error:.2g}", logging.WARNING)
        return model_outputs

    def refuse(self, key: Hashable, reason: str, level: int) -> None:
        """Compute steps with this key without tracing from now on."""
        self.reason, self.decoders[key] = reason, None
        log.log(level, "decoding is not traced: %s", reason)


@dataclass(frozen=True)
class CacheSnapshot:
    """The state of a cache on which a step depends; valid as long as the cache has the same tensors.

    Attributes:
        cache: the cache.
        state: all tensors of the cache.
        keys: keys of each layer.
        layers: stands for the classes and shapes of the layers.
        counted: layers with a sliding window.
    """

    cache: weakref.ref[StaticCache]
    state: list[Tensor]
    keys: list[Tensor]
    layers: Hashable
    counted: list[Any]

    def is_of(self, cache: StaticCache) -> bool:
        """Return whether the snapshot still matches the cache."""
        return cache is self.cache() and all(a.keys is b for a, b in zip(layers_of(cache), self.keys, strict=True))

    @classmethod
    def of(cls, cache: StaticCache) -> CacheSnapshot:
        """Take a snapshot of a cache."""
        layers = tuple(
            (type(layer), tuple((v.shape, v.dtype) for v in vars(layer).values() if isinstance(v, Tensor)))
            for layer in cache.layers
        )
        keys = [layer.keys for layer in layers_of(cache)]
        counted = [layer for layer in cache.layers if hasattr(layer, COUNTER)]
        return cls(weakref.ref(cache), state_of(cache), keys, interned(layers), counted)

    def key(self) -> Hashable:
        """Return the classes and shapes of the layers, and which sliding windows are full."""
        return self.layers, tuple(getattr(layer, COUNTER) >= layer.max_cache_len for layer in self.counted)


@functools.cache
def interned(layers: Hashable) -> object:
    """Return one object for equal descriptions; its hash is fast."""
    return object()


def quantizes_activations(module: torch.nn.Module) -> bool:
    """Return whether a module is a layer with activation quantization."""
    return isinstance(module, CompressedLinear) and module.rounding is not None


def flatten_arguments(inputs: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return the arguments of a call by name; those in dictionaries by two names."""
    leaf_by_name: dict[tuple[str, ...], Any] = {}
    for name, value in inputs.items():
        if isinstance(value, dict):
            leaf_by_name |= {(name, inner): leaf for inner, leaf in value.items()}
        else:
            leaf_by_name[name,] = value
    return leaf_by_name


def cache_of(leaves: Mapping[tuple[str, ...], Any]) -> StaticCache | None:
    """Return the cache of a call for one more token per sequence; None for other calls."""
    caches = [leaf for leaf in leaves.values() if isinstance(leaf, Cache)]
    ids = leaves.get(("input_ids",))
    if len(caches) != 1 or not isinstance(caches[0], StaticCache) or not isinstance(ids, Tensor) or ids.shape[-1] != 1:
        return None
    cache: StaticCache = caches[0]
    if not all(isinstance(leaf, Tensor | Cache | bool | int | float | str | None) for leaf in leaves.values()):
        return None
    has_static_layers = all(isinstance(layer, StaticLayer) and layer.is_initialized for layer in cache.layers)
    return cache if ids.is_cpu and has_static_layers else None


def cache_key(leaves: Mapping[tuple[str, ...], Any], snapshot: CacheSnapshot) -> Hashable:
    """Return the cache key of a call: shapes, dtypes and flags that select a traced step."""
    signature = [
        (name, leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (name, leaf)
        for name, leaf in leaves.items()
        if not isinstance(leaf, Cache)
    ]
    return tuple(signature), snapshot.key(), torch.get_float32_matmul_precision()


def unflatten_arguments(leaves: Mapping[tuple[str, ...], Any], tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Return the arguments of a call with other tensors."""
    arguments: dict[str, Any] = {}
    remaining = iter(tensors)
    for names, leaf in leaves.items():
        value = next(remaining) if isinstance(leaf, Tensor) else leaf
        if len(names) == 1:
            arguments[names[0]] = value
        else:
            arguments.setdefault(names[0], {})[names[1]] = value
    return arguments


def state_of(cache: StaticCache) -> list[Tensor]:
    """Return all tensors of a cache."""
    return [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, Tensor)]


def layers_of(cache: StaticCache) -> list[Any]:
    """Return the layers of a cache."""
    return list(cache.layers)


def scalars_of(cache: StaticCache) -> list[dict[str, Any]]:
    """Return the Python numbers of each layer of a cache."""
    return [{k: v for k, v in vars(layer).items() if isinstance(v, int | float)} for layer in cache.layers]


def counter_increments(
    old_scalars: list[dict[str, Any]], new_scalars: list[dict[str, Any]]
) -> list[tuple[int, str, int]]:
    """Return the counters of a cache that a step increments: layer, name and increment.

    Raises:
        UntraceableError: for other changes.
    """
    increments = []
    for layer, (old, new) in enumerate(zip(old_scalars, new_scalars, strict=True)):
        for name, value in new.items():
            if value != old.get(name):
                if name != COUNTER:
                    raise UntraceableError(f"{name} of the cache changes")
                increments.append((layer, name, value - old[name]))
    return increments


def restore(cache: StaticCache, state: list[Tensor], saved_state: list[Tensor], scalars: list[dict[str, Any]]) -> None:
    """Restore a cache to a saved state."""
    for tensor, value in zip(state, saved_state, strict=True):
        tensor.copy_(value)
    for layer, values in zip(cache.layers, scalars, strict=True):
        vars(layer).update(values)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference of two tensors, relative to the norm of the expected tensor."""
    if not expected.dtype.is_floating_point:
        return 0.0 if torch.equal(actual, expected) else float("inf")
    finite = expected.isfinite()
    if not torch.equal(finite, actual.isfinite()):
        return float("inf")
    actual_values, expected_values = actual[finite].double(), expected[finite].double()
    return float((actual_values - expected_values).norm() / expected_values.norm().clamp(min=1e-30))
