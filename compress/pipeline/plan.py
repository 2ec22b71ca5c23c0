"""Plan a recipe without computing: the passes of every module, the bytes to write and the peak memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from compress.checkpoint.containers.files import user_path
from compress.checkpoint.formats.base import Format
from compress.checkpoint.opened import OpenModel
from compress.checkpoint.opening import open_for_plan, open_model
from compress.checkpoint.save import check_together
from compress.checkpoint.sources.skeleton import read_config
from compress.errors import ShortageError
from compress.layers.names import kind_of
from compress.layers.scheme import LayerScheme
from compress.models.computation import device_of, kept_dtype
from compress.models.structure.blocks import Block
from compress.models.structure.ends import find_ends
from compress.passes.contract.limits import size_of
from compress.passes.contract.memory import available_bytes
from compress.passes.contract.problems import Problems
from compress.pipeline.checks import check_all
from compress.pipeline.dequantized import kept_codes
from compress.pipeline.fitting import (
    LIBRARIES_BYTES,
    Fit,
    check_available,
    check_verification,
    fitted,
    unlimited,
    verification_bytes,
    verification_notes,
)
from compress.pipeline.footprint import Footprint
from compress.pipeline.formats import further_formats
from compress.pipeline.model_facts import ModelFacts, facts_of, planned_policies, planned_scheme
from compress.pipeline.notes import size_notes
from compress.pipeline.output import check_folder, check_space
from compress.pipeline.rehearsal import rehearse
from compress.pipeline.resolve import (
    ResolvedRecipe,
    layer_shapes,
    resolve_and_check,
    schemes_of,
    update_targets,
    with_config,
)
from compress.pipeline.sizes import within_size
from compress.pipeline.stored_bytes import dense_weight_bytes, rest_bytes, rest_of, tensor_bytes
from compress.pipeline.timing import Timing, timing
from compress.recipe.schema import Recipe


@dataclass(frozen=True)
class LayerPlan:
    """One linear in a block, or one compressed end: shape (out, in), passes, final storage scheme, and stored bytes."""

    name: str
    shape: tuple[int, int]
    passes: tuple[str, ...]
    scheme: LayerScheme
    size_bytes: int


@dataclass(frozen=True)
class LayerGroup:
    """Linears of one kind: equal shape, passes and scheme, and names that differ only in numbers, which become '*'.

    size_bytes: of all of them.
    """

    name: str
    shape: tuple[int, int]
    passes: tuple[str, ...]
    scheme: LayerScheme
    count: int
    size_bytes: int


@dataclass(frozen=True)
class Plan:
    """The plan of all layers.

    checkpoint_bytes: bytes of all tensors of the checkpoint. dense_bytes: of the dense model in the storage dtype.
    memory_bytes: estimated peak memory of tensors in the process, without libraries and mapped files. process_bytes:
    the same in each of several processes of a launcher, which all work if a pass trains; None: only the first works.
    fit: the memory of each part of the run, and what it does to stay within its limit. formats: bytes of all tensors of
    the checkpoint in each further format.
    notes: those of the opened model, then what is stored otherwise than the recipe seems to say, and pruning that
    saves no bytes. timing: the predicted time; None: not measured on this machine yet. fingerprint: digest of the
    model's files. verification_bytes: memory in which transformers reads the checkpoint back; 0 if it does not.
    target_bytes: the size of the complete checkpoint that the recipe asks for; the run divides the bits within it, and
    `checkpoint_bytes` counts layers that are all alike. None: it asks for none.
    """

    layers: tuple[LayerPlan, ...]
    checkpoint_bytes: int
    dense_bytes: int
    memory_bytes: int
    notes: tuple[str, ...] = ()
    process_bytes: int | None = None
    timing: Timing | None = None
    fit: Fit | None = None
    formats: Mapping[str, int] = field(default_factory=dict)
    fingerprint: str = ""
    verification_bytes: int = 0
    target_bytes: int | None = None

    @property
    def written_bytes(self) -> int:
        """Bytes of all tensors of the checkpoint in all formats."""
        return self.checkpoint_bytes + sum(self.formats.values())

    def groups(self) -> list[LayerGroup]:
        """Return the layers by kind, in the order of the model."""
        layers_by_kind: dict[tuple[str, LayerPlan], list[LayerPlan]] = {}
        for layer in self.layers:
            name = kind_of(layer.name)
            layers_by_kind.setdefault((name, replace(layer, name="", size_bytes=0)), []).append(layer)
        return [
            LayerGroup(
                name, kind.shape, kind.passes, kind.scheme, len(layers), sum(layer.size_bytes for layer in layers)
            )
            for (name, kind), layers in layers_by_kind.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values: every layer, bytes of the checkpoint and of the dense model, peak memory and notes."""
        layers = [
            {
                "name": layer.name,
                "shape": list(layer.shape),
                "passes": list(layer.passes),
                "stored_as": layer.scheme.text,
                "bytes": layer.size_bytes,
            }
            for layer in self.layers
        ]
        names = ("checkpoint_bytes", "dense_bytes", "memory_bytes", "process_bytes")
        sizes = {name: getattr(self, name) for name in names}
        time = None if self.timing is None else self.timing.to_json()
        needs = () if self.fit is None else self.fit.needs
        memory = [{"where": need.where, "bytes": need.size_bytes, "parts": need.parts} for need in needs]
        sizes["target_bytes"] = self.target_bytes
        values = {"memory": memory, "notes": list(self.notes), "time": time, "formats": dict(self.formats)}
        return {"layers": layers, **sizes, **values}


def plan(
    recipe: Recipe | str | Path, out: str | Path | None = None, time: bool = False, memory: str | int | None = None
) -> Plan:
    """Open the model without reading its weights, and plan `run`. Raises the errors of `run` that need no weights.

    The configuration and the tokenizer of the model suffice. Of a model of the hub, no weights are fetched, unless it
    is compressed, or `time` is asked for.

    recipe: a recipe, or the path of its YAML file. out: the output folder of the run, to check it too; nothing is
    written there. time: run the passes on one block, if no earlier plan has, to predict the time; otherwise the plan
    has a time only where one is known. memory: as of `run`; without it, a run that the memory of this machine is too
    small for is a note.
    """
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.from_yaml(recipe)
    device = device_of(recipe.device)
    folder = None if out is None else user_path(out)
    if folder is not None:
        check_folder(folder)
    options = recipe.trust_remote_code, recipe.masks, kept_codes(recipe)
    if time:
        opened = open_model(recipe.model, recipe.dtype, device, *options)
    else:
        opened = open_for_plan(recipe.model, recipe.dtype, *options)
    resolved = within_size(resolve_and_check(recipe, opened))
    planned = plan_of(resolved, None if memory is None else size_of(memory))
    if folder is not None:
        check_space(folder, planned.written_bytes)
    notes = (*planned.notes, *rehearse(resolved))
    return replace(planned, notes=notes, timing=timing(resolved, time))


def plan_of(resolved: ResolvedRecipe, memory_bytes: int | None = None, strict: bool = False) -> Plan:
    """Plan a resolved recipe.

    memory_bytes: the limit of memory of the process. strict: a run that the machine is too small for is an error.
    Raises the errors of `check_all`.
    """
    opened, steps, form = resolved.opened, resolved.steps, resolved.form
    facts = facts_of(resolved)
    problems = Problems()
    planned = problems.attempt(plan_on, resolved, facts)
    check_notes = problems.attempt(check_all, resolved, facts)
    problems.check()
    assert planned is not None and check_notes is not None
    notes = (*form.notes, *check_notes)
    if form is opened:
        dense = planned.dense_bytes
    else:
        inside = {name: shape for name, shape in layer_shapes(opened).items() if name in opened.linear_names()}
        dense = rest_bytes(opened, resolved.storage) + dense_weight_bytes(inside, resolved.storage)
    footprint = footprint_of(resolved)
    trains = any(step.requires.training for _, step, _ in steps)
    process_bytes = replace(footprint, several=True).peak_bytes() if trains else None
    plans = {other.format.name: plan_on(other, layers) for other, layers in further_formats(resolved, facts)}
    planned = replace(
        planned,
        dense_bytes=dense,
        notes=(*notes, *size_notes(resolved, planned.checkpoint_bytes, dense)),
        process_bytes=process_bytes,
        formats={name: other.checkpoint_bytes for name, other in plans.items()},
        fingerprint=opened.fingerprint,
        target_bytes=resolved.target_bytes,
    )
    return _within(planned, footprint, memory_bytes, strict)


def footprint_of(resolved: ResolvedRecipe) -> Footprint:
    """Return the estimate of the memory of a resolved recipe."""
    starts = schemes_of(resolved.form) | schemes_of(resolved.opened)
    steps = [(label, step, frozenset(names)) for label, step, names in resolved.steps]

    def before(count: int, name: str) -> LayerScheme:
        mine = [(label, step) for label, step, names in steps[:count] if name in names]
        return planned_scheme(mine, name, starts[name], resolved.opened.dtype, "off")

    return Footprint(resolved, before)


def _within(planned: Plan, footprint: Footprint, memory_bytes: int | None, strict: bool) -> Plan:
    """The plan with its memory. Raises ShortageError where it exceeds a limit."""
    opened = footprint.opened
    wider = max(1, opened.dtype.itemsize // footprint.resolved.storage.itemsize)
    reading = footprint.resolved, planned.dense_bytes * wider, planned.checkpoint_bytes
    if memory_bytes is not None:
        fit = fitted(footprint, memory_bytes)
        check_verification(*reading, memory_bytes - LIBRARIES_BYTES)
    else:
        fit, available = unlimited(footprint), available_bytes(opened.device)
        try:
            fit = check_available(footprint, available)
        except ShortageError as error:
            if strict and opened.device.type == "cpu":  # on a GPU, not all that is counted is in its memory
                raise
            too_small = f"this machine is too small for the run: {error}"
            planned = replace(planned, notes=(*planned.notes, too_small))
        planned = replace(planned, notes=(*planned.notes, *verification_notes(*reading, available)))
    planned = replace(planned, verification_bytes=verification_bytes(*reading))
    return replace(planned, memory_bytes=fit.peak_bytes, fit=fit, notes=(*planned.notes, *fit.notes))


def plan_on(resolved: ResolvedRecipe, facts: ModelFacts) -> Plan:
    """Return the plan of the checkpoint of a model in its final shape; dense_bytes counts the model in that shape."""
    form, storage, format_ = resolved.form, resolved.storage, resolved.format
    ends = [end for end in find_ends(form.model) if end.name in facts]
    layers = [LayerPlan(name, f.scheme.shape, f.passes, f.scheme, f.size_bytes) for name, f in facts.items()]
    check_together(format_, {name: f.scheme for name, f in facts.items()})
    other_bytes = rest_bytes(form, storage, ends, format_)
    dense = rest_bytes(form, storage, ends) + dense_weight_bytes({n: f.scheme.shape for n, f in facts.items()}, storage)
    policies = planned_policies(resolved).values()
    cache_bytes = sum(spec.size_bytes(storage) for policy in policies for spec in policy.tensors().values())
    copied_bytes = form.undeclared_bytes if format_.file is None else 0
    size = sum(layer.size_bytes for layer in layers) + other_bytes + cache_bytes + copied_bytes
    return Plan(tuple(layers), size, dense + copied_bytes, 0)


def final_plan(resolved: ResolvedRecipe, planned: Plan, folder: Path) -> tuple[OpenModel, Plan]:
    """Return the model and the plan of its layers in the shape of the checkpoint in `folder`.

    Both are the given ones unless a pass changes the shape of the model.
    """
    last_reshape = max((i for i, (_, step, _) in enumerate(resolved.steps) if step.requires.new_shape), default=None)
    if last_reshape is None:
        return resolved.opened, planned
    config = read_config(folder, str(folder), resolved.recipe.trust_remote_code)
    vars(config).pop("quantization_config", None)
    form = with_config(resolved.opened, config)
    update_targets(resolved.steps, form, resolved.format, last_reshape + 1)
    resolved = replace(resolved, form=form)
    final = plan_on(resolved, facts_of(resolved))
    return form, replace(final, dense_bytes=planned.dense_bytes, memory_bytes=planned.memory_bytes)


def block_bytes(resolved: ResolvedRecipe, facts: ModelFacts, block: Block) -> tuple[int, int]:
    """Return the bytes of a block's tensors in the checkpoint, and of the dense block in the storage dtype."""
    form, storage, format_ = resolved.form, resolved.storage, resolved.format
    inside = {name: f for name, f in facts.items() if name.startswith(f"{block.name}.")}
    other_tensors = rest_of(block)
    stored = sum(
        tensor_bytes(t, format_.stored_dtype(t.shape, kept_dtype(form.model, name, storage)))
        for name, t in other_tensors.items()
    )
    dense = sum(tensor_bytes(t, kept_dtype(form.model, name, storage)) for name, t in other_tensors.items())
    packed = sum(f.size_bytes for f in inside.values())
    return stored + packed, dense + dense_weight_bytes({name: f.scheme.shape for name, f in inside.items()}, storage)


def update_plan(planned: Plan, schemes: Mapping[str, LayerScheme], format_: Format, storage: torch.dtype) -> Plan:
    """The plan with the actual final schemes of layers; some are unknown before calibration."""
    layers = []
    for layer in planned.layers:
        scheme = schemes.get(layer.name)
        if scheme is None and not layer.scheme.quantized:  # stored dense
            scheme = LayerScheme(layer.shape)
        if scheme is not None and scheme != layer.scheme:
            layer = replace(layer, scheme=scheme, size_bytes=format_.size_bytes(scheme, storage))
        layers.append(layer)
    change = sum(new.size_bytes - old.size_bytes for new, old in zip(layers, planned.layers, strict=True))
    return replace(planned, layers=tuple(layers), checkpoint_bytes=planned.checkpoint_bytes + change)
