"""Load a compressed checkpoint: the stock model with its compressed layers as CompressedLinear."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.errors import ModelError
from compress.formats import FORMATS
from compress.formats.base import CacheScheme, Format
from compress.model.kv_cache import CONFIG_KEY, SCALES, attentions_with_cache, round_cache
from compress.model.linear import CompressedLinear, linears, replace_linear
from compress.model.open import opening as opening
from compress.model.open.experts import open_experts
from compress.weights.layer import LayerScheme


def load(
    folder: str | Path,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load (model, tokenizer) from a folder written by `compress run`, or from the folder of a dense model.

    Packed weights stay packed and memory-mapped; each layer dequantizes its weight in every forward pass.
    dtype: of the computation; 'auto' is the dtype of the checkpoint.

    Raises ModelError for a folder without a model, an unknown quantization method, or missing or truncated tensors.
    """
    folder, device = Path(folder), torch.device(device)
    if not folder.is_dir():
        raise ModelError(f"model: no folder {folder}")
    config = opening.read_config(folder, str(folder), trust_remote_code)
    quantization = getattr(config, "quantization_config", None)
    format_, described = _format_of(quantization, folder)
    if quantization is not None:
        vars(config).pop("quantization_config")
    compute = opening.compute_dtype(config, dtype)
    model = opening.empty_model(folder, config, compute, trust_remote_code)
    open_experts(model)
    stored = opening.stored_tensors(folder)
    shapes = {name: CompressedLinear.of(module).shape for name, module in linears(model).items()}
    schemes = {} if format_ is None else _schemes(format_, described, shapes)
    files = opening.match(model, stored, present=set(schemes))
    if files is None:
        if schemes:
            raise ModelError(f"model: {folder} lacks tensors of its model; write it again")
        model = opening.load_whole(type(model), folder, compute, device)
    else:
        mapped = opening.Mapped({name: (path, key) for name, (path, key) in stored.items()}, compute, device)
        if format_ is not None:
            fill(model, "", mapped.read_raw(list(stored)), schemes, format_, compute)
        packed = {f"{name}.weight" for name in schemes}  # some layouts store codes under this name
        renamed = opening.Mapped(files, compute, device)
        opening.assign(model, renamed.read([name for name in files if name not in packed]))
        model.tie_weights()
        opening.to_device(model, device)
    caches = _cache_schemes(model, config, format_, described)
    scales = opening.Mapped(stored, compute, device)
    fill_caches(model, "", scales.read([name for name in stored if name.endswith(SCALES)]), caches)
    model.eval().requires_grad_(False)
    return model, opening.read_tokenizer(folder, trust_remote_code)


def _format_of(quantization: Any, folder: Path) -> tuple[Format | None, Mapping[str, Any]]:
    if quantization is None:
        return None, {}
    described = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = described.get("quant_method")
    found = next((f for f in FORMATS.values() if f.quant_method is not None and f.quant_method == method), None)
    if found is None:
        raise ModelError(f"model: {folder} is quantized by {method!r}, which compress.load does not read")
    return found, described


def _schemes(
    format_: Format, described: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]]
) -> dict[str, LayerScheme]:  # fmt: skip
    """The schemes of a checkpoint's linears by name. Raises ModelError for an invalid quantization_config."""
    try:
        return format_.schemes(described, shapes)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"model: quantization_config of its config.json cannot be read ({error!r})") from error


def _cache_schemes(
    model: nn.Module, config: Any, format_: Format | None, described: Mapping[str, Any]
) -> dict[str, CacheScheme]:
    """The cache schemes by name of the attention. Raises ModelError."""
    record = vars(config).pop(CONFIG_KEY, None)
    try:
        everywhere = None if format_ is None else format_.cached(described)
        if everywhere is not None:
            return dict.fromkeys(attentions_with_cache(model), everywhere)
        return {name: CacheScheme.from_json(values) for name, values in (record or {}).items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"model: {CONFIG_KEY} of its config.json cannot be read ({error!r})") from error
    except ValueError as error:
        raise ModelError(f"model: {error}") from error


def fill_caches(root: nn.Module, prefix: str, tensors: Mapping[str, Tensor], caches: Mapping[str, CacheScheme]) -> None:
    """Restore the rounding of keys and values below `root`; prefix + name is the full name.

    Raises ModelError for a missing or invalid scale, and for an attention that does not exist.
    """
    known = attentions_with_cache(root)
    for full, scheme in caches.items():
        attention = known.get(f"{full}.".removeprefix(prefix).removesuffix("."))  # "" is the root
        if attention is None:
            raise ModelError(f"model: {full} has no cache whose keys and values could be rounded")
        scales: list[Tensor | None] = [None, None]
        for i, (name, static) in enumerate(zip(SCALES, scheme.static, strict=True)):
            if static:
                scales[i] = _cache_scale(f"{full}.{name}", tensors)
        round_cache(attention, scheme, (scales[0], scales[1]))


def _cache_scale(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if name not in tensors:
        raise ModelError(f"model: {name} is missing; write the checkpoint again")
    scale = tensors[name].reshape(-1)
    if scale.numel() != 1 or not bool((scale > 0).all()) or not bool(scale.isfinite().all()):
        raise ModelError(f"model: {name} is {scale.tolist()[:4]}, not one positive number; write the checkpoint again")
    return scale


def fill(
    root: nn.Module,
    prefix: str,
    tensors: Mapping[str, Tensor],
    schemes: Mapping[str, LayerScheme],
    format_: Format,
    dtype: torch.dtype,
) -> None:
    """Replace linears below `root` by the compressed linears of a checkpoint.

    prefix + name below `root` is the full name; tensors and schemes are by full name. dtype: of the computation;
    weights stored as floats are cast to it.

    Raises ModelError for missing or invalid tensors, with the full name.
    """
    for full, scheme in schemes.items():
        if not full.startswith(prefix):
            continue
        start = full + "."
        inside = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
        layer = replace_linear(root, full.removeprefix(prefix))
        if scheme.shape != layer.shape:
            here, there = list(layer.shape), list(scheme.shape)
            raise ModelError(f"model: {full} is {there} in the checkpoint, but {here} by its config.json")
        try:
            parts, transforms = format_.decode(inside, scheme)
        except KeyError as error:
            raise ModelError(f"model: {full} lacks its tensor {error.args[0]}; write the checkpoint again") from error
        except ValueError as error:
            raise ModelError(f"model: {start}{error}; write the checkpoint again") from error
        layer.read([part if part.scheme.quantized else part.in_storage(dtype) for part in parts], transforms)
