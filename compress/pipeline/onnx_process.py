"""What runs in the processes of an ONNX export: the model builder of ONNX Runtime GenAI, and its runtime.

The builder's modules have names such as `builders` and `quantization`, and both libraries print.
"""

from __future__ import annotations

import json
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from compress.pipeline.runtime_files import SOURCE

DENSE_NODES = "/lm_head/MatMul,/model/embed_tokens/Gather"
"""The builder's names of the LM head and the embedding, which it would round to 4 bits."""


def precision_of(source: Path) -> str:
    """Return the precision that the builder is asked for: int4 for codes, which it keeps, and fp32 for a dense model.

    Args:
        source: Folder of the model.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    return "int4" if "quantization_config" in config else "fp32"


def build(place: Path, out: Path) -> None:
    """Run the builder.

    Args:
        place: Folder of the model, `SOURCE`.
        out: Folder of the result.
    """
    source = place / SOURCE
    options = {"-i": source, "-o": out, "-p": precision_of(source), "-e": "cpu", "-c": "cache"}
    sys.argv[1:] = [str(text) for pair in options.items() for text in pair]
    sys.argv += ["--extra_options", f"nodes_to_exclude={DENSE_NODES}", "hf_token=false"]
    runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__", alter_sys=True)


def answer(folder: Path, asked: Path, answered: Path) -> None:
    """Write the logits of a model in ONNX Runtime GenAI.

    Args:
        folder: Its folder.
        asked: File of the token ids.
        answered: File to write.
    """
    og: Any = import_module("onnxruntime_genai")  # an optional dependency
    ids = load_file(asked)["ids"].to(torch.int32)
    model = og.Model(str(folder))
    options = og.GeneratorParams(model)
    options.set_search_options(max_length=len(ids) + 1)
    generator = og.Generator(model, options)
    generator.append_tokens(ids.numpy())
    logits = torch.as_tensor(generator.get_output("logits"))
    save_file({"logits": logits[0].float().contiguous()}, answered)
