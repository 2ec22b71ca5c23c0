"""Lists of files, such as recordings with transcripts, as calibration and evaluation data.

A .jsonl file (one object per line) or .json file (a list of objects) names files and their texts, as the kind of the
model reads them (`ModelKind.lists`). A relative path is that of a file next to the list. A .safetensors file holds
features and labels that were made elsewhere, as a data collator of transformers returns them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.data.pieces import TextShare
from compress.data.sources import json_rows
from compress.data.text_source import Part, TextSource
from compress.errors import CalibrationError, one_line
from compress.models.kinds.batch import LABELS, Examples
from compress.models.kinds.contract import Lists
from compress.models.kinds.kinds import adapter_of, described, kind_of

SUFFIXES = (".jsonl", ".json")
STORED = ".safetensors"
KEYS: dict[Part, str] = {"calibration": "calibration: {source: FILE.jsonl}", "test": "eval: {perplexity: [FILE.jsonl]}"}


def lists_of(model: PreTrainedModel, source: TextSource) -> Lists | None:
    """Return how a model reads a source that is a list of files; None for a source of text."""
    kind = kind_of(model)
    lists = None if kind is None else kind.lists
    if lists is None or lists.only:
        return lists
    path = Path(source.source or "")
    if path.suffix not in SUFFIXES or not path.is_file():
        return lists if path.suffix == STORED else None
    first_line = next(json_rows(path), ("", None))[1]
    return lists if isinstance(first_line, Mapping) and lists.column in first_line else None


def check_listed(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source: TextSource, lists: Lists, part: Part
) -> None:
    """Check what can be known of a list before its files are read.

    Raises:
        CalibrationError: for a source of text, a missing file, an option of texts, no tokenizer or processor.
    """
    path = None if source.source is None else Path(source.source)
    if path is None or path.suffix not in (*SUFFIXES, STORED):
        raise CalibrationError(
            f"{part}: {described(model)}, and {source.label} holds none; write {KEYS[part]} with a line {lists.line} "
            f"for each file, or a {STORED} file with features and labels"
        )
    for name in ("chat_template", "max_tokens_per_document", "packing", "bos"):
        if getattr(source, name) != TextSource.model_fields[name].default:
            raise CalibrationError(f"{part}: {name} has no effect: {described(model)}; leave it out")
    try:
        path.open("rb").close()
    except OSError as error:
        raise CalibrationError(f"{part}: cannot read {path}: {error.strerror}; write the path of a file") from error
    if path.suffix != STORED:
        adapter_of(model).reader(model, tokenizer, source.column or "text", path.parent, part)


def listed_sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    source: TextSource,
    part: Part,
    count: int | None,
    length: int | None,
    seed: int,
) -> tuple[Examples, TextShare]:
    """Read the examples of a list.

    The calibration part takes lines of a list at random, the same ones for the same seed; the test part takes the first
    ones, as both do of stored features. A longer text is cut to its first `length` target tokens, which a model
    predicts without the later ones.

    Args:
        model: the model that reads them.
        tokenizer: its tokenizer.
        source: the list.
        part: calibration or test.
        count: number of examples; None for all.
        length: most target tokens of an example; None for all.
        seed: of the choice of lines.

    Returns:
        The examples, and the share of the source that they were chosen from.

    Raises:
        CalibrationError: for too few examples and for those that the model cannot read, with the place of each.
    """
    path, kind = Path(str(source.source)), adapter_of(model)
    lists = kind.lists
    assert lists is not None
    check_listed(model, tokenizer, source, lists, part)
    if path.suffix == STORED:
        all_examples = kind.of_mapping(model, _stored(path, part, length), f"{part}: {path}")
        share = share_of(source, part, len(all_examples))
        rows = _chosen(share, path, lists, part, count, None)
        examples = all_examples[rows]
        places = [f"{part}: {path}: {lists.plural.removesuffix('s')} {row}" for row in rows]
    else:
        column = source.column or "text"
        lines, reader = list(json_rows(path)), kind.reader(model, tokenizer, column, path.parent, part)
        share = share_of(source, part, len(lines))
        rows = _chosen(share, path, lists, part, count, seed)
        for row in rows:
            _check_line(lines[row][1], lines[row][0], lists, column)
        examples = Examples(tuple(reader.example(lines[row][1], lines[row][0], length) for row in rows))
        places = [lines[row][0] for row in rows]
    kind.check(model, examples, places)
    return examples, share


def _check_line(line: Any, place: str, lists: Lists, column: str) -> None:
    """Raise CalibrationError for a line without the columns of a list."""
    if not isinstance(line, Mapping):
        raise CalibrationError(
            f"{place}: no {lists.plural.removesuffix('s')}, but {type(line).__name__}; write {lists.line}"
        )
    for name in (lists.column, column):
        if not isinstance(line.get(name), str):
            columns = ", ".join(map(str, line)) or "none"
            raise CalibrationError(f"{place}: no text in the column {name} (columns: {columns}); write {lists.line}")


def _chosen(share: TextShare, path: Path, lists: Lists, part: Part, count: int | None, seed: int | None) -> list[int]:
    """Return the numbers of the examples that are taken; at random for a seed in the calibration part.

    Raises:
        CalibrationError: for too few.
    """
    available = range(share.start, share.stop)
    if not available:
        raise CalibrationError(f"{part}: {path} holds no {lists.plural}; write a line {lists.line} for each file")
    if part == "test" or count is None:
        return list(available)[:count]
    if len(available) < count:
        raise CalibrationError(
            f"{part}: {path} holds {len(available)} {lists.plural}, but sequences is {count}; use sequences <= "
            f"{len(available)}, or more {lists.plural}"
        )
    if seed is None:
        return list(available)[:count]
    order = torch.randperm(len(available), generator=torch.Generator().manual_seed(seed))
    return [available[row] for row in order[:count].tolist()]


def share_of(source: TextSource, part: Part, rows: int) -> TextShare:
    """The rows of a list, or of a file of ids, that a part reads."""
    every_row = TextShare(unit="rows", start=0, stop=rows, of=rows)
    return TextShare.of_part(part, rows, "rows") if source.divided else every_row


def count_in(source: TextSource, part: Part) -> int:
    """Return the number of the examples of a list for a part. Raises CalibrationError for an unreadable file."""
    share = share_of(source, part, _rows_in(Path(str(source.source)), part))
    return share.stop - share.start


def _rows_in(path: Path, part: Part) -> int:
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


def _stored(path: Path, part: Part, length: int | None) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors file, with at most `length` labels of each example."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _no_tensors(path, part, error) from error
    if LABELS in tensors and tensors[LABELS].dim() == 2:
        tensors[LABELS] = tensors[LABELS][:, :length]
    return tensors
