"""Products with weights as instructions: packed and dense layers, together where they share an input, and rotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compress.decode.layout import NotRecordedError, Value
from compress.decode.lower import Lowering
from compress.kernels.cpu.codes import TYPES, UNROUNDED, Mode, packed_of, rounding_of
from compress.kernels.cpu.packed import PackedCodes
from compress.kernels.cpu.rotations import steps as rotation_steps
from compress.kernels.cpu_dense import FEW, packed_rows
from compress.native.library import pointer
from compress.native.steps import TOGETHER

aten = torch.ops.aten


def rows_of(lowering: Lowering, x: Value) -> tuple[Value, int, int]:
    """Inputs whose rows are contiguous, the number of rows, and the stride of rows."""
    if x.dtype not in TYPES:
        raise NotRecordedError(f"products of {x.dtype}")
    x = x if x.contiguous else lowering.copied(x)
    return x, x.count // x.sizes[-1], x.sizes[-1]


def joint_fields(packed: PackedCodes, mode: Mode, m: int, ldx: int, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of `Joint` for a way to round inputs."""
    rounded, bits, clip = rounding_of(packed, mode)
    return {"m": m, "ldx": ldx, "type": TYPES[dtype], "rounded": rounded, "bits": bits, "clip": clip}


def bias_of(lowering: Lowering, bias: Value | None, dtype: torch.dtype) -> int | None:
    """The address of a bias."""
    if bias is None:
        return None
    if not bias.constant:
        raise NotRecordedError("a bias that changes")
    kept = lowering.tensor_of(bias).to(dtype).contiguous()
    lowering.keep.append(kept)
    return kept.data_ptr()


def packed_linear(
    lowering: Lowering, node: Node, x: Value, bias: Value | None, handle: int, rows: int, *mode: Any
) -> Value:
    """A layer of packed weights, and those after it that have the same input and rounding."""
    together = [n for n in node.args[0].users if n.target is node.target and n not in lowering.values]  # type: ignore[union-attr]
    known = [n for n in together if all(one in lowering.values for one in n.all_input_nodes)]
    alike = [n for n in known if n.args[4:] == node.args[4:]][:TOGETHER]
    given, m, ldx = rows_of(lowering, x)
    products = []
    for other in alike:
        packed, y = packed_of(other.args[2]), lowering.fresh(other.meta["val"].shape, x.dtype)  # type: ignore[arg-type]
        if packed.width != ldx:
            raise NotRecordedError("inputs of another width")
        address = bias_of(lowering, None if other.args[1] is None else lowering.values[other.args[1]], x.dtype)  # type: ignore[index]
        products.append((packed.address, address, y))
        lowering.keep.append(packed)
    first = packed_of(handle)
    lowering.emit(
        "multiply_weights",
        (),
        None,
        [(given, ())],
        joint=joint_fields(first, mode, m, ldx, x.dtype),
        products=products,  # type: ignore[arg-type]
    )
    for other, (_, _, y) in zip(alike, products, strict=True):
        lowering.values[other] = y
    return lowering.values[node]


def one_product(
    lowering: Lowering,
    x: Value,
    packed: PackedCodes,
    bias: Value | None,
    sizes: Any,
    mode: Mode,
    scale: Tensor | None = None,
) -> Value:
    """One product with a packed weight."""
    given, m, ldx = rows_of(lowering, x)
    y = lowering.fresh(sizes, x.dtype)
    joint = joint_fields(packed, mode, m, ldx, x.dtype) | {"static_scale": pointer(scale)}
    lowering.keep += [packed, scale]
    products = [(packed.address, bias_of(lowering, bias, x.dtype), y)]
    lowering.emit("multiply_weights", (), None, [(given, ())], joint=joint, products=products)
    return y


def codes_linear(
    lowering: Lowering,
    node: Node,
    x: Value,
    bias: Value | None,
    rounded: int,
    bits: int,
    clip: float,
    scale: Value | None,
    threshold: float | None,
    columns: Value | None,
    *weight: Any,
) -> Value:
    """A layer of packed weights whose tensors are given; columns with outliers are left to torch."""
    if threshold is not None or columns is not None:
        raise NotRecordedError("columns with outliers")
    known: list[Any] = [lowering.tensor_of(v) if isinstance(v, Value) else v for v in weight]
    packed = PackedCodes(*known)
    static = None if scale is None else lowering.tensor_of(scale).float()
    return one_product(lowering, x, packed, bias, node.meta["val"].shape, (rounded, bits, clip), static)


def matrix_product(lowering: Lowering, node: Node, x: Value, w: Value, bias: Value | None = None) -> Value:
    """x times the transpose of a dense weight, which is read where it is."""
    if not w.constant or w.sizes[0] < 1 or w.strides != (1, w.sizes[0]):
        raise NotRecordedError("a product that is not with the rows of a weight")
    weight = lowering.tensor_of(w).T
    if weight.dtype not in TYPES or (weight.dtype is torch.float32 and x.dtype is not torch.float32):
        raise NotRecordedError(f"products of {weight.dtype}")
    if x.count > FEW[x.dtype] * x.sizes[-1]:
        raise NotRecordedError("a product of many rows, which torch computes faster")
    return one_product(lowering, x, packed_rows(weight), bias, node.meta["val"].shape, UNROUNDED)


def added_product(
    lowering: Lowering, node: Node, bias: Value, x: Value, w: Value, *, beta: float = 1, alpha: float = 1
) -> Value:
    """A product and a bias."""
    if beta != 1 or alpha != 1 or len(bias.sizes) != 1:
        raise NotRecordedError("a product with factors")
    return matrix_product(lowering, node, x, w, bias)


def rotate(
    lowering: Lowering,
    node: Node,
    x: Value,
    signs: Value,
    order: int,
    outputs: bool,
    bias: Value | None,
    dtype: torch.dtype | None,
) -> Value:
    """Inputs or outputs rotated by Hadamard matrices."""
    matrix = rotation_steps(order, outputs)
    given, m, ldx = rows_of(lowering, x)
    if matrix is None or not signs.constant or (dtype or x.dtype) not in TYPES:
        raise NotRecordedError("a rotation that plain torch computes")
    out, kept = lowering.fresh(x.sizes, dtype or x.dtype), lowering.tensor_of(signs).contiguous()
    lowering.keep += [matrix, kept]
    fields = {
        "matrix": matrix.address,
        "signs": kept.data_ptr(),
        "bias": bias_of(lowering, bias, torch.float32),
        "m": m,
        "width": ldx,
        "ldx": ldx,
        "x_type": TYPES[x.dtype],
        "y_type": TYPES[out.dtype],
        "outputs": int(outputs),
    }
    lowering.emit("rotate", (), (out, ()), [(given, ())], rotation=fields)
    return out


PRODUCTS: dict[Any, Callable[..., Any]] = {
    torch.ops.compress.packed_linear.default: packed_linear,
    torch.ops.compress.codes_linear.default: codes_linear,
    torch.ops.compress.rotate.default: rotate,
    aten.mm.default: matrix_product,
    aten.addmm.default: added_product,
}
