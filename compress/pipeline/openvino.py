"""Write a model for OpenVINO, with its integer codes as they are.

optimum-intel converts the dequantized model, and each weight of a compressed layer is then replaced by its codes: a
constant of 4 or 8 bits [out, groups, columns], minus zero points, times scales in float16, which is the form in which
the CPU plugin keeps codes in memory. Groups of any size, rows, and zero points have it. On processors with fast integer
products the plugin rounds inputs to 8 bits unless DYNAMIC_QUANTIZATION_GROUP_SIZE is 0, with which the comparison runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.checkpoint.formats import OPENVINO
from compress.checkpoint.formats.gptq import GPTQ
from compress.errors import TargetError
from compress.layers.linear import CompressedLinear
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.codes import groups_in
from compress.pipeline.convert import Conversion, Exported, ExportOptions, coded_layers, convert
from compress.pipeline.export import save
from compress.pipeline.openvino_process import answer, build
from compress.pipeline.runtime_export import Prepared, RuntimeExport
from compress.pipeline.runtime_files import CODES, SOURCE

BITS = (4, 8)
TOLERANCES = {"float32": 1e-4, "float16": 1e-2}
"""Of log-probabilities, relative to the largest, by the dtype of dense tensors in the files: sums in another order."""
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

    name = OPENVINO

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


def prepare(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, place: Path, options: ExportOptions
) -> Prepared:
    """Write the dequantized model in float32, and the codes of its layers to a file.

    Args:
        model: The model, whose layers are converted in place.
        tokenizer: Of the model.
        place: A temporary folder, for the folder `SOURCE` and the file `CODES`.
        options: Of the export; dtype auto is float16 for models of 16 bits.

    Raises:
        TargetError: For layers whose codes OpenVINO does not keep.
    """
    storage = next(model.parameters()).dtype
    stored = options.dtype if options.dtype != "auto" else "float32" if storage == torch.float32 else "float16"
    rows = _convert(model, place / CODES, storage, stored, options.requantize)
    save(model, place / SOURCE, "dense", tokenizer, "float32")
    return Prepared(rows, TOLERANCES[stored])


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


EXPORT = RuntimeExport(
    name=OPENVINO,
    modules=("openvino", "optimum.intel"),
    dtypes=tuple(TOLERANCES),
    prepare=prepare,
    build=build,
    answer=answer,
    program="openvino",
    package="optimum-intel",
    converter="optimum-intel",
    unknown="unsupported architecture",
    use=USE,
)
"""For OpenVINO on a CPU, by optimum-intel."""
