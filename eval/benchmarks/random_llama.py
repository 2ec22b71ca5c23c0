"""Write a Llama of random weights in bfloat16, and token ids for it; for benchmarks of models that nobody trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(
    folder: Path,
    shape: dict[str, Any],
    ids: tuple[int, int],
    shard_bytes: int,
    device: str = "cpu",
    kind: str = "LlamaConfig",
) -> None:
    """Write the model, a shard at a time, and ids.npy with token ids [sequences, length].

    shape: arguments of the configuration. ids: sequences and length. device: draws the weights. kind: the class of the
    configuration in transformers.
    """
    import numpy as np  # here: a benchmark limits the memory of processes that need none of these
    import transformers
    from accelerate import init_empty_weights

    config = getattr(transformers, kind)(**shape, bos_token_id=0, eos_token_id=1, dtype="bfloat16")
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config)
        shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_shards(folder, shapes, shard_bytes, device)
    config.architectures = [type(model).__name__]
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(config.vocab_size, size=ids))
    config.save_pretrained(folder)  # the last: it says that the model is complete


def write_shards(folder: Path, shapes: dict[str, tuple[int, ...]], shard_bytes: int, device: str) -> None:
    """Write random tensors of these shapes in safetensors files of about a size, with their index."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    parts: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        if parts[-1] and held + size > shard_bytes:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += size
    places = {}
    for i, names in enumerate(parts, 1):
        file = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        tensors = {name: random_weight(shapes[name], device) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def random_weight(shape: tuple[int, ...], device: str) -> Any:
    """A matrix of standard deviation 0.02, or the ones of a norm."""
    import torch

    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return (torch.randn(shape, device=device) * 0.02).bfloat16().cpu()
