"""SliceGPT: rotate hidden states to their principal components, and cut the last components (Ashkboos 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from compress.errors import ModelError, TargetError
from compress.models.forward import logits_of
from compress.models.kinds.batch import Examples
from compress.models.reshape.reconfigure import build, changed, replace_in_place, tensors
from compress.models.reshape.residual import cut_hidden_channels
from compress.models.reshape.rotation import Refusal, fold_norms, readers_of_norms, rotate, untying, with_own_head
from compress.models.reshape.widths import hidden_width
from compress.models.structure.blocks import linears_of_blocks
from compress.numerics.rotation import principal_components
from compress.passes.contract.context import Run
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram
from compress.passes.families.reshaping import ReshapingPass

PROBE = 64  # tokens for the structure search


class SliceGPT(ReshapingPass):
    """Rotate the hidden states to their principal components, and cut the least important ones off the hidden width.

    The weights of norms are folded into the linears that read them. All weights that read or write hidden states are
    rotated to the principal components, which preserves the function (theorem 1 of the paper; verified here in
    float32). Then the components with the least energy are cut.

    The paper has one rotation per block, which needs extra matrices in the residual connections; no stock configuration
    has them. Here one rotation serves the whole model. The components are computed from the outputs of all norms with
    equal weights.

    An LM head that is tied to the embedding gets its own weight, because only the head reads a norm; this adds the
    bytes of the embedding. Models with LayerNorm are refused.
    """

    use_for: ClassVar[str] = "A smaller hidden width of models with RMSNorm; the result is a stock model."
    not_for: ClassVar[str] = (
        "Models with LayerNorm, which it refuses. More than a tenth of the width without training afterwards."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2401.15024"

    sparsity: float = Field(default=0.2, gt=0, lt=1, description="fraction of the hidden channels to cut")
    multiple: int = Field(default=1, ge=1, description="keep a multiple of this number of hidden channels")

    def outcome(self, model: PreTrainedModel, label: str) -> PretrainedConfig:
        """Return the configuration with the smaller hidden width and an untied head."""
        width = hidden_width(model, lambda size: self._kept_count(size, label))
        self.check_all_taken(
            linears_of_blocks(model),
            label,
            "the hidden width is uniform in a configuration: all blocks become narrower, or none",
        )
        config = changed(model.config, {**width.edits, **untying(model)})
        if config is None:
            raise ModelError(
                f"{label}: no configuration has {self._kept_count(model.config.hidden_size, label)} channels"
            )
        return config

    def _kept_count(self, size: int, label: str) -> int:
        kept_count = round(size * (1 - self.sparsity) / self.multiple) * self.multiple
        if not 0 < kept_count < size:
            raise TargetError(
                f"{label}: sparsity {self.sparsity:g} of {size} channels, in multiples of {self.multiple}, removes "
                f"{'none' if kept_count else 'all'}; use another fraction, or a smaller multiple"
            )
        return kept_count

    def memory(self, size: ProblemSize) -> int:
        """Three copies of the model in float32: before a change, after it, and one for the comparison."""
        return 3 * 4 * (size.weights + size.outside)

    @torch.no_grad()
    def apply(self, model: nn.Module, run: Run) -> None:
        assert isinstance(model, PreTrainedModel) and run.calibration is not None
        label, examples = run.label or self.key(), run.calibration
        config, dtype = self.outcome(model, label), next(model.parameters()).dtype
        probe = examples.beginning(PROBE)
        refusal = Refusal(label, "use narrow")
        untied = with_own_head(model, refusal)
        width = hidden_width(untied, lambda size: self._kept_count(size, label))
        readers = readers_of_norms(untied, width, probe, refusal)
        folded = fold_norms(untied, readers, probe, refusal)
        rotation, energy = principal_components(covariance_of(folded, list(readers), examples, run, label))
        turned, error = rotate(folded, width, list(readers), rotation, probe, refusal)
        kept_count = next(iter(width.axes.values()))[1]
        channels = torch.arange(kept_count, device=energy.device)
        new = cut_hidden_channels(folded, config, turned, width, channels, probe, label)
        figures = {
            "kept": kept_count,
            "of": len(energy),
            "energy": round(float(energy[:kept_count].sum() / energy.sum()), 6),
        }
        run.journal.add("note", label, "kept principal components", **figures, rotation_error=error)
        replace_in_place(model, build(model, config, {name: tensor.to(dtype) for name, tensor in tensors(new).items()}))


def covariance_of(
    model: PreTrainedModel, norms: Sequence[str], examples: Examples, run: Run, label: str
) -> Float[Tensor, "hidden hidden"]:
    """Return the covariance of the outputs of all norms over all tokens; norms give all tokens equal weights."""
    statistics = Gram(model.get_submodule(norms[0]).get_parameter("weight").shape[0], next(model.parameters()).device)

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        statistics.update(output.reshape(-1, output.shape[-1]))

    with ExitStack() as stack:
        for name in norms:
            stack.callback(model.get_submodule(name).register_forward_hook(hook).remove)
        for i, example in enumerate(examples):
            run.journal.add("progress", label, "covariance of hidden states", done=i, of=len(examples))
            logits_of(model, example)
    return statistics.hessian
