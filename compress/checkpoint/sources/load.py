"""Load a compressed checkpoint: the stock model with its compressed layers as CompressedLinear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.checkpoint.caches import install_policies, read_policies
from compress.checkpoint.containers.digests import verify_digests
from compress.checkpoint.formats import FORMATS
from compress.checkpoint.formats.base import Format
from compress.checkpoint.save import masked_in, state_masks
from compress.checkpoint.saving import guard_saving
from compress.checkpoint.sources import opening as opening
from compress.checkpoint.sources.gguf_codes import checkpoint_of
from compress.checkpoint.sources.inference import (
    allow_narrow_inputs,
    keeps_narrow,
    narrow_weights,
    put_narrow,
    round_activations,
    share_inputs,
)
from compress.checkpoint.sources.limits import limited_modules
from compress.checkpoint.sources.stored import by_owner, stored_shapes, stored_tensors
from compress.checkpoint.sources.untrusted import check_folder
from compress.decode import accelerate_generation
from compress.errors import CannotRun, ModelError, call_foreign
from compress.layers.embedding import layer_of
from compress.layers.linear import linears, replace_linear, shape_of
from compress.layers.scheme import LayerScheme
from compress.models.caches.base import CONFIG_KEY, CachePolicy, tensor_names
from compress.models.computation import compute_dtype, inference_dtype, remember_storage, to_device
from compress.models.experts import open_experts
from compress.models.structure.ends import End, find_ends, replace_end, tie
from compress.models.tensors import assign
from compress.numerics.dtypes import dtype_name


def load(
    folder: str | Path,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    compile: bool | None = None,
    verify: bool = False,
    activations: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load (model, tokenizer) from a folder written by `compress run`, the folder of a dense model, or a .gguf file.

    Packed weights stay packed and memory-mapped. A layer that the CPU kernels cover multiplies its codes; any other
    dequantizes its weight in every forward pass. Save such a model with `compress.save`.
    dtype: of the computation; 'auto' is the dtype of the checkpoint, but float32 for bfloat16 on a processor without
    instructions for bfloat16 products, where bfloat16 is several times slower. Where CPU kernels compute a packed
    bfloat16 model, 'auto' has float32 activations; weights stay as they are stored, and products may round their inputs
    to bfloat16.

    activations: 'int8' rounds the inputs of layers of integer codes to int8 when they run, with a scale per token and
    group of the weight (per token where it has no groups), so that kernels multiply integers, as llama.cpp and ONNX
    Runtime do. None: as the checkpoint states.

    compile: how `generate` decodes. None: on the CPU, by traced steps where this is possible: the operations of the
    first step run again without Python. True: the same, or by torch.compile with a static cache. False: by
    transformers.

    verify: first compare the sha256 of every file with that in SHA256SUMS, which checkpoints of compress have.

    Raises ModelError for other activations, a folder without a model, an unknown quantization method, and files that
    are damaged or missing.
    """
    folder, device = Path(folder), torch.device(device)
    if folder.suffix == ".gguf":
        folder = checkpoint_of(str(folder))
    if not folder.is_dir():
        raise ModelError(f"model: no folder {folder}")
    if verify:
        check_folder(folder)
        verify_digests(folder)
    found = describe(folder, str(folder), dtype, device, trust_remote_code, inference=True)
    model, schemes = found.model, found.schemes
    if found.files is None:
        if schemes:
            raise opening.lacking(model, folder, found.stored, weights_in_codes(model, schemes))
        model = opening.load_whole(model, folder, found.stored, found.dtype, device)
    else:
        mapped = opening.Mapped(dict(found.stored), found.dtype, device)
        if found.format is not None:
            tensors = mapped.read_raw(list(found.stored))
            fill(model, "", tensors, schemes, found.format, found.dtype, found.stored)
        _read_dense(found, device)
        tie(model)
        to_device(model, device)
    stored = opening.Mapped(found.stored, found.dtype, device)
    install_policies(model, "", stored.read(found.cache_tensor_names()), found.caches)
    model.eval().requires_grad_(False)
    if found.widened_from is not None:
        allow_narrow_inputs(model)
        remember_storage(model, found.widened_from)
    if activations is not None:
        round_activations(model, activations)
    share_inputs(model)
    state_masks(model.config, found.masked)
    guard_saving(model)
    if compile is None and not all(policy.traceable for policy in found.caches.values()):
        compile = False
    accelerate_generation(model, compile, has_packed_weights=found.format is not None)
    return model, opening.read_tokenizer(folder, trust_remote_code)


def dtype_to_compare(folder: Path, dtype: str, device: torch.device) -> str:
    """The dtype in which models are compared: 'auto' is that in which a recipe computes the model, packed or dense."""
    if dtype != "auto":
        return dtype
    return dtype_name(compute_dtype(opening.read_config(folder, str(folder), False), dtype, device)[0])


@dataclass(frozen=True)
class Description:
    """What the files of a checkpoint state, with its model without weights.

    dtype: of the computation. widened_from: that of the checkpoint if 'auto' chose a wider one for the computation.
    format: None for a dense checkpoint. schemes: of its compressed linears by name. caches: the cache policies
    by attention module. masked: the linears whose zeros are pruned weights, if the checkpoint lists them. stored: every
    stored tensor. files: the tensors of the model; None if some of them are missing or have another shape.
    """

    model: PreTrainedModel
    dtype: torch.dtype
    widened_from: torch.dtype | None
    format: Format | None
    schemes: dict[str, LayerScheme]
    caches: dict[str, CachePolicy]
    masked: frozenset[str]
    stored: dict[str, tuple[Path, str]]
    files: dict[str, tuple[Path, str]] | None

    def dense_names(self) -> list[str]:
        """The names of the model's tensors that are stored as they are."""
        packed = {f"{name}.weight" for name in self.schemes}  # some layouts store codes under this name
        return [name for name in self.files or () if name not in packed]

    def cache_tensor_names(self) -> list[str]:
        """The names of the stored tensors of cache policies."""
        return [name for name in tensor_names(self.caches) if name in self.stored]


def _read_dense(found: Description, device: torch.device) -> None:
    """Read the tensors that are stored as they are; weights of a packed model may stay in bfloat16."""
    assert found.files is not None
    names, mapped = found.dense_names(), opening.Mapped(found.files, found.dtype, device)
    if found.format is not None and keeps_narrow(found.dtype, device):
        weights = mapped.read_raw(narrow_weights(found.model, names))
        narrow = {name: tensor for name, tensor in weights.items() if tensor.dtype is torch.bfloat16}
        put_narrow(found.model, narrow)
        names = [name for name in names if name not in narrow]
    assign(found.model, mapped.read(names))


def describe(
    folder: Path, source: str, dtype: str, device: torch.device, trust_remote_code: bool, inference: bool = False
) -> Description:
    """Read the description of a checkpoint, compressed or dense. source: its name in messages. Raises ModelError.

    inference: the model is to be used as it is, so `auto` may widen the activations of a packed model.
    """
    config = opening.read_config(folder, source, trust_remote_code)
    quantization, record = vars(config).pop("quantization_config", None), vars(config).pop(CONFIG_KEY, None)
    format_, described = _format_of(quantization, source)
    masked = masked_in(config)
    compute, widened_from = compute_dtype(config, dtype, device)
    if inference and dtype == "auto" and format_ is not None:
        stored_dtype, compute = compute, inference_dtype(compute, device)
        widened_from = widened_from or (stored_dtype if compute != stored_dtype else None)
    model = opening.empty_model(folder, config, compute, trust_remote_code)
    with limited_modules(folder):
        open_experts(model)
    stored = stored_tensors(folder)
    schemes = {} if format_ is None else schemes_of(model, format_, described, stored)
    files = opening.match(model, stored, present=weights_in_codes(model, schemes))
    caches = read_policies(model, record, format_, described)
    return Description(model, compute, widened_from, format_, schemes, caches, masked, stored, files)


def _format_of(quantization: Any, source: str) -> tuple[Format | None, Mapping[str, Any]]:
    if quantization is None:
        return None, {}
    if not isinstance(quantization, dict) and not hasattr(quantization, "to_dict"):
        raise ModelError(f"model: quantization_config in config.json of {source} is no object; fetch the file again")
    described = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = described.get("quant_method")
    found = next((f for f in FORMATS.values() if f.quant_method is not None and f.quant_method == method), None)
    if found is None:
        raise ModelError(
            f"model: {source} is quantized by {method!r}, which compress does not read; start from its dense model"
        )
    try:
        return call_foreign(found.of_config, described), described
    except CannotRun as error:
        raise _unreadable("quantization_config", error) from error


def schemes_of(
    model: nn.Module, format_: Format, described: Mapping[str, Any], stored: Mapping[str, tuple[Path, str]]
) -> dict[str, LayerScheme]:
    """The schemes of a checkpoint's layers by name. Raises ModelError for an invalid quantization_config.

    model: not yet filled. stored: the files of the tensors.
    """
    shapes = {name: shape_of(module) for name, module in linears(model).items()}
    ends = {end.name: end for end in find_ends(model)}
    known = shapes | {name: layer_of(model.get_submodule(name)).shape for name in ends}
    try:
        schemes = call_foreign(format_.schemes, described, shapes, stored_shapes(stored))
        for name, scheme in schemes.items():
            if name not in known:
                raise ValueError(f"{name} is no linear of the model")
            if scheme.shape != known[name]:
                here, there = list(known[name]), list(scheme.shape)
                raise ModelError(f"model: {name} is {there} in the checkpoint, but {here} by its config.json")
            call_foreign(scheme.check)
    except (ValueError, CannotRun) as error:
        raise _unreadable("quantization_config", error) from error
    return {n: replace(scheme, role=ends[n].role) if n in ends else scheme for n, scheme in schemes.items()}


def weights_in_codes(model: nn.Module, schemes: Mapping[str, LayerScheme]) -> set[str]:
    """The names of the modules whose weight is stored in another form: the layers, and both modules of tied ends."""
    return {*schemes, *(name for end in find_ends(model) if end.name in schemes for name in end.names)}


def _unreadable(key: str, error: Exception) -> ModelError:
    """Return an error for an entry of config.json whose values have an unexpected form."""
    cause = error.cause if isinstance(error, CannotRun) else error
    reason = str(cause) if isinstance(cause, ValueError) else f"{type(cause).__name__}: {cause}"
    if isinstance(cause, KeyError):
        reason = f"it lacks {cause}, or does not know it"
    return ModelError(f"model: {key} of its config.json cannot be read ({reason})")


def fill(
    root: nn.Module,
    prefix: str,
    tensors: Mapping[str, Tensor],
    schemes: Mapping[str, LayerScheme],
    format_: Format,
    dtype: torch.dtype,
    files: Mapping[str, tuple[Path, str]] | None = None,
    ends: Mapping[str, End] | None = None,
) -> None:
    """Replace linears below `root` by the compressed linears of a checkpoint.

    prefix + name below `root` is the full name; tensors and schemes are by full name. dtype: of the computation;
    weights stored as floats are cast to it. files: the places of the tensors, for messages. ends: of `root`, by name;
    found if they are not given.

    Raises ModelError for missing or invalid tensors, with the full name.
    """
    if ends is None:
        ends = {} if prefix else {end.name: end for end in find_ends(root)}
    for full, names in by_owner(tensors, (name for name in schemes if name.startswith(prefix))).items():
        scheme, start, end = schemes[full], full + ".", ends.get(full)
        inside = {name.removeprefix(start): tensors[name] for name in names}
        layer = replace_linear(root, full.removeprefix(prefix)) if end is None else replace_end(root, end)
        if scheme.shape != layer.shape:
            here, there = list(layer.shape), list(scheme.shape)
            raise ModelError(f"model: {full} is {there} in the checkpoint, but {here} by its config.json")
        try:
            parts, transforms = format_.decode(inside, scheme)
        except KeyError as error:
            reason = f"{full} lacks its tensor {error.args[0]}"
            raise ModelError(f"model: {reason}{_in_file(start, files)}; write the checkpoint again") from error
        except ValueError as error:
            raise ModelError(f"model: {start}{error}{_in_file(start, files)}; write the checkpoint again") from error
        layer.read([part if part.scheme.quantized else part.in_storage(dtype) for part in parts], transforms)


def _in_file(start: str, files: Mapping[str, tuple[Path, str]] | None) -> str:
    """The file of a layer, as an addition to a message."""
    found = next((path for name, (path, _) in (files or {}).items() if name.startswith(start)), None)
    return "" if found is None else f" (in {found})"
