"""Finish a run: reload its checkpoint, verify and evaluate it, and write the report."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import PreTrainedModel

from compress.checkpoint.containers.digests import WORK
from compress.checkpoint.containers.files import write_text
from compress.checkpoint.load import load
from compress.checkpoint.sources.files import pooling_in
from compress.checkpoint.sources.hub import at_commit
from compress.checkpoint.writer import OUTSIDE
from compress.errors import SaveError, one_line
from compress.evaluation import Results, combine_all, measure_all, measured_of
from compress.evaluation.base import EvaluationContext
from compress.evaluation.evidence import CheckpointFacts, PassRecords, reproduction, run_result, sizes
from compress.evaluation.store import Store, digest_of, shared_results
from compress.models.kinds.batch import Batch
from compress.numerics.dtypes import dtype_name
from compress.passes.contract.journal import Journal
from compress.passes.contract.memory import return_freed_memory
from compress.passes.contract.passes import calibrates
from compress.pipeline.checkpoint import PROBE_FILE, open_folder
from compress.pipeline.conversions import write_formats
from compress.pipeline.evaluation import measure
from compress.pipeline.plan import final_plan, update_plan
from compress.pipeline.prepare import Job
from compress.pipeline.provenance import RECIPE_FILE, package_sha256, published
from compress.pipeline.sources import open_source
from compress.pipeline.verify import check_size, verify
from compress.recipe.evaluation import Evaluate
from compress.recipe.paths import without_folders
from compress.recipe.tables import ResultTable, Shown
from compress.report.card import CardFacts, write_card
from compress.report.names import formats_in
from compress.report.sections import formats
from compress.report.sections.size_and_quality import HEAD, rows
from compress.report.write import write_report
from compress.results.gate import quality_error
from compress.results.result import Predicted, RunResult, Verification


@dataclass(frozen=True, repr=False)
class Result(Shown):
    """The result of a run.

    Attributes:
        folder: The output folder.
        report: The content of report.json; empty in all processes of a launcher except rank 0, which writes it.
        journal: The journal of the run.
    """

    folder: Path
    report: dict[str, Any]
    journal: Journal

    @property
    def folders(self) -> dict[str, Path]:
        """The folder of the checkpoint in each format of the recipe, the output folder first; empty without report."""
        if not self.report:
            return {}
        measured = self.measured
        first = formats_in(measured.reproduce.recipe)[0]
        return {first: self.folder} | {name: self.folder / result.folder for name, result in measured.formats.items()}

    @property
    def measured(self) -> RunResult:
        """The values of `report` as typed objects.

        Raises:
            ValidationError: of pydantic, in a process that does not write the report.
        """
        return RunResult.from_json(self.report)

    def tables(self) -> list[ResultTable]:
        """Return the sizes and the quality before and after, and the formats if there are several."""
        if not self.report:
            return [ResultTable("", ("folder", "report"), [(str(self.folder), "in the process of rank 0")])]
        measured = self.measured
        shown = [ResultTable(f"{measured.model.source} -> {self.folder}", HEAD, rows(measured))]
        return shown + ([ResultTable("", formats.HEAD, formats.rows(measured))] if measured.formats else [])


@dataclass
class Evaluations:
    """The results of the evaluators of a run; nothing is measured after one that fails.

    Attributes:
        results: By the role of the model.
        failed: The reason by the key of the evaluator that failed.
        error: Its error.
    """

    results: dict[str, Results] = field(default_factory=lambda: {"base": {}, "compressed": {}})
    failed: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None

    def measure(self, job: Job, model: PreTrainedModel, context: EvaluationContext) -> None:
        """Measure a model with all evaluators, and keep the error of one that fails.

        With several processes, an error in the base model is raised: the others wait for its results.
        """
        results = self.results[context.role]
        if self.error is not None:
            return
        try:
            with job.run.phase("evaluate"):
                measure_all(model, context, job.recipe.eval is not None, results)
        except Exception as error:
            if context.role == "base" and job.run.processes.size > 1:
                raise
            key = next(key for key, _ in measured_of(context.role) if key not in results)
            self.failed[key] = f"{type(error).__name__}: {one_line(error)}; what follows was not measured"
            self.error = error

    def combined(self) -> dict[str, Any]:
        """Return the values in report.json."""
        return combine_all(self.results["compressed"], self.results["base"]) | {"failed": self.failed}


def finish(job: Job, on_failure: Callable[[dict[str, Any]], None] | None = None) -> Result:
    """Reload the checkpoint, compare it with the computed model, evaluate it, and write the report.

    Only one model is in memory at a time: the computed model is freed first. If an evaluator fails, the report has what
    was measured before. If that happens, a limit of `fail_if` is exceeded or the report cannot be written, `on_failure`
    receives the report, and the error is raised.
    """
    recipe, run, manifest, folder = job.recipe, job.run, job.manifest, job.manifest.folder
    job.opened.model.to_empty(device="meta")
    free_models()
    opened, planned = final_plan(job.resolved, job.planned, folder)
    evaluated, measured = evaluation_context(job), Evaluations()
    if recipe.eval is not None:  # first, because the compressed model is compared with what is kept of the base
        with evaluated.store.base_locked(run.journal):
            if evaluated.store.has_base_results():
                note = "results of the base model that an earlier run stored are used for the same texts and settings"
                run.journal.add("note", "evaluate", note)
            with open_source(recipe.model, recipe, opened) as original:
                measured.measure(job, original, evaluated.of_base())
            del original
        free_models()
    run.journal.add("progress", "verify", "verifying the checkpoint")
    with run.phase("verify"):
        digests = {n: d for entry in manifest.shards.values() for n, d in entry.digests.items()}
        reference = load_file(folder / WORK / PROBE_FILE)
        caches = {n: v["sha256"] for entry in manifest.shards.values() for n, v in entry.caches.items()}
        verified, model = verify(recipe, opened.dtype, folder, digests, reference, run, caches)
        run.processes.wait()
        settled = update_plan(planned, manifest.schemes_of(opened), run.format, run.storage)
        check_size(folder, sum(entry.size_bytes for entry in manifest.shards.values()), settled.checkpoint_bytes)
    free_models()
    results = [result for entry in manifest.shards.values() for result in entry.results]
    evaluated = replace(evaluated, tokenizer=opened.tokenizer, probe=Batch.of_tensors(reference), layers=results)
    measured.measure(job, model, evaluated)
    del model
    free_models()
    conversions = write_formats(job, reference)
    measured.failed |= conversions.failed
    layers = [(prod(layer.shape), layer.size_bytes) for layer in settled.layers if layer.passes]
    checkpoint = CheckpointFacts(
        size=sizes(folder, job.source_bytes, settled.dense_bytes, settled.checkpoint_bytes, layers),
        predicted=Predicted(tensor_bytes=job.planned.checkpoint_bytes, memory_bytes=job.planned.memory_bytes),
        verified=Verification(**asdict(verified)),
        masked=[name for entry in manifest.shards.values() for name in entry.masked],
        formats=conversions.records,
    )
    rows = [row for name in [*(b.name for b in opened.blocks), OUTSIDE] for row in manifest.shards[name].results]
    passes, digests = PassRecords(rows, manifest.training), (manifest.fingerprint, manifest.code)
    reproduce = reproduction(published(recipe, folder), opened, run, *digests, job.uses, calibrates(job.resolved.steps))
    report = run_result(opened, run, folder, checkpoint, passes, measured.combined(), reproduce)
    values, stated = report.to_json(), recipe.model_dump(mode="json")
    values["model"]["source"] = recipe.model
    values = without_folders(values, stated)
    values["reproduce"]["recipe"] = reproduce.recipe
    report = RunResult.from_json(values)
    result = Result(folder, report.to_json(), run.journal)
    limits = None if recipe.eval is None else recipe.eval.fail_if
    error = measured.error or conversions.error or quality_error(limits, report, str(folder))
    source, schemes = at_commit(recipe.model, opened.commit), manifest.schemes_of(opened).values()
    format_ = recipe.save.target()
    claims = format_.programs_run(schemes), format_.misreadings(schemes, opened.config)
    facts = CardFacts.of(job.resolved.steps, opened.model, *claims)
    try:
        write_text(manifest.staged / RECIPE_FILE, job.stated[RECIPE_FILE])  # `eval` may differ from the first start's
        write_report(report, folder, manifest.staged)
        write_card(report, manifest.staged, source, facts)
        manifest.publish()
    except (OSError, SaveError) as failure:
        error = failure
    if error is not None:
        if on_failure is not None:
            on_failure(result.report)
        raise error
    return result


def free_models() -> None:
    """Free models that are no longer used, which contain reference cycles, and return their memory to the system."""
    gc.collect()
    return_freed_memory()


def assist(job: Job) -> Result:
    """Compute the share of this process of the evaluation, while rank 0 finishes the run."""
    recipe, folder, opened = job.recipe, job.manifest.folder, job.opened
    opened.model.to_empty(device="meta")
    free_models()
    manifest = open_folder(folder, job.manifest.fingerprint, overwrite=False)  # as rank 0 wrote it
    evaluated = evaluation_context(replace(job, manifest=manifest))
    if recipe.eval is not None:
        with open_source(recipe.model, recipe, opened) as original:
            measure(original, evaluated.of_base())
        del original
        free_models()
    job.run.processes.wait()  # until the checkpoint is verified
    if recipe.eval is not None:
        measure(load(folder, dtype_name(opened.dtype), opened.device, recipe.trust_remote_code)[0], evaluated)
    return Result(folder, {}, job.run.journal)


def evaluation_context(job: Job) -> EvaluationContext:
    """Return the texts, settings and stored results of an evaluation.

    Results of the checkpoint depend on its bytes, and on all that those of the base model depend on.
    """
    settings, fit = job.recipe.eval or Evaluate(), job.planned.fit
    assert fit is not None
    dtype, device = dtype_name(job.opened.dtype), job.opened.device
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    versions = package_sha256(ignored=("cli", "report", "testing")), torch.__version__, transformers.__version__
    base = digest_of(job.opened.answers_digest, dtype, device.type, processor, versions)
    store = Store(
        job.manifest.folder / WORK / "evaluation",
        digest_of(sorted(entry.sha256 for entry in job.manifest.shards.values()), base),
        base,
        job.run.processes,
        shared=None if job.recipe.eval is None else shared_results(base),
    )
    return EvaluationContext(
        job.run,
        "compressed",
        job.texts,
        job.opened.tokenizer,
        steps=job.resolved.steps,
        settings=settings,
        store=store,
        base=job.recipe.model,
        pooling=pooling_in(job.opened.side_files),
        overlaps=job.overlaps,
        copies_bytes=fit.copies_bytes,
    )
