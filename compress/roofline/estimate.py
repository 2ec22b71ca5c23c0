"""The least time of the products of a forward pass on a device, before and after compression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compress.layers.names import kind_of
from compress.layers.scheme import LayerScheme
from compress.roofline.devices import Device
from compress.roofline.trace import Product, Trace

KINDS = {"int": "int8", "fp": "float8"}
"""The kind of numbers of products with activations quantized to a grid, by the prefix of the grid's name."""


@dataclass(frozen=True)
class StoredWeight:
    """Weight of a linear.

    Attributes:
        size_bytes: bytes that a product reads.
        inputs: grid of its activation quantization, or None.
    """

    size_bytes: int
    inputs: str | None = None

    @classmethod
    def of(cls, scheme: LayerScheme, size_bytes: int) -> StoredWeight:
        """Return the weight of a layer of this scheme."""
        return cls(size_bytes, None if scheme.rounding is None else scheme.rounding.grid.name)

    @property
    def numbers(self) -> str:
        """The kind of numbers of the product: 8-bit only if activations are quantized to at most 8 bits."""
        return next((kind for start, kind in KINDS.items() if (self.inputs or "").startswith(start)), "float16")


@dataclass(frozen=True)
class ProductCost:
    """Products of one kind: names that differ only in numbers, which become '*', and equal sizes.

    Attributes:
        name: name of the kind.
        count: number of products.
        operations: of all products.
        size_bytes: of all products.
        seconds: of all products.
        bound: 'compute' or 'memory', whichever takes longer.
    """

    name: str
    count: int
    operations: int
    size_bytes: int
    seconds: float
    bound: str

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.size_bytes


@dataclass(frozen=True)
class PassCost:
    """ProductCost of a forward pass.

    Attributes:
        costs: products by kind.
        seconds: least time, with the calls of the framework.
    """

    costs: tuple[ProductCost, ...]
    seconds: float


def estimate(trace: Trace, stored: Mapping[str, StoredWeight], itemsize: int, device: Device) -> PassCost:
    """Compute the cost of every kind of product.

    Args:
        trace: the products.
        stored: weights of compressed linears by name; others are dense.
        itemsize: bytes of a dense element, an input and an output.
        device: the device.
    """
    groups: dict[tuple[str, int, int], list[Product]] = {}
    for product in trace.products:
        name = kind_of(product.module)
        name = name if product.kind == "linear" else f"{name} ({product.kind})"
        groups.setdefault((name, product.operations, _read(product, stored, itemsize)), []).append(product)
    costs = [_cost(name, products, stored, itemsize, device) for (name, _, _), products in groups.items()]
    return PassCost(tuple(costs), sum(cost.seconds for cost in costs) + trace.calls * device.call_seconds)


def _cost(
    name: str, products: Sequence[Product], stored: Mapping[str, StoredWeight], itemsize: int, device: Device
) -> ProductCost:
    product = products[0]
    numbers = stored[product.module].numbers if product.kind == "linear" and product.module in stored else "float16"
    size, count = _read(product, stored, itemsize), len(products)
    seconds = device.seconds(product.operations, size, numbers)
    bound = "memory" if seconds == size / device.bandwidth else "compute"
    return ProductCost(name, count, product.operations * count, size * count, seconds * count, bound)


def _read(product: Product, stored: Mapping[str, StoredWeight], itemsize: int) -> int:
    """Return the bytes that a product moves."""
    weight = product.rows * product.width * itemsize
    if product.kind == "linear" and product.module in stored:
        weight = stored[product.module].size_bytes
    return weight + product.moved * itemsize
