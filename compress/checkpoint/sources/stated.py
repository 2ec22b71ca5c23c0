"""The `quantization_config` of a folder, wherever its writer states it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.checkpoint.sources.untrusted import read_json
from compress.errors import ModelError

MLX_KEY = "quantization"
"""The entry of config.json in which mlx-lm states the numbers of a model."""
SEPARATE_CONFIGS = (("quantize_config.json", "gptq", None), ("hf_quant_config.json", "modelopt", "quantization"))
"""Files with a `quantization_config`, their `quant_method`, and the key of it in them."""


def stated_quantization(config: Mapping[str, Any], folder: Path) -> Any:
    """Return the `quantization_config` of a folder, wherever its writer states it; None without one.

    Args:
        config: Entries of config.json.
        folder: Folder of the model; AutoGPTQ and NVIDIA Model Optimizer write separate files there.

    Raises:
        ModelError: for a file that cannot be read.
    """
    if isinstance(affine := config.get(MLX_KEY), Mapping):
        return {**affine, "quant_method": "mlx"}
    return config.get("quantization_config") or _separate_config(folder)


def _separate_config(folder: Path) -> dict[str, Any] | None:
    """Return the `quantization_config` in a separate file. Raises ModelError."""
    for name, method, key in SEPARATE_CONFIGS:
        path = folder / name
        if not path.is_file():
            continue
        try:
            values = read_json(path)
            values = values if key is None else values.get(key)
            if not isinstance(values, dict):
                raise ValueError(f"it has no object {key!r}")
        except ValueError as error:
            raise ModelError(f"model: {path} cannot be read: {error}; fetch it again") from error
        return {"quant_method": method, **values}
    return None
