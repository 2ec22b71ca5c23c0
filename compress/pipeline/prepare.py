"""Prepare a run: open and plan the model, read the texts, and open the output folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from compress.blockwise.quantized_embeddings import quantize_embeddings
from compress.checkpoint.containers.digests import WORK
from compress.checkpoint.opened import OpenModel
from compress.checkpoint.sources.hub import at_commit
from compress.data.records import TextUse
from compress.evaluation.store import digest_of
from compress.layers.scheme import LayerScheme
from compress.models.computation import device_of
from compress.models.kinds.batch import Examples
from compress.passes.contract.context import Run
from compress.passes.contract.journal import Journal
from compress.passes.contract.passes import calibrates
from compress.passes.contract.processes import ALONE, Processes
from compress.pipeline.checkpoint import Manifest, open_folder, recorded_inputs
from compress.pipeline.divide import check_divided, check_same_inputs, training_text
from compress.pipeline.output import check_folder, check_inner_folders, check_space
from compress.pipeline.plan import Plan, plan_of
from compress.pipeline.provenance import UNKNOWN, code_of, identity, inputs_of, written
from compress.pipeline.reference import TOKENS, check_source
from compress.pipeline.resolve import ResolvedRecipe, resolve_and_check, run_of
from compress.pipeline.servers import settled_check
from compress.pipeline.sizes import within_size
from compress.pipeline.sources import open_original, open_start, open_teacher, source_bytes, take_in_compressed
from compress.pipeline.texts import (
    NOT_IN_RECIPE,
    calibration_examples,
    divided_as_in,
    eval_examples,
    given_texts,
    overlaps_of,
)
from compress.recipe.schema import Recipe
from compress.report.write import sensitivity_of
from compress.results.measurements.base import overlap_in_words


@dataclass(frozen=True)
class Job:
    """The inputs of a run, complete before it starts.

    examples: for the calibration. texts: windows of the evaluation by name, which are read first: errors come early.
    stated: the files that state the recipe, by name. source_bytes: of the weight files of the model as given. uses:
    what was read for calibration and evaluation. overlaps: the share of the tokens of each evaluation text that
    calibration reads, by name. accept: see `Shards`.
    """

    resolved: ResolvedRecipe
    run: Run
    planned: Plan
    examples: Examples
    texts: dict[str, Examples]
    manifest: Manifest
    stated: dict[str, str]
    source_bytes: int | None
    uses: tuple[TextUse, ...] = ()
    overlaps: Mapping[str, float] = field(default_factory=dict)
    accept: Callable[[str, Mapping[str, LayerScheme]], None] | None = None

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return self.resolved.recipe

    @property
    def opened(self) -> OpenModel:
        """The model that the passes work on."""
        return self.resolved.opened


def prepare(
    recipe: Recipe,
    out: Path,
    overwrite: bool,
    journal: Journal,
    processes: Processes = ALONE,
    memory_bytes: int | None = None,
) -> Job:
    """Open and check the model, targets, texts, output folder and memory, before the run starts.

    The recipe of the job has the calibration batch that fits into the limit of memory.
    """
    check_folder(out)
    journal.add("progress", "model", f"opening {recipe.model}")
    opened = open_start(recipe, device_of(recipe.device))
    for log in opened.notes:
        journal.add("note", "model", log)
    given_bytes = source_bytes(opened)
    sensitivity_of(out, opened.fingerprint)  # an error in it before the run, not at its end
    recipe = recipe if overwrite else divided_as_in(recorded_inputs(out), recipe, opened.model)
    resolved = within_size(resolve_and_check(recipe, opened))
    planned = plan_of(resolved, memory_bytes, strict=True)
    opened.undeclared = resolved.form.undeclared
    opened.map_ends()  # the check in the plan has read them
    assert planned.fit is not None
    resolved = resolved.with_calibration(batch=planned.fit.batch)
    recipe = resolved.recipe
    stated = written(recipe, out)  # before an output folder with plugins is replaced
    recorded = written(recipe.model_copy(update={"model": at_commit(recipe.model, opened.commit)}), out)
    check_space(out, planned.written_bytes)
    for log in planned.notes[len(opened.notes) :]:
        journal.add("note", "plan", log)
    run = run_of(
        resolved,
        journal,
        processes=processes,
        store_bytes=planned.fit.store_bytes,
        inputs_at_once=planned.fit.inputs_at_once,
        recomputes=planned.fit.recomputes,
        pages_weights=planned.fit.pages_weights,
        open_teacher=partial(open_teacher, recipe, opened),
        open_original=partial(open_original, recipe, opened),
        work=out / WORK / "passes",
    )
    if run.weights_folder is not None:
        opened.weights.page_within(run.weights_folder)
    for text in {use.label: use for use in given_texts(recipe, opened)}.values():
        journal.add("note", "data", f"{text.label} (sha256 {text.data.sha256[:12]}) {NOT_IN_RECIPE}")
    accept = settled_check(resolved)
    evaluated = eval_examples(recipe, opened)
    texts = {use.text: windows for windows, use in evaluated}
    with run.phase("calibration text"), processes.first_goes_first():  # the others read what the first one sampled
        examples, uses = calibration_examples(recipe, opened, memory_bytes)
    overlaps = overlaps_of(texts, examples) if calibrates(resolved.steps) else {}
    for name, share in overlaps.items():
        if share:
            journal.add("warning", "eval", overlap_in_words(name, share))
    if processes.first:
        check_source(opened, examples.beginning(TOKENS), recipe, planned.memory_bytes // processes.size, journal)
    quantize_embeddings(opened, run, resolved.steps)
    inputs, code = inputs_of(recipe, opened.fingerprint, examples.sha256()), code_of(recipe)
    for key in (key for key, digest in code.items() if digest == UNKNOWN):
        journal.add("note", key, "the source of this pass is not available: a change of its code will not be noticed")
    take_in_compressed(opened, run)
    check_divided(resolved.steps, examples, recipe.calibration.batch, processes)
    with processes.first_goes_first():
        manifest = open_folder(out, identity(inputs, code), overwrite, code, inputs)
    check_inner_folders(out, recipe.save.formats[1:], manifest.files)
    common = {"recipe": digest_of(stated), "code": digest_of(code), "model": opened.fingerprint}
    common["calibration text"] = examples.sha256()
    common["evaluation text"] = digest_of([windows.sha256() for windows in texts.values()])
    common["output folder"] = manifest.state
    check_same_inputs(common, processes)
    if manifest.complete and (damaged := manifest.damaged()):
        journal.add("note", "resume", f"missing or changed, so computed again: {', '.join(damaged)}")
        manifest.complete = False
    if manifest.complete:
        journal.add("note", "resume", "the checkpoint is already complete; it is only checked and evaluated again")
    stream = training_text(recipe.calibration, opened, recipe.seed)
    run, uses = replace(run, calibration=examples, stream=stream), (*uses, *(use for _, use in evaluated))
    return Job(resolved, run, planned, examples, texts, manifest, recorded, given_bytes, uses, overlaps, accept)
