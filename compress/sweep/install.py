"""Install a solved layer in its storage form and dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from zlib import crc32

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compress.checkpoint.save import stored_sparsity
from compress.errors import NumericError, TargetError, VerificationError
from compress.layers.base import InputTransform, WeightPart
from compress.layers.linear import CompressedLinear, linears, parts_of
from compress.layers.parts.dense import DenseScheme
from compress.models.structure.blocks import Block
from compress.numerics.dtypes import bytes_of, rounded
from compress.numerics.histogram import LayerHistograms, histogram
from compress.numerics.metrics import relative_error
from compress.passes.contract.context import Run
from compress.passes.contract.facts import Log
from compress.passes.contract.layers import Solution, Zeros
from compress.passes.contract.processes import Processes

WORST = 2  # layers of a block whose histograms are kept


class LayerContext(Protocol):
    """The pass that solves a layer, and where the layer is: in a block of a sweep, or outside of the blocks."""

    @property
    def label(self) -> str:
        """Of the pass in the journal."""
        ...

    @property
    def run(self) -> Run:
        """The run."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of computation."""
        ...

    @property
    def unquantized(self) -> dict[str, Tensor] | None:
        """Weights before they were quantized, by full name, only if a pass needs them."""
        ...

    def full(self, name: str) -> str:
        """The full name of a layer."""
        ...

    def logger(self, where: str) -> Log:
        """Return log(kind, message, **figures), which writes to the journal."""
        ...


@dataclass(frozen=True)
class LayerResult:
    """The effect of one pass on one layer.

    error: ||(W' - W) X|| / ||W X|| on sampled inputs, None if no token reached the layer. sparsity: fraction of zeros
    after the pass. asked, due: only for a pruning pass, the requested sparsity and the sparsity in whole units of the
    pattern. histograms: of the weights and inputs before and after the pass; `worst_shown` keeps those of few layers.
    """

    layer: str
    by: str
    error: float | None
    sparsity: float
    asked: float | None = None
    due: float | None = None
    histograms: LayerHistograms | None = None


def worst_shown(results: Sequence[LayerResult]) -> list[LayerResult]:
    """The results of one block, with the histograms of the `WORST` layers of each pass with the largest errors."""
    kept: set[tuple[str, str]] = set()
    for label in {result.by for result in results}:
        errors = sorted((-result.error, result.layer) for result in results if result.by == label and result.error)
        kept |= {(label, layer) for _, layer in errors[:WORST]}
    return [one if (one.by, one.layer) in kept else replace(one, histograms=None) for one in results]


def install(
    context: LayerContext,
    name: str,
    layer: CompressedLinear,
    rows: Float[Tensor, "rows in"] | None,
    solve: Callable[[Float[Tensor, "out in"]], Solution],
) -> LayerResult:
    """Solve a layer of the block and install the solution. rows: sampled inputs, to measure the error.

    Raises NumericError with the pass and the layer, also if a pruned weight is no longer zero. Raises TargetError if
    the format cannot store the solution.
    """
    full = context.full(name)
    before = None if rows is None else layer(rows)
    inputs = None if rows is None else _multiplied(layer, rows)
    weight = layer.weight.float()
    try:
        solution = solve(weight)
    except NumericError as error:
        raise NumericError(f"{context.label} {full}: {str(error).removeprefix(full + ': ')}") from error
    put(context, name, layer, solution, weight)
    stored = layer.weight
    zero = stored == 0
    error = None if before is None else relative_error(layer(rows), before)
    seen = None if rows is None or inputs is None else histogram(inputs, _multiplied(layer, rows))
    zeros = solution.zeros
    owed = (None, None) if zeros is None else (zeros.asked, zeros.due)
    shown = LayerHistograms(histogram(weight, stored), seen)
    return LayerResult(full, context.label, error, int(zero.sum()) / zero.numel(), *owed, shown)


def put(
    context: LayerContext, name: str, layer: CompressedLinear, solution: Solution, weight: Float[Tensor, "out in"]
) -> None:
    """Install a solution in a layer of the block. weight: of the layer, in float32. Raises as `install`."""
    full = context.full(name)
    parts = None if solution.weight is None else parts_of(solution.weight)
    if gone := sum(part.vanished(weight) for part in parts or ()):
        message = "groups of weights became zero, because their scales are too small to store"
        context.logger(full)("fallback", message, groups=gone)
    before_mask, was_quantized = layer.mask, layer.quantized
    _put(context, layer, solution, parts, full)
    kept = context.unquantized
    if kept is not None and not was_quantized and any(part.scheme.quantized for part in parts or ()):
        kept[full] = weight
    if solution.zeros is not None:
        _check_mask(f"{context.label}: {full}", layer, before_mask, solution.zeros)
    round_to_storage(layer, context.run)
    if layer.mask is not None and not bool(((layer.weight == 0) | layer.mask).all()):
        raise NumericError(f"{context.label} {full}: weights that were pruned are no longer zero")


def _multiplied(layer: CompressedLinear, rows: Tensor) -> Tensor:
    """The inputs as the weights are multiplied by them: transformed and rounded."""
    x = layer.transform(rows)
    return x if layer.rounding is None else layer.rounding(x)


def _check_mask(where: str, layer: CompressedLinear, before: Tensor | None, zeros: Zeros) -> None:
    """Raise VerificationError if the mask removes less than is due, or more, if there was no mask before."""
    removed = 0 if layer.mask is None else int((~layer.mask).sum())
    due = round(zeros.due * layer.shape[0] * layer.shape[1])
    if removed < due or (before is None and removed > due):
        message = f"sparsity {zeros.asked:g} requires {due} removed weights, but {removed} were removed"
        raise VerificationError(f"{where}: {message}")


def _put(
    context: LayerContext, layer: CompressedLinear, solution: Solution, parts: list[WeightPart] | None, full: str
) -> None:
    """Install the solution in its storage form. parts: the parts of its weight."""
    for transform in solution.transforms:
        layer.set_transform(transform)
    if parts is not None:
        layer.put([_computed_in(part, context.dtype) for part in parts], solution.mask)
    elif solution.mask is not None:
        layer.put(layer.all_parts, solution.mask)
    if solution.added:
        layer.put([*layer.all_parts, *(_computed_in(part, context.dtype) for part in solution.added)])
    adapt(layer, context.run, context.dtype, f"{context.label}: {full}")


def _computed_in(part: WeightPart, dtype: torch.dtype) -> WeightPart:
    """The part with its floating weights in `dtype`; codes do not change."""
    return part if part.scheme.quantized else part.in_storage(dtype)


def adapt(layer: CompressedLinear, run: Run, dtype: torch.dtype, where: str) -> None:
    """Convert the parts to the form that the format stores; dequantize them to `dtype` if it stores no such parts.

    Raises TargetError if the format refuses the layer.
    """
    scheme, multiplied_out = layer.scheme, run.format.adapt(layer.scheme) is None
    if not scheme.quantized and not (multiplied_out and scheme.parts != (DenseScheme(),)):
        return
    layer.change_parts(lambda part: part.in_storage(run.scale_dtype if part.scheme.quantized else dtype))
    if multiplied_out:
        layer.put(layer.weight_as(dtype))
        for transform in layer.absorb_inputs():
            if transform.scheme.undone:
                run.journal.add("note", where, transform.scheme.undone)
        return
    reason = run.format.refuses(scheme)
    if reason is not None:
        raise TargetError(f"{where}: {reason}")
    layer.change_parts(run.format.adapt_part)


def take_in(block: Block, run: Run, dtype: torch.dtype) -> None:
    """Convert the compressed linears that a block starts with to the forms that the run's format stores.

    Raises TargetError if the format refuses a layer.
    """
    for name, layer in linears(block.module).items():
        if isinstance(layer, CompressedLinear):
            adapt(layer, run, dtype, f"model: {block.name}.{name}")
            if layer.scheme.folds and not run.format.sparse:
                layer.absorb_inputs()


def absorb_transforms(block: Block, run: Run, last: bool) -> bool:
    """Fold input transforms into the weights of dense layers; returns whether a layer changed.

    A transform that moves zeros is not folded into a layer whose kept weights are stored alone. last: no segment
    follows; before, transforms that mix channels stay for later passes.
    """
    policy = run.sparse if run.format.sparse else "off"
    undone: dict[str, list[str]] = defaultdict(list)
    changed = False
    for name, layer in linears(block.module).items():
        if not isinstance(layer, CompressedLinear) or not layer.scheme.folds or (layer.scheme.mixes and not last):
            continue
        absorbed = layer.absorb_inputs(stored_sparsity(layer, run.storage, policy) is not None)
        if absorbed:
            round_to_storage(layer, run)
            changed = True
        for transform in absorbed:
            undone[transform.scheme.undone].append(name)
    for note, names in undone.items():
        if note:
            run.journal.add("note", f"save {block.name}", f"{', '.join(sorted(names))}: {note}")
    return changed


def of_one_input(block: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """Group linears that read the same tensor by their linear transforms; rounding does not count."""
    parts: list[tuple[list[InputTransform], list[str]]] = []
    for name in names:
        module = block.get_submodule(name)
        own = [t for t in module.all_transforms if t.linear] if isinstance(module, CompressedLinear) else []
        for others, members in parts:
            if len(own) == len(others) and all(_same(one, other) for one, other in zip(own, others, strict=True)):
                members.append(name)
                break
        else:
            parts.append((own, [name]))
    return [members for _, members in parts]


def _same(one: InputTransform, other: InputTransform) -> bool:
    """Whether two transforms are equal."""
    mine, theirs = one.tensors(), other.tensors()
    return one.scheme == other.scheme and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def round_to_storage(module: nn.Module, run: Run) -> None:
    """Round dense floating tensors to the storage dtype; scales are computed in it. Rounded ends stay as they are."""
    for name, tensor in module.named_parameters():
        if name in run.ends:
            continue
        tensor.data = rounded(tensor.data, run.format.stored_dtype(tensor.shape, run.storage))
    for part in module.modules():
        if isinstance(part, WeightPart):
            part.round_to(run.storage)


def same_everywhere(module: nn.Module, name: str, processes: Processes) -> None:
    """Raise VerificationError unless a module has the same bits in all processes. name: for the error."""
    if processes.size == 1:
        return
    found = 0
    for tensor in (*module.parameters(), *module.buffers()):
        found = crc32(bytes_of(tensor.cpu()).numpy().data, found)
    if len(set(processes.gather(found))) > 1:
        raise VerificationError(
            f"{name}: processes computed different weights; launch on machines with equal processors or devices and "
            "versions of torch, and let passes of your own combine what each process computes (inputs.processes)"
        )
