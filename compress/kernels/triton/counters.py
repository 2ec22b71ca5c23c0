"""Counters of the output tiles whose sums several programs share."""

from __future__ import annotations

import torch
from torch import Tensor

COUNTERS = 1 << 20  # counters of the tiles of the calls of CUDA graphs: some hundred thousand calls of small batches


class Counters:
    """Zeros in which the programs of a call count the completed parts of a tile; the last program resets them.

    Calls of one stream are sequential and share counters. Each call in a CUDA graph has its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.taken = device, 0
        self.pool = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        self.streams: dict[int, Tensor] = {}

    def of_graph(self, tiles: int) -> Tensor:
        """Return counters for one call, which no other call gets."""
        start, self.taken = self.taken, self.taken + tiles
        return self.pool[start : start + tiles]

    def of_stream(self, stream: int, tiles: int) -> Tensor:
        """Return counters for the calls of a stream."""
        if stream not in self.streams or len(self.streams[stream]) < tiles:
            self.streams[stream] = torch.zeros(max(tiles, 1024), dtype=torch.int32, device=self.device)
        return self.streams[stream]


_counters: dict[torch.device, Counters] = {}


def counters(device: torch.device, tiles: int) -> Tensor:
    """Return counters for a call on the current stream."""
    on_gpu = device.type == "cuda"
    capturing, device_counters = on_gpu and torch.cuda.is_current_stream_capturing(), _counters.get(device)
    if capturing and (device_counters is None or device_counters.taken + tiles > COUNTERS):
        return torch.zeros(tiles, dtype=torch.int32, device=device)
    device_counters = device_counters or _counters.setdefault(device, Counters(device))
    if capturing:
        return device_counters.of_graph(tiles)
    return device_counters.of_stream(torch.cuda.current_stream(device).cuda_stream if on_gpu else 0, tiles)
