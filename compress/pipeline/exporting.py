"""export(folder, out, format): write a checkpoint in another format, or for another runtime, without calibration."""

from __future__ import annotations

from pathlib import Path

from compress.checkpoint.containers.files import user_path
from compress.pipeline import onnx, openvino
from compress.pipeline.convert import Exported, ExportOptions, export_checkpoint
from compress.pipeline.runtime_check import RuntimeCheck

RUNTIME_EXPORTS = {form.name: form for form in (onnx.EXPORT, openvino.EXPORT)}
"""The exports for programs that read other files, by name."""


def export_checked(
    folder: str | Path, out: str | Path, format: str, options: ExportOptions
) -> tuple[list[Exported], RuntimeCheck | None]:
    """Write a checkpoint in another format; `compress.export` says more.

    Args:
        folder: The checkpoint, compressed or dense.
        out: The new folder.
        format: A name of `FORMATS` or `RUNTIMES`.
        options: The options.

    Returns:
        A line for each kind of layer, and of a runtime the comparison with the checkpoint.
    """
    path = user_path(out)
    if format in RUNTIME_EXPORTS:
        return RUNTIME_EXPORTS[format].write(folder, path, options)
    return export_checkpoint(folder, path, format, options), None


def export(
    folder: str | Path,
    out: str | Path,
    format: str = "native",
    requantize: bool = False,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    type: str = "auto",
) -> list[Exported]:
    """Write the checkpoint in `folder` in another format to the new folder `out`, without calibration.

    Without `requantize`, every code stays as it is, bit for bit, and every layer keeps its dequantized weight, but for
    scales that a format stores in a fixed dtype, such as float16, and that are rounded to it; groups that the
    format does not have are split into smaller ones of equal scales. With it, a layer that the format cannot
    store is rounded to the nearest grid that it can. A dense embedding or head is rounded where the format does so.
    A checkpoint without compressed layers, dense or pruned, is written by `gguf`, `onnx` and `openvino`.

    format: as `save.format` of a recipe; 'onnx': for ONNX Runtime GenAI, by its model builder (extra:
    compress-llm[onnx]); 'openvino': for OpenVINO, by optimum-intel (extra: compress-llm[openvino]). The last two are
    run once and compared with the checkpoint; `compress.load` does not read them.

    dtype: of dense tensors; 'auto': that of the checkpoint. type: only for `gguf` and a checkpoint without compressed
    layers: number type of all matrices: F32, F16, BF16 or Q8_0; 'auto': that of `dtype`. Returns a line for each kind
    of layer that is rounded, and with Q8_0 for each that stays dense because its width is no multiple of the block.

    Raises TargetError for a layer that the format cannot store without rounding, with the formats that can, and for
    weights outside of the range of `type`; UserError for an unknown format or type; and the errors of `compress.load`
    and `compress.save`.
    """
    return export_checked(folder, out, format, ExportOptions(requantize, dtype, trust_remote_code, type))[0]
