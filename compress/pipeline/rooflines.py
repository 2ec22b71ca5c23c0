"""The roofline of a model, of a compressed checkpoint, or of a recipe before its run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from compress.checkpoint.inference import (
    allow_narrow_inputs,
    keeps_narrow,
    narrow_weights,
    put_narrow,
    share_inputs,
)
from compress.checkpoint.opened import OpenModel
from compress.checkpoint.opening import open_for_plan
from compress.errors import ModelError, RecipeError
from compress.layers.linear import linears, renew_linear
from compress.layers.scheme import LayerScheme
from compress.models.caches.attentions import cache_policies
from compress.models.computation import inference_dtype
from compress.models.experts import open_experts
from compress.models.kinds.contract import text_config
from compress.models.kinds.kinds import described
from compress.models.quiet import BUILDING
from compress.models.reshape.reconfigure import with_blocks
from compress.models.structure.blocks import has_two_stacks
from compress.pipeline.model_facts import facts_of, planned_policies
from compress.pipeline.plan import plan_on
from compress.pipeline.resolve import resolve, schemes_of
from compress.recipe.schema import Recipe
from compress.roofline.devices import HERE, Device, read_device
from compress.roofline.estimate import PassCost, StoredWeight, estimate
from compress.roofline.host import measured_host, with_calls
from compress.roofline.trace import check_length, trace

BLOCKS = 4  # blocks of the larger of the two models that measure this machine
CONTEXT = 128  # most tokens of their prompts
FILLED = 0.01
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Side:
    """One state of a model.

    weight_bytes: of all its tensors. decode: None for a model that decodes no tokens. call_seconds: time that every
    call of the framework takes besides its operations and bytes.
    """

    weight_bytes: int
    cache_bytes: int
    prefill: PassCost
    decode: PassCost | None
    call_seconds: float

    @property
    def memory_bytes(self) -> int:
        """Weights and cache, without activations."""
        return self.weight_bytes + self.cache_bytes


@dataclass(frozen=True)
class Roofline:
    """The least latencies of a model on a device. after: None if nothing is compressed.

    device: 'here' with the figures of the state before. context: tokens of the prompt of each of `batch` sequences; the
    decoded token follows them. simulated: policies of the KV cache that save no memory here; its bytes are those of an
    exact cache.
    """

    device: Device
    batch: int
    context: int
    before: Side
    after: Side | None
    simulated: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def roofline(subject: str | Path | Recipe, on: str = "A100-80GB", batch: int = 1, context: int = 2048) -> Roofline:
    """Estimate prefill and decoding of a model, a checkpoint's folder, or a recipe, without reading weights.

    on: the device, as `read_device` takes it, or 'here': measured. Raises RecipeError, ModelError, TargetError.
    """
    if batch < 1 or context < 1:
        raise RecipeError(f"batch {batch}, context {context}: must be at least 1")
    device = None if on == HERE else read_device(on)
    schemes: Mapping[str, LayerScheme]
    if isinstance(subject, Recipe):
        opened = open_for_plan(subject.model, subject.dtype, subject.trust_remote_code)
        resolved = resolve(subject, opened)
        form, planned = resolved.form, plan_on(resolved, facts_of(resolved))
        schemes = {p.name: p.scheme for p in planned.layers if not p.scheme.plain}
        stored = {p.name: StoredWeight.of(p.scheme, p.size_bytes) for p in planned.layers if p.name in schemes}
        policies = cache_policies(form.model) | planned_policies(resolved)
    else:
        opened = form = open_for_plan(str(subject), codes=True)
        schemes, stored = _stored(opened)
        policies = cache_policies(opened.model)
    if has_two_stacks(opened.model):
        raise ModelError(f"model: {described(opened.model)}; the roofline is that of a decoder alone")
    check_length(text_config(opened.config), context)
    states = [State(opened, {}, {})] + [State(form, schemes, stored)] * bool(stored or form is not opened)
    sides, measured = [], cache(measured_host)  # of each dtype once
    for state in states:
        dtype = opened.storage if device is not None else state.dtype
        machine = device or calibrated(state, measured(dtype), batch, context)
        sides.append((machine, _side(state, dtype, machine, batch, context)))
    simulated = sorted({policy.text for policy in policies.values() if policy.simulated})
    return Roofline(
        sides[0][0], batch, context, sides[0][1], sides[1][1] if sides[1:] else None, simulated=tuple(simulated)
    )


@dataclass(frozen=True)
class State:
    """A model before or after compression. schemes, stored: of its packed layers by name."""

    opened: OpenModel
    schemes: Mapping[str, LayerScheme]
    stored: Mapping[str, StoredWeight]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation by `compress.load` on this machine."""
        return inference_dtype(self.opened.dtype, CPU) if self.schemes else self.opened.dtype

    @property
    def narrow(self) -> bool:
        """Whether `compress.load` keeps dense weights in bfloat16 although it computes in float32."""
        return bool(self.schemes) and self.opened.storage is torch.bfloat16 and keeps_narrow(self.dtype, CPU)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a dense weight in memory."""
        return torch.bfloat16.itemsize if self.narrow else self.dtype.itemsize


def calibrated(state: State, machine: Device, batch: int, context: int) -> Device:
    """Return this machine with the time of a call, measured on some blocks of the model that get arbitrary weights.

    machine: as `measured_host` measures it.
    """
    opened, dtype = state.opened, state.dtype
    count = len(opened.blocks)
    block_lists = [list(range(min(count, number))) for number in (1, BLOCKS)]
    if len(block_lists[0]) == len(block_lists[1]):
        return machine
    try:
        models = [_filled(state, indices) for indices in block_lists]
    except ModelError:  # blocks that depend on each other
        return machine
    length = min(context, CONTEXT)
    steps = [trace(_sketched(opened, model.config, dtype), batch, length)[1] for model in models]
    traces = [step for step in steps if step is not None]
    if len(traces) < len(models):
        return machine
    return with_calls(machine, models, traces, batch, length, state.stored, state.itemsize)


def _filled(state: State, indices: list[int]) -> PreTrainedModel:
    """Return a model of these blocks in memory as `compress.load` makes it; all dense weights are one small number."""
    opened, dtype = state.opened, state.dtype
    with BUILDING, no_init_weights():
        config = with_blocks(_sketched(opened, opened.config, dtype), indices)
        model = type(opened.model)._from_config(config, dtype=dtype)
    for parameter in model.parameters():
        parameter.data.fill_(FILLED)
    open_experts(model)
    for name in linears(model):
        if name in state.schemes:
            _put_zeros(model, name, state.schemes[name], opened.storage)
    if state.narrow:
        names = narrow_weights(model, dict(model.named_parameters()))
        put_narrow(model, {name: model.get_parameter(name).to(torch.bfloat16) for name in names})
        allow_narrow_inputs(model)
    share_inputs(model)
    return model.eval().requires_grad_(False)


def _put_zeros(model: PreTrainedModel, name: str, scheme: LayerScheme, storage: torch.dtype) -> None:
    """Make a linear a packed layer of zeros with scales of 1; it stays dense where zeros describe no weight (masks)."""
    tensors = {n: torch.zeros(spec.shape, dtype=spec.dtype or storage) for n, spec in scheme.tensors().items()}
    for scales in (tensor for tensor in tensors.values() if tensor.is_floating_point()):
        scales.fill_(1)
    with suppress(ValueError):
        parts, transforms = scheme.read(tensors)
        renew_linear(model, name).read(parts, transforms)


def _stored(opened: OpenModel) -> tuple[dict[str, LayerScheme], dict[str, StoredWeight]]:
    """The packed weights of an open checkpoint."""
    checkpoint = opened.weights.checkpoint
    if checkpoint is None or (format_ := checkpoint.format) is None:
        return {}, {}
    schemes = {name: scheme for name, scheme in schemes_of(opened).items() if not scheme.plain}
    return schemes, {n: StoredWeight.of(s, format_.size_bytes(s, opened.storage)) for n, s in schemes.items()}


def _side(state: State, dtype: torch.dtype, device: Device, batch: int, context: int) -> Side:
    model = _sketched(state.opened, state.opened.config, dtype)
    prefill, decode = trace(model, batch, context)
    shapes = {name: p.numel() for name, p in model.named_parameters()}  # a tied weight stands once
    dense = sum(count for name, count in shapes.items() if name.removesuffix(".weight") not in state.stored)
    packed = sum(weight.size_bytes for weight in state.stored.values())
    itemsize = state.itemsize if device.name == HERE else dtype.itemsize
    return Side(
        dense * itemsize + packed,
        prefill.cached * dtype.itemsize,
        estimate(prefill, state.stored, itemsize, device),
        None if decode is None else estimate(decode, state.stored, itemsize, device),
        device.call_seconds,
    )


def _sketched(opened: OpenModel, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a configuration on device meta, in evaluation mode."""
    with BUILDING, torch.device("meta"):
        model = type(opened.model)(config)
    model.tie_weights()
    open_experts(model)
    getattr(model, "to")(dtype)  # noqa: B009  its declaration lacks the dtype
    return model.eval()
