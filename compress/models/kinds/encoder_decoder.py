"""Encoder-decoder models: predict a target text from a source text.

The encoder reads the source. The decoder reads the target shifted to the right by its start token, as in training
(teacher forcing). A stream of text is cut into sequences whose first half is the source and whose second half is the
target: prefix language modelling (Lester 2021, arXiv 2104.08691, section 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from compress.errors import CalibrationError, CannotRun, ModelError, call_foreign
from compress.models.kinds.batch import DECODER_IDS, IDS, IGNORED, LABELS, MASK, Batch, Examples
from compress.models.kinds.contract import ModelKind, cut_padding, listed, transcript_of


@dataclass(frozen=True)
class EncoderDecoder(ModelKind):
    """Models of target tokens, given a source text and the tokens of the target before them."""

    name: ClassVar[str] = "predicts target tokens from a source text"
    auto: ClassVar[str] = "AutoModelForSeq2SeqLM"
    task: ClassVar[str] = "text2text-generation"
    predicts: ClassVar[str] = "target tokens"
    texts: ClassVar[int] = 2

    def matches(self, model: nn.Module) -> bool:
        config = getattr(model, "config", None)
        if not isinstance(model, PreTrainedModel) or not isinstance(config, PretrainedConfig):
            return False
        return bool(getattr(config, "is_encoder_decoder", False)) and listed(type(model), config, self.auto)

    def examples(self, model: PreTrainedModel, texts: Sequence[Int[Tensor, "sequences length"]]) -> Examples:
        pairs = zip(*(text.contiguous().split(1) for text in texts), strict=True)
        return Examples(tuple(taught(model, {IDS: source}, target) for source, target in pairs))

    def of_mapping(self, model: PreTrainedModel, mapping: Mapping[str, Any], place: str) -> Examples:
        if not {IDS, LABELS} <= set(mapping) <= {IDS, LABELS, MASK, DECODER_IDS}:
            raise CalibrationError(
                f"{place}: holds {', '.join(map(str, mapping)) or 'nothing'}; give {IDS} and {LABELS}, and for padded "
                f"sources {MASK}"
            )
        ids, labels = torch.as_tensor(mapping[IDS]), torch.as_tensor(mapping[LABELS])
        if ids.dim() != 2 or labels.dim() != 2 or len(ids) != len(labels) or not ids.numel():
            raise CalibrationError(
                f"{place}: {IDS} {list(ids.shape)} and {LABELS} {list(labels.shape)} do not belong together; write "
                "integers [sequences, tokens]"
            )
        sources = cut_padding(list(ids), mapping.get(MASK), place, 0, "sources")
        targets = [transcript_of(row, f"{place}: {LABELS}[{i}]") for i, row in enumerate(labels)]
        pairs = zip(sources, targets, strict=True)
        return Examples(tuple(taught(model, {IDS: source[None]}, target[None]) for source, target in pairs))


def taught(model: PreTrainedModel, inputs: Mapping[str, Tensor], labels: Int[Tensor, "sequences tokens"]) -> Batch:
    """Return the batch of target tokens, with the inputs of the decoder. Raises ModelError without a start token."""
    return Batch({**inputs, DECODER_IDS: shifted(model, labels)}, labels)


def shifted(model: PreTrainedModel, labels: Int[Tensor, "sequences tokens"]) -> Int[Tensor, "sequences tokens"]:
    """Return the inputs of a decoder whose answers are the target tokens, by the model's own rule if it has one."""
    start = getattr(model.config, "decoder_start_token_id", None)
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        try:
            return call_foreign(prepare, labels)
        except CannotRun as error:
            raise _without_start(model) from error
    if start is None:
        raise _without_start(model)
    padding = getattr(model.config, "pad_token_id", None) or 0
    previous_tokens = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, padding)
    return torch.cat([labels.new_full((len(labels), 1), start), previous_tokens], dim=1)


def _without_start(model: nn.Module) -> ModelError:
    return ModelError(
        f"model: the configuration of {type(model).__name__} does not say which token its decoder starts with; add "
        "decoder_start_token_id and pad_token_id to its config.json"
    )
