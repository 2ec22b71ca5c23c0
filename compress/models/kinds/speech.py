"""Models of speech: an encoder of recordings and a decoder of their transcripts.

A list names WAV files and their transcripts, a line for each:

    {"audio": "clips/1.wav", "text": "twenty two degrees"}

The model's own feature extractor makes the features, its tokenizer the target tokens with its special tokens.
`language` and `task` of a line choose these where a tokenizer has a choice.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoFeatureExtractor, PreTrainedModel, PreTrainedTokenizerBase

from compress.errors import CalibrationError, CannotRun, call_foreign, one_line
from compress.models.kinds.batch import DECODER_IDS, LABELS, MASK, Batch, Examples
from compress.models.kinds.contract import (
    SAMPLE_TOKENS,
    SUPPORTED,
    LineReader,
    Lists,
    cut_padding,
    transcript_of,
)
from compress.models.kinds.encoder_decoder import EncoderDecoder, taught
from compress.models.kinds.front import front_of, target_positions
from compress.models.kinds.sound import read_sound
from compress.models.structure.ends import vocabulary_size

FEATURES = ("input_features", "input_values")
"""What transformers calls the features of recordings."""
LINE = '{"audio": "clip.wav", "text": "its transcript"}'
PREFIX = ("language", "task")
"""Columns that choose the special tokens before a transcript."""


@dataclass(frozen=True)
class Speech(EncoderDecoder):
    """Models of the tokens of a transcript, given its recording and the tokens before them."""

    name: ClassVar[str] = "transcribes recordings"
    auto: ClassVar[str] = "AutoModelForSpeechSeq2Seq"
    task: ClassVar[str] = "automatic-speech-recognition"
    prompts: ClassVar[bool] = False
    media: ClassVar[str] = "recordings"
    processor: ClassVar[str] = "AutoProcessor"
    lists: ClassVar[Lists | None] = Lists(LINE, "audio", "recordings", only=True)

    def matches(self, model: nn.Module) -> bool:
        return super().matches(model) and model.main_input_name in FEATURES

    def unreadable(self, model: PreTrainedModel, arguments: Mapping[str, Any]) -> str | None:
        lacking = next((name for name in (model.main_input_name, DECODER_IDS) if name not in arguments), None)
        return None if lacking is None else f"hears recordings, but its forward pass takes no {lacking}; {SUPPORTED}"

    def features(self, model: PreTrainedModel) -> object | None:
        return front_of(model)

    def examples(self, model: PreTrainedModel, texts: Sequence[Tensor]) -> Examples:
        """Refuse token ids. Raises CalibrationError."""
        raise CalibrationError(
            f"calibration: {type(model).__name__} {self.name}, and these are token ids; give a mapping with "
            f"{model.main_input_name} and {LABELS}"
        )

    def of_mapping(self, model: PreTrainedModel, mapping: Mapping[str, Any], place: str) -> Examples:
        """Return the recordings in a batch of features and labels.

        Args:
            model: the model.
            mapping: `input_features` or `input_values` [recordings, ...] and `labels` [recordings, longest], whose ends
                are filled with -100. `attention_mask` [recordings, longest] has ones for the features of each
                recording, and zeros for the padding after them, which is cut off if recordings may have any length.
            place: beginning of messages.

        Raises:
            CalibrationError: for other tensors.
        """
        name = next((name for name in FEATURES if name in mapping), None)
        if name is None or LABELS not in mapping:
            keys = ", ".join(map(str, mapping)) or "nothing"
            raise CalibrationError(f"{place}: holds {keys}; give input_features (or input_values) and labels")
        features, labels = torch.as_tensor(mapping[name]), torch.as_tensor(mapping[LABELS])
        fits = features.dim() in (2, 3) and features.is_floating_point() and labels.dim() == 2
        if not fits or labels.is_floating_point() or len(features) != len(labels) or not features.numel():
            raise CalibrationError(
                f"{place}: {name} of {features.dtype} {list(features.shape)} and labels of {labels.dtype} "
                f"{list(labels.shape)} do not belong together; write floats [recordings, bins, frames] or "
                "[recordings, samples], and integers [recordings, tokens] with -100 after the end of each transcript"
            )
        if not bool(features.isfinite().all()):
            raise CalibrationError(f"{place}: {name} holds NaN or infinity; write finite numbers")
        if unknown := [str(key) for key in mapping if key not in (name, LABELS, MASK)]:
            raise CalibrationError(
                f"{place}: {', '.join(unknown)} would have no effect; leave it out, and give {name}, {LABELS} and, for "
                f"padded recordings, {MASK}"
            )
        cut = cut_padding(list(features), mapping.get(MASK), place, front_of(model).time)
        transcripts = [transcript_of(row.long(), f"{place}: {LABELS}[{i}]") for i, row in enumerate(labels)]
        return Examples(tuple(recording(model, *pair) for pair in zip(cut, transcripts, strict=True)))

    def check(self, model: PreTrainedModel, examples: Examples, places: Sequence[str]) -> None:
        front, size, positions = front_of(model), vocabulary_size(model), target_positions(model)
        for place, example in zip(places, examples, strict=True):
            shape, labels = example.inputs[model.main_input_name].shape[1:], example.labels
            if not front.fits(shape):
                turned = len(shape) == 2 and front.fits(shape[::-1])
                how = "swap these two axes" if turned else "make them with the feature extractor of the model"
                how += "" if turned else " (preprocessor_config.json)"
                raise CalibrationError(
                    f"{place}: has features of shape {list(shape)}, but {type(model).__name__} reads {front}; {how}"
                )
            if labels is None or not labels.numel():
                raise CalibrationError(f"{place}: its transcript has no target tokens; write another, or leave it out")
            if int(labels.max()) >= size:
                raise CalibrationError(
                    f"{place}: has the token id {int(labels.max())}, but the model's vocabulary has {size}; use the "
                    "model's own tokenizer"
                )
            if positions is not None and labels.shape[1] > positions:
                raise CalibrationError(
                    f"{place}: its transcript has {labels.shape[1]} tokens, but the decoder has {positions} positions; "
                    f"cut the recording into shorter ones, or use a length <= {positions}, to which transcripts are cut"
                )

    def reader(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, column: str, folder: Path, place: str
    ) -> LineReader:
        if tokenizer is None:
            raise CalibrationError(
                f"{place}: the model has no tokenizer; add it, or use features in a .safetensors file"
            )
        return RecordingReader(model, tokenizer, column, folder, extractor_of(model, place))

    def samples(self, model: PreTrainedModel) -> list[Batch]:
        draw = torch.Generator().manual_seed(0)
        labels = torch.arange(SAMPLE_TOKENS) % vocabulary_size(model)
        return [recording(model, torch.randn(shape, generator=draw), labels) for shape in front_of(model).shapes]

    def probe(self, model: PreTrainedModel, sample: Batch | None, tokens: int) -> Batch:
        assert sample is not None  # that with which the model runs
        return sample

    def stack_lengths(self, model: PreTrainedModel, length: int) -> list[int]:
        limits = [count for count in (length, target_positions(model)) if count]
        return [front_of(model).positions, min(limits, default=0)]

    def feature_bytes(self, model: PreTrainedModel, tokens: int) -> int:
        return 4 * front_of(model).size + 2 * 8 * tokens  # float32; labels and decoder inputs


def recording(model: PreTrainedModel, features: Tensor, labels: Tensor) -> Batch:
    """Return the example of a recording: its features, in float32, and the tokens of its transcript."""
    return taught(model, {model.main_input_name: features.detach().cpu().float()[None]}, labels[None])


def extractor_of(model: PreTrainedModel, place: str) -> Any:
    """Return the feature extractor in the folder of a model. Raises CalibrationError."""
    try:
        if not model.name_or_path:
            raise ValueError("the model is not from a folder")
        extractor: Any = call_foreign(AutoFeatureExtractor.from_pretrained, model.name_or_path, trust_remote_code=False)
        if not isinstance(getattr(extractor, "sampling_rate", None), int):
            raise ValueError("it states no sampling rate")
    except (ValueError, CannotRun) as error:
        raise CalibrationError(
            f"{place}: the feature extractor of the model cannot be read ({one_line(error)}); add its "
            "preprocessor_config.json to the model's folder, or use features in a .safetensors file"
        ) from error
    return extractor


@dataclass(frozen=True)
class RecordingReader:
    """Makes examples of WAV files and their transcripts.

    Attributes:
        model: the model.
        tokenizer: its tokenizer.
        column: column of the transcript.
        folder: folder of relative paths.
        extractor: makes features of sound.
        tokenizers: tokenizers with the prefix of a language and a task, by these.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    column: str
    folder: Path
    extractor: Any
    tokenizers: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def example(self, line: Mapping[str, Any], place: str, length: int | None) -> Batch:
        """Return the example of a line, with at most `length` target tokens. Raises CalibrationError."""
        tokens = self._targets(line, place)[:length]
        return recording(self.model, self._features(line["audio"], place), torch.tensor(tokens, dtype=torch.int64))

    def _features(self, audio: str, place: str) -> Tensor:
        """Return the features of a WAV file."""
        path, rate = self.folder / audio, self.extractor.sampling_rate
        sound = read_sound(path, rate, place)
        most = getattr(self.extractor, "n_samples", None)
        if most is not None and len(sound) > most:
            raise CalibrationError(
                f"{place}: {path} is {len(sound) / rate:.1f} seconds long, but the model hears {most / rate:g}; cut it "
                "and its transcript into shorter ones"
            )
        try:
            outputs = call_foreign(self.extractor, sound, sampling_rate=rate, return_tensors="pt")
            return call_foreign(lambda: outputs[self.model.main_input_name][0])
        except CannotRun as error:
            raise CalibrationError(
                f"{place}: the feature extractor cannot read {path} ({one_line(error.cause)}); use a longer recording"
            ) from error

    def _targets(self, line: Mapping[str, Any], place: str) -> list[int]:
        """Return the target tokens of a transcript: those of the tokenizer without the decoder's start token."""
        text = line[self.column]
        if not text.strip():
            raise CalibrationError(f"{place}: {self.column} is blank; write what is said, or leave the line out")
        tokens = self._tokenizer(line, place)(text).input_ids
        return tokens[1:] if tokens[:1] == [self.model.config.decoder_start_token_id] else tokens

    def _tokenizer(self, line: Mapping[str, Any], place: str) -> Any:
        """Return the tokenizer with the special tokens of a line's language and task."""
        settings = {name: line[name] for name in PREFIX if line.get(name) is not None}
        if not settings:
            return self.tokenizer
        key = tuple(map(str, (settings.get(name) for name in PREFIX)))
        if key in self.tokenizers:
            return self.tokenizers[key]
        tokenizer: Any = copy.deepcopy(self.tokenizer)
        if not hasattr(tokenizer, "set_prefix_tokens"):
            raise CalibrationError(f"{place}: the tokenizer has no tokens for {' and '.join(settings)}; leave them out")
        try:
            call_foreign(tokenizer.set_prefix_tokens, **settings)
        except CannotRun as error:
            raise CalibrationError(f"{place}: {' and '.join(settings)}: {one_line(error.cause)}") from error
        self.tokenizers[key] = tokenizer
        return tokenizer
