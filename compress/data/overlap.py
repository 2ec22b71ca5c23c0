"""The share of evaluation tokens that calibration has read: equal runs of tokens are found at any offset."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from compress.data.records import CalibrationSketch
from compress.models.kinds.batch import IDS, IGNORED, TEXTS, Batch, Examples

RUN = 32
"""Tokens of a run. Shorter ones occur in different texts by chance; a longer one misses a short excerpt."""
SHORTEST = 16
DISTINCT = 4
"""A run with fewer different tokens than one in so many is a filler, such as a line of dashes, and no overlap."""
SKETCH = 4096
"""Hashes that a report stores: 32 KiB."""
EVEN, ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
"""Odd constants with mixed bits: the golden ratio of 64 bits, and a multiplier of xmxmx hashes."""

Hashes = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class CalibrationRuns:
    """The runs of tokens that calibration has read.

    Attributes:
        hashes: Of the runs, sorted.
        run: Tokens of a run.
        one_in: As `CalibrationSketch`; 1: all hashes.
    """

    hashes: Hashes
    run: int
    one_in: int = 1

    @classmethod
    def of_sketch(cls, sketch: CalibrationSketch) -> CalibrationRuns:
        """Return the runs of a sketch, to look up evaluation tokens in."""
        return cls(np.frombuffer(base64.b64decode(sketch.hashes), "<u8"), sketch.run, sketch.one_in)

    @classmethod
    def of(cls, calibration: Examples, run: int = RUN) -> CalibrationRuns:
        """Return all runs of calibration examples; of those with other inputs than text, the whole examples."""
        parts = [whole_hash(example) for example in calibration if has_features(example)]
        texts = [text for example in calibration if not has_features(example) for text in texts_in(example)]
        by_length = groupby(sorted(texts, key=len), key=len)
        parts += [run_hashes(np.stack(list(equal)), run).flatten() for _, equal in by_length]
        return cls(np.unique(np.concatenate([np.empty(0, np.uint64), *parts])), run)

    def sketch(self) -> CalibrationSketch:
        """Return at most about `SKETCH` of the hashes, chosen by their values, so that any text can be looked up."""
        one_in = max(1, -(-len(self.hashes) // SKETCH))
        selected_hashes = self.hashes[self.hashes % np.uint64(one_in) == 0]
        return CalibrationSketch(
            run=self.run, one_in=one_in, hashes=base64.b64encode(selected_hashes.astype("<u8").tobytes()).decode()
        )

    def share_of(self, evaluation: Examples) -> float:
        """Return the share of the evaluation tokens that belong to runs of the calibration.

        With some of the hashes (`one_in`), it is estimated as the share of equal runs. Texts that are shorter than a
        run cannot be compared, and count as different.
        """
        shared, total = 0.0, 0
        for example in evaluation:
            for text in texts_in(example):
                total += len(text)
                if has_features(example):
                    shared += len(text) * bool(self._contains(whole_hash(example))[0])
                elif len(text) >= self.run:
                    shared += len(text) * self._share(text)
        return shared / total if total else 0.0

    def _share(self, text: NDArray[np.int64]) -> float:
        """The share of the tokens of one text."""
        hashes = run_hashes(text, self.run)
        equal = self._contains(hashes)
        for start in np.flatnonzero(equal):
            equal[start] = len(np.unique(text[start : start + self.run])) * DISTINCT >= self.run
        if self.one_in > 1:
            compared = hashes % np.uint64(self.one_in) == 0
            return float(equal.sum() / max(1, compared.sum()))
        covered = np.zeros(len(text) + 1, np.int64)  # +1 where a run begins, -1 after its end
        np.add.at(covered, np.flatnonzero(equal), 1)
        np.add.at(covered, np.flatnonzero(equal) + self.run, -1)
        return float((covered.cumsum()[:-1] > 0).mean())

    def _contains(self, hashes: Hashes) -> NDArray[np.bool_]:
        if not len(self.hashes):
            return np.zeros(len(hashes), np.bool_)
        places = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return self.hashes[places] == hashes


def overlap_of(calibration: Examples, evaluation: Examples) -> float:
    """Return the share of evaluation tokens that calibration has read in runs of `RUN` tokens.

    Runs are shorter, but not below `SHORTEST`, where all sequences of one of the two are.

    Args:
        calibration: What the passes have read.
        evaluation: Windows of an evaluation text.
    """
    lengths = [[len(text) for e in examples for text in texts_in(e)] for examples in (calibration, evaluation)]
    run = min(RUN, *(max(part, default=RUN) for part in lengths))
    return CalibrationRuns.of(calibration, max(SHORTEST, run)).share_of(evaluation)


def run_hashes(ids: NDArray[np.int64], run: int) -> Hashes:
    """Return a hash of the run that begins at each position, [..., length - run + 1].

    A run of 2n tokens is hashed as mix(first n) * constant + mix(last n): log2(run) operations on vectors.
    """
    if ids.shape[-1] < run:
        return np.empty(0, np.uint64)
    hashes, length = _mixed(ids.astype(np.uint64) + EVEN), 1
    while 2 * length <= run:
        hashes, length = _mixed(hashes[..., :-length] * ODD + hashes[..., length:]), 2 * length
    if length < run:  # two runs that overlap cover it
        hashes = _mixed(hashes[..., : ids.shape[-1] - run + 1] * ODD + hashes[..., run - length :])
    return hashes


def _mixed(values: Hashes) -> Hashes:
    """Spread the bits of values; different values stay different."""
    values = (values ^ (values >> np.uint64(32))) * EVEN
    return values ^ (values >> np.uint64(29))


def whole_hash(example: Batch) -> Hashes:
    """Return the hash of an example with features, such as a recording."""
    return np.frombuffer(hashlib.sha256(example.content()).digest()[:8], "<u8").astype(np.uint64)


def has_features(example: Batch) -> bool:
    """Whether an example has other inputs than texts."""
    return not set(example.inputs) <= set(TEXTS)


def texts_in(example: Batch) -> Iterator[NDArray[np.int64]]:
    """Yield the token ids of an example: its inputs, and its labels where those are another text."""
    if IDS in example.inputs:
        yield example.inputs[IDS][0].cpu().numpy()
    if example.labels is not None:
        labels = example.labels[0]
        yield labels[labels != IGNORED].cpu().numpy()
