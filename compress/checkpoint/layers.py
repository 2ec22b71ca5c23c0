"""Bring stored tensors into modules: dense tensors and compressed layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn

from compress.checkpoint.containers.safetensors import Header
from compress.checkpoint.formats.base import Format
from compress.checkpoint.sources.stored import by_owner
from compress.checkpoint.tensors import Reading, StoredTensors
from compress.errors import ModelError
from compress.layers.base import InputTransform, WeightPart
from compress.layers.linear import CompressedLinear, linears, renew_linear, replace_linear
from compress.layers.parts.codes import CodesPart
from compress.layers.scheme import LayerScheme, only_codes
from compress.models.structure.blocks import Block
from compress.models.structure.ends import find_ends, replace_end
from compress.models.tensors import assign
from compress.numerics.dtypes import SAFETENSORS, is_finite


class StoredTensor(Protocol):
    """A tensor that a checkpoint of the model copies."""

    @property
    def header(self) -> Header:
        """Its dtype and shape."""
        ...

    def read(self) -> Tensor:
        """Read it."""
        ...


@dataclass(frozen=True)
class DequantizedWeight:
    """The dense weight of a layer of codes that belongs to no module of the model.

    Attributes:
        layers: the stored layers.
        name: full name of the layer.
        header: dtype and shape of the weight.
    """

    layers: StoredLayers
    name: str
    header: Header

    def read(self) -> Tensor:
        """Dequantize the weight."""
        part = self.layers.codes(self.name)
        assert part is not None, "read-only formats store codes alone"
        return part.dense(torch.float32).to(SAFETENSORS[self.header.dtype])


@dataclass(frozen=True)
class StoredLayers:
    """Compressed layers and dense tensors of a checkpoint, or of one of its shards.

    Attributes:
        dense_names: tensors that are stored as they are.
        format: format of the layers; None: there are none.
        schemes: scheme of every compressed layer, by full name.
    """

    tensors: StoredTensors
    dense_names: Collection[str]
    format: Format | None
    schemes: Mapping[str, LayerScheme]

    def ask(self, block: Block) -> None:
        """Begin to read all tensors of a block, dense and packed."""
        dense, layers = self._inside(f"{block.name}.")
        self.tensors.ask([*dense, *chain.from_iterable(self._names_by_layer(layers, f"{block.name}.").values())])

    def bring(self, block: Block, masked: Collection[str] = (), reading: Reading | None = None) -> None:
        """Bring the tensors of a block into its module, with codes, scales and masks; its linears are renewed.

        Args:
            masked: linears, by full name, that become compressed linears though their weight is stored dense.
            reading: the time of waiting for the files is added here.

        Raises:
            ModelError: for damaged files, and for weights that are NaN or infinite.
        """
        prefix = f"{block.name}."
        names, layers = self._inside(prefix)
        for name, layer in linears(block.module).items():
            if isinstance(layer, CompressedLinear) or prefix + name in masked:
                renew_linear(block.module, name)
        tensors = self.tensors.read(names, reading)
        check_finite(tensors, self.tensors)
        weights = {name: tensors.pop(f"{name}.weight") for name in masked if f"{name}.weight" in tensors}
        assign(block.module, {name.removeprefix(prefix): tensor for name, tensor in tensors.items()})
        self.fill(block.module, prefix, layers, reading or Reading())
        for name, weight in weights.items():
            layer = block.module.get_submodule(name.removeprefix(prefix))
            assert isinstance(layer, CompressedLinear)
            layer.put(weight.T if layer.transposed else weight)

    def fill(self, root: nn.Module, prefix: str, layers: Iterable[str], reading: Reading | None = None) -> None:
        """Replace linears by the compressed linears of the checkpoint.

        Args:
            prefix: precedes the names of modules of `root` in the full names of tensors and layers.
            layers: full names of the layers.
            reading: all pages are read now, and the time of waiting is added here; None: pages of codes are read when
                they are needed.

        Raises:
            ModelError: for missing or invalid tensors, with the full name.
        """
        if self.format is None:
            return
        names_by_layer = self._names_by_layer(layers, prefix)
        tensors = self.tensors.read_raw(chain.from_iterable(names_by_layer.values()), reading)
        ends = {} if prefix else {end.name: end for end in find_ends(root)}
        for full, names in names_by_layer.items():
            scheme, start, end = self.schemes[full], f"{full}.", ends.get(full)
            inside = {name.removeprefix(start): tensors[name] for name in names}
            layer = replace_linear(root, full.removeprefix(prefix)) if end is None else replace_end(root, end)
            if scheme.shape != layer.shape:
                model_shape, stored_shape = list(layer.shape), list(scheme.shape)
                raise ModelError(
                    f"model: {full} is {stored_shape} in the checkpoint, but {model_shape} by its config.json"
                )
            parts, transforms = self._read(full, inside, names)
            dtype = self.tensors.dtype
            layer.read([part if part.scheme.quantized else part.in_storage(dtype) for part in parts], transforms)

    def codes(self, full: str) -> CodesPart | None:
        """Read the codes of a layer that consists of codes alone; None for another one. Raises ModelError."""
        names = self._names_by_layer([full], f"{full}.")[full]
        tensors = self.tensors.read_raw(names)
        parts, _ = self._read(full, {name.removeprefix(f"{full}."): t for name, t in tensors.items()}, names)
        return only_codes(parts)

    def _read(
        self, full: str, tensors: Mapping[str, Tensor], names: Sequence[str]
    ) -> tuple[Sequence[WeightPart], Sequence[InputTransform]]:
        """Decode a layer.

        Args:
            tensors: by name inside of the layer.
            names: the full names.

        Raises:
            ModelError: for missing or invalid tensors, with the full name.
        """
        assert self.format is not None
        try:
            return self.format.read(tensors, self.schemes[full])
        except KeyError as error:
            place, reason = self._place(names), f"{full} lacks its tensor {error.args[0]}"
            dense = self.tensors.files.get(f"{full}.weight")
            if dense is not None and dense.header.dtype in ("F32", "F16", "BF16"):
                raise ModelError(
                    f"model: config.json says that {full} is quantized ({self.format.name}), but its weight is "
                    f"stored dense{place}; remove quantization_config from config.json if this is the dense model"
                ) from error
            raise ModelError(f"model: {reason}{place}; write the checkpoint again") from error
        except ValueError as error:
            raise ModelError(f"model: {full}.{error}{self._place(names)}; write the checkpoint again") from error

    def _place(self, names: Sequence[str]) -> str:
        """Return the file of the first of some tensors, in words; the folder of all files if there are no names."""
        files = self.tensors.files
        paths = [files[names[0]].path] if names else [stored.path.parent for stored in files.values()]
        return f" (in {paths[0]})" if paths else ""

    def _inside(self, prefix: str) -> tuple[list[str], list[str]]:
        """The names of dense tensors, and of layers, below a prefix."""
        dense = [name for name in self.dense_names if name.startswith(prefix)]
        return dense, [name for name in self.schemes if name.startswith(prefix)]

    def _names_by_layer(self, layers: Iterable[str], prefix: str) -> dict[str, list[str]]:
        return by_owner((name for name in self.tensors.files if name.startswith(prefix)), layers)


def check_finite(tensors: Mapping[str, Tensor], stored: StoredTensors | None = None) -> None:
    """Check that weights are finite.

    Args:
        tensors: weights by full name.
        stored: their files, for the message.

    Raises:
        ModelError: for a weight that is NaN or infinite.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.element_size() > 1 and not is_finite(tensor):
            count = int((~tensor.isfinite()).count_nonzero())
            place = "" if stored is None or name not in stored.files else f" ({stored.files[name].path})"
            raise ModelError(
                f"model: {name} holds {count} NaN or infinite weights; the checkpoint is damaged; fetch it again{place}"
            )
