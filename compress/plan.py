"""What a recipe will do to every module, how many bytes it will write and what memory it will need: no computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.context import device_of
from compress.contract import BlockPass, LayerPass, ModelPass, Pass, QuantizingPass
from compress.errors import TargetError
from compress.formats import FORMATS
from compress.formats.base import Format, Scheme
from compress.model.open import OpenModel, open_model
from compress.model.packed import CompressedLinear, linears
from compress.model.save import outside_tensors
from compress.model.select import select
from compress.numerics.bits import packed_width
from compress.numerics.codes import groups_in
from compress.numerics.packed import PackedCodes
from compress.recipe import Recipe, label
from compress.stream.observers import Gram
from compress.types import DTYPES

Step = tuple[str, Pass, list[str]]
"""(label, pass, full names of the linears it works on)."""


@dataclass(frozen=True)
class LayerPlan:
    """One linear: its shape (out, in), the passes that work on it, how it ends, and its bytes in the checkpoint."""

    name: str
    shape: tuple[int, int]
    passes: tuple[str, ...]
    scheme: Scheme | None
    size_bytes: int


@dataclass(frozen=True)
class Plan:
    """All layers; bytes of all tensors of the checkpoint, and of the dense model in the storage dtype.

    memory_bytes: about what the process will hold at its peak in tensors, beside the libraries.
    """

    layers: tuple[LayerPlan, ...]
    checkpoint_bytes: int
    dense_bytes: int
    memory_bytes: int
    notes: tuple[str, ...] = ()


def storage_dtype(recipe: Recipe, opened: OpenModel) -> torch.dtype:
    """The dtype that scales and dense tensors are stored in."""
    return opened.dtype if recipe.save.dtype == "auto" else DTYPES[recipe.save.dtype]


def resolve(passes: Sequence[Pass], opened: OpenModel, format_: Format) -> list[Step]:
    """Every pass with the linears it works on.

    Raises TargetError: a pattern that matches nothing, a group size that a layer or the format cannot have.
    """
    names = opened.linear_names()
    steps: list[Step] = []
    for index, step in enumerate(passes):
        where = label(index, step)
        chosen = select(names, step.targets, step.ignore, where)
        if isinstance(step, QuantizingPass):
            _check_schemes(step, chosen, opened, format_, where)
        steps.append((where, step, chosen))
    return steps


def _check_schemes(step: QuantizingPass, names: Sequence[str], opened: OpenModel, format_: Format, where: str) -> None:
    shapes = layer_shapes(opened)
    for name in names:
        width = shapes[name][1]
        if isinstance(step.group_size, int) and step.group_size > width:
            raise TargetError(
                f"{where}: group_size {step.group_size} is larger than the {width} inputs of {name}; "
                "use a smaller one, or channel"
            )
        reason = format_.refuses(_scheme(step, width), shapes[name])
        if reason is not None:
            raise TargetError(f"{where}: {name}: {reason}")


def _scheme(step: QuantizingPass, width: int) -> Scheme:
    spec = step.spec
    return Scheme(spec.grid, spec.group_size, spec.symmetric, spec.indexed, spec.activations, width)


def layer_shapes(opened: OpenModel) -> dict[str, tuple[int, int]]:
    """(out, in) of every linear in the blocks by its full name."""
    return {
        f"{block.name}.{name}": CompressedLinear.of(module).shape
        for block in opened.blocks
        for name, module in linears(block.module).items()
    }


def plan(recipe: Recipe) -> Plan:
    """Open the model (its weights are not read) and say what `run` would do; raises what `run` would raise first."""
    device_of(recipe.device)
    return plan_of(recipe, open_model(recipe.model, recipe.dtype, trust_remote_code=recipe.trust_remote_code))


def plan_of(recipe: Recipe, opened: OpenModel) -> Plan:
    """The plan for an open model."""
    format_ = FORMATS[recipe.save.format]
    storage = storage_dtype(recipe, opened)
    steps = resolve(recipe.passes, opened, format_)
    shapes = layer_shapes(opened)
    layers, notes = [], list(opened.notes)
    for name, shape in shapes.items():
        mine = [(where, step) for where, step, names in steps if name in set(names)]
        schemes = [_scheme(step, shape[1]) for _, step in mine if isinstance(step, QuantizingPass)]
        scheme = schemes[-1] if schemes else None
        size = layer_bytes(scheme, shape, format_, storage)
        layers.append(LayerPlan(name, shape, tuple(where for where, _ in mine), scheme, size))
    weights = sum(layer.size_bytes for layer in layers)
    rest = sum(_bytes(t, storage) for t in outside_tensors(opened, storage).values())
    for block in opened.blocks:
        inside = {f"{name}.weight" for name in linears(block.module)}
        state = block.module.state_dict()
        rest += sum(_bytes(t, storage) for name, t in state.items() if name not in inside)
    dense = rest + sum(rows * width for rows, width in shapes.values()) * storage.itemsize
    return Plan(tuple(layers), weights + rest, dense, _memory(recipe, opened, steps, shapes), tuple(notes))


def layer_bytes(scheme: Scheme | None, shape: tuple[int, int], format_: Format, storage: torch.dtype) -> int:
    """Bytes of all tensors of one linear (its bias apart) as the format stores them."""
    rows, width = shape
    if scheme is None:
        return rows * width * storage.itemsize
    empty: dict[str, Any] = {"device": "meta"}
    scale_rows = 1 if scheme.group_size == "tensor" else rows
    scale = torch.empty(scale_rows, groups_in(width, scheme.group_size), dtype=storage, **empty)
    zero = None if scheme.symmetric else torch.empty(scale.shape, dtype=torch.int8, **empty)
    index = torch.empty(width, dtype=torch.int32, **empty) if scheme.indexed else None
    words = torch.empty(rows, packed_width(width, scheme.grid.bits), dtype=torch.int32, **empty)
    packed = PackedCodes(words, scale, zero, scheme.grid, scheme.group_size, shape, index)
    adapted = format_.adapt(packed)
    if adapted is None:
        return rows * width * storage.itemsize
    return sum(t.numel() * t.element_size() for t in format_.encode(adapted, scheme.activations).values())


def _bytes(tensor: Tensor, storage: torch.dtype) -> int:
    return tensor.numel() * (storage.itemsize if tensor.is_floating_point() else tensor.element_size())


def _memory(recipe: Recipe, opened: OpenModel, steps: Sequence[Step], shapes: dict[str, tuple[int, int]]) -> int:
    """What is in memory at once: outside weights, one block twice, activations, the largest solver's matrices."""
    compute = opened.dtype.itemsize
    outside = sum(_bytes(t, opened.dtype) for t in outside_tensors(opened, opened.dtype).values())
    sizes = [sum(t.numel() for t in block.module.state_dict().values()) * compute for block in opened.blocks]
    blocks = sum(sizes) if any(isinstance(step, ModelPass) for _, step, _ in steps) else 2 * max(sizes)
    calibration = recipe.calibration
    tokens = (calibration.sequences or 0) * (calibration.length or 0)
    hidden = getattr(opened.config, "hidden_size", max(width for _, width in shapes.values()))
    widest = max(width for _, width in shapes.values())
    one_batch = calibration.batch * (calibration.length or 0) * widest * compute * 4
    activations = tokens * (2 * hidden + widest) * compute + one_batch
    solver = 0
    for _, step, names in steps:
        if isinstance(step, LayerPass) and step.observes is Gram:
            width = max(shapes[name][1] for name in names)
            solver = max(solver, 5 * width * width * 4)
    logits = (recipe.eval.length or 1024) * getattr(opened.config, "vocab_size", 0) * compute
    return outside + blocks + max(activations + solver, logits)


def is_sweep(step: Pass) -> bool:
    """Whether a pass works block by block."""
    return isinstance(step, LayerPass | BlockPass)
