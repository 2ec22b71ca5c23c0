"""Checks of the files of a model's folder before a library reads them.

A folder may come from anybody. Nothing outside of it is opened, a special file (such as a pipe) cannot block, and JSON
has a limit of size and depth. The numbers of config.json that transformers loops over are limited, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISREG
from typing import Any

from compress.checkpoint.containers.digests import LOADED, MANIFEST, SUMS, WORK
from compress.checkpoint.containers.files import POINTED, is_inside, is_pointer
from compress.errors import ModelError

RUNTIME_FILES = {"genai_config.json": "ONNX Runtime GenAI", "openvino_model.xml": "OpenVINO"}
"""Files of programs whose models are no checkpoints."""
TEMPLATES = "additional_chat_templates"
"""A folder inside of a model's folder; transformers reads its templates."""
LARGEST_JSON = 1 << 26  # bytes; the largest tokenizer.json of a published model has about half of it
DEEPEST_JSON = 64
LARGEST_COUNT = 1 << 20  # of layers, heads, experts, labels: far beyond any model, and a loop of seconds
FILE_LIST = "fast_tokenizer_files"
"""The entry of tokenizer_config.json that lists names of files."""


def check_complete(folder: Path) -> None:
    """Raise ModelError for the output folder of a run that has not written all files of its checkpoint."""
    try:
        complete = read_json(folder / WORK / MANIFEST).get("complete", True)
    except ValueError:  # the folder of no run
        return
    if complete is not True:
        raise ModelError(
            f"model: {folder} is the output folder of a run that is not finished; run the same command again to finish "
            "it"
        )


def check_no_adapter(folder: Path) -> None:
    """Raise ModelError for the folder of a LoRA adapter, which holds no model."""
    adapter = folder / "adapter_config.json"
    if (folder / "config.json").exists() or not adapter.is_file():
        return
    try:
        base = f", {name}," if isinstance(name := read_json(adapter).get("base_model_name_or_path"), str) else ""
    except ValueError:
        base = ""
    raise ModelError(
        f"model: {folder} holds a LoRA adapter, not a model; merge it into its base model{base} first: with peft, "
        "AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(FOLDER)"
    )


def unread_files(folder: Path) -> list[str]:
    """Return notes on files of a folder with weights that belong to the model, and that are not read."""
    adapter = (folder / "adapter_config.json").is_file()
    note = "adapter_config.json: the LoRA adapter in the folder is not read; merge it into the model first"
    return [note] if adapter else []


def check_is_checkpoint(folder: Path) -> None:
    """Raise ModelError for a folder of ONNX Runtime GenAI or OpenVINO, which `compress export` writes."""
    for file, program in RUNTIME_FILES.items():
        if (folder / file).exists():
            raise ModelError(
                f"model: {folder} holds a model of {program}, which that program runs; give the checkpoint that it "
                "was exported from"
            )


def check_folder(folder: Path) -> None:
    """Raise ModelError for a file of a model that is a link out of its folder, or neither a file nor a folder.

    The folder of an unfinished run is refused, too, and a pointer of Git LFS in the place of a file.
    """
    check_complete(folder)
    check_no_adapter(folder)
    if not any(folder.glob("*.safetensors")):
        check_is_checkpoint(folder)
    try:
        inner = folder / TEMPLATES
        paths = [*folder.iterdir(), *(inner.iterdir() if inner.is_dir() and is_inside(inner, folder) else ())]
        for path in paths:
            if path.suffix not in LOADED and path.name not in (TEMPLATES, SUMS):
                continue
            if not is_inside(path, folder):
                raise ModelError(f"model: {path} is a link to a file outside of {folder}; put a copy in its place")
            if path.exists() and not path.is_file() and not path.is_dir():
                raise ModelError(f"model: {path} is not a regular file; put the file itself in its place")
            if path.is_file() and is_pointer(path):
                raise ModelError(f"model: {path} {POINTED}")
            if path.suffix == ".json" and path.exists() and path.stat().st_size > LARGEST_JSON:
                raise ModelError(f"model: {path} has more than {LARGEST_JSON >> 20} MiB; fetch it again")
    except (OSError, RuntimeError) as error:  # the latter for a link to itself
        raise ModelError(f"model: the files of {folder} cannot be listed ({error})") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises ValueError with the reason if there is none, or if it is too large or deep."""
    value = read_value(path)
    if not isinstance(value, dict):
        raise ValueError("it is not a valid JSON file: it holds no object at the top")
    return value


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """The JSON list of objects of a file. Raises ValueError as `read_json` does."""
    value = read_value(path)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError("it is not a valid JSON file: it holds no list of objects at the top")
    return value


def read_value(path: Path) -> Any:
    """The JSON value of a file. Raises ValueError as `read_json` does."""
    try:
        about = path.stat()
        if about.st_size > LARGEST_JSON:
            raise ValueError(f"it has more than {LARGEST_JSON >> 20} MiB")
        if not S_ISREG(about.st_mode):
            raise ValueError("it is not a regular file")
        value = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError as error:
        raise ValueError("it is missing") from error
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not a valid JSON file: byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not a valid JSON file: {error}") from error
    except RecursionError as error:
        raise ValueError(f"its values are nested in more than {DEEPEST_JSON} levels") from error
    level = [value]
    for _ in range(DEEPEST_JSON + 1):
        containers = [inner for inner in level if isinstance(inner, (dict, list))]
        if not containers:
            return value
        level = [
            inner
            for container in containers
            for inner in (container.values() if isinstance(container, dict) else container)
        ]
    raise ValueError(f"its values are nested in more than {DEEPEST_JSON} levels")


def check_config(values: Mapping[str, Any], trust_remote_code: bool) -> None:
    """Raise ValueError for entries of config.json that would make transformers loop for long, or fetch code."""
    for key, value in ((str(key), value) for key, value in values.items()):
        if isinstance(value, Mapping):
            check_config(value, trust_remote_code)
        counts = key.startswith(("num_", "n_")) or key.endswith("_layers")
        if counts and isinstance(value, int) and not -1 <= value <= LARGEST_COUNT:
            raise ValueError(f"its {key} is {value}, but it must be at most {LARGEST_COUNT} and not negative")
        hub = key.endswith("_implementation") and "/" in repr(value)
        if hub and not trust_remote_code:
            raise ValueError(f"its {key} names code of the hub, {value!r}; set trust_remote_code: true to run it")


def check_tokenizer(folder: Path) -> None:
    """Raise ModelError for small files of a tokenizer that are no JSON objects, or that name files elsewhere."""
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        path = folder / name
        if not path.exists():
            continue
        try:
            values = read_json(path)
            listed = values.get(FILE_LIST) or []
            names = listed if isinstance(listed, list) else [listed]
            if not all(isinstance(listed_name, str) and Path(listed_name).name == listed_name for listed_name in names):
                raise ValueError(f"its {FILE_LIST} must be a list of names of files in the folder")
        except ValueError as error:
            raise ModelError(f"model: the tokenizer in {folder} cannot be read: {name}: {error}") from error
