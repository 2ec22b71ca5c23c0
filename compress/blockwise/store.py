"""A bounded store of the activations between blocks: what exceeds its limit is in files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.errors import SaveError


class ActivationStore:
    """A list of replaceable tensors; tensors beyond a size limit are stored in files.

    Tensors on an accelerator stay there, so the limit also bounds that device's memory. A tensor that was read stays
    valid after its entry is replaced.

    Args:
        limit_bytes: size limit of the tensors in memory.
        within: folder in which a temporary folder is created; None for the system's temporary folder, which many
            machines keep in memory.

    Raises:
        SaveError: if a file cannot be written.
    """

    def __init__(self, limit_bytes: int, within: Path | None = None) -> None:
        self._limit = limit_bytes
        self._within = within
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._items: list[Tensor | Path] = []
        self._devices: dict[int, str] = {}
        self._bytes = 0

    def empty(self) -> ActivationStore:
        """Create an empty store with the same limit and folder."""
        return ActivationStore(self._limit, self._within)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Tensor:
        item = self._items[index]
        return item if isinstance(item, Tensor) else load_file(item, device=self._devices[index])["x"]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    @property
    def in_files(self) -> int:
        """The number of tensors in files."""
        return sum(isinstance(item, Path) for item in self._items)

    def append(self, tensor: Tensor) -> None:
        """Append a tensor."""
        self._items.append(tensor.new_empty(0))
        self[len(self._items) - 1] = tensor

    def __setitem__(self, index: int, tensor: Tensor) -> None:
        previous = self._items[index]
        if isinstance(previous, Tensor):
            self._bytes -= previous.numel() * previous.element_size()
        size = tensor.numel() * tensor.element_size()
        if self._bytes + size > self._limit:
            self._items[index] = self._write(index, tensor)
            return
        self._items[index] = tensor
        self._bytes += size
        if isinstance(previous, Path):
            previous.unlink()

    def _write(self, index: int, tensor: Tensor) -> Path:
        """Write a tensor to a new file that replaces the previous one.

        Tensors that were read may be views of the previous file.
        """
        try:
            if self._folder is None:
                if self._within is not None:
                    self._within.mkdir(parents=True, exist_ok=True)
                self._folder = tempfile.TemporaryDirectory(prefix="compress-activations-", dir=self._within)
            path = Path(self._folder.name) / f"activations-{index:05d}.safetensors"
            part = path.with_suffix(".part")
            save_file({"x": tensor.contiguous()}, part)
            os.replace(part, path)
        except (OSError, SafetensorError) as error:
            folder = self._within or tempfile.gettempdir()
            message = f"activations between blocks cannot be written to {folder} ({error})"
            hint = "free disk space there, or use fewer or shorter calibration sequences"
            raise SaveError(f"{message}; {hint}") from error
        self._devices[index] = str(tensor.device)
        return path
