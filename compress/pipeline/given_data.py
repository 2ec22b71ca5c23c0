"""Calibration data that a caller of Python gives: ids, batches, rows of data sets, or texts, as typed examples."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from compress.checkpoint.opened import OpenModel
from compress.data.forms import RowReader
from compress.data.ids import windows
from compress.data.opening import opening_tokens
from compress.data.text_source import PYTHON, GivenData, GivenText, TextSource
from compress.data.tokenization import token_stream
from compress.errors import CalibrationError, reported_as
from compress.models.kinds.batch import IDS, MASK, Examples
from compress.models.kinds.kinds import adapter_of, examples_of, most_tokens
from compress.models.structure.ends import vocabulary_size
from compress.pipeline.defaults import with_self_share
from compress.pipeline.texts import calibration_examples
from compress.recipe.calibration import Calibration
from compress.recipe.evaluation import Evaluate
from compress.recipe.schema import Recipe

FORMS = (
    "give token ids [sequences, length], a batch or a list of batches with input_ids, a Dataset or a DataLoader, a "
    "list of texts with tokenizer=, or a Calibration"
)
LENGTH = 512  # tokens of a sequence of texts, or the positions of the model if it has fewer


def examples_in(data: Any, opened: OpenModel, recipe: Recipe) -> Examples:
    """Return the examples in data of any form.

    Args:
        data: token ids [sequences, length]; a mapping or `Examples`, as of `examples_of`; a `Calibration`, or the
            name of a text or its file; or several items: texts, rows with a text or messages, rows or batches with
            `input_ids` (padding is left out), or lists of token ids.
        opened: the model, with its tokenizer if the data is text.
        recipe: the recipe of the run, whose calibration is replaced by a `Calibration`.

    Raises:
        CalibrationError: for data of another form, and ids that the model does not know.
    """
    if isinstance(data, str | os.PathLike):
        data = Calibration(source=os.fspath(data))
    if isinstance(data, Calibration):
        data, _ = with_self_share(data, recipe.passes, opened.model)
        return calibration_examples(recipe.model_copy(update={"calibration": data}), opened)[0]
    if isinstance(data, Examples | Mapping | Tensor):
        examples = examples_of(opened.model, _integers(data) if isinstance(data, Tensor) else data)
    else:
        examples = _of_items(data, opened)
    _check_ids(examples, opened)
    return examples


def with_data(recipe: Recipe, calibration: Any = None, evaluation: Any = None) -> Recipe:
    """Return a recipe that reads data of a program in place of its own texts.

    Args:
        recipe: states the number and length of sequences and windows.
        calibration: data as of `examples_in`, but token ids of one length; None for the recipe's own.
        evaluation: the same, in place of all texts of the evaluation.

    Raises:
        CalibrationError: for data of another form.
    """
    changes: dict[str, Any] = {}
    if isinstance(calibration, Calibration):
        changes["calibration"] = calibration
    elif isinstance(calibration, str | os.PathLike):
        changes["calibration"] = recipe.calibration.with_source(os.fspath(calibration))
    elif calibration is not None:
        changes["calibration"] = recipe.calibration.with_data(_given(calibration))
    if evaluation is not None:
        with reported_as("evaluation", "calibration"):
            text = _evaluated(evaluation)
        changes["eval"] = (recipe.eval or Evaluate()).model_copy(update={"perplexity": (text,), "agreement": (text,)})
    return recipe.model_copy(update=changes)


def _evaluated(data: Any) -> TextSource:
    if isinstance(data, Calibration) and data.mixture is not None:
        raise CalibrationError("calibration: is a mixture; give one text")
    if isinstance(data, TextSource):
        return TextSource(**{name: getattr(data, name) for name in TextSource.model_fields if name != "divided"})
    if isinstance(data, str | os.PathLike):
        return TextSource(source=os.fspath(data))
    return GivenText(source=PYTHON, data=_given(data))


def _given(data: Any) -> GivenData:
    """Return data as rows of texts, or as token ids of one length."""
    if isinstance(data, Examples) or (isinstance(data, Mapping) and IDS not in data):
        raise CalibrationError("calibration: a run reads texts or token ids; give those, or the name of a file")
    batches = [data] if isinstance(data, Mapping) else data
    kind, items = _items_of(_integers(batches) if isinstance(batches, Tensor) else batches)
    if kind == "texts":
        rows = [{"text": item} if isinstance(item, str) else dict(item) for item in items]
        digest = hashlib.sha256("\n".join(json.dumps(row, sort_keys=True, default=str) for row in rows).encode())
        return GivenData(f"{len(rows)} texts of a program", digest.hexdigest(), rows=rows)
    sequences = _sequences(kind, items)
    if len({len(row) for row in sequences}) > 1:
        raise CalibrationError("calibration: a run reads token ids of one length; give texts, or cut the sequences")
    ids = torch.stack(sequences)
    description = f"{len(ids)} sequences of token ids of a program"
    return GivenData(description, Examples.of_ids(ids).sha256(), ids=ids.numpy())


def _of_items(data: Any, opened: OpenModel) -> Examples:
    kind, items = _items_of(data)
    if kind == "texts":
        return _of_texts(items, opened)
    model = opened.model
    return Examples(
        tuple(example for row in _sequences(kind, items) for example in adapter_of(model).of_ids(model, row[None]))
    )


def _items_of(data: Any) -> tuple[str, list[Any]]:
    """Return the kind of the items of data, and the items."""
    if not isinstance(data, Iterable) and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise CalibrationError(f"calibration: is of class {type(data).__name__}; {FORMS}")
    items = list(data if isinstance(data, Iterable) else (data[i] for i in range(len(data))))
    if not items:
        raise CalibrationError(f"calibration: holds nothing; {FORMS}")
    kinds = {_kind_of_item(item) for item in items}
    if len(kinds) > 1:
        raise CalibrationError(f"calibration: holds {' and '.join(sorted(kinds))}; {FORMS}")
    kind = kinds.pop()
    if kind not in ("texts", "batches", "token ids"):
        raise CalibrationError(f"calibration: holds {kind}; {FORMS}")
    return kind, items


def _sequences(kind: str, items: list[Any]) -> list[Int[Tensor, " length"]]:
    """Return the sequences of batches or of token ids, without padding."""
    read = _rows if kind == "batches" else _matrix
    return [row for i, item in enumerate(items) for row in read(item, f"calibration[{i}]")]


def _kind_of_item(item: Any) -> str:
    if isinstance(item, str) or (isinstance(item, Mapping) and IDS not in item):
        return "texts"
    if isinstance(item, Mapping):
        return "batches"
    if isinstance(item, Tensor) or (isinstance(item, list | tuple) and item and not isinstance(item[0], str)):
        return "token ids"
    return f"items of class {type(item).__name__}"


def _of_texts(items: list[Any], opened: OpenModel) -> Examples:
    """Return the sequences of texts, which are joined and cut."""
    tokenizer = opened.tokenizer
    if tokenizer is None:
        raise CalibrationError("calibration: texts need a tokenizer; give tokenizer=, or token ids")
    reader = RowReader(tokenizer)
    rows = [{"text": item} if isinstance(item, str) else item for item in items]
    documents = [reader.document(row, f"calibration[{i}]").text for i, row in enumerate(rows)]
    stream = token_stream(documents, tokenizer)
    prefix = opening_tokens(TextSource(), tokenizer, "calibration")
    length = min(LENGTH, most_tokens(opened.model) or LENGTH, len(stream) + len(prefix))
    cut = windows(stream, length, prefix)
    if not cut.numel():
        raise CalibrationError("calibration: its texts hold no tokens; give longer texts")
    return adapter_of(opened.model).of_ids(opened.model, cut)


def _rows(item: Mapping[str, Any], place: str) -> list[Int[Tensor, " length"]]:
    """Return the sequences of a row or a batch without padding."""
    ids = _matrix(item[IDS], f"{place} {IDS}")
    mask = item.get(MASK)
    tokens = torch.ones_like(ids, dtype=torch.bool) if mask is None else _matrix(mask, f"{place} {MASK}").bool()
    if tokens.shape != ids.shape:
        raise CalibrationError(f"{place}: {MASK} has the shape {list(tokens.shape)}, {IDS} {list(ids.shape)}")
    return [row[is_token] for row, is_token in zip(ids, tokens, strict=True) if bool(is_token.any())]


def _matrix(value: Any, place: str) -> Int[Tensor, "rows length"]:
    """Return ids [length] or [rows, length], of any kind of sequence, as a matrix of integers."""
    try:
        ids = _integers(torch.as_tensor(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise CalibrationError(f"{place}: holds no token ids ({error}); {FORMS}") from error
    if ids.dim() not in (1, 2) or not ids.numel():
        raise CalibrationError(f"{place}: holds no tokens ({list(ids.shape)}); use token ids [sequences, length]")
    return ids.reshape(-1, ids.shape[-1]).long()


def _integers(ids: Tensor) -> Tensor:
    if ids.is_floating_point() or ids.is_complex():
        raise CalibrationError(f"calibration: holds {ids.dtype} numbers, not token ids, which are integers; {FORMS}")
    return ids


def _check_ids(examples: Examples, opened: OpenModel) -> None:
    """Raise CalibrationError for a token id that the model does not know."""
    size = vocabulary_size(opened.model)
    for example in examples:
        ids = example.inputs.get(IDS)
        if ids is not None and not (int(ids.min()) >= 0 and int(ids.max()) < size):
            wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise CalibrationError(
                f"calibration: holds the token id {wrong}, but the model's vocabulary has {size}; use ids that were "
                "made with the model's own tokenizer"
            )
