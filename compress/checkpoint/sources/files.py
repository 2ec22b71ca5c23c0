"""Files in a model's folder other than its weights: tokenizer, processor, sentence-transformers; and a fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from compress.checkpoint.containers.files import is_inside
from compress.checkpoint.sources.untrusted import TEMPLATES, check_tokenizer, read_json, read_json_list, read_value
from compress.errors import ModelError, one_line
from compress.models.terms import Pooling

SAMPLE_BYTES = 1 << 16  # a fingerprint reads this many bytes at each of SAMPLES places of a file, to be fast
SAMPLES = 64

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
SENTENCEPIECE = "tokenizer.model"
ANSWERING = (
    *("*tokenizer*", "vocab*", "merges.txt", "*.model", "added_tokens.json", "special_tokens_map.json"),
    *("*.jinja", "chat_template*", f"{TEMPLATES}/*", "generation_config.json", "*processor*.json"),
)
"""Files that determine, besides configuration and weights, what a model answers to a text."""
MODULES = "modules.json"
"""The list of modules of sentence-transformers."""
PLAIN = "*sentence*.json"
"""Other files of sentence-transformers; one has the name of an architecture in its name."""
SIDE_FILES = ("*.json", "*.jinja", "*.txt", "LICENSE*", "NOTICE*")
"""Other files of a model that are copied to the checkpoint unchanged, such as those of a processor."""
CODE = "*.py"
"""The model's own code, which is copied if it is trusted."""
NOT_COPIED = (
    *("config.json", "generation_config.json", "*.index.json", "params.json"),  # written anew, or of other weights
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),  # by the tokenizer
    *(
        "quantize_config.json",
        "quant_config.json",
        "hf_quant_config.json",
        "adapter_config.json",
    ),  # of another form of the weights
    *("report.*", "sensitivity.json", "trainer_state.json", "*_results.json", MODULES, PLAIN),
)
LARGEST_SIDE_FILE = 64_000_000  # bytes

MODES: dict[str, Pooling] = {"pooling_mode_cls_token": "first", "pooling_mode_lasttoken": "last"}


def fingerprint_of(folder: Path, paths: list[Path]) -> str:
    """Return a digest of config.json and of the size and samples of every weight file; the same on every machine."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for i in range(SAMPLES):
                file.seek(i * size // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def answers_digest_of(folder: Path, fingerprint: str, paths: Sequence[Path]) -> str:
    """Return a digest of all that the answers of a model depend on; that of a copy may differ.

    A fingerprint has samples of the weights. This digest also has the times at which their files were written, and the
    files of the tokenizer, of chat templates and of the defaults of generation.

    Args:
        folder: Folder of the model.
        fingerprint: Its fingerprint (`fingerprint_of`).
        paths: Its files of weights.
    """
    digest = hashlib.sha256(fingerprint.encode())
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_mtime_ns}".encode())
    for path in sorted({path for pattern in ANSWERING for path in folder.glob(pattern)}):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()


def read_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """Read the tokenizer of a model; None when it has none. Raises ModelError."""
    names = [name for name in TOKENIZER_FILES if (folder / name).exists()]
    if not names:
        return None
    check_tokenizer(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises Exception itself
        remedy = _remedy(folder, trust_remote_code)
        raise ModelError(
            f"model: the tokenizer in {folder} ({', '.join(names)}) cannot be read ({one_line(error)}); {remedy}"
        ) from error


def _remedy(folder: Path, trust_remote_code: bool) -> str:
    """Return what to do about a tokenizer that cannot be read."""
    code = _tokenizer_code(folder)
    if code is not None and not trust_remote_code:
        return (
            f"its class is code in the folder ({code}); read that code, and set trust_remote_code: true to run it, or "
            "add a tokenizer.json to the folder"
        )
    is_sentencepiece = (folder / SENTENCEPIECE).exists() and not (folder / "tokenizer.json").exists()
    if is_sentencepiece and find_spec("sentencepiece") is None:
        return (
            f"{SENTENCEPIECE} is a file of SentencePiece, which needs packages: pip install sentencepiece protobuf; "
            "or add a tokenizer.json to the folder"
        )
    return "fetch it again"


def _tokenizer_code(folder: Path) -> str | None:
    """Return the name of the class of a tokenizer that is code in its folder; None for one of transformers."""
    try:
        stated = read_json(folder / "tokenizer_config.json").get("auto_map")
    except ValueError:
        return None
    names = stated.get("AutoTokenizer") if isinstance(stated, dict) else stated
    names = names if isinstance(names, list) else [names]
    return next((name for name in names if isinstance(name, str)), None)


def read_side_files(folder: Path, trust_remote_code: bool) -> dict[str, str]:
    """Return the text of each file that is copied to the checkpoint, by its name.

    Args:
        folder: of the model.
        trust_remote_code: whether the model's own code is among them.

    Raises:
        ModelError: for a JSON file that cannot be read.
    """
    patterns = [*SIDE_FILES, CODE] if trust_remote_code else SIDE_FILES
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    texts = {}
    for path in paths:
        if any(path.match(pattern) for pattern in NOT_COPIED) or not path.is_file() or not is_side_file(path, folder):
            continue
        try:
            if path.suffix == ".json":
                read_value(path)
            texts[path.name] = path.read_text("utf-8")
        except ValueError as error:
            raise ModelError(f"model: {path} cannot be read: {error}; fetch it again, or remove it") from error
    return texts


def is_side_file(path: Path, folder: Path) -> bool:
    """Return whether a file is in a folder, not a link to one elsewhere, and not too large for a side file."""
    return is_inside(path, folder) and path.stat().st_size <= LARGEST_SIDE_FILE


def read_sentence_files(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Read the files of sentence-transformers: how hidden states become the embedding of a text.

    Returns:
        Texts by relative path, which are copied to the checkpoint unchanged, and notes. A folder whose modules have
        weights of their own has none of them, and a note.

    Raises:
        ModelError: for a file that cannot be read, or that names a folder elsewhere.
    """
    if not (folder / MODULES).exists():
        return {}, []
    parts, texts = _modules(folder), {MODULES: (folder / MODULES).read_text("utf-8")}
    texts |= {path.name: _text(path, folder) for path in sorted(folder.glob(PLAIN))}
    for part in parts:
        if not part.is_dir():
            continue  # such as the folder of a normalization, which has no files
        weights = sorted(path.name for path in part.iterdir() if path.name != "config.json")
        if weights:
            return {}, [f"{part.name}/{weights[0]} of sentence-transformers was not copied, nor {MODULES}; copy them"]
        if (part / "config.json").exists():
            texts[f"{part.name}/config.json"] = _text(part / "config.json", folder)
    return texts, []


def pooling_in(files: Mapping[str, str]) -> Pooling:
    """Return how a model makes embeddings; the mean if none of its files says.

    Args:
        files: texts by relative path, as `read_sentence_files` returns.
    """
    for name, text in files.items():
        values = json.loads(text) if name.endswith("/config.json") else {}
        for mode, pooling in MODES.items():
            if values.get(mode) is True:
                return pooling
    return "mean"


def _modules(folder: Path) -> list[Path]:
    """The folders of the modules after the model itself. Raises ModelError for a file that says none."""
    path = folder / MODULES
    try:
        names: list[Any] = [entry.get("path") for entry in read_json_list(path)]
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ValueError("each of its entries must have the path of a folder in the model's folder")
        parts = [folder / name for name in names if name]
        if outside := [part for part in parts if not is_inside(part, folder)]:
            raise ValueError(f"it names {outside[0].name}, which is outside of the folder")
    except ValueError as error:
        raise ModelError(f"model: {path} cannot be read: {error}; fetch it again") from error
    return parts


def _text(path: Path, folder: Path) -> str:
    """The text of a JSON file in a model's folder. Raises ModelError."""
    try:
        if not is_inside(path, folder):
            raise ValueError(f"it is a link to a file outside of {folder}")
        read_json(path)
    except ValueError as error:
        raise ModelError(f"model: {path} cannot be read: {error}; fetch it again") from error
    return path.read_text("utf-8")
