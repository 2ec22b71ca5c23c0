"""QLLM: split input channels with outliers, merge similar ones, correct the error by low-rank updates (Liu 2023)."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from compress.layers.linear import CompressedLinear, replace_linear
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.reassembly import Reassembly, ReassemblyScheme
from compress.layers.transforms.rounding import InputRounding, RoundingScheme
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.fake import straight
from compress.numerics.quant.grids import GRIDS
from compress.numerics.reassembly import merging_errors, similar_pairs, sub_channels
from compress.passes.contract.facts import Effects, Fact, Log, Preparation, Requirements
from compress.passes.contract.layers import BlockInputs, Layer
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.samples import Rows
from compress.passes.families.reconstruction import ReconstructionPass, block_error
from compress.passes.families.weight_grid import WeightGrid
from compress.train.options import TrainingOptions
from compress.train.parametrization import Kind, LowRankUpdate, ParameterKind, Parametrization

THRESHOLDS = 20  # candidates between the largest and the least channel; the reference code tries 100 and more


class QLLM(WeightGrid, ReconstructionPass):
    """Split channels with outliers, merge similar ones, and learn low-rank updates; a pass that quantizes follows.

    `weights`, `group_size`, `symmetric` and `activations` are those of the later pass.

    Channels: channel i of the inputs becomes T_i = ceil(max|X_i| / threshold) sub-channels x_i / T_i, each with its
    weight. As many pairs of similar channels are merged into their means, with the sums of their weights, so the number
    of channels stays (section 4.1). The threshold has the least error of the outputs after rounding weights and inputs,
    on a sample of tokens; no splitting is among the candidates. The layer maps its inputs when it runs. The paper
    merges channels of one side into any of the other; here each channel is merged once.

    Updates: then a low-rank update of each weight is learned, block by block, with weights and inputs rounded in every
    step, so that the block's output comes near that of the uncompressed model (section 4.2). The updates are added to
    the weights, and kept if they reduce the error on the held-out batches (on all batches if none are held out).
    """

    use_for: ClassVar[str] = "Activations in 4 bits for models with outlier channels, where inputs may not be rotated."
    not_for: ClassVar[str] = "Speed: every layer gathers its inputs twice. rotate costs less and mostly loses less."
    paper: ClassVar[str] = "https://arxiv.org/abs/2310.08041"
    never_after: ClassVar[frozenset[Fact]] = frozenset({"masked", "quantized", "cache_quantized"})

    activations: Literal["int8", "int6", "int4"] = Field(
        default="int8", description="grid of the inputs, with a scale per token, of the later pass"
    )
    extra: float = Field(
        default=0.1,
        ge=0,
        lt=0.5,
        description="largest share of sub-channels that is added; 0: no splitting",
    )
    rank: int = Field(default=4, ge=0, description="rank of the learned updates; 0: learn nothing")
    train: tuple[Kind, ...] | None = Field(default=("weights",), description="weights: nothing else is learned")
    learning_rate: float = Field(default=5e-4, gt=0, description="highest rate of the low-rank updates")

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        TrainingOptions.model_post_init(self, context)
        if self.train != ("weights",):
            raise ValueError("train must be weights: the low-rank updates of weights are what is learned; leave it out")
        if not self.extra and not self.rank:
            raise ValueError("extra: 0 and rank: 0 leave nothing to do; set one of them")

    def without_effect(self) -> dict[str, str]:
        idle = {"weight_rate": "on low-rank updates, which learn at learning_rate; leave it out"}
        if not self.rank:
            training_options = set(TrainingOptions.model_fields) - {"train"}
            idle |= dict.fromkeys(
                sorted(training_options | {"learning_rate"}), "with rank: 0, which learns nothing; leave it out"
            )
        return super().without_effect() | idle

    @property
    def requires(self) -> Requirements:
        return Requirements(data=True, reference=self.rank > 0, batches=self.rank > 0)

    def rate_of(self, kind: ParameterKind) -> float:
        return self.learning_rate

    def memory(self, size: ProblemSize) -> int:
        statistics = Rows.block_bytes(size) + max(size.forward_bytes, 6 * 4 * size.largest)
        return max(statistics, 2 * 4 * size.weights + TrainingOptions.memory(self, size)) if self.rank else statistics

    def effects(self, layer: LayerScheme) -> Effects:
        transforms = (ReassemblyScheme(),) if self.extra else ()
        prepares = Preparation("quantized", self._mismatch, "splits and merges channels")
        return replace(super().effects(layer), transforms=transforms, prepares=prepares)

    def _mismatch(self, later: Effects) -> str | None:
        rounding = later.scheme.rounding
        if rounding is None or (rounding.grid, rounding.scale) != (GRIDS[self.activations], "token"):
            return f"it needs activations: {self.activations} with a scale per token; write the same in both passes"
        return self.grid_mismatch(later)

    @property
    def rounding(self) -> InputRounding:
        """The rounding of inputs."""
        return InputRounding(RoundingScheme(GRIDS[self.activations]), (0, 0), {})

    def rounded(self, weight: Float[Tensor, "out in"], layer: Layer) -> Float[Tensor, "out in"]:
        """Return the nearest values of the grid."""
        codes = quantize(weight, self.grid, self.group_size, self.symmetric, dtype=layer.storage)
        return codes.dense(torch.float32)

    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        if self.extra:
            for group, statistics in inputs.observe(Rows).items():
                names = [name for name in group.linears if name in inputs.names]
                self._reassemble(block, inputs, names, statistics, log)
        if self.rank:
            self._correct(block, inputs, log)

    def _reassemble(
        self, block: nn.Module, inputs: BlockInputs, names: Sequence[str], statistics: Rows, log: Log
    ) -> None:
        """Split and merge the input channels of linears that read the same tensor."""
        reader_names, layers = ", ".join(names), {name: replace_linear(block, name) for name in names}
        if statistics.rows is None:
            log("fallback", f"{reader_names}: no calibration token reached them, so their channels stay")
            return
        if any(transform.linear for layer in layers.values() for transform in layer.all_transforms):
            log("note", f"{reader_names}: their inputs have a transform already, so their channels stay")
            return
        weights = {name: layer.weight.float() for name, layer in layers.items()}
        reassembly, error, error_before = self.search(
            statistics.rows, weights, statistics.absmax, {n: inputs.layer(n) for n in names}
        )
        if reassembly is None:
            log("note", f"{reader_names}: channels stay; splitting would not reduce the error", error=error_before)
            return
        split = int((reassembly.first.bincount(minlength=reassembly.shape[1]) > 1).sum())
        log("note", f"{reader_names}: channels are split", channels=split, error=error, before=error_before)
        for layer in layers.values():
            layer.put(reassembly.adapted(layer.weight))
            layer.set_transform(copy.deepcopy(reassembly))

    def search(
        self,
        rows: Float[Tensor, "rows in"],
        weights: Mapping[str, Tensor],
        absmax: Float[Tensor, " in"],
        layers: Mapping[str, Layer],
    ) -> tuple[Reassembly | None, float, float]:
        """(the best reassembly, or None; its error; the error without): ||Q(X') Q(W')^T - X W^T|| / ||X W^T||."""
        joined, rounding, width = torch.cat(list(weights.values())), self.rounding, rows.shape[1]
        outputs, errors = rows @ joined.T, merging_errors(rows, joined)

        def error(x: Tensor, change: Reassembly | None) -> float:
            mapped = {n: w if change is None else change.adapted(w) for n, w in weights.items()}
            output = rounding(x) @ torch.cat([self.rounded(w, layers[n]) for n, w in mapped.items()]).T
            return float((output - outputs).norm() / outputs.norm().clamp(min=1e-30))

        error_before = least = error(rows, None)
        best, tried = None, 0
        top, bottom = float(absmax.max()), float(absmax.min())
        for step in range(1, THRESHOLDS + 1):
            parts = sub_channels(absmax, max(top * (bottom / max(top, 1e-30)) ** (step / THRESHOLDS), 1e-30))
            count = int((parts - 1).sum())
            if count > self.extra * width:
                break
            pairs = similar_pairs(errors, parts > 1, count) if count > tried else None
            if pairs is None:
                continue
            tried, change = count, Reassembly.of(pairs, parts, (len(joined), width))
            if (trial_error := error(change(rows), change)) < least:
                best, least = change, trial_error
        return best, least, error_before

    def _correct(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        """Learn low-rank updates of the weights with everything rounded, and add them if the error falls."""
        judged, names = self.judged(inputs.batches), inputs.names
        layers = {name: inputs.layer(name) for name in names}
        student = copy.deepcopy(block)
        for name in names:
            replace_linear(student, name).round_inputs(self.rounding)
        error_before = self._error(student, inputs, layers, judged)

        def parametrize(name: str, layer: CompressedLinear) -> Parametrization:
            seed = zlib.crc32(f"{inputs.name}.{name}".encode()) ^ self.seed
            return _RoundedUpdate(self, layers[name], layer.shape, seed)

        steps, _ = self.learn(student, inputs, inputs.reference, log, parametrize)
        error_after = self._error(student, inputs, layers, judged)
        if error_after >= error_before:
            log(
                "fallback",
                "training did not reduce the error; the weights stay",
                start=error_before,
                learned=error_after,
            )
            return
        log("note", "error of the block's output", start=error_before, learned=error_after, steps=steps)
        for name in names:
            layer = replace_linear(block, name)
            layer.put(replace_linear(student, name).weight.to(layer.weight.dtype))

    def _error(self, block: nn.Module, inputs: BlockInputs, layers: Mapping[str, Layer], judged: list[int]) -> float:
        """Return the relative squared error of the block with rounded weights and inputs."""
        trial = copy.deepcopy(block)
        for name in layers:
            layer = replace_linear(trial, name)
            layer.put(self.rounded(layer.weight.float(), layers[name]).to(layer.weight.dtype))
        return block_error(trial, inputs, inputs.reference, judged)


class _RoundedUpdate(LowRankUpdate):
    """Q(W + B A) with a straight-through gradient; the final weight is W + B A."""

    def __init__(self, step: QLLM, layer: Layer, shape: tuple[int, int], seed: int) -> None:
        super().__init__(None, shape, step.rank, 1.0, seed)
        self._step, self._layer = step, layer

    def forward(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        updated = super().forward(weight)
        with torch.no_grad():
            rounded = self._step.rounded(updated, self._layer)
        return straight(updated, rounded)

    def finalize(self, weight: Float[Tensor, "out in"], storage: torch.dtype) -> tuple[Tensor, None]:
        return super().forward(weight), None
