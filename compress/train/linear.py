"""A linear during training: packed codes stay integers, and only trained tensors are floats."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compress.layers.base import WeightPart
from compress.layers.linear import CompressedLinear
from compress.numerics.quant.scales import positive
from compress.train.parametrization import Parametrization, Shares, masked
from compress.train.sharded import full_parameters

SMALLEST_FACTOR = 0.05  # keeps scales positive; training does not reach it


class _ScaledProduct(torch.autograd.Function):
    """x W^T, where W is the weight of a part whose scales are multiplied by factors. The backward pass recomputes W.

    The input `plain` is W at factors of 1, if the caller has it; then codes are not unpacked.

    dL/dx = (dL/dy) W; dL/dfactor_g = sum over the weights of group g of (dL/dy)^T x * W at factors of 1.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor | None, part: WeightPart, plain: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, factor, plain)
        ctx.part, ctx.shape = part, x.shape
        return x @ _scaled(part, factor, plain).to(x.dtype).T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (gradient,) = gradients
        x, factor, plain = ctx.saved_tensors
        part: WeightPart = ctx.part
        to_x = to_factor = None
        plain = part.dense(torch.float32) if plain is None else plain
        if ctx.needs_input_grad[1]:
            to_weight = gradient.reshape(-1, gradient.shape[-1]).T @ x.reshape(-1, x.shape[-1])
            to_factor = part.sum_groups(to_weight.float().mul_(plain))
        if ctx.needs_input_grad[0]:
            to_x = (gradient @ _scaled(part, factor, plain).to(gradient.dtype)).reshape(ctx.shape)
        return to_x, to_factor, None, None


def _scaled(part: WeightPart, factor: Tensor | None, plain: Tensor | None) -> Float[Tensor, "out in"]:
    """Compute the weight in float32, with its scales multiplied by the factors."""
    if plain is not None:
        return plain if factor is None else plain * part.spread(factor)
    if factor is not None:
        assert part.free_scale is not None
        part = part.with_scale(part.free_scale.float() * factor)
    return part.dense(torch.float32)


def scaled_product(
    x: Float[Tensor, "*batch in"],
    factor: Float[Tensor, "out groups"] | None,
    part: WeightPart,
    plain: Float[Tensor, "out in"] | None = None,
) -> Float[Tensor, "*batch out"]:
    """Compute x W^T with every scale times its factor, with gradients of x and of the factors.

    The dense W is not stored.

    Args:
        x: input.
        factor: factor of each scale, or None.
        part: part whose weight is W.
        plain: W at factors of 1, if the caller has it.
    """
    return _ScaledProduct.apply(x, factor, part, plain)  # type: ignore[return-value]


class TrainedLinear(nn.Module):
    """The replacement of a CompressedLinear during training: y = W q(t(x)) + bias, where q quantizes activations.

    The backward pass treats q as the identity (straight-through). Codes never change. The factors of scales are
    registered as factor, factor_2, ...

    Attributes:
        layer: the compressed layer.
        weight: dense weight [out, in], if it is trained.
        parametrization: computes the weight of the product from `weight`; None if the weight is not trained.
        plain: dequantized weight of each part in float32 if `unpacked`, which is faster; else None.
    """

    weight: nn.Parameter
    parametrization: Parametrization | None

    def __init__(self, layer: CompressedLinear, unpacked: bool = False) -> None:
        super().__init__()
        self.layer = layer
        unpacks = unpacked and layer.quantized
        self.plain = [part.dense(torch.float32) if unpacks else None for part in layer.all_parts]
        self.register_parameter("weight", None)
        self._names: dict[int, str] = {}
        self.parametrization = None

    def __getattr__(self, name: str) -> Any:
        attribute = super().__getattr__(name)
        is_untrained = attribute is None and name == "weight"
        return self.layer.weight if is_untrained else attribute  # some mixers read the weight but do not call the layer

    @property
    def bias(self) -> Tensor | None:
        """The bias of the layer; some state-space mixers read it outside of the layer's forward pass."""
        return self.layer.bias

    @property
    def scaled(self) -> list[int]:
        """The indices of the parts whose scales can be trained."""
        return [i for i, part in enumerate(self.layer.all_parts) if part.free_scale is not None]

    @property
    def factors(self) -> dict[int, nn.Parameter]:
        """The factors of trained scales, by index of the part."""
        return {i: getattr(self, name) for i, name in self._names.items()}

    def train_scales(self) -> dict[str, nn.Parameter]:
        """Add a trained factor, initially 1, to every scale of every part.

        Returns:
            The factors by name.
        """
        self._names = {i: "factor" if n == 1 else f"factor_{n}" for n, i in enumerate(self.scaled, start=1)}
        for i, name in self._names.items():
            scale = self.layer.all_parts[i].free_scale
            assert scale is not None
            self.register_parameter(name, nn.Parameter(torch.ones_like(scale, dtype=torch.float32)))
        return {name: getattr(self, name) for name in self._names.values()}

    def train_weight(self, parametrization: Parametrization | None = None) -> nn.Parameter:
        """Train the dense weight in float32.

        Args:
            parametrization: None for a parametrization that preserves the mask of the layer.
        """
        self.parametrization = masked("", self.layer) if parametrization is None else parametrization
        self.weight = nn.Parameter(
            self.layer.weight.detach().float().clone()
        )  # a copy, because it may be a view of a file
        self.weight.requires_grad_(self.parametrization.trains_weight)
        self.parametrization.to(self.weight.device)
        self.layer.put(self.weight.detach())
        return self.weight

    def adjust(self) -> None:
        """Apply `Parametrization.adjust` to the gradient of the weight, after the gradients of a step are complete."""
        parametrization = self.parametrization
        if parametrization is not None and type(parametrization).adjust is not Parametrization.adjust:
            with full_parameters(self):
                parametrization.adjust(self.weight)

    @torch.no_grad()
    def decay(self, rate: float) -> None:
        """Apply `Parametrization.decay` to the weight, before an optimizer step with learning rate `rate`."""
        parametrization = self.parametrization
        if parametrization is not None and type(parametrization).decay is not Parametrization.decay:
            with full_parameters(self):
                parametrization.decay(self.weight, rate)

    @torch.no_grad()
    def update(self, step: int, total_steps: int) -> Shares:
        """Project the trained tensors after a step: scales stay above 0, pruned weights at 0.

        Args:
            step: number of completed steps.
            total_steps: number of steps of the training.

        Returns:
            The counts of the parametrization.
        """
        for factor in self.factors.values():
            factor.clamp_(min=SMALLEST_FACTOR)
        parametrization = self.parametrization
        if parametrization is None or type(parametrization).update is Parametrization.update:
            return {}
        with full_parameters(self):
            return parametrization.update(self.weight, step, total_steps)

    @torch.no_grad()
    def finalize(self, storage: torch.dtype, dtype: torch.dtype) -> CompressedLinear:
        """Return the layer with the trained scales and weights.

        Args:
            storage: dtype to whose values scales and weights are rounded.
            dtype: dtype of dense weights.
        """
        parts = self.layer.all_parts
        rescaled_parts = {id(parts[i]): _rescaled(parts[i], factor, storage) for i, factor in self.factors.items()}
        if rescaled_parts:
            self.layer.change_parts(lambda part: rescaled_parts.get(id(part), part))
        if self.parametrization is not None:
            weight, mask = self.parametrization.finalize(self.weight.detach(), storage)
            self.layer.put(weight.to(storage).to(dtype) if isinstance(weight, Tensor) else weight, mask)
        return self.layer

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        layer = self.layer
        x, rounding = layer.transform(x), layer.rounding
        if rounding is not None:
            with torch.no_grad():
                rounding_error = rounding(x) - x
            x = x + rounding_error
        if self.parametrization is not None:
            return nn.functional.linear(x, self.parametrization(self.weight), layer.bias)
        if not layer.quantized:
            return nn.functional.linear(x, layer.weight_as(x.dtype), layer.bias)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        factors, parts = self.factors, layer.all_parts
        products = [scaled_product(x, factors.get(i), part, self.plain[i]) for i, part in enumerate(parts)]
        y = sum(products[1:], products[0])
        return y if layer.bias is None else y + layer.bias.to(y.dtype)


def _rescaled(part: WeightPart, factor: Tensor, storage: torch.dtype) -> WeightPart:
    """Multiply the scales of a part by their factors, rounded to `storage`; a factor of 1 preserves its scale."""
    original_scale = part.free_scale
    assert original_scale is not None
    scale = positive(positive(original_scale.float() * factor, storage), original_scale.dtype).to(original_scale.dtype)
    return part.with_scale(torch.where(factor == 1, original_scale, scale))
