"""Sparsity: the sparsity asked of the pruned layers, and the zeros of the checkpoint after it was read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.api.passes import Step, Zeros
from compress.errors import VerificationError
from compress.evaluate.base import EvaluationContext, Evaluator, Record, Texts
from compress.families.pruning import Pruning, PruningPass
from compress.model.linear import CompressedLinear

TOLERANCE = 1e-3  # absolute, of the mean over layers: an allocation keeps the sparsity of the pass up to rounding


class LayerSparsity(Record):
    """Shares of zeros. asked: the sparsity asked of the layer. due: in whole units of the pattern, without its dense
    tail. achieved: zeros counted in the checkpoint.
    """

    asked: float
    due: float
    achieved: float


class SparsityResult(LayerSparsity):
    """Means over all pruned layers, weighted by their size, and the shares of each layer."""

    layers: dict[str, LayerSparsity]


class Sparsity(Evaluator):
    """The sparsity that was asked for and the sparsity of the checkpoint; None where no pass prunes."""

    result_type: ClassVar[Any] = SparsityResult

    def measure(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        texts: Texts,
        context: EvaluationContext,
    ) -> dict[str, Any] | None:
        """Raises VerificationError, see `check_sparsity`."""
        return check_sparsity(context.steps, context.layers, model)


def check_sparsity(
    steps: Sequence[Step], results: Sequence[Mapping[str, Any]], model: nn.Module
) -> dict[str, Any] | None:
    """A `SparsityResult` as JSON; None where no pass prunes.

    steps: all passes. results: every `LayerResult`, as a mapping. model: the checkpoint, read back.

    Raises VerificationError if a pass has not pruned one of its layers, if the mean sparsity of its layers is not that
    of the pass, or if a layer of the checkpoint has fewer zeros than due.
    """
    pruned = [(label, step, names) for label, step, names in steps if isinstance(step, Pruning)]
    if not pruned:
        return None
    layers: dict[str, dict[str, float]] = {}
    for label, step, names in pruned:
        found: Mapping[str, Mapping[str, Any]] = (
            {r["layer"]: r for r in results if r["by"] == label and r["asked"] is not None}
            if isinstance(step, PruningPass)
            else {name: asdict(_required_zeros(step, model, name)) for name in names}
        )
        if missing := [name for name in names if name not in found]:
            raise VerificationError(f"{label}: {missing[0]} was not pruned, and {len(missing) - 1} more")
        _check_mean(label, step, found, model)
        for name in names:
            known = layers.get(name)
            if known is None or known["due"] < found[name]["due"]:
                layers[name] = {key: found[name][key] for key in ("asked", "due")}
    sizes = {name: prod(_layer(model, name).shape) for name in layers}
    for name, layer in layers.items():
        layer["achieved"] = _count_zeros(model, name, round(layer["due"] * sizes[name])) / sizes[name]
    total = sum(sizes.values())
    means = {key: sum(layers[n][key] * sizes[n] for n in layers) / total for key in ("asked", "due", "achieved")}
    return {**means, "layers": layers}


def _layer(model: nn.Module, name: str) -> CompressedLinear:
    return CompressedLinear.of(model.get_submodule(name))


def _required_zeros(step: Pruning, model: nn.Module, name: str) -> Zeros:
    return step.zeros(_layer(model, name).shape)


def _check_mean(label: str, step: Pruning, found: Mapping[str, Mapping[str, Any]], model: nn.Module) -> None:
    """Check that the mean sparsity of the layers is that of the pass. Dense tails are not counted."""
    sizes = {name: prod(step.pattern.whole(_layer(model, name).shape)) for name in found}
    mean = sum(found[name]["asked"] * size for name, size in sizes.items()) / sum(sizes.values())
    if abs(mean - step.target_sparsity) > TOLERANCE:
        raise VerificationError(
            f"{label}: sparsity {step.target_sparsity:g} was asked, but the mean of the layers is {mean:.4f}"
        )


def _count_zeros(model: nn.Module, name: str, due: int) -> int:
    """Count the zeros of a layer. Raises VerificationError if there are fewer than `due`."""
    found = int((_layer(model, name).weight == 0).sum())
    if found < due:
        raise VerificationError(f"{name}: {due} weights must be zero, but the checkpoint has {found}")
    return found
