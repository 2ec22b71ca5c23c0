"""Write a model for ONNX Runtime GenAI, through that project's model builder.

The builder takes the folder of a dense model, or codes in the layouts of AutoAWQ and GPTQ, and writes `model.onnx`,
`model.onnx.data`, `genai_config.json` and the tokenizer. It keeps codes as the operands of MatMulNBits, whose groups
are powers of two from 16. It reads zero points of AutoAWQ right, and those of GPTQ of either version as if they were
of the first; int4 is therefore given to it in the layout of AutoAWQ where that stores all layers, and GPTQ is left to
weights without zero points. Bits and group sizes that differ from layer to layer need GPTQ, with patterns in `dynamic`
that match the names of tensors. The linears of the blocks have codes, or none has: the builder stops at a dense one
among others. MatMulNBits rounds inputs to 8 bits in the groups of the weights, which is the builder's default on a CPU
(`accuracy_level` 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.checkpoint.formats import ONNX
from compress.checkpoint.formats.awq import AWQ
from compress.checkpoint.formats.base import Format
from compress.checkpoint.formats.gptq import GPTQ
from compress.checkpoint.opened import OpenModel
from compress.errors import TargetError
from compress.layers.linear import CompressedLinear
from compress.layers.scheme import LayerScheme
from compress.pipeline.convert import Conversion, Exported, ExportOptions, coded_layers, convert
from compress.pipeline.export import save
from compress.pipeline.onnx_process import answer, build, precision_of
from compress.pipeline.runtime_export import Prepared, RuntimeExport
from compress.pipeline.runtime_files import SOURCE

BITS = (4, 8)
GROUPS = (128, 64, 32, 16)
"""Group sizes of both layouts that MatMulNBits has: powers of two from 16 (contrib_ops/cpu/quantization)."""
TOLERANCES = {"fp32": 1e-3, "int4": 5e-2}
"""Of log-probabilities, relative to the largest: sums in another order, and inputs of 8 bits, for each precision."""
USE = """In Python, with the package onnxruntime-genai:

```python
import onnxruntime_genai as og

model = og.Model("FOLDER")
tokenizer = og.Tokenizer(model)
options = og.GeneratorParams(model)
options.set_search_options(max_length=64)
generator = og.Generator(model, options)
generator.append_tokens(tokenizer.encode("The capital of France is"))
while not generator.is_done():
    generator.generate_next_token()
print(tokenizer.decode(generator.get_sequence(0)))
```

`compress.load` does not read ONNX files: keep the checkpoint that this folder was made from."""


class BuilderAWQ(AWQ):
    """The layers of format awq that the builder takes.

    Args:
        group_size: Of all layers.
    """

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    def refuses(self, scheme: LayerScheme) -> str | None:
        reason = super().refuses(scheme)
        if reason is not None or scheme.codes is None or scheme.codes.group_size == self.group_size:
            return reason
        return f"its groups are {scheme.codes.group_size}, not {self.group_size}"


class BuilderGPTQ(GPTQ):
    """The layers of format gptq that the builder takes."""

    def refuses(self, scheme: LayerScheme) -> str | None:
        codes, reason = scheme.codes, super().refuses(scheme)
        if reason is not None or codes is None:
            return reason
        if codes.grid.bits not in BITS:
            return f"ONNX Runtime has groups of int4 and int8, not of {codes.grid.name}"
        if not codes.symmetric:
            return "the model builder misreads zero points of format gptq, and format awq has those of int4 alone"
        if codes.indexed:
            return "groups of columns in another order are not checked; use act_order: static"
        if codes.group_size not in GROUPS:
            return f"its groups are {codes.group_size}, not {', '.join(map(str, GROUPS))}"
        return None


SOURCES: tuple[Format, ...] = (*(BuilderAWQ(size) for size in GROUPS), BuilderGPTQ())
"""The layouts that the builder is given: the first that stores all layers is used."""


def prepare(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, place: Path, options: ExportOptions
) -> Prepared:
    """Write a model in the layout that the builder is given.

    Args:
        model: The model, whose layers are converted in place.
        tokenizer: Of the model.
        place: A temporary folder; the model is written to its folder `SOURCE`.
        options: Of the export.

    Raises:
        TargetError: For layers whose codes the builder does not take.
    """
    rows = _write_source(model, tokenizer, place / SOURCE, options.requantize)
    return Prepared(rows, TOLERANCES[precision_of(place / SOURCE)])


def _write_source(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path, requantize: bool
) -> list[Exported]:
    """Write the model in the layout that the builder is given; returns a line for each kind of compressed layer."""
    layers = coded_layers(model)
    schemes = {name: layer.scheme for name, layer in layers.items()}
    if not any(scheme.quantized for scheme in schemes.values()):
        save(model, folder, "dense", tokenizer)
        return []
    _check_none_dense(model)
    form = _source_format(schemes, requantize)
    rows = convert(model, Conversion(form, requantize), next(model.parameters()).dtype)
    save(model, folder, form.name, tokenizer)
    return rows


def _check_none_dense(model: PreTrainedModel) -> None:
    """Raise TargetError for a dense linear of a block; those with one output are no targets of passes."""
    for name in OpenModel.in_memory(model, None).linear_names():
        layer = CompressedLinear.of(model.get_submodule(name))
        if layer.scheme.plain and layer.shape[0] > 1:
            raise TargetError(
                f"export: {name} is dense, but the model builder of ONNX Runtime GenAI takes codes of all linears of "
                "the blocks, or of none; quantize it too, for example with weights: int8, or use format openvino"
            )


def _source_format(schemes: Mapping[str, LayerScheme], requantize: bool) -> Format:
    """Return the first layout for the builder that stores all layers. Raises TargetError."""
    reasons = []
    for form in SOURCES:
        try:
            Conversion(form).targets(schemes)
        except TargetError as error:
            reasons.append(str(error).removeprefix("export: "))
        else:
            return form
    if requantize:
        return next(form for form in SOURCES if _rounds_to(form, schemes))
    raise TargetError(
        f"export: format onnx holds int4, and int8 without zero points, in groups of 16 to 128 columns: {reasons[-1]}"
    )


def _rounds_to(form: Format, schemes: Mapping[str, LayerScheme]) -> bool:
    """Return whether a layout has a scheme for every layer."""
    try:
        Conversion(form, requantize=True).targets(schemes)
    except TargetError:
        return form is SOURCES[-1]
    return True


EXPORT = RuntimeExport(
    name=ONNX,
    modules=("onnxruntime_genai", "onnxruntime", "onnx", "onnx_ir"),
    dtypes=("float32",),
    prepare=prepare,
    build=build,
    answer=answer,
    program="onnxruntime-genai",
    package="onnxruntime-genai",
    converter="the model builder of onnxruntime-genai",
    unknown="is not currently supported",
    use=USE,
)
"""For ONNX Runtime GenAI on a CPU, which computes in float32."""
