"""run(recipe, out): compress block by block, save, reload and compare, evaluate, report. Used by the command line."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.checkpoint.containers.files import told_of_writing, write_text
from compress.checkpoint.formats.native import Native
from compress.checkpoint.save import masked_in
from compress.checkpoint.saving import guard_saving
from compress.checkpoint.sources.hub import at_commit
from compress.checkpoint.sources.load import load
from compress.checkpoint.sources.masks import MaskPolicy
from compress.checkpoint.sources.opening import OpenModel
from compress.checkpoint.sources.packed import Packed, with_masks
from compress.checkpoint.sources.sentence import pooling_in
from compress.checkpoint.sources.supported import check_supported
from compress.checkpoint.writer import OUTSIDE
from compress.data.ids import TextUse
from compress.errors import CalibrationError
from compress.evaluate import combine_all, measure_all
from compress.evaluate.base import EvaluationContext
from compress.evaluate.evidence import CheckpointFacts, PassRecords, reproduction, run_result, sizes
from compress.evaluate.result import Predicted, Verification
from compress.evaluate.store import Store, digest_of
from compress.layers.linear import CompressedLinear
from compress.layers.scheme import LayerScheme
from compress.models.experts import open_experts
from compress.models.kinds.batch import Batch, Examples
from compress.models.kinds.kinds import adapter_of, examples_of
from compress.models.structure.ends import compressed_ends
from compress.numerics.dtypes import dtype_name
from compress.passes.contract.context import Run, device_of
from compress.passes.contract.journal import Journal
from compress.passes.contract.limits import size_of
from compress.passes.contract.passes import ERROR_TOKENS, Pass, Step, calibrates
from compress.passes.contract.processes import ALONE, Processes
from compress.pipeline.checkpoint import PROBE_FILE, Manifest, Shards, open_folder
from compress.pipeline.divide import check_divided, check_same_inputs, own_batches
from compress.pipeline.engine import Memory, engine
from compress.pipeline.evaluation import measure
from compress.pipeline.fitting import separate_large_tensors, with_batch
from compress.pipeline.lock import locked
from compress.pipeline.needs import check_original_given
from compress.pipeline.output import WORK, check_folder, check_space
from compress.pipeline.plan import Plan, final_plan, plan_of, update_plan
from compress.pipeline.progress import shown_progress
from compress.pipeline.provenance import RECIPE_FILE, UNKNOWN, identity, written
from compress.pipeline.resolve import lm_objective_for, resolve, schemes_of, storage_dtype, teachers
from compress.pipeline.servers import settled_check
from compress.pipeline.sources import in_memory, open_original, open_source, open_start, open_teacher
from compress.pipeline.texts import calibration_examples, eval_examples, suited
from compress.pipeline.verify import check_size, verify
from compress.recipe.evaluation import Evaluate
from compress.recipe.order import check_order
from compress.recipe.schema import Recipe, read_passes
from compress.recipe.starts import folder_of
from compress.report.card import CardFacts, write_card
from compress.report.write import sensitivity_of, write_report
from compress.sweep.capture import ModelShell
from compress.sweep.install import adapt, adapt_block
from compress.sweep.quantized_embeddings import quantize_embeddings

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
    memory: str | int | None = None,
) -> Result:
    """Compress the recipe's model into the folder `out`, check it, evaluate it, and write its report (json, md, html).

    recipe: or the path of its YAML file. out: by default a folder of `out/`, with the name of the file, or of the model
    and the passes (`default_folder`). overwrite: replace another run in the folder. progress: show a progress bar on
    standard error; where that is no terminal, a line for every tenth. memory: the limit of memory of the process, such
    as '8GB' or a number of bytes: activations beyond it go to files, then calibration batches become smaller; a run
    that does not fit all the same is an error before any work.

    The same call resumes a run that was killed; a complete run is only checked and evaluated again. With several
    processes, started by `accelerate launch` or torchrun, they divide the calibration sequences, the solving of layers,
    the steps of training and the evaluation, and rank 0 writes.

    Raises the errors of `compress.errors`; OutputError while another run works in the folder.
    """
    memory_bytes = None if memory is None else size_of(memory)
    if memory is not None:
        separate_large_tensors()
    folder = Path(out) if out is not None else default_folder(recipe)
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.from_yaml(recipe)
    processes = Processes.launched(cpu=device_of(recipe.device).type == "cpu")
    first = processes.first
    journal = (journal or Journal()) if first else Journal()
    shown = shown_progress(journal) if progress and first else nullcontext()
    held = locked(folder, journal) if first else nullcontext()
    with processes.together(), told_of_writing(folder), held, shown:
        job = prepare(recipe, folder, overwrite, journal, processes, memory_bytes)
        if not job.manifest.complete:
            compress(job)
        processes.wait()  # until the checkpoint is complete
        result = finish(job) if first else assist(job)
        processes.wait()
    return result


def default_folder(recipe: Recipe | str | Path) -> Path:
    """The output folder of a run without `out`: out/ and the name of the file, or of the model and the passes."""
    if not isinstance(recipe, Recipe):
        return Path("out") / Path(recipe).stem
    return folder_of(recipe.model, *(step.key() for step in recipe.passes))


def apply(
    model: PreTrainedModel,
    passes: Pass | Sequence[Pass],
    calibration: Tensor | Mapping[str, Any] | Examples | None = None,
    batch: int = 4,
    journal: Journal | None = None,
    teacher: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    masks: MaskPolicy = "keep",
) -> PreTrainedModel:
    """Apply passes to a model in memory, in place, and return it. Experts stored as 3-D weights become linears.

    Save the result with `compress.save`, or with `save_pretrained` if no layer is quantized.

    passes: a list, or one pass; also as recipes spell them, such as [{"scheme": "W4A16"}]. calibration: token ids
    [sequences, length], or a batch as a data collator of transformers returns it: for a model of recordings a mapping
    with input_features (or input_values) and labels; required unless all passes are data-free. batch: sequences per
    batch. teacher: the uncompressed model, for passes that learn from it; by default a copy of the model. tokenizer:
    provides the mask token, for passes that train a masked language model or compute its loss. masks: 'keep': the zeros
    of a dense linear with more than a fifth of zeros stay zero; 'forget': they are ordinary weights.

    Raises RecipeError for an impossible order, TargetError, CalibrationError, ModelError for an unfit teacher or a
    missing mask token.
    """
    passes = read_passes([passes] if isinstance(passes, Pass) else passes)
    check_order(passes, begun=True)
    check_supported(model)
    if not any(isinstance(module, CompressedLinear) for module in model.modules()):
        check_order(passes)
    guard_saving(model)
    journal = journal or Journal()
    for log in open_experts(model):
        journal.add("note", "model", log)
    opened = in_memory(model, tokenizer)
    sample = ModelShell(opened).check()
    for log in with_masks(opened, masked_in(model.config), masks).notes:
        journal.add("note", "model", log)
    context = Run(opened.device, opened.dtype, journal=journal, format=Native())
    steps, _ = resolve(passes, opened, context.format)
    if calibration is None and any(step.requires.data for step in passes):
        raise CalibrationError("calibration: these passes need token ids, an integer tensor [sequences, length]")
    examples = None if calibration is None else examples_of(model, calibration)
    without_data = partial(adapter_of(model).probe, model, sample, PROBE_TOKENS)
    probe = without_data() if examples is None else examples.beginning(PROBE_TOKENS)
    context.calibration = examples
    context.open_teacher = teachers(passes, model, teacher, opened)
    check_original_given(steps, teacher is not None)
    context.open_original = None if teacher is None else partial(in_memory, teacher)
    context.lm_objective = lm_objective_for(steps, opened)
    engine(steps, opened, [] if examples is None else examples.batches(batch), probe, context, Memory())
    return model


@dataclass(frozen=True)
class Job:
    """The inputs of a run, resolved before it starts.

    examples: for the calibration. texts: windows of the evaluation by name, which are read first: errors come early.
    stated: the files that state the recipe, by name. uses: what was read for calibration and evaluation. accept: see
    `Shards`.
    """

    recipe: Recipe
    opened: OpenModel
    context: Run
    steps: list[Step]
    planned: Plan
    examples: Examples
    texts: dict[str, Examples]
    manifest: Manifest
    stated: dict[str, str]
    uses: tuple[TextUse, ...] = ()
    accept: Callable[[str, Mapping[str, LayerScheme]], None] | None = None


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
    device = device_of(recipe.device)
    opened = open_start(recipe, device)
    for log in opened.notes:
        journal.add("note", "model", log)
    sensitivity_of(out, opened.fingerprint)  # an error in it before the run, not at its end
    storage = storage_dtype(recipe, opened)
    format_ = recipe.save.target().stored_in(storage)
    context = Run(opened.device, storage, recipe.seed, format_, recipe.save.sparse, journal, processes=processes)
    planned = plan_of(recipe, opened, memory_bytes, strict=True)
    opened.map_ends()  # the check in the plan has read them
    assert planned.fit is not None
    recipe, context.store_bytes = with_batch(recipe, planned.fit.batch), planned.fit.store_bytes
    recipe = recipe.model_copy(update={"eval": suited(recipe.eval, opened.model)[0]})
    stated, recorded = written(recipe), _at_commit(recipe, opened)
    check_space(out, planned.checkpoint_bytes)
    for log in planned.notes[len(opened.notes) :]:
        journal.add("note", "plan", log)
    steps, form = resolve(recipe.passes, opened, format_)
    accept = settled_check(recipe, opened, form)
    quantize_embeddings(opened, context, steps)
    context.lm_objective = lm_objective_for(steps, opened, recipe.seed)
    evaluated = eval_examples(recipe, opened)
    texts = {use.text: windows for windows, use in evaluated}
    with context.phase("calibration text"):
        examples, uses = calibration_examples(recipe, opened)
    wanted, code = identity(recipe, opened.fingerprint, examples.sha256())
    for key in (key for key, digest in code.items() if digest == UNKNOWN):
        journal.add("note", key, "the source of this pass is not available: a change of its code will not be noticed")
    _take_in_compressed(opened, context)
    check_divided(steps, examples, recipe.calibration.batch, processes)
    with processes.first_goes_first():
        manifest = open_folder(out, wanted, overwrite, code)
    evaluated_on = digest_of([windows.sha256() for windows in texts.values()])
    seen = {"recipe": digest_of(stated), "code": digest_of(code), "model": opened.fingerprint}
    seen |= {"calibration text": examples.sha256(), "evaluation text": evaluated_on, "output folder": manifest.state}
    check_same_inputs(seen, processes)
    if manifest.complete and (damaged := manifest.damaged()):
        journal.add("note", "resume", f"missing or changed, so computed again: {', '.join(damaged)}")
        manifest.complete = False
    context.calibration, context.open_teacher = examples, partial(open_teacher, recipe, opened)
    context.open_original = partial(open_original, recipe, opened)
    context.work = manifest.folder / WORK / "passes"
    stated, uses = recorded, [*uses, *(use for _, use in evaluated)]
    return Job(recipe, opened, context, steps, planned, examples, texts, manifest, stated, tuple(uses), accept)


def _take_in_compressed(opened: OpenModel, context: Run) -> None:
    """Convert the layers of a compressed checkpoint to forms that the format can store, each when it is loaded."""
    if not isinstance(opened.weights, Packed):
        return
    format_ = context.format
    opened.weights.settle = partial(adapt_block, run=context, dtype=opened.dtype)
    for name, layer in compressed_ends(opened.model).items():
        adapt(layer, context, opened.dtype, f"model: {name}")
    if format_.adapt(LayerScheme((1, 1))) is None and any(s.quantized for s in schemes_of(opened).values()):
        message = f"format {format_.name} stores the dequantized weights of its quantized linears"
        context.journal.add("note", "model", message)


def _at_commit(recipe: Recipe, opened: OpenModel) -> dict[str, str]:
    """The files that state the recipe with the commit of a model of the hub."""
    return written(recipe.model_copy(update={"model": at_commit(recipe.model, opened.commit)}))


def compress(job: Job) -> None:
    """Apply all passes and write the shards and the other files of the checkpoint."""
    examples, batch = job.examples, job.recipe.calibration.batch
    probe, own = examples.beginning(PROBE_TOKENS), own_batches(examples, batch, job.context.processes)
    if not calibrates(job.steps):
        own = [examples.beginning(ERROR_TOKENS)]
    loads_in = job.opened.loads_in if job.recipe.save.dtype == "auto" else job.context.storage
    about = job.stated, loads_in, job.accept
    sink = Shards(job.opened, job.context, job.steps, job.manifest, probe, *about)
    engine(job.steps, job.opened, own, probe, job.context, sink)


def finish(job: Job) -> Result:
    """Reload the checkpoint, compare it with the computed model, evaluate it, and write the report.

    Only one model is in memory at a time: the computed model is freed first.
    """
    recipe, context, manifest, folder = job.recipe, job.context, job.manifest, job.manifest.folder
    job.opened.model.to_empty(device="meta")
    opened, planned = final_plan(recipe, job.steps, job.opened, job.planned, folder)
    evaluated = evaluation_context(job)
    base: dict[str, Any] = {}
    if recipe.eval is not None:  # first, because the compressed model is compared with what is kept of the base
        with open_source(recipe.model, recipe, opened) as original:
            base = _measure(job, original, evaluated.of_base())
    with context.phase("verify"):
        digests = {n: d for entry in manifest.shards.values() for n, d in entry.digests.items()}
        reference = load_file(folder / WORK / PROBE_FILE)
        caches = {n: v["sha256"] for entry in manifest.shards.values() for n, v in entry.caches.items()}
        verified, model = verify(recipe, opened.dtype, folder, digests, reference, context, caches)
        context.processes.wait()
        settled = update_plan(planned, manifest.schemes_of(opened), context.format, context.storage)
        check_size(folder, sum(entry.size_bytes for entry in manifest.shards.values()), settled.checkpoint_bytes)
    results = [result for entry in manifest.shards.values() for result in entry.results]
    evaluated = replace(evaluated, tokenizer=opened.tokenizer, probe=Batch.of_tensors(reference), layers=results)
    compressed = _measure(job, model, evaluated)
    del model
    gc.collect()  # models contain reference cycles
    layers = [(prod(layer.shape), layer.size_bytes) for layer in settled.layers if layer.passes]
    checkpoint = CheckpointFacts(
        size=sizes(folder, settled.dense_bytes, settled.checkpoint_bytes, layers),
        predicted=Predicted(tensor_bytes=job.planned.checkpoint_bytes, memory_bytes=job.planned.memory_bytes),
        verified=Verification(**asdict(verified)),
        masked=[name for entry in manifest.shards.values() for name in entry.masked],
    )
    rows = [row for name in [*(b.name for b in opened.blocks), OUTSIDE] for row in manifest.shards[name].results]
    passes, digests = PassRecords(rows, manifest.training), (manifest.fingerprint, manifest.code)
    reproduce = reproduction(recipe, opened, context, *digests, job.examples.sha256(), job.uses)
    report = run_result(opened, context, folder, checkpoint, passes, combine_all(compressed, base), reproduce)
    write_text(manifest.staged / RECIPE_FILE, job.stated[RECIPE_FILE])  # `eval` may differ from that of the first start
    write_report(report, folder, manifest.staged)
    write_card(report, manifest.staged, at_commit(recipe.model, opened.commit), CardFacts.of(job.steps, opened.model))
    manifest.publish()
    return Result(folder, report.to_json(), context.journal)


def assist(job: Job) -> Result:
    """Compute the share of this process of the evaluation, while rank 0 finishes the run."""
    recipe, folder, opened = job.recipe, job.manifest.folder, job.opened
    opened.model.to_empty(device="meta")
    manifest = open_folder(folder, job.manifest.fingerprint, overwrite=False)  # as rank 0 wrote it
    evaluated = evaluation_context(replace(job, manifest=manifest))
    if recipe.eval is not None:
        with open_source(recipe.model, recipe, opened) as original:
            measure(original, evaluated.of_base())
    job.context.processes.wait()  # until the checkpoint is verified
    if recipe.eval is not None:
        measure(load(folder, dtype_name(opened.dtype), opened.device, recipe.trust_remote_code)[0], evaluated)
    return Result(folder, {}, job.context.journal)


def evaluation_context(job: Job) -> EvaluationContext:
    """The texts, settings and kept results of an evaluation. Results depend on the bytes of the checkpoint."""
    settings, fit = job.recipe.eval or Evaluate(), job.planned.fit
    assert fit is not None
    digests = sorted(entry.sha256 for entry in job.manifest.shards.values())
    store = Store(
        job.manifest.folder / WORK / "evaluation",
        digest_of(digests, dtype_name(job.opened.dtype)),
        digest_of(job.opened.fingerprint, dtype_name(job.opened.dtype)),
        job.context.processes,
    )
    return EvaluationContext(
        job.context,
        "compressed",
        job.texts,
        job.opened.tokenizer,
        steps=job.steps,
        settings=settings,
        store=store,
        base=job.recipe.model,
        pooling=pooling_in(job.opened.processor),
        copies_bytes=fit.copies_bytes,
    )


def _measure(job: Job, model: PreTrainedModel, context: EvaluationContext) -> dict[str, Any]:
    """The results of all evaluators on a model."""
    with job.context.phase("evaluate"):
        return measure_all(model, context, compare=job.recipe.eval is not None)
