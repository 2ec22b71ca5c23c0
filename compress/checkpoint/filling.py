"""Fill a model that transformers builds and loads with the compressed linears of a checkpoint of format `native`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.checkpoint.caches import install_policies, state_policies
from compress.checkpoint.checkpoint import Checkpoint, state_masks
from compress.checkpoint.formats.native import Native
from compress.checkpoint.layers import StoredLayers
from compress.checkpoint.save import compressed_layers, masks_as_zeros, model_tensors
from compress.checkpoint.tensors import StoredTensors
from compress.decode import accelerate_generation
from compress.errors import ModelError
from compress.layers.embedding import CompressedEmbedding, layer_of
from compress.layers.linear import replace_linear
from compress.models.caches.base import CachePolicy, tensor_names
from compress.models.experts import open_experts
from compress.models.structure.ends import find_ends, replace_end, tie_recorded

NATIVE = Native()
NUMBER = re.compile(r"\d+")


def check_devices(device_map: Any) -> None:
    """Raise ModelError for a device map with weights on the disk, or on the CPU next to another device."""
    places = set(map(str, device_map.values())) if isinstance(device_map, Mapping) else {str(device_map)}
    if "disk" in places or ("cpu" in places and len(places) > 1):
        raise ModelError(
            f"model: the device_map {device_map} moves weights between devices while the model runs, which compressed "
            "layers do not support; use one device, or only GPUs"
        )


class Unfilled(nn.Module):
    """Stands in the place of a compressed linear while transformers loads the other tensors, and the bias."""

    def __init__(self, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.bias = bias


@dataclass
class Filling:
    """What remains to be done when transformers has loaded the other tensors.

    Attributes:
        caches: cache policies by attention module.
        modules: compressed linears and embeddings without weights, which are put back.
        dtype: dtype of computation.
    """

    checkpoint: Checkpoint
    caches: dict[str, CachePolicy]
    modules: dict[str, nn.Module]
    dtype: torch.dtype

    @classmethod
    def of(
        cls, model: PreTrainedModel, config: Mapping[str, Any], files: Sequence[Path], dtype: torch.dtype | None
    ) -> Filling:
        """Prepare a model on the meta device. Raises ModelError for a config or files that do not fit the model."""
        unsupported = next((path for path in files if path.suffix != ".safetensors"), None)
        if not files or unsupported is not None:
            source = model.config.name_or_path or "this model"
            raise ModelError(
                f"model: {source} is in format native, whose weights are safetensors files, but they are to be loaded "
                f"from {unsupported or 'none'}; name its folder or its hub id, and if the name is right, fetch it again"
            )
        with torch.device("cpu"):  # transformers builds the model inside of a context of the meta device
            open_experts(model)
        tie_recorded(model)  # transformers ties later, but tied ends are found by their shared weight
        checkpoint = Checkpoint.of_model(model, files, config)
        caches = checkpoint.caches
        if checkpoint.places is None:
            raise checkpoint.lacking()
        modules = _taken(model, checkpoint)
        for module in model.modules():  # no random weights in the place of those that come later
            if not module._non_persistent_buffers_set:
                vars(module)["_is_hf_initialized"] = True
        kinds = {NUMBER.sub(r"\\d+", re.escape(name)) for name in checkpoint.schemes}  # transformers tries each on all
        ignored = [rf"^{kind}\.(?!bias$)" for kind in kinds] + [re.escape(name) for name in tensor_names(caches)]
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *ignored}
        return cls(checkpoint, caches, modules, dtype or torch.get_default_dtype())

    def fill(self, model: PreTrainedModel) -> None:
        """Fill the compressed linears, each on its device. Raises ModelError."""
        checkpoint, places = self.checkpoint, getattr(model, "hf_device_map", None) or {"": model.device}
        for name, module in self.modules.items():
            _put_back(model, name, module)
        layers_on: dict[torch.device, list[str]] = {}
        for name in checkpoint.schemes:
            layers_on.setdefault(_device_of(name, places), []).append(name)
        for device, layers in layers_on.items():
            tensors = StoredTensors(checkpoint.stored, self.dtype, device)
            StoredLayers(tensors, (), NATIVE, checkpoint.schemes).fill(model, "", layers)
        tensors = StoredTensors(checkpoint.stored, self.dtype, model.device)
        install_policies(model, "", tensors, self.caches)
        model.requires_grad_(False)
        accelerate_generation(model, compile=False, has_packed_weights=True)


def _taken(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, nn.Module]:
    """Take the modules of compressed layers out of the model; returns them by name, compressed and without weights.

    The own module of an embedding stays, without rows, because transformers computes its buffers. Ties of compressed
    weights are removed, so that transformers looks for no weight to tie.
    """
    ends = {end.name: end for end in find_ends(model) if end.name in checkpoint.schemes}
    for name in checkpoint.schemes:
        _ = replace_end(model, ends[name]) if name in ends else replace_linear(model, name)
    modules = {name: model.get_submodule(name) for name in checkpoint.packed}
    for name, module in modules.items():
        if isinstance(module, CompressedEmbedding):
            del module.own._parameters["weight"]
            module.own.register_buffer("weight", torch.empty(0, module.embedding_dim), persistent=False)
            model.set_submodule(name, module.own)
        else:
            model.set_submodule(name, Unfilled(layer_of(module).bias))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    weight_names = {f"{name}.weight" for name in modules}
    for target in [target for target, source in tied.items() if target in weight_names or source in weight_names]:
        del tied[target]
    return modules


def _put_back(model: PreTrainedModel, name: str, module: nn.Module) -> None:
    """Put a compressed module in the place of that which transformers loaded."""
    loaded = model.get_submodule(name)
    if isinstance(module, CompressedEmbedding):
        del module.own.weight
        module.own.register_parameter("weight", None)
    else:
        assert isinstance(loaded, Unfilled)
        layer_of(module).bias = loaded.bias
    model.set_submodule(name, module)


def _device_of(name: str, places: Mapping[str, Any]) -> torch.device:
    """The device of a module. places: devices by the names of modules that contain it."""
    outer = [place for place in places if not place or name == place or name.startswith(f"{place}.")]
    return torch.device(places[max(outer, key=len)]) if outer else torch.device("cpu")


def native_state(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of a model in format `native`, and state its cache policies in its configuration.

    Returns:
        Tensors by name, and the schemes of the compressed layers as JSON values.

    Raises:
        SaveError: for experts that have no names in transformers.
    """
    tensors = model_tensors(model, NATIVE)
    state_masks(model.config, masks_as_zeros(model))
    state_policies(model)
    layers = {name: layer for name, layer in compressed_layers(model).items() if not layer.scheme.plain}
    return tensors, {name: layer.scheme.to_json() for name, layer in layers.items()}
