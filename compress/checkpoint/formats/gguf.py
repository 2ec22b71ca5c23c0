"""The format `gguf`: one file that llama.cpp runs, with weights in its block types, vocabulary and hyperparameters.

    model.gguf    all tensors of the model under the names of llama.cpp, written when the run is complete
    <m>.weight_blocks   uint8 [O, bytes of a row]: the name of codes in the shards of an unfinished run, and when
                        `compress.load` reads the file

Codes are stored as they are if a block type holds their grid, with groups of its size (`checkpoint.blocks`):

    int4, int4_signed in groups of 32    Q4_0        uint2_k   Q2_K
    uint4 in groups of 32                Q4_1        int3_k    Q3_K
    int5, int5_signed in groups of 32    Q5_0        uint4_k   Q4_K
    uint5 in groups of 32                Q5_1        uint5_k   Q5_K
    int8 in groups of 32                 Q8_0        int6_k    Q6_K
    iq4_nl in groups of 32               IQ4_NL      iq4_xs    IQ4_XS
    mxfp4 in groups of 32                MXFP4
                                                     iq3_s, iq3_xxs, iq2_s, iq2_xs, iq2_xxs: likewise

Embedding and head are rounded to a block type of their own; dense linears are float16, bfloat16 or float32 by
`save.dtype`, and vectors, such as norms and biases, float32.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig

from compress.checkpoint.blocks import BLOCK_TYPES, block_type_of
from compress.checkpoint.blocks.block import BlockType
from compress.checkpoint.containers.gguf import BLOCKS, CONFIG, DENSE, Entry, Stored, header_bytes, write_gguf
from compress.checkpoint.containers.gguf_header import FILE
from compress.checkpoint.formats.base import (
    LAYERS_KEYS,
    Ends,
    Format,
    StoredLayer,
    layers_config,
    layers_of,
    refuses_transforms,
    unstated_rounding,
)
from compress.checkpoint.formats.gguf_files.architecture import (
    EXPERT,
    LATENT,
    Architecture,
    architecture_of,
    architectures,
    keeps_float32,
    rope_factors,
    rounds_yarn,
)
from compress.checkpoint.formats.gguf_files.reading import misread
from compress.checkpoint.formats.gguf_files.vocabulary import TOKENIZER, Vocabulary, vocabulary_of
from compress.errors import SaveError, did_you_mean
from compress.layers.base import InputTransform, TensorSpec, WeightPart, checked
from compress.layers.parts.codes import CodesScheme
from compress.layers.scheme import LayerScheme, only_codes
from compress.models.terms import Pooling

STORED = f"weight{BLOCKS}"
END_TYPE = "Q6_K"  # that of llama.cpp for the head
FALLBACK = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
FALLBACK |= dict.fromkeys(("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS"), "IQ4_NL")
"""The block type for widths that are no multiple of 256, as in llama.cpp (llama.cpp, tensor_type_fallback)."""
END_TYPES = (
    (8.5, "Q8_0", "Q8_0"),
    (6.5, "Q6_K", "Q6_K"),
    (5.5, "Q5_K", "Q6_K"),
    (4.5, "Q4_K", "Q6_K"),
    (3.4, "Q3_K", "Q6_K"),
    (2.6, "Q2_K", "Q6_K"),
    (0.0, "Q2_K", "Q5_K"),
    (0.0, "Q2_K", "Q4_K"),
    (0.0, "Q2_K", "Q3_K"),
    (0.0, "Q2_K", "Q2_K"),
)
"""Block types of embedding and head for layers of so many bits, as in the mixes of llama.cpp; then
smaller ones for sizes that leave fewer bits."""
UNSTATED = ("_name_or_path", "transformers_version", "quantization_config", "architectures", "dtype")
"""Entries of a configuration that do not describe the model in the file."""
POOLING: Mapping[Pooling, int] = {"mean": 1, "first": 2, "last": 3}  # gguf.PoolingType
QUANTIZATION_VERSION = 2  # ggml.h, GGML_QNT_VERSION
ALIGNMENT = 32  # gguf.h, GGUF_DEFAULT_ALIGNMENT: the bytes to which tensors are padded

SPLIT = f"llama.cpp reads {LATENT} as two matrices for each head and one of them transposed, as codes cannot be"
YARN_ENDS = (
    "llama.cpp rounds the ends of the ramp of YaRN to whole dimensions, but this model does not (truncate: false), so "
    "that some rotary frequencies differ, as in every GGUF file of it"
)
ONE_TYPE = (
    "a GGUF file holds the experts {} in one tensor, but they are stored as {}; use the same weights for all experts, "
    "or format: native"
)


def block_of(scheme: LayerScheme) -> BlockType | None:
    """The block type for layers of a scheme, or None."""
    codes = scheme.codes
    block = None if codes is None else block_type_of(codes.grid.name)
    if codes is None or block is None:
        return None
    plain = codes.rows == 1 and not codes.float_zeros and not codes.indexed
    return block if plain and codes.group_size == block.group and codes.symmetric != codes.grid.offset else None


@dataclass(frozen=True)
class GGUF(Format):
    """The `gguf` format. embedding, head: block types of these weights, or dense."""

    name = "gguf"
    negative_scales = True
    quant_method = "gguf"
    scale_dtype = torch.float16
    ends_typed = True
    opens_experts = True
    alike = False
    rounds_inputs = True
    end_types = END_TYPES
    file = FILE
    keys = LAYERS_KEYS

    embedding: str = END_TYPE
    head: str = END_TYPE

    def configured(self, embedding: str, head: str) -> Format:
        for option, value in (("embedding", embedding), ("head", head)):
            known_types = ["auto", *BLOCK_TYPES, "dense"]
            if value not in known_types:
                raise ValueError(f"{option}: type {value!r} is not known{did_you_mean(value, known_types)}")
        types = [END_TYPE if value == "auto" else value for value in (embedding, head)]
        return GGUF(types[0], types[1])

    # Layers

    def refuses(self, scheme: LayerScheme) -> str | None:
        reason = refuses_transforms(scheme, f"format {self.name}")
        if reason is not None or scheme.plain:
            return reason
        if scheme.rounding is not None:
            return unstated_rounding(scheme.rounding, f"format {self.name}")
        if scheme.codes is None:
            return f"format {self.name} holds only codes, not {scheme.text}; use format: native"
        block, codes = block_of(scheme), scheme.codes
        if block is None:
            return f"no block type of GGUF holds {_spelled(codes)}; {_instead(codes)}"
        if scheme.shape[1] % block.size:
            width = f"its {scheme.shape[1]} inputs are not a multiple of {block.size}"
            return f"{width}, the size of a block of {block.name}; use {_fallback(block)}"
        return None

    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        block = block_of(scheme)
        assert block is not None, "refuses was not asked"
        return {STORED: TensorSpec((scheme.shape[0], block.row_bytes(scheme.shape[1])), torch.uint8)}

    def encode(
        self, scheme: LayerScheme, parts: Sequence[WeightPart], transforms: Sequence[InputTransform]
    ) -> dict[str, Tensor]:
        codes, block = only_codes(parts), block_of(scheme)
        assert codes is not None and block is not None, "refuses was not asked"
        return {STORED: block.encode(codes)}

    def decode(
        self, tensors: Mapping[str, Tensor], scheme: LayerScheme
    ) -> tuple[Sequence[WeightPart], Sequence[InputTransform]]:
        block = block_of(scheme)
        if block is None or scheme.codes is None:
            raise ValueError(f"weight is {scheme.text}, which no block type holds")
        stored = checked(self.tensors(scheme), tensors, "")
        return [block.decode(stored[STORED], scheme.shape[1], scheme.codes.grid)], []

    def reads_in(self, scheme: LayerScheme, dtype: torch.dtype, stored: torch.dtype) -> torch.dtype:
        return torch.float32

    def adapt(self, scheme: LayerScheme) -> LayerScheme | None:
        # llama.cpp has the gate of a shared expert as a vector, which it does not quantize
        return None if scheme.codes is not None and scheme.shape[0] == 1 else scheme

    def stores_dense(self, name: str) -> str | None:
        return SPLIT if name.endswith(f".{LATENT}") else None

    def clash(self, schemes: Mapping[str, LayerScheme]) -> str | None:
        if any(map(self.stores_dense, schemes)):
            return f"{SPLIT}; compress the model again with ignore: '*.{LATENT}', or use another format"
        stacks: dict[str, dict[int, str]] = {}
        for name, scheme in schemes.items():
            if (number := EXPERT.search(name)) is not None:
                stacks.setdefault(EXPERT.sub(".experts.*.", name), {})[int(number[1])] = scheme.text
        count = 1 + max((number for texts in stacks.values() for number in texts), default=0)
        for name, text_by_number in stacks.items():
            texts = {text_by_number.get(number, "dense") for number in range(count)}
            if len(texts) > 1:
                return ONE_TYPE.format(name, ", ".join(sorted(texts)))
        return None

    def unreadable(self, layers: Sequence[StoredLayer], dtype: torch.dtype) -> str | None:
        return None

    def config(self, schemes: Mapping[str, LayerScheme], ignore: list[str], version: str) -> dict[str, Any] | None:
        return layers_config(self.quant_method, schemes, version)

    def schemes(
        self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]], stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, LayerScheme]:
        schemes = layers_of(config)
        for name, scheme in schemes.items():
            reason = "a layer without codes is stated" if scheme.plain else self.refuses(scheme)
            if reason is not None:
                raise ValueError(f"{name}: {reason}")
        return schemes

    def misreadings(self, schemes: Collection[LayerScheme], config: PretrainedConfig) -> list[str]:
        return super().misreadings(schemes, config) + ([YARN_ENDS] if rounds_yarn(config) else [])

    def misread(self, config: PretrainedConfig) -> str | None:
        architecture = architecture_of(config)
        return None if architecture is None else misread(architecture, config)

    # The whole model

    def refuses_model(self, ends: Ends) -> str | None:
        if importlib.util.find_spec("gguf") is None:
            return "the package gguf is not installed (extra: compress-llm[gguf])"
        architecture = architecture_of(ends.config)
        if architecture is None:
            supported = ", ".join(architectures())
            return f"models of the type {ends.config.model_type} cannot be written as GGUF, only {supported}"
        if reason := architecture.refuses(ends.config):
            return reason
        name_in_file = architecture.tensor_names(ends.config.num_hidden_layers)
        unnamed = [end for end in ends.weights if name_in_file(end) is None]
        if unnamed:
            return f"llama.cpp has no tensor for {unnamed[0]} in files of the architecture {architecture.name}"
        try:
            vocabulary_of(ends.tokenizer, ends.config.vocab_size)
        except ValueError as error:
            return str(error)
        return None

    def stored_dtype(self, shape: Sequence[int], storage: torch.dtype) -> torch.dtype:
        return torch.float32 if len(shape) < 2 else storage

    def end_layout(self, ends: Ends, name: str, shape: Sequence[int]) -> CodesScheme | None:
        if name not in ends.weights:
            return None
        block = BLOCK_TYPES.get(self.head if ends.tied or name == ends.head else self.embedding)
        if block is not None and shape[1] % block.size:
            block = BLOCK_TYPES.get(FALLBACK.get(block.name, ""))
        return None if block is None or shape[1] % block.size else block.scheme()

    def header_bytes(self, ends: Ends, shapes: Mapping[str, Sequence[int]]) -> int:
        architecture = architecture_of(ends.config)
        assert architecture is not None, "refuses_model was not asked"
        name_in_file, infos = architecture.tensor_names(ends.config.num_hidden_layers), {}
        for name, shape in shapes.items():
            known_as = ends.embedding if ends.tied and name == ends.head and ends.embedding else name
            for part, values in architecture.parts(known_as, ends.config).items():
                file_name, is_packed = name_in_file(part) or part, len(shape) > 1
                entry = replace(architecture.entry(name, shape, ends.config, is_packed), **values)
                entry = replace(entry, name=f"{entry.name}{BLOCKS}") if is_packed else entry
                infos[file_name] = Stored(file_name, entry, "F32", tuple(shape), partial(torch.empty, 0))
        factors = {name: Stored(name, None, "F32", (1,), partial(torch.empty, 0)) for name in rope_factors(ends.config)}
        tensors = [*infos.values(), *factors.values()]
        vocabulary = vocabulary_of(ends.tokenizer, ends.config.vocab_size)
        header = header_bytes(architecture.name, _metadata(architecture, ends, vocabulary, []), tensors)
        values = sum(4 * factors.numel() for factors in rope_factors(ends.config).values())
        return header + values + ALIGNMENT * len(tensors)

    def assemble(self, folder: Path, ends: Ends, schemes: Mapping[str, LayerScheme], shards: Mapping[str, Path]) -> str:
        architecture = architecture_of(ends.config)
        assert architecture is not None, "refuses_model was not asked"
        blocks = {f"{name}.{STORED}": block_of(scheme) for name, scheme in schemes.items()}
        for name in ends.weights:
            part = self.end_layout(ends, name, (0, ends.config.hidden_size))
            if part is not None:
                blocks.setdefault(f"{name}{BLOCKS}", block_type_of(part.grid.name))
        tensors = list(_tensors(architecture, ends, shards, blocks, {f"{name}.weight" for name in schemes}))
        metadata = _metadata(architecture, ends, vocabulary_of(ends.tokenizer, ends.config.vocab_size), tensors)
        return write_gguf(folder / FILE, architecture.name, metadata, tensors)


def _spelled(codes: CodesScheme) -> str:
    zeros = "" if codes.symmetric or codes.grid.offset else ", with zero points"
    return f"{codes.text}{zeros}{', in any order of columns' if codes.indexed else ''}"


def _instead(codes: CodesScheme) -> str:
    """What to write in place of codes that no block type holds."""
    if codes.rows > 1:
        return "use block_rows: 1"
    if codes.indexed:
        return "use act_order: static"
    if not codes.symmetric and not codes.grid.offset:
        return "use weights: uint4 or uint5, whose groups have a minimum instead of a zero point"
    block = block_type_of(codes.grid.name)
    if block is not None:
        return f"use group_size: {block.group}, which {block.name} has"
    names = ", ".join(name for block in BLOCK_TYPES.values() for name in block.grids)
    return f"use weights: {names}, or format: native"


def _fallback(block: BlockType) -> str:
    fallback = BLOCK_TYPES.get(FALLBACK.get(block.name, ""))
    return "weights: none for this layer in overrides" if fallback is None else f"fallback: {fallback.grids[-1]}"


def _tensors(
    architecture: Architecture,
    ends: Ends,
    shards: Mapping[str, Path],
    blocks: Mapping[str, BlockType | None],
    layers: Set[str],
) -> Iterator[Stored]:
    """Yield the tensors of the file in the order of the shards.

    blocks: the block types by name in the shards. layers: the weights that are read back as codes; others of `blocks`
    are read back dense.
    """
    name_in_file = architecture.tensor_names(ends.config.num_hidden_layers)
    sources: dict[str, list[tuple[Path, str]]] = {}
    values_of: dict[str, dict[str, Any]] = {}
    for full, path in sorted(shards.items(), key=lambda item: (item[1], *_numbered(item[0]))):
        plain = full.removesuffix(BLOCKS)
        weight_name = ends.embedding if ends.tied and plain == ends.head else plain
        for part, values in architecture.parts(weight_name or plain, ends.config).items():
            file_name = None if weight_name is None else name_in_file(part)
            if file_name is None:
                raise SaveError(
                    f"save: llama.cpp has no tensor for {plain} in files of the architecture {architecture.name}; use "
                    "another format"
                )
            sources.setdefault(file_name, []).append((path, full))
            values_of[file_name] = values
    for file_name, stored in sources.items():
        path, full = stored[0]
        plain = full.removesuffix(BLOCKS)
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(full)
        entry = replace(
            architecture.entry(plain, tensor.shape, ends.config, is_packed=full != plain), **values_of[file_name]
        )
        if len({name.endswith(BLOCKS) for _, name in stored}) > 1:
            raise SaveError(f"save: {ONE_TYPE.format(plain, 'codes and dense')}")
        assert len(stored) == (entry.members or 1), f"{file_name} holds {len(stored)} tensors"
        wide = full == plain and (keeps_float32(file_name) or (entry.members is not None and tensor.ndim == 1))
        read = partial(_read, stored, entry, wide)
        shape = entry.shape_in_file(tensor.shape)
        if full == plain:
            kind = "F32" if wide else DENSE[tensor.dtype]
        else:
            block = blocks[full]
            assert block is not None, "refuses was not asked"
            kind = block.name
            shape = (*shape[:-1], shape[-1] // block.size_bytes * block.size)
            entry = replace(entry, name=f"{entry.name}{BLOCKS}") if plain in layers else entry
        yield Stored(file_name, entry, kind, shape if entry.members is None else (entry.members, *shape), read)
    for name, factors in rope_factors(ends.config).items():
        yield Stored(name, None, "F32", tuple(factors.shape), partial(torch.clone, factors))


def _numbered(name: str) -> tuple[str, int]:
    """Return a key by which the tensors of experts are in the order of their numbers."""
    number = EXPERT.search(name)
    return (name, 0) if number is None else (EXPERT.sub(".experts.", name), int(number[1]))


def _read(stored: Sequence[tuple[Path, str]], entry: Entry, wide: bool) -> Tensor:
    """Return tensors of shards as the file holds them: of all experts in one, in float32 if it is `wide`."""
    tensors = []
    for path, name in stored:
        with safe_open(path, framework="pt") as file:
            tensors.append(entry.to_file(file.get_tensor(name)))
    tensor = tensors[0] if entry.members is None else torch.stack(tensors)
    return tensor.float() if wide else tensor


def _metadata(
    architecture: Architecture, ends: Ends, vocabulary: Vocabulary, tensors: Sequence[Stored]
) -> Iterator[tuple[str, Any]]:
    """Yield all values of the file's header by key."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        if len(tensor.shape) > 1 and tensor.entry is not None and tensor.entry.name.endswith(BLOCKS):
            sizes[tensor.type] = sizes.get(tensor.type, 0) + math.prod(tensor.shape)
    most = max(sizes, key=lambda kind: sizes[kind]) if sizes else None
    dense = {"F32": 0, "F16": 1, "BF16": 32}  # llama.cpp, include/*.h: the types of files
    kind = next((dense[tensor.type] for tensor in tensors if len(tensor.shape) > 1 and tensor.type in dense), 0)
    yield "general.type", "model"
    yield "general.name", ends.name
    yield "general.file_type", kind if most is None else BLOCK_TYPES[most].file_type
    yield "general.quantization_version", QUANTIZATION_VERSION
    for key, value in architecture.metadata(ends.config):
        yield f"{architecture.name}.{key}", value
    stated = {key: value for key, value in ends.config.to_dict().items() if key not in UNSTATED}
    if architecture.encoder:
        yield f"{architecture.name}.pooling_type", POOLING[ends.pooling]
        yield "tokenizer.ggml.token_type_count", ends.config.type_vocab_size
        stated["architectures"] = [ends.class_name]  # the type alone may be a model with a head
    yield CONFIG, json.dumps(stated, sort_keys=True)
    fields = (
        ("model", vocabulary.model),
        ("pre", vocabulary.pre),
        ("tokens", vocabulary.tokens),
        ("token_type", vocabulary.types),
        ("scores", vocabulary.scores),
        ("merges", vocabulary.merges),
    )
    for key, value in (*fields, *vocabulary.flags.items()):
        if value != []:
            yield f"tokenizer.ggml.{key}", value
    if vocabulary.text is not None:
        yield TOKENIZER, vocabulary.text
    if vocabulary.template is not None:
        yield "tokenizer.chat_template", vocabulary.template
