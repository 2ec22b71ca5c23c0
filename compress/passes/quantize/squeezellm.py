"""SqueezeLLM: k-means of each row weighted by sensitivity, and a few weights apart (Kim 2023)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from compress.blockwise.install import adapt
from compress.layers.base import WeightPart
from compress.layers.linear import linears, replace_linear
from compress.layers.parts.codebook import CodebookScheme
from compress.layers.scheme import LayerScheme
from compress.models.kinds.contract import ModelKind
from compress.models.kinds.headless import check_learns
from compress.models.structure.blocks import find_blocks
from compress.numerics.kmeans import kmeans
from compress.passes.contract.context import Run
from compress.passes.contract.facts import Effects, Fact, Requirements
from compress.passes.contract.layers import Layer
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.passes import ModelPass, works_on
from compress.passes.families.codebooks import Outliers, look_up, with_outliers
from compress.train.fisher import fisher
from compress.train.objective import LanguageLoss
from compress.train.student import trainable


class SqueezeLLM(ModelPass):
    """Give each row of a weight its own dictionary, by k-means weighted with the sensitivity of every weight.

    The increase of the loss is estimated by sum F_ij (w_ij - Q(w_ij))^2 (section 4.1). F is the diagonal of the
    empirical Fisher information: the mean over sequences of the squared gradient of the loss of the text. k-means
    minimizes the sum row by row. The gradients need the whole model in memory.

    The largest weights of a layer (`outliers`) and the most sensitive ones (`sensitive`) are stored as floats (section
    4.2), so that the dictionary needs not cover them. A dictionary takes 16 * 2^bits bits per row, which is half a bit
    per weight for 4 bits and rows of 512.
    """

    use_for: ClassVar[str] = "3 and 4 bits in programs that look weights up, for models with long rows."
    not_for: ClassVar[str] = "Narrow models: a dictionary per row costs more bits there than scales per group."
    paper: ClassVar[str] = "https://arxiv.org/abs/2306.07629"
    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"quantized"})

    bits: int = Field(default=4, ge=1, le=8, description="bits of an index; a row's dictionary has 2^bits values")
    sensitivity: Literal["fisher", "none"] = Field(
        default="fisher", description="weight of each weight's squared error: the Fisher information, or 1"
    )
    outliers: float = Field(
        default=0.004,
        ge=0,
        lt=1,
        description="fraction of the weights that are stored as floats: the largest of a layer",
    )
    sensitive: float = Field(
        default=0.0005, ge=0, lt=1, description="fraction of the weights that are stored as floats: the most sensitive"
    )
    outlier_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        default="float16", description="dtype of the weights that are stored as floats"
    )
    sequences: int | None = Field(
        default=None, ge=1, description="number of calibration sequences for the sensitivities; null: all"
    )

    def without_effect(self) -> dict[str, str]:
        idle = dict.fromkeys(("sensitive", "sequences"), "with sensitivity: none; leave it out")
        return super().without_effect() | (idle if self.sensitivity == "none" else {})

    @property
    def requires(self) -> Requirements:
        learns = self.sensitivity == "fisher"
        return Requirements(data=learns, objective=learns)

    def effects(self, layer: LayerScheme) -> Effects:
        problem, width = None, layer.shape[1]
        if 2**self.bits > width:
            problem = f"a dictionary of {2**self.bits} values is larger than its rows of {width}; use fewer bits"
        scheme = with_outliers(layer, CodebookScheme(self.bits), *self._kept)
        return replace(super().effects(layer), scheme=scheme, problem=problem)

    @property
    def _kept(self) -> tuple[Outliers, Outliers]:
        sensitive = self.sensitive if self.sensitivity == "fisher" else 0
        return Outliers(self.outliers, self.outlier_dtype), Outliers(sensitive, self.outlier_dtype)

    def memory(self, size: ProblemSize) -> int:
        # squared gradients, one gradient at a time, the activations of a sequence; then a layer's k-means in float64
        return 4 * size.weights + size.forward_bytes + 12 * 8 * size.largest

    def adapt_objective(self, lm_objective: ModelKind, label: str) -> ModelKind:
        if self.sensitivity == "fisher":
            check_learns(lm_objective, label, "write sensitivity: none")
        return lm_objective

    def apply(self, model: nn.Module, run: Run) -> None:
        label, dtype = run.label or self.key(), next(model.parameters()).dtype
        inside = tuple(f"{block.name}." for block in find_blocks(model))
        names = [name for name in linears(model) if name.startswith(inside) and works_on(self, name)]
        sensitivity_of = self._fisher(model, run, label) if self.sensitivity == "fisher" else {}
        for layers_done, name in enumerate(names, start=1):
            layer = replace_linear(model, name)
            weight = layer.weight.detach().float()
            statistics = Layer(name, layer.mask, run.scale_dtype, partial(_log, run, f"{label} {name}"))
            layer.put(self.rounded(weight, sensitivity_of.pop(name, None), statistics))
            adapt(layer, run, dtype, f"{label}: {name}")
            run.journal.add("progress", label, "layers", done=layers_done, of=len(names))

    def _fisher(self, model: nn.Module, run: Run, label: str) -> dict[str, Tensor]:
        """Return the sensitivities of the targeted weights, by full name."""
        assert run.calibration is not None
        examples = run.calibration[: self.sequences]
        objective = LanguageLoss(lm_objective=self.adapt_objective(run.lm_objective, label))

        def report_progress(sequences_done: int) -> None:
            run.journal.add("progress", label, "gradients of sequences", done=sequences_done, of=len(examples))

        with trainable(model, ("weights",), partial(works_on, self), run.storage, label) as student:
            return fisher(student, objective, examples, label, report_progress)

    def rounded(
        self, weight: Float[Tensor, "out in"], sensitivity: Float[Tensor, "out in"] | None, layer: Layer
    ) -> list[WeightPart]:
        """Return the parts of a layer.

        Args:
            sensitivity: of every weight; None: all count alike.
        """
        largest, sensitive = self._kept
        chosen = largest.choose(weight.abs(), layer.mask)
        if sensitivity is not None:
            free = ~chosen if layer.mask is None else layer.mask & ~chosen
            chosen |= sensitive.choose(sensitivity, free)
        weights = torch.ones_like(weight) if sensitivity is None else sensitivity.clone()
        weights[chosen if layer.mask is None else chosen | ~layer.mask] = 0
        centers = kmeans(weight, weights, 2**self.bits - (layer.mask is not None))
        return look_up(weight, centers, layer, chosen, self.outlier_dtype)


def _log(run: Run, label: str, kind: str, message: str, **figures: Any) -> None:
    run.journal.add(kind, label, message, **figures)
