"""Export a checkpoint to a program that reads other files: convert, run the result once, compare, write its card.

What the programs differ in is a value, `RuntimeExport`, of `onnx.py` and `openvino.py`. Their libraries run in
processes of their own (`onnx_process.py`, `openvino_process.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.checkpoint.load import load
from compress.errors import SaveError, UserError
from compress.models.child_process import reason_of, run_function
from compress.pipeline.convert import Exported, ExportOptions, table_rows
from compress.pipeline.export import new_folder
from compress.pipeline.runtime_check import RuntimeCheck, RuntimeComparison, check_possible, version_of
from compress.report.card import write_export_card

NAMELESS = "this architecture"
"""The name in messages of an architecture that a configuration does not state."""


@dataclass(frozen=True)
class Prepared:
    """What a converter is given.

    Attributes:
        rows: A line for each kind of compressed layer.
        tolerance: Greatest difference of log-probabilities of the result, relative to the largest.
    """

    rows: list[Exported]
    tolerance: float


@dataclass(frozen=True)
class RuntimeExport:
    """How a model is written for a program.

    Attributes:
        name: Of the format, and of the extra; one of `RUNTIMES`.
        modules: Modules of the packages of the extra.
        dtypes: Of dense tensors that the files hold.
        prepare: Writes the model to the folder `SOURCE` of a temporary folder, in place, and what else the converter
            reads.
        build: A function of a module that converts (the temporary folder) to a second path. It is called in a child
            process.
        answer: A function of a module that writes the logits of (folder, file of token ids) to a third path, too.
        program: The program, by the name of its package.
        package: The package of the converter.
        converter: The converter in messages, without its version.
        unknown: Words with which it refuses an architecture.
        use: How the result is used, in Markdown, for the card.
    """

    name: str
    modules: Sequence[str]
    dtypes: Sequence[str]
    prepare: Callable[[PreTrainedModel, PreTrainedTokenizerBase | None, Path, ExportOptions], Prepared]
    build: Callable[[Path, Path], None]
    answer: Callable[[Path, Path, Path], None]
    program: str
    package: str
    converter: str
    unknown: str
    use: str

    def write(self, folder: str | Path, out: Path, options: ExportOptions) -> tuple[list[Exported], RuntimeCheck]:
        """Write a dense model, or integer codes as they are, for the program, and run the result once on the CPU.

        Args:
            folder: A checkpoint of compress or another program, or the folder of a dense model.
            out: The new folder.
            options: dtype is one of `dtypes`, or auto; type is auto: a dense model is not rounded.

        Returns:
            A line for each kind of layer, and the comparison.

        Raises:
            UserError: If a package is missing, for another dtype, and for an architecture that the converter does not
                know.
            TargetError: For layers whose codes the program does not take.
            SaveError: If the conversion fails for another reason.
            VerificationError: If the result computes other values.
        """
        if options.dtype not in ("auto", *self.dtypes):
            raise UserError(
                f"export: format {self.name} stores {' or '.join(self.dtypes)}, not {options.dtype}; leave dtype out"
            )
        check_possible(self.name, self.modules, options)
        model, tokenizer = load(folder, "auto", "cpu", options.trust_remote_code)
        with new_folder(out) as part, TemporaryDirectory(prefix=f"{out.name}.", dir=out.parent) as temporary:
            place = Path(temporary)
            prepared = self.prepare(model, tokenizer, place, options)
            architecture = (model.config.architectures or [NAMELESS])[0]
            del model
            self._build(place, part, architecture)
            comparison = RuntimeComparison(self.program, self.answer, prepared.tolerance)
            check = comparison.compare(place, part, tokenizer)
            origin = f"Converted from `{Path(folder).name}` by {self.converter}, without calibration. {check.text}. "
            write_export_card(part, str(folder), self.name, table_rows(prepared.rows), (), origin, self.use)
        return prepared.rows, check

    def _build(self, place: Path, out: Path, architecture: str) -> None:
        """Convert the model. Raises UserError for an unknown architecture, SaveError if it fails."""
        result, program = run_function(self.build, place, out), f"{self.converter} {version_of(self.package)}"
        if result.returncode == 0:
            return
        reason = reason_of(result)
        if self.unknown in reason:
            raise UserError(f"export: {program} does not know {architecture}; use another format, such as gguf")
        raise SaveError(f"export: {program} failed: {reason}")
