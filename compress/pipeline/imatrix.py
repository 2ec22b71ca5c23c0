"""Importance matrices of llama.cpp: those that passes read are checked before a run; others are made from a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from compress.blockwise.survey import survey_model
from compress.checkpoint.containers.files import check_output_file, user_path
from compress.checkpoint.containers.imatrix import Squares, write_imatrix
from compress.checkpoint.formats.gguf_files.importance import LayerImportance, stacked
from compress.checkpoint.load import load
from compress.data.ids import model_sample
from compress.errors import ModelError, reported_as
from compress.kernels.dispatch import plain_torch
from compress.layers.linear import linears
from compress.models.computation import device_of
from compress.models.experts import open_experts
from compress.models.kinds.contract import text_config
from compress.models.structure.blocks import find_blocks, has_two_stacks
from compress.passes.contract.context import Run
from compress.passes.contract.journal import Journal
from compress.passes.contract.layers import Surveyed
from compress.passes.contract.observers import InputNorm
from compress.passes.contract.passes import Survey
from compress.pipeline.models import model_folder
from compress.pipeline.progress import shown_progress

SUFFIX = ".gguf"
LABEL = "imatrix"


@dataclass(frozen=True)
class Imatrix:
    """A written importance matrix.

    Attributes:
        path: the file.
        entries: number of matrices.
        layers: number of linears of the model.
        tokens: tokens of the text.
        unreached: the experts that no token reached.
    """

    path: Path
    entries: int
    layers: int
    tokens: int
    unreached: tuple[str, ...]


@plain_torch()
@torch.no_grad()
def imatrix(
    model: str,
    out: str | Path,
    *,
    text: str = "embedded",
    sequences: int = 32,
    length: int = 512,
    dtype: str = "auto",
    device: str = "auto",
    journal: Journal | None = None,
    progress: bool = False,
) -> Imatrix:
    """Write the importance matrix of a model on a text, as the quantizer of llama.cpp reads it.

    The model is in memory, and runs block by block.

    Args:
        model: Hub id, local folder or .gguf file.
        out: The file to write, which ends in .gguf.
        text: Name or file of the text.
        sequences: Number of sequences.
        length: Tokens of a sequence.
        dtype: Dtype of computation.
        device: Device of computation.
        journal: Receives progress.
        progress: Whether to show a progress bar.

    Raises:
        ModelError: for a model whose tensors have no names in GGUF files.
        CalibrationError: for a text that cannot be read.
        OutputError: for a file that cannot be written.
    """
    journal, path = journal or Journal(), user_path(out)
    check_output_file(path, (SUFFIX,))
    opened, tokenizer = load(model_folder(model), dtype, device_of(device))
    if has_two_stacks(opened):
        raise ModelError(f"model: {type(opened).__name__} has two stacks of blocks; importance matrices are for one")
    open_experts(opened)
    inside = tuple(f"{block.name}." for block in find_blocks(opened))
    names = [name for name in linears(opened) if name.startswith(inside)]
    place = LayerImportance(text_config(opened.config))
    entries = {name: place.entries_of(name) for name in names}  # an unknown model is an error before the work
    with reported_as("text", "calibration", "test"):
        examples, use = model_sample(opened, tokenizer, text, "calibration", sequences, length)
    run = Run(device=device_of(device), journal=journal, calibration=examples)
    with shown_progress(journal) if progress else nullcontext():
        sums = survey_model(opened, _Squares(), names, run, LABEL)
    parts: dict[str, list[tuple[int | None, Tensor, int]]] = {}
    for name, (entries_of_layer, number) in entries.items():
        for entry in entries_of_layer:
            parts.setdefault(entry, []).append((number, *sums[name]))
    squares = {entry: Squares(*stacked(_alike(members))) for entry, members in parts.items()}
    write_imatrix(path, squares, use.text, len(examples), examples.length)
    unreached = tuple(name for name in names if sums[name][1] == 0)
    return Imatrix(path, len(squares), len(names), examples.tokens, unreached)


def _alike(members: Sequence[tuple[int | None, Tensor, int]]) -> Sequence[tuple[int | None, Tensor, int]]:
    """Return the parts of a matrix: one for each expert; of linears that are one matrix in the file, the first."""
    return members if members[0][0] is not None else members[:1]


class _Squares(Survey):
    """Collect (sums of squares of the inputs, number of tokens) of each layer; no tokens for an expert without any."""

    observer = InputNorm

    def collect(self, block: Sequence[Surveyed]) -> Mapping[str, tuple[Float[Tensor, " in"], int]]:
        return {surveyed.layer.name: self._sums(surveyed) for surveyed in block}

    def _sums(self, surveyed: Surveyed) -> tuple[Float[Tensor, " in"], int]:
        statistics: InputNorm = surveyed.statistics
        reached = surveyed.rows is not None
        sums = statistics.norm.double().square().cpu() if reached else torch.zeros(statistics.width)
        return sums.float(), statistics.tokens if reached else 0

    def allocate(
        self, figures: Mapping[str, tuple[Float[Tensor, " in"], int]]
    ) -> Mapping[str, tuple[Float[Tensor, " in"], int]]:
        return figures
