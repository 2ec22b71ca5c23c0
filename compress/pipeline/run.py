"""run(recipe, out): compress by blocks, save, reload and compare, evaluate, report. The command line calls this."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.api.context import Cost, Run, device_of
from compress.api.journal import Entry, Journal
from compress.api.passes import ModelPass, Pass, Step
from compress.data.ids import corpus_sha256
from compress.errors import CalibrationError, ShortageError
from compress.evaluate import combine_all, measure_all
from compress.evaluate.base import EvaluationContext
from compress.formats import FORMATS
from compress.formats.containers.files import write_text
from compress.formats.containers.safetensors import shard_name, write_shard
from compress.formats.native import Native
from compress.model.kv_cache import cache_records, stated_scheme
from compress.model.linear import CompressedLinear, linears
from compress.model.objective import objective_of
from compress.model.open.experts import open_experts
from compress.model.open.opening import InMemory, OpenModel, open_model
from compress.model.open.vocabulary import check_teacher
from compress.model.save import block_tensors, dense_linear_names, outside_tensors, store_as_planned, write_description
from compress.model.structure.blocks import Block, find_blocks
from compress.pipeline.checkpoint import WORK, Manifest, ShardEntry, fingerprint, open_folder
from compress.pipeline.engine import ended, segments, work_on_whole
from compress.pipeline.plan import Plan, plan_of, update_plan
from compress.pipeline.resolve import calibration_ids, eval_ids, predicted, resolve, storage_dtype, teachers
from compress.pipeline.restore import restore
from compress.pipeline.verify import check_size, verify
from compress.recipe.order import check_order
from compress.recipe.schema import Recipe
from compress.report.build import build_report, reproduction, sizes
from compress.report.schema import Predicted, Verification
from compress.report.write import write_report
from compress.stream.install import LayerResult, round_to_storage
from compress.stream.sweep import Sweep, needs_data
from compress.train.options import TrainingOptions
from compress.version import __version__
from compress.weights.layer import LayerScheme

PROBE_FILE = "probe.safetensors"
PROBE_TOKENS = 64  # length of the probe: enough for proofs, cheap at every block


@dataclass(frozen=True)
class Result:
    """What a run made: the folder, the report as it stands in report.json, and the journal.

    report: empty in processes of a launcher that only took part in training; the first one writes it.
    """

    folder: Path
    report: dict[str, Any]
    journal: Journal


def run(recipe: Recipe, out: str | Path, overwrite: bool = False, journal: Journal | None = None) -> Result:
    """Compress the recipe's model into the folder `out`, check it, evaluate it, and write report.json and report.md.

    The same call continues a run that was killed; a run that is complete is only checked and evaluated again. Started
    in several processes by `accelerate launch` or torchrun, all of them train together; the first does the rest.

    Raises the errors of `compress.errors`.
    """
    processes = PartialState(cpu=device_of(recipe.device).type == "cpu")
    first = processes.is_main_process
    journal = (journal or Journal()) if first else Journal()
    with processes.main_process_first():
        job = Job.begin(recipe, Path(out), overwrite, journal)
    job.first = first
    processes.wait_for_everyone()  # so that all have read the same manifest
    if not job.manifest.complete and (first or job.trains):
        try:
            job.compress()
        except torch.OutOfMemoryError as error:
            hint = "use a smaller calibration.batch, or shorter sequences; compress plan estimates what is needed"
            raise ShortageError(f"a batch does not fit into the memory of {job.opened.device}; {hint}") from error
    processes.destroy_process_group()
    return job.finish() if first else Result(Path(out), {}, journal)


def apply(
    model: PreTrainedModel,
    passes: Sequence[Pass],
    calibration: Tensor | None = None,
    batch: int = 4,
    journal: Journal | None = None,
    teacher: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreTrainedModel:
    """Work passes on a model in memory, in place; returns it. Experts kept as 3-D weights become linears.

    calibration: token ids [sequences, length]; needed unless all passes are data-free. teacher: the uncompressed model,
    for passes that learn from it; a copy of the model as it comes, if it is not given. tokenizer: says which token is
    the mask, for passes that train a model of masked tokens or look at its loss.

    Raises RecipeError for an impossible order, TargetError, CalibrationError, ModelError for an unfit teacher or a mask
    that is not known.
    """
    check_order(passes)
    first = next(model.parameters())
    journal = journal or Journal()
    for log in open_experts(model):
        journal.add("note", "model", log)
    opened = OpenModel(
        model.eval(),
        find_blocks(model),
        InMemory(),
        tokenizer,
        type(model).__name__,
        "",
        first.device,
        first.dtype,
    )
    context = Run(opened.device, first.dtype, journal=journal, format=Native())
    steps, _ = resolve(passes, opened, context.format)
    if calibration is None and any(needs_data(step) for step in passes):
        raise CalibrationError("calibration: these passes need token ids, an integer tensor [sequences, length]")
    ids = torch.arange(PROBE_TOKENS)[None] % model.config.vocab_size if calibration is None else calibration
    batches = [] if calibration is None else list(ids.split(batch))
    context.calibration = calibration
    context.open_teacher = teachers(passes, model, teacher, opened)
    context.lm_objective = predicted(steps, opened)
    for swept, segment in segments(steps):
        if swept:
            Sweep(opened, segment, batches, ids[:1, :PROBE_TOKENS], context)(lambda *_: None, lambda _: False)
        else:
            for where, _, _ in segment:
                work_on_whole(steps, where, opened, context)
    return model


@dataclass
class Job:
    """One run on its way: compress into shards, then check them.

    ids: calibration token ids. texts: evaluation token ids by name, made before the work so that it is not in vain.
    ended: the plan of the model in the shape that it was written in. first: whether this process writes; others of the
    same launcher do the same work, for the steps that are trained together.
    """

    recipe: Recipe
    opened: OpenModel
    context: Run
    steps: list[Step]
    planned: Plan
    ids: Tensor
    texts: dict[str, Tensor]
    manifest: Manifest
    ended: Plan = field(init=False)
    first: bool = True
    _noted: int = 0
    _earlier: dict[str, list[LayerResult]] = field(default_factory=dict)

    @classmethod
    def begin(cls, recipe: Recipe, out: Path, overwrite: bool, journal: Journal) -> Job:
        """Open everything that can be wrong: model, targets, texts, output folder."""
        opened = open_model(recipe.model, recipe.dtype, device_of(recipe.device), recipe.trust_remote_code)
        for log in opened.notes:
            journal.add("note", "model", log)
        format_ = FORMATS[recipe.save.format]
        context = Run(opened.device, storage_dtype(recipe, opened), recipe.seed, format_, recipe.save.sparse, journal)
        planned = plan_of(recipe, opened)
        steps, _ = resolve(recipe.passes, opened, format_)
        for step in recipe.passes:
            if isinstance(step, ModelPass) and step.other_teacher is not None:
                check_teacher(step.other_teacher, opened, recipe.trust_remote_code)
        context.lm_objective = predicted(steps, opened, recipe.seed)
        if recipe.eval.perplexity:
            objective_of(opened.model, opened.tokenizer)  # for `_measure`: an error comes before the work
        texts = {name: eval_ids(recipe, name, opened) for name in recipe.eval.perplexity}
        with context.phase("calibration text"):
            ids = calibration_ids(recipe, opened)
        spelled = recipe.model_dump(mode="json", exclude={"eval", "model"})
        wanted = fingerprint(
            recipe=spelled, model=opened.fingerprint, calibration=corpus_sha256(ids), version=__version__
        )
        manifest = open_folder(out, wanted, overwrite)
        return cls(recipe, opened, context, steps, planned, ids, texts, manifest)

    def __post_init__(self) -> None:
        self.ended = self.planned

    @property
    def trains(self) -> bool:
        """Whether any pass trains, which several processes do together."""
        return any(isinstance(step, TrainingOptions) for _, step, _ in self.steps)

    @property
    def shards(self) -> int:
        """How many weight files there will be: one per block, and one for what is outside of them."""
        return len(self.opened.blocks) + 1

    @property
    def probe(self) -> Tensor:
        return self.ids[:1, :PROBE_TOKENS]

    def compress(self) -> None:
        """Work through all passes and write every shard and its description."""
        self._noted = len(self.context.journal.entries)
        self._take_up()
        round_to_storage(self.opened.model, self.context)
        parts = segments(self.steps)
        resumable = len(parts) == 1 and parts[0][0]
        batches = list(self.ids.split(self.recipe.calibration.batch))
        if not any(needs_data(step) for _, step, _ in self.steps):
            batches = batches[:1]  # nothing is calibrated; one batch is enough to measure errors on
        if not resumable:
            self._bring_all()
        for index, (swept, segment) in enumerate(parts):
            last = index == len(parts) - 1
            if swept:
                sweep = Sweep(self.opened, segment, batches, self.probe, self.context)
                hidden = sweep(self._write_block if last else self._keep, self._restore if resumable else _never)
                if last:
                    self._write_reference(sweep.shell.logits(self.probe, hidden))
            else:
                for where, _, _ in segment:
                    with self.context.phase(where):
                        work_on_whole(self.steps, where, self.opened, self.context)
                        round_to_storage(self.opened.model, self.context)
                if last:
                    for block in self.opened.blocks:
                        self._write_block(block, [])
                    with torch.no_grad():
                        self._write_reference(self.opened.model(input_ids=self.probe).logits)
        if self.first:
            self._describe()

    def _write_reference(self, logits: Tensor) -> None:
        """The compressed model's logits for the probe as they were computed, for the comparison after reloading."""
        folder = self.manifest.folder / WORK
        if self.first:
            write_shard(folder / PROBE_FILE, {"ids": self.probe, "logits": logits.cpu().contiguous()})

    def _take_up(self) -> None:
        """The costs of an earlier start of the same run, and the folder marked as this run's before its first shard."""
        self.context.costs |= {name: Cost(**cost) for name, cost in self.manifest.costs.items()}
        self.context.calibration, self.context.open_teacher = self.ids, self._source
        self.context.work = self.manifest.folder / WORK / "passes"
        if self.first:
            self.manifest.write()

    def _source(self, other: str | None = None) -> AbstractContextManager[PreTrainedModel]:
        """The model as it came, or another; runnable with one block's weights in memory at a time."""
        recipe = self.recipe
        source = recipe.model if other is None else other
        return open_model(source, recipe.dtype, self.opened.device, recipe.trust_remote_code).streaming()

    def _bring_all(self) -> None:
        """All weights into memory, for passes that work on the whole model or sweeps that follow one another."""
        for block in self.opened.blocks:
            self.opened.weights.bring(block)
        self.opened.weights = InMemory()

    def _keep(self, block: Block, results: list[LayerResult]) -> None:
        """A block that stays in memory for the next pass; what was done to it is told when it is written."""
        self._earlier.setdefault(block.name, []).extend(results)

    def _write_block(self, block: Block, results: list[LayerResult]) -> None:
        if not self.first:
            return
        results = self._earlier.pop(block.name, []) + results
        with self.context.phase("save"):
            if self.context.format.sparse:
                store_as_planned(block.name, block.module, self.context.storage, self.context.sparse)
            tensors = block_tensors(block.name, block.module, self.context.format, self.context.storage)
            path = self.manifest.folder / shard_name(block.index + 2, self.shards)
            entry = _entry(path, tensors)
            for name, layer in linears(block.module).items():
                if isinstance(layer, CompressedLinear) and not layer.scheme.plain:
                    full = f"{block.name}.{name}"
                    entry.digests[full] = layer.sha256()
                    entry.schemes[full] = layer.scheme.to_json()
            entry.caches = cache_records(block.name, block.module)
            entry.results = [asdict(result) for result in results]
            entry.journal = [asdict(e) for e in self.context.journal.entries[self._noted :]]
            self._noted = len(self.context.journal.entries)
            self.manifest.shards[block.name] = entry
            self.manifest.costs = {name: asdict(cost) for name, cost in self.context.costs.items()}
            self.manifest.write()

    def _restore(self, block: Block) -> bool:
        """The compressed block from its shard, if a killed run had finished it."""
        entry = self.manifest.shards.get(block.name)
        targets = {name for _, _, names in self.steps for name in names}
        folder, format_ = self.manifest.folder, self.context.format
        if entry is None or not restore(block, entry, folder, targets, format_, self.opened.dtype, self.opened.device):
            return False
        self.context.journal.entries += [Entry(**values) for values in entry.journal]
        self._noted = len(self.context.journal.entries)
        return True

    def _describe(self) -> None:
        """The tensors outside of the blocks, and everything beside the shards."""
        folder = self.manifest.folder
        with self.context.phase("save"):
            tensors = outside_tensors(self.opened, self.context.storage)
            self.manifest.shards["outside"] = _entry(folder / shard_name(1, self.shards), tensors)
            entries = self.manifest.shards.values()
            schemes = self.schemes()
            ignore = dense_linear_names(self.opened, set(schemes))
            caches, format_ = self.manifest.caches, self.context.format
            stated = stated_scheme(self.opened.model, caches, format_)
            config = format_.config(schemes, ignore, __version__, stated)
            sizes = sum(entry.size_bytes for entry in entries)
            names = {entry.file: entry.names for entry in entries}
            own = caches if stated is None else {}
            write_description(self.opened, folder, names, sizes, config, self.context.storage, own)
            write_text(folder / "recipe.yaml", self.recipe.to_yaml())
            self.manifest.costs = {name: asdict(cost) for name, cost in self.context.costs.items()}
            self.manifest.training = self.context.training
            self.manifest.complete = True
            self.manifest.write()
            shutil.rmtree(folder / WORK / "passes", ignore_errors=True)

    def schemes(self) -> dict[str, LayerScheme]:
        """How every compressed layer is stored, in the order of the model."""
        found = {n: v for entry in self.manifest.shards.values() for n, v in entry.schemes.items()}
        return {n: LayerScheme.from_json(found[n]) for n in self.opened.linear_names() if n in found}

    def finish(self) -> Result:
        """Read the checkpoint back, compare it with what was computed, evaluate it, and write the report.

        Only one model is in memory at a time: the one that was worked on is given up first.
        """
        folder = self.manifest.folder
        self.opened.model.to_empty(device="meta")
        self.opened, self.ended = ended(self.recipe, self.steps, self.opened, self.planned, folder)
        with self.context.phase("verify"):
            digests = {n: d for entry in self.manifest.shards.values() for n, d in entry.digests.items()}
            reference = load_file(folder / WORK / PROBE_FILE)
            caches = {n: v["sha256"] for entry in self.manifest.shards.values() for n, v in entry.caches.items()}
            verified, model = verify(self.recipe, self.opened.dtype, folder, digests, reference, self.context, caches)
            settled = update_plan(self.ended, self.schemes(), self.context.format, self.context.storage)
            written = sum(entry.size_bytes for entry in self.manifest.shards.values())
            check_size(folder, written, settled.checkpoint_bytes)
        results = [result for entry in self.manifest.shards.values() for result in entry.results]
        evaluated = EvaluationContext(self.context, "compressed", reference["ids"], self.steps, results)
        compressed = self._measure(model, evaluated)
        del model
        gc.collect()  # models hold cycles
        with self._source() as dense:
            base = self._measure(dense, replace(evaluated, which="base"))
        hashed = corpus_sha256(self.ids)
        layers = [(prod(layer.shape), layer.size_bytes) for layer in settled.layers if layer.passes]
        report = build_report(
            self.opened,
            self.context,
            folder,
            size=sizes(folder, settled.dense_bytes, settled.checkpoint_bytes, layers),
            predicted=Predicted(tensor_bytes=self.planned.checkpoint_bytes, memory_bytes=self.planned.memory_bytes),
            verified=Verification(**asdict(verified)),
            layers=[r for block in self.opened.blocks for r in self.manifest.shards[block.name].results],
            training=self.manifest.training,
            evaluations=combine_all(compressed, base),
            reproduce=reproduction(self.recipe, self.opened, self.context, self.manifest.fingerprint, hashed),
        )
        write_report(report, folder)
        return Result(folder, report.to_json(), self.context.journal)

    def _measure(self, model: PreTrainedModel, context: EvaluationContext) -> dict[str, Any]:
        """The results of all evaluators on a model."""
        with self.context.phase("evaluate"):
            return measure_all(model, self.opened.tokenizer, self.texts, context)


def _never(block: Block) -> bool:
    """No block is restored."""
    return False


def _entry(path: Path, tensors: dict[str, Tensor]) -> ShardEntry:
    """Write a shard; its entry in the manifest."""
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    return ShardEntry(path.name, write_shard(path, tensors), list(tensors), size)
