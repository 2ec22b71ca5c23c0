"""The training loop, on accelerate: it trains a student with an objective."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, FullyShardedDataParallelPlugin
from jaxtyping import Int
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from compress.errors import NumericError, RecipeError, ShortageError
from compress.passes.contract.journal import Journal
from compress.train.checkpoint import digest, read_state, tensors_of, write_state
from compress.train.options import LoopOptions
from compress.train.sharded import full, gather, like
from compress.train.student import Student

STATE = "training.safetensors"
KEPT = "kept/"  # prefix of the kept tensors of a schedule slice in the state file
RISEN = 2.0  # times the first loss; losses of single sequences differ by less


class Objective(Protocol):
    """The loss that training minimizes."""

    def __call__(self, model: nn.Module, ids: Int[Tensor, "rows ..."], rows: list[int]) -> Tensor:
        """The mean loss of some examples; ids: entries of the `ids` of `train`; rows: their numbers."""
        ...


@dataclass(frozen=True)
class TrainingContext:
    """The context of a training: label for messages, journal, and the folder for the state (None: not saved).

    key: hashes everything that the result depends on except options, ids and initial parameters.
    """

    label: str
    journal: Journal
    work: Path | None = None
    key: str = ""


@dataclass
class ScheduleSlice:
    """The slice of a schedule to train, in fractions of its steps: from `begin` to the end.

    keep: the fraction after which the trained parameters are copied to `kept`; None: never.
    """

    begin: float = 0.0
    keep: float | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class State:
    """The progress of training: completed steps, the loss curve, and the best result so far.

    curve: in order, {step, loss, rate} of every step with the counts of parametrizations, and {step, held_out} of every
    evaluation on the held-out sequences. waited: evaluations since the best one.
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
    """Raise RecipeError for a launcher that shards weights in a way that masks and scales cannot use."""
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
    objective: Objective,
    ids: Int[Tensor, "examples ..."],
    settings: LoopOptions,
    where: TrainingContext,
    span: ScheduleSlice | None = None,
    parts: bool = False,
) -> dict[str, Any]:
    """Train the student; returns the figures for the report: losses, steps and the curve.

    ids: the examples, in the form that the objective reads: token ids, or numbers. span: the slice of the schedule to
    train; None: all of it. parts: each process has a part of every example, so that the mean of the objective over
    processes is the loss; otherwise processes divide the examples.

    Raises NumericError, after restoring the last good state, when a loss or a gradient is not finite; SaveError;
    ShortageError for a batch that does not fit into memory; RecipeError for an unsupported launcher (`check_launcher`).
    """
    trainer = _Trainer(student, objective, ids, settings, where, span or ScheduleSlice(), parts)
    with torch.enable_grad():
        return trainer.run()


class _Trainer:
    def __init__(
        self,
        student: Student,
        objective: Objective,
        ids: Tensor,
        settings: LoopOptions,
        where: TrainingContext,
        span: ScheduleSlice,
        parts: bool = False,
    ) -> None:
        self.given, self.objective, self.ids, self.settings, self.where = student, objective, ids, settings, where
        self.span = span
        self.device = next(iter(student.named().values())).device
        # The state of accelerate is global to the process: it keeps the device and the precision of the first training.
        # So the precision is set per step, and the device is asked for only if a launcher has started the process.
        cpu = self.device.type == "cpu"
        cpu = cpu and PartialState(cpu=cpu).distributed_type != DistributedType.NO
        unused = DistributedDataParallelKwargs(find_unused_parameters=True)  # experts that got no token
        self.accelerator = Accelerator(cpu=cpu, mixed_precision="no", device_placement=False, kwargs_handlers=[unused])
        fsdp: FullyShardedDataParallelPlugin | None = getattr(self.accelerator.state, "fsdp_plugin", None)
        check_launcher(self.accelerator.distributed_type, fsdp, where.label, self.accelerator.num_processes)
        record = {"settings": settings.model_dump(mode="json"), "key": where.key, "codes": student.sha256()}
        record |= {"begin": span.begin, "keep": span.keep}
        self.key = digest(record, {"ids": ids, **student.named(), **student.buffers()})
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
        self.highest = [group["lr"] for group in groups]
        self.rows, self.held = settings.split(len(ids))
        self.rank, self.sharing = (0, 1) if parts else (self.accelerator.process_index, self.accelerator.num_processes)
        self.parts, self.order = parts, settings.order(self.rows, self.sharing)
        self.rates = settings.rates(len(self.order)).tolist()
        self.first = round(span.begin * len(self.order))
        self.state = State(step=self.first, best_step=self.first)
        self.good = self._snapshot()
        self.begun = perf_counter()

    @property
    def _file(self) -> Path | None:
        return None if self.where.work is None else self.where.work / STATE

    def run(self) -> dict[str, Any]:
        """Run all remaining steps."""
        resumed = self._resume()
        before = self.state.seconds
        if not resumed:
            self._begin()
        for step in range(self.state.step, len(self.order)):
            if self.settings.patience is not None and self.state.waited >= self.settings.patience:
                self.where.journal.add(
                    "note", self.where.label, "stopped early: no improvement on the held-out sequences", step=step
                )
                break
            self._take(step)
            self.state.seconds = before + perf_counter() - self.begun
            last = self.state.step == len(self.order)
            if last or self.state.step % self.settings.evaluate_every == 0:
                self._evaluate()
            if last or self.state.step % self.settings.checkpoint_every == 0:
                self._write()
        if self.held:
            self._restore(self.good)
        self._copy_back()
        return self._record()

    def _begin(self) -> None:
        """Apply the updates that precede the first step."""
        found = self.student.update(self.state.step, len(self.order))
        if found:
            self.state.curve.append({"step": self.state.step, **found})
        self.good = self._snapshot()
        self._keep()
        self._evaluate()

    def _take(self, step: int) -> None:
        """Take one step of the optimizer."""
        for group, highest in zip(self.optimizer.param_groups, self.highest, strict=True):
            group["lr"] = highest * self.rates[step]
        local = self.order[step][self.rank :: self.sharing].tolist()
        loss = torch.zeros((), device=self.device)
        for i, rows in enumerate(local):
            alone = nullcontext() if i == len(local) - 1 else self.accelerator.no_sync(self.model)
            with self._fitting(step), alone:
                part = self._loss(rows) / len(local)
                self.accelerator.backward(part)
            loss += part.detach()
        for parameter in self.parameters.values():
            if parameter.grad is None:  # an expert without tokens: zero, for any number of processes
                parameter.grad = torch.zeros_like(parameter)
        self.student.adjust()
        clipped: Any = self.accelerator.clip_grad_norm_(list(self.parameters.values()), self.settings.clip or math.inf)
        mean: Any = self.accelerator.reduce(loss, "mean")
        found, norm = float(mean), float(full(clipped))
        if not (math.isfinite(found) and math.isfinite(norm)):
            self._fail(step + 1, found, norm)
        self.student.decay(self.settings.rate_of("weights") * self.rates[step])
        self.stepper.step()
        self.stepper.zero_grad()
        shares = self.student.update(step + 1, len(self.order))
        self.state.step = step + 1
        self.state.curve.append({"step": step + 1, "loss": found, "rate": self.rates[step], **shares})
        self._keep()
        self._progress(found)

    def _keep(self) -> None:
        """Copy the trained parameters at the step that the schedule slice names."""
        if self.span.keep is not None and self.state.step == round(self.span.keep * len(self.order)):
            self.span.kept = {name: p.detach().clone() for name, p in self.parameters.items()}

    @contextmanager
    def _fitting(self, step: int) -> Iterator[None]:
        """Raise ShortageError, after restoring the state before the step, when its passes do not fit into memory."""
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
            step_name = f"step {step + 1} of {len(self.order)} with batch: {batch}"
            raise ShortageError(
                f"{self.where.label}: {step_name} does not fit into the memory of {self.device}; {hint}"
            ) from error

    def _loss(self, rows: list[int]) -> Tensor:
        bf16 = self.settings.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            return self.objective(self.model, self.ids[rows].to(self.device), rows)

    def _whole(self, loss: Tensor) -> Tensor:
        """The loss of held-out examples; all processes have the same ones, or parts of them."""
        mean: Any = self.accelerator.reduce(loss, "mean") if self.parts else loss
        return mean

    def _evaluate(self) -> None:
        """Compute the loss on the held-out sequences and remember the best state."""
        if not self.held:
            return
        parts = [self.held[i : i + self.settings.batch] for i in range(0, len(self.held), self.settings.batch)]
        with torch.no_grad():
            found = sum(float(self._whole(self._loss(rows))) * len(rows) for rows in parts) / len(self.held)
        if not math.isfinite(found):
            self._fail(self.state.step, found, math.nan)
        self.state.curve.append({"step": self.state.step, "held_out": found})
        if not self.student.ready(self.state.step, len(self.order)):
            return
        if self.state.best is None or found < self.state.best:
            self.state.best, self.state.best_step, self.state.waited = found, self.state.step, 0
            self.good = self._snapshot()
        else:
            self.state.waited += 1

    def _fail(self, step: int, loss: float, norm: float) -> None:
        """Restore the last good state and raise NumericError."""
        self._restore(self.good)
        self._copy_back()
        file = self._file
        saved = f"; the last checkpoint is in {file.parent}" if file is not None and file.exists() else ""
        reason = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        hint = "use a smaller learning_rate, or clip"
        raise NumericError(f"{self.where.label}: {reason} in step {step} of {len(self.order)}; {hint}{saved}")

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: t.detach().clone() for name, t in (*self.parameters.items(), *self.buffers.items())}

    @torch.no_grad()
    def _restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in (*self.parameters.items(), *self.buffers.items()):
            tensor.copy_(tensors[name])

    def _copy_back(self) -> None:
        """Copy the trained parameters, unsharded, to the given student."""
        if self.student is not self.given:
            self.given.copy_from(self.student, self.device)
            self.span.kept = {name: full(tensor) for name, tensor in self.span.kept.items()}

    def _resume(self) -> bool:
        """Restore the state of the same training from a killed run; whether there was one."""
        if self._file is None:
            return False
        found = read_state(self._file, self.key, self.parameters, self.buffers, self.optimizer.state)
        if found is not None:
            record, best = found
            self.good = {name: like(best[name], tensor) for name, tensor in self.good.items()}
            kept = {name.removeprefix(KEPT): t for name, t in best.items() if name.startswith(KEPT)}
            self.span.kept = {name: like(tensor, self.parameters[name]) for name, tensor in kept.items()}
            self.state = State(**record)
            self.where.journal.add("note", self.where.label, "training resumes", step=self.state.step)
        return found is not None

    def _write(self) -> None:
        if not self.held:
            self.good = self._snapshot()
        if self._file is not None:
            best = self.good | {f"{KEPT}{name}": tensor for name, tensor in self.span.kept.items()}
            main = self.accelerator.is_main_process
            found = gather(tensors_of(self.parameters, self.buffers, best, self.optimizer.state), keep=main)
            if main:
                write_state(self._file, self.key, vars(self.state), found)
        self.accelerator.wait_for_everyone()  # a process that is done may remove the folder

    def _progress(self, loss: float) -> None:
        label, figures = self.where.label, {"done": self.state.step, "of": len(self.order), "loss": loss}
        self.where.journal.add("progress", label, f"training, {label}", **figures)

    def _record(self) -> dict[str, Any]:
        """The figures for the report; a fallback is journaled when training gained nothing."""
        state, journal = self.state, self.where.journal
        losses = [point["loss"] for point in state.curve if "loss" in point]
        part = max(1, len(losses) // 4)
        first, last = sum(losses[:part]) / part, sum(losses[-part:]) / part
        counts = {kind: sum(p.numel() for p in group.values()) for kind, group in self.student.parameters.items()}
        steps, of = state.step - self.first, len(self.order) - self.first
        journal.add("note", self.where.label, "trained", steps=steps, first_loss=first, last_loss=last, **counts)
        if self.held and state.best_step == self.first:
            message = "training did not improve the loss on the held-out sequences; the model is unchanged"
            journal.add("fallback", self.where.label, message, held_out=state.best)
        elif self._rose(first, last, losses):
            message = "the loss rose during training; use a smaller learning_rate"
            journal.add("fallback", self.where.label, message, first_loss=first, last_loss=last)
        return {
            "first_loss": first,
            "last_loss": last,
            "steps": steps,
            "of": of,
            "trained": counts,
            "seconds": state.seconds,
            "held_out": self.held,
            "best": {"step": state.best_step, "held_out": state.best} if self.held else None,
            "curve": state.curve,
        }

    def _rose(self, first: float, last: float, losses: list[float]) -> bool:
        """Whether the loss rose, for a model without a pruning schedule."""
        pruned = not self.student.ready(0, len(self.order))
        return not self.held and not pruned and len(losses) > 1 and last > min(first, RISEN * losses[0])
