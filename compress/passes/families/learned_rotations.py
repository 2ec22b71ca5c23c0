"""Rotations that are learned on the loss of the model with rounded inputs (SpinQuant, Liu 2024)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.layers.linear import CompressedLinear
from compress.layers.transforms.hadamard import Hadamard
from compress.layers.transforms.rounding import InputRounding, RoundingScheme
from compress.models.reshape.reconfigure import build, tensors
from compress.models.structure.permutations import Permutation
from compress.numerics.quant.codes import GroupSize
from compress.numerics.quant.grids import GRIDS, Grid
from compress.numerics.quant.rounding import GridOptions
from compress.numerics.rotation import nearest_orthogonal
from compress.passes.contract.context import Run
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.options import Options
from compress.passes.families.quantizing import InputGrid
from compress.passes.families.weight_grid import GridName, GroupSizeOption, check_grid
from compress.train.cayley import CayleySGD
from compress.train.fake_quantized import FakeQuantized
from compress.train.loop import TrainingContext, train
from compress.train.objective import LanguageLoss
from compress.train.options import LoopOptions, Share
from compress.train.parametrization import ParameterKind, Parametrization
from compress.train.rotations import ChannelRotation, FullRotation, HeadRotation, OnlineHadamard, RotatedLinear, rotated
from compress.train.teacher import OnlineTeacher

GROUP = 64
"""Columns that share a scale of rounded weights, if neither the grid nor the recipe says so."""
HIDDEN = "hidden"
"""The name of the rotation of hidden states."""


class RotationLearning(LoopOptions, Options):
    """How rotations are learned: the rounding that they are learned for, the loss, and the steps of Cayley SGD.

    The defaults are those of the paper: inputs of linears in 4 bits, weights as they are because GPTQ follows (section
    4.3), cross-entropy, 100 steps, and a rate that decays linearly from 1.5.
    """

    activations: InputGrid = Field(default="int4", description="grid of the inputs of linears, with a scale per token")
    activation_clip: float = Field(
        default=1.0, gt=0, le=1, description="share of the largest magnitude that a scale of the inputs covers"
    )
    weights: GridName | None = Field(
        default=None, description="grid that weights are rounded to, to nearest; null: they are not rounded"
    )
    group_size: GroupSizeOption | None = Field(
        default=None, description=f"columns of rounded weights that share a scale; null: {GROUP}, or those of the grid"
    )
    ce_weight: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="weight of the cross-entropy on the text; the divergence from the model without rounding has the "
        "weight 1 - ce_weight",
    )
    steps: int = Field(  # pyright: ignore[reportIncompatibleVariableOverride]  safe: frozen, and never without steps
        default=100, ge=1, description="number of steps of Cayley SGD"
    )
    learning_rate: float = Field(default=1.5, gt=0, description="highest rate; a step is also limited to 1 / |W|")
    momentum: Share = Field(default=0.0, description="decay rate of the momentum of Cayley SGD")
    warmup: int = Field(default=0, ge=0, description="number of warmup steps, in which the rate rises")
    seed: int = Field(default=0, ge=0, description="seed of the sequence order and of the held-out sequences")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="linear", description="schedule of the rate after warmup"
    )
    hold_out: Share = Field(
        default=0.1,
        description="fraction of the sequences held out; the rotations with the lowest loss on them are kept",
    )
    evaluate_every: int = Field(default=10, ge=1, description="steps between evaluations on the held-out sequences")

    @classmethod
    def key(cls) -> str:
        return "learn"

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.input_grid is None and self.weights is None:
            raise ValueError(
                "activations and weights are both not rounded, so the loss does not depend on rotations; write "
                "activations: int4"
            )
        if self.weights is not None:
            check_grid(self.weights, self.group, not GRIDS[self.weights].offset)

    def without_effect(self) -> dict[str, str]:
        idle = super().without_effect()
        if self.weights is None:
            idle["group_size"] = "without weights, which are not rounded; set weights, or leave group_size out"
        if not self.hold_out:
            idle["evaluate_every"] = "with hold_out: 0; set hold_out, or leave evaluate_every out"
        if self.input_grid is None:
            idle["activation_clip"] = "with activations: none; set activations, or leave activation_clip out"
        return idle

    @property
    def input_grid(self) -> Grid | None:
        """The grid of the inputs."""
        return None if self.activations == "none" else GRIDS[self.activations]

    @property
    def group(self) -> GroupSize:
        """The columns of rounded weights that share a scale."""
        grid_group = None if self.weights is None else GRIDS[self.weights].group_size
        return self.group_size or grid_group or GROUP

    @property
    def text(self) -> str:
        """The rounding and the steps in words."""
        inputs = [] if self.input_grid is None else [f"inputs in {self.activations}"]
        weights = [] if self.weights is None else [f"weights in {self.weights}"]
        return f"learned in {self.steps} steps with {' and '.join([*inputs, *weights])}"

    def rate_of(self, kind: ParameterKind) -> float:
        return self.learning_rate

    def decay_of(self, kind: ParameterKind) -> float:
        return 0.0

    def optimizer_of(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return CayleySGD(groups, self.momentum)

    def step_count(self, sequences: int, sequences_per_step: int) -> int:
        return self.steps

    def memory(self, size: ProblemSize) -> int:
        """Memory of learning in addition to the model in float32.

        Activations of the backward pass, as of training: the inputs and outputs of the linears. The logits with their
        gradient; those of the teacher too. The rotation of hidden states: parameter, gradient, best value and
        momentum, and four matrices of a step in float64 (those of values are small). Rounded weights: on one side and
        on both sides rotated, rounded, and three of them while one is rounded and differentiated.
        """
        tokens = self.batch * size.length
        logits = (2 if self.ce_weight == 1 else 4) * size.vocabulary
        weights = 0 if self.weights is None else 6 * 4 * size.weights
        return 4 * tokens * (size.passed + logits) + (4 * 4 + 4 * 8) * size.hidden**2 + weights

    def rounding(self, shape: tuple[int, int]) -> InputRounding | None:
        """Return the rounding of the inputs of a linear [out, in]."""
        grid = self.input_grid
        if grid is None:
            return None
        scale = "token" if grid.group_size is None else "group"
        return InputRounding(RoundingScheme(grid, scale, group=grid.group_size, clip=self.activation_clip), shape, {})

    def weight_rounding(self) -> Parametrization | None:
        """Return the rounding of a weight."""
        if self.weights is None:
            return None
        grid = GRIDS[self.weights]
        search = "absmean" if grid.averaged else "absmax"
        return FakeQuantized(GridOptions(grid, self.group, not grid.offset, search, torch.float32), None)


@dataclass(frozen=True, eq=False)
class ValueLink:
    """The values of an attention layer that may be rotated.

    Attributes:
        block: its full name.
        link: names inside of the block.
    """

    block: str
    link: Permutation
    size: int

    def writer(self) -> tuple[str, Int[Tensor, "heads size"]]:
        """Return the linear that writes the values, and its rows of each head."""
        rows = [self.link.channels[0][slots] for slots, _ in self.runs]
        return f"{self.block}.{self.link.sources[0]}", torch.stack(rows)

    def reader(self) -> tuple[str, Int[Tensor, "heads size"]]:
        """Return the linear that reads the values, and its columns of each head."""
        columns = [run for _, read in self.runs for run in read]
        return f"{self.block}.{self.link.readers[0]}", torch.stack(columns)

    @property
    def runs(self) -> list[tuple[Tensor, list[Tensor]]]:
        """As `Permutation.runs`."""
        runs = self.link.runs(1)
        assert runs is not None, "the link has heads of one size"
        return runs


@dataclass(frozen=True)
class Learnable:
    """The rotations of a model that can be learned, and the linears whose inputs are rounded.

    Attributes:
        names: full names of the linears.
        size, readers, writers: channels of the hidden states, if these are rotated, and the linears on both sides of
            them.
        values: the values that are rotated.
        online: the transform of the inputs of a linear when it runs, or None.
    """

    names: Sequence[str]
    size: int | None
    readers: frozenset[str]
    writers: frozenset[str]
    values: Sequence[ValueLink]
    online: Callable[[str], Hadamard | None]


@dataclass(frozen=True)
class Learned:
    """Learned rotations, in float64.

    Attributes:
        hidden: of hidden states, or None.
        values: in the order of the links.
    """

    hidden: Float[Tensor, "n n"] | None
    values: Sequence[Float[Tensor, "size size"]]


def learn_rotations(model: PreTrainedModel, learnable: Learnable, options: RotationLearning, run: Run) -> Learned:
    """Learn rotations that are applied in addition to those in the weights; they start at the identity.

    A step of Cayley SGD on R_0 C is R_0 times the step on C, so the result is that of a start at R_0. The model stays
    as it is.
    """
    assert run.calibration is not None
    device = next(model.parameters()).device
    sizes = {} if learnable.size is None else {HIDDEN: learnable.size}
    sizes |= {_name(i): link.size for i, link in enumerate(learnable.values)}
    rotations = {name: nn.Parameter(torch.eye(size, device=device)) for name, size in sizes.items()}
    layers = layers_of(model, learnable, options, rotations)
    teacher = None
    if options.ce_weight < 1:
        unrounded = build(model, model.config, tensors(model))
        teacher = OnlineTeacher(unrounded, 1.0, run.label, run.lm_objective)
    loss = LanguageLoss(options.ce_weight, teacher=teacher, lm_objective=run.lm_objective)
    key = f"{run.storage} {run.lm_objective}"
    context = TrainingContext(run.label, run.journal, run.folder_of_pass(), key)
    with rotated(model, rotations, layers, context.label) as student:
        run.training[context.label] = train(student, loss, run.calibration, options, context)
    orthogonal = {name: nearest_orthogonal(parameter.detach()) for name, parameter in rotations.items()}
    return Learned(orthogonal.get(HIDDEN), [orthogonal[_name(i)] for i in range(len(learnable.values))])


def layers_of(
    model: nn.Module, learnable: Learnable, options: RotationLearning, rotations: Mapping[str, Tensor]
) -> dict[str, RotatedLinear]:
    """What is rotated and rounded in every linear.

    Args:
        rotations: by name, of hidden states and of each value link.
    """
    device = next(model.parameters()).device
    inputs: dict[str, list[ChannelRotation]] = {name: [] for name in learnable.names}
    outputs: dict[str, list[ChannelRotation]] = {name: [] for name in learnable.names}
    if learnable.size is not None:
        hidden_turn = FullRotation(rotations[HIDDEN])
        for turns, side in ((inputs, learnable.readers), (outputs, learnable.writers)):
            for name in side & turns.keys():
                turns[name].append(hidden_turn)
    for i, link in enumerate(learnable.values):
        for turns, (name, channels) in ((inputs, link.reader()), (outputs, link.writer())):
            turns[name].append(HeadRotation(rotations[_name(i)], channels.to(device)))
    for name in learnable.names:
        transform = learnable.online(name)
        inputs[name] += [] if transform is None else [OnlineHadamard(transform.to(device))]
    shapes = {name: CompressedLinear.of(model.get_submodule(name)).shape for name in learnable.names}
    return {
        name: RotatedLinear(inputs[name], outputs[name], options.rounding(shapes[name]), options.weight_rounding())
        for name in learnable.names
    }


def _name(index: int) -> str:
    """Return the name of the rotation of a value link."""
    return f"values_{index}"
