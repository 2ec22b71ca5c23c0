"""What a recipe will do to every module, how many bytes it will write and what memory it will need: no computing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.context import device_of
from compress.contract import BlockPass, LayerPass, ModelPass, Pass, WeightSpec
from compress.errors import TargetError
from compress.formats import FORMATS
from compress.formats.base import Format, Scheme
from compress.model.open import OpenModel, open_model
from compress.model.packed import CompressedLinear, linears
from compress.model.save import outside_tensors
from compress.model.select import select
from compress.numerics.codes import groups_in
from compress.numerics.packed import PackedCodes
from compress.numerics.sparse import LARGEST_M, SparsePolicy, SparseWeight, Sparsity, choose
from compress.options import taken
from compress.pruning import Pruning
from compress.quantizing import Quantizing
from compress.recipe import Recipe, in_words, label
from compress.stream.observers import Gram
from compress.types import DTYPES, Extent, Fact

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

    Raises TargetError: a pattern that matches nothing, a layer that an earlier pass has made unfit for a later one, a
    group size that a layer or the format cannot have.
    """
    names, facts = opened.linear_names(), _facts(opened)
    steps: list[Step] = []
    swept: set[str] = set()
    for index, step in enumerate(passes):
        where = label(index, step)
        chosen = select(names, step.targets, step.ignore, where)
        if isinstance(step, Quantizing):
            chosen = _without_dense(step, chosen, where)
        _check_facts(step, chosen, facts, where)
        _check_original(step, chosen, swept, where)
        swept = swept | set(chosen) if is_sweep(step) else set()
        _check_shapes(step, chosen, opened, format_, where)
        for name in chosen:
            facts[name] |= dict.fromkeys(_own(step, name).facts(), where)
        steps.append((where, step, chosen))
    return steps


def _facts(opened: OpenModel) -> dict[str, dict[Fact, str]]:
    """What is true of every linear of the model as it came, and who made it so."""
    found: dict[str, dict[Fact, str]] = {name: {} for name in opened.linear_names()}
    for name in found:
        layer = opened.model.get_submodule(name)
        if isinstance(layer, CompressedLinear):
            true: dict[Fact, bool] = {
                "masked": layer.mask is not None,
                "quantized": layer.packed is not None,
                "activations_quantized": layer.activations is not None,
            }
            found[name] = {fact: "earlier passes" for fact, holds in true.items() if holds}
    return found


def _check_facts(step: Pass, names: Sequence[str], facts: dict[str, dict[Fact, str]], where: str) -> None:
    for fact in sorted(step.never_after):
        for name in names:
            if fact in facts[name]:
                raise TargetError(
                    f"{where}: {name} is {in_words(fact)} by {facts[name][fact]} already; "
                    f"leave it out with ignore, or put {step.key()} first"
                )
    for fact in sorted(step.after):
        if not any(fact in facts[name] for name in names):
            raise TargetError(f"{where}: none of the {len(names)} linears it works on is {in_words(fact)} before")


def _check_original(step: Pass, names: Sequence[str], swept: set[str], where: str) -> None:
    """swept: linears that passes just before it work on, block by block."""
    if isinstance(step, BlockPass) and step.needs_original and not swept & set(names):
        raise TargetError(
            f"{where}: it brings blocks nearer to what they were before the passes of its sweep, but none of these "
            f"works on its {len(names)} linears; put it right behind the passes that compress them"
        )


def _without_dense(step: Quantizing, names: Sequence[str], where: str) -> list[str]:
    """The linears that no override leaves alone."""
    overridden = taken(step.overrides, names, where)
    chosen = [name for name in names if name not in overridden or not overridden[name].dense]
    if not chosen:
        raise TargetError(f"{where}: the overrides leave none of the {len(names)} linears to work on")
    return chosen


def _own(step: Pass, name: str) -> Pass:
    """The pass with the options that it has for one of its layers."""
    own = step.for_layer(name) if isinstance(step, LayerPass | Quantizing) else step
    return step if own is None else own


def _check_shapes(step: Pass, names: Sequence[str], opened: OpenModel, format_: Format, where: str) -> None:
    """Raise TargetError where a layer is too small for what is asked, or the format cannot hold what it becomes."""
    shapes = layer_shapes(opened)
    for name in names:
        own, width = _own(step, name), shapes[name][1]
        spec, reason = own.spec, None
        if isinstance(own, Pruning):
            reason = own.pattern.refuses(shapes[name], own.density)
        if spec is not None and isinstance(spec.group_size, int) and spec.group_size > width:
            raise TargetError(
                f"{where}: group_size {spec.group_size} is larger than the {width} inputs of {name}; "
                "use a smaller one, or channel"
            )
        if reason is None and spec is not None:
            reason = format_.refuses(_scheme(spec, width), shapes[name])
        if reason is not None:
            raise TargetError(f"{where}: {name}: {reason}")


def _scheme(spec: WeightSpec, width: int) -> Scheme:
    return Scheme(
        spec.grid, spec.group_size, spec.symmetric, spec.indexed, spec.activations, width,
        spec.activation_scale, spec.outlier_threshold, spec.outlier_columns, float_zeros=spec.float_zeros,
    )  # fmt: skip


def planned_scheme(
    steps: Sequence[tuple[str, Pass]], name: str, shape: tuple[int, int], storage: torch.dtype, policy: SparsePolicy
) -> Scheme | None:
    """How the layer ends, as far as can be said before anything is computed; None: dense. policy: of sparse layers."""
    own = [_own(step, name) for _, step in steps]
    specs = [spec for step in own if (spec := step.spec) is not None]
    scheme = _scheme(specs[-1], shape[1]) if specs else None
    pruning = [step for step in own if isinstance(step, Pruning)]
    if not pruning:
        return scheme
    value = storage if scheme is None or scheme.grid is None else scheme.grid.bits
    sparsity = choose(_sparsities(pruning[-1], shape), shape, value, policy)
    if sparsity is None:
        return scheme
    return replace(scheme or Scheme(None, "channel", True, width=shape[1]), sparsity=sparsity)


def _sparsities(step: Pruning, shape: tuple[int, int]) -> list[Sparsity]:
    """As `sparsities` of the mask that a pruning pass will make, if no other pass prunes the layer too."""
    rows, width = shape
    if step.pattern.n_of_m is not None:
        n, m = step.pattern.n_of_m
        regular = Sparsity.regular(shape, n, m)
        return [*([regular] if m <= min(width, LARGEST_M) else []), Sparsity(regular.kept)]
    kept = rows * width - round(step.zeros(shape, step.share).due * rows * width)
    one_group = step.pattern.text == "row" and 0 < kept // rows < width <= LARGEST_M
    return [*([Sparsity.regular(shape, kept // rows, width)] if one_group else []), Sparsity(kept)]


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
        policy = recipe.save.sparse if format_.sparse else "off"
        scheme = planned_scheme(mine, name, shape, storage, policy)
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


def settle(planned: Plan, schemes: Mapping[str, Scheme], format_: Format, storage: torch.dtype) -> Plan:
    """The plan with the schemes that layers really ended with: some are known only when calibration data was seen."""
    layers = []
    for layer in planned.layers:
        scheme = schemes.get(layer.name)
        if scheme is None and layer.scheme is not None and layer.scheme.grid is None:  # not sparse after all
            size = layer_bytes(None, layer.shape, format_, storage)
            layer = replace(layer, scheme=None, size_bytes=size)
        if scheme is not None:  # a width is known, and groups are as they are stored, whatever was asked for
            size = layer_bytes(replace(scheme, width=layer.shape[1]), layer.shape, format_, storage)
            layer = replace(layer, scheme=scheme, size_bytes=size)
        layers.append(layer)
    change = sum(new.size_bytes - old.size_bytes for new, old in zip(layers, planned.layers, strict=True))
    return replace(planned, layers=tuple(layers), checkpoint_bytes=planned.checkpoint_bytes + change)


def layer_bytes(scheme: Scheme | None, shape: tuple[int, int], format_: Format, storage: torch.dtype) -> int:
    """Bytes of all tensors of one linear (its bias apart) as the format stores them."""
    rows, width = shape
    if scheme is None:
        return rows * width * storage.itemsize
    beside = sum(length * (dtype or storage).itemsize for length, dtype in scheme.input_tensors.values())
    if scheme.grid is None:
        assert scheme.sparsity is not None
        return beside + _all_bytes(format_.encode_floats(SparseWeight.empty(scheme.sparsity, shape, storage)))
    packed = PackedCodes.empty(
        scheme.grid, scheme.group_size, shape, scheme.symmetric, scheme.indexed, storage, scheme.sparsity,
        scheme.float_zeros,
    )  # fmt: skip
    adapted = format_.adapt(packed)
    if adapted is None:
        return rows * width * storage.itemsize
    return beside + _all_bytes(format_.encode(adapted, scheme.activations))


def _all_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


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
        if isinstance(step, LayerPass) and issubclass(step.observer, Gram):
            width = max(shapes[name][1] for name in names)
            solver = max(solver, 5 * width * width * 4)
    logits = (recipe.eval.length or 1024) * getattr(opened.config, "vocab_size", 0) * compute
    whole = [step.memory_bytes(_extent(recipe, opened, steps[:i], names, shapes)) for i, step, names in _whole(steps)]
    return outside + blocks + max(activations + solver, logits, *whole)


def _whole(steps: Sequence[Step]) -> list[tuple[int, ModelPass, list[str]]]:
    """The passes over the whole model: (place, pass, its linears)."""
    return [(i, step, names) for i, (_, step, names) in enumerate(steps) if isinstance(step, ModelPass)]


def _extent(
    recipe: Recipe, opened: OpenModel, before: Sequence[Step], names: Sequence[str], shapes: dict[str, tuple[int, int]]
) -> Extent:
    """What a pass over these linears finds behind the steps before it."""
    weights = scales = 0
    for name in names:
        rows, width = shapes[name]
        mine = [(where, step) for where, step, chosen in before if name in chosen]
        scheme = planned_scheme(mine, name, (rows, width), opened.dtype, "off")
        if scheme is None:
            weights += rows * width
        else:
            scales += 1 if scheme.group_size == "tensor" else rows * groups_in(width, scheme.group_size)
    return Extent(
        weights, scales, sum(t.numel() for t in outside_tensors(opened, opened.dtype).values()),
        sum(rows + width for rows, width in shapes.values()), getattr(opened.config, "vocab_size", 0),
        recipe.calibration.length or 0, opened.dtype.itemsize,
    )  # fmt: skip


def is_sweep(step: Pass) -> bool:
    """Whether a pass works block by block."""
    return isinstance(step, LayerPass | BlockPass)
