"""Install a solved layer in its storage form and dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol
from zlib import crc32

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compress.blockwise.storage import round_to_storage
from compress.checkpoint.save import stored_sparsity
from compress.errors import NumericError, TargetError, VerificationError
from compress.layers.base import InputTransform, WeightPart
from compress.layers.linear import CompressedLinear, linears, parts_of
from compress.layers.parts.dense import DenseScheme
from compress.models.structure.blocks import Block
from compress.numerics.dtypes import bytes_of
from compress.numerics.histogram import LayerHistograms
from compress.numerics.metrics import histogram, relative_error
from compress.passes.contract.context import Run
from compress.passes.contract.facts import Log, RequiredSparsity
from compress.passes.contract.layers import Solution
from compress.passes.contract.processes import Processes
from compress.passes.contract.records import LayerResult

WORST = 2  # layers of a block and pass whose histograms are stored


class LayerContext(Protocol):
    """The pass that solves a layer, and the place of the layer: in a block of a sweep, or outside of the blocks."""

    @property
    def label(self) -> str:
        """The label of the pass in the journal."""
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
        """Weights before quantization by full name, only if a pass needs them."""
        ...

    def full(self, name: str) -> str:
        """Return the full name of a layer."""
        ...

    def logger(self, place: str) -> Log:
        """Return log(kind, message, **figures), which writes to the journal."""
        ...


def keep_worst_histograms(results: Sequence[LayerResult]) -> list[LayerResult]:
    """Remove the histograms of all layers except the `WORST` layers of each pass with the largest errors.

    They may be removed after each layer: the last call determines the result.
    """
    shown_layers: set[tuple[str, str]] = set()
    for label in {result.by for result in results}:
        errors = sorted((-result.error, result.layer) for result in results if result.by == label and result.error)
        shown_layers |= {(label, layer) for _, layer in errors[:WORST]}
    return [
        result
        if result.histograms is None or (result.by, result.layer) in shown_layers
        else replace(result, histograms=None)
        for result in results
    ]


def install(
    context: LayerContext,
    name: str,
    layer: CompressedLinear,
    rows: Float[Tensor, "rows in"] | None,
    solve: Callable[[Float[Tensor, "out in"]], Solution],
) -> LayerResult:
    """Solve a layer, and install the solution.

    Args:
        context: context of the pass.
        name: name of the layer in the block.
        layer: the layer.
        rows: sampled inputs, to measure the error; None if no token reached the layer.
        solve: solves the layer from its weight.

    Raises:
        NumericError: with the pass and the layer, for a solver that fails and for pruned weights that are not zero.
        TargetError: if the format cannot store the solution.
    """
    full = context.full(name)
    original_output = None if rows is None else layer(rows)
    inputs = None if rows is None else _product_inputs(layer, rows)
    weight = layer.weight.float()
    try:
        solution = solve(weight)
    except NumericError as error:
        raise NumericError(f"{context.label} {full}: {str(error).removeprefix(full + ': ')}") from error
    put(context, name, layer, solution, weight)
    stored = layer.weight
    zero = stored == 0
    error = None if original_output is None else relative_error(layer(rows), original_output)
    input_histograms = None if rows is None or inputs is None else histogram(inputs, _product_inputs(layer, rows))
    zeros = solution.zeros
    sparsities = (None, None) if zeros is None else (zeros.requested_sparsity, zeros.expected_sparsity)
    histograms = LayerHistograms(histogram(weight, stored), input_histograms)
    return LayerResult(full, context.label, error, int(zero.count_nonzero()) / zero.numel(), *sparsities, histograms)


def put(
    context: LayerContext, name: str, layer: CompressedLinear, solution: Solution, weight: Float[Tensor, "out in"]
) -> None:
    """Install a solution in a layer.

    Args:
        context: context of the pass.
        name: name of the layer in the block.
        layer: the layer.
        solution: solution of the pass.
        weight: weight of the layer in float32.

    Raises:
        NumericError: if a pruned weight is not zero.
        TargetError: if the format cannot store the solution.
    """
    full = context.full(name)
    _check_solution(f"{context.label} {full}", solution, layer)
    parts = None if solution.weight is None else parts_of(solution.weight)
    if zero_groups := sum(part.vanished(weight) for part in parts or ()):
        message = "groups of weights became zero, because their scales are too small to store"
        context.logger(full)("fallback", message, groups=zero_groups)
    was_pruned, was_quantized = layer.positions is not None, layer.quantized
    _set_parts(context, layer, solution, parts, full)
    unquantized = context.unquantized
    if unquantized is not None and not was_quantized and any(part.scheme.quantized for part in parts or ()):
        unquantized[full] = weight
    if solution.zeros is not None:
        _check_mask(f"{context.label}: {full}", layer, was_pruned, solution.zeros)
    round_to_storage(layer, context.run)
    mask = layer.mask
    if mask is not None and not layer.is_zero_outside(mask):
        raise NumericError(f"{context.label} {full}: weights that were pruned are no longer zero")


def _check_solution(label: str, solution: Any, layer: CompressedLinear) -> None:
    """Raise TargetError for what is no solution of a layer: another value, or one of another shape."""
    if not isinstance(solution, Solution):
        raise TargetError(f"{label}: the pass returns {type(solution).__name__}; return a Solution")
    weight = solution.weight
    is_float = isinstance(weight, Tensor)
    parts = [*(() if weight is None or is_float else parts_of(weight)), *solution.added]
    shapes = {"weight": [*([weight.shape] if is_float else []), *(part.shape for part in parts)]}
    shapes["mask"] = [] if solution.mask is None else [solution.mask.shape]
    for name, others in shapes.items():
        for shape in others:
            if tuple(shape) != layer.shape:
                size, expected = (" x ".join(map(str, numbers)) for numbers in (shape, layer.shape))
                raise TargetError(f"{label}: the {name} of the solution is {size}, but the layer is {expected}")


def _product_inputs(layer: CompressedLinear, rows: Tensor) -> Tensor:
    """Return the inputs of the product with the weights: transformed and quantized."""
    x = layer.transform(rows)
    return x if layer.rounding is None else layer.rounding(x)


def _check_mask(label: str, layer: CompressedLinear, was_pruned: bool, zeros: RequiredSparsity) -> None:
    """Check the number of weights that the mask removes.

    Raises:
        VerificationError: if the mask removes fewer than required, or more, if there was no mask before.
    """
    size, positions = layer.shape[0] * layer.shape[1], layer.positions
    removed = 0 if positions is None else size - positions.sparsity.kept
    required = round(zeros.expected_sparsity * size)
    if removed < required or (not was_pruned and removed > required):
        sparsity = zeros.requested_sparsity
        message = f"sparsity {sparsity:g} requires {required} removed weights, but {removed} were removed"
        raise VerificationError(f"{label}: {message}")


def _set_parts(
    context: LayerContext, layer: CompressedLinear, solution: Solution, parts: list[WeightPart] | None, full: str
) -> None:
    """Install the solution in its storage form, with the parts of its weight."""
    for transform in solution.transforms:
        layer.set_transform(transform)
    if parts is not None:
        layer.put([_cast_dense(part, context.dtype) for part in parts], solution.mask)
    elif solution.mask is not None:
        layer.put(layer.all_parts, solution.mask)
    if solution.added:
        layer.put([*layer.all_parts, *(_cast_dense(part, context.dtype) for part in solution.added)])
    adapt(layer, context.run, context.dtype, f"{context.label}: {full}")


def _cast_dense(part: WeightPart, dtype: torch.dtype) -> WeightPart:
    """Cast the float weights of a part to `dtype`; codes do not change."""
    return part if part.scheme.quantized else part.in_storage(dtype)


def adapt(layer: CompressedLinear, run: Run, dtype: torch.dtype, label: str) -> None:
    """Convert the parts to the form that the format stores, or dequantize them to `dtype` if it stores no such parts.

    Raises:
        TargetError: if the format refuses the layer.
    """
    scheme, is_dequantized = layer.scheme, run.format.adapt(layer.scheme) is None
    if not scheme.quantized and not (is_dequantized and scheme.parts != (DenseScheme(),)):
        return
    layer.change_parts(lambda part: part.in_storage(run.scale_dtype if part.scheme.quantized else dtype))
    if is_dequantized:
        layer.put(layer.weight_as(dtype))
        for transform in layer.absorb_inputs():
            if transform.scheme.undone:
                run.journal.add("note", label, transform.scheme.undone)
        return
    reason = run.format.refuses(scheme)
    if reason is not None:
        raise TargetError(f"{label}: {reason}")
    layer.change_parts(run.format.adapt_part)
    layer.change_transforms(run.format.adapt_transform)


def adapt_block(block: Block, run: Run, dtype: torch.dtype) -> None:
    """Convert the compressed linears of a block that is not yet processed to the forms that the run's format stores.

    Raises:
        TargetError: if the format refuses a layer.
    """
    for name, layer in linears(block.module).items():
        if isinstance(layer, CompressedLinear):
            adapt(layer, run, dtype, f"model: {block.name}.{name}")
            if layer.scheme.folds and not run.format.sparse:
                layer.absorb_inputs()


def absorb_transforms(block: Block, run: Run, is_last: bool) -> bool:
    """Fold input transforms into the weights of dense layers.

    A transform that moves zeros is not folded into a layer with packed sparse weights.

    Args:
        block: the block.
        run: the run.
        is_last: whether no segment follows. Otherwise transforms that mix channels are preserved for later passes.

    Returns:
        Whether a layer changed.
    """
    policy = run.sparse if run.format.sparse else "off"
    undone: dict[str, list[str]] = defaultdict(list)
    changed = False
    for name, layer in linears(block.module).items():
        if not isinstance(layer, CompressedLinear) or not layer.scheme.folds or (layer.scheme.mixes and not is_last):
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


def group_by_transforms(block: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """Group linears that read the same tensor by their linear transforms; activation quantization is ignored."""
    parts: list[tuple[list[InputTransform], list[str]]] = []
    for name in names:
        module = block.get_submodule(name)
        transforms = [t for t in module.all_transforms if t.linear] if isinstance(module, CompressedLinear) else []
        for group_transforms, members in parts:
            if len(transforms) == len(group_transforms) and all(
                _equal_transforms(transform, group_transform)
                for transform, group_transform in zip(transforms, group_transforms, strict=True)
            ):
                members.append(name)
                break
        else:
            parts.append((transforms, [name]))
    return [members for _, members in parts]


def _equal_transforms(first_transform: InputTransform, second_transform: InputTransform) -> bool:
    """Return whether two transforms are equal."""
    first_tensors, second_tensors = first_transform.tensors(), second_transform.tensors()
    return first_transform.scheme == second_transform.scheme and all(
        torch.equal(tensor, second_tensors[name]) for name, tensor in first_tensors.items()
    )


def check_equal_in_processes(module: nn.Module, name: str, processes: Processes) -> None:
    """Check that a module has the same bits in all processes.

    Args:
        module: the module.
        name: prefix of the error.
        processes: the processes.

    Raises:
        VerificationError: for different bits.
    """
    if processes.size == 1:
        return
    checksum = 0
    for tensor in (*module.parameters(), *module.buffers()):
        checksum = crc32(bytes_of(tensor.cpu()).numpy().data, checksum)
    if len(set(processes.gather(checksum))) > 1:
        raise VerificationError(
            f"{name}: processes computed different weights; launch on machines with equal processors or devices and "
            "versions of torch, and let passes of your own combine what each process computes (inputs.processes)"
        )
