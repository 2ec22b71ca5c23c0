"""Vision-language models: predict each token of a text from its images and from the tokens before it.

A list names pictures and their texts, a line for each:

    {"image": "pictures/1.png", "text": "A red bicycle leans against a wall."}

The model's own processor makes the inputs: `pixel_values` of the vision tower, and token ids with a placeholder for
every position of an image. Placeholders are no targets. A text without images is read as by other causal models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase

from compress.errors import CalibrationError, CannotRun, call_foreign, one_line
from compress.models.chat_template import render_chat
from compress.models.kinds.batch import IDS, IGNORED, LABELS, MASK, Batch, Examples
from compress.models.kinds.causal import CausalLM
from compress.models.kinds.contract import LineReader, Lists, listed, text_config
from compress.models.structure.ends import vocabulary_size

LINE = '{"image": "picture.png", "text": "what it shows"}'
PIXELS = "pixel_values"
CHANNELS = 3  # of an image in float32


@dataclass(frozen=True)
class VisionLanguage(CausalLM):
    """Models of next tokens whose inputs may contain images; the targets are the tokens of the text."""

    auto: ClassVar[str] = "AutoModelForImageTextToText"
    task: ClassVar[str] = "image-text-to-text"
    processor: ClassVar[str] = "AutoProcessor"
    lists: ClassVar[Lists | None] = Lists(LINE, "image", "pictures", only=False)

    def matches(self, model: nn.Module) -> bool:
        return (
            isinstance(model, PreTrainedModel)
            and super().matches(model)
            and listed(type(model), model.config, self.auto)
        )

    def of_mapping(self, model: PreTrainedModel, mapping: Mapping[str, Any], place: str) -> Examples:
        """Return the examples in a batch of a processor of transformers, whose rows have one length and equal images.

        Args:
            model: the model.
            mapping: `input_ids` [rows, tokens], `pixel_values` and other inputs of the model; `labels` [rows, tokens],
                by default the tokens of the text.
            place: beginning of messages.

        Raises:
            CalibrationError: for other tensors.
        """
        if not {IDS, PIXELS} <= set(mapping):
            raise CalibrationError(
                f"{place}: holds {', '.join(map(str, mapping)) or 'nothing'}; give {IDS} and {PIXELS}"
            )
        tensors = {str(name): torch.as_tensor(tensor) for name, tensor in mapping.items()}
        mask, labels = tensors.pop(MASK, None), tensors.pop(LABELS, None)
        rows = len(tensors[IDS])
        if mask is not None and not bool(mask.bool().all()):
            raise CalibrationError(f"{place}: {MASK} has zeros; give rows of one length, or a list of pictures")
        if uneven := [name for name, tensor in tensors.items() if len(tensor) % rows]:
            raise CalibrationError(
                f"{place}: {', '.join(uneven)} cannot be divided over {rows} rows; give rows with equally large "
                "images, or a list of pictures"
            )
        ordered = {IDS: tensors.pop(IDS).long(), **tensors}
        return Examples(tuple(pictured(model, row) for row in Batch(ordered, labels).split()))

    def check(self, model: PreTrainedModel, examples: Examples, places: Sequence[str]) -> None:
        size, positions = vocabulary_size(model), getattr(text_config(model.config), "max_position_embeddings", None)
        for place, example in zip(places, examples, strict=True):
            most, length = int(example.inputs[IDS].max()), example.length
            if positions is not None and length > positions:
                raise CalibrationError(
                    f"{place}: has {length} tokens, but the model has {positions} positions; use a length <= "
                    f"{positions}, or a smaller picture"
                )
            if most >= size:
                raise CalibrationError(
                    f"{place}: has the token id {most}, but the model's vocabulary has {size}; use the model's own "
                    "processor"
                )
            if not bool((self.labels(example) != IGNORED).any()):
                raise CalibrationError(f"{place}: has no token of a text after its images; write another text")

    def feature_bytes(self, model: PreTrainedModel, tokens: int) -> int:
        """Return the bytes of the pixels of an example; for images of any size, of the most that fill its tokens."""
        vision = model.config.vision_config
        size = getattr(vision, "image_size", None)
        if isinstance(size, int):
            return 4 * CHANNELS * size**2
        merged = getattr(vision, "temporal_patch_size", 1) * getattr(vision, "spatial_merge_size", 1) ** 2
        return 4 * CHANNELS * vision.patch_size**2 * merged * tokens

    def reader(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, column: str, folder: Path, place: str
    ) -> LineReader:
        try:
            if not model.name_or_path:
                raise ValueError("the model is not from a folder")
            processor: Any = call_foreign(AutoProcessor.from_pretrained, model.name_or_path, trust_remote_code=False)
            if not hasattr(processor, "image_processor"):
                raise ValueError("it has no image processor")
        except (ValueError, CannotRun) as error:
            raise CalibrationError(
                f"{place}: the processor of the model cannot be read ({one_line(error)}); add its "
                "preprocessor_config.json to the model's folder, or use inputs in a .safetensors file"
            ) from error
        return PictureReader(model, processor, column, folder)


def placeholders_of(model: PreTrainedModel) -> list[int]:
    """Return the tokens that stand for images and videos, and those around them, by the configuration."""
    config = model.config.to_dict()
    token_ids = (
        value
        for name, value in config.items()
        if name.endswith(("_token_id", "_token_index")) and any(word in name for word in ("image", "video", "vision"))
    )
    return [token for token in token_ids if isinstance(token, int)]


def pictured(model: PreTrainedModel, example: Batch) -> Batch:
    """Return an example with labels; placeholders are no targets."""
    ids = example.inputs[IDS]
    labels = ids if example.labels is None else example.labels
    outside = torch.isin(ids, torch.tensor(placeholders_of(model), dtype=ids.dtype))
    return Batch(example.inputs, labels.masked_fill(outside, IGNORED))


@dataclass(frozen=True)
class PictureReader:
    """Makes examples of pictures and their texts.

    Attributes:
        model: the model.
        processor: makes inputs of images and text.
        column: column of the text.
        folder: folder of relative paths.
    """

    model: PreTrainedModel
    processor: Any
    column: str
    folder: Path

    def example(self, line: Mapping[str, Any], place: str, length: int | None) -> Batch:
        """Return the example of a line, cut to its first `length` tokens. Raises CalibrationError."""
        path = self.folder / line["image"]
        try:
            image = call_foreign(lambda: Image.open(path).convert("RGB"))
        except CannotRun as error:
            raise CalibrationError(
                f"{place}: cannot read {path} ({one_line(error.cause)}); write the path of a picture"
            ) from error
        text = self._text(line[self.column], place)
        try:
            outputs = call_foreign(self.processor, images=image, text=text, return_tensors="pt")
        except CannotRun as error:
            raise CalibrationError(
                f"{place}: the processor cannot read {path} ({one_line(error.cause)}); use another picture"
            ) from error
        tensors: dict[str, Tensor] = {name: tensor for name, tensor in outputs.items() if name != MASK}
        ids = tensors[IDS]
        if length is not None and bool(torch.isin(ids[:, length:], torch.tensor(placeholders_of(self.model))).any()):
            raise CalibrationError(
                f"{place}: its image does not end within {length} tokens; use a larger length, or a smaller picture"
            )
        cut = {name: t[:, :length] if t.shape[:2] == ids.shape and t.dim() == 2 else t for name, t in tensors.items()}
        features = {name: t.float() if t.is_floating_point() else t for name, t in cut.items() if name != IDS}
        return pictured(self.model, Batch({IDS: cut[IDS], **features}))

    def _text(self, text: str, place: str) -> str:
        """Return a text with the token of its image: as it is, by the chat template, or after the token.

        Raises:
            CalibrationError: for a chat template that cannot be rendered.
        """
        token = getattr(self.processor, "image_token", "<image>")
        if token in text:
            return text
        template = getattr(self.processor, "chat_template", None)
        if template is None:
            return f"{token}{text}"
        content = [{"type": "image"}, {"type": "text", "text": text}]
        template = template["default"] if isinstance(template, dict) else template
        try:
            return render_chat(self.processor.tokenizer, [{"role": "user", "content": content}], template)
        except CannotRun as error:
            raise CalibrationError(
                f"{place}: the chat template of the processor cannot be rendered ({one_line(error.cause)}); correct "
                f"it, or write {token} into the texts"
            ) from error
