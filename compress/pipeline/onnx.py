"""export_onnx(folder, out): write a model for ONNX Runtime GenAI, through that project's model builder.

The builder takes the folder of a dense model, or codes in the layouts of AutoAWQ and GPTQ, and writes `model.onnx`,
`model.onnx.data`, `genai_config.json` and the tokenizer. It keeps codes as the operands of MatMulNBits, whose groups
are powers of two from 16. It reads zero points of AutoAWQ right, and those of GPTQ of either version as if they were
of the first; int4 is therefore given to it in the layout of AutoAWQ where that stores all layers, and GPTQ is left to
weights without zero points. MatMulNBits rounds inputs to 8 bits in the groups of the weights, which is the builder's
default on a CPU (`accuracy_level` 4).

Builder and runtime run in processes of their own (`onnx_process.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.checkpoint.formats.awq import AWQ
from compress.checkpoint.formats.base import Format
from compress.checkpoint.formats.gptq import GPTQ
from compress.checkpoint.load import load
from compress.errors import SaveError, TargetError, UserError
from compress.layers.scheme import LayerScheme
from compress.models.child_process import reason_of, run_function
from compress.pipeline.convert import Conversion, Exported, ExportOptions, coded_layers, convert, table_rows
from compress.pipeline.export import new_folder, save
from compress.pipeline.onnx_process import answer, build, precision_of
from compress.pipeline.runtime_check import NAMELESS, RuntimeCheck, RuntimeComparison, check_possible, version_of
from compress.report.card import write_export_card

NAME = "onnx"
PROGRAM = "onnxruntime-genai"
PACKAGES = ("onnxruntime_genai", "onnxruntime", "onnx", "onnx_ir")
"""Modules of the extra `onnx`."""
BITS = (4, 8)
GROUPS = (128, 64, 32, 16)
"""Group sizes of both layouts that MatMulNBits has: powers of two from 16 (contrib_ops/cpu/quantization)."""
TOLERANCES = {"fp32": 1e-3, "int4": 5e-2}
"""Of log-probabilities, relative to the largest: sums in another order, and inputs of 8 bits, for each precision."""
UNKNOWN = "is not currently supported"
"""The words with which the builder refuses an architecture."""
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
        return super().refuses(scheme) or _refuses_size(scheme, self.group_size)


class BuilderGPTQ(GPTQ):
    """The layers of format gptq that the builder takes.

    Args:
        group_size: Of all layers.
    """

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

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
        return _refuses_size(scheme, self.group_size)


SOURCES: tuple[Format, ...] = tuple(form(size) for size in GROUPS for form in (BuilderAWQ, BuilderGPTQ))
"""The layouts that the builder is given: the first that stores all layers is used."""


def export_onnx(folder: str | Path, out: Path, options: ExportOptions) -> tuple[list[Exported], RuntimeCheck]:
    """Write a dense model, or integer codes as they are, for ONNX Runtime GenAI on a CPU, and run the result once.

    Args:
        folder: A checkpoint of compress or another program, or the folder of a dense model.
        out: The new folder.
        options: dtype is float32, or auto, which is the same; type is auto: a dense model is not rounded.

    Returns:
        A line for each kind of layer, and the comparison.

    Raises:
        UserError: If a package is missing, for another dtype, and for an architecture that the builder does not know.
        TargetError: For layers whose codes it does not take.
        SaveError: If it fails for another reason.
        VerificationError: If the result computes other values.
    """
    if options.dtype not in ("auto", "float32"):
        raise UserError(f"export: format onnx computes in float32 on a CPU, not in {options.dtype}; leave dtype out")
    check_possible(NAME, PACKAGES, options)
    model, tokenizer = load(folder, "auto", "cpu", options.trust_remote_code)
    with new_folder(out) as part, TemporaryDirectory(prefix=f"{out.name}.", dir=out.parent) as place:
        source = Path(place) / "model"
        rows = _write_source(model, tokenizer, source, options.requantize)
        architecture = (model.config.architectures or [NAMELESS])[0]
        del model
        _build(source, part, architecture)
        limit = TOLERANCES[precision_of(source)]
        check = RuntimeComparison(PROGRAM, answer, limit).compare(source, part, tokenizer, Path(place))
        write_export_card(part, str(folder), NAME, table_rows(rows), (), f"{_origin(folder)}{check.text}. ", USE)
    return rows, check


def _origin(folder: str | Path) -> str:
    return f"Converted from `{Path(folder).name}` by the model builder of ONNX Runtime GenAI, without calibration. "


def _write_source(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path, requantize: bool
) -> list[Exported]:
    """Write the model in the layout that the builder is given; returns a line for each kind of compressed layer."""
    layers = coded_layers(model)
    schemes = {name: layer.scheme for name, layer in layers.items()}
    if not any(scheme.quantized for scheme in schemes.values()):
        save(model, folder, "dense", tokenizer)
        return []
    form = _source_format(schemes, requantize)
    rows = convert(model, Conversion(form, requantize), next(model.parameters()).dtype)
    save(model, folder, form.name, tokenizer)
    return rows


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
        "export: format onnx holds int4, and int8 without zero points, in groups of 16 to 128 columns of one size: "
        f"{reasons[-1]}"
    )


def _rounds_to(form: Format, schemes: Mapping[str, LayerScheme]) -> bool:
    """Return whether a layout has a scheme for every layer."""
    try:
        Conversion(form, requantize=True).targets(schemes)
    except TargetError:
        return form is SOURCES[-1]
    return True


def _refuses_size(scheme: LayerScheme, size: int) -> str | None:
    """Return why a layer does not have groups of a size; None if it does."""
    if scheme.codes is None or scheme.codes.group_size == size:
        return None
    return f"its groups are {scheme.codes.group_size}, not {size}"


def _build(source: Path, out: Path, architecture: str) -> None:
    """Run the builder. Raises UserError for an architecture that it does not know, SaveError if it fails."""
    result = run_function(build, source, out)
    if result.returncode == 0:
        return
    reason = reason_of(result)
    if UNKNOWN in reason:
        raise UserError(
            f"export: the model builder of onnxruntime-genai {version_of(PROGRAM)} does not know {architecture}; "
            "use another format, such as gguf"
        )
    raise SaveError(f"export: the model builder of onnxruntime-genai {version_of(PROGRAM)} failed: {reason}")
