"""Narrowing: fewer heads, feed-forward channels and hidden channels, with repair of the linears that read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from compress.blockwise.block_inputs import SweepInputs
from compress.blockwise.capture import ModelShell
from compress.blockwise.context import BlockContext, capture_inputs
from compress.checkpoint.opened import OpenModel
from compress.errors import ModelError, TargetError
from compress.layers.linear import CompressedLinear
from compress.models.forward import logits_of
from compress.models.kinds.contract import text_config
from compress.models.reshape.reconfigure import Path, build, changed, replace_in_place, shapes, sketch, tensors
from compress.models.reshape.residual import CUT_TOLERANCE, check_interchangeable, cut_hidden_channels
from compress.models.reshape.widths import Width, ffn_widths, head_width, hidden_width
from compress.models.structure.blocks import Block, linears_of_blocks
from compress.models.structure.coupled_channels import CoupledChannels, coupled_ffn_channels, coupled_heads, still_hold
from compress.models.structure.links import block_signature
from compress.models.structure.rewrite import rewrite_weight
from compress.numerics.linalg import DAMPING
from compress.numerics.metrics import relative_error
from compress.numerics.repair import repaired
from compress.passes.contract.context import Run
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram, InputNorm, Observer, without_data
from compress.passes.contract.passes import COPIES
from compress.passes.families.reshaping import ReshapingPass

BATCH, PROBE = 4, 64

Cuts = dict[str, dict[int, Int[Tensor, " kept"]]]
"""Tensor name -> dimension -> kept indices along it."""


class Narrow(ReshapingPass):
    """Remove whole attention heads, feed-forward channels or hidden channels, the least important first.

    `importance` ranks the channels:

    - activation: ||x_j|| ||W_:j|| of the columns that read a channel, as in Wanda-sp and in FLAP (An 2023, eq. 4) with
      norms instead of fluctuations.
    - weight: the L2 norm of all weights of a channel.

    It is measured block by block, on the inputs after the narrowed blocks before it. All blocks keep the same number of
    channels, because a configuration has one width. Coupled channels are found by probes in each block, and verified.
    With `repair` the remaining columns are fitted by least squares to the original output on the calibration text.
    """

    use_for: ClassVar[str] = (
        "Fewer heads, feed-forward or hidden channels: a stock model that is smaller and faster everywhere. A tenth "
        "of the feed-forward channels costs least."
    )
    not_for: ClassVar[str] = "Hidden channels, where slicegpt loses less. Follow either by distill."
    paper: ClassVar[str] = "https://arxiv.org/abs/2312.11983"

    heads: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="fraction of the heads to remove, in whole groups that share keys and values",
    )
    ffn: float | None = Field(default=None, gt=0, lt=1, description="fraction of the feed-forward channels to remove")
    hidden: float | None = Field(default=None, gt=0, lt=1, description="fraction of the hidden channels to remove")
    multiple: int = Field(
        default=1, ge=1, description="ffn and hidden keep a multiple of this number, to fit group sizes"
    )
    importance: Literal["activation", "weight"] = Field(
        default="activation",
        description="activation: input norm times weight norm; weight: norm of all removed weights",
    )
    repair: Literal["least_squares", "none"] = Field(
        default="least_squares", description="kept columns: fitted by least squares, or unchanged"
    )
    damping: float = Field(default=DAMPING, gt=0, description="ridge of the repair, relative to the mean diagonal")

    def model_post_init(self, context: Any) -> None:
        if self.heads is None and self.ffn is None and self.hidden is None:
            raise ValueError("no width to reduce; give at least one of heads, ffn and hidden")

    def without_effect(self) -> dict[str, str]:
        idle = {"damping": "with repair: none; leave it out, or use repair: least_squares"}
        return super().without_effect() | (idle if self.repair == "none" else {})

    def memory(self, size: ProblemSize) -> int:
        """Activations, and either statistics and one solution, or what is left of the original and the result.

        That is the repaired readers, a third of a feed-forward layer; with hidden channels, two whole models.
        """
        factor_bytes = size.weights // 3 if self.hidden is None else 2 * (size.weights + size.outside)
        solving = sum(map(Gram.memory_bytes, size.inputs)) + COPIES * 4 * size.largest
        return size.states_bytes + max(size.itemsize * factor_bytes, solving, BATCH * size.forward_bytes)

    def outcome(self, model: PreTrainedModel, label: str) -> PretrainedConfig:
        """Return the configuration with all new widths."""
        inner, hidden = self._inner_widths(model, label), self._hidden_widths(model, label)
        self._check_targets(model, [*inner.values(), *hidden], label)
        edits: dict[Path, Any] = {}
        for width in (*inner.values(), *hidden):
            edits |= width.edits
        config = changed(model.config, edits)
        if config is None or sketch(model, config) is None:
            raise ModelError(f"{label}: no configuration has all these widths; use one pass per width")
        return config

    def apply(self, model: nn.Module, run: Run) -> None:
        assert isinstance(model, PreTrainedModel) and run.calibration is not None
        label = run.label or self.key()
        self.outcome(model, label)
        if inner := self._inner_widths(model, label):
            _InnerNarrowing(self, model, run, inner).narrow()
        for width in self._hidden_widths(model, label):
            self._narrow_hidden(model, run, width, label)

    def _inner_widths(self, model: PreTrainedModel, label: str) -> dict[str, Width]:
        """Return the widths inside of the blocks: heads, then feed-forward layers, in the order of execution."""
        width_of: dict[str, Width] = {}
        if self.heads is not None:
            config = text_config(model.config)
            groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            removed_count = round(self.heads * groups)
            if groups == 1:
                raise TargetError(
                    f"{label}: heads: all heads of the model share 1 key-value head, and a model needs one; "
                    "leave heads out"
                )
            if not 0 < removed_count < groups:
                raise TargetError(
                    f"{label}: heads {self.heads:g} of {groups} groups removes {'all' if removed_count else 'none'}; "
                    f"use a fraction from {1 / groups:.3g} to {1 - 1 / groups:.3g}"
                )
            width_of["heads"] = head_width(model, groups, groups - removed_count)
        if self.ffn is not None:
            share = self.ffn
            widths = ffn_widths(model, lambda size: self._kept_count("ffn", share, size, label))
            width_of |= {f"ffn {i}": width for i, width in enumerate(widths)}
        return width_of

    def _hidden_widths(self, model: PreTrainedModel, label: str) -> list[Width]:
        share = self.hidden
        if share is None:
            return []
        return [hidden_width(model, lambda size: self._kept_count("hidden", share, size, label))]

    def _kept_count(self, option: str, share: float, size: int, label: str) -> int:
        """Return the number of kept channels."""
        kept_count = round(size * (1 - share) / self.multiple) * self.multiple
        if not 0 < kept_count < size:
            raise TargetError(
                f"{label}: {option} {share:g} of {size} channels, in multiples of {self.multiple}, removes "
                f"{'none' if kept_count else 'all'}; use another fraction, or a smaller multiple"
            )
        return kept_count

    @torch.no_grad()
    def _narrow_hidden(self, model: PreTrainedModel, run: Run, width: Width, label: str) -> None:
        """Remove hidden channels: prove that they are interchangeable, score them, repair readers, and cut."""
        assert run.calibration is not None
        example = run.calibration[0]
        check_interchangeable(model, width, example, label)
        score = self._hidden_scores(model, run, width, label)
        kept_count = next(iter(width.axes.values()))[1]
        kept_channels = score.argsort(descending=True, stable=True)[:kept_count].sort().values
        tensor_of = tensors(model)
        if self.repair == "least_squares":
            for context, name, statistics in _readers(model, run, width, label, Gram):
                layer = CompressedLinear.of(context.block.module.get_submodule(name))
                weight = layer.weight.float()
                new = torch.zeros_like(weight)
                new[:, kept_channels], _ = repaired(weight, statistics.hessian, kept_channels, self.damping)
                tensor_of[f"{context.full(name)}.weight"] = (new.T if layer.transposed else new).to(layer.weight.dtype)
        config = changed(model.config, width.edits)
        assert config is not None
        new = cut_hidden_channels(model, config, tensor_of, width, kept_channels, example, label)
        share = float(score[kept_channels].sum() / score.sum())
        run.journal.add(
            "note", label, "kept hidden channels", kept=kept_count, of=len(score), importance=round(share, 6)
        )
        replace_in_place(model, new)

    def _hidden_scores(self, model: PreTrainedModel, run: Run, width: Width, label: str) -> Float[Tensor, " hidden"]:
        """The importance of every hidden channel: its part of the energy of each reader's output, or of all weights."""
        if self.importance == "weight":
            tensor_of = tensors(model)
            moved = [tensor_of[name].float().movedim(dim, 0) for name, dim in width.axes]
            return torch.stack([rows.reshape(len(rows), -1).square().sum(1) for rows in moved]).sum(0)
        total = torch.zeros(next(iter(width.axes.values()))[0], device=next(model.parameters()).device)
        for context, name, statistics in _readers(model, run, width, label, InputNorm):
            weight = CompressedLinear.of(context.block.module.get_submodule(name)).weight.float()
            energy = statistics.norm.square() * weight.square().sum(0)
            total += energy / energy.sum().clamp(min=torch.finfo(torch.float32).tiny)
        return total

    def _check_targets(self, model: PreTrainedModel, widths: Iterable[Width], label: str) -> None:
        """Raise TargetError if the targets exclude a linear that must become narrower."""
        inside = set(linears_of_blocks(model))
        for width in widths:
            names = {*width.modules("in", model), *width.modules("out", model)} & inside
            self.check_all_taken(
                sorted(names), label, "widths are uniform in a configuration: all blocks become narrower, or none"
            )

    def scores(
        self, weight: Float[Tensor, "out in"], gram: Float[Tensor, "in in"], writer_squares: Float[Tensor, " in"]
    ) -> Float[Tensor, " in"]:
        """Squared scores of a reader's columns; they add up over a bundle.

        Args:
            writer_squares: squared norms of its input rows.
        """
        columns = weight.float().square().sum(0)
        return gram.diagonal() * columns if self.importance == "activation" else columns + writer_squares


def _cut(tensor_of: Mapping[str, Tensor], cuts: Cuts) -> dict[str, Tensor]:
    """Return the tensors, reduced to the kept indices."""
    cut_tensors = {}
    for name, tensor in tensor_of.items():
        for dim, kept_indices in cuts.get(name, {}).items():
            tensor = tensor.index_select(dim, kept_indices.to(tensor.device))
        cut_tensors[name] = tensor.contiguous()
    return cut_tensors


def _checked(model: PreTrainedModel, width_edits: Mapping[Path, Any], cuts: Cuts) -> PretrainedConfig:
    """Return the configuration of the cut tensors.

    Raises:
        ModelError: if its model has other shapes.
    """
    config = changed(model.config, width_edits)
    built = None if config is None else sketch(model, config)
    if config is None or built is None or shapes(built) != shapes_of(_cut(tensors(model), cuts)):
        raise ModelError(
            "model: its configuration changes other tensors than the coupled channels that were found; "
            "leave this width unchanged"
        )
    return config


def shapes_of(tensor_of: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensor_of.items()}


def _contexts(model: PreTrainedModel, run: Run, label: str, kind: str) -> Iterator[BlockContext]:
    """Yield every block with its inputs; after each, run the block in its new state to get the next inputs."""
    assert run.calibration is not None
    opened = OpenModel.in_memory(model)
    examples = run.calibration
    inputs = examples.beginning(PROBE), examples.batches(BATCH)
    state = capture_inputs(ModelShell(opened), *inputs, run.store_bytes, run.work)
    for block in opened.blocks:
        run.journal.add("progress", label, f"{kind} of {block.name}", done=block.index, of=len(opened.blocks))
        context = BlockContext(block, state, run, opened.dtype, label, run.store_bytes)
        yield context
        context.propagate()
        context.propagate_probe()


@dataclass
class _InnerNarrowing:
    """Narrow heads and feed-forward channels, block by block, on the calibration text."""

    step: Narrow
    model: PreTrainedModel
    run: Run
    widths: dict[str, Width]
    cuts: Cuts = field(default_factory=dict)
    found: dict[Any, list[CoupledChannels]] = field(default_factory=dict)

    @torch.no_grad()
    def narrow(self) -> None:
        """Zero the removed channels, then build the smaller model, which must give the same logits."""
        model, run = self.model, self.run
        assert run.calibration is not None
        label = run.label or self.step.key()
        for context in _contexts(model, run, label, "heads and channels"):
            for kind, width in self.widths.items():
                self._narrow_block(context, kind, width)
        edits = {path: value for width in self.widths.values() for path, value in width.edits.items()}
        config = _checked(model, edits, self.cuts)
        new = build(model, config, _cut(tensors(model), self.cuts))
        error = relative_error(logits_of(new, run.calibration[0]), logits_of(model, run.calibration[0]))
        if not error < CUT_TOLERANCE:
            raise ModelError(
                f"{label}: the narrowed model differs from the one with zeroed channels (relative error {error:.2g}); "
                "leave this width unchanged"
            )
        replace_in_place(model, new)

    def _narrow_block(self, context: BlockContext, kind: str, width: Width) -> None:
        block = context.block
        names = [n.removeprefix(block.name + ".") for n in width.modules("in", self.model) if _is_inside(n, block)]
        sources = [n.removeprefix(block.name + ".") for n in width.modules("out", self.model) if _is_inside(n, block)]
        if not names:
            return
        inputs = SweepInputs(context, names)
        coupled = self._coupled(block, inputs.probe, kind, names, sources)
        for group, statistics in inputs.observe(Gram).items():
            if statistics.tokens == 0:
                without_data(statistics)
                context.logger(block.name)(
                    "fallback", "no calibration token reached them: scored by weights alone", linears=group.linears
                )
            for channels in coupled:
                if channels.reader in group.linears:
                    self._cut_reader(context, channels, statistics.hessian, width)

    def _coupled(
        self, block: Block, forward: Callable[[nn.Module], Tensor], kind: str, names: list[str], sources: list[str]
    ) -> list[CoupledChannels]:
        """Return the coupled channels of a block: those of an equal block if they hold here, else searched."""
        key = (kind, block_signature(block.module))
        coupled = self.found.get(key)
        if coupled is None or not still_hold(block.module, forward, coupled):
            if kind == "heads":
                coupled = coupled_heads(block.module, forward, names, sources)
            else:
                coupled = coupled_ffn_channels(block.module, forward, names)
        self.found[key] = coupled
        served = {channels.reader for channels in coupled}
        if missing := [name for name in names if name not in served]:
            raise ModelError(
                f"{self.run.label or self.step.key()}: {block.name}.{missing[0]}: its input channels cannot be "
                f"permuted (fused or unequal channels, norms across them); leave out {kind.split()[0]}"
            )
        return coupled

    def _cut_reader(self, context: BlockContext, channels: CoupledChannels, gram: Tensor, width: Width) -> None:
        """Choose the kept bundles of a reader, repair its weight, and zero the columns of the other bundles."""
        block, step = context.block, self.step
        module = block.module.get_submodule(channels.reader)
        layer = CompressedLinear.of(module)
        weight = layer.weight.float()
        writer_squares = torch.zeros_like(weight[0])
        for source, rows in zip(channels.sources, channels.rows, strict=True):
            squares = CompressedLinear.of(block.module.get_submodule(source)).weight.float().square().sum(1)
            writer_squares += _spread(squares[rows].sum(1), channels.columns, len(writer_squares))
        score = step.scores(weight, gram, writer_squares)[channels.columns].sum(1)
        dim = 0 if layer.transposed else 1
        width_before, width_after = width.axes[f"{block.name}.{channels.reader}.weight", dim]
        stay = score.argsort(descending=True, stable=True)[: len(channels) * width_after // width_before].sort().values
        columns = channels.columns.to(stay.device)[stay].flatten()
        self._rewrite_reader(context, channels.reader, module, weight, gram, columns)
        self._record_cut(f"{block.name}.{channels.reader}", layer.transposed, 1, columns)
        for source, rows in zip(channels.sources, channels.rows, strict=True):
            transposed = CompressedLinear.of(block.module.get_submodule(source)).transposed
            self._record_cut(f"{block.name}.{source}", transposed, 0, rows.to(stay.device)[stay].flatten())

    def _rewrite_reader(
        self,
        context: BlockContext,
        name: str,
        module: nn.Module,
        weight: Tensor,
        gram: Tensor,
        columns: Int[Tensor, " kept"],
    ) -> None:
        """Zero the removed columns, and repair the kept ones if `repair` is set."""
        narrowed, original = weight[:, columns], weight
        if self.step.repair == "least_squares":
            narrowed, used = repaired(weight, gram, columns, self.step.damping)
            if used != self.step.damping:
                context.logger(context.full(name))("fallback", "more damping than configured was needed", damping=used)
        new = torch.zeros_like(weight)
        new[:, columns] = narrowed
        rewrite_weight(module, lambda old: new.to(old))
        size, left_over = (float(((w @ gram) * w).sum().clamp(min=0)) for w in (original, new - original))
        error = math.sqrt(left_over / size) if size > 0 else 0.0
        figures = {"kept": len(columns), "of": weight.shape[1], "error": round(error, 6)}
        context.logger(context.full(name))("note", "reads fewer channels", **figures)

    def _record_cut(self, name: str, transposed: bool, side: int, kept_indices: Int[Tensor, " kept"]) -> None:
        """Cut the rows (side 0) or columns (side 1) of a linear, and the bias of its rows."""
        self.cuts.setdefault(f"{name}.weight", {})[1 - side if transposed else side] = kept_indices
        if side == 0:
            self.cuts.setdefault(f"{name}.bias", {})[0] = kept_indices


def _readers(
    model: PreTrainedModel, run: Run, width: Width, label: str, observer: type[Observer]
) -> Iterator[tuple[BlockContext, str, Any]]:
    """Yield (block, linear, observer) for every linear of the blocks that reads hidden channels."""
    readers = width.modules("in", model)
    for context in _contexts(model, run, label, "hidden channels"):
        names = [n.removeprefix(context.block.name + ".") for n in readers if _is_inside(n, context.block)]
        for group, statistics in SweepInputs(context, names).observe(observer).items():
            if statistics.tokens == 0:
                without_data(statistics)
            for name in group.linears:
                if name in names:
                    yield context, name, statistics


def _is_inside(name: str, block: Block) -> bool:
    return name.startswith(block.name + ".")


def _spread(values: Tensor, columns: Int[Tensor, "bundles columns"], width: int) -> Float[Tensor, " width"]:
    """Distribute the value of each bundle evenly over its columns."""
    sums = values.new_zeros(width)
    sums[columns] = (values / columns.shape[1])[:, None].expand_as(columns)
    return sums
