"""The tensors of a GGUF file for those of a model, and the schemes of layers whose codes they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from compress.checkpoint.blocks import BLOCK_TYPES
from compress.checkpoint.formats.gguf_files.architecture import Architecture
from compress.errors import NotThisFormat
from compress.layers.linear import linears, shape_of
from compress.layers.scheme import LayerScheme
from compress.models.structure.ends import find_ends


def tensors_in_file(
    model: PreTrainedModel, architecture: Architecture
) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Yield the tensors in the file of each tensor of the model, with fields of `Entry`; of tied tensors, once."""
    name_in_file = architecture.tensor_names(model.config.num_hidden_layers)
    tied = {name: end.embedding for end in find_ends(model) if end.role == "tied" for name in (end.head, end.embedding)}
    for full in model.state_dict():
        module, _, leaf = full.rpartition(".")
        names = {}
        for part, values in architecture.parts(f"{tied.get(module) or module}.{leaf}", model.config).items():
            file_name = name_in_file(part)
            if file_name is None:
                raise NotThisFormat(f"model: the gguf package has no name for {full}")
            names[file_name] = values
        yield full, names


def schemes_in_file(
    model: PreTrainedModel, names: Mapping[str, Sequence[str]], types: Mapping[str, str]
) -> Iterator[tuple[str, LayerScheme]]:
    """The scheme of each linear and each end whose rows are rows of blocks of one type.

    names: of the tensors of the file that have these rows.
    """
    ends = {end.name: end for end in find_ends(model)}
    shapes: dict[str, Any] = {name: shape_of(module) for name, module in linears(model).items()}
    shapes |= {name: tuple(model.get_submodule(name).get_parameter("weight").shape) for name in ends}
    for name, shape in shapes.items():
        kinds = {types[file_name] for file_name in names.get(f"{name}.weight", ())}
        block = BLOCK_TYPES.get(kinds.pop()) if len(kinds) == 1 else None
        if block is not None:
            yield name, LayerScheme(shape, (block.scheme(),), role=ends[name].role if name in ends else "linear")
