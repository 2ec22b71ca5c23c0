"""Memory in large pages for the weights of all layers, one after the other.

A weight of some hundred kilobytes is too small for a large page, and one of some megabytes would begin and end on small
pages. A processor reads small pages a tenth slower: it looks up every page, and prefetches only within a page. The
memory is new from the system, since memory of the allocator may be in small pages.
"""

from __future__ import annotations

import mmap
import threading
from math import prod

import torch
from torch import Tensor

from compress.native.library import library

CHUNK, PAGE, LINE = 32 << 20, 2 << 20, 64  # bytes


class Pages:
    """Allocates tensors in chunks of large pages, or in separate pages if they are larger than a chunk.

    A chunk is freed with the last of its tensors. Unused memory of a chunk is not resident until it is written.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialized tensor.

        Raises:
            MemoryError: if the memory cannot be mapped.
        """
        size = prod(shape) * dtype.itemsize
        if size > CHUNK:
            return _large(size).view(dtype).view(shape)
        with self._lock:
            if self._used + size > self._chunk.numel():
                self._chunk, self._used = _large(CHUNK), 0
            begin, self._used = self._used, self._used + -(-size // LINE) * LINE
            return self._chunk[begin : begin + size].view(dtype).view(shape)


def _large(size: int) -> Tensor:
    """Map bytes from the start of a large page on.

    Raises:
        MemoryError: if the memory cannot be mapped.
    """
    native = library()
    assert native is not None
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        raw = torch.frombuffer(mmap.mmap(-1, size + PAGE, **private), dtype=torch.uint8)
    except OSError as error:
        raise MemoryError(f"can't allocate memory: {size + PAGE} bytes for packed weights") from error
    native.compress_advise(raw.data_ptr(), raw.nbytes)
    offset = -raw.data_ptr() % PAGE
    return raw[offset : offset + size]


PAGES = Pages()
"""The pages of this process."""
