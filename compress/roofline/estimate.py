"""The least time of the products of a forward pass on a device, before and after compression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compress.layers.linear import kind_of
from compress.layers.scheme import LayerScheme
from compress.roofline.devices import Device
from compress.roofline.trace import Product, Trace

KINDS = {"int": "int8", "fp": "float8"}
"""The kind of numbers that multiplies inputs rounded to a grid, by the beginning of the grid's name."""


@dataclass(frozen=True)
class Stored:
    """The weight of a linear: bytes that a product reads, and the grid of its rounded inputs or None."""

    size_bytes: int
    inputs: str | None = None

    @classmethod
    def of(cls, scheme: LayerScheme, size_bytes: int) -> Stored:
        """The weight of a layer of this scheme."""
        return cls(size_bytes, None if scheme.rounding is None else scheme.rounding.grid.name)

    @property
    def numbers(self) -> str:
        """The kind of numbers of the product: 8-bit ones only if the inputs are rounded to at most 8 bits."""
        return next((kind for start, kind in KINDS.items() if (self.inputs or "").startswith(start)), "float16")


@dataclass(frozen=True)
class Cost:
    """Products of one kind: names that differ only in numbers, which become '*', and equal sizes.

    operations, size_bytes, seconds: of all of them. bound: 'compute' or 'memory', whichever takes longer.
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
class Pass:
    """A forward pass: its products by kind, and its least seconds with the calls of the framework."""

    costs: tuple[Cost, ...]
    seconds: float


def estimate(trace: Trace, stored: Mapping[str, Stored], itemsize: int, device: Device) -> Pass:
    """The cost of every kind of product.

    stored: the weights of compressed linears by name; others are dense. itemsize: bytes of a dense element, an
    input and an output.
    """
    groups: dict[tuple[str, int, int], list[Product]] = {}
    for product in trace.products:
        name = kind_of(product.module)
        name = name if product.kind == "linear" else f"{name} ({product.kind})"
        groups.setdefault((name, product.operations, _read(product, stored, itemsize)), []).append(product)
    costs = [_cost(name, products, stored, itemsize, device) for (name, _, _), products in groups.items()]
    return Pass(tuple(costs), sum(cost.seconds for cost in costs) + trace.calls * device.call_seconds)


def _cost(name: str, products: Sequence[Product], stored: Mapping[str, Stored], itemsize: int, device: Device) -> Cost:
    one = products[0]
    numbers = stored[one.module].numbers if one.kind == "linear" and one.module in stored else "float16"
    size, count = _read(one, stored, itemsize), len(products)
    seconds = device.seconds(one.operations, size, numbers)
    bound = "memory" if seconds == size / device.bandwidth else "compute"
    return Cost(name, count, one.operations * count, size * count, seconds * count, bound)


def _read(product: Product, stored: Mapping[str, Stored], itemsize: int) -> int:
    """Bytes that a product moves."""
    weight = product.rows * product.width * itemsize
    if product.kind == "linear" and product.module in stored:
        weight = stored[product.module].size_bytes
    return weight + product.moved * itemsize
