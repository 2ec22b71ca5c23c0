"""Format: the contract of the disk formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from compress.checkpoint.formats.accepted import OBJECT, TEXT, Accepted, check_keys, without_effect
from compress.checkpoint.formats.readers import misreadings, programs_run
from compress.layers.base import InputTransform, TensorSpec, WeightPart
from compress.layers.parts.codes import CodesScheme
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.rounding import RoundingScheme
from compress.models.caches.base import CachePolicy
from compress.models.terms import Pooling


def refuses_embeddings(scheme: LayerScheme, format_name: str) -> str | None:
    """Return why a format that transformers reads cannot store an embedding in codes; None if it can."""
    if scheme.role == "linear" or scheme.plain:
        return None
    layer_kind = "an embedding" if scheme.role == "embedding" else "an embedding that is tied to the output head"
    return f"transformers loads no {format_name} with {layer_kind} in codes; use format: native"


def refuses_all_but_codes(scheme: LayerScheme, format_name: str) -> str | None:
    """Return why a format that holds codes alone cannot store a layer: no embeddings, other parts and transforms.

    Args:
        scheme: scheme of the layer.
        format_name: name of the format, for the message.

    Returns:
        The reason; None for codes and for a plain layer.
    """
    reason = refuses_embeddings(scheme, format_name) or refuses_transforms(scheme, format_name)
    if reason is not None or scheme.plain or scheme.codes is not None:
        return reason
    return f"{format_name} holds only codes, not {scheme.text}; use format: native"


def refuses_transforms(scheme: LayerScheme, format_name: str) -> str | None:
    """Return why a format without outlier columns and input transforms cannot store a layer; None if it can."""
    if scheme.rounding is not None and scheme.rounding.outliers:
        return f"{format_name} cannot state that outlier columns are computed in floats (LLM.int8); use format: native"
    if scheme.rounding is not None and scheme.rounding.clip != 1:
        return (
            f"{format_name} cannot state that scales of inputs are clipped; use activation_clip: 1, or format: native"
        )
    if scheme.rounding is not None and scheme.rounding.groups is not None:
        return f"{format_name} cannot state scales of inputs for groups of channels; use format: native"
    mapped = scheme.maps_inputs
    if mapped is not None:
        return f"{mapped.effect}, and {format_name} cannot state this; use format: native{mapped.instead}"
    return None


def unstated_rounding(rounding: RoundingScheme, format_name: str, other: str = "native") -> str:
    """Return why a format that states no activation quantization cannot store a layer, and how to change the recipe.

    Args:
        rounding: activation quantization of the layer.
        format_name: name of the format, for the message.
        other: a format that states it.
    """
    also = "" if rounding.scale == "token" else " and leave activation_scale out"
    return f"{format_name} cannot state that activations are rounded; use activations: none{also}, or format: {other}"


def mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under a key of a config. Raises ValueError if there is none."""
    value = values.get(key)
    if not isinstance(value, Mapping):
        raise ValueError(f"it has no object {key!r}")
    return value


def layers_config(method: str | None, schemes: Mapping[str, LayerScheme], version: str) -> dict[str, Any] | None:
    """A `quantization_config` that describes every layer by its scheme; None without layers."""
    layers = {name: scheme.to_json() for name, scheme in schemes.items()}
    return {"quant_method": method, "version": version, "layers": layers} if layers else None


LAYERS_KEYS = {"quant_method": TEXT, "layers": OBJECT, **without_effect("version")}
"""The keys of `layers_config`."""


def layers_of(config: Mapping[str, Any]) -> dict[str, LayerScheme]:
    """Invert `layers_config`. Raises ValueError, with the name of the layer."""
    schemes = {}
    for name, layer in mapping(config, "layers").items():
        try:
            schemes[name] = LayerScheme.from_json(layer)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return schemes


@dataclass(frozen=True)
class StoredLayer:
    """A linear of a checkpoint. transposed: stored as [in, out] when dense. expert: whether it belongs to an expert.

    needs_weight: whether transformers fails to load the model if this linear has no tensor `weight`.
    overrides_forward: whether its class overrides `nn.Linear.forward`.
    """

    scheme: LayerScheme
    transposed: bool
    expert: bool
    needs_weight: bool = False
    overrides_forward: bool = False


@dataclass(frozen=True)
class Ends:
    """The parts of a model that are outside of its layers: configuration, tokenizer, and names of weights.

    name: of the model, for readers. embedding, head: names of these weights. tied: one tensor serves both; it has the
    embedding's name if it is dense, and the head's if it is compressed. pooling: how an encoder makes embeddings.
    class_name: of the model.
    """

    config: PretrainedConfig
    tokenizer: Any
    name: str
    embedding: str | None
    head: str | None
    tied: bool = False
    pooling: Pooling = "mean"
    class_name: str = ""

    @property
    def weights(self) -> list[str]:
        """Return the names of the dense weights, that of tied ends once."""
        names = (self.embedding, None if self.tied else self.head)
        return [name for name in names if name is not None]


class Format(ABC):
    """A way to store compressed layers.

    name: its key in a recipe. quant_method: the value in the `quantization_config` of its checkpoints; None if they
    have no such config. sparse: whether kept weights can be stored alone. served: whether servers read the layout,
    and may split a layer over devices. fused: whether servers compute layers with the same input (q, k, v; gate, up) as
    one layer, which must be stored alike. scale_dtype: of the stored scales; None: the storage dtype of the run.
    negative_scales: whether all readers take negative scales of integers. embeddings: whether embeddings with codes are
    found by their tensors, and one that is tied to the LM head has the embedding's name. ends_typed: whether
    `configured` takes block types of the embedding and the LM head. file: the one file that holds all tensors of a
    complete checkpoint; None: the shards stay. keys: the keys of a `quantization_config` that the reader accepts.
    stacked: tensors that hold those of all experts, by the ends of their names: the name of each inside of a linear.
    opens_experts: whether the matrices of experts are stored one by one, also of a model that has them in one tensor.
    alike: whether linears with the same input get the same bits where a budget is divided. end_types: for layers of so
    many bits per weight and more, the options `embedding` and `head` that suit them; from the most bits to the least.
    rounds_inputs: whether products may round float32 inputs to bfloat16 unless a dtype is named.
    """

    name: str
    quant_method: str | None = None
    sparse: bool = False
    served: bool = False
    fused: bool = False
    scale_dtype: torch.dtype | None = None
    negative_scales: bool = False
    embeddings: bool = False
    ends_typed: bool = False
    file: str | None = None
    keys: ClassVar[Mapping[str, Accepted]] = {}
    stacked: ClassVar[Mapping[str, str]] = {}
    opens_experts: bool = False
    alike: bool = True
    rounds_inputs: bool = False
    end_types: ClassVar[Sequence[tuple[float, str, str]]] = ((0.0, "auto", "auto"),)

    def scales_in(self, storage: torch.dtype) -> torch.dtype:
        """The dtype of stored scales. storage: the storage dtype of the run."""
        return self.scale_dtype or storage

    def stored_in(self, storage: torch.dtype) -> Format:
        """The format of a run with this storage dtype, for formats whose files state it."""
        return self

    def of_config(self, config: Mapping[str, Any]) -> Format:
        """The format of a checkpoint with this `quantization_config`, in its version.

        Raises ValueError for a key or a value that the reader does not know.
        """
        check_keys(config, self.keys)
        return self

    @property
    def unverified(self) -> str | None:
        """Why a run does not reload its checkpoint with transformers; None if it does."""
        return None

    @property
    def loading(self) -> dict[str, Any]:
        """Return the options with which transformers loads a checkpoint of the format on any device, if it needs some.

        It then dequantizes all layers.
        """
        return {}

    def left_out(self, names: Collection[str], config: Mapping[str, Any]) -> list[str]:
        """Return a note for each thing that the format knows and does not read.

        Args:
            names: of the stored tensors.
            config: `quantization_config` of the checkpoint.
        """
        return []

    def programs_run(self, schemes: Collection[LayerScheme]) -> list[str]:
        """Return the programs that read all grids of these compressed layers in conformance."""
        return programs_run(self.name, schemes)

    def misreadings(self, schemes: Collection[LayerScheme], config: PretrainedConfig) -> list[str]:
        """Return a text for each program that is known to refuse a checkpoint, or to compute something else.

        Args:
            schemes: of the compressed layers.
            config: configuration of the model.
        """
        return misreadings(self.name, schemes)

    def misread(self, config: PretrainedConfig) -> str | None:
        """Return why transformers makes another model of a correct checkpoint; None if nothing is known.

        Args:
            config: configuration of the model.
        """
        return None

    def configured(self, embedding: str, head: str) -> Format:
        """The format with the options of `save` of these names. Raises ValueError for options that it does not have."""
        for option, value in (("embedding", embedding), ("head", head)):
            if value != "auto":
                raise ValueError(f"{option}: {value} is for format gguf; format {self.name} stores it in save.dtype")
        return self

    def refuses_model(self, ends: Ends) -> str | None:
        """Why a model cannot be stored; None if it can."""
        return None

    def stored_dtype(self, shape: Sequence[int], storage: torch.dtype) -> torch.dtype:
        """The dtype of a dense floating tensor."""
        return storage

    def end_layout(self, ends: Ends, name: str, shape: Sequence[int]) -> CodesScheme | None:
        """The scheme to which a tensor outside of the blocks is rounded; None: it is stored dense. name: in full."""
        return None

    def header_bytes(self, ends: Ends, shapes: Mapping[str, Sequence[int]]) -> int:
        """Return the bytes that `file` takes at most besides its tensors; 0 without such a file.

        shapes: of all tensors of the model by name.
        """
        return 0

    def assemble(self, folder: Path, ends: Ends, schemes: Mapping[str, LayerScheme], shards: Mapping[str, Path]) -> str:
        """Write `file` from the finished shards; returns its sha256.

        schemes: of the compressed linears by name. shards: the file of each tensor by its name.
        """
        raise AssertionError(f"format {self.name} consists of shards")

    @abstractmethod
    def refuses(self, scheme: LayerScheme) -> str | None:
        """Why a layer of this scheme cannot be stored, and how to change the recipe; None if it can."""

    def clash(self, schemes: Mapping[str, LayerScheme]) -> str | None:
        """Why layers, each of which can be stored, cannot be stored together, and how to change the recipe; or None.

        schemes: the stored schemes of all compressed layers by full name.
        """
        return None

    def stores_dense(self, name: str) -> str | None:
        """Return why a linear, by its full name, is never stored as codes; None if it may be."""
        return None

    def adapt(self, scheme: LayerScheme) -> LayerScheme | None:
        """Return the scheme of the layer in its stored form; None for a layer that is stored dequantized.

        It is asked before `refuses`, so it must not raise for a scheme that the format cannot hold.
        """
        return scheme

    def adapt_part(self, part: WeightPart) -> WeightPart:
        """The part in the stored form of `adapt`."""
        return part

    def adapt_transform(self, transform: InputTransform) -> InputTransform:
        """Return the transform as it is read back from a checkpoint, for formats that store its numbers otherwise."""
        return transform

    @abstractmethod
    def encode(
        self, scheme: LayerScheme, parts: Sequence[WeightPart], transforms: Sequence[InputTransform]
    ) -> dict[str, Tensor]:
        """The tensors of a layer by their names inside the module."""

    @abstractmethod
    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        """The tensors of an adapted layer by their names inside the module."""

    def readable(self, scheme: LayerScheme) -> Collection[str]:
        """Return the names inside the module of all tensors that `decode` reads, also of other programs' files."""
        return self.tensors(scheme)

    def size_bytes(self, scheme: LayerScheme, storage: torch.dtype) -> int:
        """Bytes of all tensors of a layer without its bias; of its dense weight if it is stored dequantized."""
        adapted = self.adapt(scheme)
        if adapted is None or adapted.plain:
            return LayerScheme(scheme.shape).size_bytes(storage)
        return sum(spec.size_bytes(storage) for spec in self.tensors(adapted).values())

    @abstractmethod
    def decode(
        self, tensors: Mapping[str, Tensor], scheme: LayerScheme
    ) -> tuple[Sequence[WeightPart], Sequence[InputTransform]]:
        """The exact inverse of `encode`.

        Raises KeyError for a missing tensor, ValueError for an invalid one, with its name inside the module.
        """

    def read(
        self, tensors: Mapping[str, Tensor], scheme: LayerScheme
    ) -> tuple[Sequence[WeightPart], Sequence[InputTransform]]:
        """Decode the tensors of a file, and check that the layer can be computed (`LayerScheme.validate`).

        Raises KeyError for a missing tensor, ValueError for an invalid one, with its name inside the module.
        """
        parts, transforms = self.decode(tensors, scheme)
        scheme.validate(parts, transforms)
        return parts, transforms

    def units(self, scheme: LayerScheme) -> tuple[int, int]:
        """(rows, columns) of groups and packed words: a server that splits an adapted layer cannot cut them."""
        return 1, 1

    def unsplit(self) -> str | None:
        """Why servers cannot split layers of this format over devices; None if they can."""
        return None if self.served else f"no server reads format {self.name}"

    def reads_in(self, scheme: LayerScheme, dtype: torch.dtype, stored: torch.dtype) -> torch.dtype:
        """The dtype in which transformers dequantizes a layer of a model that it loads in `dtype`.

        stored: the dtype of the layer's scales on disk.
        """
        return dtype

    def reads_experts_in(self, scheme: LayerScheme, dtype: torch.dtype, stored: torch.dtype) -> torch.dtype:
        """Return `reads_in` for a linear of an expert, which transformers joins with those of the other experts."""
        return self.reads_in(scheme, dtype, stored)

    def unreadable(self, layers: Sequence[StoredLayer], dtype: torch.dtype) -> str | None:
        """Why transformers cannot load these linears, of which at least one is compressed; None if it can."""
        return None

    def states(self, policy: CachePolicy, model: PretrainedConfig) -> bool:
        """Return whether `state_cache` can state this policy for all attention modules, and readers accept it."""
        return False

    def state_cache(self, config: dict[str, Any] | None, ignore: list[str], policy: CachePolicy) -> dict[str, Any]:
        """Add a policy that `states` accepts to a `quantization_config`.

        Args:
            config: the result of `config`.
            ignore: as of `config`.
        """
        raise NotImplementedError(f"format {self.name} states no cache policy")

    def read_cache(self, config: Mapping[str, Any]) -> CachePolicy | None:
        """Return the policy of all attention modules that a `quantization_config` states, or None.

        Raises:
            ValueError: for a policy that is not supported.
        """
        return None

    @abstractmethod
    def config(self, schemes: Mapping[str, LayerScheme], ignore: list[str], version: str) -> dict[str, Any] | None:
        """Return the `quantization_config`.

        Args:
            schemes: schemes of the compressed layers by full name.
            ignore: names of the modules whose weights are dense; one that ends with a dot means all modules below it.
        """

    def entries(self, quantization: Mapping[str, Any] | None, config: PretrainedConfig) -> dict[str, Any]:
        """Return further entries of config.json.

        Args:
            quantization: the result of `config`.
            config: configuration of the model.
        """
        return {}

    def files(self, quantization: Mapping[str, Any] | None) -> dict[str, str]:
        """Return the texts of further files by name.

        Args:
            quantization: the result of `config`.
        """
        return {}

    @abstractmethod
    def schemes(
        self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]], stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, LayerScheme]:
        """The inverse of `config`.

        shapes: (out, in) of every linear of the model by name, with `embeddings` of the embedding, too. stored: the
        shape of every stored tensor by name, for formats whose config does not list the quantized layers.
        """
