"""Recognize how a checkpoint of any program stores a module, from the names, shapes and dtypes of its tensors.

No value is read. Each function below knows one family of layouts; a new one is a function and an entry of `LAYOUTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from compress.checkpoint.containers.safetensors import Header

Tensors = Mapping[str, Header]
"""The tensors of a module by their names inside of it."""

WEIGHT = "weight"
BNB_STATE = "weight.quant_state.bitsandbytes__"
AWQ_PER_WORD = 8
WORD = 32
MX_GROUP = 32


@dataclass(frozen=True)
class Recognized:
    """How a module is stored.

    grid: the numbers of the weight, such as int4. count: the number of weights. shape: (out, in), None if the header
    does not tell. group_size: weights that share a scale, 'channel', 'tensor' or 'RxC' for blocks; None: no scales.
    parts: what the tensors hold.
    """

    grid: str
    count: int
    shape: tuple[int, ...] | None
    group_size: int | str | None = None
    parts: tuple[str, ...] = ("dense",)


def recognize(tensors: Tensors, config: Mapping[str, Any]) -> Recognized:
    """Recognize how a module is stored. config: the `quantization_config` of the checkpoint, or an empty one."""
    for layout in LAYOUTS:
        recognized = layout(tensors, config)
        if recognized is not None:
            return recognized
    count = max((header.count for header in tensors.values()), default=0)
    return Recognized(
        f"unknown ({config.get('quant_method', 'no quantization_config')})", count, None, None, ("unknown",)
    )


def _group(shape: tuple[int, int], scale: Header) -> int | str:
    """The weights that share a scale of a matrix [out, in]."""
    rows, width = shape
    if scale.count == 1:
        return "tensor"
    if len(scale.shape) < 2 or scale.shape[1] == 1:
        return "channel"
    down, across = scale.shape[0], scale.shape[1]
    size = -(-width // across)
    return size if down == rows else f"{-(-rows // down)}x{size}"


def _matrix(header: Header) -> tuple[int, int] | None:
    return (header.shape[0], header.shape[1]) if len(header.shape) == 2 else None


def _parts(tensors: Tensors, *names: str) -> tuple[str, ...]:
    kinds = {"zero": "zero points", "g_idx": "group index", "absmax": "block scales"}
    kinds |= dict.fromkeys(("input_scale", "input_global_scale"), "static inputs")
    extra = [text for key, text in kinds.items() if any(key in name for name in tensors)]
    return ("codes", *names, *extra)


def _bits_of(config: Mapping[str, Any], default: int) -> int:
    """Return the bits of weights that a config states for all layers alike."""
    groups = config.get("config_groups")
    listed = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") for group in listed if isinstance(group, dict)]
    stated = [weight.get("num_bits") for weight in weights if isinstance(weight, dict)] or [config.get("bits")]
    bits = {b for b in stated if isinstance(b, int) and 0 < b <= WORD}
    return bits.pop() if len(bits) == 1 else default


def compressed_words(tensors: Tensors, config: Mapping[str, Any]) -> Recognized | None:
    """compressed-tensors: packed integers in 32-bit words, or 4-bit floats in bytes."""
    packed, scale = tensors.get("weight_packed"), tensors.get("weight_scale")
    matrix = None if packed is None else _matrix(packed)
    if packed is None or scale is None or matrix is None:
        return None
    rows, words = matrix
    if packed.dtype == "U8":
        shape = rows, 2 * words
        grid = "mxfp4" if scale.dtype == "U8" else "nvfp4"
    else:
        bits = _bits_of(config, 4)
        shape, grid = (rows, words * WORD // bits), f"int{bits}"
    return Recognized(grid, shape[0] * shape[1], shape, _group(shape, scale), _parts(tensors))


def halves_in_bytes(tensors: Tensors, config: Mapping[str, Any]) -> Recognized | None:
    """Two 4-bit floats per byte: NVFP4 of Model Optimizer, and experts in MXFP4, all of a block in one tensor."""
    weight, scale = tensors.get(WEIGHT), tensors.get("weight_scale")
    blocks, scales = tensors.get("blocks"), tensors.get("scales")
    if blocks is not None and scales is not None and len(blocks.shape) > 2:
        shape = (*blocks.shape[:-2], 2 * blocks.shape[-2] * blocks.shape[-1])
        return Recognized("mxfp4", 2 * blocks.count, shape, 2 * blocks.shape[-1], _parts(tensors))
    matrix = None if weight is None else _matrix(weight)
    if weight is None or matrix is None or scale is None or "weight_scale_2" not in tensors or weight.dtype != "U8":
        return None
    shape = matrix[0], 2 * matrix[1]
    return Recognized("nvfp4", 2 * weight.count, shape, _group(shape, scale), _parts(tensors))


def words_along_inputs(tensors: Tensors, config: Mapping[str, Any]) -> Recognized | None:
    """GPTQ: 32-bit words along the inputs; AutoAWQ: words of 8 outputs."""
    words, scale, zeros = (tensors.get(name) for name in ("qweight", "scales", "qzeros"))
    matrix, scales = None if words is None else _matrix(words), None if scale is None else _matrix(scale)
    if matrix is None or scales is None:
        return None
    groups, out = scales
    if config.get("quant_method") == "awq" or (out == AWQ_PER_WORD * matrix[1] and "g_idx" not in tensors):
        bits, width = 4, matrix[0]
    else:
        zeros_shape = None if zeros is None else _matrix(zeros)
        bits = _bits_of(config, 4 if zeros_shape is None or not out else max(1, zeros_shape[1] * WORD // out))
        width = matrix[0] * WORD // bits
    size = "channel" if groups == 1 else -(-width // max(1, groups))
    return Recognized(f"int{bits}", out * width, (out, width), size, _parts(tensors))


def blocks_of_bytes(tensors: Tensors, config: Mapping[str, Any]) -> Recognized | None:
    """bitsandbytes: nf4 or fp4 in bytes with a scale per block, or int8 with a scale per row."""
    weight, absmax, rows = (tensors.get(name) for name in (WEIGHT, "weight.absmax", "SCB"))
    if weight is None:
        return None
    if rows is not None:
        return Recognized("int8", weight.count, weight.shape, "channel", ("codes",))
    if absmax is None:
        return None
    kind = next((name.removeprefix(BNB_STATE) for name in tensors if name.startswith(BNB_STATE)), "4-bit")
    nested = ("double quantization",) if "weight.nested_absmax" in tensors else ()
    return Recognized(kind, 2 * weight.count, None, 2 * weight.count // max(1, absmax.count), _parts(tensors, *nested))


def affine_words(tensors: Tensors, config: Mapping[str, Any]) -> Recognized | None:
    """MLX: 32-bit words along the inputs, with a scale and a minimum per group. config: with the entry of the layer."""
    words, scale, size, bits = tensors.get(WEIGHT), tensors.get("scales"), config.get("group_size"), config.get("bits")
    matrix, scales = None if words is None else _matrix(words), None if scale is None else _matrix(scale)
    if matrix is None or scales is None or "biases" not in tensors or not isinstance(size, int):
        return None
    width = scales[1] * size
    if bits != matrix[1] * WORD // max(1, width):
        return None
    return Recognized(f"uint{bits}", matrix[0] * width, (matrix[0], width), size, ("codes", "minima"))


def scaled_bytes(tensors: Tensors, config: Mapping[str, Any]) -> Recognized | None:
    """One byte per weight with scales: FP8 and int8 of compressed-tensors, and FP8 in blocks."""
    weight = tensors.get(WEIGHT)
    scale = next((tensors[name] for name in ("weight_scale", "weight_scale_inv") if name in tensors), None)
    matrix = None if weight is None else _matrix(weight)
    if weight is None or scale is None or matrix is None:
        return None
    grids = {"F8_E4M3": "fp8_e4m3", "F8_E5M2": "fp8_e5m2", "I8": "int8"}
    grid, block = grids.get(weight.dtype, weight.dtype.lower()), config.get("weight_block_size")
    size = f"{block[0]}x{block[1]}" if isinstance(block, list) and len(block) == 2 else _group(matrix, scale)
    if grid == "fp8_e4m3" and scale.dtype == "U8" and size == MX_GROUP:
        grid = "mxfp8"
    return Recognized(grid, weight.count, matrix, size, _parts(tensors))


def tensor_subclasses(tensors: Tensors, config: Mapping[str, Any]) -> Recognized | None:
    """torchao: a weight in several tensors; the config names their class."""
    data = next((header for name, header in tensors.items() if name.endswith("qdata")), None)
    if data is None or config.get("quant_method") != "torchao":
        return None
    kind = config.get("quant_type")
    default = kind.get("default") if isinstance(kind, dict) else None
    name = default.get("_type") if isinstance(default, dict) else kind
    stated = default.get("_data") if isinstance(default, dict) else None
    size = stated.get("group_size") if isinstance(stated, dict) else None
    per_byte = 2 if "Int4" in str(name) and data.dtype in ("U8", "I8") else 8 if "Int4" in str(name) else 1
    return Recognized(str(name), data.count * per_byte, None, size if isinstance(size, int) else None, _parts(tensors))


def plain(tensors: Tensors, config: Mapping[str, Any]) -> Recognized | None:
    """Weights that are not quantized: all tensors are floats."""
    if not all(header.floating or header.dtype == "BOOL" for header in tensors.values()):
        return None
    largest = tensors.get(WEIGHT) or max(tensors.values(), key=lambda header: header.count)
    return Recognized("dense", largest.count, largest.shape)


LAYOUTS: tuple[Callable[[Tensors, Mapping[str, Any]], Recognized | None], ...] = (
    compressed_words,
    halves_in_bytes,
    words_along_inputs,
    blocks_of_bytes,
    affine_words,
    scaled_bytes,
    tensor_subclasses,
    plain,
)
"""The first function that recognizes a module says how it is stored."""
