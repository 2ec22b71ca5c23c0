"""Floating-point dtypes by the names that recipes and configurations use, and the fast one of a processor."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

SAFETENSORS: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""Dtypes by their names in the headers of safetensors files."""
SAFETENSORS |= {  # dtypes of newer versions of torch
    name: getattr(torch, dtype)
    for name, dtype in (("U16", "uint16"), ("U32", "uint32"), ("U64", "uint64"), ("F8_E8M0", "float8_e8m0fnu"))
    if hasattr(torch, dtype)
}


SLICE = 1 << 22
"""Numbers of a slice of a tensor that is cast or rounded in slices."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return 'float32' for torch.float32."""
    return str(dtype).removeprefix("torch.")


def has_bfloat16_products() -> bool:
    """Whether the processor has instructions that multiply bfloat16 matrices; True for processors other than x86.

    Without these instructions torch computes bfloat16 products several times more slowly than those of float32.
    """
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is not None:
        capabilities_found = capabilities()
        x86 = capabilities_found.get("architecture") in ("x86_64", "amd64", "AMD64")
        return not x86 or bool(capabilities_found.get("avx512_bf16") or capabilities_found.get("amx_bf16"))
    older = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return all(check is None for check in older) or any(check is not None and check() for check in older)


def fast_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the compute dtype for weights in `dtype`: float32 for bfloat16 that the processor computes slowly."""
    slow = dtype == torch.bfloat16 and device.type == "cpu" and not has_bfloat16_products()
    return torch.float32 if slow else dtype


def in_slices(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return views of a tensor along its first dimension, of at most `SLICE` numbers unless a row has more."""
    if tensor.numel() <= SLICE:
        return (tensor,)
    return tensor.split(max(1, SLICE * len(tensor) // tensor.numel()))


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Round the values of a floating tensor to a narrower dtype, in its own dtype; return the tensor itself if none
    changes.

    A slice is rounded at a time, so that a large tensor takes memory for one copy at most.
    """
    narrower = tensor.is_floating_point() and torch.finfo(dtype).bits < torch.finfo(tensor.dtype).bits
    if not narrower or tensor.is_meta:
        return tensor
    if all(torch.equal(part.to(dtype).to(part.dtype), part) for part in in_slices(tensor)):
        return tensor
    result = torch.empty_like(tensor)
    for target, part in zip(in_slices(result), in_slices(tensor), strict=True):
        target.copy_(part.to(dtype))
    return result


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor infinity.

    Unlike `isfinite`, this allocates no tensor of its size.
    """
    return tensor.numel() == 0 or bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all())


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor (uint8).

    A dimension of one element may have any stride and still count as contiguous, but not as bytes.
    """
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
