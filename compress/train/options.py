"""The options of training, which have the same names in every pass that trains."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float, Int
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor
from transformers import get_scheduler

from compress.passes.contract.memory import ProblemSize
from compress.train.lion import Lion
from compress.train.parametrization import Kind, ParameterKind

EPOCHS = 2  # default if neither steps nor epochs are given
WEIGHT_RATE = 0.02  # relative to learning_rate: weights are a few hundredths, factors of scales and norms about 1

Share = Annotated[float, Field(ge=0, lt=1)]


def split_held_out(sequences: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Split sequences into training sequences and a random fraction of held-out ones.

    Args:
        sequences: number of sequences.
        share: fraction to hold out. Unless it is 0, both sets have at least one of two or more sequences.
        seed: seed of the choice.

    Returns:
        The indices of the training sequences and of the held-out sequences.
    """
    if not share:
        return list(range(sequences)), []
    count = min(max(1, round(share * sequences)), sequences - 1)
    order = torch.randperm(sequences, generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted(order[count:]), sorted(order[:count])


class LoopOptions(BaseModel):
    """The options of the training loop for any trained parameters; a mixin for passes and for their parts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int | None = Field(default=None, ge=1, description="number of optimizer steps; instead of epochs")
    batch: int = Field(default=1, ge=1, description="sequences per forward and backward pass")
    accumulate: int = Field(default=1, ge=1, description="forward and backward passes per step, in every process")
    learning_rate: float = Field(
        default=1e-3, gt=0, description="highest rate of norms, and of scales, relative to each scale"
    )
    warmup: int = Field(default=4, ge=0, description="number of warmup steps, in which the rate rises")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="schedule of the rate after warmup"
    )
    clip: float | None = Field(default=None, gt=0, description="maximum gradient norm; null: no clipping")
    seed: int = Field(default=0, ge=0, description="seed of the sequence order, the held-out sequences and the masks")
    hold_out: Share = Field(
        default=0.0,
        description="fraction of the sequences held out of training; the weights with the lowest loss on them are kept",
    )
    evaluate_every: int = Field(default=8, ge=1, description="steps between evaluations on the held-out sequences")
    patience: int | None = Field(
        default=None, ge=1, description="stop after this number of evaluations without improvement; needs hold_out"
    )
    precision: Literal["no", "bf16"] = Field(
        default="no", description="'bf16': matrix products in bfloat16; parameters stay float32"
    )
    checkpoint_every: int = Field(
        default=16, ge=1, description="steps between checkpoints, from which a killed run resumes"
    )

    def model_post_init(self, context: Any) -> None:
        if self.patience is not None and not self.hold_out:
            raise ValueError("patience needs held-out sequences; write hold_out: 0.1, or leave out patience")

    @abstractmethod
    def rate_of(self, kind: ParameterKind) -> float:
        """Return the highest learning rate of a kind of parameter."""

    @abstractmethod
    def decay_of(self, kind: ParameterKind) -> float:
        """Return the weight decay of a kind of parameter."""

    @abstractmethod
    def optimizer_of(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Create the optimizer of groups of parameters, each with its rate and decay."""

    @abstractmethod
    def step_count(self, sequences: int, sequences_per_step: int) -> int:
        """Return the number of steps.

        Args:
            sequences: number of training sequences.
            sequences_per_step: number of sequences of each step.
        """

    def split(self, sequences: int) -> tuple[list[int], list[int]]:
        """Return the indices of the training sequences and of the held-out sequences (`split_held_out`)."""
        return split_held_out(sequences, self.hold_out, self.seed)

    def order(self, rows: list[int], processes: int) -> Int[Tensor, "steps parts batch"]:
        """Return the sequences of every step in shuffled epochs, divided into parts that are forwarded together."""
        parts = self.accumulate * processes
        sequences_per_step = parts * self.batch
        steps = self.step_count(len(rows), sequences_per_step)
        generator, epochs = torch.Generator().manual_seed(self.seed), []
        for _ in range(math.ceil(steps * sequences_per_step / len(rows))):
            epochs.append(torch.randperm(len(rows), generator=generator))
        sequences = torch.tensor(rows)[torch.cat(epochs)[: steps * sequences_per_step]]
        return sequences.view(steps, parts, self.batch)

    def rates(self, steps: int) -> Float[Tensor, " steps"]:
        """Return the rate of every step relative to the highest; no step has a rate of 0."""
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
        name = "constant_with_warmup" if self.schedule == "constant" else self.schedule
        scheduler: Any = get_scheduler(name, optimizer, num_warmup_steps=self.warmup, num_training_steps=steps + 1)
        (rate_lambda,) = scheduler.lr_lambdas
        return torch.tensor([rate_lambda(step + 1) for step in range(steps)], dtype=torch.float64)


class TrainingOptions(LoopOptions):
    """The options of training; a mixin for passes."""

    repeats: ClassVar[str | None] = "steps"

    train: tuple[Kind, ...] | None = Field(
        default=None,
        min_length=1,
        description="parameters to train: scales (a factor per scale, if stored as floats), norms, weights (of layers "
        "that are not packed), biases; null: all kinds that the layers have",
    )
    epochs: float | None = Field(
        default=None, gt=0, description=f"number of passes over the sequences; {EPOCHS} if neither is given"
    )
    weight_rate: float = Field(
        default=WEIGHT_RATE, gt=0, description="rate of weights and biases, relative to learning_rate"
    )
    optimizer: Literal["adamw", "lion"] = Field(
        default="adamw",
        description="adamw, or lion, whose state has half the size; lion needs a learning_rate 3 to 10 times smaller",
    )
    betas: tuple[Share, Share] | None = Field(
        default=None,
        description="decay rates of the optimizer's averages; null: 0.9 and 0.95 for adamw, 0.9 and 0.99 for lion",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay of the optimizer, for weights only")

    @field_validator("train", mode="before")
    @classmethod
    def _one_kind(cls, value: Any) -> Any:
        """Accept one kind without a list."""
        return (value,) if isinstance(value, str) else value

    def model_post_init(self, context: Any) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs both set the length of training; leave out one of them")
        super().model_post_init(context)

    def rate_of(self, kind: ParameterKind) -> float:
        return self.learning_rate * (self.weight_rate if kind in ("weights", "biases") else 1)

    def optimizer_of(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if self.optimizer == "lion":
            return Lion(groups, self.betas or (0.9, 0.99))
        return torch.optim.AdamW(groups, betas=self.betas or (0.9, 0.95), foreach=False)

    def decay_of(self, kind: ParameterKind) -> float:
        return self.weight_decay if kind == "weights" else 0.0

    def step_count(self, sequences: int, sequences_per_step: int) -> int:
        """Return `steps`, or the steps of the epochs."""
        return self.steps or max(1, math.ceil((self.epochs or EPOCHS) * sequences / sequences_per_step))

    def memory(self, size: ProblemSize) -> int:
        """Return the memory of training in addition to the model, in bytes.

        Every trained number needs five floats: the parameter, its best value, its gradient (before the gradient exists,
        the masked weight uses that memory), and two moments (Lion: one). Further: dense weights widened to float32, the
        activations of the backward pass, and the logits with their gradient.
        """
        trained = self._trained(size)
        widened = (4 - size.itemsize) * (size.weights + size.outside)
        tokens = self.batch * size.length
        floats = 4 if self.optimizer == "lion" else 5
        return 4 * floats * trained + widened + 4 * tokens * (size.passed + 2 * size.vocabulary)

    def exchanged_bytes(self, size: ProblemSize) -> int:
        """Return the bytes of the gradient buffers of several processes (DDP): a float per trained number."""
        return 4 * self._trained(size)

    def _trained(self, size: ProblemSize) -> int:
        kinds = self.train or get_args(Kind)
        return size.scales * ("scales" in kinds) + size.weights * ("weights" in kinds)
