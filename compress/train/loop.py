"""The training loop, on accelerate: it trains a student with an objective."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, FullyShardedDataParallelPlugin
from jaxtyping import Int
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from compress.data.training_text import TrainingText
from compress.errors import NumericError, RecipeError, ShortageError
from compress.models.kinds.batch import Examples
from compress.passes.contract.journal import Journal
from compress.passes.contract.processes import ALONE, Processes
from compress.train.checkpoint import digest, read_state, tensors_of, write_state
from compress.train.feed import Part, feed_of, part_weights
from compress.train.options import LoopOptions
from compress.train.sharded import full, gather, shard_like
from compress.train.student import Student

STATE = "training.safetensors"
SAVED = "kept/"  # prefix of `ScheduleSlice.saved_parameters` in the state file
RISE_LIMIT = 2.0  # relative to the first loss; losses of single sequences differ by less


class Objective(Protocol):
    """The loss that training minimizes."""

    def __call__(self, model: nn.Module, examples: Any, rows: list[int]) -> Tensor:
        """Compute the mean loss of some examples.

        Args:
            model: the model in training.
            examples: some of the examples of `train`.
            rows: their indices.
        """
        ...


@runtime_checkable
class CountedObjective(Protocol):
    """An objective whose terms are means over items, such as tokens, of which examples have different numbers.

    The loss of a step is the mean over all items of its examples, however they are divided among forward passes and
    processes.
    """

    def counts(self, examples: Any, rows: list[int]) -> tuple[int, ...]:
        """Return the number of items that each term is a mean over.

        Args:
            examples: some of the examples of `train`.
            rows: their indices.
        """
        ...

    def __call__(
        self, model: nn.Module, examples: Any, rows: list[int], weights: Sequence[float] = (1.0, 1.0)
    ) -> Tensor:
        """Compute the loss of some examples, with a factor for each term.

        Args:
            model: the model in training.
            examples: some of the examples of `train`.
            rows: their indices.
            weights: factors of the terms.
        """
        ...


@dataclass(frozen=True)
class TrainingContext:
    """The context of a training.

    Attributes:
        label: prefix of messages.
        journal: journal of the run.
        work: folder of the training state; None for a training that is not saved.
        key: hash of everything on which the result depends, except options, examples and initial parameters.
    """

    label: str
    journal: Journal
    work: Path | None = None
    key: str = ""


@dataclass
class ScheduleSlice:
    """The slice of a schedule to train, in fractions of its steps: from `begin` to the end.

    Attributes:
        begin: fraction at which training begins.
        keep: fraction after which the trained parameters are copied to `saved_parameters`; None for never.
        saved_parameters: the copied parameters by name.
    """

    begin: float = 0.0
    keep: float | None = None
    saved_parameters: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class TrainingState:
    """The progress of a training.

    Attributes:
        step: completed steps.
        curve: in order, {step, loss, rate} of every step with the counts of parametrizations, and {step, held_out} of
            every evaluation on the held-out sequences.
        best: lowest loss on the held-out sequences, or None.
        best_step: step of that loss.
        waited: evaluations since that step.
        seconds: duration of the training.
    """

    step: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)
    best: float | None = None
    best_step: int = 0
    waited: int = 0
    seconds: float = 0.0


def check_launcher(
    kind: DistributedType, fsdp: FullyShardedDataParallelPlugin | None, label: str, processes: int
) -> None:
    """Check that masks and scales can be computed under a launcher.

    Raises:
        RecipeError: for a launcher that shards weights in an unsupported way.
    """
    use = "launch with --use_fsdp --fsdp_version 2, which shards the same tensors, or with --multi_gpu"
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        reason = f"uses {kind.value}, whose engine owns the weights, but masks and scales need whole weights"
    elif fsdp is not None and fsdp.fsdp_version != 2:
        reason = "uses version 1 of FSDP, which flattens weights, but masks and scales need whole weights"
    elif fsdp is not None and processes > 1 and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        reason = "uses FSDP, whose processes deadlock in this torch version if an expert gets no token in one of them"
        use = "install torch 2.13 or later, or launch with --multi_gpu"
    elif fsdp is not None and isinstance(fsdp.cpu_offload, CPUOffloadPolicy):
        reason = "uses FSDP with weights on the CPU, but masks and scales are computed on the device"
        use = "launch without --fsdp_offload_params"
    elif fsdp is not None and fsdp.activation_checkpointing:
        reason = "uses activation checkpointing, which is not supported"
        use = "launch without --fsdp_activation_checkpointing, and lower batch"
    else:
        return
    raise RecipeError(f"{label}: the launcher {reason}; {use}")


def train(
    student: Student,
    objective: Objective | CountedObjective,
    examples: Examples | TrainingText | Int[Tensor, "examples ..."],
    settings: LoopOptions,
    context: TrainingContext,
    schedule_slice: ScheduleSlice | None = None,
    parts: bool = False,
) -> dict[str, Any]:
    """Train the student.

    Args:
        student: the trained parameters and their model.
        objective: loss of some examples.
        examples: what the objective reads: sequences, streams of sequences that are read in every step, or numbers.
        settings: options of the loop.
        context: label, journal and folder.
        schedule_slice: slice of the schedule to train; None for the complete schedule.
        parts: whether each process has a part of every example, so that the mean of the objective over processes is the
            loss; otherwise the processes divide the examples.

    Returns:
        The figures for the report: losses, steps and the curve.

    Raises:
        NumericError: for a loss or a gradient that is not finite, after restoring the best state.
        SaveError: if the training state cannot be written.
        ShortageError: for a batch that does not fit into memory.
        RecipeError: for an unsupported launcher (`check_launcher`).
    """
    trainer = _Trainer(student, objective, examples, settings, context, schedule_slice or ScheduleSlice(), parts)
    with torch.enable_grad():
        return trainer.run()


class _Trainer:
    def __init__(
        self,
        student: Student,
        objective: Objective | CountedObjective,
        examples: Examples | TrainingText | Tensor,
        settings: LoopOptions,
        context: TrainingContext,
        schedule_slice: ScheduleSlice,
        parts: bool = False,
    ) -> None:
        self.source, self.objective = student, objective
        self.settings, self.context = settings, context
        self.slice = schedule_slice
        self.device = next(iter(student.named().values())).device
        # The state of accelerate is global to the process: the device and the precision of the first training stay in
        # effect. So the precision is set per step, and a device is requested only under a launcher.
        cpu = self.device.type == "cpu"
        cpu = cpu and PartialState(cpu=cpu).distributed_type != DistributedType.NO
        unused = DistributedDataParallelKwargs(find_unused_parameters=True)  # experts without tokens
        self.accelerator = Accelerator(cpu=cpu, mixed_precision="no", device_placement=False, kwargs_handlers=[unused])
        fsdp: FullyShardedDataParallelPlugin | None = getattr(self.accelerator.state, "fsdp_plugin", None)
        check_launcher(self.accelerator.distributed_type, fsdp, context.label, self.accelerator.num_processes)
        record = {"settings": settings.model_dump(mode="json"), "key": context.key, "codes": student.sha256()}
        record |= {"begin": schedule_slice.begin, "keep": schedule_slice.keep}
        data: Mapping[str, Tensor] = {}
        if isinstance(examples, TrainingText):  # another number of processes divides the files differently
            record["stream"] = [examples.record(), self.accelerator.num_processes]
        else:
            data = {"examples": examples} if isinstance(examples, Tensor) else examples.tensors()
        self.key = digest(record, {**data, **student.named(), **student.buffers()})
        if fsdp is not None:
            fsdp.auto_wrap_policy = None  # blocks are found by structure, not by class names
            reshard = fsdp.reshard_after_forward is not False
            student = student.split(self.device, self.accelerator.num_processes, reshard)
        self.student, self.parameters, self.buffers = student, student.named(), student.buffers()
        groups = [
            {"params": list(p.values()), "lr": settings.rate_of(kind), "weight_decay": settings.decay_of(kind)}
            for kind, p in student.parameters.items()
            if p
        ]
        self.optimizer = settings.optimizer_of(groups)
        self.model, self.stepper = self.accelerator.prepare(student.model, self.optimizer)
        self.peak_rates = [group["lr"] for group in groups]
        processes = ALONE if parts else Processes.launched(cpu=self.device.type == "cpu")
        self.parts, self.feed = parts, feed_of(examples, settings, processes)
        self.rates = settings.rates(self.feed.steps).tolist()
        self.first_step = round(schedule_slice.begin * self.feed.steps)
        self.state = TrainingState(step=self.first_step, best_step=self.first_step)
        self.best_tensors = self._snapshot()
        self.start_seconds = perf_counter()

    @property
    def _file(self) -> Path | None:
        return None if self.context.work is None else self.context.work / STATE

    def run(self) -> dict[str, Any]:
        """Run all remaining steps."""
        resumed = self._resume()
        earlier_seconds = self.state.seconds
        if not resumed:
            self._begin()
        for step in range(self.state.step, self.feed.steps):
            if self.settings.patience is not None and self.state.waited >= self.settings.patience:
                self.context.journal.add(
                    "note", self.context.label, "stopped early: no improvement on the held-out sequences", step=step
                )
                break
            self._step(step)
            self.state.seconds = earlier_seconds + perf_counter() - self.start_seconds
            is_last = self.state.step == self.feed.steps
            if is_last or self.state.step % self.settings.evaluate_every == 0:
                self._evaluate()
            if is_last or self.state.step % self.settings.checkpoint_every == 0:
                self._write()
        if self.feed.held_out:
            self._restore(self.best_tensors)
        self._copy_back()
        return self._record()

    def _begin(self) -> None:
        """Apply the updates that precede the first step."""
        counts = self.student.update(self.state.step, self.feed.steps)
        if counts:
            self.state.curve.append({"step": self.state.step, **counts})
        self.best_tensors = self._snapshot()
        self._keep()
        self._evaluate()

    def _step(self, step: int) -> None:
        """Run one optimizer step."""
        for group, highest in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
            group["lr"] = highest * self.rates[step]
        local = self.feed.parts(step)
        weights = self.feed.weights(step, local, self._count) if self._is_counted else [()] * len(local)
        for note in self.feed.notes():
            self.context.journal.add("note", self.context.label, note, step=step + 1)
        loss = torch.zeros((), device=self.device)
        for i, part in enumerate(local):
            sync_context = nullcontext() if i == len(local) - 1 else self.accelerator.no_sync(self.model)
            with self._raise_on_shortage(step), sync_context:
                part_loss = self._loss(part, weights[i]) / len(local)
                self.accelerator.backward(part_loss)
            loss += part_loss.detach()
        for parameter in self.parameters.values():
            if parameter.grad is None:  # an expert without tokens: zero, for any number of processes
                parameter.grad = torch.zeros_like(parameter)
        self.student.adjust()
        clipped: Any = self.accelerator.clip_grad_norm_(list(self.parameters.values()), self.settings.clip or math.inf)
        mean: Any = self.accelerator.reduce(loss, "mean")
        loss_value, norm = float(mean), float(full(clipped))
        if not (math.isfinite(loss_value) and math.isfinite(norm)):
            self._fail(step + 1, loss_value, norm)
        self.student.decay(self.settings.rate_of("weights") * self.rates[step])
        self.stepper.step()
        self.stepper.zero_grad()
        shares = self.student.update(step + 1, self.feed.steps)
        self.state.step = step + 1
        self.state.curve.append({"step": step + 1, "loss": loss_value, "rate": self.rates[step], **shares})
        self._keep()
        self._progress(loss_value)

    def _keep(self) -> None:
        """Copy the trained parameters at the step that the schedule slice names."""
        if self.slice.keep is not None and self.state.step == round(self.slice.keep * self.feed.steps):
            self.slice.saved_parameters = {name: p.detach().clone() for name, p in self.parameters.items()}

    @contextmanager
    def _raise_on_shortage(self, step: int) -> Iterator[None]:
        """Raise ShortageError, after restoring the state before the step, if the step does not fit into memory."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):  # raised on a CPU
                raise
            batch, accumulate = self.settings.batch, self.settings.accumulate
            hint = "use shorter calibration sequences, train less (train: ...), or another device"
            if batch > 1:
                smaller = f"batch: {math.ceil(batch / 2)} and accumulate: {2 * accumulate}"
                hint = f"{smaller} give nearly the same step with less memory"
            step_name = f"step {step + 1} of {self.feed.steps} with batch: {batch}"
            raise ShortageError(
                f"{self.context.label}: {step_name} does not fit into the memory of {self.device}; {hint}"
            ) from error

    @property
    def _is_counted(self) -> bool:
        return isinstance(self.objective, CountedObjective)

    def _count(self, part: Part) -> Sequence[int]:
        assert isinstance(self.objective, CountedObjective)
        return self.objective.counts(part.examples, part.rows)

    def _loss(self, part: Part, weights: tuple[float, ...]) -> Tensor:
        bf16 = self.settings.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            examples = part.examples.to(self.device)
            return self.objective(self.model, examples, part.rows, *[weights] * bool(weights))

    def _mean_over_parts(self, loss: Tensor) -> Tensor:
        """Average the loss of held-out examples over processes that have parts of them."""
        mean: Any = self.accelerator.reduce(loss, "mean") if self.parts else loss
        return mean

    def _evaluate(self) -> None:
        """Compute the loss on the held-out sequences and save the best state."""
        parts = self.feed.held_out
        if not parts:
            return
        sizes = [len(part.rows) for part in parts]
        weights = part_weights([self._count(part) for part in parts], sizes) if self._is_counted else [()] * len(parts)
        with torch.no_grad():
            losses = [float(self._mean_over_parts(self._loss(*item))) for item in zip(parts, weights, strict=True)]
        held_out_loss = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
        if not math.isfinite(held_out_loss):
            self._fail(self.state.step, held_out_loss, math.nan)
        self.state.curve.append({"step": self.state.step, "held_out": held_out_loss})
        if not self.student.ready(self.state.step, self.feed.steps):
            return
        if self.state.best is None or held_out_loss < self.state.best:
            self.state.best, self.state.best_step, self.state.waited = held_out_loss, self.state.step, 0
            self.best_tensors = self._snapshot()
        else:
            self.state.waited += 1

    def _fail(self, step: int, loss: float, norm: float) -> None:
        """Restore the best state and raise NumericError."""
        self._restore(self.best_tensors)
        self._copy_back()
        file = self._file
        saved = f"; the last checkpoint is in {file.parent}" if file is not None and file.exists() else ""
        reason = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        hint = "use a smaller learning_rate, or clip"
        raise NumericError(f"{self.context.label}: {reason} in step {step} of {self.feed.steps}; {hint}{saved}")

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: t.detach().clone() for name, t in (*self.parameters.items(), *self.buffers.items())}

    @torch.no_grad()
    def _restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in (*self.parameters.items(), *self.buffers.items()):
            tensor.copy_(tensors[name])

    def _copy_back(self) -> None:
        """Copy the trained parameters, unsharded, to the original student."""
        if self.student is not self.source:
            self.source.copy_from(self.student, self.device)
            self.slice.saved_parameters = {name: full(tensor) for name, tensor in self.slice.saved_parameters.items()}

    def _resume(self) -> bool:
        """Restore the state of the same training from a killed run, and return whether there was one."""
        if self._file is None:
            return False
        stored_state = read_state(self._file, self.key, self.parameters, self.buffers, self.optimizer.state)
        if stored_state is not None:
            record, best = stored_state
            self.feed.resume(record.pop("streams", []), best)
            self.best_tensors = {name: shard_like(best[name], tensor) for name, tensor in self.best_tensors.items()}
            saved = {name.removeprefix(SAVED): t for name, t in best.items() if name.startswith(SAVED)}
            self.slice.saved_parameters = {
                name: shard_like(tensor, self.parameters[name]) for name, tensor in saved.items()
            }
            self.state = TrainingState(**record)
            self.context.journal.add("note", self.context.label, "training resumes", step=self.state.step)
        return stored_state is not None

    def _write(self) -> None:
        if not self.feed.held_out:
            self.best_tensors = self._snapshot()
        if self._file is not None:
            best = self.best_tensors | {
                f"{SAVED}{name}": tensor for name, tensor in self.slice.saved_parameters.items()
            }
            streams, unused = self.feed.state()
            best |= unused
            is_main = self.accelerator.is_main_process
            tensors = gather(tensors_of(self.parameters, self.buffers, best, self.optimizer.state), keep=is_main)
            if is_main:
                write_state(self._file, self.key, vars(self.state) | {"streams": streams}, tensors)
        self.accelerator.wait_for_everyone()  # a process that has finished may remove the folder

    def _progress(self, loss: float) -> None:
        label, figures = self.context.label, {"done": self.state.step, "of": self.feed.steps, "loss": loss}
        self.context.journal.add("progress", label, f"training, {label}", **figures)

    def _record(self) -> dict[str, Any]:
        """Return the figures for the report; add a fallback to the journal if training did not improve the loss."""
        state, journal = self.state, self.context.journal
        losses = [point["loss"] for point in state.curve if "loss" in point]
        quarter = max(1, len(losses) // 4)
        first_loss, last_loss = sum(losses[:quarter]) / quarter, sum(losses[-quarter:]) / quarter
        counts = {kind: sum(p.numel() for p in group.values()) for kind, group in self.student.parameters.items()}
        steps, total_steps = state.step - self.first_step, self.feed.steps - self.first_step
        journal.add(
            "note", self.context.label, "trained", steps=steps, first_loss=first_loss, last_loss=last_loss, **counts
        )
        if self.feed.held_out and state.best_step == self.first_step:
            message = "training did not improve the loss on the held-out sequences; the model is unchanged"
            journal.add("fallback", self.context.label, message, held_out=state.best)
        elif self._rose(first_loss, last_loss, losses):
            message = "the loss rose during training; use a smaller learning_rate"
            journal.add("fallback", self.context.label, message, first_loss=first_loss, last_loss=last_loss)
        return {
            "first_loss": first_loss,
            "last_loss": last_loss,
            "steps": steps,
            "of": total_steps,
            "trained": counts,
            "seconds": state.seconds,
            "held_out": [row for part in self.feed.held_out for row in part.rows],
            "best": {"step": state.best_step, "held_out": state.best} if self.feed.held_out else None,
            "curve": state.curve,
            "streams": self.feed.uses(),
        }

    def _rose(self, first_loss: float, last_loss: float, losses: list[float]) -> bool:
        """Return whether the loss rose, for a model without a pruning schedule."""
        has_pruning_schedule = not self.student.ready(0, self.feed.steps)
        return (
            not self.feed.held_out
            and not has_pruning_schedule
            and len(losses) > 1
            and last_loss > min(first_loss, RISE_LIMIT * losses[0])
        )
