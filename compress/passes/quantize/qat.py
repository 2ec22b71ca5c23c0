"""Quantization-aware training: train weights, and optionally scales, through fake quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from compress.blockwise.install import adapt
from compress.blockwise.survey import survey_model
from compress.layers.linear import CompressedLinear, linears
from compress.layers.transforms.rounding import InputRounding
from compress.models.structure.blocks import find_blocks
from compress.numerics.quant.rounding import GridOptions
from compress.passes.contract.context import Run
from compress.passes.contract.options import INHERITED, OF_THE_WHOLE
from compress.passes.contract.passes import works_on
from compress.passes.families.quantizing import Quantizing
from compress.passes.families.training import TrainingPass
from compress.train.fake_quantized import FakeQuantized, LearnedSteps
from compress.train.parametrization import Parametrization
from compress.train.student import Student


class QAT(Quantizing, TrainingPass):
    """Quantization-aware training: train weights through fake quantization, and store their codes at the end.

    The forward pass uses the dequantized weights of the targets and quantized activations. The backward pass uses the
    straight-through estimator (LLM-QAT, Liu 2023, section 2.2). If `train` includes scales, scales and zero points are
    learned as in LSQ (Esser 2020, arXiv 1902.08153); otherwise they are computed from the weights in every step.

    With `ce_weight` below 1 the uncompressed model is a teacher. With a calibration text that the model generates
    (source: self) no data is needed. After `kv_cache`, keys and values are quantized too. Ternary and binary weights
    are possible (Ma 2024, arXiv 2402.17764, trains them from scratch).
    """

    use_for: ClassVar[str] = (
        "2 and 3 bits, ternary weights, and quantized activations or caches, when there is text and time to train all"
        " weights."
    )
    not_for: ClassVar[str] = (
        "Few steps at 2 bits: a start from the nearest values is poor, and gptq and distill are far better."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2305.17888"
    of_the_whole: ClassVar[frozenset[str]] = OF_THE_WHOLE | frozenset(TrainingPass.model_fields)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.train is not None and "weights" not in self.train:
            raise ValueError("train must include weights; to learn only scales and norms, use rtn, then distill")
        if "scales" in (self.train or ()) and not self.grid.free_scales and context != INHERITED:
            raise ValueError(
                f"train: scales needs scales that are floats, which {self.weights} has not; write train: [weights]"
            )
        if self.activation_scale != "token":
            raise ValueError(f"activation_scale: {self.activation_scale} is not supported by this pass; use token")
        if self.grid.scaling.fused:
            raise ValueError(
                f"weights {self.weights}: layers with the same input must share a factor of their scales, but this "
                "pass trains each layer alone; use mxfp4, or another grid"
            )

    def apply(self, model: nn.Module, run: Run) -> None:
        survey, label = self.survey(), run.label or self.key()
        if survey is not None:
            assert isinstance(model, PreTrainedModel)
            inside = tuple(f"{block.name}." for block in find_blocks(model))
            names = [name for name in linears(model) if name.startswith(inside) and works_on(self, name)]
            return survey.settled(self, survey_model(model, survey, names, run, label)).apply(model, run)
        super().apply(model, run)
        dtype = next(model.parameters()).dtype
        for name, layer in model.named_modules():
            if isinstance(layer, CompressedLinear) and works_on(self, name):
                adapt(layer, run, dtype, f"{run.label or self.key()}: {name}")

    def parametrization_of_layers(
        self, model: nn.Module, run: Run
    ) -> Callable[[str, CompressedLinear], Parametrization]:
        def parametrize(name: str, layer: CompressedLinear) -> Parametrization:
            own_step = self.for_layer(name) or self
            return self._fake(layer, own_step, run.scale_dtype, own_step.tries_signs and run.format.negative_scales)

        return parametrize

    def _fake(self, layer: CompressedLinear, own_step: QAT, storage: torch.dtype, signed: bool) -> Parametrization:
        """Return the parametrization of a layer's weight.

        Args:
            own_step: the pass with the options of the layer.
            signed: as in `fit`.
        """
        if own_step.rounding_scheme is not None:
            layer.round_inputs(InputRounding(own_step.rounding_scheme, layer.shape, {}))
        rounding = GridOptions(
            own_step.grid, own_step.group_size, own_step.symmetric, own_step.scale, storage, signed=signed
        )
        if own_step.grid.free_scales and (self.train is None or "scales" in self.train):
            return LearnedSteps(rounding, layer.mask, layer.weight.detach().float())
        return FakeQuantized(rounding, layer.mask)

    def note_untrained(self, student: Student, run: Run, label: str) -> None:
        """Journal the layers whose scales cannot be learned."""
        names = [n for n, trained in student.layers.items() if type(trained.parametrization) is FakeQuantized]
        if names and (self.train is None or "scales" in self.train):
            message = "scales of these grids cannot be learned; they are computed from the weights in every step"
            run.journal.add("fallback", label, message, layers=len(names), first=names[0])
