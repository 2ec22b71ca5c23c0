"""The recipe: a model, a calibration set and a list of passes, as a frozen value that YAML spells."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

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

from compress.checkpoint.checkpoint import is_compressed
from compress.checkpoint.formats import FORMATS, unknown_format
from compress.checkpoint.formats.base import Format
from compress.data.text_source import path_text
from compress.errors import RecipeError
from compress.models.computation import DEVICES
from compress.numerics.sparse.positions import SparsePolicy
from compress.passes.contract.options import OptionError, Options, mistakes, option_error
from compress.passes.contract.passes import Pass
from compress.passes.contract.problems import Problems, for_all, together
from compress.passes.contract.wording import Place, recipe_error
from compress.recipe.calibration import Calibration
from compress.recipe.evaluation import Evaluate
from compress.recipe.names import (
    PRESETS,
    SENSITIVITY,
    Expansions,
    expanded,
    expanded_items,
    located_error,
    steps_of,
)
from compress.recipe.order import check_order, label
from compress.recipe.paths import located
from compress.recipe.plugins import find, load_files, spelled
from compress.recipe.sensitivities import expand_sensitivity
from compress.recipe.settings import Setting, apply_settings, error_of_setting
from compress.recipe.shipped import find_recipe
from compress.recipe.yaml import compose, read_file, yaml_of

PASSES = "passes"
"""The key of the passes in a recipe."""

DType = Literal["auto", "float32", "bfloat16", "float16"]


class Save(Options):
    """The formats of the checkpoint."""

    format: str | tuple[str, ...] = Field(
        default="compressed-tensors",
        description=f"one of {', '.join(FORMATS)}; or a list: the first is written to the output folder, and converted "
        "to each other one in a folder of its name inside",
    )
    dtype: DType = Field(
        default="auto",
        description="dtype of scales and dense tensors; auto: the 16-bit dtype of the model's weights (for quantized "
        ".gguf files the one that loses least), or float32 if they are float32",
    )
    verify: Literal["full", "own"] = Field(
        default="full",
        description="'own': reload with compress.load; 'full': also with transformers, where it can read it; "
        "plan and report say where it cannot",
    )
    sparse: SparsePolicy = Field(
        default="auto",
        description="store only the kept weights of pruned layers (format native); 'auto': if that is not larger; "
        "'always': also if it is larger, so that every mask can be read back; 'off': store the zeros",
    )

    tensor_parallel: int | None = Field(
        default=None,
        ge=1,
        description="devices over which a server such as vLLM splits each layer: the plan checks that groups and "
        "packed words divide, and that layers which servers compute as one (q, k, v; gate, up) are stored alike",
    )
    embedding: str = Field(
        default="auto",
        description="only for format gguf: block type of the embedding, unless it is that of the head too; dense: as "
        "save.dtype; auto: Q6_K",
    )
    head: str = Field(
        default="auto", description="only for format gguf: block type of the head, as embedding; auto: Q6_K"
    )

    def model_post_init(self, context: Any) -> None:
        self.target()
        for name in self.formats[1:]:
            self.of_format(name).target()

    @property
    def formats(self) -> tuple[str, ...]:
        """The names of all formats; the first one is that of the output folder."""
        return (self.format,) if isinstance(self.format, str) else self.format

    def target(self) -> Format:
        """Return the first format with these options."""
        name = self.formats[0]
        is_left_to_others = any(FORMATS[other].ends_typed for other in self.formats[1:])
        if is_left_to_others and not FORMATS[name].ends_typed:
            return FORMATS[name]
        return FORMATS[name].configured(self.embedding, self.head)

    def of_format(self, name: str) -> Save:
        """Return the options of one of several formats."""
        ends = {} if FORMATS[name].ends_typed else {"embedding": "auto", "head": "auto"}
        return self.model_copy(update={"format": name, **ends})

    @field_validator("format", mode="before")
    @classmethod
    def _single(cls, names: Any) -> Any:
        """Spell a list of one format as its name."""
        return names[0] if isinstance(names, list | tuple) and len(names) == 1 else names

    @field_validator("format")
    @classmethod
    def _known(cls, names: str | tuple[str, ...]) -> str | tuple[str, ...]:
        listed = (names,) if isinstance(names, str) else names
        if not listed:
            raise ValueError("names no format; write one, such as compressed-tensors")
        for name in listed:
            if name not in FORMATS:
                raise ValueError(unknown_format(name))
            if listed.count(name) > 1:
                raise ValueError(f"format {name} is listed twice; list it once")
        return names

    @field_validator("sparse")
    @classmethod
    def _possible(cls, policy: str, info: ValidationInfo) -> str:
        names = info.data.get("format")
        name = names[0] if isinstance(names, tuple) else names
        if policy == "always" and name is not None and not FORMATS[name].sparse:
            raise ValueError(f"'always' is not possible: format {name} stores the zeros; use format: native")
        return policy


class Recipe(BaseModel):
    """The options of a run; equal recipes on equal models give equal bytes.

    Raises:
        RecipeError: for every mistake: unknown options, values out of range, passes in an impossible order.
        SeveralErrors: for several mistakes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        description="hub id (also OWNER/NAME@REVISION), local folder, or .gguf file; paths in a recipe file "
        "are relative to its folder"
    )
    dtype: DType = Field(
        default="auto",
        description="dtype of computation; auto: the checkpoint's, but float32 on a CPU without bfloat16 instructions",
    )
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, ...")
    seed: int = Field(default=0, ge=0, lt=1 << 63, description="seed of all random numbers")
    trust_remote_code: bool = Field(default=False, description="run the model's own code")
    masks: Literal["keep", "forget"] = Field(
        default="keep",
        description="zeros of a model that is sparse already: 'keep': they stay zero in every pass; 'forget': they are "
        "ordinary weights",
    )
    calibration: Calibration = Calibration()
    plugins: tuple[str, ...] = Field(
        default=(), description="Python files with one pass each; reading the recipe executes them"
    )
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
            raise together([recipe_error(*mistake) for mistake in mistakes(error, cls)]) from None

    @field_validator("model", mode="before")
    @classmethod
    def _as_text(cls, source: Any) -> Any:
        return path_text(source)

    @field_validator("plugins", mode="before")
    @classmethod
    def _as_texts(cls, paths: Any) -> Any:
        return [path_text(path) for path in paths] if isinstance(paths, list | tuple) else paths

    @field_validator("device")
    @classmethod
    def _known_device(cls, name: str) -> str:
        if not re.fullmatch(DEVICES, name):
            raise ValueError(f"device {name!r} is not known; use auto, cpu, cuda, or cuda:N")
        return name

    @field_validator("passes", mode="before")
    @classmethod
    def _named(cls, items: Any, info: ValidationInfo) -> Any:
        """Accept passes by name, as YAML spells them."""
        return read_passes(items, load_files(info.data.get("plugins", ())))

    def model_post_init(self, context: Any) -> None:
        check_order(self.passes, begun=is_compressed(self.model))

    @field_serializer("passes")
    def _spell(self, passes: tuple[Pass, ...]) -> list[dict[str, Any]]:
        return [{spelled(type(step)): step.model_dump(mode="json")} for step in passes]

    def in_format(self, name: str) -> Recipe:
        """Return the recipe that writes one of its formats alone."""
        return self.model_copy(update={"save": self.save.of_format(name)})

    def labels(self) -> list[str]:
        """Return the label of every pass: 'passes[0] gptq'."""
        return [label(i, step) for i, step in enumerate(self.passes)]

    def stated(self) -> dict[str, Any]:
        """Return the plain values that the recipe states: what was set, and what differs from the defaults.

        Of `to_yaml`, a recipe made of all values, no default would fit itself to the model.
        """
        values = {name: _stated(getattr(self, name)) for name in ("calibration", "save", "eval")}
        steps = [{spelled(type(step)): _stated(step)} for step in self.passes]
        others = _stated(self, exclude={PASSES, *values}) or {}
        fields_set = self.model_fields_set
        return others | {name: value for name, value in values.items() if value or name in fields_set} | {PASSES: steps}

    def to_yaml(self) -> str:
        """Return the fully resolved recipe as YAML text, with every option."""
        return yaml_of(self.model_dump(mode="json"))

    @classmethod
    def from_yaml(cls, path: str | Path, settings: Sequence[Setting] = ()) -> Recipe:
        """Read a recipe from a YAML file, or a shipped one by its name.

        Args:
            path: file, or name of a shipped recipe.
            settings: values that replace those of the recipe.

        Raises:
            RecipeError: with file, line and column: no such file, not YAML, unknown keys, passes or options (with the
                nearest known one), values out of range, passes in an impossible order. For a mistake in a setting, the
                error names the setting.
            SeveralErrors: for several mistakes, each as it would be raised alone.
        """
        path = find_recipe(path)
        return cls.from_text(read_file(path), str(path), settings, path.parent)

    @classmethod
    def from_text(
        cls, text: str, name: str = "recipe", settings: Sequence[Setting] = (), folder: Path | None = None
    ) -> Recipe:
        """Read a recipe from YAML text.

        Args:
            text: YAML text.
            name: name of the text, for errors.
            settings: values that replace those of the recipe.
            folder: folder to which paths are relative; None: the current one.
        """
        duplicates, problems = Problems(), Problems()
        data, places = compose(text, name, duplicates)
        if folder is not None:
            data = located(data, folder, problems, [setting.place for setting in settings])
        data, origins = expanded(data, EXPANSIONS)
        data = apply_settings(data, settings, problems)
        recipe = problems.attempt(cls.model_validate, data)
        if recipe is None or problems.errors or duplicates.errors:
            located_errors = [located_error(error, name, places, origins, settings) for error in problems.errors]
            raise together([*duplicates.errors, *located_errors])
        return recipe

    @classmethod
    def from_data(cls, data: Any, settings: Sequence[Setting] = ()) -> Recipe:
        """Build a recipe from the plain values of YAML.

        Raises:
            RecipeError: if a value is invalid; SeveralErrors for several of them.
        """
        problems = Problems()
        recipe = problems.attempt(cls.model_validate, apply_settings(expanded(data, EXPANSIONS)[0], settings, problems))
        if recipe is None or problems.errors:
            raise together([error_of_setting(settings, error) or error for error in problems.errors])
        return recipe


def _stated(values: BaseModel | None, exclude: set[str] | None = None) -> dict[str, Any] | None:
    if values is None:
        return None
    changed = values.model_dump(mode="json", exclude_defaults=True, exclude=exclude)
    return changed | values.model_dump(mode="json", exclude_unset=True, exclude=exclude)


EXPANSIONS: Expansions = {**PRESETS, SENSITIVITY: lambda spelled: [expand_sensitivity(spelled)]}
"""The items that stand for passes, by key."""


def read_passes(items: Any, plugins: Mapping[str, type[Pass]] = MappingProxyType({})) -> tuple[Pass, ...]:
    """Read passes from a list of passes, names with options, and presets.

    Args:
        items: passes, or plain values as in YAML.
        plugins: passes of the recipe's plugin files, by key.

    Raises:
        RecipeError: if an item is not a valid pass; SeveralErrors for several mistakes.
    """
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise OptionError((), "must be a list, such as '- gptq: {weights: int4}'", PASSES)
    return tuple(for_all(lambda item: _pass(*item, plugins), enumerate(expanded_items(items, EXPANSIONS)[0])))


def _pass(index: int, item: Any, plugins: Mapping[str, type[Pass]]) -> Pass:
    if isinstance(item, Pass):
        return item
    if isinstance(item, str):
        item = {item: None}
    if not isinstance(item, Mapping) or len(item) != 1:
        raise OptionError(
            (index,), "a pass must be one name with its options, such as '- gptq: {weights: int4}'", PASSES
        )
    ((key, options),) = item.items()
    place: Place = (index, key)
    try:
        steps_of(item, EXPANSIONS)
        kind = find(str(key), plugins)
    except OptionError as error:
        raise OptionError((*place, *error.place), error.message, PASSES) from error
    except RecipeError as error:
        raise OptionError(place, str(error), PASSES) from error
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise OptionError(place, f"the options of {key} must be a mapping, such as {{targets: '*.mlp.*'}}", PASSES)
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        raise option_error(error, kind, place, PASSES) from None
