"""The texts of a recipe: one text or a weighted mixture for calibration, several texts for evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from typing_extensions import Self

from compress.data.text_source import PYTHON, SAMPLING, GivenData, GivenText, TextSource, path_text
from compress.numerics.budget import shares
from compress.passes.contract.options import Options, option_error
from compress.passes.contract.problems import for_all

Text = TypeVar("Text", bound=TextSource)


class WeightedText(TextSource):
    """A text of a mixture."""

    weight: float = Field(default=1.0, gt=0, description="share of the sequences, relative to the other weights")


def _read(kind: type[Text], spelled: Any, index: int) -> Text:
    """Validate an item of a list of texts; an error has the place of the item in the list."""
    try:
        return kind.model_validate({"source": spelled} if isinstance(spelled, str) else spelled)
    except ValidationError as error:
        raise option_error(error, kind, (index,)) from error


def _mixture(value: Any) -> Any:
    if value is None:
        return value
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) == 0:
        raise ValueError("must be a list of texts, such as [{source: embedded, weight: 2}, {source: notes.jsonl}]")
    return tuple(for_all(lambda item: _read(WeightedText, item[1], item[0]), enumerate(value)))


def _evaluated(value: Any) -> Any:
    """Validate the texts of an evaluation; a plain name stays a name."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return value

    def read(item: tuple[int, Any]) -> Any:
        index, text = item
        return _read(TextSource, text, index) if isinstance(text, Mapping) else path_text(text)

    return tuple(for_all(read, enumerate(value)))


Mixture = Annotated[tuple[WeightedText, ...] | None, BeforeValidator(_mixture)]
EvaluatedTexts = Annotated[tuple[TextSource | str, ...], BeforeValidator(_evaluated)]


class Calibration(Options, TextSource):
    """The source and shape of the calibration token ids."""

    kinds: ClassVar[tuple[str, ...]] = ("source", "dataset", "mixture")

    mixture: Mixture = Field(
        default=None, description="instead of source: several texts, each with a weight, {source: ..., weight: 2}"
    )
    self_share: Annotated[float, Field(ge=0, lt=1)] | Literal["auto"] = Field(
        default=0.0,
        description="share of the sequences that the model samples itself (source: self) in place of the text; auto: "
        "half, where passes calibrate, the model generates text and its weights fit into half of the memory",
    )
    sequences: int | None = Field(
        default=64, gt=0, description="number of sequences; null: all sequences of a .npy file"
    )
    length: int | None = Field(default=512, gt=1, description="tokens per sequence; null: those of a .npy file")
    batch: int = Field(default=4, gt=0, description="sequences per forward pass")
    experts: Literal["routed", "all"] = Field(
        default="routed",
        description="tokens of an expert: those that the router sends to it, or all; the output of the block is that "
        "of the routed experts",
    )
    expert_tokens: int = Field(
        default=128,
        ge=0,
        description="an expert with fewer tokens is named in a warning; its statistics are unreliable",
    )

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.mixture is None and self.self_share in (0, "auto"):
            return self
        if self.sequences is None or self.length is None:
            name = "self_share" if self.mixture is None else "a mixture"
            raise ValueError(f"{name} needs sequences and length, of which each text gets its share")
        if empty := [text.label for text, count in self.texts() if count == 0]:
            raise ValueError(
                f"sequences {self.sequences} leave none for {empty[0]}; use more sequences or a larger weight"
            )
        return self

    def _useless(self) -> dict[str, str]:
        if self.mixture is None:
            reasons = super()._useless()
            if self.self_share and not self.sampled:
                reasons = {name: reason for name, reason in reasons.items() if name not in SAMPLING}
            repeated = self.sampled and self.self_share != "auto"
            return reasons | ({"self_share": "the whole text is sampled"} if repeated else {})
        names = set(TextSource.model_fields) - set(self.kinds)
        return dict.fromkeys(sorted(names), "a mixture has this option in each of its texts")

    def texts(self) -> list[tuple[TextSource, int | None]]:
        """Return each text with its number of sequences; None: all sequences of a .npy file."""
        share = 0.0 if self.self_share == "auto" else self.self_share
        if self.mixture is None and not share:
            return [(self, self.sequences)]
        assert self.sequences is not None
        texts: list[TextSource] = [self] if self.mixture is None else list(self.mixture)
        weights = [1.0] if self.mixture is None else [text.weight for text in self.mixture]
        if share:
            weights = [weight / sum(weights) * (1 - share) for weight in weights] + [share]
            texts.append(TextSource(source="self", **({} if self.mixture else self._stated(SAMPLING))))
        return list(zip(texts, shares(weights, self.sequences), strict=True))

    def streams(self) -> list[tuple[TextSource, float]]:
        """Return each text with its weight if all of them are streams, else nothing."""
        texts: list[tuple[TextSource, float]] = [(self, 1.0)]
        if self.mixture is not None:
            texts = [(text, text.weight) for text in self.mixture]
        return texts if not self.self_share and all(text.streaming for text, _ in texts) else []

    def with_source(self, source: str) -> Calibration:
        """Return the same shape with another text in place of the source, the data set or the mixture."""
        return Calibration(source=source, **self._shape())

    def with_data(self, data: GivenData) -> Calibration:
        """Return the same shape with the data of a program in place of the text."""
        return GivenCalibration(source=PYTHON, data=data, **self._shape())

    def _shape(self) -> dict[str, Any]:
        return self._stated(("sequences", "length", "batch", "experts", "expert_tokens"))

    def _stated(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names if name in self.model_fields_set}


class GivenCalibration(GivenText, Calibration):
    """Calibration data that a program passes to `run`."""
