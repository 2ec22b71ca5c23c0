"""Recipe: a model, a calibration set and a list of passes, as a frozen value. YAML is its spelling."""

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
from yaml.reader import ReaderError

from compress.api.context import DEVICES
from compress.api.facts import Fact
from compress.api.options import Place, mistake, spoken
from compress.api.passes import Pass
from compress.errors import RecipeError, did_you_mean
from compress.formats import FORMATS
from compress.numerics.sparse.positions import SparsePolicy
from compress.passes import PASSES

DType = Literal["auto", "float32", "bfloat16", "float16"]
KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Calibration(_Part):
    """Where calibration token ids come from."""

    source: str = Field(
        default="embedded", description="embedded, wikitext, c4, ultrachat, self, or a .txt, .jsonl or .npy file"
    )
    sequences: int | None = Field(default=64, gt=0, description="how many sequences; null: all that a .npy file holds")
    length: int | None = Field(default=512, gt=1, description="tokens per sequence; null: as a .npy file has them")
    batch: int = Field(default=4, gt=0, description="sequences in one forward pass")


class Save(_Part):
    """What is written."""

    format: str = Field(default="compressed-tensors", description=f"one of {', '.join(FORMATS)}")
    dtype: DType = Field(default="auto", description="dtype of scales and dense tensors; auto: the one computed in")
    verify: Literal["full", "own"] = Field(
        default="full",
        description="'own': reload with compress.load; 'full': also with transformers, if it can read the format",
    )
    sparse: SparsePolicy = Field(
        default="auto",
        description="pruned layers by their kept weights alone (format native): 'auto': where that is no larger, "
        "'always': even if it is, so that every mask can be read back, 'off': with zeros in place",
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
            raise ValueError(f"'always' cannot be had: format {name} stores zeros in place; use format: native")
        return policy


class Evaluate(_Part):
    """What is measured on the reloaded checkpoint and on the base model."""

    perplexity: tuple[str, ...] = Field(default=("embedded",), description="text sources, as for calibration")
    windows: int | None = Field(default=16, gt=0, description="non-overlapping windows per text; null: all")
    length: int | None = Field(default=512, gt=1, description="tokens per window; null: as a .npy file has them")


class Recipe(_Part):
    """All that a run depends on; equal recipes on equal models give equal bytes.

    Raises RecipeError for every mistake: unknown options, values out of range, passes in an impossible order.
    """

    model: str = Field(description="hub id, local folder, or .gguf file")
    dtype: DType = Field(default="auto", description="dtype that is computed in; auto: the checkpoint's")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, ...")
    seed: int = Field(default=0, ge=0, lt=1 << 63, description="of everything drawn at random")
    trust_remote_code: bool = Field(default=False, description="run code that comes with the model")
    calibration: Calibration = Calibration()
    passes: tuple[SerializeAsAny[Pass], ...] = Field(min_length=1)
    save: Save = Save()
    eval: Evaluate = Evaluate()

    @model_validator(mode="wrap")
    @classmethod
    def _in_our_words(cls, data: Any, build: Callable[[Any], Recipe]) -> Recipe:
        """Python and YAML raise the same errors."""
        if not isinstance(data, Mapping | Recipe):
            raise RecipeError("a recipe is a mapping with the keys model, passes, ...")
        try:
            return build(data)
        except ValidationError as error:
            raise _wrong(*mistake(error, cls)) from error

    @field_validator("device")
    @classmethod
    def _known_device(cls, name: str) -> str:
        if not re.fullmatch(DEVICES, name):
            raise ValueError(f"device {name!r} is not known; use auto, cpu, cuda, or cuda:N")
        return name

    @field_validator("passes", mode="before")
    @classmethod
    def _named(cls, items: Any) -> Any:
        """Passes by their names, as YAML spells them."""
        return _passes(items)

    def model_post_init(self, context: Any) -> None:
        check_order(self.passes)

    @field_serializer("passes")
    def _spell(self, passes: tuple[Pass, ...]) -> list[dict[str, Any]]:
        return [{step.key(): step.model_dump(mode="json")} for step in passes]

    def labels(self) -> list[str]:
        """'passes[0] gptq' for every pass."""
        return [label(i, step) for i, step in enumerate(self.passes)]

    def to_yaml(self) -> str:
        """The fully resolved recipe, every option spelled out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Recipe:
        """Read a recipe from a YAML file.

        Raises RecipeError with file, line and column: no such file, no YAML, unknown keys, passes, options (with the
        nearest known one), values out of range, passes in an impossible order.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path}: cannot be read ({error})") from error
        return cls.from_text(text, str(path))

    @classmethod
    def from_text(cls, text: str, name: str = "recipe") -> Recipe:
        """Read a recipe from YAML text; name is what errors call it."""
        data, places = _compose(text, name)
        try:
            return cls.from_data(data)
        except RecipeError as error:
            line, column = _nearest(places, error.path)
            raise RecipeError(f"{name}:{line}:{column}: {error}", error.path) from error

    @classmethod
    def from_data(cls, data: Any) -> Recipe:
        """Build a recipe from plain values as YAML has them. Raises RecipeError."""
        return cls.model_validate(data)


def _wrong(path: Place, message: str) -> RecipeError:
    """The error for a mistake at a place in the recipe's data."""
    where = spoken(path)
    return RecipeError(f"{where}: {message}" if where else message, path)


def label(index: int, step: Pass) -> str:
    """How errors and reports call a pass: 'passes[1] gptq'."""
    return f"passes[{index}] {step.key()}"


def check_order(passes: Sequence[Pass]) -> None:
    """Raise RecipeError when a pass comes before what it needs, or after what it cannot work on.

    Passes that may work on different layers are told apart layer by layer, when the model is open (`plan.resolve`).
    """
    made: list[tuple[str, Pass]] = []
    for index, step in enumerate(passes):
        for before, earlier in made:
            for fact in sorted(step.never_after & earlier.facts()):
                if _surely_meet(earlier, step):
                    message = f"the model is {in_words(fact)} by {before} already; put {step.key()} before it"
                    raise _wrong(("passes", index, step.key()), message)
        for fact in sorted(step.after):
            if not any(fact in earlier.facts() for _, earlier in made):
                message = f"the model must be {in_words(fact)} first; put a pass that does so before it"
                raise _wrong(("passes", index, step.key()), message)
        made.append((label(index, step), step))


def _surely_meet(first: Pass, second: Pass) -> bool:
    """Whether two passes have a layer in common in every model: one takes all, or both take the same."""
    everywhere = any("*" in step.targets and not step.left_out for step in (first, second))
    return everywhere or (first.targets, first.left_out) == (second.targets, second.left_out)


def in_words(fact: Fact) -> str:
    """'pruned' for masked, as messages have it."""
    return {
        "masked": "pruned",
        "quantized": "quantized",
        "activations_quantized": "given quantized inputs",
        "cache_quantized": "given a rounded KV cache",
    }[fact]


def _passes(items: Any) -> tuple[Pass, ...]:
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise _wrong(("passes",), "must be a list, such as '- gptq: {weights: int4}'")
    return tuple(_pass(i, item) for i, item in enumerate(items))


def _pass(index: int, item: Any) -> Pass:
    if isinstance(item, Pass):
        return item
    if isinstance(item, str):
        item = {item: None}
    if not isinstance(item, Mapping) or len(item) != 1:
        raise _wrong(("passes", index), "each pass is one name with its options, such as '- gptq: {weights: int4}'")
    ((key, options),) = item.items()
    place: Place = ("passes", index, key)
    if key not in PASSES:
        raise _wrong(place, f"there is no pass {key!r}{did_you_mean(str(key), PASSES)}")
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise _wrong(place, f"the options of {key} must be a mapping, such as {{targets: '*.mlp.*'}}")
    try:
        return PASSES[key].model_validate(dict(options))
    except ValidationError as error:
        inner, message = mistake(error, PASSES[key])
        raise _wrong((*place, *inner), message) from error


def _compose(text: str, name: str) -> tuple[Any, dict[Place, tuple[int, int]]]:
    """Plain values, and (line, column) from 1 of every key and item."""
    places: dict[Place, tuple[int, int]] = {(): (1, 1)}

    def walk(node: yaml.Node, path: Place, above: tuple[yaml.Node, ...]) -> None:
        mark = _start(node)
        places.setdefault(path, mark)
        if node in above:
            raise RecipeError(f"{name}:{mark[0]}:{mark[1]}: an alias stands inside of what it stands for")
        if isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                walk(item, (*path, i), (*above, node))
        elif isinstance(node, yaml.ScalarNode):
            _check_scalar(node, name)
        elif isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                line, column = _start(key)
                if not isinstance(key, yaml.ScalarNode) or key.tag not in KEY_TAGS:
                    raise RecipeError(f"{name}:{line}:{column}: a key must be text")
                if key.value in seen:
                    raise RecipeError(f"{name}:{line}:{column}: the key {key.value!r} stands there twice")
                seen.add(key.value)
                place = (*path, key.value)
                places[place] = line, column
                walk(value, place, (*above, node))

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise RecipeError(f"{name}: is empty")
        walk(root, (), ())
        return yaml.safe_load(text), places
    except yaml.YAMLError as error:
        raise RecipeError(f"{_where(error, text, name)}: this is not YAML: {_reason(error)}") from error


def _check_scalar(node: yaml.ScalarNode, name: str) -> None:
    """Raise RecipeError for a scalar that looks like a value and is none, such as a date in the 13th month."""
    try:
        yaml.SafeLoader("").construct_object(node)
    except ValueError as error:
        line, column = _start(node)
        raise RecipeError(f"{name}:{line}:{column}: {node.value!r} has no value ({error}); put it in quotes") from error


def _where(error: yaml.YAMLError, text: str, name: str) -> str:
    """'recipe.yaml:3:1', as far as the parser says."""
    if isinstance(error, ReaderError):  # a character that YAML does not allow
        before = text[: error.position]
        return f"{name}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
    mark = getattr(error, "problem_mark", None)
    return f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name


def _reason(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or str(error).splitlines()[0]


def _start(node: yaml.Node) -> tuple[int, int]:
    """Line and column of a node, from 1."""
    return node.start_mark.line + 1, node.start_mark.column + 1


def _nearest(places: Mapping[Place, tuple[int, int]], path: Place) -> tuple[int, int]:
    while path not in places:
        path = path[:-1]
    return places[path]
