"""Instructions of packed and dense layers, joined for layers with the same input, and of rotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compress.decode.layout import UntraceableError, Value
from compress.decode.lower import Lowering
from compress.kernels.cpu.codes import TYPES, UNROUNDED, Mode, packed_of, rounding_of
from compress.kernels.cpu.packed import PackedCodes
from compress.kernels.cpu.rotations import steps as rotation_steps
from compress.kernels.cpu_dense import FEW, packed_rows
from compress.native.library import pointer
from compress.native.steps import TOGETHER

aten = torch.ops.aten


def contiguous_rows(lowering: Lowering, x: Value) -> tuple[Value, int, int]:
    """Return the input with contiguous rows, the number of rows, and the stride of rows."""
    if x.dtype not in TYPES:
        raise UntraceableError(f"products of {x.dtype}")
    x = x if x.contiguous else lowering.contiguous_copy(x)
    return x, x.count // x.sizes[-1], x.sizes[-1]


def joint_fields(packed: PackedCodes, mode: Mode, m: int, ldx: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of `Joint` for an activation quantizer (mode, bits, clip)."""
    mode_code, bits, clip = rounding_of(packed, mode)
    return {"m": m, "ldx": ldx, "type": TYPES[dtype], "rounded": mode_code, "bits": bits, "clip": clip}


def bias_address(lowering: Lowering, bias: Value | None, dtype: torch.dtype) -> int | None:
    """Return the address of a bias, or None."""
    if bias is None:
        return None
    if not bias.constant:
        raise UntraceableError("a bias that changes")
    bias_tensor = lowering.tensor_of(bias).to(dtype).contiguous()
    lowering.keep.append(bias_tensor)
    return bias_tensor.data_ptr()


def packed_linear(
    lowering: Lowering, node: Node, x: Value, bias: Value | None, handle: int, rows: int, *mode: Any
) -> Value:
    """Lower a packed layer together with later layers that have the same input and activation quantizer."""
    same_operation = [n for n in node.args[0].users if n.target is node.target and n not in lowering.values]  # type: ignore[union-attr]
    ready = [n for n in same_operation if all(input_node in lowering.values for input_node in n.all_input_nodes)]
    joint_nodes = [n for n in ready if n.args[4:] == node.args[4:]][:TOGETHER]
    rows_in, m, ldx = contiguous_rows(lowering, x)
    products = []
    for sibling in joint_nodes:
        packed, y = packed_of(sibling.args[2]), lowering.empty(sibling.meta["val"].shape, x.dtype)  # type: ignore[arg-type]
        if packed.width != ldx:
            raise UntraceableError("inputs of another width")
        address = bias_address(lowering, None if sibling.args[1] is None else lowering.values[sibling.args[1]], x.dtype)  # type: ignore[index]
        products.append((packed.address, address, y))
        lowering.keep.append(packed)
    packed_weight = packed_of(handle)
    lowering.emit(
        "packed_linear",
        (),
        None,
        [(rows_in, ())],
        joint=joint_fields(packed_weight, mode, m, ldx, x.dtype),
        products=products,  # type: ignore[arg-type]
    )
    for sibling, (_, _, y) in zip(joint_nodes, products, strict=True):
        lowering.values[sibling] = y
    return lowering.values[node]


def single_product(
    lowering: Lowering,
    x: Value,
    packed: PackedCodes,
    bias: Value | None,
    sizes: Any,
    mode: Mode,
    scale: Tensor | None = None,
) -> Value:
    """Lower one product with a packed weight."""
    rows_in, m, ldx = contiguous_rows(lowering, x)
    y = lowering.empty(sizes, x.dtype)
    joint = joint_fields(packed, mode, m, ldx, x.dtype) | {"static_scale": pointer(scale)}
    lowering.keep += [packed, scale]
    products = [(packed.address, bias_address(lowering, bias, x.dtype), y)]
    lowering.emit("packed_linear", (), None, [(rows_in, ())], joint=joint, products=products)
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
    """Lower a packed layer by its tensors; torch computes layers with outlier columns."""
    if threshold is not None or columns is not None:
        raise UntraceableError("columns with outliers")
    operands: list[Any] = [lowering.tensor_of(v) if isinstance(v, Value) else v for v in weight]
    packed = PackedCodes(*operands)
    static_scale = None if scale is None else lowering.tensor_of(scale).float()
    return single_product(lowering, x, packed, bias, node.meta["val"].shape, (rounded, bits, clip), static_scale)


def mm(lowering: Lowering, node: Node, x: Value, w: Value, bias: Value | None = None) -> Value:
    """Lower the product of x with the transpose of a dense weight, which is read in place."""
    if not w.constant or w.sizes[0] < 1 or w.strides != (1, w.sizes[0]):
        raise UntraceableError("a product that is not with the rows of a weight")
    weight = lowering.tensor_of(w).T
    if weight.dtype not in TYPES or (weight.dtype is torch.float32 and x.dtype is not torch.float32):
        raise UntraceableError(f"products of {weight.dtype}")
    if x.count > FEW[x.dtype] * x.sizes[-1]:
        raise UntraceableError("a product of many rows, which torch computes faster")
    return single_product(lowering, x, packed_rows(weight), bias, node.meta["val"].shape, UNROUNDED)


def addmm(
    lowering: Lowering, node: Node, bias: Value, x: Value, w: Value, *, beta: float = 1, alpha: float = 1
) -> Value:
    """Lower a product with a bias."""
    if beta != 1 or alpha != 1 or len(bias.sizes) != 1:
        raise UntraceableError("a product with factors")
    return mm(lowering, node, x, w, bias)


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
    """Lower a Hadamard rotation of inputs or outputs."""
    matrix = rotation_steps(order, outputs)
    rows_in, m, ldx = contiguous_rows(lowering, x)
    if matrix is None or not signs.constant or (dtype or x.dtype) not in TYPES:
        raise UntraceableError("a rotation that plain torch computes")
    output, sign_tensor = lowering.empty(x.sizes, dtype or x.dtype), lowering.tensor_of(signs).contiguous()
    lowering.keep += [matrix, sign_tensor]
    fields = {
        "matrix": matrix.address,
        "signs": sign_tensor.data_ptr(),
        "bias": bias_address(lowering, bias, torch.float32),
        "m": m,
        "width": ldx,
        "ldx": ldx,
        "x_type": TYPES[x.dtype],
        "y_type": TYPES[output.dtype],
        "outputs": int(outputs),
    }
    lowering.emit("rotate", (), (output, ()), [(rows_in, ())], rotation=fields)
    return output


PRODUCTS: dict[Any, Callable[..., Any]] = {
    torch.ops.compress.packed_linear.default: packed_linear,
    torch.ops.compress.codes_linear.default: codes_linear,
    torch.ops.compress.rotate.default: rotate,
    aten.mm.default: mm,
    aten.addmm.default: addmm,
}
