"""Verification: reload the checkpoint and compare it with the computed model.

The tensors of compressed layers are compared bit for bit, by their digests and by the weights that transformers reads.
Logits show what digests do not: a wrong dense tensor, or a layer in another place. Equal tensors give almost equal
logits (`TOLERANCE`), but for quantized activations: a last bit that another processor or kernel computes differently
moves an input over the boundary between two codes, hence by a whole step, and later layers follow. Each input is within
half a step of its value in both models. So both are about as far from the model without activation quantization as the
reloaded one is measured to be, and at most twice as far from each other (`_rounding_effect`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.checkpoint.caches import stated_policy
from compress.checkpoint.checkpoint import Checkpoint
from compress.checkpoint.containers.files import tensor_file_bytes
from compress.checkpoint.formats.base import Format
from compress.checkpoint.load import load
from compress.errors import CannotRun, VerificationError, call_foreign
from compress.kernels.dispatch import plain_torch
from compress.layers.embedding import layer_of
from compress.layers.linear import CompressedLinear, linears
from compress.models.caches.attentions import cache_digests, cache_policies, copy_policy
from compress.models.experts import Expert, open_experts
from compress.models.forward import logits_of
from compress.models.kinds.batch import Batch
from compress.models.quiet import quiet_transformers
from compress.numerics.dtypes import dtype_name
from compress.passes.contract.context import Run
from compress.passes.contract.journal import Journal
from compress.passes.contract.memory import available_bytes
from compress.pipeline.readers import OWN, not_asked, unreadable
from compress.recipe.schema import Recipe
from compress.recipe.tables import megabytes

TOLERANCE = 1e-3  # relative to the largest logit; equal arithmetic gives 0, a wrong scale or zero point far more
ROUNDED_TOLERANCE = 0.1  # for a reader that rounds weights to 16 bits; the rounded weights are compared bit for bit


@dataclass(frozen=True)
class Verified:
    """The result of a verification.

    layers: number of compressed layers whose codes or kept weights are equal after reloading. own, transformers: the
    largest absolute difference of logits from the computed model; None if not checked. skipped: the reason, or None.
    """

    layers: int
    own: float
    transformers: float | None
    skipped: str | None


@plain_torch()
def verify(
    recipe: Recipe,
    dtype: torch.dtype,
    folder: Path,
    digests: Mapping[str, str],
    reference: Mapping[str, Tensor],
    run: Run,
    caches: Mapping[str, str] | None = None,
) -> tuple[Verified, PreTrainedModel]:
    """Reload with compress.load and, unless the recipe or the format says otherwise, with transformers alone.

    digests: sha256 of every layer's codes. reference: a `Batch`, and 'logits' of the computed model for them. caches:
    `cache_sha256` of every attention module with a cache policy.

    Where transformers cannot be asked, the journal and the result say why.

    Raises VerificationError, which names the layer or the reader with the difference.
    """
    model, _ = load(folder, dtype_name(dtype), run.device, recipe.trust_remote_code)
    for name, digest in digests.items():
        if layer_of(model.get_submodule(name)).sha256() != digest:
            raise VerificationError(f"{folder}: the codes of {name} differ from the computed ones after reloading")
    if differing := cache_digests(model).items() ^ (caches or {}).items():
        raise VerificationError(f"{folder}: the cache policy of {min(differing)[0]} differs after reloading")
    batch = Batch.of_tensors(reference)
    logits = logits_of(model, batch).cpu()
    effect = _rounding_effect(model, batch, logits)
    difference = _compare("compress.load", logits, reference["logits"], folder, TOLERANCE, effect)
    format_ = recipe.save.target()
    skipped = _unverifiable(recipe, model, folder, dtype, run.device)
    if skipped is not None:
        run.journal.add("note", "verify", f"not reloaded with transformers: {skipped}")
        return Verified(len(digests), difference, None, skipped), model
    kinds = _other_dtypes(model, format_, dtype)
    if kinds:
        names = " and ".join(sorted(map(dtype_name, kinds)))
        run.journal.add(
            "note", "verify", f"transformers dequantizes these weights in {names}, so its outputs differ slightly"
        )
    reloaded = _reload(recipe, model, folder, dtype, run)
    logits = logits_of(reloaded, batch).cpu()
    open_experts(reloaded)
    for name in digests:
        with _dequantized(reloaded.get_submodule(name)):
            _same_weight(name, model.get_submodule(name), reloaded.get_submodule(name), dtype, folder, format_)
    del reloaded
    gc.collect()  # the model contains reference cycles
    try:
        theirs = _compare("transformers", logits, reference["logits"], folder, tolerance_of(dtype, kinds), effect)
    except VerificationError:
        if dtype.itemsize >= torch.float32.itemsize:
            raise
        skipped = _unverifiable(recipe, model, folder, torch.float32, run.device)
        if skipped is not None:
            message = f"outputs in {dtype_name(dtype)} differ by more than equal sums do; not compared in float32"
            run.journal.add("warning", "verify", f"{message}: {skipped}")
            return Verified(len(digests), difference, None, skipped), model
        theirs = _compare_in_float32(recipe, folder, batch, run)
    return Verified(len(digests), difference, theirs, None), model


def _unverifiable(
    recipe: Recipe, model: PreTrainedModel, folder: Path, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why transformers is not asked about the checkpoint in a dtype, or cannot read it; None if it can."""
    format_ = recipe.save.target()
    reason = not_asked(recipe, model.config)
    if reason is not None:
        return reason
    schemes = {name: CompressedLinear.of(layer).scheme for name, layer in linears(model).items()}
    stated = stated_policy(model, cache_policies(model), format_) is not None
    own_classes = Checkpoint.open(folder, trust_remote_code=recipe.trust_remote_code).skeleton()
    return unreadable(format_, own_classes, schemes, dtype, stated) or _no_memory(model, dtype, folder, device)


def _other_dtypes(model: nn.Module, format_: Format, dtype: torch.dtype) -> set[torch.dtype]:
    """The dtypes other than that of the model in which transformers dequantizes its layers."""
    experts = {id(layer) for expert in model.modules() if isinstance(expert, Expert) for layer in expert.modules()}
    return {
        (format_.reads_experts_in if id(layer) in experts else format_.reads_in)(
            layer.scheme, dtype, layer.all_parts[0].dtype
        )
        for layer in _compressed_layers(model)
    } - {dtype}


def tolerance_of(dtype: torch.dtype, other_dtypes: set[torch.dtype]) -> float:
    """The largest difference of logits that is no reason to look closer, relative to the largest logit."""
    return ROUNDED_TOLERANCE if other_dtypes else max(TOLERANCE, torch.finfo(dtype).eps)


def _reload(recipe: Recipe, model: PreTrainedModel, folder: Path, dtype: torch.dtype, run: Run) -> nn.Module:
    """Load the checkpoint with transformers, ready to be compared. Raises VerificationError if it cannot."""
    try:
        reloaded = transformers_model(type(model), folder, dtype, recipe.trust_remote_code, recipe.save.target())
    except CannotRun as error:
        reason = f"transformers cannot load the checkpoint: {error.cause}"
        raise VerificationError(f"{folder}: {reason}{_without_transformers()}") from error
    reloaded = runnable(reloaded, dtype, run.device, run.journal)
    _copy_cache_policies(model, reloaded, run)
    return reloaded


def _compare_in_float32(recipe: Recipe, folder: Path, batch: Batch, run: Run) -> float:
    """Return the largest difference of logits between both readers in float32.

    In 16 bits, sums in another order round otherwise, and a router that is undecided between two experts takes the
    other one, so that large differences prove nothing.

    Raises:
        VerificationError: if it exceeds the tolerance.
    """
    model, _ = load(folder, "float32", run.device, recipe.trust_remote_code)
    expected = logits_of(model, batch).cpu()
    effect = _rounding_effect(model, batch, expected)
    tolerance = tolerance_of(torch.float32, _other_dtypes(model, recipe.save.target(), torch.float32))
    logits = logits_of(_reload(recipe, model, folder, torch.float32, run), batch).cpu()
    return _compare("transformers", logits, expected, folder, tolerance, effect)


def check_size(folder: Path, written_bytes: int, planned_bytes: int) -> None:
    """Raise VerificationError when the bytes of the checkpoint's tensors differ from the plan."""
    if written_bytes != planned_bytes:
        raise VerificationError(
            f"{folder}: holds {written_bytes} bytes of tensors, but the plan predicted {planned_bytes}"
        )


def _rounding_effect(model: nn.Module, batch: Batch, logits: Tensor) -> float:
    """The largest change of logits by activation quantization; 0 without any. logits: those of the model."""
    roundings = {m: m.rounding for m in model.modules() if isinstance(m, CompressedLinear) and m.rounding is not None}
    if not roundings:
        return 0.0
    try:
        for layer in roundings:
            layer.round_inputs(None)
        return float((logits_of(model, batch).cpu() - logits).abs().max())
    finally:
        for layer, rounding in roundings.items():
            layer.round_inputs(rounding)


def _copy_cache_policies(model: nn.Module, reloaded: nn.Module, run: Run) -> None:
    """Copy the cache policies that transformers does not read from the checkpoint to `reloaded`, which it loaded."""
    names = [name for name in cache_policies(model) if not hasattr(reloaded.get_submodule(name), "quantization_scheme")]
    for name in names:
        copy_policy(model.get_submodule(name), reloaded.get_submodule(name))
    if names:
        message = "transformers does not read this cache policy, so it was installed for the comparison"
        run.journal.add("note", "verify", message, attentions=len(names))


def runnable(model: nn.Module, dtype: torch.dtype, device: torch.device, journal: Journal) -> nn.Module:
    """Prepare a model that transformers loaded in `dtype` for a comparison; packed layers stay packed."""
    model = model.to(device)
    _cast_dequantized(model, dtype, journal)
    _dequantize_on_demand(model)
    return model


def _cast_dequantized(model: nn.Module, dtype: torch.dtype, journal: Journal) -> None:
    """Cast weights that are dequantized in another dtype than that of the model.

    transformers 5.17 and 5.18 leave 4-bit floats in bfloat16, so that a float32 model cannot multiply by them.
    """
    mismatched = [
        layer
        for layer in model.modules()
        if hasattr(layer, "quantization_status") and not _is_packed(layer) and not any(layer.children())
        if layer.weight.dtype != dtype
    ]
    for layer in mismatched:
        weight = nn.Parameter(layer.get_parameter("weight").detach().to(dtype), requires_grad=False)
        del layer.weight  # compressed-tensors would copy into it, in its dtype
        layer.weight = weight
    if mismatched:
        message = "this version of transformers runs these weights in their own dtype only: cast for the comparison"
        journal.add("note", "verify", message, layers=len(mismatched))


def _dequantize_on_demand(model: nn.Module) -> None:
    """Make compressed-tensors dequantize each layer while it runs, not the whole model in the first forward pass."""
    hook = getattr(model, "ct_decompress_hook", None)
    if hook is None:
        return  # dequantized already, or not quantized
    hook.remove()
    for layer in model.modules():
        if _is_packed(layer):
            _dense_while_it_runs(layer)


def _dense_while_it_runs(layer: nn.Module) -> None:
    """Dequantize a packed layer before each forward pass, and free the dense weight afterwards."""
    dense = ExitStack()

    def begin(module: nn.Module, args: Any) -> None:
        dense.enter_context(_dequantized(module))

    def end(module: nn.Module, args: Any, output: Any) -> None:
        dense.close()

    layer.register_forward_pre_hook(begin)
    layer.register_forward_hook(end)


def _is_packed(layer: nn.Module) -> bool:
    """Whether compressed-tensors holds this layer packed; attentions with this status quantize their cache."""
    return getattr(layer, "quantization_status", None) == "compressed" and not any(layer.children())


@contextmanager
def _dequantized(layer: nn.Module) -> Iterator[None]:
    """Dequantize a layer with compressed-tensors inside of the context; a dense layer does not change."""
    if not _is_packed(layer):
        yield
        return
    from compressed_tensors.compressors import (
        decompress_module,
    )  # optional dependency; installed if transformers used it

    packed = layer._parameters, layer._buffers, layer.quantization_status
    layer._parameters, layer._buffers = dict(packed[0]), dict(packed[1])
    try:
        decompress_module(layer)
        yield
    finally:
        layer._parameters, layer._buffers, layer.quantization_status = packed


def _compressed_layers(model: nn.Module) -> list[CompressedLinear]:
    """The layers that are not stored as one dense weight."""
    return [m for m in model.modules() if isinstance(m, CompressedLinear) and not m.scheme.plain]


def _no_memory(model: nn.Module, dtype: torch.dtype, folder: Path, device: torch.device) -> str | None:
    """Return why the memory is too small for transformers, which dequantizes all weights; None if it fits."""
    layers = [m for m in model.modules() if isinstance(m, CompressedLinear)]
    inside = {id(tensor) for layer in layers for tensor in layer.state_dict(keep_vars=True).values()}
    dense_sizes = {id(t): t.numel() for t in model.state_dict(keep_vars=True).values() if id(t) not in inside}
    weights = sum(dense_sizes.values()) + sum(layer.shape[0] * layer.shape[1] for layer in layers)
    needed = weights * dtype.itemsize + tensor_file_bytes(folder)
    free = available_bytes(device)
    if needed <= free:
        return None
    needed_mb, free_mb = megabytes(needed), megabytes(free)
    return f"the dense model with its checkpoint takes {needed_mb} MB of memory, {free_mb} MB are available"


def transformers_model(
    model_class: type[PreTrainedModel], folder: Path, dtype: torch.dtype, remote: bool, format_: Format | None
) -> nn.Module:
    """Load a checkpoint with transformers.

    Args:
        format_: format of the checkpoint; None for a dense one.

    Raises:
        CannotRun: if transformers cannot load it.
    """
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": remote}
    if format_ is not None:
        options |= format_.loading | ({} if format_.file is None else {"gguf_file": format_.file})
    with quiet_transformers():
        model = call_foreign(model_class.from_pretrained, folder, **options).eval()
    for parameter in model.parameters() if format_ is not None and format_.loading else ():
        if parameter.dtype.itemsize < dtype.itemsize:  # those that it does not dequantize stay in their stored dtype
            parameter.data = parameter.data.to(dtype)
    return model


def _compare(reader: str, logits: Tensor, reference: Tensor, folder: Path, tolerance: float, effect: float) -> float:
    """Return the largest absolute difference of logits.

    Raises VerificationError when it exceeds the tolerance, relative to the largest logit, and twice the effect of
    activation quantization.
    """
    expected = reference.float()
    difference = float((logits - expected).abs().max())
    if not difference <= tolerance * max(float(expected.abs().max()), 1.0) + 2 * effect:
        raise VerificationError(
            f"{folder}: reloaded by {reader}, the model's outputs differ by up to {difference:.3g} from the computed "
            f"ones{_without_transformers(reader)}"
        )
    return difference


def _without_transformers(reader: str = "transformers") -> str:
    """What to do with a checkpoint that compress.load reads right; empty if it does not."""
    again = "the checkpoint is complete, so the next run with this option computes nothing again"
    return f"; {OWN}; {again}" if reader == "transformers" else ""


def _same_weight(name: str, ours: nn.Module, theirs: Any, dtype: torch.dtype, folder: Path, format_: Format) -> None:
    """Compare a dense weight bit for bit; readers dequantize in the dtype of loading, or in the stored dtype."""
    assert isinstance(ours, CompressedLinear)
    stored = ours.all_parts[0].dtype
    kinds = (format_.reads_in(ours.scheme, dtype, stored), stored)
    weights = (ours.weight_as(kind).to(theirs.weight.device, dtype) for kind in dict.fromkeys(kinds))
    if not any(torch.equal(theirs.weight, weight) for weight in weights):
        raise VerificationError(
            f"{folder}: transformers reads another weight for {name} than was computed{_without_transformers()}"
        )
