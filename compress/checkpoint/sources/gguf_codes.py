"""Open a GGUF file of any program with its codes, as the checkpoint of the format `gguf` that it nearly is.

The folder of the checkpoint is in the user's cache: the file itself (a hard link where the system allows it; the parts
of a split file are merged), its configuration and tokenizer as transformers reads them from its header, and the names
of its tensors (`SIDECAR`). No weight is read. A file whose codes cannot stay codes is converted to dense weights
instead (`checkpoint.sources.gguf`).
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from compress.checkpoint.blocks import BLOCK_TYPES
from compress.checkpoint.containers.gguf import BLOCKS, DENSE, SIDECAR, packed_index
from compress.checkpoint.containers.gguf_header import FILE, architecture_of_file
from compress.checkpoint.formats.gguf import GGUF
from compress.checkpoint.formats.gguf_files.architecture import architecture_of, rope_factors
from compress.checkpoint.sources.gguf import as_safetensors, made_once
from compress.checkpoint.sources.gguf_contents import (
    check_counts,
    check_keys,
    check_none_missing,
    check_none_unread,
    complete_config,
    header_of,
    isolate_digits,
    own_config,
    own_tokenizer,
)
from compress.checkpoint.sources.gguf_header_config import config_of_header, kind_of_header
from compress.checkpoint.sources.gguf_layers import schemes_in_file, tensors_in_file
from compress.checkpoint.sources.gguf_parts import gguf_of, merge, parts_of
from compress.checkpoint.sources.hub import safetensors_folder
from compress.checkpoint.sources.skeleton import empty_model
from compress.errors import ModelError, NotThisFormat, call_foreign
from compress.models.experts import open_experts

log = logging.getLogger(__name__)

KEPT = "compress/gguf-codes-4"  # the number changes when the content of a folder does


def checkpoint_of(source: str) -> Path:
    """`folder_of`, but the layers of a .gguf file stay codes if all its tensors can be read so. Raises ModelError."""
    path = gguf_of(source)
    return safetensors_folder(source) if path is None else folder_of_codes(path)


def folder_of_file(path: Path, codes: bool) -> Path:
    """Return the folder of a .gguf file, with its codes or as a dense model, which transformers makes.

    A file whose header transformers cannot read keeps its codes in any case.

    Args:
        path: the file.
        codes: whether codes are kept, if they can be read.

    Raises:
        ModelError: for a file that cannot be read.
    """
    return folder_of_codes(path) if codes or _keeps_codes(path) else as_safetensors(path)


def _keeps_codes(path: Path) -> bool:
    """Whether transformers cannot read the header of a file; the conversion reports a damaged one."""
    try:
        architecture = architecture_of_file(parts_of(path)[0])
    except ValueError:
        return False
    return architecture is not None and kind_of_header(architecture) is not None


def folder_of_codes(path: Path) -> Path:
    """Return the folder of a .gguf file with its codes, or, if they cannot be read, with dense weights.

    Raises:
        ModelError: for a file that cannot be read in either way.
    """
    try:
        return made_once(path, KEPT, lambda folder: _keep(path, folder))
    except ModelError as error:  # the conversion reports what is wrong with the file, if anything is
        if _keeps_codes(path):
            raise
        log.info("%s is converted to dense weights: %s", path, error)
        return as_safetensors(path)


def _keep(path: Path, folder: Path) -> None:
    """Write the folder.

    Raises:
        NotThisFormat: for a file without codes, or with some that cannot stay codes.
        CannotRun: if transformers or `gguf` cannot read the file.
        ModelError: for a file that is not read completely.
    """
    parts = parts_of(path)
    if len(parts) > 1:
        call_foreign(merge, parts, folder / FILE)
    else:
        try:
            os.link(path, folder / FILE)
        except OSError:  # on another file system
            shutil.copyfile(path, folder / FILE)
    _describe(folder / FILE)


def _describe(path: Path) -> None:
    """Write configuration, tokenizer and index of a file to its folder. Raises as `_keep`."""
    header = call_foreign(header_of, path)
    check_counts(header)
    types = header.types
    stated = own_config(header) or config_of_header(header)
    config = call_foreign(AutoConfig.from_pretrained, path.parent, gguf_file=path.name) if stated is None else stated
    architecture = architecture_of(config)
    if architecture is None or not set(types.values()) <= {*BLOCK_TYPES, *DENSE.values()}:
        raise NotThisFormat(f"model: {path}: its architecture, or a type of its tensors, is not known")
    folder, config.dtype = path.parent, torch.float32
    replaced = complete_config(header, config) if stated is None else set(rope_factors(config))
    if stated is None:
        check_keys(header, config)
    config.save_pretrained(folder)
    model = empty_model(folder, config, torch.float32, False)
    open_experts(model)
    parts = dict(tensors_in_file(model, architecture))
    file_names = {name for names in parts.values() for name in names}
    check_none_missing(header, file_names - set(types))
    check_none_unread(header, set(types) - file_names - replaced)
    in_rows = {full: list(names) for full, names in parts.items() if not any("stacked" in v for v in names.values())}
    schemes = dict(schemes_in_file(model, in_rows, types))
    entries = {}
    for full, values_by_name in parts.items():
        is_packed = full.removesuffix(".weight") in schemes
        entry = architecture.entry(full, model.state_dict()[full].shape, config, is_packed)
        entry = replace(entry, name=f"{entry.name}{BLOCKS}") if is_packed else entry
        entries |= {name: replace(entry, **values) for name, values in values_by_name.items()}
    quantization = GGUF().config(schemes, [], "")
    if quantization is None and stated is None:
        raise NotThisFormat(f"model: {path} has no codes")
    (folder / SIDECAR).write_text(packed_index(entries), encoding="utf-8")
    if quantization is not None:
        config.quantization_config = quantization
    config.save_pretrained(folder)
    if (generation := getattr(model, "generation_config", None)) is not None:  # encoders have none
        generation.save_pretrained(folder)
    if stated is not None and (tokenizer := call_foreign(own_tokenizer, header)) is not None:
        tokenizer.save_pretrained(folder)
        return
    # AutoTokenizer reads the files of few architectures, this class those of all
    kind: Any = AutoTokenizer if stated is None else PreTrainedTokenizerFast
    tokenizer = call_foreign(kind.from_pretrained, path.parent, gguf_file=path.name)
    isolate_digits(header, tokenizer)
    tokenizer.save_pretrained(folder)
