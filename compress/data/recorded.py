"""Recordings with transcripts as calibration and evaluation data, for models that hear recordings.

A .jsonl file (one object per line) or .json file (a list of objects) names WAV files and their transcripts:

    {"audio": "clips/1.wav", "text": "twenty two degrees"}

A relative path is that of a file next to the list. The model's own feature extractor makes the features, its tokenizer
the target tokens with its special tokens. `language` and `task` of a line choose these where a tokenizer has a choice.
A .safetensors file holds features and labels that were made elsewhere, as transformers spells a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoFeatureExtractor, PreTrainedModel, PreTrainedTokenizerBase

from compress.data.sources import json_rows
from compress.data.text_source import Part, TextSource
from compress.data.waves import read_wave
from compress.errors import CalibrationError, CannotRun, call_foreign, one_line
from compress.models.kinds.kinds import described
from compress.models.kinds.recordings import LABELS, Rows, row_of, rows_of, stacked
from compress.models.structure.front import check_recordings, front_of

LISTS = (".jsonl", ".json")
STORED = ".safetensors"
LINE = '{"audio": "clip.wav", "text": "its transcript"}'
KEYS: dict[Part, str] = {"calibration": "calibration: {source: FILE.jsonl}", "test": "eval: {perplexity: [FILE.jsonl]}"}
PREFIX = ("language", "task")
"""Columns that choose the special tokens before a transcript."""


@dataclass(frozen=True)
class Recorded:
    """Recordings of a source.

    Attributes:
        ids: their rows (`models.kinds.recordings`).
        of: number of all recordings of the source.
    """

    ids: Rows
    of: int

    @property
    def tokens(self) -> int:
        """The number of all targets."""
        return int(self.ids[:, 1].sum())


def check_recorded(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source: TextSource, part: Part
) -> None:
    """Check what can be known of recordings before they are read.

    Raises CalibrationError: a source of text, a missing file, an option of texts, no tokenizer or feature extractor.
    """
    path = None if source.source is None else Path(source.source)
    if path is None or path.suffix not in (*LISTS, STORED):
        raise CalibrationError(
            f"{part}: {described(model)}, and {source.label} holds none; write {KEYS[part]} with a line {LINE} for "
            "each WAV file, or a .safetensors file with features and labels"
        )
    for name in ("chat_template", "max_tokens_per_document", "packing", "bos"):
        if getattr(source, name) != TextSource.model_fields[name].default:
            raise CalibrationError(f"{part}: {name} has no effect: {described(model)}; leave it out")
    try:
        path.open("rb").close()
    except OSError as error:
        raise CalibrationError(f"{part}: cannot read {path}: {error.strerror}; write the path of a file") from error
    if path.suffix != STORED:
        if tokenizer is None:
            raise CalibrationError(f"{part}: the model has no tokenizer; add it, or use features in a {STORED} file")
        extractor_of(model, part)


def recorded_sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    source: TextSource,
    part: Part,
    count: int | None,
    length: int | None,
    seed: int,
) -> Recorded:
    """Read recordings for a model. count: of recordings; None: all. length: the most target tokens of one; None: all.

    The calibration part takes recordings of a list at random, the same ones for the same seed; the test part takes the
    first ones, as both do of stored features. A longer transcript is cut to its first `length` tokens, which a decoder
    predicts without the later ones.

    Raises CalibrationError for too few recordings and for those that the model cannot read, with the place of each.
    """
    check_recorded(model, tokenizer, source, part)
    path = Path(str(source.source))
    if path.suffix == STORED:
        rows = _stored(path, part, length, front_of(model).time)
        chosen = _chosen(len(rows), path, part, count, None)
        ids, places, of = rows[chosen], [f"{part}: {path}: recording {i}" for i in chosen], len(rows)
    else:
        assert tokenizer is not None
        listed = list(json_rows(path))
        chosen = _chosen(len(listed), path, part, count, seed)
        reader = RecordingReader(model, tokenizer, source.column or "text", path.parent, extractor_of(model, part))
        places, of = [listed[i][0] for i in chosen], len(listed)
        ids = stacked([reader.row(listed[i][1], listed[i][0], length) for i in chosen])
    check_recordings(model, ids, places)
    return Recorded(ids, of)


def _chosen(of: int, path: Path, part: Part, count: int | None, seed: int | None) -> list[int]:
    """The numbers of the recordings that are taken; at random for a seed in the calibration part.

    Raises CalibrationError for too few.
    """
    if of == 0:
        raise CalibrationError(f"{part}: {path} holds no recordings; write a line {LINE} for each WAV file")
    if part == "test" or count is None:
        return list(range(of))[:count]
    if of < count:
        raise CalibrationError(
            f"{part}: {path} holds {of} recordings, but sequences is {count}; use sequences <= {of}, or more recordings"
        )
    if seed is None:
        return list(range(count))
    return torch.randperm(of, generator=torch.Generator().manual_seed(seed))[:count].tolist()


def count_in(source: TextSource, part: Part) -> int:
    """The number of all recordings of a source. Raises CalibrationError for a file that cannot be read."""
    path = Path(str(source.source))
    if path.suffix != STORED:
        return sum(1 for _ in json_rows(path))
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_slice(LABELS).get_shape()[0] if LABELS in file.keys() else 0  # noqa: SIM118  no mapping
    except (OSError, SafetensorError) as error:
        raise _no_tensors(path, part, error) from error


def _no_tensors(path: Path, part: Part, error: Exception) -> CalibrationError:
    return CalibrationError(
        f"{part}: {path} is no {STORED} file ({one_line(error)}); write it with safetensors.torch.save_file"
    )


def _stored(path: Path, part: Part, length: int | None, time: int | None) -> Rows:
    """The recordings in a .safetensors file, each with at most `length` target tokens. Raises CalibrationError.

    time: the axis of time of the features (`Front.time`).
    """
    try:
        given: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _no_tensors(path, part, error) from error
    if LABELS in given and given[LABELS].dim() == 2:
        given[LABELS] = given[LABELS][:, :length]
    return rows_of(given, f"{part}: {path}", time)


def extractor_of(model: PreTrainedModel, part: Part) -> Any:
    """The feature extractor in the folder of a model. Raises CalibrationError."""
    try:
        if not model.name_or_path:
            raise ValueError("the model is not from a folder")
        found: Any = call_foreign(AutoFeatureExtractor.from_pretrained, model.name_or_path, trust_remote_code=False)
        if not isinstance(getattr(found, "sampling_rate", None), int):
            raise ValueError("it states no sampling rate")
    except (ValueError, CannotRun) as error:
        raise CalibrationError(
            f"{part}: the feature extractor of the model cannot be read ({one_line(error)}); add its "
            f"preprocessor_config.json to the model's folder, or use features in a {STORED} file"
        ) from error
    return found


@dataclass(frozen=True)
class RecordingReader:
    """Makes rows of the lines of a list.

    column: of the transcript. folder: of relative paths. extractor: makes features of sound. told: the tokenizers that
    were told a language and a task, by these.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    column: str
    folder: Path
    extractor: Any
    told: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def row(self, line: Any, where: str, length: int | None) -> Tensor:
        """The row of a line, with at most `length` target tokens. where: its place. Raises CalibrationError."""
        if not isinstance(line, Mapping):
            raise CalibrationError(f"{where}: no recording, but {type(line).__name__}; write {LINE}")
        for name in ("audio", self.column):
            if not isinstance(line.get(name), str):
                there = ", ".join(map(str, line)) or "none"
                raise CalibrationError(f"{where}: no text in the column {name} (columns: {there}); write {LINE}")
        return row_of(self._features(line["audio"], where), self._targets(line, where)[:length])

    def _features(self, audio: str, where: str) -> Tensor:
        """The features of a WAV file."""
        path, rate = self.folder / audio, self.extractor.sampling_rate
        sound = read_wave(path, rate, where)
        most = getattr(self.extractor, "n_samples", None)
        if most is not None and len(sound) > most:
            raise CalibrationError(
                f"{where}: {path} is {len(sound) / rate:.1f} seconds long, but the model hears {most / rate:g}; cut it "
                "and its transcript into shorter ones"
            )
        try:
            made = call_foreign(self.extractor, sound, sampling_rate=rate, return_tensors="pt")
            found = call_foreign(lambda: made[self.model.main_input_name][0])
        except CannotRun as error:
            raise CalibrationError(
                f"{where}: the feature extractor cannot read {path} ({one_line(error.cause)}); use a longer recording"
            ) from error
        return found

    def _targets(self, line: Mapping[str, Any], where: str) -> list[int]:
        """The target tokens of a transcript: what the tokenizer makes of it, without the decoder's start token."""
        text = line[self.column]
        if not text.strip():
            raise CalibrationError(f"{where}: {self.column} is blank; write what is said, or leave the line out")
        tokens = self._tokenizer(line, where)(text).input_ids
        return tokens[1:] if tokens[:1] == [self.model.config.decoder_start_token_id] else tokens

    def _tokenizer(self, line: Mapping[str, Any], where: str) -> Any:
        """The tokenizer with the special tokens of a line's language and task."""
        asked = {name: line[name] for name in PREFIX if line.get(name) is not None}
        if not asked:
            return self.tokenizer
        key = tuple(map(str, (asked.get(name) for name in PREFIX)))
        if key in self.told:
            return self.told[key]
        found: Any = copy.deepcopy(self.tokenizer)
        if not hasattr(found, "set_prefix_tokens"):
            raise CalibrationError(f"{where}: the tokenizer has no tokens for {' and '.join(asked)}; leave them out")
        try:
            call_foreign(found.set_prefix_tokens, **asked)
        except CannotRun as error:
            raise CalibrationError(f"{where}: {' and '.join(asked)}: {one_line(error.cause)}") from error
        self.told[key] = found
        return found
