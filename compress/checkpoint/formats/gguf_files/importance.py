"""The importance of the inputs of a layer, from an importance matrix of llama.cpp with the names of GGUF files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PretrainedConfig

from compress.checkpoint.containers.files import user_path
from compress.checkpoint.containers.imatrix import Entries, read_imatrix
from compress.checkpoint.formats.gguf_files.architecture import EXPERT, architecture_of, architectures, expert_count
from compress.errors import CannotRun, ModelError, TargetError, call_foreign


class LayerImportance:
    """The importance of the inputs of the layers of a model, from files.

    Args:
        config: configuration of the language model.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self._config = config

    def __call__(self, name: str, file: str, width: int) -> Float[Tensor, " in"]:
        """Return the mean square of each input of a layer.

        Args:
            name: full name of the layer.
            file: path of the importance matrix.
            width: number of inputs.

        Raises:
            ModelError: for a model whose tensors have no names in GGUF files, and a file that is no importance matrix.
            TargetError: for a layer that the file does not have, or has with other sizes.
        """
        entries, (entry, *_), number = self._entries(file), *self.entries_of(name)
        if entry not in entries:
            raise TargetError(
                f"imatrix {file}: it has no entry {entry} for {name}, but {len(entries)} others, such as "
                f"{', '.join(list(entries)[:2])}; use the file of this model, or ignore: [LAYER]"
            )
        try:
            values = entries[entry]()
        except (ValueError, OSError) as error:
            raise ModelError(f"imatrix {file}: {error}") from error
        members = 1 if number is None else expert_count(self._config) or 1
        if len(values) != members * width:
            raise TargetError(
                f"imatrix {file}: {entry} has {len(values)} values, but {name} has {width} inputs"
                f"{'' if number is None else f' in {members} experts'}; it is of another model"
            )
        return values.view(members, width)[number or 0]

    def entries_of(self, name: str) -> tuple[list[str], int | None]:
        """Return the names of the entries of a layer, which are equal, and the number of its expert.

        Raises:
            ModelError: for a model or a layer without a name in GGUF files.
        """
        architecture = architecture_of(self._config)
        if architecture is None:
            supported = ", ".join(architectures())
            raise ModelError(f"imatrix: {self._config.model_type} has no names in GGUF files, only {supported}")
        name_in_file = architecture.tensor_names(self._config.num_hidden_layers)
        parts = architecture.parts(f"{name}.weight", self._config)
        whole_rows = [part for part, values in parts.items() if "stacked" not in values] or [f"{name}.weight"]
        entries = [entry for part in whole_rows if (entry := name_in_file(part)) is not None]
        if not entries:
            raise ModelError(f"imatrix: {name} has no name in GGUF files of the architecture {architecture.name}")
        number = EXPERT.search(f"{name}.")
        return entries, None if number is None else int(number[1])

    def _entries(self, file: str) -> Entries:
        path: Path = user_path(file)
        try:
            return call_foreign(read_imatrix, path)
        except CannotRun as error:
            raise ModelError(f"imatrix {file}: it is no importance matrix that can be read: {error.cause}") from error


def stacked(parts: Sequence[tuple[int | None, Float[Tensor, " in"], int]]) -> tuple[Tensor, Tensor]:
    """Return the sums [experts, in] and counts [experts] of a matrix.

    Args:
        parts: of each expert its number (None: there are none), the sums of its inputs, and the count of its rows.
    """
    ordered = sorted(parts, key=lambda part: part[0] or 0)
    return torch.stack([sums for _, sums, _ in ordered]), torch.tensor([float(count) for *_, count in ordered])
