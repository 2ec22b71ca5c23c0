"""Fine-tuning: train the compressed model to recover its quality (Han 2015; with LoRA, Hu 2021)."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from compress.layers.linear import CompressedLinear
from compress.passes.contract.facts import Requirements
from compress.passes.contract.memory import ProblemSize
from compress.passes.families.training import TrainingPass
from compress.train.parametrization import Kind, LowRankUpdate, ParameterKind, Parametrization


class Finetune(TrainingPass):
    """Train on the calibration text; pruned weights stay zero, and the codes of quantized weights stay fixed.

    With `lora_rank` the weights of dense layers are frozen, and a low-rank update of each is learned: W' = mask * (W +
    lora_alpha / lora_rank * B A). B [out, rank] starts at zero and A [rank, in] at random values. The update is added
    to the weight at the end. So the checkpoint contains only W', and the mask still holds.
    """

    use_for: ClassVar[str] = (
        "Training the remaining weights of a pruned model on text, directly or by LoRA, when no teacher fits into "
        "memory."
    )
    not_for: ClassVar[str] = (
        "Quantized models: distill, on the outputs of the uncompressed model, needs less text and loses less."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/1506.02626"

    lora_rank: int | None = Field(
        default=None,
        ge=1,
        description="learn a low-rank update of this rank for every dense weight, at the full learning_rate, and, "
        "unless train is given, nothing else; null: train the weights",
    )
    lora_alpha: float | None = Field(
        default=None, gt=0, description="factor of the update: lora_alpha / lora_rank; default: twice the rank"
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.lora_rank is not None and self.train is not None and "weights" not in self.train:
            raise ValueError("lora_rank needs weights in train; write train: [weights], or leave lora_rank out")

    def without_effect(self) -> dict[str, str]:
        idle = super().without_effect()
        if self.lora_rank is None:
            return idle | {"lora_alpha": "without lora_rank; set lora_rank, or leave lora_alpha out"}
        if "biases" not in (self.train or ()):
            idle["weight_rate"] = "with lora_rank, whose update learns at learning_rate; leave it out"
        return idle

    @property
    def requires(self) -> Requirements:
        return replace(super().requires, weights_option=None if self.lora_rank is None else "lora_rank")

    @property
    def kinds(self) -> tuple[Kind, ...] | None:
        return ("weights",) if self.lora_rank is not None and self.train is None else self.train

    def rate_of(self, kind: ParameterKind) -> float:
        return self.learning_rate if self.lora_rank is not None and kind == "weights" else super().rate_of(kind)

    def parametrize(self, name: str, layer: CompressedLinear) -> Parametrization:
        if self.lora_rank is None:
            return super().parametrize(name, layer)
        seed = zlib.crc32(name.encode()) ^ self.seed
        alpha = 2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return LowRankUpdate(layer.mask, layer.shape, self.lora_rank, alpha / self.lora_rank, seed)

    def memory(self, size: ProblemSize) -> int:
        training_bytes = super().memory(size)
        adapter_bytes = (
            8 if self.optimizer == "lion" else 12
        )  # bytes per weight of the best state and the moments, which W does not need here
        return training_bytes if self.lora_rank is None else training_bytes - adapter_bytes * size.weights
