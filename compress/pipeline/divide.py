"""Divide the calibration text over the processes of a launcher, and check before the run that this is possible."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from itertools import accumulate

from compress.checkpoint.opened import OpenModel
from compress.data.training_text import TrainingText
from compress.errors import CalibrationError, UserError
from compress.models.kinds.batch import Batch, Examples
from compress.passes.contract.passes import Step, calibrates
from compress.passes.contract.processes import Processes
from compress.recipe.calibration import Calibration


def training_text(calibration: Calibration, opened: OpenModel, seed: int) -> TrainingText | None:
    """Return the texts of a calibration as streams, whose files the processes of a training divide.

    None: a text is no stream, so that training reads the calibration sequences.
    """
    texts = calibration.streams()
    if not texts or calibration.sequences is None or calibration.length is None:
        return None
    sources, weights = zip(*texts, strict=True)
    numbers = calibration.sequences, calibration.length, seed
    return TrainingText(sources, weights, opened.model, opened.tokenizer, *numbers)


def own_batches(examples: Examples, batch: int, processes: Processes) -> list[Batch]:
    """The part of every calibration batch that belongs to this process: sequence i belongs to rank i mod size.

    So every step of a pass that learns from one batch has the same sequences for any number of processes.
    """
    shares = [(part, processes.share(range(len(part)), start)) for start, part in _batches(examples, batch)]
    return [part.select(rows) for part, rows in shares if rows]


def _batches(examples: Examples, batch: int) -> list[tuple[int, Batch]]:
    """The batches with the numbers of their first sequences."""
    parts = examples.batches(batch)
    return list(zip(accumulate([len(part) for part in parts[:-1]], initial=0), parts, strict=True))


def check_divided(steps: Sequence[Step], examples: Examples, batch: int, processes: Processes) -> None:
    """Raise CalibrationError when there are too few sequences for the processes."""
    size, count = processes.size, len(examples)
    if size == 1 or not calibrates(steps):
        return
    if count < size:
        raise CalibrationError(
            f"calibration: {count} sequences cannot be divided over the {size} processes of the launcher; use "
            f"sequences: {size} or more, or launch {count}"
        )
    least = min(len(part) for _, part in _batches(examples, batch))
    for label, step, _ in steps:
        if step.requires.batches and least < size:
            remedy = f"use calibration.batch: {size} or more that divides the {count} sequences"
            if len(examples.by_shape()) > 1:  # a batch has transcripts of one length
                remedy = "use a shorter calibration.length, to which more transcripts are cut"
            raise CalibrationError(
                f"{label}: learns in steps of one calibration batch, and the {size} processes of the launcher need a "
                f"sequence of each, but one has {least}; {remedy}, or launch fewer processes"
            )


def check_same_inputs(digests: Mapping[str, str], processes: Processes) -> None:
    """Raise UserError unless all processes see the same. digests: of the inputs of the run, by what they are."""
    reference, *replies = processes.gather((socket.gethostname(), dict(digests)))
    for rank, (host, rank_digests) in enumerate(replies, 1):
        different = [name for name, digest in rank_digests.items() if reference[1][name] != digest]
        if different:
            raise UserError(
                f"launcher: process {rank} on {host} does not see what process 0 on {reference[0]} sees: the "
                f"{' and the '.join(different)} differ; start all processes with the same files, and with a folder on "
                "a file system that they share"
            )
