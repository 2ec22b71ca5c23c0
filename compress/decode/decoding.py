"""Decoding of a model with a static cache: each step is recorded once, and then run by the C++ library."""

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

from compress.decode.layout import NotRecordedError
from compress.decode.prepared import prepare
from compress.decode.step import RecordedStep
from compress.errors import CannotRun, call_foreign
from compress.layers.linear import CompressedLinear

MOST = 8
"""Recorded steps that are kept: one for each number of sequences and length of the cache."""
FAR, FAR_ROUNDED = 0.05, 0.25
"""How far the outputs of a recorded step may be from those of the model, relative to their length.

The second where inputs are rounded to integers: another order of sums changes some of them by a step."""
COUNTER = "cumulative_length_int"  # tokens that a cache of transformers with a sliding window has seen

TURN = threading.Lock()
"""Recorded steps have one memory, so callers in several threads take turns."""

log = logging.getLogger(__name__)


@dataclass
class Decoder:
    """A recorded step of a model.

    advanced: numbers of the cache's layers that it adds to. output: the class of its outputs. names: of those that are
    tensors. caches: of those that are the cache. seen: the cache that its addresses are of.
    """

    step: RecordedStep
    advanced: list[tuple[int, str, int]]
    output: type[Any]
    names: list[str]
    caches: list[str]
    seen: Seen | None
    proved: bool = False

    def run(self, tensors: list[Tensor], cache: StaticCache) -> Any:
        """The outputs by the instructions."""
        found = self.step(*tensors)
        for layer, name, more in self.advanced:
            setattr(cache.layers[layer], name, getattr(cache.layers[layer], name) + more)
        return self.output(**dict(zip(self.names, found, strict=True)), **dict.fromkeys(self.caches, cache))


class RecordedDecoding:
    """The forward pass of a model for one more token per sequence.

    A step is recorded when it is first computed for some shapes. The next one is computed twice, by the instructions
    and by the model, and compared. `otherwise` computes other calls, and steps that cannot be recorded.

    Weights are read where they are. Constants that are computed from them, such as 1 + weight of a norm, stay as they
    were recorded.
    """

    def __init__(self, model: PreTrainedModel, otherwise: Callable[..., Any] | None = None) -> None:
        """otherwise: None: the model."""
        self.model, self.otherwise = model, otherwise
        self.known: dict[Hashable, Decoder | None] = {}
        self.reason: str | None = None
        self.far = FAR_ROUNDED if any(rounds_inputs(m) for m in model.modules()) else FAR
        self.last: Seen | None = None
        self.place: tuple[torch.nn.Module, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Exclude what belongs to this process and this model; a copy records steps of its own."""
        return {**vars(self), "known": {}, "last": None, "place": None, "otherwise": None}

    def __call__(self, **inputs: Any) -> Any:
        """The outputs of the model, as its forward pass gives them."""
        with TURN:
            return self.computed(inputs)

    def computed(self, inputs: Mapping[str, Any]) -> Any:
        """The outputs by a recorded step, or otherwise."""
        leaves = leaves_of(inputs)
        cache = cache_of(leaves)
        if cache is None:
            return self.plainly(**inputs)
        if self.last is None or not self.last.is_of(cache):
            self.last = Seen.of(cache)
            weakref.finalize(cache, self.release, self.last)
        seen = self.last
        key = key_of(leaves, seen), self.address()
        tensors = [leaf for leaf in leaves.values() if isinstance(leaf, Tensor)]
        if key not in self.known:
            return self.recorded(leaves, tensors, cache, key)
        decoder = self.known[key]
        if decoder is None:
            return self.plainly(**inputs)
        if decoder.seen is not seen:
            decoder.step.bind(seen.state)
            decoder.seen = seen
        if not decoder.proved:
            return self.proved(decoder, inputs, tensors, cache, key)
        return decoder.run(tensors, cache)

    def forget(self) -> None:
        """Record all steps anew, because modules of the model were replaced."""
        self.known, self.last, self.place = {}, None, None

    def address(self) -> int:
        """The address of a parameter, which changes when the model is moved."""
        if self.place is None:  # finding it takes longer than a layer
            name, _ = next(self.model.named_parameters())
            owner, _, leaf = name.rpartition(".")
            self.place = self.model.get_submodule(owner), leaf
        module, leaf = self.place
        parameter: Tensor = getattr(module, leaf)
        return parameter.data_ptr()

    def release(self, seen: Seen) -> None:
        """Forget a cache that is no longer there, with the memory of its keys and values."""
        self.last = None if self.last is seen else self.last
        for decoder in self.known.values():
            if decoder is not None and decoder.seen is seen:
                decoder.step.release()
                decoder.seen = None

    def plainly(self, **inputs: Any) -> Any:
        """The outputs of a step that is not recorded."""
        run = self.otherwise or partial(type(self.model).__call__, self.model)
        return run(**inputs)

    def recorded(
        self, leaves: Mapping[tuple[str, ...], Any], tensors: list[Tensor], cache: StaticCache, key: Hashable
    ) -> Any:
        """The outputs of a step that is recorded now."""
        result: list[Any] = []

        def step(*given: Tensor) -> list[Tensor]:
            found = type(self.model).__call__(self.model, **joined(leaves, given))
            names = [name for name, value in found.items() if isinstance(value, Tensor)]
            result[:] = type(found), names, {k: v for k, v in found.items() if k not in names}
            return [found[name] for name in names]

        before, state = scalars_of(cache), state_of(cache)
        kept = [tensor.clone() for tensor in state]
        try:
            prepare(self.model)
            recorded = call_foreign(RecordedStep, step, tensors, state)
            output, names, others = result
            if any(value is not None and value is not cache for value in others.values()):
                raise NotRecordedError(f"outputs {', '.join(others)}")
            advanced = advances(before, scalars_of(cache))
            if [tensor.data_ptr() for tensor in state_of(cache)] != [tensor.data_ptr() for tensor in state]:
                raise NotRecordedError("the cache gets other tensors in each step")
        except (NotRecordedError, CannotRun) as error:
            expected = isinstance(error, NotRecordedError)
            reason = str(error) if expected else repr(error.__cause__)
            self.refuse(key, reason, logging.INFO if expected else logging.WARNING)
            restore(cache, state, kept, before)
            return self.plainly(**joined(leaves, tensors))
        if len(self.known) >= MOST:
            self.known.pop(next(iter(self.known)))
        caches = [name for name, value in others.items() if value is cache]
        self.known[key] = Decoder(recorded, advanced, output, names, caches, self.last)
        return output(**dict(zip(names, recorded.first, strict=True)), **others)

    def proved(
        self, decoder: Decoder, inputs: Mapping[str, Any], tensors: list[Tensor], cache: StaticCache, key: Hashable
    ) -> Any:
        """The outputs of the model, with which those of the instructions are compared."""
        before, state = scalars_of(cache), state_of(cache)
        kept = [tensor.clone() for tensor in state]
        found = decoder.run(tensors, cache)
        changed = [tensor.clone() for tensor in state]
        restore(cache, state, kept, before)
        wanted = type(self.model).__call__(self.model, **inputs)
        pairs = [(found[name], wanted[name]) for name in decoder.names] + list(zip(changed, state, strict=True))
        worst = max(distance(one, other) for one, other in pairs)
        log.debug("a recorded step differs by %.2g", worst)
        decoder.proved = worst <= self.far
        if not decoder.proved:
            self.refuse(key, f"the outputs of a recorded step differ by {worst:.2g}", logging.WARNING)
        return wanted

    def refuse(self, key: Hashable, reason: str, level: int) -> None:
        """Compute steps of this kind otherwise from now on."""
        self.reason, self.known[key] = reason, None
        log.log(level, "decoding is not recorded: %s", reason)


@dataclass(frozen=True)
class Seen:
    """What a step depends on of a cache, as long as that has the same tensors.

    state: all of them. keys: those of each layer. layers: stands for kinds and shapes. counted: the layers with a
    sliding window.
    """

    cache: weakref.ref[StaticCache]
    state: list[Tensor]
    keys: list[Tensor]
    layers: Hashable
    counted: list[Any]

    def is_of(self, cache: StaticCache) -> bool:
        """Whether it is still what this cache is."""
        return cache is self.cache() and all(a.keys is b for a, b in zip(layers_of(cache), self.keys, strict=True))

    @classmethod
    def of(cls, cache: StaticCache) -> Seen:
        """Look at a cache."""
        layers = tuple(
            (type(layer), tuple((v.shape, v.dtype) for v in vars(layer).values() if isinstance(v, Tensor)))
            for layer in cache.layers
        )
        keys = [layer.keys for layer in layers_of(cache)]
        counted = [layer for layer in cache.layers if hasattr(layer, COUNTER)]
        return cls(weakref.ref(cache), state_of(cache), keys, token(layers), counted)

    def key(self) -> Hashable:
        """Kinds and shapes of the layers, and which sliding windows are full."""
        return self.layers, tuple(getattr(layer, COUNTER) >= layer.max_cache_len for layer in self.counted)


@functools.cache
def token(layers: Hashable) -> object:
    """An object that stands for equal descriptions, whose hash takes no time."""
    return object()


def rounds_inputs(module: torch.nn.Module) -> bool:
    """Whether a module is a layer that rounds its inputs."""
    return isinstance(module, CompressedLinear) and module.rounding is not None


def leaves_of(inputs: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """The arguments of a call by name, those of dictionaries by two names."""
    found: dict[tuple[str, ...], Any] = {}
    for name, value in inputs.items():
        if isinstance(value, dict):
            found |= {(name, inner): leaf for inner, leaf in value.items()}
        else:
            found[name,] = value
    return found


def cache_of(leaves: Mapping[tuple[str, ...], Any]) -> StaticCache | None:
    """The cache of a call for one more token per sequence; None for other calls."""
    caches = [leaf for leaf in leaves.values() if isinstance(leaf, Cache)]
    ids = leaves.get(("input_ids",))
    if len(caches) != 1 or not isinstance(caches[0], StaticCache) or not isinstance(ids, Tensor) or ids.shape[-1] != 1:
        return None
    cache: StaticCache = caches[0]
    if not all(isinstance(leaf, Tensor | Cache | bool | int | float | str | None) for leaf in leaves.values()):
        return None
    known = all(isinstance(layer, StaticLayer) and layer.is_initialized for layer in cache.layers)
    return cache if ids.is_cpu and known else None


def key_of(leaves: Mapping[tuple[str, ...], Any], seen: Seen) -> Hashable:
    """What tells calls apart that need other instructions."""
    found = [
        (name, leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (name, leaf)
        for name, leaf in leaves.items()
        if not isinstance(leaf, Cache)
    ]
    return tuple(found), seen.key(), torch.get_float32_matmul_precision()


def joined(leaves: Mapping[tuple[str, ...], Any], tensors: Iterable[Tensor]) -> dict[str, Any]:
    """The arguments of a call with other tensors."""
    found: dict[str, Any] = {}
    rest = iter(tensors)
    for names, leaf in leaves.items():
        value = next(rest) if isinstance(leaf, Tensor) else leaf
        if len(names) == 1:
            found[names[0]] = value
        else:
            found.setdefault(names[0], {})[names[1]] = value
    return found


def state_of(cache: StaticCache) -> list[Tensor]:
    """All tensors of a cache."""
    return [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, Tensor)]


def layers_of(cache: StaticCache) -> list[Any]:
    """The layers of a cache."""
    return list(cache.layers)


def scalars_of(cache: StaticCache) -> list[dict[str, Any]]:
    """The Python numbers of each layer of a cache."""
    return [{k: v for k, v in vars(layer).items() if isinstance(v, int | float)} for layer in cache.layers]


def advances(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[tuple[int, str, int]]:
    """The numbers of a cache that a step adds to. Raises NotRecordedError for other changes."""
    found = []
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        for name, value in new.items():
            if value != old.get(name):
                if name != COUNTER:
                    raise NotRecordedError(f"{name} of the cache changes")
                found.append((layer, name, value - old[name]))
    return found


def restore(cache: StaticCache, state: list[Tensor], kept: list[Tensor], scalars: list[dict[str, Any]]) -> None:
    """Let a cache be what it was."""
    for tensor, value in zip(state, kept, strict=True):
        tensor.copy_(value)
    for layer, values in zip(cache.layers, scalars, strict=True):
        vars(layer).update(values)


def distance(found: Tensor, wanted: Tensor) -> float:
    """How far a tensor is from another, relative to the length of that."""
    if not wanted.dtype.is_floating_point:
        return 0.0 if torch.equal(found, wanted) else float("inf")
    finite = wanted.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    one, other = found[finite].double(), wanted[finite].double()
    return float((one - other).norm() / other.norm().clamp(min=1e-30))
