"""The layers of a folder of tensors without a model class: the pass of each, its stored tensors, and its codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.blockwise.install import put
from compress.checkpoint.containers.safetensors import Header
from compress.checkpoint.formats.base import Format
from compress.checkpoint.save import layer_tensors
from compress.checkpoint.sources.tensor_roles import TensorRoles
from compress.errors import RecipeError, TargetError
from compress.layers.linear import CompressedLinear
from compress.layers.scheme import LayerScheme
from compress.models.structure.select import ModuleNames
from compress.numerics.dtypes import SAFETENSORS
from compress.passes.contract.context import Run
from compress.passes.contract.facts import Log
from compress.passes.contract.layers import Layer
from compress.passes.contract.passes import chosen_linears
from compress.passes.quantize.rtn import RTN

LABEL = "model-free"
SHOWN = 5  # tensors in a message
NAMES = {dtype: name for name, dtype in SAFETENSORS.items()}
"""Names of dtypes in the headers of safetensors files."""


def rounding_of(passes: Sequence[Mapping[str, Any]], save: Mapping[str, Any]) -> RTN:
    """Return the pass that rounds to nearest on the grid of a scheme.

    Args:
        passes: the passes of the scheme as plain values; the last one quantizes.
        save: its options of `save`.

    Raises:
        RecipeError: for a scheme of another format, or one that needs data without any rounding of weights.
    """
    if save:
        raise RecipeError(f"it is stored in format {save['format']}, which needs the class of the model")
    ((_, options),) = passes[-1].items()
    step = RTN(**{name: value for name, value in options.items() if name in RTN.model_fields})
    if step.requires.data:
        raise RecipeError("its inputs have a static scale, which needs calibration data")
    return step


@dataclass(frozen=True)
class TensorPlan:
    """The linears of a folder of tensors, and how each is quantized.

    Attributes:
        steps: the pass of each chosen linear, by the name of its module.
        schemes: their schemes in stored form.
        storage: dtypes of their scales.
        format: the format.
        together: the linears that share a common factor of their scales, by the name of each.
        skipped: linears that patterns leave out.
    """

    steps: dict[str, RTN]
    schemes: dict[str, LayerScheme]
    storage: dict[str, torch.dtype]
    format: Format
    together: dict[str, tuple[str, ...]]
    skipped: tuple[str, ...]

    @classmethod
    def of(cls, step: RTN, roles: TensorRoles, format_: Format) -> TensorPlan:
        """Plan all linears that the targets of a pass choose.

        Raises:
            TargetError: for a pattern that matches nothing, and for weights that the scheme does not fit.
        """
        classes = frozenset({"Linear"})
        others = {name.rpartition(".")[0]: frozenset[str]() for name in roles.unchanged}
        names = ModuleNames(dict.fromkeys(roles.linears, classes), others, (), (), roles.linears)
        step = step.on_model(names, LABEL)
        steps, schemes = dict[str, RTN](), dict[str, LayerScheme]()
        reasons: dict[str, str] = {}
        for name in chosen_linears(step, list(roles.linears), LABEL):
            layer_step = step.for_layer(name)
            assert layer_step is not None, "no override skips a layer"
            effects = layer_step.effects(LayerScheme(roles.linears[name]))
            reason = effects.refusal or format_.refuses(effects.scheme)
            if reason is not None:
                reasons[name] = reason
                continue
            steps[name] = layer_step
            schemes[name] = format_.adapt(effects.scheme) or effects.scheme
        if reasons:
            first, *further = reasons
            names_to_ignore = ", ".join(f"{name!r}" for name in [first, *further][:SHOWN])
            more = f", and {len(further)} more weights do not fit" if further else ""
            raise TargetError(
                f"{LABEL}: {first}: {reasons[first]}{more}; to leave them unchanged, ignore {names_to_ignore}"
            )
        skipped = tuple(name for name in roles.linears if name not in steps)
        return cls(steps, schemes, roles.dtypes, format_, _siblings(steps, schemes), skipped)

    def headers(self, name: str) -> dict[str, Header]:
        """Return dtype and shape of the stored tensors of a linear by their full names."""
        storage = self.format.scales_in(self.storage[name])
        specs = self.format.tensors(self.schemes[name])
        return {f"{name}.{key}": Header(NAMES[spec.dtype or storage], spec.shape) for key, spec in specs.items()}

    def quantized(self, name: str, weight: Tensor, shared_absmax: float | None, log: Log) -> CompressedLinear:
        """Quantize the weight of a linear as a run does.

        Args:
            weight: [out, in].
            shared_absmax: the largest magnitude of the weights of `together`.
            log: writes to the journal.
        """
        run = Run(weight.device, self.storage[name], format=self.format)
        layer, step = CompressedLinear(weight, None), self.steps[name]
        signed = self.format.negative_scales
        facts = Layer(name, None, run.storage, log, shared_absmax=shared_absmax, negative_scales=signed)
        floats = weight.float()
        put(_Context(run, weight.dtype, log), name, layer, step.solve(floats, None, facts), floats)
        return layer

    def tensors(self, name: str, layer: CompressedLinear) -> dict[str, Tensor]:
        """Return the stored tensors of a quantized linear by their full names."""
        stored = layer_tensors(layer, self.format, self.storage[name])
        return {f"{name}.{key}": tensor.cpu() for key, tensor in stored.items()}


def _siblings(steps: Mapping[str, RTN], schemes: Mapping[str, LayerScheme]) -> dict[str, tuple[str, ...]]:
    """Return the linears of one module with equally wide inputs, where the scales of their grid have a common factor.

    Servers fuse layers with the same input, which these include, and need one factor for them.
    """
    groups: dict[tuple[str, str, int], list[str]] = {}
    for name, step in steps.items():
        if step.grid.scaling.shared_count(1, 1):
            key = name.rpartition(".")[0], step.weights, schemes[name].shape[1]
            groups.setdefault(key, []).append(name)
    return {name: tuple(members) for members in groups.values() for name in members}


@dataclass(frozen=True)
class _Context:
    """The place of a layer without a model (`LayerContext`)."""

    run: Run
    dtype: torch.dtype
    log: Log
    label: str = LABEL
    unquantized: dict[str, Tensor] | None = None

    def full(self, name: str) -> str:
        return name

    def logger(self, place: str) -> Log:
        return self.log
