"""Layers with the same input, such as the query, key and value projections, computed in one call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.kernels import dispatch


class JointLayer(Protocol):
    """The interface of a layer (`layers.linear.CompressedLinear`) that is used here."""

    @property
    def joint_call(self) -> tuple[dispatch.PartLike, Any, Tensor | None] | None:
        """Part, activation quantizer and bias, if the layer has one part and no other transforms; else None."""
        ...


class SharedInput:
    """Compute layers of a module that are called with the same tensor in one kernel call.

    The layers that share an input are discovered while the model runs, so this works for any architecture. The first
    layer of a set computes the outputs of all. The others return their outputs if they are called with the same,
    unchanged tensor; otherwise the set is dissolved. The inputs are prepared once, and the threads of a kernel are
    woken once.
    """

    def __init__(self) -> None:
        self._sets: dict[JointLayer, list[JointLayer]] = {}  # by first layer; a set of one layer is not shared
        self._first_inputs: dict[JointLayer, tuple[weakref.ref[Tensor], int]] = {}  # with the version of the tensor
        self._ready: dict[
            JointLayer, tuple[Tensor, int, dict[JointLayer, Tensor]]
        ] = {}  # pending outputs by first layer

    def output(self, layer: JointLayer, x: Tensor) -> Tensor | None:
        """Return the output of a layer that shares its input with others; None for a layer that is computed alone."""
        if x.is_inference() or (x.requires_grad and torch.is_grad_enabled()):
            return None  # inference tensors have no version counter
        version = x._version
        for leader, (shared_x, shared_version, outputs) in self._ready.items():
            if shared_x is x and shared_version == version and layer in outputs:
                layer_output = outputs.pop(layer)
                if not outputs:
                    del self._ready[leader]
                return layer_output
        members = self._sets.get(layer)
        if members is None:
            self._learn(layer, x, version)
            return None
        if self._ready.pop(layer, None) is not None:  # the other layers did not use their outputs
            self._sets[layer] = [layer]
            return None
        computed = _outputs(members, x) if len(members) > 1 else None
        if computed is None:
            return None
        self._ready[layer] = x, version, dict(zip(members[1:], computed[1:], strict=True))
        return computed[0]

    def _learn(self, layer: JointLayer, x: Tensor, version: int) -> None:
        """Record the input of a layer, or add the layer to the set of an earlier layer with the same input."""
        for leader, (x_reference, x_version) in self._first_inputs.items():
            if x_reference() is x and x_version == version and leader is not layer:
                members = self._sets.setdefault(leader, [leader])
                if layer not in members and len(members) < dispatch.MAX_JOINT:
                    members.append(layer)
                return
        if layer in self._first_inputs:
            self._sets[layer] = [layer]  # no other layer had the same input
        else:
            self._first_inputs[layer] = weakref.ref(x), version

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the sets; a copy discovers its own."""
        return {"_sets": {}, "_first_inputs": {}, "_ready": {}}


def _outputs(layers: Sequence[JointLayer], x: Tensor) -> list[Tensor] | None:
    """Compute the outputs of several layers in one kernel call; None if no kernel supports the call."""
    calls = [layer.joint_call for layer in layers]
    if any(call is None for call in calls):
        return None
    parts, quantizers, biases = zip(*calls, strict=True)  # type: ignore[arg-type]
    quantizer = quantizers[0]
    if any((r is None) != (quantizer is None) or not (r is None or quantizer.computes_like(r)) for r in quantizers):
        return None
    return dispatch.linears(x, parts, quantizer, biases)
