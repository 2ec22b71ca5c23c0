"""Recordings with their transcripts as rows of integers, so that they go wherever token ids go.

Calibration sequences are hashed, sampled, divided over processes and cut into batches as int64 rows. A row of a model
that hears recordings holds everything that the model reads for one recording:

    [MARK, targets, *shape of the features, *target tokens, *features, 0, ...]

The features are float32 numbers, two in the bits of each integer. Zeros fill the row up to the longest one. Rows keep
the shapes of their own recording: a batch of the sweep (`batches`) holds rows of one shape, so that no position of
either stack is padding and none counts in a statistic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compress.errors import CalibrationError

MARK = -1
"""The first number of a row of a recording; token ids are not negative."""
HEADER = 4
IGNORED = -100
"""Label of ignored positions, the default of torch's losses."""
FEATURES = ("input_features", "input_values")
"""What transformers calls the features of recordings."""
LABELS, MASK = "labels", "attention_mask"

Rows = Int[Tensor, "rows length"]


@dataclass(frozen=True)
class Recordings:
    """Recordings whose features have one shape. targets: the tokens of the transcripts; IGNORED after their ends."""

    features: Float[Tensor, "rows ..."]
    targets: Int[Tensor, "rows longest"]


def is_recorded(ids: Rows) -> bool:
    """Whether rows hold recordings, not token ids."""
    return ids.numel() > 0 and int(ids.flatten()[0]) == MARK


def row_of(features: Float[Tensor, "*shape"], targets: Sequence[int]) -> Int[Tensor, " length"]:
    """The row of a recording; its features have one or two axes."""
    shape = [*features.shape, 0][:2]
    flat = features.detach().cpu().float().flatten()
    bits = torch.cat([flat, flat.new_zeros(len(flat) % 2)]).view(torch.int64)
    return torch.cat([torch.tensor([MARK, len(targets), *shape, *targets], dtype=torch.int64), bits])


def row_bytes(size: int, targets: int) -> int:
    """Bytes of the row of a recording. size: the numbers of its features."""
    return 8 * (HEADER + targets + (size + 1) // 2)


def stacked(rows: Sequence[Tensor]) -> Rows:
    """One tensor of rows, or of groups of rows, of different lengths."""
    if len(rows) == 1 and rows[0].dim() == 2:
        return rows[0]
    if len({row.shape[-1] for row in rows}) == 1:
        return torch.cat([row.reshape(-1, row.shape[-1]) for row in rows])
    return pad_sequence([row for group in rows for row in group.reshape(-1, group.shape[-1])], batch_first=True)


def shape_in(row: Int[Tensor, " length"]) -> tuple[int, ...]:
    """The shape of the features of a recording."""
    return tuple(int(size) for size in row[2:HEADER] if size)


def targets_in(ids: Rows) -> Int[Tensor, "rows longest"]:
    """The target tokens of recordings; IGNORED after the end of each."""
    counts = ids[:, 1:2]
    found = ids[:, HEADER : HEADER + int(counts.max())]
    return found.masked_fill(torch.arange(found.shape[1], device=ids.device) >= counts, IGNORED)


def read(ids: Rows) -> Recordings:
    """The recordings in rows whose features have one shape. Raises CalibrationError for other rows."""
    headers = ids[:, :HEADER].tolist()
    shapes = {tuple(size for size in header[2:] if size) for header in headers}
    if len(shapes) > 1:
        raise CalibrationError(
            f"calibration: features of shapes {' and '.join(map(str, map(list, sorted(shapes))))} do not make one "
            "batch; use batch: 1, or recordings of one length"
        )
    (shape,) = shapes
    count = prod(shape)
    starts = [HEADER + header[1] for header in headers]
    bits = torch.stack([row[start : start + (count + 1) // 2] for row, start in zip(ids, starts, strict=True)])
    return Recordings(bits.view(torch.float32)[:, :count].reshape(-1, *shape), targets_in(ids))


def by_shape(ids: Rows, targets: bool = True) -> list[list[int]]:
    """The numbers of the rows that make one forward pass, those of one shape; of token ids all.

    targets: whether their transcripts have one length, too.
    """
    if not is_recorded(ids):
        return [list(range(len(ids)))]
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, header in enumerate(ids[:, :HEADER].tolist()):
        groups.setdefault(tuple(header[1 if targets else 2 :]), []).append(i)
    return list(groups.values())


def batches(ids: Rows, size: int) -> list[Rows]:
    """Cut sequences into batches of at most so many; recordings into such whose shapes are equal."""
    if not is_recorded(ids):
        return list(ids.split(size))
    parts = [group[i : i + size] for group in by_shape(ids) for i in range(0, len(group), size)]
    return [ids[p[0] : p[-1] + 1] if p[-1] - p[0] + 1 == len(p) else ids[p] for p in parts]  # neighbours: not copied


def beginning(ids: Rows, tokens: int) -> Rows:
    """The first sequence, at most so many tokens of it; a recording is not cut."""
    return ids[:1] if is_recorded(ids) else ids[:1, :tokens]


def longest(ids: Rows) -> int:
    """The tokens of a sequence; of recordings the most target tokens."""
    return int(ids[:, 1].max()) if is_recorded(ids) else ids.shape[1]


def rows_of(given: Mapping[str, Any], where: str = "calibration", time: int | None = None) -> Rows:
    """The rows of a batch as transformers spells it: features of recordings, and the labels of their transcripts.

    given: `input_features` or `input_values` [recordings, ...] and `labels` [recordings, longest], whose ends are
    filled with -100. `attention_mask` [recordings, longest] has ones for the features of each recording, and zeros for
    the padding after them, which is cut off. time: the axis of a recording's features that the mask is of; None: all
    recordings have the one length that the model reads, so that their padding is read, too. where: the beginning of
    messages. Raises CalibrationError.
    """
    name = next((name for name in FEATURES if name in given), None)
    if name is None or LABELS not in given:
        there = ", ".join(map(str, given)) or "nothing"
        raise CalibrationError(f"{where}: holds {there}; give input_features (or input_values) and labels")
    features, labels = torch.as_tensor(given[name]), torch.as_tensor(given[LABELS])
    fits = features.dim() in (2, 3) and features.is_floating_point() and labels.dim() == 2
    if not fits or labels.is_floating_point() or len(features) != len(labels) or not features.numel():
        raise CalibrationError(
            f"{where}: {name} of {features.dtype} {list(features.shape)} and labels of {labels.dtype} "
            f"{list(labels.shape)} do not belong together; write floats [recordings, bins, frames] or "
            "[recordings, samples], and integers [recordings, tokens] with -100 after the end of each transcript"
        )
    if not bool(features.isfinite().all()):
        raise CalibrationError(f"{where}: {name} holds NaN or infinity; write finite numbers")
    if unknown := [str(key) for key in given if key not in (name, LABELS, MASK)]:
        raise CalibrationError(
            f"{where}: {', '.join(unknown)} would have no effect; leave it out, and give {name}, {LABELS} and, for "
            f"padded recordings, {MASK}"
        )
    rows = []
    for i, (one, label) in enumerate(zip(_cut(features, given.get(MASK), where, time), labels, strict=True)):
        tokens = label[: int((label != IGNORED).sum())].tolist()
        if not tokens or min(tokens) < 0:
            reason = "is no transcript" if not tokens else "has -100, or another negative number, before its end"
            raise CalibrationError(f"{where}: labels[{i}] {reason}; write token ids, and -100 only after them")
        rows.append(row_of(one, tokens))
    return stacked(rows)


def _cut(features: Tensor, given: Any, where: str, time: int | None) -> Sequence[Tensor]:
    """The features of each recording without its padding. given: the mask of all; None: nothing is padded."""
    if given is None or time is None:
        return list(features)
    mask = torch.as_tensor(given)
    wanted = [len(features), features[0].shape[time]]
    if list(mask.shape) != wanted:
        raise CalibrationError(
            f"{where}: {MASK} has the shape {list(mask.shape)}, but the features have {wanted} positions; write one "
            "number for each of them"
        )
    counts = mask.bool().sum(1).tolist()
    for i, (one, count) in enumerate(zip(mask.bool(), counts, strict=True)):
        if not count or not bool(one[:count].all()):
            raise CalibrationError(
                f"{where}: {MASK}[{i}] is not ones and then zeros; write padding after the end of each recording"
            )
    return [one.narrow(time, 0, count) for one, count in zip(features, counts, strict=True)]
