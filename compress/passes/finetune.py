"""Fine-tuning: what earlier passes cost is won back by training what they left (Han 2015; with LoRA, Hu 2021)."""

from __future__ import annotations

import math
import zlib
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor, nn

from compress.api.memory import ProblemSize
from compress.families.training import TrainingPass
from compress.model.linear import CompressedLinear
from compress.train.parametrization import Kind, Parametrization


class Finetune(TrainingPass):
    """Train on the calibration text; what is pruned stays zero, and codes stay as they are.

    With lora_rank the weights of dense layers stay as they came, and a product of low rank is learned beside each:
    W' = mask * (W + lora_alpha / lora_rank * B A), B [out, rank] zero and A [rank, in] random at first. It is added to
    the weight in the end: nothing of it is left in the checkpoint, and the mask holds.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/1506.02626"

    lora_rank: int | None = Field(
        default=None,
        ge=1,
        description="learn a product of this rank beside every dense weight, at the full learning_rate, and, if train "
        "is not given, nothing else; null: the weights themselves",
    )
    lora_alpha: float | None = Field(
        default=None, gt=0, description="the product is weighed by lora_alpha / lora_rank; twice the rank if not given"
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.lora_rank is None and self.lora_alpha is not None:
            raise ValueError("lora_alpha without lora_rank says nothing; give the rank, too, or leave it out")
        if self.lora_rank is not None and self.train is not None and "weights" not in self.train:
            raise ValueError("lora_rank is about weights; add weights to train, or leave it out")

    @property
    def kinds(self) -> tuple[Kind, ...] | None:
        return ("weights",) if self.lora_rank is not None and self.train is None else self.train

    def rate_of(self, kind: Kind) -> float:
        return self.learning_rate if self.lora_rank is not None and kind == "weights" else super().rate_of(kind)

    def parametrize(self, name: str, layer: CompressedLinear) -> Parametrization:
        if self.lora_rank is None:
            return super().parametrize(name, layer)
        seed = zlib.crc32(name.encode()) ^ self.seed
        alpha = 2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return _LowRank(layer.mask, layer.shape, self.lora_rank, alpha / self.lora_rank, seed)

    def memory(self, size: ProblemSize) -> int:
        whole = super().memory(size)
        kept = 8 if self.optimizer == "lion" else 12  # best so far and moments: W alone is there, in float32
        return whole if self.lora_rank is None else whole - kept * size.weights


class _LowRank(Parametrization):
    """mask * (W + scaling * B A): W stays."""

    own: ClassVar[Kind] = "weights"
    trains_weight: ClassVar[bool] = False
    mask: Tensor | None

    def __init__(
        self, mask: Bool[Tensor, "out in"] | None, shape: tuple[int, int], rank: int, scaling: float, seed: int
    ) -> None:
        super().__init__()
        rows, width = shape
        self.scaling = scaling
        self.register_buffer("mask", mask)
        bound = 1 / math.sqrt(width)  # of the reference code: Kaiming's uniform with a = sqrt(5)
        drawn = torch.rand(rank, width, generator=torch.Generator().manual_seed(seed))
        self.down = nn.Parameter(bound * (2 * drawn - 1))
        self.up = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        found = weight + self.scaling * (self.up @ self.down)
        return found if self.mask is None else found * self.mask
