"""Layers that multiply one and the same input, such as those of queries, keys and values, computed in one call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.kernels import dispatch


class Layer(Protocol):
    """The interface of a layer (`model.linear.CompressedLinear`) that is used here."""

    @property
    def joint_call(self) -> tuple[dispatch.Part, Any, Tensor | None] | None:
        """Part, rounding of inputs and bias of a layer that is nothing else; None for other layers."""
        ...


class SharedInput:
    """The layers of a module. Those that were called with the same tensor are computed in one call from then on.

    Which ones share an input is seen while the model runs, so it holds for any architecture. The first of them computes
    all, and the others take their outputs if they get the same tensor, unchanged. If one does not, the set is given up.
    The inputs are prepared once, and the threads of a kernel are woken up once.
    """

    def __init__(self) -> None:
        self._sets: dict[Layer, list[Layer]] = {}  # by the first; one member: it is computed alone
        self._seen: dict[Layer, tuple[weakref.ref[Tensor], int]] = {}  # the first input of each layer, with its version
        self._ready: dict[Layer, tuple[Tensor, int, dict[Layer, Tensor]]] = {}  # outputs to take, by the first layer

    def output(self, layer: Layer, x: Tensor) -> Tensor | None:
        """The output of a layer if it is computed together with others, else None."""
        if x.is_inference() or (x.requires_grad and torch.is_grad_enabled()):
            return None  # inference tensors do not tell whether they were changed
        version = x._version
        for first, (known, at, outputs) in self._ready.items():
            if known is x and at == version and layer in outputs:
                found = outputs.pop(layer)
                if not outputs:
                    del self._ready[first]
                return found
        members = self._sets.get(layer)
        if members is None:
            self._learn(layer, x, version)
            return None
        if self._ready.pop(layer, None) is not None:  # outputs that nobody took
            self._sets[layer] = [layer]
            return None
        computed = _outputs(members, x) if len(members) > 1 else None
        if computed is None:
            return None
        self._ready[layer] = x, version, dict(zip(members[1:], computed[1:], strict=True))
        return computed[0]

    def _learn(self, layer: Layer, x: Tensor, version: int) -> None:
        """Note the input of a layer, or add the layer to those that had the same one before it."""
        for other, (known, at) in self._seen.items():
            if known() is x and at == version and other is not layer:
                members = self._sets.setdefault(other, [other])
                if layer not in members and len(members) < dispatch.MAX_JOINT:
                    members.append(layer)
                return
        if layer in self._seen:
            self._sets[layer] = [layer]  # nobody had its input
        else:
            self._seen[layer] = weakref.ref(x), version

    def __getstate__(self) -> dict[str, Any]:
        """Copies learn anew."""
        return {"_sets": {}, "_seen": {}, "_ready": {}}


def _outputs(layers: Sequence[Layer], x: Tensor) -> list[Tensor] | None:
    """The outputs of layers that a kernel computes in one call; None if none does."""
    calls = [layer.joint_call for layer in layers]
    if any(call is None for call in calls):
        return None
    parts, roundings, biases = zip(*calls, strict=True)  # type: ignore[arg-type]
    first = roundings[0]
    if any((r is None) != (first is None) or not (r is None or first.computes_like(r)) for r in roundings):
        return None
    return dispatch.linears(x, parts, first, biases)
