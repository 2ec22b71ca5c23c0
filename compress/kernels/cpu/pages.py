"""Memory in large pages for the weights of all layers, one after the other.

A weight of some hundred kilobytes is too small for a large page of its own. On small pages a processor reads it a tenth
slower: it looks up every page, and reads ahead only inside of one.
"""

from __future__ import annotations

import threading
from math import prod

import torch
from torch import Tensor

from compress.native.library import library

CHUNK, PAGE, LINE = 32 << 20, 2 << 20, 64  # bytes


class Pages:
    """Hands out tensors that stand in chunks of large pages; a chunk is freed with the last of its tensors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor without values."""
        size = prod(shape) * dtype.itemsize
        if size > CHUNK // 8:
            found = torch.empty(shape, dtype=dtype)
            _advise(found)
            return found
        with self._lock:
            if self._used + size > self._chunk.numel():
                raw = torch.empty(CHUNK + PAGE, dtype=torch.uint8)
                first = -raw.data_ptr() % PAGE
                self._chunk, self._used = raw[first : first + CHUNK], 0
                _advise(self._chunk)
            begin, self._used = self._used, self._used + -(-size // LINE) * LINE
            return self._chunk[begin : begin + size].view(dtype).view(shape)


def _advise(tensor: Tensor) -> None:
    native = library()
    assert native is not None
    native.compress_advise(tensor.data_ptr(), tensor.nbytes)


PAGES = Pages()
"""Those of this process."""
