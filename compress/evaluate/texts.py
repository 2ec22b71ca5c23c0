"""Token ids that a model can take, and perplexity of any model, compressed or not, on named texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress import corpus
from compress.errors import CalibrationError
from compress.evaluate.perplexity import Perplexity, perplexity
from compress.journal import Journal
from compress.model.load import load
from compress.model.open import OpenModel, folder_of
from compress.model.prediction import is_masked, prediction_of
from compress.recipe import Recipe


def model_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    source: str,
    part: corpus.Part,
    count: int | None,
    length: int | None,
    seed: int = 0,
) -> Int[Tensor, "count length"]:
    """Token ids of a text for a model; None: all that a .npy file holds.

    A model of masked tokens reads each window between the special tokens that its tokenizer puts around a text; they
    count in `length`. What a .npy file holds stays as it is.

    Raises CalibrationError: no such text, too little of it, ids beyond the vocabulary or the positions of the model,
    or a model without tokenizer.
    """
    needed = None if source.endswith(".npy") else needs_tokenizer(tokenizer, part)
    if needed is not None and length is not None and is_masked(type(model), model.config):
        before, after = around(needed)
        if length <= len(before + after):
            raise CalibrationError(f"{part}: length {length} leaves no room between special tokens; use a longer one")
        ids = corpus.token_ids(source, part, needed, count, length - len(before + after), seed)
        left, right = (torch.tensor(side, dtype=ids.dtype).expand(len(ids), -1) for side in (before, after))
        ids = torch.cat([left, ids, right], dim=1)
    else:
        ids = corpus.token_ids(source, part, needed, count, length, seed)
    size = model.get_input_embeddings().get_parameter("weight").shape[0]
    if int(ids.max()) >= size:
        raise CalibrationError(
            f"{part}: {source} holds the token id {int(ids.max())}, but the model's vocabulary has {size}; "
            "the ids were made with another tokenizer"
        )
    longest: Any = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and ids.shape[1] > longest:
        raise CalibrationError(
            f"{part}: length {ids.shape[1]} is beyond the model's {longest} positions; use a shorter one"
        )
    if ids.shape[1] < 2:
        raise CalibrationError(f"{part}: {source} has one token per sequence; a loss needs 2")
    return ids


def around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before and behind a text."""
    bare, whole = (tokenizer("a", add_special_tokens=some).input_ids for some in (False, True))
    start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]


def needs_tokenizer(tokenizer: PreTrainedTokenizerBase | None, part: corpus.Part) -> PreTrainedTokenizerBase:
    """The tokenizer; CalibrationError where there is none."""
    if tokenizer is None:
        raise CalibrationError(f"{part}: the model has no tokenizer; give token ids in a .npy file")
    return tokenizer


def evaluate_texts(
    source: str, texts: Sequence[str], windows: int | None, length: int | None, dtype: str = "auto"
) -> dict[str, Perplexity]:
    """Perplexity by text for a checkpoint folder, a hub id or a .gguf file.

    Raises ModelError, CalibrationError; all texts are found before the first one is measured.
    """
    model, tokenizer = load(Path(folder_of(source)), dtype)
    prediction = prediction_of(model, tokenizer)
    ids = {text: model_ids(model, tokenizer, text, "test", windows, length) for text in texts}
    return {text: perplexity(model, found, prediction=prediction) for text, found in ids.items()}


def calibration_ids(recipe: Recipe, opened: OpenModel) -> Tensor:
    """The recipe's calibration token ids, [sequences, length].

    Raises CalibrationError: no such text, too little of it, ids beyond the vocabulary, or a model without tokenizer.
    """
    wanted = recipe.calibration
    if wanted.source == "self":
        with opened.streaming() as model:
            count, length = wanted.sequences or 64, wanted.length or 512
            tokenizer = needs_tokenizer(opened.tokenizer, "calibration")
            return corpus.self_sampled(model, tokenizer, count, length, recipe.seed)
    shape = wanted.sequences, wanted.length
    return model_ids(opened.model, opened.tokenizer, wanted.source, "calibration", *shape, recipe.seed)


def eval_ids(recipe: Recipe, source: str, opened: OpenModel) -> Tensor:
    """Token ids of an evaluation text, [windows, length]."""
    wanted = recipe.eval
    return model_ids(opened.model, opened.tokenizer, source, "test", wanted.windows, wanted.length, recipe.seed)


def perplexities(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    texts: Mapping[str, Int[Tensor, "windows length"]],
    which: str,
    journal: Journal,
) -> dict[str, Perplexity]:
    """Perplexity by the name of each text; `which` model it is, for the journal."""
    found: dict[str, Perplexity] = {}
    for name, ids in texts.items():
        message = f"perplexity of the {which} model on {name}"

        def tell(done: int, of: int, message: str = message) -> None:
            journal.add("progress", "evaluate", message, done=done, of=of)

        found[name] = perplexity(model, ids, tell, prediction_of(model, tokenizer))
    return found


def told(
    name: str, ids: Int[Tensor, "windows length"], base: Perplexity, compressed: Perplexity
) -> dict[str, Any]:  # fmt: skip
    """What the report says of a text."""
    facts = {"text": name, "windows": ids.shape[0], "length": ids.shape[1], "sha256": corpus.corpus_sha256(ids)}
    both = {"base": base, "compressed": compressed}
    return facts | {which: asdict(m) | {"perplexity": m.perplexity} for which, m in both.items()}
