"""SliceGPT: rotate hidden states to their principal components, and cut the last components (Ashkboos 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from compress.api.context import Run
from compress.api.memory import ProblemSize
from compress.api.observers import Gram
from compress.errors import ModelError, TargetError
from compress.families.reshaping import ReshapingPass
from compress.model.forward import logits_of
from compress.model.linear import CompressedLinear, linears
from compress.model.open.experts import in_experts
from compress.model.reshape.reconfigure import Path, build, changed, replace_in_place, tensors
from compress.model.reshape.residual import FORMS, TRADED, along, cut_hidden_channels
from compress.model.reshape.widths import Width, hidden_width
from compress.model.structure.blocks import find_blocks
from compress.model.structure.links import find_groups
from compress.model.structure.probes import norms_of
from compress.numerics.metrics import relative_error
from compress.numerics.rotation import principal_components

PROBE = 64  # tokens for the structure search


class SliceGPT(ReshapingPass):
    """Rotate the hidden states to their principal components, and cut the least important ones off the hidden width.

    Weights of norms are folded into the linears that read them. All weights that read or write hidden states are
    rotated, which preserves the function (theorem 1 of the paper; proved here in float32). Then the components with the
    least energy are cut. Unlike the paper, one rotation is used for the whole model: one rotation per block needs extra
    matrices in the residual connections, which no stock configuration has. The components are computed from the outputs
    of all norms with equal weights. A head that is tied to the embeddings gets its own weight, because only the head
    reads a norm; this adds the bytes of the embeddings. Models with LayerNorm are refused.
    """

    use_for: ClassVar[str] = "A smaller hidden width of models with RMSNorm; the result is a stock model."
    not_for: ClassVar[str] = (
        "Models with LayerNorm, which it refuses, and more than a tenth without training afterwards."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2401.15024"

    sparsity: float = Field(default=0.2, gt=0, lt=1, description="fraction of the hidden channels to cut")
    multiple: int = Field(default=1, ge=1, description="keep a multiple of this number of hidden channels")

    def outcome(self, model: PreTrainedModel, where: str) -> PretrainedConfig:
        """The configuration with the smaller hidden width and an untied head."""
        width = hidden_width(model, lambda size: self._kept_count(size, where))
        for block in find_blocks(model):
            for name in linears(block.module):
                if not self.takes(f"{block.name}.{name}"):
                    raise TargetError(
                        f"{where}: {block.name}.{name} is left out by targets or ignore, but the hidden width is "
                        "uniform in a configuration: all blocks become narrower, or none"
                    )
        config = changed(model.config, {**width.edits, **untying(model)})
        if config is None:
            raise ModelError(
                f"{where}: no configuration has {self._kept_count(model.config.hidden_size, where)} channels"
            )
        return config

    def _kept_count(self, size: int, where: str) -> int:
        left = round(size * (1 - self.sparsity) / self.multiple) * self.multiple
        if not 0 < left < size:
            raise TargetError(
                f"{where}: sparsity {self.sparsity:g} of {size} channels, in multiples of {self.multiple}, removes "
                f"{'none' if left else 'all'}; use another fraction, or a smaller multiple"
            )
        return left

    def memory(self, size: ProblemSize) -> int:
        """Three copies of the model in float32: before a change, after it, and one for the comparison."""
        return 3 * 4 * (size.weights + size.outside)

    @torch.no_grad()
    def apply(self, model: nn.Module, run: Run) -> None:
        assert isinstance(model, PreTrainedModel) and run.calibration is not None
        where, ids = run.label or self.key(), run.calibration
        config, dtype = self.outcome(model, where), next(model.parameters()).dtype
        own = with_own_head(model)
        width = hidden_width(own, lambda size: self._kept_count(size, where))
        readers = readers_of_norms(own, width, ids[:1, :PROBE], where)
        folded = fold_norms(own, readers, ids[:1, :PROBE], where)
        rotation, energy = principal_components(covariance_of(folded, list(readers), ids, run, where))
        turned, error = rotate(folded, width, list(readers), rotation, ids[:1, :PROBE], where)
        left = next(iter(width.axes.values()))[1]
        kept = torch.arange(left, device=energy.device)
        new = cut_hidden_channels(folded, config, turned, width, kept, ids[:1, :PROBE], where)
        figures = {"kept": left, "of": len(energy), "energy": round(float(energy[:left].sum() / energy.sum()), 6)}
        run.journal.add("note", where, "kept principal components", **figures, rotation_error=error)
        replace_in_place(model, build(model, config, {name: tensor.to(dtype) for name, tensor in tensors(new).items()}))


def untying(model: PreTrainedModel) -> dict[Path, Any]:
    """The configuration edits that untie the head from the embeddings."""
    return {("tie_word_embeddings",): False} if getattr(model, "all_tied_weights_keys", None) else {}


def with_own_head(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float32, its head no longer tied. Raises ModelError."""
    config = changed(model.config, untying(model))
    plain = {name: tensor.float() for name, tensor in tensors(model).items()}
    own = None if config is None else build(model, config, plain)
    if own is None or getattr(own, "all_tied_weights_keys", None):
        raise ModelError("model: its head cannot be untied from the embeddings; use narrow")
    return own


def readers_of_norms(model: PreTrainedModel, width: Width, ids: Tensor, where: str) -> dict[str, list[str]]:
    """The linears that read each norm of hidden states.

    Raises ModelError, with the property that the model lacks, if one reads another tensor or norms do more than divide.
    """
    wanted = set(width.modules("in", model))
    if square := sorted(wanted & set(width.modules("out", model)) & set(_linears_of_blocks(model))):
        raise ModelError(
            f"{where}: both sides of {square[0]} have the hidden width, because the configuration has no size of a "
            "head of its own, so a rotation of the hidden states would mix heads; use narrow"
        )
    found: dict[str, list[str]] = {}
    for group in find_groups(model, lambda whole: logits_of(whole, ids)):
        names = [name for name in group.linears if name in wanted]
        if names and group.norm is not None and (f"{group.norm}.weight", 0) in width.axes:
            found.setdefault(group.norm, []).extend(names)
    read = {name for names in found.values() for name in names}
    if missing := sorted(wanted - read):
        experts = tuple(f"{name}." for name in in_experts(model))
        if experts and missing[0].startswith(experts):
            raise ModelError(
                f"{where}: {missing[0]} belongs to an expert: its norm is also read by a router, whose weight is no "
                "linear that the norm could be folded into; use narrow"
            )
        raise ModelError(
            f"{where}: {missing[0]} reads hidden states that are not the output of a norm and cannot be rotated; "
            "use narrow"
        )
    if biased := [norm for norm in found if model.get_submodule(norm)._parameters.get("bias") is not None]:
        raise ModelError(
            f"{where}: {biased[0]} adds a bias (LayerNorm), which a rotation does not preserve; use narrow"
        )
    written = [name for name in norms_of(model) if (f"{name}.weight", 0) in width.axes and name not in found]
    if written:
        raise ModelError(
            f"{where}: {written[0]} scales the channels of what is added to the hidden states (a norm after attention "
            "or feed-forward layer, which no linear reads), and a rotation does not preserve that; use narrow"
        )
    return found


def _linears_of_blocks(model: PreTrainedModel) -> list[str]:
    return [f"{block.name}.{name}" for block in find_blocks(model) for name in linears(block.module)]


def fold_norms(model: PreTrainedModel, readers: Mapping[str, list[str]], ids: Tensor, where: str) -> PreTrainedModel:
    """Fold the weights of norms into their readers, so that norms only divide; the function stays the same.

    Raises ModelError if the function changes.
    """
    before, errors = logits_of(model, ids), []
    for form in FORMS:
        held = tensors(model)
        for norm, names in readers.items():
            weight = held[f"{norm}.weight"]
            scale = weight if form == "weight" else 1 + weight
            held[f"{norm}.weight"] = torch.ones_like(weight) if form == "weight" else torch.zeros_like(weight)
            for name in names:
                transposed = CompressedLinear.of(model.get_submodule(name)).transposed
                held[f"{name}.weight"] = held[f"{name}.weight"] * (scale[:, None] if transposed else scale)
        found = build(model, model.config, held)
        errors.append(relative_error(logits_of(found, ids), before))
        if errors[-1] < TRADED:
            return found
    raise ModelError(
        f"{where}: folding the weights of norms into the linears that read them changes the logits (relative error "
        f"{min(errors):.2g}): other modules read these norms too; use narrow"
    )


def covariance_of(
    model: PreTrainedModel, norms: Sequence[str], ids: Tensor, run: Run, where: str
) -> Float[Tensor, "hidden hidden"]:
    """The covariance of the outputs of all norms over all tokens; norms give all tokens equal weights."""
    seen = Gram(model.get_submodule(norms[0]).get_parameter("weight").shape[0], next(model.parameters()).device)

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.update(output.reshape(-1, output.shape[-1]))

    with ExitStack() as stack:
        for name in norms:
            stack.callback(model.get_submodule(name).register_forward_hook(hook).remove)
        for i, row in enumerate(ids):
            run.journal.add("progress", where, "covariance of hidden states", done=i, of=len(ids))
            logits_of(model, row[None])
    return seen.hessian


def rotate(
    model: PreTrainedModel, width: Width, norms: Sequence[str], rotation: Tensor, ids: Tensor, where: str
) -> tuple[dict[str, Tensor], float]:
    """Return (the rotated weights, relative error of the logits). Raises ModelError if the logits change."""
    held = tensors(model)
    turned = along(held, width, lambda t, dim: (t.movedim(dim, -1) @ rotation).movedim(-1, dim))
    turned |= {f"{norm}.weight": held[f"{norm}.weight"] for norm in norms}
    error = relative_error(logits_of(build(model, model.config, turned), ids), logits_of(model, ids))
    if not error < TRADED:
        raise ModelError(
            f"{where}: a rotation of the hidden states changes the logits (relative error {error:.2g}): a module that "
            "reads or writes them is not linear, or a norm is not an RMS norm; use narrow"
        )
    return turned, error
