"""AWQ: scale input channels and clip weights, to reduce rounding errors at large activations (Lin 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from compress.layers.linear import CompressedLinear, replace_linear
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.scale import ScaleScheme
from compress.models.structure.links import Group, fold
from compress.numerics.quant.codes import CHUNK, GroupSize, fit_shared, grouped, quantize, spread
from compress.passes.contract.facts import Effects, Fact, Log, Preparation, Requirements
from compress.passes.contract.layers import BlockInputs
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram
from compress.passes.contract.passes import COPIES, BlockPass
from compress.passes.contract.processes import ALONE, Processes
from compress.passes.families.weight_grid import WeightGrid

STEPS = 20  # reference code (auto_scale.py, auto_clip.py): n_grid, of alpha and of the clipped fraction
MOST_CLIPPED = 0.5  # reference code (auto_clip.py): max_shrink, the largest clipped fraction of a range
SMALLEST = 1e-4  # reference code (auto_scale.py): scales are kept above this before they are normalized
SKETCH = 128  # number of evenly spaced rows of each weight on which all scales are tried
FINALISTS = 2  # number of best scales that are then compared, with no scaling, on all rows

Equalize = Callable[[Tensor], Tensor]
"""Make a scale equal on columns that belong to one channel."""


class AWQ(WeightGrid, BlockPass):
    """Scale the columns of weights so that a later rtn or gptq loses less.

    The later pass needs the same `weights`, `group_size` and `symmetric`.

    Scales: s_j = mean|X_j|^alpha multiplies the columns of the weights, and the module that writes their input is
    divided by it. This fold is verified in float32, and undone if it changes the block's output. alpha is chosen from
    20 values, including no scaling. The choice has the least error of the outputs of the linears that read the input,
    ||Q(W s) (X / s) - W X||^2 = tr(D H D^T), where D = Q(W s) / s - W and H = X^T X (equation 4). The reference code
    compares the outputs of the attention or MLP around these linears instead. With `duo`, the scales s_j =
    mean|X_j|^alpha / mean|W_j|^(1 - alpha) are tried as well.

    Clipping: the range of each group of weights is multiplied by a factor, 1, 0.95, ... 0.5, and the weights are
    clamped to it. The factor has the least error of the group's part of the output. A row whose total error does not
    decrease stays as it is (guaranteed unless scales depend on the whole matrix, as in nvfp4). The reference code finds
    queries and keys by their names, and does not clip them; here all linears are clipped.
    """

    use_for: ClassVar[str] = (
        "4 bits and fewer with zero points, before rtn (fast) or gptq (less loss). Checkpoints of the format awq."
    )
    not_for: ClassVar[str] = "8 bits, where nothing is left to gain. A grid other than that of the later pass."
    paper: ClassVar[str] = "https://arxiv.org/abs/2306.00978"
    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized", "cache_quantized"})

    duo: bool = Field(default=True, description="also try scales that are divided by the mean magnitude of the weights")
    clip: bool = Field(default=True, description="clip each group of weights if this reduces the error")
    unlinked: Literal["leave", "scale"] = Field(
        default="leave",
        description="linears whose scale no earlier module can absorb: 'leave': skip them; 'scale': divide their "
        "inputs at run time",
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.group_size == "tensor":
            raise ValueError("group_size: tensor has one range for all rows, which cannot be searched; use channel")

    def memory(self, size: ProblemSize) -> int:
        """Statistics of the inputs at hand, and copies of a chunk of rows and of a matrix for the scale search."""
        widest = max(size.inputs, default=0)
        rows = COPIES * 4 * min(size.largest, CHUNK)
        means = 2 * 4 * sum(size.inputs)  # and the divisors
        solving = max(size.forward_bytes, 2 * 4 * widest**2 + rows, size.beginning_bytes)
        return means + sum(map(Moments.memory_bytes, size.observed)) + solving

    @property
    def requires(self) -> Requirements:
        return Requirements(data=True, replays=True)

    def effects(self, layer: LayerScheme) -> Effects:
        transforms = (ScaleScheme(),) if self.unlinked == "scale" else ()
        prepares = Preparation("quantized", self.grid_mismatch, "rescales weights")
        return replace(super().effects(layer), transforms=transforms, prepares=prepares)

    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        moments = inputs.replayed(Moments)
        seen = {group: InputStatistics(partial(moments.__getitem__, group)) for group in inputs.groups}
        chosen = set(inputs.names)
        linked = {name for link in inputs.links for name in link.readers}
        for link in inputs.links:
            read = _members(seen, chosen & set(link.readers))
            scale = self.scale_of(block, read, link.readers, link.equalize, log, inputs.processes)
            if scale is None:
                continue
            rewrite = fold(block, link, scale, inputs.probe)
            if rewrite.is_kept:
                for statistics in (
                    statistics for group, statistics in seen.items() if set(group.linears) & set(link.readers)
                ):
                    statistics.divide(scale)
            else:
                reader_names = ", ".join(link.readers)
                message = (
                    f"{reader_names}: folding the scale into {link.source} changed the block's output, so it was undone"
                )
                log("fallback", message, relative_error=rewrite.error)
        for group in inputs.groups:
            if not linked & set(group.linears):
                names = [name for name in group.linears if name in chosen]
                self._unlinked(block, names, seen[group], log, inputs.processes)
        if self.clip:
            for group in inputs.groups:
                self._clip(
                    block, [name for name in group.linears if name in chosen], seen[group], log, inputs.processes
                )

    def _unlinked(
        self, block: nn.Module, names: Sequence[str], statistics: InputStatistics, log: Log, processes: Processes
    ) -> None:
        """Handle linears of one input tensor that no link leads to."""
        if self.unlinked == "leave":
            reader_names = ", ".join(names)
            log("note", f"{reader_names}: no module before them can absorb a scale, so they are not scaled")
            return
        scale = self.scale_of(block, {statistics: names}, names, lambda scale: scale, log, processes)
        if scale is not None:
            for name in names:
                replace_linear(block, name).rescale_input(scale)
            statistics.divide(scale)

    def scale_of(
        self,
        block: nn.Module,
        read: Mapping[InputStatistics, Sequence[str]],
        readers: Sequence[str],
        equalize: Equalize,
        log: Log,
        processes: Processes = ALONE,
    ) -> Float[Tensor, " in"] | None:
        """Return the scale with the least error; None if this is no scaling, or if no token reached the readers."""
        reader_names = ", ".join(readers)
        tokens = sum(statistics.tokens for statistics in read)
        if tokens == 0:
            log("fallback", f"{reader_names}: no calibration token reached them, so they are not scaled")
            return None
        weights = {statistics: [_weight(block, name) for name in names] for statistics, names in read.items()}
        inputs = torch.stack([statistics.mean * (statistics.tokens / tokens) for statistics in read]).sum(0)
        all_weights = [weight for group_weights in weights.values() for weight in group_weights]
        trials = self.trials(equalize(inputs), equalize(weight_mean(all_weights, self.group_size)), equalize)
        best, error, unscaled = self.best(list(trials.values()), weights, processes)
        formula, alpha = list(trials)[best]
        less = 1 - (error / unscaled) ** 0.5 if unscaled else 0.0
        log("note", f"{reader_names}: the best of {len(trials)} scales", formula=formula, alpha=alpha, less_error=less)
        return list(trials.values())[best] if best else None

    def trials(
        self, inputs: Float[Tensor, " in"], weights: Float[Tensor, " in"], equalize: Equalize
    ) -> dict[tuple[str, float], Float[Tensor, " in"]]:
        """Return the scales to try, by formula and alpha; the first is no scaling."""
        scales = {("none", 0.0): torch.ones_like(inputs)}
        live = inputs[inputs > 0]
        inputs = inputs.clamp(min=float(live.min()) if len(live) else 1.0)  # channels that were always zero
        for step in range(1, STEPS):
            scales["inputs", step / STEPS] = equalize(normalized(inputs.pow(step / STEPS)))
        if self.duo:
            for step in range(STEPS):
                alpha = step / STEPS
                scales["duo", alpha] = equalize(normalized(inputs.pow(alpha) / (weights.pow(1 - alpha) + SMALLEST)))
        return scales

    def best(
        self,
        scales: Sequence[Tensor],
        weights: Mapping[InputStatistics, Sequence[Tensor]],
        processes: Processes = ALONE,
    ) -> tuple[int, float, float]:
        """(index of the best scale, its error, that of the first).

        All scales are tried on a few rows of the weights; then the best ones and the first one are tried on all rows.
        """
        drafts = {
            statistics: [part[:: -(-len(part) // SKETCH)] for part in parts] for statistics, parts in weights.items()
        }
        rough = self._errors(scales, drafts, processes)
        chosen = [0, *sorted(range(1, len(scales)), key=rough.__getitem__)[:FINALISTS]]
        exact = dict(zip(chosen, self._errors([scales[i] for i in chosen], weights, processes), strict=True))
        best = min(chosen, key=exact.__getitem__)
        return best, exact[best], exact[0]

    def _errors(
        self, scales: Sequence[Tensor], weights: Mapping[InputStatistics, Sequence[Tensor]], processes: Processes
    ) -> list[float]:
        """2 ||Q(W s) (X / s) - W X||^2 over all weights and tokens, for each scale.

        Processes divide the scales, and of few scales the rows, too.
        """
        errors, trials = [0.0] * len(scales), 0
        parts = processes.size if len(scales) < STEPS else 1
        for statistics, members in weights.items():
            hessian = statistics.hessian.mul_(statistics.tokens)
            for rows in (rows for weight in members for rows in chunks(weight, parts)):
                for i in processes.share(range(len(scales)), trials):
                    difference = self.rounded(rows * scales[i]).div_(scales[i]).sub_(rows)
                    errors[i] += float(row_errors(difference, hessian).sum())
                trials += len(scales)
        return list(processes.totals(*errors))

    def rounded(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """Return the dequantized weight after the quantizing pass, if it rounds to nearest."""
        return quantize(weight, self.grid, self.group_size, self.symmetric).dense()

    def _clip(
        self, block: nn.Module, names: Sequence[str], statistics: InputStatistics, log: Log, processes: Processes
    ) -> None:
        """Clip the weights of linears that read the same input; processes divide their rows."""
        if statistics.tokens == 0:
            log("fallback", f"{', '.join(names)}: no calibration token reached them, so they are not clipped")
            return
        hessian = statistics.hessian
        blocks = diagonal_blocks(hessian, self.group_size)
        for members in [list(names)] if processes.size > 1 else [[name] for name in names]:  # exchanged at once
            layers = {name: replace_linear(block, name) for name in members}
            weight_of = {name: layer.weight for name, layer in layers.items()}
            parts = [
                (name, rows)
                for name in weight_of
                for rows in weight_of[name].split(rows_of(weight_of[name], processes.size))
            ]
            clipped_weights = processes.spread(
                parts,
                lambda part: self.clipped(part[1].float(), hessian, blocks).to(part[1]),
                [float(rows.numel()) for _, rows in parts],
            )
            for name, layer in layers.items():
                layer.put(torch.cat([rows for (of, _), rows in zip(parts, clipped_weights, strict=True) if of == name]))

    def clipped(
        self,
        weight: Float[Tensor, "out in"],
        hessian: Float[Tensor, "in in"],
        blocks: Float[Tensor, "groups size size"],
    ) -> Float[Tensor, "out in"]:
        """Clamp the weight, group by group, to the range with the least error; rows without a gain do not change.

        Args:
            blocks: the diagonal blocks of the Hessian.
        """
        parts = grouped(weight, self.group_size)
        low, high = torch.aminmax(parts, dim=-1)
        shared = fit_shared(weight, self.grid, self.group_size)
        best, best_factor = torch.full_like(low, torch.inf), torch.ones_like(low)
        for step in range(int(STEPS * MOST_CLIPPED) + 1):
            factor = 1 - step / STEPS
            scale, zero = self.grid.fit(low * factor, high * factor, self.symmetric, torch.float32, shared)
            scale, zero = scale[..., None], None if zero is None else zero[..., None]
            difference = self.grid.decode(self.grid.encode(parts, scale, zero), scale, zero).sub_(parts).transpose(0, 1)
            error = torch.bmm(difference, blocks).mul_(difference).sum(-1).T
            better = error < best
            best, best_factor = torch.where(better, error, best), torch.where(better, factor, best_factor)
        width = weight.shape[1]
        low, high = (spread(end * best_factor, width, self.group_size) for end in (low.clamp(max=0), high.clamp(min=0)))
        if self.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        clipped = weight.clamp(low, high)
        error_before, error_after = (row_errors(self.rounded(w).sub_(weight), hessian) for w in (weight, clipped))
        return torch.where((error_after < error_before)[:, None], clipped, weight)


class Moments(Gram):
    """The Gram matrix, and mean: the mean magnitude of every input channel, [in]."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__(width, device)
        self._magnitudes = torch.zeros(width, dtype=torch.float64, device=device)

    def gather(self, rows: Float[Tensor, "tokens in"]) -> None:
        super().gather(rows)
        self._magnitudes += rows.abs().sum(0, dtype=torch.float64)

    def combine(self, processes: Processes) -> None:
        super().combine(processes)
        self._magnitudes = processes.sum(self._magnitudes)

    @classmethod
    def memory_bytes(cls, width: int) -> int:
        return super().memory_bytes(width) + 8 * width

    @classmethod
    def cached_bytes(cls, width: int) -> int:
        return 0  # nothing is factored

    @property
    def mean(self) -> Float[Tensor, " in"]:
        """Mean magnitude per channel."""
        return (self._magnitudes / max(self.tokens, 1)).float()


class InputStatistics:
    """The input statistics of a group of linears, divided by the scales that were applied since the observation.

    Args:
        read: returns the statistics as they were observed, each time that the Hessian is read.
    """

    def __init__(self, read: Callable[[], Moments]) -> None:
        statistics = read()
        self._read, self._mean, self.tokens = read, statistics.mean, statistics.tokens
        self._divisor = torch.ones(statistics.width, device=statistics.device)

    def divide(self, scale: Float[Tensor, " in"]) -> None:
        """Divide the inputs by `scale`."""
        self._divisor = self._divisor * scale

    @property
    def mean(self) -> Float[Tensor, " in"]:
        """Mean magnitude per channel."""
        return self._mean / self._divisor

    @property
    def hessian(self) -> Float[Tensor, "in in"]:
        """2/n X^T X, a new tensor."""
        return self._read().hessian.div_(self._divisor).div_(self._divisor[:, None])


def _members(seen: Mapping[Group, InputStatistics], names: set[str]) -> dict[InputStatistics, list[str]]:
    """Return the linears among `names`, by the statistics of their input."""
    names_of = {statistics: [name for name in group.linears if name in names] for group, statistics in seen.items()}
    return {statistics: members for statistics, members in names_of.items() if members}


def _weight(block: nn.Module, name: str) -> Float[Tensor, "out in"]:
    return CompressedLinear.of(block.get_submodule(name)).weight


def rows_of(weight: Float[Tensor, "out in"], parts: int = 1) -> int:
    """Return the number of rows to work on at a time.

    Args:
        parts: the least number of such parts.
    """
    return max(1, min(CHUNK // weight.shape[1], -(-len(weight) // parts)))


def chunks(weight: Float[Tensor, "out in"], parts: int = 1) -> Iterator[Float[Tensor, "rows in"]]:
    """Return the weight a few rows at a time, in float32.

    Args:
        parts: the least number of such parts.
    """
    for rows in weight.split(rows_of(weight, parts)):
        yield rows.float()


def row_errors(difference: Float[Tensor, "out in"], hessian: Float[Tensor, "in in"]) -> Float[Tensor, " out"]:
    """d H d^T for each row d."""
    return (difference @ hessian).mul_(difference).sum(1)


def diagonal_blocks(hessian: Float[Tensor, "in in"], group_size: GroupSize) -> Float[Tensor, "groups size size"]:
    """Return the diagonal blocks of the Hessian, one per group of columns; the last one is padded with zeros."""
    rows = grouped(hessian, group_size)
    groups, size = rows.shape[1:]
    rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, groups * size - hessian.shape[0]))
    index = torch.arange(groups, device=hessian.device)
    return rows.view(groups, size, groups, size)[index, :, index].contiguous()


def normalized(scale: Float[Tensor, " in"]) -> Float[Tensor, " in"]:
    """s / sqrt(max s * min s), s kept above SMALLEST (reference code, auto_scale.py)."""
    scale = scale.clamp(min=SMALLEST)
    return scale / (scale.max() * scale.min()).sqrt()


def weight_mean(weights: Sequence[Float[Tensor, "out in"]], group_size: GroupSize) -> Float[Tensor, " in"]:
    """Return the mean magnitude of each column, relative to the largest magnitude of each weight's group."""
    total, rows = torch.zeros(weights[0].shape[1], device=weights[0].device), 0
    for part in (part for weight in weights for part in chunks(weight)):
        parts = grouped(part, group_size).abs()
        shares = parts / (parts.amax(-1, keepdim=True) + 1e-6)
        total += shares.view(len(part), -1)[:, : part.shape[1]].sum(0)
        rows += len(part)
    return total / rows
