"""The inputs of a model for rows of integers: token ids, a source text and its target text, or a recording and its
transcript (`models.kinds.recordings`).

A row of a model with an encoder and a decoder holds two texts of equal length, the source first. The encoder reads the
source. The decoder reads the target shifted to the right by its start token, as in training (teacher forcing). Where
one text is cut into rows, this is prefix language modelling (Lester 2021, arXiv 2104.08691, section 2.2): the first
half of a row is the source, and its continuation is the target.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compress.errors import CalibrationError, CannotRun, ModelError, call_foreign
from compress.models.kinds.kinds import RECORDED, described, kind_of, texts_in_row
from compress.models.kinds.recordings import IGNORED, is_recorded, longest, read

Ids = Int[Tensor, "rows length"]


def text_lengths(texts: int, length: int) -> list[int]:
    """The lengths of the texts in a row of so many tokens; the first ones are longer where they cannot be equal."""
    return [length // texts + (i < length % texts) for i in range(texts)]


def source_and_target(ids: Ids) -> tuple[Ids, Ids]:
    """The two texts of each row."""
    source, target = (part.contiguous() for part in ids.split(text_lengths(2, ids.shape[1]), dim=1))
    return source, target


def check_rows(model: nn.Module, ids: Ids, where: str = "calibration") -> None:
    """Raise CalibrationError for token ids of a model that hears recordings, or recordings of another model."""
    hears, recorded = kind_of(model) is RECORDED, is_recorded(ids)
    if hears and not recorded:
        raise CalibrationError(
            f"{where}: {described(model)}, and these are token ids; give a mapping with {model.main_input_name} and "
            "labels"
        )
    if recorded and not hears:
        raise CalibrationError(f"{where}: {described(model)}, and these are recordings; give token ids")


def inputs_of(model: nn.Module, ids: Ids) -> dict[str, Any]:
    """The arguments with which a model reads rows; recordings have features of one shape.

    model: also as several processes that train it hold it.
    Raises ModelError for a decoder without start token.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    kind = kind_of(model)
    if kind is RECORDED:  # not told by the first number of the rows, whose reading waits for a GPU
        found, name = read(ids), str(model.main_input_name)
        return {name: found.features.to(_read_in(model)), "decoder_input_ids": shifted(model, found.targets)}
    if kind is None or kind.texts == 1:
        return {"input_ids": ids}
    source, target = source_and_target(ids)
    return {"input_ids": source, "decoder_input_ids": shifted(model, target)}


def _read_in(model: nn.Module) -> torch.dtype:
    """The dtype in which a model reads features, that of the first weights of its encoder."""
    encoder: nn.Module = model.get_encoder()  # type: ignore[operator]
    return next(parameter.dtype for parameter in encoder.parameters() if parameter.is_floating_point())


def shifted(model: nn.Module, target: Ids) -> Ids:
    """The inputs of a decoder whose answers are the tokens of `target`, by the model's own rule if it has one.

    Tokens behind the end of a target (IGNORED) become padding, which no token before it reads.
    """
    start = getattr(getattr(model, "config", None), "decoder_start_token_id", None)
    own = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if own is not None:
        try:
            return call_foreign(own, target)
        except CannotRun as error:
            raise _without_start(model) from error
    if start is None:
        raise _without_start(model)
    padding = getattr(getattr(model, "config", None), "pad_token_id", None) or 0
    read_before = target[:, :-1].masked_fill(target[:, :-1] == IGNORED, padding)
    return torch.cat([target.new_full((len(target), 1), start), read_before], dim=1)


def _without_start(model: nn.Module) -> ModelError:
    return ModelError(
        f"model: the configuration of {type(model).__name__} does not say which token its decoder starts with; add "
        "decoder_start_token_id and pad_token_id to its config.json"
    )


def prompt_length(model: nn.Module, ids: Ids) -> int:
    """The tokens before the answer in what `generate` returns for a prompt: the prompt, or a decoder's start token."""
    return ids.shape[1] if texts_in_row(model) == 1 else 1


def shape_of_answer(model: nn.Module, ids: Ids) -> tuple[int, ...]:
    """The shape of a model's answer to rows, without its last axis."""
    kind = kind_of(model)
    if kind is RECORDED:
        return ids.shape[0], longest(ids)
    if kind is not None and not kind.each:
        return (ids.shape[0],)
    return ids.shape[0], text_lengths(texts_in_row(model), ids.shape[1])[-1]
