"""Typed inputs of models: a batch of one forward pass, and the examples that calibration and evaluation read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

IGNORED = -100
"""Label of positions without a target, the default of torch's losses."""
IDS, DECODER_IDS = "input_ids", "decoder_input_ids"
MASK, LABELS = "attention_mask", "labels"
TEXTS = (IDS, DECODER_IDS, MASK)
"""Inputs with one entry for every token of a text, which may be cut."""
INPUT = "inputs."
"""Prefix of inputs among the tensors of a file."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs and labels of one forward pass, as a data collator of transformers returns them.

    No position of a batch is padding, except at the end of labels and decoder inputs of training batches.

    Attributes:
        inputs: keyword arguments of the model by name. The first one has an entry for every sequence; the others have
            equally many entries for each sequence, such as the patches of its images.
        labels: target tokens [sequences, places], `IGNORED` at places without one. None: the kind of the model makes
            targets of the inputs, or has none.
    """

    inputs: Mapping[str, Tensor]
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Batch:
        """Return the batch of the tensors that `tensors` returned; others are left out."""
        inputs = {name.removeprefix(INPUT): tensor for name, tensor in tensors.items() if name.startswith(INPUT)}
        return cls(inputs, tensors.get(LABELS))

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, for a file or a digest."""
        labels = {} if self.labels is None else {LABELS: self.labels}
        return {INPUT + name: tensor for name, tensor in self.inputs.items()} | labels

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device."""
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return Batch(inputs, None if self.labels is None else self.labels.to(device))

    def select(self, rows: Sequence[int]) -> Batch:
        """Return some sequences."""
        count, index = len(self), list(rows)

        def chosen(tensor: Tensor) -> Tensor:
            return tensor.unflatten(0, (count, -1))[index].flatten(0, 1)

        inputs = {name: chosen(tensor) for name, tensor in self.inputs.items()}
        return Batch(inputs, None if self.labels is None else self.labels[index])

    def split(self) -> list[Batch]:
        """Return each sequence as a batch."""
        return [self] if len(self) == 1 else [self.select([row]) for row in range(len(self))]

    def beginning(self, tokens: int) -> Batch:
        """Return the first sequence, at most so many tokens of each of its texts; others than texts are not cut."""
        sequence = self.select([0])
        if not set(sequence.inputs) <= set(TEXTS):
            return sequence
        inputs = {name: tensor[:, :tokens] for name, tensor in sequence.inputs.items()}
        return Batch(inputs, None if sequence.labels is None else sequence.labels[:, :tokens])

    @property
    def places(self) -> int:
        """The positions at which a model of tokens answers: those of the decoder."""
        return self.inputs[DECODER_IDS if DECODER_IDS in self.inputs else IDS].shape[1]

    @property
    def length(self) -> int:
        """The tokens of a sequence, of all its texts."""
        return sum(self.inputs[name].shape[1] for name in (IDS, DECODER_IDS) if name in self.inputs)

    def content(self) -> bytes:
        """Return the bytes of all tensors, without decoder inputs, which follow from the labels."""
        tensors = {name: tensor for name, tensor in self.tensors().items() if name != INPUT + DECODER_IDS}
        return b"".join(_bytes(tensor) for tensor in tensors.values())

    def shape(self, labels: bool = True) -> tuple[object, ...]:
        """Return what batches that are joined share. labels: whether also the length of the labels."""
        padded = () if labels else (INPUT + DECODER_IDS, LABELS)
        return tuple((name, tuple(tensor.shape)) for name, tensor in self.tensors().items() if name not in padded)


def _bytes(tensor: Tensor) -> bytes:
    array = tensor.cpu().contiguous().numpy()
    return array.tobytes() if tensor.is_floating_point() else array.astype("<i8").tobytes()


def joined(batches: Sequence[Batch]) -> Batch:
    """Return one batch of the sequences of several; shorter labels and decoder inputs are padded at their ends."""
    if len(batches) == 1:
        return batches[0]
    tensors = {name: [batch.tensors()[name] for batch in batches] for name in batches[0].tensors()}
    return Batch.of_tensors(
        {name: _stacked(parts, IGNORED if name == LABELS else 0) for name, parts in tensors.items()}
    )


def _stacked(tensors: Sequence[Tensor], fill: int) -> Tensor:
    if len({tensor.shape[1:] for tensor in tensors}) == 1:
        return torch.cat(list(tensors))
    return pad_sequence([row for tensor in tensors for row in tensor], batch_first=True, padding_value=fill)


@dataclass(frozen=True, eq=False)
class Examples:
    """Calibration or evaluation data: sequences, each a `Batch` of one; they may have several shapes.

    Attributes:
        sequences: the sequences, one `Batch` each.
    """

    sequences: tuple[Batch, ...]

    @classmethod
    def of_ids(cls, ids: Int[Tensor, "sequences length"]) -> Examples:
        """Return token ids as examples of models of one text."""
        return cls(tuple(Batch({IDS: row}) for row in ids.split(1)))

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.sequences)

    @overload
    def __getitem__(self, rows: int) -> Batch: ...
    @overload
    def __getitem__(self, rows: slice | Sequence[int]) -> Examples: ...
    def __getitem__(self, rows: int | slice | Sequence[int]) -> Batch | Examples:
        if isinstance(rows, int):
            return self.sequences[rows]
        return Examples(self.sequences[rows] if isinstance(rows, slice) else tuple(self.sequences[row] for row in rows))

    def to(self, device: torch.device | str) -> Examples:
        """Return the examples on a device."""
        return Examples(tuple(example.to(device) for example in self.sequences))

    @property
    def length(self) -> int:
        """The most tokens of a sequence."""
        return max(example.length for example in self.sequences)

    @property
    def tokens(self) -> int:
        """The tokens of all sequences."""
        return sum(example.length for example in self.sequences)

    def sha256(self) -> str:
        """Return the hash of the contents, one sequence after the other; of token ids as little-endian int64."""
        digest = hashlib.sha256()
        for example in self.sequences:
            digest.update(example.content())
        return digest.hexdigest()

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name and number of the sequence."""
        return {
            f"{i} {name}": tensor
            for i, example in enumerate(self.sequences)
            for name, tensor in example.tensors().items()
        }

    def by_shape(self, labels: bool = True) -> list[list[int]]:
        """Return the numbers of the sequences that make one forward pass: those of one shape.

        Args:
            labels: whether their labels have one length, too.
        """
        groups: dict[tuple[object, ...], list[int]] = {}
        for row, example in enumerate(self.sequences):
            groups.setdefault(example.shape(labels), []).append(row)
        return list(groups.values())

    def batch(self) -> Batch:
        """Return all sequences, of one shape up to the length of their labels, as one batch."""
        return joined(self.sequences)

    def batches(self, size: int) -> list[Batch]:
        """Cut the sequences into batches of one shape, of at most `size` sequences: no position of one is padding."""
        return [self[rows[i : i + size]].batch() for rows in self.by_shape() for i in range(0, len(rows), size)]

    def beginning(self, tokens: int) -> Batch:
        """Return the first sequence, at most so many tokens of each of its texts."""
        return self.sequences[0].beginning(tokens)
