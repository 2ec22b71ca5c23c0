"""The options of training, under the same names for every pass that trains."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor
from transformers import get_scheduler

from compress.api.memory import ProblemSize
from compress.train.lion import Lion
from compress.train.parametrization import Kind

EPOCHS = 2  # where neither steps nor epochs are given
WEIGHT_RATE = 0.02  # of learning_rate: weights are a few hundredths, where factors of scales and norms are about 1

Share = Annotated[float, Field(ge=0, lt=1)]


class TrainingOptions(BaseModel):
    """How a model is trained; a mixin for passes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: tuple[Kind, ...] | None = Field(
        default=None,
        min_length=1,
        description="what is learned: scales (a factor on each, where stored as floats), norms, weights (of layers "
        "that are not packed), biases; null: all of them that the layers have",
    )
    steps: int | None = Field(default=None, ge=1, description="how many steps; instead of epochs")
    epochs: float | None = Field(
        default=None, gt=0, description=f"how often every sequence is seen; {EPOCHS} if not given"
    )
    batch: int = Field(default=1, ge=1, description="sequences in one forward and backward pass")
    accumulate: int = Field(default=1, ge=1, description="such passes per step, in every process")
    learning_rate: float = Field(default=1e-3, gt=0, description="of norms, and of scales as a share of each")
    weight_rate: float = Field(
        default=WEIGHT_RATE, gt=0, description="the rate of weights and biases, as a share of learning_rate"
    )
    optimizer: Literal["adamw", "lion"] = Field(
        default="adamw", description="lion needs half of its memory, and a learning_rate 3 to 10 times smaller"
    )
    betas: tuple[Share, Share] | None = Field(
        default=None, description="the optimizer's averages; if not given, 0.9 and 0.95 of adamw, 0.9 and 0.99 of lion"
    )
    weight_decay: float = Field(default=0.0, ge=0, description="the optimizer's, of weights alone")
    warmup: int = Field(default=4, ge=0, description="steps in which the rate rises")
    schedule: Literal["cosine", "linear", "constant"] = Field(default="cosine", description="of the rate afterwards")
    clip: float | None = Field(default=None, gt=0, description="the largest norm of the gradient of a step")
    seed: int = Field(default=0, ge=0, description="of the order of the sequences, of those held out, and of masks")
    hold_out: Share = Field(
        default=0.0, description="share of the sequences that is not trained on; the state that is best on them is kept"
    )
    evaluate_every: int = Field(default=8, ge=1, description="steps between two looks at the sequences held out")
    patience: int | None = Field(
        default=None, ge=1, description="stop after so many looks at the sequences held out without a better one"
    )
    precision: Literal["no", "bf16"] = Field(
        default="no", description="'bf16': multiply in bfloat16; what is trained stays float32"
    )
    checkpoint_every: int = Field(default=16, ge=1, description="steps after which a killed run can go on")

    @field_validator("train", mode="before")
    @classmethod
    def _one_kind(cls, value: Any) -> Any:
        """One kind may be written without a list."""
        return (value,) if isinstance(value, str) else value

    def model_post_init(self, context: Any) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs are two ways to say how long; leave one of them out")
        if self.patience is not None and not self.hold_out:
            raise ValueError("patience needs sequences that are held out; write hold_out: 0.1, or leave it out")

    def rate_of(self, kind: Kind) -> float:
        """The highest rate of what is trained."""
        return self.learning_rate * (self.weight_rate if kind in ("weights", "biases") else 1)

    def optimizer_of(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer of groups of parameters, each with its rate and decay."""
        if self.optimizer == "lion":
            return Lion(groups, self.betas or (0.9, 0.99))
        return torch.optim.AdamW(groups, betas=self.betas or (0.9, 0.95), foreach=False)

    def decay_of(self, kind: Kind) -> float:
        """Weight decay of what is trained."""
        return self.weight_decay if kind == "weights" else 0.0

    def memory(self, size: ProblemSize) -> int:
        """What training holds beside the model: five floats for each number that is trained (itself, the best so far,
        two moments, or one of Lion, and its gradient, before which it is there masked), dense weights widened to
        float32, what the backward pass needs, and logits with their gradient.
        """
        kinds = self.train or get_args(Kind)
        trained = size.scales * ("scales" in kinds) + size.weights * ("weights" in kinds)
        widened = (4 - size.itemsize) * (size.weights + size.outside)
        tokens = self.batch * size.length
        floats = 4 if self.optimizer == "lion" else 5
        return 4 * floats * trained + widened + 4 * tokens * (size.passed + 2 * size.vocabulary)

    def split(self, sequences: int) -> tuple[list[int], list[int]]:
        """The numbers of the sequences to train on and of those held out: one at least of each, where there are two."""
        if not self.hold_out:
            return list(range(sequences)), []
        count = min(max(1, round(self.hold_out * sequences)), sequences - 1)
        order = torch.randperm(sequences, generator=torch.Generator().manual_seed(self.seed)).tolist()
        return sorted(order[count:]), sorted(order[:count])

    def order(self, rows: list[int], processes: int) -> Int[Tensor, "steps parts batch"]:
        """The sequences of every step, in parts that are forwarded together: all of them over and over, shuffled."""
        parts = self.accumulate * processes
        each = parts * self.batch
        steps = self.steps or max(1, math.ceil((self.epochs or EPOCHS) * len(rows) / each))
        generator, drawn = torch.Generator().manual_seed(self.seed), []
        for _ in range(math.ceil(steps * each / len(rows))):
            drawn.append(torch.randperm(len(rows), generator=generator))
        chosen = torch.tensor(rows)[torch.cat(drawn)[: steps * each]]
        return chosen.view(steps, parts, self.batch)

    def rates(self, steps: int) -> Float[Tensor, " steps"]:
        """The rate of every step as a share of the highest; no step is wasted on a rate of 0."""
        spare = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
        name = "constant_with_warmup" if self.schedule == "constant" else self.schedule
        made: Any = get_scheduler(name, spare, num_warmup_steps=self.warmup, num_training_steps=steps + 1)
        (shape,) = made.lr_lambdas
        return torch.tensor([shape(step + 1) for step in range(steps)], dtype=torch.float64)
