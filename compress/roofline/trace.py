"""Count the operations and bytes of a model by running it on tensors without data (device meta).

Products are observed in the calls of the framework, independent of the architecture: linears, attention, and products
of two tensors. Operations between the products (norms, activations, sums) are not counted: programs that serve models
fuse them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from compress.errors import CannotRun, ModelError, call_foreign
from compress.layers.linear import linears
from compress.models.experts import Experts, computed_by, roles
from compress.models.kinds.contract import with_cache


@dataclass(frozen=True)
class Product:
    """One product of a forward pass.

    Attributes:
        module: name of the module that computes it.
        kind: 'linear', 'attention' or 'product'.
        rows: rows of the weight of a linear, otherwise 0.
        width: columns of the weight of a linear, otherwise 0.
        operations: a multiplication and an addition count as two.
        moved: elements of the inputs and the output that are read and written, without the weight.
    """

    module: str
    kind: str
    rows: int
    width: int
    operations: int
    moved: int


@dataclass(frozen=True)
class Trace:
    """The products of a forward pass.

    Attributes:
        products: the products, in order.
        calls: number of calls of functions of the framework.
        cached: elements of the cache after the pass.
    """

    products: tuple[Product, ...]
    calls: int
    cached: int


class _Recorder(TorchFunctionMode):
    """Records the products among the calls of torch's functions."""

    def __init__(self, stack: list[str], linears: Collection[str]) -> None:
        super().__init__()
        self.stack, self.linears = stack, linears
        self.products: list[Product] = []
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor):
            self.calls += 1
            module = self.stack[-1]
            fields = product_of(getattr(func, "__name__", ""), args, output, module in self.linears)
            if fields is not None:
                self.products.append(Product(module, *fields))
        return output


def product_of(
    name: str, args: tuple[Any, ...], output: Tensor, inside_linear: bool = False
) -> tuple[str, int, int, int, int] | None:
    """Return (kind, rows, width, operations, moved) of a call of a function of torch; None for other calls."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if name == "scaled_dot_product_attention":
        query, key, value = tensors[:3]
        pairs = math.prod(output.shape[:-1]) * key.shape[-2]  # scores; a causal mask leaves none of them out
        return "attention", 0, 0, 2 * pairs * (query.shape[-1] + value.shape[-1]), _moved(query, key, value, output)
    if name in ("addmm", "baddbmm"):
        tensors = tensors[1:]  # the bias
    elif name not in ("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm"):
        return None
    left, right = tensors[:2] if len(tensors) > 1 else (output, output)
    operations = 2 * output.numel() * left.shape[-1]
    if right.dim() == 2 and (inside_linear or isinstance(right, nn.Parameter)):
        rows, width = right.shape if name == "linear" else reversed(right.shape)
        return "linear", rows, width, operations, _moved(left, output)
    return "product", 0, 0, operations, _moved(left, right, output)


def _moved(*tensors: Tensor) -> int:
    return sum(tensor.numel() for tensor in tensors)


@contextmanager
def _named(model: nn.Module, stack: list[str]) -> Iterator[None]:
    """Keep the name of the running module on top of a stack."""

    def leave(*_: Any) -> None:
        stack.pop()

    with ExitStack() as handles:
        for name, module in model.named_modules():
            enter_hook = module.register_forward_pre_hook(lambda *_, name=name: stack.append(name))
            exit_hook = module.register_forward_hook(leave)
            handles.callback(enter_hook.remove)
            handles.callback(exit_hook.remove)
        yield


def _spread(experts: Experts, *args: Tensor) -> Tensor:
    """Spread the tokens evenly over as many experts as they can choose; a router's choice needs data."""
    x, chosen, _ = roles(args)
    used = min(experts.count, chosen.numel())
    for number in range(used):
        experts.expert(number)(x[: math.ceil(chosen.numel() / used)])
    return torch.zeros_like(x)


def trace(model: PreTrainedModel, batch: int, context: int) -> tuple[Trace, Trace | None]:
    """Trace the prefill of a prompt of `context` tokens, and the decode step after it.

    Args:
        model: on device meta.
        batch: sequences.
        context: tokens of a prompt.

    Returns:
        (prefill, decode); decode is None for a model without a cache of keys and values.

    Raises:
        ModelError: if the model does not run without data.
    """
    use = with_cache(model)
    ids = torch.zeros(batch, context, dtype=torch.long, device="meta")
    try:
        prefill, output = call_foreign(_run, model, input_ids=ids, **use)
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            return prefill, None
        decode, _ = call_foreign(_run, model, input_ids=ids[:, :1], past_key_values=cache, **use)
    except CannotRun as error:
        raise ModelError(f"model: {type(model).__name__} does not run without data ({error})") from error
    return prefill, decode


def _run(model: PreTrainedModel, **inputs: Any) -> tuple[Trace, Any]:
    stack = [""]
    recorder = _Recorder(stack, linears(model).keys())
    with torch.no_grad(), computed_by(model, _spread), _named(model, stack), recorder:
        output = model(**inputs)
    cached = _cached(getattr(output, "past_key_values", None))
    return Trace(tuple(recorder.products), recorder.calls, cached), output


def _cached(cache: Any) -> int:
    """Return the number of elements of a cache."""
    layers = getattr(cache, "layers", None) or []
    return sum(tensor.numel() for layer in layers for tensor in vars(layer).values() if isinstance(tensor, Tensor))


def check_length(config: Any, context: int) -> None:
    """Check that the context fits the model.

    Raises:
        ModelError: if it does not.
    """
    max_positions = getattr(config, "max_position_embeddings", None)
    if max_positions is not None and context > max_positions:
        raise ModelError(
            f"context {context} exceeds the model's {max_positions} positions; use at most {max_positions}"
        )
