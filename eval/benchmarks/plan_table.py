"""The table of docs/guides/plan-hardware.md: predicted memory, disk and hours of published models on 1 and 8 devices.

    python eval/benchmarks/plan_table.py [MODEL...] [--device H100]

The configurations are built in code with the sizes that the models' config.json files state; no file is fetched, and no
weight is read. 128 sequences of 2,048 tokens, weights in bfloat16. `wanda` in its default, with repair.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import transformers

from compress.errors import ShortageError
from compress.pipeline.hardware import plan_hardware
from compress.recipe.schema import Recipe

LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
QWEN = {"vocab_size": 151936, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B": (
        "Llama",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, **LLAMA},
    ),
    "Llama-3.1-70B": (
        "Llama",
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, **LLAMA},
    ),
    "Qwen3-30B-A3B": (
        "Qwen3Moe",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, **QWEN},
    ),
    "Qwen3-235B-A22B": (
        "Qwen3Moe",
        {
            "hidden_size": 4096,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            **QWEN,
        },
    ),
    "DeepSeek-V3": ("DeepseekV3", {}),  # the defaults of the class
}
"""Class and sizes of each model."""
PASSES: dict[str, dict[str, Any]] = {
    "gptq int4": {"gptq": {"weights": "int4", "group_size": 128}},
    "FP8-dynamic": {"scheme": "FP8-dynamic"},
    "wanda 2:4": {"wanda": {"pattern": "2:4"}},
}
"""A pass or a scheme by the name of its line."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(MODELS))
    parser.add_argument("--device", default="H100")
    arguments = parser.parse_args()
    unknown = set(arguments.models) - set(MODELS)
    if unknown:
        parser.error(f"no model is called {', '.join(sorted(unknown))}; known: {', '.join(MODELS)}")
    device = arguments.device
    print(
        f"| model | recipe | disk GB | GB of 1 {device} | hours | GB of each of 8 | hours |\n|---|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as work:
        for model in arguments.models:
            folder = written(model, Path(work))
            for name, step in PASSES.items():
                print(f"| {model} | `{name}` | {cells(folder, step, device)} |", flush=True)


def written(model: str, work: Path) -> Path:
    """Write config.json of a model into a folder."""
    kind, sizes = MODELS[model]
    config = getattr(transformers, f"{kind}Config")(**sizes, tie_word_embeddings=False, dtype="bfloat16")
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(work / model)
    return work / model


def cells(folder: Path, step: dict[str, Any], device: str) -> str:
    """Disk, and memory and hours on one device and on eight."""
    recipe = Recipe.from_data(
        {
            "model": str(folder),
            "calibration": {"source": "wikitext", "sequences": 128, "length": 2048},
            "passes": [step],
            "eval": None,
            "save": {"verify": "own"},
        }
    )
    try:
        planned = plan_hardware(recipe, f"8x{device}")
    except ShortageError:
        return "does not fit | | | |"
    by_count = {setting.processes: setting for setting in planned.settings}
    parts = [f"{planned.disk_bytes / 1e9:.0f}"]
    for count in (1, 8):
        setting = by_count.get(count)
        seconds = None if setting is None else setting.total_seconds
        memory = (
            "does not fit" if setting is None else f"{(setting.fit.peak_bytes + planned.libraries_bytes) / 1e9:.0f}"
        )
        parts += [memory, "" if seconds is None else f"{seconds / 3600:.2g}"]
    return " | ".join(parts)


if __name__ == "__main__":
    main()
