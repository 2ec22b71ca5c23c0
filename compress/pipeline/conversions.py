"""Convert the finished checkpoint of a run to its further formats, read each back and compare it."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import Tensor

from compress.blockwise.quantized_embeddings import quantize_embeddings
from compress.checkpoint.containers.files import file_sha256, tensor_file_bytes
from compress.checkpoint.load import load
from compress.checkpoint.opened import OpenModel
from compress.errors import CompressError, one_line
from compress.evaluation.evidence import checkpoint_files, digest_of_files
from compress.kernels.dispatch import plain_torch
from compress.models.forward import logits_of
from compress.models.kinds.batch import Batch
from compress.numerics.dtypes import dtype_name
from compress.passes.contract.context import Run
from compress.pipeline.convert import coded_layers, convert, rounded_ends, table_rows
from compress.pipeline.export import digests_of, write_checkpoint
from compress.pipeline.formats import conversion_to, in_format
from compress.pipeline.prepare import Job
from compress.pipeline.verify import verify
from compress.report.card import write_export_card
from compress.results.result import ConvertedLayers, FormatResult, Verification

IN_RUN = (
    "The run that compressed the model converted its checkpoint to this format, without another calibration, and "
    "compared the logits with those of the converted model. The model card in the folder above has size, quality and "
    "recipe. "
)
"""A sentence of the card of a converted checkpoint."""


@dataclass
class Conversions:
    """The further formats of a run.

    Attributes:
        records: The checkpoint in each format, by name.
        failed: The reason by the name of a format that could not be written.
        error: The first error.
    """

    records: dict[str, FormatResult] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    error: CompressError | None = None


def write_formats(job: Job, reference: Mapping[str, Tensor]) -> Conversions:
    """Write each further format of a run that is not there yet; a format that fails does not stop the others.

    Args:
        job: A run whose checkpoint is complete and verified.
        reference: a `Batch`, and 'logits' of the computed model for it.
    """
    conversions = Conversions()
    for name in job.recipe.save.formats[1:]:
        record, journal = job.manifest.formats.get(name), job.run.journal
        if record is not None and _is_intact(job.manifest.folder, FormatResult.model_validate(record)):
            journal.add("note", "save", f"the checkpoint in format {name} is already complete")
            continue
        journal.add("progress", "save", f"converting the checkpoint to format {name}")
        try:
            with job.run.phase("convert"):
                result = _write(job, name, reference)
        except CompressError as error:
            conversions.failed[name] = f"{type(error).__name__}: {one_line(error)}"
            conversions.error = conversions.error or error
            continue
        job.manifest.formats[name] = result.model_dump(mode="json")
        job.manifest.write()
    for name, record in job.manifest.formats.items():
        conversions.records[name] = FormatResult.model_validate(record)
    return conversions


def _is_intact(folder: Path, result: FormatResult) -> bool:
    """Return whether all files of a converted checkpoint are as they were written."""
    paths = {folder / result.folder / name: digest for name, digest in result.files.items()}
    return all(path.is_file() and file_sha256(path) == digest for path, digest in paths.items())


@plain_torch()
def _write(job: Job, name: str, reference: Mapping[str, Tensor]) -> FormatResult:
    """Convert the checkpoint to one format in the staging folder, publish it, and compare it with the converted model.

    Weights that the format rounds change the logits; these are then compared with those of the converted model.
    """
    manifest, run, started = job.manifest, job.run, job.opened
    resolved = in_format(job.resolved, name)
    recipe, format_ = resolved.recipe, resolved.format
    dtype = dtype_name(started.dtype)
    model, tokenizer = load(manifest.folder, dtype, run.device, recipe.trust_remote_code)
    rows = convert(model, conversion_to(format_), run.storage)
    opened = OpenModel.in_memory(model, tokenizer, started.source)
    opened.side_files = started.side_files
    target = Run(run.device, run.storage, format=format_, sparse=recipe.save.sparse if format_.sparse else "off")
    rows += rounded_ends(opened, target)
    quantize_embeddings(opened, target, ())
    if any(row.error for row in rows):
        logits = logits_of(model, Batch.of_tensors(reference)).cpu()
        reference = {**reference, "logits": logits}
    shutil.rmtree(manifest.staged)  # what a killed run had not finished
    loads_in = started.loads_in if recipe.save.dtype == "auto" else run.storage
    shards = write_checkpoint(opened, target, manifest.staged / name, loads_in)
    programs = format_.programs_run([layer.scheme for layer in coded_layers(model).values()])
    del model, opened
    gc.collect()  # models contain reference cycles
    manifest.publish()
    folder = manifest.folder / name
    caches = {layer: entry["sha256"] for shard in shards.values() for layer, entry in shard.caches.items()}
    verified, _ = verify(recipe, started.dtype, folder, digests_of(shards), reference, run, caches)
    card = manifest.staged / name
    card.mkdir()
    write_export_card(card, recipe.model, name, table_rows(rows), programs, IN_RUN)
    manifest.publish()
    files = checkpoint_files(folder)
    return FormatResult(
        folder=name,
        tensor_bytes=sum(entry.size_bytes for entry in shards.values()),
        checkpoint_bytes=tensor_file_bytes(folder),
        layers=[ConvertedLayers(**asdict(row)) for row in rows],
        verified=Verification(**asdict(verified)),
        files=files,
        checkpoint_sha256=digest_of_files(files),
    )
