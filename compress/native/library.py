"""The shared library of C++ code: its path, its C interface, and the choice of the instruction set."""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache

import torch

from compress.errors import RecipeError
from compress.native.choice import VARIABLE, chosen
from compress.native.compiling import constant_result

NATIVE = f"{__package__}._native"
LANES = 16  # elements of a vector: rows or states that are computed together
OUT_OF_MEMORY = -2  # return value of a function


class Weight(ctypes.Structure):
    """`compress_weight` of compress_cpu.h."""

    _fields_ = [
        ("words", c_void_p),
        ("scale", c_void_p),
        ("zero", c_void_p),
        ("table", c_void_p),
        ("order", c_void_p),
        ("masks", c_void_p),
        ("offsets", c_void_p),
        ("zero_point", c_float),
        ("codec", c_int32),
        ("rows", c_int64),
        ("width", c_int64),
        ("units", c_int64),
        ("group", c_int64),
        ("groups", c_int64),
        ("tables", c_int64),
        ("books", c_int64),
        ("entries", c_int64),
        ("length", c_int64),
        ("stride", c_int64),
        ("step_bits", c_int64),
        ("states", c_int64),
        ("tile_rows", c_int64),
        ("tile_columns", c_int64),
        ("scale_type", c_int64),
        ("zero_type", c_int64),
    ]


class HadamardMatrix(ctypes.Structure):
    """`compress_hadamard` of compress_cpu.h."""

    _fields_ = [
        ("matrices", c_void_p),
        ("lengths", c_void_p),
        ("numbers", c_int64),
        ("count", c_int64),
        ("inner", c_int64),
        ("levels", c_int64),
        ("order", c_int64),
    ]


class Attention(ctypes.Structure):
    """`compress_attention` of compress_cpu.h."""

    _fields_ = [
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("mask", c_void_p),
        ("out", c_void_p),
        ("sizes", c_int64 * 6),
        ("q_strides", c_int64 * 3),
        ("k_strides", c_int64 * 3),
        ("v_strides", c_int64 * 3),
        ("out_strides", c_int64 * 3),
        ("mask_strides", c_int64 * 3),
        ("groups", c_int64),
        ("scale", c_float),
        ("mask_type", c_int32),
        ("causal", c_int32),
        ("threads", c_int32),
    ]


class Columns(ctypes.Structure):
    """`compress_columns` of compress_cpu.h."""

    _fields_ = [
        ("state", c_void_p),
        ("matrix", c_void_p),
        ("scale", c_void_p),
        ("zero", c_void_p),
        ("keep", c_void_p),
        ("old", c_void_p),
        ("pivots", c_void_p),
        ("codes", c_void_p),
        ("values", c_void_p),
        ("moves", c_void_p),
        ("wanted", c_void_p),
        ("levels", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("scale_stride", c_int64),
        ("matrix_stride", c_int64),
        ("entries", c_int64),
        ("lowest", c_float),
        ("highest", c_float),
        ("threads", c_int32),
    ]


class Groups(ctypes.Structure):
    """`compress_groups` of compress_cpu.h."""

    _fields_ = [
        ("weights", c_void_p),
        ("scale", c_void_p),
        ("zero", c_void_p),
        ("importance", c_void_p),
        ("error", c_void_p),
        ("squares", c_void_p),
        ("products", c_void_p),
        ("levels", c_void_p),
        ("rows", c_int64),
        ("groups", c_int64),
        ("size", c_int64),
        ("entries", c_int64),
        ("lowest", c_float),
        ("highest", c_float),
        ("threads", c_int32),
    ]


class Search(ctypes.Structure):
    """`compress_search` of compress_cpu.h."""

    _fields_ = [
        ("sequences", c_void_p),
        ("values", c_void_p),
        ("overlap", c_void_p),
        ("found", c_void_p),
        ("count", c_int64),
        ("steps", c_int64),
        ("length", c_int64),
        ("states", c_int64),
        ("step_bits", c_int64),
        ("threads", c_int32),
    ]


PRODUCT = [c_void_p] * 5 + [c_int64] * 2 + [c_int32] * 3 + [c_float, c_int32]


@cache
def library() -> ctypes.CDLL | None:
    """Load the library and choose its instruction set.

    Returns:
        The library; None if it was not built or COMPRESS_KERNELS is "none".

    Raises:
        RecipeError: if COMPRESS_KERNELS names an instruction set that this machine or this build does not have.
    """
    choice = chosen()
    path = built()
    if path is None or choice == "none":
        return None
    native = ctypes.CDLL(path)
    native.compress_product.argtypes = PRODUCT
    native.compress_products.argtypes = [c_int64, *PRODUCT]
    native.compress_rotate.argtypes = [c_void_p] * 5 + [c_int64] * 3 + [c_int32] * 4
    native.compress_round_columns.argtypes = native.compress_sum_groups.argtypes = [c_void_p]
    native.compress_search_walks.argtypes = [c_void_p]
    native.compress_attend.argtypes = [ctypes.POINTER(Attention)]
    native.compress_decode_walks.argtypes = [c_void_p] * 3 + [c_int64] * 5 + [c_int32]
    native.compress_pack.argtypes = [c_void_p, c_void_p, c_void_p, c_int32]
    native.compress_check_weight.argtypes = [c_void_p, c_int64, c_int64, c_int64]
    native.compress_codes.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_int32]
    native.compress_advise.argtypes = native.compress_release.argtypes = [c_void_p, c_int64]
    native.compress_run.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_int32]
    native.compress_run.restype = c_int64
    native.compress_instruction_sets.restype = c_char_p
    native.compress_use.argtypes = [c_char_p]
    if choice and native.compress_use(choice.encode()) != 0:
        available_sets = native.compress_instruction_sets().decode().replace(",", ", ")
        raise RecipeError(f"{VARIABLE}={choice} is not available here; use one of {available_sets}, or none")
    return native


@constant_result
def available() -> bool:
    """Whether there is a library to call; a constant for torch.compile, which cannot trace ctypes."""
    return library() is not None


def built() -> str | None:
    """Return the path of the shared library, or None if it was not built."""
    spec = importlib.util.find_spec(NATIVE)
    return None if spec is None else spec.origin


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's data, for ctypes."""
    return None if tensor is None else tensor.data_ptr()


def check_status(status: int, refusal: str) -> None:
    """Raise an error if a function of the library did not compute its result.

    Args:
        status: what it returned; 0 if it computed the result.
        refusal: why it refuses arguments, such as "sizes do not fit together".

    Raises:
        MemoryError: if its buffers do not fit into memory.
        RuntimeError: if it refused its arguments.
    """
    if status == OUT_OF_MEMORY:
        raise MemoryError("the buffers of a kernel do not fit into memory")
    if status:
        raise RuntimeError(f"{refusal} (status {status} of the kernel library)")


def instruction_set() -> str:
    """Return the instruction set in use; "none" without kernels."""
    native = library()
    if native is None:
        return "none"
    return chosen() or native.compress_instruction_sets().decode().split(",")[0]
