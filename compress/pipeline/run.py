"""run(recipe, out): compress block by block, save, reload and compare, evaluate, report. Used by the command line."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.api.context import Run, device_of
from compress.api.journal import Journal
from compress.api.passes import Pass, Step
from compress.data.ids import corpus_sha256
from compress.errors import CalibrationError, ShortageError
from compress.evaluate import combine_all, measure_all
from compress.evaluate.base import EvaluationContext
from compress.formats import FORMATS
from compress.formats.containers.files import write_text
from compress.formats.native import Native
from compress.model.objective import objective_of
from compress.model.open.experts import open_experts
from compress.model.open.opening import InMemory, OpenModel, open_model
from compress.model.open.vocabulary import check_teacher
from compress.model.structure.blocks import find_blocks
from compress.pipeline.checkpoint import PROBE_FILE, WORK, Manifest, Shards, fingerprint, open_folder
from compress.pipeline.engine import Memory, engine
from compress.pipeline.plan import Plan, final_plan, plan_of, update_plan
from compress.pipeline.progress import shown_progress
from compress.pipeline.resolve import calibration_ids, eval_ids, lm_objective_for, resolve, storage_dtype, teachers
from compress.pipeline.verify import check_size, verify
from compress.recipe.order import check_order
from compress.recipe.schema import Recipe, read_passes
from compress.recipe.starts import folder_of
from compress.report.build import build_report, reproduction, sizes
from compress.report.card import CardFacts, write_card
from compress.report.schema import Predicted, Verification
from compress.report.write import write_report
from compress.version import __version__

PROBE_TOKENS = 64  # length of the probe: enough for proofs, cheap at every block


@dataclass(frozen=True)
class Result:
    """The result of a run: the folder, the content of report.json, and the journal.

    report: empty in all processes of a launcher except rank 0, which writes it.
    """

    folder: Path
    report: dict[str, Any]
    journal: Journal


def run(
    recipe: Recipe | str | Path,
    out: str | Path | None = None,
    overwrite: bool = False,
    journal: Journal | None = None,
    progress: bool = True,
) -> Result:
    """Compress the recipe's model into the folder `out`, check it, evaluate it, and write report.json and report.md.

    recipe: or the path of its YAML file. out: by default a folder of `out/`, with the name of the file, or of the model
    and the passes (`default_folder`). overwrite: replace another run in the folder. progress: show a progress bar on
    standard error; where that is no terminal, a line for every tenth.

    The same call resumes a run that was killed; a complete run is only checked and evaluated again. With several
    processes, started by `accelerate launch` or torchrun, all processes train together and rank 0 does everything else.

    Raises the errors of `compress.errors`.
    """
    folder = Path(out) if out is not None else default_folder(recipe)
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.from_yaml(recipe)
    processes = PartialState(cpu=device_of(recipe.device).type == "cpu")
    first = processes.is_main_process
    journal = (journal or Journal()) if first else Journal()
    with shown_progress(journal) if progress and first else nullcontext():
        with processes.main_process_first():
            job = prepare(recipe, folder, overwrite, journal)
        processes.wait_for_everyone()  # so that all processes read the same manifest
        trains = any(step.requires.training for _, step, _ in job.steps)
        if not job.manifest.complete and (first or trains):
            compress(job, first, together=trains)
        processes.destroy_process_group()
        return finish(job) if first else Result(folder, {}, journal)


def default_folder(recipe: Recipe | str | Path) -> Path:
    """The output folder of a run without `out`: out/ and the name of the file, or of the model and the passes."""
    if not isinstance(recipe, Recipe):
        return Path("out") / Path(recipe).stem
    return folder_of(recipe.model, *(step.key() for step in recipe.passes))


def apply(
    model: PreTrainedModel,
    passes: Pass | Sequence[Pass],
    calibration: Tensor | None = None,
    batch: int = 4,
    journal: Journal | None = None,
    teacher: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreTrainedModel:
    """Apply passes to a model in memory, in place, and return it. Experts stored as 3-D weights become linears.

    passes: a list, or one pass; also as recipes spell them, such as [{"scheme": "W4A16"}]. calibration: token ids
    [sequences, length]; required unless all passes are data-free. batch: sequences per batch. teacher: the uncompressed
    model, for passes that learn from it; by default a copy of the model. tokenizer: provides the mask token, for passes
    that train a masked language model or compute its loss.

    Raises RecipeError for an impossible order, TargetError, CalibrationError, ModelError for an unfit teacher or a
    missing mask token.
    """
    passes = read_passes([passes] if isinstance(passes, Pass) else passes)
    check_order(passes)
    first, journal = next(model.parameters()), journal or Journal()
    for log in open_experts(model):
        journal.add("note", "model", log)
    opened = OpenModel(
        model.eval(), find_blocks(model), InMemory(), tokenizer, type(model).__name__, "", first.device, first.dtype
    )
    context = Run(opened.device, first.dtype, journal=journal, format=Native())
    steps, _ = resolve(passes, opened, context.format)
    if calibration is None and any(step.requires.data for step in passes):
        raise CalibrationError("calibration: these passes need token ids, an integer tensor [sequences, length]")
    ids = torch.arange(PROBE_TOKENS)[None] % model.config.vocab_size if calibration is None else calibration
    batches = [] if calibration is None else list(ids.split(batch))
    context.calibration = calibration
    context.open_teacher = teachers(passes, model, teacher, opened)
    context.lm_objective = lm_objective_for(steps, opened)
    engine(steps, opened, batches, ids[:1, :PROBE_TOKENS], context, Memory())
    return model


@dataclass(frozen=True)
class Job:
    """The inputs of a run, resolved before it starts.

    ids: calibration token ids. texts: evaluation token ids by name; they are read first, so that an error comes early.
    """

    recipe: Recipe
    opened: OpenModel
    context: Run
    steps: list[Step]
    planned: Plan
    ids: Tensor
    texts: dict[str, Tensor]
    manifest: Manifest


def prepare(recipe: Recipe, out: Path, overwrite: bool, journal: Journal) -> Job:
    """Open and check the model, targets, texts and output folder, before the run starts."""
    opened = open_model(recipe.model, recipe.dtype, device_of(recipe.device), recipe.trust_remote_code)
    for log in opened.notes:
        journal.add("note", "model", log)
    format_ = FORMATS[recipe.save.format]
    context = Run(opened.device, storage_dtype(recipe, opened), recipe.seed, format_, recipe.save.sparse, journal)
    planned = plan_of(recipe, opened)
    steps, _ = resolve(recipe.passes, opened, format_)
    for step in recipe.passes:
        if isinstance(step.requires.teacher, str):
            check_teacher(step.requires.teacher, opened, recipe.trust_remote_code)
    context.lm_objective = lm_objective_for(steps, opened, recipe.seed)
    if recipe.eval is not None and recipe.eval.perplexity:
        objective_of(opened.model, opened.tokenizer)  # `_measure` needs it; this raises its errors before the run
    texts = eval_ids(recipe, opened)
    with context.phase("calibration text"):
        ids = calibration_ids(recipe, opened)
    spelled = recipe.model_dump(mode="json", exclude={"eval", "model"})
    wanted = fingerprint(recipe=spelled, model=opened.fingerprint, calibration=corpus_sha256(ids), version=__version__)
    manifest = open_folder(out, wanted, overwrite)
    context.calibration, context.open_teacher = ids, partial(_open_source, recipe, opened)
    context.work = manifest.folder / WORK / "passes"
    return Job(recipe, opened, context, steps, planned, ids, texts, manifest)


def compress(job: Job, first: bool = True, together: bool = False) -> None:
    """Apply all passes and write the shards and the other files of the checkpoint. first, together: see `Shards`.

    Raises ShortageError when a batch does not fit into the memory of the device.
    """
    probe, batches = job.ids[:1, :PROBE_TOKENS], list(job.ids.split(job.recipe.calibration.batch))
    if not any(step.requires.data for _, step, _ in job.steps):
        batches = batches[:1]  # no pass calibrates; one batch is enough to measure errors
    sink = Shards(job.opened, job.context, job.steps, job.manifest, probe, job.recipe.to_yaml(), first, together)
    try:
        engine(job.steps, job.opened, batches, probe, job.context, sink)
    except torch.OutOfMemoryError as error:
        hint = "use a smaller calibration.batch, or shorter sequences; compress plan estimates the memory"
        raise ShortageError(f"a batch does not fit into the memory of {job.opened.device}; {hint}") from error


def finish(job: Job) -> Result:
    """Reload the checkpoint, compare it with the computed model, evaluate it, and write the report.

    Only one model is in memory at a time: the computed model is freed first.
    """
    recipe, context, manifest, folder = job.recipe, job.context, job.manifest, job.manifest.folder
    job.opened.model.to_empty(device="meta")
    opened, planned = final_plan(recipe, job.steps, job.opened, job.planned, folder)
    with context.phase("verify"):
        digests = {n: d for entry in manifest.shards.values() for n, d in entry.digests.items()}
        reference = load_file(folder / WORK / PROBE_FILE)
        caches = {n: v["sha256"] for entry in manifest.shards.values() for n, v in entry.caches.items()}
        verified, model = verify(recipe, opened.dtype, folder, digests, reference, context, caches)
        settled = update_plan(planned, manifest.schemes_of(opened), context.format, context.storage)
        check_size(folder, sum(entry.size_bytes for entry in manifest.shards.values()), settled.checkpoint_bytes)
    results = [result for entry in manifest.shards.values() for result in entry.results]
    evaluated = EvaluationContext(
        context, "compressed", job.texts, opened.tokenizer, reference["ids"], job.steps, results
    )  # fmt: skip
    compressed = _measure(job, model, evaluated)
    del model
    gc.collect()  # models contain reference cycles
    base: dict[str, Any] = {}
    if recipe.eval is not None:
        with _open_source(recipe, opened) as dense:
            base = _measure(job, dense, replace(evaluated, which="base"))
    layers = [(prod(layer.shape), layer.size_bytes) for layer in settled.layers if layer.passes]
    report = build_report(
        opened,
        context,
        folder,
        size=sizes(folder, settled.dense_bytes, settled.checkpoint_bytes, layers),
        predicted=Predicted(tensor_bytes=job.planned.checkpoint_bytes, memory_bytes=job.planned.memory_bytes),
        verified=Verification(**asdict(verified)),
        layers=[r for block in opened.blocks for r in manifest.shards[block.name].results],
        training=manifest.training,
        evaluations=combine_all(compressed, base),
        reproduce=reproduction(recipe, opened, context, manifest.fingerprint, corpus_sha256(job.ids)),
    )
    write_text(folder / "recipe.yaml", recipe.to_yaml())  # `eval` may differ from that of the run that made the bytes
    write_report(report, folder)
    write_card(report, folder, recipe.model, CardFacts.of(job.steps, opened.model.can_generate()))
    return Result(folder, report.to_json(), context.journal)


def _measure(job: Job, model: PreTrainedModel, context: EvaluationContext) -> dict[str, Any]:
    """The results of all evaluators on a model."""
    with job.context.phase("evaluate"):
        return measure_all(model, context, compare=job.recipe.eval is not None)


def _open_source(
    recipe: Recipe, opened: OpenModel, other: str | None = None
) -> AbstractContextManager[PreTrainedModel]:
    """Open the original model, or another; only one block's weights are in memory while it runs."""
    source = recipe.model if other is None else other
    return open_model(source, recipe.dtype, opened.device, recipe.trust_remote_code).streaming()
