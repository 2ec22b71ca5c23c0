"""The recipe: a model, a calibration set and a list of passes, as a frozen value that YAML spells."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from compress.api.context import DEVICES
from compress.api.options import Options, Place, mistake
from compress.api.passes import Pass
from compress.errors import RecipeError, did_you_mean
from compress.formats import FORMATS
from compress.numerics.sparse.positions import SparsePolicy
from compress.passes import PASSES
from compress.recipe.order import check_order, label, recipe_error
from compress.recipe.presets import expand
from compress.recipe.settings import Setting, apply_settings, blamed, involved
from compress.recipe.yaml import compose, nearest

DType = Literal["auto", "float32", "bfloat16", "float16"]


class Calibration(Options):
    """The source and shape of the calibration token ids."""

    source: str = Field(
        default="embedded", description="embedded, wikitext, c4, ultrachat, self, or a .txt, .jsonl or .npy file"
    )
    sequences: int | None = Field(
        default=64, gt=0, description="number of sequences; null: all sequences of a .npy file"
    )
    length: int | None = Field(default=512, gt=1, description="tokens per sequence; null: those of a .npy file")
    batch: int = Field(default=4, gt=0, description="sequences per forward pass")


class Save(Options):
    """The format of the checkpoint."""

    format: str = Field(default="compressed-tensors", description=f"one of {', '.join(FORMATS)}")
    dtype: DType = Field(
        default="auto", description="dtype of scales and dense tensors; auto: the dtype of computation"
    )
    verify: Literal["full", "own"] = Field(
        default="full",
        description="'own': reload with compress.load; 'full': also with transformers, if it can read the format",
    )
    sparse: SparsePolicy = Field(
        default="auto",
        description="store only the kept weights of pruned layers (format native); 'auto': if that is not larger; "
        "'always': also if it is larger, so that every mask can be read back; 'off': store the zeros",
    )

    @field_validator("format")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in FORMATS:
            raise ValueError(f"format {name!r} is not known{did_you_mean(name, FORMATS)}")
        return name

    @field_validator("sparse")
    @classmethod
    def _possible(cls, policy: str, info: ValidationInfo) -> str:
        name = info.data.get("format")
        if policy == "always" and name is not None and not FORMATS[name].sparse:
            raise ValueError(f"'always' is not possible: format {name} stores the zeros; use format: native")
        return policy


class Evaluate(Options):
    """The evaluation of the reloaded checkpoint and of the base model."""

    @classmethod
    def key(cls) -> str:
        """The key in a recipe."""
        return "eval"

    perplexity: tuple[str, ...] = Field(default=("embedded",), description="text sources, as for calibration")
    windows: int | None = Field(default=16, gt=0, description="non-overlapping windows per text; null: all")
    length: int | None = Field(default=512, gt=1, description="tokens per window; null: those of a .npy file")


class Recipe(BaseModel):
    """The options of a run; equal recipes on equal models give equal bytes.

    Raises RecipeError for every mistake: unknown options, values out of range, passes in an impossible order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(description="hub id, local folder, or .gguf file")
    dtype: DType = Field(default="auto", description="dtype of computation; auto: the checkpoint's")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, ...")
    seed: int = Field(default=0, ge=0, lt=1 << 63, description="seed of all random numbers")
    trust_remote_code: bool = Field(default=False, description="run the model's own code")
    calibration: Calibration = Calibration()
    passes: tuple[SerializeAsAny[Pass], ...] = Field(min_length=1)
    save: Save = Save()
    eval: Evaluate | None = Field(default=Evaluate(), description="null: no evaluation")

    @model_validator(mode="wrap")
    @classmethod
    def _as_recipe_error(cls, data: Any, build: Callable[[Any], Recipe]) -> Recipe:
        """Turn errors of pydantic into RecipeError, so that Python and YAML raise the same errors."""
        if not isinstance(data, Mapping | Recipe):
            raise RecipeError("a recipe must be a mapping with the keys model, passes, ...")
        try:
            return build(data)
        except ValidationError as error:
            raise recipe_error(*mistake(error, cls)) from None

    @field_validator("device")
    @classmethod
    def _known_device(cls, name: str) -> str:
        if not re.fullmatch(DEVICES, name):
            raise ValueError(f"device {name!r} is not known; use auto, cpu, cuda, or cuda:N")
        return name

    @field_validator("passes", mode="before")
    @classmethod
    def _named(cls, items: Any) -> Any:
        """Accept passes by name, as YAML spells them."""
        return read_passes(items)

    def model_post_init(self, context: Any) -> None:
        check_order(self.passes)

    @field_serializer("passes")
    def _spell(self, passes: tuple[Pass, ...]) -> list[dict[str, Any]]:
        return [{step.key(): step.model_dump(mode="json")} for step in passes]

    def labels(self) -> list[str]:
        """The label of every pass: 'passes[0] gptq'."""
        return [label(i, step) for i, step in enumerate(self.passes)]

    def to_yaml(self) -> str:
        """The fully resolved recipe as YAML text, with every option."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @classmethod
    def from_yaml(cls, path: str | Path, settings: Sequence[Setting] = ()) -> Recipe:
        """Read a recipe from a YAML file. settings: values that replace those of the file.

        Raises RecipeError with file, line and column: no such file, not YAML, unknown keys, passes or options (with the
        nearest known one), values out of range, passes in an impossible order. For a mistake in a setting, the error
        names the setting.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path}: cannot be read ({error})") from error
        return cls.from_text(text, str(path), settings)

    @classmethod
    def from_text(cls, text: str, name: str = "recipe", settings: Sequence[Setting] = ()) -> Recipe:
        """Read a recipe from YAML text; name: of the text, for errors."""
        data, places = compose(text, name)
        origins: list[int] = []
        try:
            data, origins = _expanded(data)
            return cls.model_validate(apply_settings(data, settings))
        except RecipeError as error:
            if (found := blamed(settings, error)) is not None:
                raise found from None
            line, column = nearest(places, _before_expansion(error.path, origins))
            raise RecipeError(f"{name}:{line}:{column}: {error}{involved(settings, error)}", error.path) from error

    @classmethod
    def from_data(cls, data: Any, settings: Sequence[Setting] = ()) -> Recipe:
        """Build a recipe from the plain values of YAML. Raises RecipeError."""
        try:
            return cls.model_validate(apply_settings(_expanded(data)[0], settings))
        except RecipeError as error:
            found = blamed(settings, error)
            raise error if found is None else found from None


def _expanded(data: Any) -> tuple[Any, list[int]]:
    """The data of a recipe with the passes of its presets, and the index of the item that each pass comes from."""
    if not isinstance(data, Mapping) or "passes" not in data:
        return data, []
    items, origins = expand(data["passes"])
    return {**data, "passes": items}, origins


def _before_expansion(path: Place, origins: Sequence[int]) -> Place:
    """A place in the data before presets were expanded."""
    index = path[1] if len(path) > 1 and path[0] == "passes" else None
    return ("passes", origins[index], *path[2:]) if isinstance(index, int) and index < len(origins) else path


def read_passes(items: Any) -> tuple[Pass, ...]:
    """Passes from a list of passes, of their names with options as YAML spells them, and of presets.

    Raises RecipeError.
    """
    items, _ = expand(items)
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise recipe_error(("passes",), "must be a list, such as '- gptq: {weights: int4}'")
    return tuple(_pass(i, item) for i, item in enumerate(items))


def _pass(index: int, item: Any) -> Pass:
    if isinstance(item, Pass):
        return item
    if isinstance(item, str):
        item = {item: None}
    if not isinstance(item, Mapping) or len(item) != 1:
        raise recipe_error(
            ("passes", index), "a pass must be one name with its options, such as '- gptq: {weights: int4}'"
        )
    ((key, options),) = item.items()
    place: Place = ("passes", index, key)
    if key not in PASSES:
        raise recipe_error(place, f"pass {key!r} is not known{did_you_mean(str(key), PASSES)}")
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise recipe_error(place, f"the options of {key} must be a mapping, such as {{targets: '*.mlp.*'}}")
    try:
        return PASSES[key].model_validate(dict(options))
    except ValidationError as error:
        inner, message = mistake(error, PASSES[key])
        raise recipe_error((*place, *inner), message) from None
