"""export_openvino(folder, out): write a model for OpenVINO, with its integer codes as they are.

optimum-intel converts the dequantized model, and each weight of a compressed layer is then replaced by its codes: a
constant of 4 or 8 bits [out, groups, columns], minus zero points, times scales in float16, which is the form in which
the CPU plugin keeps codes in memory. Groups of any size, rows, and zero points have it. On processors with fast integer
products the plugin rounds inputs to 8 bits unless DYNAMIC_QUANTIZATION_GROUP_SIZE is 0, with which the comparison runs.

optimum-intel and the runtime run in processes of their own (`openvino_process.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from compress.checkpoint.formats.gptq import GPTQ
from compress.checkpoint.load import load
from compress.errors import SaveError, TargetError, UserError
from compress.layers.linear import CompressedLinear
from compress.layers.scheme import LayerScheme
from compress.models.child_process import reason_of, run_function
from compress.numerics.quant.codes import groups_in
from compress.pipeline.convert import Conversion, Exported, ExportOptions, coded_layers, convert, table_rows
from compress.pipeline.export import new_folder, save
from compress.pipeline.openvino_process import answer, build
from compress.pipeline.runtime_check import NAMELESS, RuntimeCheck, RuntimeComparison, check_possible, version_of
from compress.report.card import write_export_card

NAME = "openvino"
PACKAGES = ("openvino", "optimum.intel")
"""Modules of the extra `openvino`."""
BITS = (4, 8)
TOLERANCES = {"float32": 1e-4, "float16": 1e-2}
"""Of log-probabilities, relative to the largest, by the dtype of dense tensors in the files: sums in another order."""
DTYPES = ("float32", "float16")
UNKNOWN = "unsupported architecture"
"""The words with which optimum-intel refuses an architecture."""
USE = """With the package optimum-intel:

```python
from optimum.intel import OVModelForCausalLM
from transformers import AutoTokenizer

model = OVModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
prompt = tokenizer("The capital of France is", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=8)[0]))
```

`compress.load` does not read the files of OpenVINO: keep the checkpoint that this folder was made from."""


class OpenVINOLayers(GPTQ):
    """The layers whose codes OpenVINO keeps."""

    name = "openvino"

    def refuses(self, scheme: LayerScheme) -> str | None:
        codes, rounding = scheme.codes, scheme.rounding
        if codes is not None and codes.grid.bits not in BITS:
            return f"format openvino holds int4 and int8, not {codes.grid.name}"
        if codes is not None and codes.indexed:
            return "format openvino has no groups of columns in another order; use act_order: static"
        if rounding is not None:
            return "format openvino does not state quantized activations; use activations: none"
        return super().refuses(scheme)

    def clash(self, schemes: Mapping[str, LayerScheme]) -> str | None:
        return None


def export_openvino(folder: str | Path, out: Path, options: ExportOptions) -> tuple[list[Exported], RuntimeCheck]:
    """Write a dense model, or integer codes as they are, for OpenVINO, and run the result once on the CPU.

    Args:
        folder: A checkpoint of compress or another program, or the folder of a dense model.
        out: The new folder.
        options: dtype is float32, float16, or auto: float16 for models of 16 bits. type is auto: a dense model is not
            rounded.

    Returns:
        A line for each kind of layer, and the comparison.

    Raises:
        UserError: If a package is missing, for another dtype, and for an architecture that optimum-intel does not know.
        TargetError: For layers whose codes OpenVINO does not keep.
        SaveError: If the conversion fails for another reason.
        VerificationError: If the result computes other values.
    """
    dtype = options.dtype
    if dtype not in ("auto", *DTYPES):
        raise UserError(f"export: format openvino stores float32 or float16, not {dtype}; use one of them, or auto")
    check_possible(NAME, PACKAGES, options)
    model, tokenizer = load(folder, "auto", "cpu", options.trust_remote_code)
    storage = next(model.parameters()).dtype
    stored = dtype if dtype != "auto" else "float32" if storage == torch.float32 else "float16"
    with new_folder(out) as part, TemporaryDirectory(prefix=f"{out.name}.", dir=out.parent) as place:
        source, codes = Path(place) / "model", Path(place) / "codes.safetensors"
        rows = _convert(model, codes, storage, stored, options.requantize)
        save(model, source, "dense", tokenizer, "float32")
        architecture = (model.config.architectures or [NAMELESS])[0]
        del model
        _build(source, codes, part, architecture)
        check = RuntimeComparison(NAME, answer, TOLERANCES[stored]).compare(source, part, tokenizer, Path(place))
        origin = f"Converted from `{Path(folder).name}` by optimum-intel, without calibration. {check.text}. "
        write_export_card(part, str(folder), NAME, table_rows(rows), (), origin, USE)
    return rows, check


def _convert(
    model: PreTrainedModel, codes: Path, storage: torch.dtype, stored: str, requantize: bool
) -> list[Exported]:
    """Convert the layers of a model to those of OpenVINO in place, and write their codes to a file.

    stored: the dtype of dense tensors in the files, in the metadata of that file.
    """
    layers = {name: layer for name, layer in coded_layers(model).items() if layer.scheme.quantized}
    rows = convert(model, Conversion(OpenVINOLayers(), requantize), storage) if layers else []
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        tensors |= {f"{name}.{kind}": tensor.contiguous() for kind, tensor in constants_of(name, layer).items()}
    save_file(tensors, codes, {"dtype": stored})
    return rows


def constants_of(name: str, layer: CompressedLinear) -> dict[str, Tensor]:
    """Return what OpenVINO multiplies a layer from: W[o, g, c] = (codes - zero)[o, g, c] * scale[o, g].

    Args:
        name: Of the layer, for the message.
        layer: The layer, in the form of `OpenVINOLayers`.

    Returns:
        'signed' [out, groups, columns] without zero points, or 'unsigned' and 'zero' [out, groups, 1]; 'scale'
        [out, groups, 1] in float16; 'bits'.

    Raises:
        TargetError: If the layer holds something besides its codes.
    """
    part = layer.codes
    if part is None:
        raise TargetError(f"export: {name}: format openvino holds only codes, not {layer.scheme.text}")
    codes = part.codes()
    rows, width = part.shape
    groups, lowest = groups_in(width, codes.group_size), part.grid.lowest_stored
    values = codes.codes.reshape(rows, groups, width // groups)
    scale = codes.scale.expand(rows, groups).reshape(rows, groups, 1).to(torch.float16)
    bits = torch.tensor(part.grid.bits)
    if codes.zero is None:
        return {"signed": values.to(torch.int8), "scale": scale, "bits": bits}
    zero = codes.zero.expand(rows, groups).reshape(rows, groups, 1)
    unsigned = {
        "unsigned": (values.to(torch.int16) - lowest).to(torch.uint8),
        "zero": (zero.to(torch.int16) - lowest).to(torch.uint8),
    }
    return {**unsigned, "scale": scale, "bits": bits}


def _build(source: Path, codes: Path, out: Path, architecture: str) -> None:
    """Convert the model. Raises UserError for an unknown architecture, SaveError if it fails."""
    result, program = run_function(build, source, codes, out), f"optimum-intel {version_of('optimum-intel')}"
    if result.returncode == 0:
        return
    reason = reason_of(result)
    if UNKNOWN in reason:
        raise UserError(f"export: {program} does not know {architecture}; use another format, such as gguf")
    raise SaveError(f"export: {program} failed: {reason}")
