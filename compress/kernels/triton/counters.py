"""Counters of the tiles whose sums several programs share."""

from __future__ import annotations

import torch
from torch import Tensor

COUNTERS = 1 << 20  # counters of the tiles of the calls of CUDA graphs: some hundred thousand calls of small batches


class Counters:
    """Zeros in which the programs of a call count the parts of a tile that are done, and leave zeros.

    Calls of one stream follow each other and share them. Each call in a CUDA graph has its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.taken = device, 0
        self.pool = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        self.streams: dict[int, Tensor] = {}

    def of_graph(self, tiles: int) -> Tensor:
        """Counters for one call, which another call never gets."""
        first, self.taken = self.taken, self.taken + tiles
        return self.pool[first : first + tiles]

    def of_stream(self, stream: int, tiles: int) -> Tensor:
        """Counters for the calls of a stream."""
        if stream not in self.streams or len(self.streams[stream]) < tiles:
            self.streams[stream] = torch.zeros(max(tiles, 1024), dtype=torch.int32, device=self.device)
        return self.streams[stream]


_counters: dict[torch.device, Counters] = {}


def counters(device: torch.device, tiles: int) -> Tensor:
    """Counters for a call on the current stream."""
    on_gpu = device.type == "cuda"
    capturing, known = on_gpu and torch.cuda.is_current_stream_capturing(), _counters.get(device)
    if capturing and (known is None or known.taken + tiles > COUNTERS):
        return torch.zeros(tiles, dtype=torch.int32, device=device)
    known = known or _counters.setdefault(device, Counters(device))
    if capturing:
        return known.of_graph(tiles)
    return known.of_stream(torch.cuda.current_stream(device).cuda_stream if on_gpu else 0, tiles)
