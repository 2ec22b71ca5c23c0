"""Trellis-coded quantization in C++: the search of paths, and the values of packed paths.

Plain torch writes the costs of all states of all sequences to memory in every step; here a sequence's costs stay in the
cache of the processor that searches it.
"""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.native.library import LANES, Search, check_status, library, pointer


def can_search(tensor: Tensor, states: int, step_bits: int, length: int) -> bool:
    """Whether the library searches paths for tensors like this one. Arguments as in `search`."""
    fits = length <= 2 and 1 << (states - step_bits) >= LANES  # the states of a vector have the same first bits
    return fits and tensor.device.type == "cpu" and tensor.dtype == torch.float32 and library() is not None


def search(
    sequences: Float[Tensor, "n weights"],
    values: Float[Tensor, "states length"],
    step_bits: int,
    overlap: Int[Tensor, " n"] | None = None,
) -> Int[Tensor, "n steps"]:
    """Search the trellis paths of the least squared error.

    Args:
        sequences: the weights of each sequence.
        values: values of the 2^L states; a step shifts `step_bits` bits in.
        step_bits: bits of a step.
        overlap: first L - step_bits bits of the first state and last L - step_bits bits of the last state, which are
            then equal; None: not constrained.

    Returns:
        The states of the best paths (int64).

    Raises:
        MemoryError: if the costs do not fit into memory.
    """
    native = library()
    assert native is not None
    count, length = len(sequences), values.shape[1]
    sequences, by_weight = sequences.contiguous(), values.T.contiguous()
    steps, overlaps = sequences.shape[1] // length, None if overlap is None else overlap.to(torch.int32).contiguous()
    if sequences.shape[1] != steps * length or (overlaps is not None and overlaps.shape != (count,)):
        raise ValueError(f"sequences {list(sequences.shape)} do not have {steps} steps of {length}, or an overlap each")
    paths = torch.empty(count, steps, dtype=torch.int32)
    arguments = Search(
        sequences=pointer(sequences),
        values=pointer(by_weight),
        overlap=pointer(overlaps),
        found=pointer(paths),
        count=count,
        steps=steps,
        length=length,
        states=len(values).bit_length() - 1,
        step_bits=step_bits,
        threads=torch.get_num_threads(),
    )
    status = native.compress_search_walks(ctypes.addressof(arguments))
    check_status(status, "sizes do not fit together")
    return paths.long()


def can_decode(codes: Tensor, values: Tensor) -> bool:
    """Whether the library decodes paths of tensors like these. Arguments as in `decode`."""
    fits = codes.device.type == "cpu" and values.dtype == torch.float32 and values.shape[1] <= 2
    return fits and library() is not None


def decode(
    codes: Int[Tensor, "n bytes"], values: Float[Tensor, "states length"], step_bits: int
) -> Float[Tensor, "n weights"]:
    """Return the values of the states of tail-biting paths, packed by `trellis.pack`."""
    native, states = library(), len(values).bit_length() - 1
    assert native is not None
    if codes.dtype != torch.uint8:
        raise ValueError(f"packed paths are bytes, not {codes.dtype}")
    codes, values, (count, size) = codes.contiguous(), values.contiguous(), codes.shape
    values_of_paths = torch.empty(count, size * 8 // step_bits * values.shape[1])
    status = native.compress_decode_walks(
        pointer(codes),
        pointer(values),
        pointer(values_of_paths),
        count,
        size,
        states,
        step_bits,
        values.shape[1],
        torch.get_num_threads(),
    )
    check_status(status, "sizes do not fit together")
    return values_of_paths
