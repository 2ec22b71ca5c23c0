"""Files in place of memory: a bounded store of the activations between blocks, and solved weights of a block."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compress.errors import SaveError
from compress.models.tensors import assign
from compress.numerics.dtypes import SAFETENSORS

LEAST_BYTES = 1 << 20  # of modules that are held in a file; smaller ones are not worth it


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


def hold_in_file(modules: Sequence[nn.Module], within: Path) -> None:
    """Replace the tensors of modules by equal views of a file, whose pages the system takes back when it needs memory.

    The file has no name any more, so it ends with the last view of it. Tensors stay where they are if they are views of
    larger ones, belong to several modules, or are on an accelerator, and all of them if they are smaller than
    `LEAST_BYTES` together or the system does not remove files with views (Windows).

    Args:
        modules: the modules.
        within: folder in which a temporary folder is created.

    Raises:
        SaveError: if the file cannot be written.
    """
    states = [module.state_dict() for module in modules]
    uses = Counter(tensor.data_ptr() for state in states for tensor in state.values())
    tensors = {
        f"{number}.{name}": tensor
        for number, state in enumerate(states)
        for name, tensor in state.items()
        if uses[tensor.data_ptr()] == 1 and _can_move(tensor)
    }
    if os.name != "posix" or sum(tensor.nbytes for tensor in tensors.values()) < LEAST_BYTES:
        return
    try:
        within.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory("", "compress-weights-", within, ignore_cleanup_errors=True) as folder:
            path = Path(folder) / "weights.safetensors"
            save_file(tensors, path)
            views = load_file(path)
    except (OSError, SafetensorError) as error:
        message = f"solved weights of a block cannot be written to {within} ({error}); free disk space there"
        raise SaveError(message) from error
    for number, module in enumerate(modules):
        prefix = f"{number}."
        assign(module, {name.removeprefix(prefix): view for name, view in views.items() if name.startswith(prefix)})


def _can_move(tensor: Tensor) -> bool:
    """Return whether a tensor is on the CPU, of a dtype of safetensors, and the only content of its memory."""
    is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor.device.type == "cpu" and tensor.dtype in SAFETENSORS.values() and is_whole
