"""GGUF files as models: converted once to a folder of safetensors in the user's cache, and opened from there.

Reading goes through transformers and its owners' `gguf` package. Dequantizing takes the whole model in memory and
half a minute, so it is done once, in a process of its own, whose memory goes back to the system.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from compress.errors import ModelError

CONVERTED = "compress/gguf"


def as_safetensors(path: Path) -> Path:
    """The folder with the float32 safetensors, config and tokenizer of a .gguf file, made if it is not there yet.

    Raises ModelError: no such file, not a GGUF file, an architecture that transformers cannot read from GGUF, or the
    `gguf` package missing.
    """
    if not path.is_file():
        raise ModelError(f"model: no file {path}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else hashlib.sha256(file.read())
        file.seek(0)
        if file.read(4) != b"GGUF":
            raise ModelError(f"model: {path} is not a GGUF file (it does not begin with 'GGUF')")
    from huggingface_hub.constants import HF_HOME  # the cache that the user already has for models

    folder = Path(HF_HOME) / CONVERTED / digest.hexdigest()[:32]
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        command = [sys.executable, "-m", "compress.model.open.gguf", str(path), str(part)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(part, ignore_errors=True)
            reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
            raise ModelError(
                f"model: {path} cannot be read ({reason}); reading GGUF needs the extra: compress-llm[gguf]"
            )
        part.rename(folder)
    return folder


def convert(path: Path, folder: Path) -> None:
    """Write a .gguf file's model as float32 safetensors, with its config and tokenizer, into a folder."""
    import torch  # this function runs in a process of its own
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if name not in tied}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.__dict__.pop("quantization_config", None)
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
