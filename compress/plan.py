"""What a recipe will do to every module, how many bytes it will write and what memory it will need: no computing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from compress.context import device_of
from compress.contract import BlockPass, LayerPass, Pass, Step, WeightSpec
from compress.errors import ModelError, TargetError
from compress.footprint import Footprint, is_sweep
from compress.formats import FORMATS
from compress.formats.base import Format, Scheme
from compress.model.blocks import find_blocks
from compress.model.cache import holding, rounded_caches
from compress.model.open import InMemory, OpenModel, open_model
from compress.model.packed import CompressedLinear, linears
from compress.model.reform import sketch
from compress.model.save import outside_state
from compress.model.select import select
from compress.numerics.packed import PackedCodes
from compress.numerics.sparse import LARGEST_M, SparsePolicy, SparseWeight, Sparsity, choose
from compress.options import taken
from compress.pruning import Pruning
from compress.quantizing import Quantizing
from compress.recipe import Recipe, in_words, label
from compress.reshaping import ReshapingPass
from compress.types import DTYPES, Fact


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

    memory_bytes: about what the process will hold at its peak in tensors, beside the libraries and mapped files.
    """

    layers: tuple[LayerPlan, ...]
    checkpoint_bytes: int
    dense_bytes: int
    memory_bytes: int
    notes: tuple[str, ...] = ()


def storage_dtype(recipe: Recipe, opened: OpenModel) -> torch.dtype:
    """The dtype that scales and dense tensors are stored in."""
    return opened.dtype if recipe.save.dtype == "auto" else DTYPES[recipe.save.dtype]


def resolve(passes: Sequence[Pass], opened: OpenModel, format_: Format, first: int = 0) -> tuple[list[Step], OpenModel]:
    """Every pass with the linears it works on, and the model as the last one leaves it, without weights if reshaped.

    first: the place of the first of these passes in the recipe.

    Raises TargetError: a pattern that matches nothing, a layer that an earlier pass has made unfit for a later one, a
    group size that a layer or the format cannot have, a shape that the model cannot be given.
    """
    names, facts = opened.linear_names(), _facts(opened)
    steps: list[Step] = []
    swept: set[str] = set()
    for index, step in enumerate(passes, first):
        where = label(index, step)
        chosen = select(names, step.targets, step.ignore, where)
        if isinstance(step, Quantizing):
            chosen = _without_dense(step, chosen, where)
        if step.cache is not None:
            chosen = _in_attention(opened, names, chosen, where)
        reshapes = isinstance(step, ReshapingPass)
        _check_facts(step, names if reshapes else chosen, facts, where)
        _check_original(step, chosen, swept, where)
        swept = swept | set(chosen) if is_sweep(step) else set()
        _check_shapes(step, chosen, opened, format_, where)
        steps.append((where, step, chosen))
        if reshapes:
            opened = in_form(opened, step.outcome(opened.model, where))
            names, facts = opened.linear_names(), _facts(opened)
        for name in () if reshapes else chosen:
            facts[name] |= dict.fromkeys(_own(step, name).facts(), where)
    return steps, opened


def in_form(opened: OpenModel, config: PretrainedConfig) -> OpenModel:
    """The model in the shape of another configuration, without any weights. Raises ModelError."""
    model = sketch(opened.model, config)
    if model is None:
        raise ModelError(f"model: transformers {transformers.__version__} cannot build it from its configuration")
    return replace(opened, model=model, blocks=find_blocks(model), weights=InMemory())


def follow(steps: Sequence[Step], opened: OpenModel, format_: Format, done: int) -> None:
    """Let the steps behind the first `done` work on the linears of the model as it has become."""
    rest = [step for _, step, _ in steps[done:]]
    found, _ = resolve(rest, opened, format_, done)
    for (_, _, names), (_, _, now) in zip(steps[done:], found, strict=True):
        names[:] = now


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
    rounded = tuple(f"{attention}." for attention in rounded_caches(opened.model))
    for name in found:
        if name.startswith(rounded):
            found[name]["cache_quantized"] = "earlier passes"
    return found


def _check_facts(step: Pass, names: Sequence[str], facts: dict[str, dict[Fact, str]], where: str) -> None:
    for fact in sorted(step.never_after):
        for name in names:
            if fact in facts[name]:
                raise TargetError(
                    f"{where}: {name} is {in_words(fact)} by {facts[name][fact]} already; "
                    f"leave it out with ignore, or put {step.key()} first"
                )
    for name in names:
        spec = _own(step, name).spec
        if spec is not None and "masked" in facts[name] and not spec.grid.has_zero:
            raise TargetError(
                f"{where}: {name} is pruned by {facts[name]['masked']}, but weights {spec.grid.name} have no zero; "
                "use ternary, or another grid that has one"
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


def _in_attention(opened: OpenModel, names: Sequence[str], chosen: Sequence[str], where: str) -> list[str]:
    """All linears of the modules that keep keys and values in a cache, and hold one of those chosen."""
    held = holding(opened.model, chosen)
    if not held:
        reason = f"none of the {len(chosen)} linears it works on is in an attention that has one; widen its targets"
        if not holding(opened.model, names):
            kind = type(opened.model).__name__
            reason = f"{kind} has none: an encoder sees the whole text at once; leave {where.split()[-1]} out"
        raise TargetError(f"{where}: it rounds what enters a cache of keys and values; {reason}")
    return [name for name in names if any(name.startswith(f"{attention}.") for attention in held)]


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
    steps, form = resolve(recipe.passes, opened, FORMATS[recipe.save.format])
    planned = plan_on(recipe, steps, form)
    if form is opened:
        dense = planned.dense_bytes
    else:
        dense = sum(_bytes(t, storage_dtype(recipe, opened)) for t in _stored_once(opened).values())
    shapes = layer_shapes(form) | layer_shapes(opened)

    def before(count: int, name: str) -> Scheme | None:
        mine = [(where, step) for where, step, names in steps[:count] if name in names]
        return planned_scheme(mine, name, shapes[name], opened.dtype, "off")

    footprint = Footprint(recipe, opened, steps, shapes, before)
    return replace(planned, dense_bytes=dense, memory_bytes=footprint.peak_bytes())


def plan_on(recipe: Recipe, steps: Sequence[Step], form: OpenModel) -> Plan:
    """The plan of what is written of a model that has its last shape; dense_bytes: of the model in that shape."""
    format_, storage = FORMATS[recipe.save.format], storage_dtype(recipe, form)
    shapes, layers = layer_shapes(form), []
    chosen = [(where, step, set(names)) for where, step, names in steps]
    for name, shape in shapes.items():
        mine = [(where, step) for where, step, names in chosen if name in names]
        policy = recipe.save.sparse if format_.sparse else "off"
        scheme = planned_scheme(mine, name, shape, storage, policy)
        size = layer_bytes(scheme, shape, format_, storage)
        layers.append(LayerPlan(name, shape, tuple(where for where, _ in mine), scheme, size))
    weights = sum(layer.size_bytes for layer in layers)
    inside = {f"{name}.weight" for name in shapes}
    rest = sum(_bytes(t, storage) for name, t in _stored_once(form).items() if name not in inside)
    dense = rest + sum(rows * width for rows, width in shapes.values()) * storage.itemsize
    scales = sum(
        sum(step.cache.static) * len(holding(form.model, names)) for _, step, names in steps if step.cache is not None
    )
    return Plan(tuple(layers), weights + rest + scales * storage.itemsize, dense, 0, tuple(form.notes))


def _stored_once(opened: OpenModel) -> dict[str, Tensor]:
    """All tensors of a dense checkpoint of the model."""
    found = outside_state(opened)
    for block in opened.blocks:
        found |= {f"{block.name}.{name}": tensor for name, tensor in block.module.state_dict().items()}
    return found


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
