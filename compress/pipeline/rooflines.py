"""The roofline of a model, of a compressed checkpoint, or of a recipe before its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from compress.errors import ModelError, RecipeError
from compress.model.objective import text_config
from compress.model.open.experts import open_experts
from compress.model.open.opening import OpenModel
from compress.model.open.packed import Packed, open_input
from compress.model.reshape.reconfigure import with_blocks
from compress.pipeline.plan import plan_on
from compress.pipeline.resolve import resolve, schemes_of
from compress.recipe.schema import Recipe
from compress.roofline.devices import HERE, Device, read_device
from compress.roofline.estimate import Pass, Stored, estimate
from compress.roofline.here import here, with_calls
from compress.roofline.trace import check_length, trace

BLOCKS = 4  # blocks of the larger of the two models that measure this machine
CONTEXT = 128  # most tokens of their prompts
FILLED = 0.01


@dataclass(frozen=True)
class Side:
    """One state of a model. weight_bytes: of all its tensors. decode: None for a model that decodes no tokens."""

    weight_bytes: int
    cache_bytes: int
    prefill: Pass
    decode: Pass | None

    @property
    def memory_bytes(self) -> int:
        """Weights and cache, without activations."""
        return self.weight_bytes + self.cache_bytes


@dataclass(frozen=True)
class Roofline:
    """The least latencies of a model on a device. after: None if nothing is compressed.

    context: tokens of the prompt of each of `batch` sequences; the decoded token follows them.
    """

    device: Device
    batch: int
    context: int
    before: Side
    after: Side | None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def roofline(subject: str | Path | Recipe, on: str = "A100-80GB", batch: int = 1, context: int = 2048) -> Roofline:
    """Estimate prefill and decoding of a model, a checkpoint's folder, or a recipe, without reading weights.

    on: the device, as `read_device` takes it, or 'here': measured. Raises RecipeError, ModelError, TargetError.
    """
    if batch < 1 or context < 1:
        raise RecipeError(f"--batch {batch} --context {context}: must be at least 1")
    device = None if on == HERE else read_device(on)
    if isinstance(subject, Recipe):
        opened = open_input(subject.model, subject.dtype, trust_remote_code=subject.trust_remote_code)
        steps, form = resolve(subject.passes, opened, subject.save.target())
        planned = plan_on(subject, steps, form)
        stored = {p.name: Stored.of(p.scheme, p.size_bytes) for p in planned.layers if not p.scheme.plain}
    else:
        opened = form = open_input(str(subject), codes=True)
        stored = _stored(opened)
    check_length(text_config(opened.config), context)
    dtype = opened.dtype if device is None else opened.storage  # a program here computes in the dtype of `load`
    device = device or calibrated(opened, dtype, batch, context)
    before = _side(opened, {}, dtype, device, batch, context)
    if not stored and form is opened:
        return Roofline(device, batch, context, before, None)
    after = _side(form, stored, dtype, device, batch, context)
    return Roofline(device, batch, context, before, after)


def calibrated(opened: OpenModel, dtype: torch.dtype, batch: int, context: int) -> Device:
    """This machine, with the time of a call measured on some blocks of the model, which get random weights."""
    count = len(opened.blocks)
    some = [list(range(min(count, number))) for number in (1, BLOCKS)]
    if len(some[0]) == len(some[1]):
        return here(dtype)
    try:
        models = [_random(opened, kept, dtype) for kept in some]
    except ModelError:  # blocks that depend on each other
        return here(dtype)
    length = min(context, CONTEXT)
    steps = [trace(_sketched(opened, model.config, dtype), batch, length)[1] for model in models]
    traces = [step for step in steps if step is not None]
    return with_calls(here(dtype), models, traces, batch, length) if len(traces) == len(models) else here(dtype)


def _random(opened: OpenModel, kept: list[int], dtype: torch.dtype) -> PreTrainedModel:
    """A model of these blocks in memory, whose weights are all the same small number."""
    with no_init_weights():
        config = with_blocks(_sketched(opened, opened.config, dtype), kept)
        model = type(opened.model)._from_config(config, dtype=dtype)
    for parameter in model.parameters():
        parameter.data.fill_(FILLED)
    open_experts(model)
    return model.eval().requires_grad_(False)


def _stored(opened: OpenModel) -> dict[str, Stored]:
    """The packed weights of an open checkpoint."""
    weights = opened.weights
    if not isinstance(weights, Packed) or weights.format is None:
        return {}
    schemes = {name: scheme for name, scheme in schemes_of(opened).items() if not scheme.plain}
    return {n: Stored.of(s, weights.format.size_bytes(s, opened.storage)) for n, s in schemes.items()}


def _side(
    opened: OpenModel, stored: Mapping[str, Stored], dtype: torch.dtype, device: Device, batch: int, context: int
) -> Side:  # fmt: skip
    model = _sketched(opened, opened.config, dtype)
    prefill, decode = trace(model, batch, context)
    shapes = {name: p.numel() for name, p in model.named_parameters()}  # a tied weight stands once
    dense = sum(count for name, count in shapes.items() if name.removesuffix(".weight") not in stored)
    packed = sum(one.size_bytes for one in stored.values())
    itemsize = dtype.itemsize
    return Side(
        dense * itemsize + packed,
        prefill.cached * itemsize,
        estimate(prefill, stored, itemsize, device),
        None if decode is None else estimate(decode, stored, itemsize, device),
    )


def _sketched(opened: OpenModel, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a configuration on device meta, in evaluation mode."""
    with torch.device("meta"):
        model = type(opened.model)(config)
    model.tie_weights()
    open_experts(model)
    getattr(model, "to")(dtype)  # noqa: B009  its declaration lacks the dtype
    return model.eval()
