"""Quantizing passes: their common options, and the rounding of weights and inputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from jaxtyping import Float
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor
from typing_extensions import Self

from compress.errors import NumericError
from compress.layers.base import WeightPart
from compress.layers.parts.codes import CodesScheme
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.rounding import InputRounding, InputScale, RoundingScheme
from compress.models.structure.select import ModuleNames
from compress.numerics.quant.codes import MSE_STEPS, Codes, Percentile, ScaleSearch, quantize
from compress.numerics.quant.grids import GRIDS, Grid, IntGrid
from compress.numerics.quant.rounding import GridOptions
from compress.numerics.quant.weighted_search import CUTS
from compress.passes.contract.facts import Effects, Fact, MakeObserver, Requirements
from compress.passes.contract.layers import Layer, Solution
from compress.passes.contract.observers import CrossGram, Gram, InputAbsMax
from compress.passes.contract.options import INHERITED, Override, read_overrides
from compress.passes.contract.passes import ActivationScale, LayerPass, Pass, SizedPass, SizeTarget, Survey
from compress.passes.families.bits import (
    Bits,
    BitsTarget,
    BitSurvey,
    Choice,
    budget_on_model,
    check_choices,
    stated_options,
)
from compress.passes.families.overridden import (
    check_overrides,
    inherited_options,
    overrides_on_model,
    with_fallbacks,
)
from compress.passes.families.weight_grid import GridName, WeightGrid


def _search(value: Any) -> Any:
    """Check a scale search; 'percentile' alone uses the default fraction."""
    if value == "percentile":
        return Percentile()
    share = value.get("percentile") if isinstance(value, dict) and len(value) == 1 else None
    if share is not None and not (isinstance(share, (int, float)) and 0.5 < share <= 1):
        raise ValueError(f"percentile {share!r} must be a fraction above 0.5 and at most 1, such as 0.999")
    if share is None and value not in ("absmax", "absmean", "mse", "importance") and not isinstance(value, Percentile):
        known_searches = "absmax, absmean, mse, importance, percentile, or {percentile: 0.999}"
        raise ValueError(f"scale {value!r} is not known; write {known_searches}")
    return value


SEARCHES = ("mse", "importance")
"""The searches that may choose negative scales."""
ScaleOption = Annotated[ScaleSearch, BeforeValidator(_search)]
InputGrid = Literal["none", "int8", "fp8_e4m3", "int4", "mxfp4", "nvfp4", "mxfp8"]


class Quantizing(SizedPass, WeightGrid, Pass):
    """The common options of all quantizing passes."""

    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"quantized"})

    fallback: GridName | None = Field(
        default=None,
        description="grid, in groups of 32, for layers whose inputs are no multiple of the super-blocks of `weights`; "
        "without it such a layer is an error",
    )
    overrides: tuple[Override, ...] = Field(
        default=(), description="other options for some layers: {pattern: {weights: int8}}; weights: none skips layers"
    )
    allocate: Bits | None = Field(
        default=None,
        description="divide a budget of bits among the layers: {bits: 3.5}, or {bits: 3.5, by: hawq, choices: [...]}; "
        "it replaces weights; layers that servers compute as one are alike",
    )
    scale: ScaleOption = Field(
        default="absmax",
        description="'absmax' covers the range; 'mse' clips it to the range with the least error; 'importance': the "
        "least error weighted by its effect on the output (gptq, signround); {percentile: 0.999} covers that "
        "fraction of the weights; 'absmean': mean magnitude, the default of ternary and binary",
    )
    signed_scales: bool = Field(
        default=True,
        description="let the searches 'mse' and 'importance' choose negative scales for integers without zero points, "
        "so that the longer tail of a group has the additional level; with rounded inputs scales stay positive",
    )
    activations: InputGrid = Field(
        default="none", description="grid of the activations (inputs of linears), rounded at run time"
    )
    activation_scale: ActivationScale = Field(
        default="token",
        description="'token': one scale per token, computed at run time; 'group': one per token and group_size "
        "columns, at run time; 'static': one calibrated scale; mxfp4, mxfp8 and nvfp4 have groups of their own, and "
        "with nvfp4 'static' is one calibrated global scale, as servers read it",
    )
    activation_clip: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of the largest magnitude that a scale computed at run time covers; QuaRot: 0.9 for int4",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_overrides(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "overrides" not in data:
            return data
        base = {name: value for name, value in data.items() if name != "overrides"}
        cls.model_validate(base)  # the pass's own mistakes come first
        return {**base, "overrides": read_overrides(cls, base, data["overrides"])}

    @classmethod
    def under(cls, base: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the pass that hold under an override."""
        return inherited_options(base, changed, cls.model_fields["weights"].default)

    def with_override(self, override: Override) -> Self:
        """Return the pass with the options of an override, for one layer."""
        options = {name: getattr(self, name) for name in type(self).model_fields if name != "overrides"}
        options = {**self.under(options, override.options), **override.options}
        return type(self).model_validate(options, context=INHERITED).model_copy(update={"allocate": None})

    def with_choices(self, choices: Sequence[Choice]) -> tuple[Self, ...]:
        """Return the pass with the options of each choice of `allocate`, for one layer."""
        overrides = [Override.model_validate({"targets": ("*",), **choice.options}) for choice in choices]
        return tuple(self.with_override(override) for override in overrides)

    def variants(self) -> list[Self]:
        """Return the pass with its own options, and with those of each override."""
        return [self, *(self.with_override(override) for override in self.overrides if not override.dense)]

    def on_model(self, names: ModuleNames, label: str) -> Self:
        step = super().on_model(names, label)
        # layers outside of the blocks are named by the patterns of the recipe
        overrides = overrides_on_model(step, names.reached(self.targets), names, label)
        step = step if overrides == step.overrides else step.model_copy(update={"overrides": overrides})
        step = step.model_copy(update={"overrides": with_fallbacks(step, names)})
        check_overrides(step, names, label)
        return step if step.allocate is None else step.model_copy(update=budget_on_model(step, names, label))

    def for_layer(self, name: str) -> Self | None:
        for override in self.overrides:
            if override.takes(name):
                return None if override.dense else self.with_override(override)
        return self

    @property
    def size_target(self) -> SizeTarget | None:
        allocate = self.allocate
        return None if allocate is None or allocate.size is None else BitsTarget(self, allocate)

    def survey(self) -> Survey | None:
        return super().survey() if self.allocate is None else BitSurvey(self, self.allocate)

    @property
    def compensates(self) -> type[Gram] | None:
        """The statistics by which later columns compensate the errors of earlier ones; None: no compensation."""
        return None

    @classmethod
    def of_grid(cls, grid: Grid, options: Mapping[str, Any]) -> dict[str, Any]:
        """Also the scale search of the grid; that of 'importance' needs scales of parts of a row."""
        defaults = super().of_grid(grid, options)
        if grid.averaged:
            return defaults | {"scale": "absmean"}
        weighted = cls.model_fields["scale"].default == "importance" and options.get("group_size") == "tensor"
        return defaults | ({"scale": "mse"} if weighted else {})

    def effects(self, layer: LayerScheme) -> Effects:
        codes = CodesScheme(self.grid, self.group_size, self.symmetric, self.indexed, self.float_zeros, self.scale_rows)
        scheme, rounding = layer.with_parts(codes), self.rounding_scheme
        inputs = [self.activations, *(override.options.get("activations", "none") for override in self.overrides)]
        activations: frozenset[Fact] = frozenset({"activations_quantized"})
        dense = tuple(pattern for override in self.overrides if override.dense for pattern in override.targets)
        effects = super().effects(layer)
        return replace(
            effects,
            skipped=effects.skipped + dense,
            scheme=scheme if rounding is None else scheme.with_transform(rounding),
            facts=effects.facts | (activations if set(inputs) != {"none"} else frozenset()),
            problem=self._problem(layer.shape[1]),
            negative_scales=self.tries_signs,
            notes=self._notes(),
        )

    @property
    def rounding_scheme(self) -> RoundingScheme | None:
        """The scheme of the inputs' rounding; None: inputs are not rounded."""
        if self.input_grid is None:
            return None
        kind: InputScale = self.activation_scale
        if self.input_grid.group_size is not None:
            kind = "local" if kind == "static" else "group"
        return RoundingScheme(self.input_grid, kind, group=self.input_group, clip=self.activation_clip)

    @property
    def input_group(self) -> int | None:
        """The columns of the inputs that share a scale of a token; None: all."""
        if self.input_grid is not None and self.input_grid.group_size is not None:
            return self.input_grid.group_size
        return self.group_size if self.activation_scale == "group" and isinstance(self.group_size, int) else None

    def _problem(self, width: int) -> str | None:
        """Return why the inputs of a layer of this width cannot be quantized, or None."""
        group, grid = self.input_group, self.input_grid
        if group is None or width % group == 0:
            return None
        remedy = "activation_scale: token" if grid is None or grid.group_size is None else "activations: int4"
        return f"groups of {group} columns do not divide its {width} inputs; use {remedy}"

    @property
    def float_zeros(self) -> bool:
        """Whether zero points are floats."""
        return False

    @property
    def scale_rows(self) -> int:
        """Consecutive rows that share their scales."""
        return 1

    @property
    def indexed(self) -> bool:
        """Whether the groups are not contiguous, so that an index per column is stored."""
        return False

    @property
    def input_grid(self) -> Grid | None:
        """The grid of the inputs."""
        return None if self.activations == "none" else GRIDS[self.activations]

    @property
    def weighs_columns(self) -> bool:
        """Whether the search for scales knows the inputs of a layer."""
        return False

    @property
    def integers(self) -> bool:
        """Whether weights are integers with a float scale and without a zero point."""
        return isinstance(self.grid, IntGrid) and self.grid.plain and self.symmetric

    @property
    def positive_scales(self) -> str | None:
        """Why all scales are positive; None if a search may choose negative ones.

        Marlin of vLLM reads the scales of groups as unsigned integers if the inputs are rounded to int8.
        """
        if not self.integers:
            return "for other weights than integers without zero points"
        return "with rounded inputs" if self.served_inputs else None if self.scale in SEARCHES else "without scale: mse"

    @property
    def served_inputs(self) -> bool:
        """Whether other programs compute with these inputs: 8 bits, or groups of the same grid as the weights."""
        grid = self.input_grid
        if grid is None or grid.group_size is None:
            return grid is not None and grid.bits > 4
        return grid is self.grid and (not grid.scaling.fused or self.activation_scale == "static")

    def _notes(self) -> tuple[str, ...]:
        if self.input_grid is None:
            return ()
        if not self.served_inputs:
            note = f"inputs in {self.activations} are stated in format native only, which compress.load reads"
            shared = self.input_grid is self.grid and self.input_grid.scaling.fused
            return (f"{note}; servers read those with activation_scale: static" if shared else note,)
        if not self.integers or not self.signed_scales or self.scale not in SEARCHES:
            return ()
        return (
            "scales stay positive: kernels of servers for rounded inputs may read packed scales as unsigned numbers",
        )

    @property
    def tries(self) -> int:
        """How many times the search for scales rounds each weight."""
        if self.scale == "importance":
            return 2 * len(CUTS)  # each range unchanged, then the regression on its codes
        return (MSE_STEPS + 1) * (1 + self.tries_signs) if self.scale == "mse" else 1

    @property
    def tries_signs(self) -> bool:
        """Whether the search for scales tries negative ones, if the readers of the format take them."""
        return self.signed_scales and self.positive_scales is None

    def without_effect(self) -> dict[str, str]:
        reason = self.positive_scales
        idle = {} if reason is None else {"signed_scales": f"{reason}: scales are positive; leave it out"}
        rounding = self.rounding_scheme
        if rounding is None or rounding.scale == "static":
            idle["activation_clip"] = "no scale of inputs is computed at run time; leave it out"
        if self.allocate is not None:
            reason = "with allocate, whose choices all state it; leave it out"
            idle = dict.fromkeys(stated_options(self.allocate, self.grid), reason) | idle
        return super().without_effect() | idle

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.allocate is not None:
            check_choices(self, self.allocate)
        if self.scale == "importance" and not self.weighs_columns:
            raise ValueError("scale: importance needs the inputs of a layer, as gptq has them; use scale: mse")
        if self.scale == "importance" and self.group_size == "tensor":
            raise ValueError("scale: importance searches the scales of rows; use group_size: channel, or scale: mse")
        if self.activation_scale != "token" and self.input_grid is None:
            grid = "int8" if self.activation_scale == "static" else "fp8_e4m3"
            needs = f"activation_scale: {self.activation_scale} needs rounded inputs"
            raise ValueError(f"{needs}; write activations: {grid}, or leave activation_scale out")
        fused = self.input_grid is not None and self.input_grid.scaling.fused
        if self.activation_scale == "static" and self.input_group is not None and not fused:
            raise ValueError(f"activation_scale: static: {self.activations} has a scale per group; leave it out")
        if self.activation_scale == "group" and self.input_group is None and not isinstance(self.group_size, int):
            raise ValueError("activation_scale: group needs a group_size in columns, such as group_size: 128")

    def signed(self, layer: Layer) -> bool:
        """Return whether the search for scales may choose negative ones."""
        return layer.negative_scales and self.tries_signs

    def grid_options(self, layer: Layer) -> GridOptions:
        """Return the options of this pass for rounding column by column."""
        return GridOptions(
            self.grid,
            self.group_size,
            self.symmetric,
            self.scale,
            layer.storage,
            layer.shared_absmax,
            signed=self.signed(layer),
        )

    def nearest(self, weight: Float[Tensor, "out in"], layer: Layer) -> Codes:
        """Round each weight to the nearest value of the grid; it needs no inputs.

        Codes of the source on the same grid stay as they are, with their scales.
        """
        options = self.grid_options(layer)
        search = "mse" if options.search == "importance" else options.search  # no inputs weigh the columns here
        codes = quantize(
            weight,
            options.grid,
            options.group_size,
            options.symmetric,
            search,
            layer.mask,
            options.dtype,
            options.shared_absmax,
            self.scale_rows,
            options.signed,
        )
        source = layer.source()
        return (None if source is None else source.kept(weight, codes)) or codes

    def rounding(self, layer: Layer) -> InputRounding | None:
        """Return the rounding of the layer's inputs, or None; static scales cover the largest calibration input.

        Without tokens a global scale is 1, with which 8-bit scales reach from 2^-9 to 448.

        Raises:
            NumericError: when the scale is static and no calibration token reached the layer.
        """
        scheme = self.rounding_scheme
        if self.input_grid is None or scheme is None or scheme.scale not in ("static", "local"):
            return None if scheme is None else InputRounding(scheme, (0, 0), {})
        if scheme.scale == "local":
            if layer.inputs.tokens == 0:
                layer.log("fallback", "no calibration token reached this layer; the global scale of its inputs is 1")
            return InputRounding.local(scheme, layer.inputs.absmax.max() if layer.inputs.tokens else None)
        if layer.inputs.tokens == 0:
            raise NumericError(f"{layer.name}: no calibration token reached this layer; use activation_scale: token")
        return InputRounding.covering(self.input_grid, layer.inputs.absmax.max(), layer.storage)


class QuantizingPass(Quantizing, LayerPass):
    """A pass that quantizes one layer at a time."""

    @property
    def layer_observer(self) -> MakeObserver | None:
        """`Requirements.layer_observer` of these options."""
        return InputAbsMax if self.activation_scale == "static" else None

    @property
    def requires(self) -> Requirements:
        requires = super().requires
        data = requires.data or any(step.layer_observer is not None for step in self.variants())
        return replace(requires, data=data, layer_observer=self.layer_observer)

    @property
    def compensates(self) -> type[Gram] | None:
        observer = self.observer
        if issubclass(observer, CrossGram):
            return observer.alone
        return observer if issubclass(observer, Gram) else None

    def solve(self, weight: Float[Tensor, "out in"], statistics: Any, layer: Layer) -> Solution:
        codes, rounding = self.codes(weight, statistics, layer), self.rounding(layer)
        return Solution(codes, transforms=() if rounding is None else (rounding,))

    @abstractmethod
    def codes(self, weight: Float[Tensor, "out in"], statistics: Any, layer: Layer) -> Codes | Sequence[WeightPart]:
        """Quantize the weight, to codes or to parts; weights outside of layer.mask must decode to exactly zero."""
