"""Sparsity: the requested sparsity of the pruned layers, and the zeros of the checkpoint after it was read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from compress.errors import VerificationError
from compress.evaluation.base import EvaluationContext, Evaluator
from compress.layers.embedding import layer_of
from compress.layers.linear import CompressedLinear
from compress.layers.scheme import LayerScheme
from compress.passes.contract.facts import ANY_LAYER, RequiredSparsity
from compress.passes.contract.passes import LayerPass, Step

TOLERANCE = 1e-3  # absolute, of the mean over layers: an allocation keeps the sparsity of the pass up to rounding


class Sparsity(Evaluator):
    """The requested sparsity and the sparsity of the checkpoint; None if no pass prunes."""

    def measure(self, model: PreTrainedModel, context: EvaluationContext) -> dict[str, Any] | None:
        """Check and measure the sparsity.

        Raises:
            VerificationError: as `check_sparsity`.
        """
        return check_sparsity(context.steps, context.layers, model)


def check_sparsity(
    steps: Sequence[Step], results: Sequence[Mapping[str, Any]], model: nn.Module
) -> dict[str, Any] | None:
    """Compare the sparsity of a checkpoint with that of the passes.

    Args:
        steps: All passes.
        results: Every `LayerResult`, as a mapping.
        model: The checkpoint, read back.

    Returns:
        A `SparsityResult` as JSON; None if no pass prunes.

    Raises:
        VerificationError: if a pass has not pruned one of its layers, if the mean sparsity of its layers is not that of
            the pass, or if a layer of the checkpoint has fewer zeros than expected.
    """
    layers: dict[str, dict[str, float]] = {}
    for label, step, names in steps:
        if "masked" not in step.effects(ANY_LAYER).facts:
            continue
        effects = {name: step.effects(LayerScheme(_layer(model, name).shape)) for name in names}
        uniform = {name: effect.zeros for name, effect in effects.items() if effect.zeros is not None}
        zeros_by_layer: Mapping[str, Mapping[str, Any]]
        if isinstance(step, LayerPass):
            zeros_by_layer = {r["layer"]: r for r in results if r["by"] == label and r["asked"] is not None}
        elif step.effects(ANY_LAYER).uneven:  # the mean of what is there must be that of the pass
            shares = {name: float((_layer(model, name).weight == 0).float().mean()) for name in uniform}
            zeros_by_layer = {name: {"asked": share, "due": share} for name, share in shares.items()}
        else:
            zeros_by_layer = {
                n: {"asked": z.requested_sparsity, "due": z.expected_sparsity} for n, z in uniform.items()
            }
        if missing := [name for name in names if name not in zeros_by_layer]:
            raise VerificationError(f"{label}: {missing[0]} was not pruned, and {len(missing) - 1} more")
        _check_mean(label, zeros_by_layer, uniform, model)
        for name in names:
            previous = layers.get(name)
            if previous is None or previous["due"] < zeros_by_layer[name]["due"]:
                layers[name] = {key: zeros_by_layer[name][key] for key in ("asked", "due")}
    if not layers:
        return None
    sizes = {name: prod(_layer(model, name).shape) for name in layers}
    for name, layer in layers.items():
        layer["achieved"] = _count_zeros(model, name, round(layer["due"] * sizes[name])) / sizes[name]
    total = sum(sizes.values())
    means = {key: sum(layers[n][key] * sizes[n] for n in layers) / total for key in ("asked", "due", "achieved")}
    return {**means, "layers": layers}


def _layer(model: nn.Module, name: str) -> CompressedLinear:
    return layer_of(model.get_submodule(name))


def _check_mean(
    label: str,
    zeros_by_layer: Mapping[str, Mapping[str, Any]],
    uniform: Mapping[str, RequiredSparsity],
    model: nn.Module,
) -> None:
    """Check that the mean sparsity of the layers is that of the pass. Dense tails are not counted."""
    weights_in_units = {
        name: prod(_layer(model, name).shape) * z.expected_sparsity / z.requested_sparsity
        if z.requested_sparsity
        else 1.0
        for name, z in uniform.items()
    }
    total = sum(weights_in_units.values())
    mean = sum(zeros_by_layer[name]["asked"] * size for name, size in weights_in_units.items()) / total
    requested = sum(uniform[name].requested_sparsity * size for name, size in weights_in_units.items()) / total
    if abs(mean - requested) > TOLERANCE:
        raise VerificationError(f"{label}: sparsity {requested:g} was asked, but the mean of the layers is {mean:.4f}")


def _count_zeros(model: nn.Module, name: str, due: int) -> int:
    """Count the zeros of a layer. Raises VerificationError if there are fewer than `due`."""
    weight = _layer(model, name).weight
    count = weight.numel() - int(weight.count_nonzero())
    if count < due:
        raise VerificationError(f"{name}: {due} weights must be zero, but the checkpoint has {count}")
    return count
