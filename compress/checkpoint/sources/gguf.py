"""Read GGUF files as models: convert a file once to a folder of safetensors in the user's cache, and open that folder.

transformers and the `gguf` package of the format's owners read the file. Dequantizing needs the whole model in memory
and takes half a minute. It therefore runs once, in a separate process (`models.child_process`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from compress.checkpoint.containers.safetensors_writing import write_shard
from compress.checkpoint.sources.gguf_contents import (
    check_counts,
    check_keys,
    check_none_missing,
    check_tensors,
    complete_config,
    header_of,
    isolate_digits,
)
from compress.checkpoint.sources.gguf_header_config import kind_of_header
from compress.checkpoint.sources.gguf_parts import check_magic, digest_of_parts, merge, parts_of
from compress.checkpoint.sources.limits import limited_modules
from compress.checkpoint.sources.narrow import record_narrow
from compress.errors import ModelError
from compress.models.child_process import run_function

CONVERTED = "compress/gguf-5"  # the number changes when the content of a folder does

REFUSED = f"\n{ModelError.__module__}.{ModelError.__qualname__}: "
"""What Python writes before the message of a ModelError that ends a process."""


def as_safetensors(path: Path) -> Path:
    """Return the folder with the float32 safetensors, config and tokenizer of a .gguf file; convert it if needed.

    Raises ModelError: no such file, not a GGUF file, an architecture that transformers cannot read from GGUF, a file
    that lacks tensors or holds some that are not read (`gguf_contents`), or the `gguf` package is missing.
    """
    return made_once(path, CONVERTED, lambda folder: _converted(path, folder))


def _converted(path: Path, folder: Path) -> None:
    process = run_function(convert, path, folder)
    if process.returncode:
        refused = process.stderr.rpartition(REFUSED)[2].strip() if REFUSED in process.stderr else None
        if refused:
            raise ModelError(refused)
        reason = (
            process.stderr.strip().splitlines()[-1] if process.stderr.strip() else f"exit code {process.returncode}"
        )
        raise ModelError(
            f"model: {path} cannot be read ({reason}); "
            "if the gguf package is missing, install the extra: compress-llm[gguf]"
        )


def made_once(path: Path, kind: str, make: Callable[[Path], None]) -> Path:
    """The folder of a file in the user's cache of models, by the digest of the file; `make` fills it the first time.

    The digest of a split file is that of all its parts. Raises ModelError for a missing file or part and for a file of
    another kind, and what `make` raises; nothing is left then.
    """
    paths = parts_of(path)
    for part in paths:
        check_magic(part)
    from huggingface_hub.constants import HF_HOME  # when it is needed, as users set it

    folder = Path(HF_HOME) / kind / digest_of_parts(paths)[:32]
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_suffix(".part")
    with FileLock(folder.with_suffix(".lock")):  # other commands on the same file wait, and use what this one makes
        if not folder.exists():
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            try:
                make(part)
                part.rename(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return folder


def convert(path: Path, folder: Path) -> None:
    """Write the model of a .gguf file, whole or split, as float32 safetensors, with config and tokenizer, to a folder.

    Raises ModelError for a file that is not read completely, and the errors of transformers and `gguf`.
    """
    import torch  # this function runs in a process of its own
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    parts = parts_of(path)
    merged_file = path if len(parts) == 1 else folder / "merged.gguf"
    if len(parts) > 1:
        merge(parts, merged_file)
    from_file: dict[str, Any] = {"gguf_file": merged_file.name}
    header = replace(header_of(merged_file), path=path)
    check_counts(header)
    if kind_of_header(name := str(header.values["general.architecture"])) is not None:
        raise ModelError(
            f"model: {path}: a {name} file is read with its codes, but transformers cannot make a dense model of it; "
            "use the model's safetensors"
        )
    config = AutoConfig.from_pretrained(merged_file.parent, **from_file)
    replaced = complete_config(header, config)
    check_keys(header, config)
    with torch.device("meta"), limited_modules(path, sum(part.stat().st_size for part in parts)):
        check_tensors(header, AutoModelForCausalLM.from_config(config), replaced)
    loading: dict[str, Any] = {**from_file, "dtype": torch.float32, "output_loading_info": True, "config": config}
    loaded: Any = AutoModelForCausalLM.from_pretrained(merged_file.parent, **loading)
    model, info = loaded
    check_none_missing(header, info["missing_keys"])
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if name not in tied}
    record_narrow(folder, merged_file, tensors)
    write_shard(folder / "model.safetensors", tensors)
    model.config.__dict__.pop("quantization_config", None)
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(merged_file.parent, **from_file)
    isolate_digits(header, tokenizer)
    tokenizer.save_pretrained(folder)
    if merged_file != path:
        merged_file.unlink()
