"""The page of a pass from its class: documentation, order, and options with their types and ranges in words."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from compress.passes.contract.discovery import is_class
from compress.passes.contract.options import Options
from compress.passes.contract.passes import ModelPass, Pass
from compress.recipe.pages import Option, PassPage
from compress.recipe.plugins import available
from compress.recipe.shipped import shipped, steps_of


def page_of(key: str, step: type[Pass]) -> PassPage:
    """Return the page of a class under its key in recipes."""
    own = {field.alias or name for name, field in step.model_fields.items() if name in inspect.get_annotations(step)}
    return PassPage.of_values(
        key,
        {
            "summary": summary_of(step),
            "text": inspect.cleandoc(step.__doc__ or "").partition("\n")[2].strip(),
            "use_for": step.use_for,
            "not_for": step.not_for,
            "cost": cost_of(key, step),
            "paper": step.paper,
            "needs": sorted(step.after),
            "refuses": sorted(step.never_after),
            "makes": sorted(step.makes),
            "options": [vars(replace(option, own=option.name in own)) for option in options_of(step)],
        },
    )


def cost_of(key: str, step: type[Pass]) -> str:
    """Return what a pass reads, and what it keeps in memory; '' for a plugin with options that must be given.

    The pass has its defaults, or if these are not enough the options of the shipped recipe of its name.
    """
    example = _example(key, step)
    if example is None:
        return ""
    requires = example.requires
    learns = requires.batches and (requires.reference or requires.original)
    sentences = {
        "Reads the calibration text.": requires.data,
        "Reads no calibration text with its defaults.": not requires.data,
        "Needs one block of the model in memory at a time.": not isinstance(example, ModelPass),
        "Needs the whole model in memory.": isinstance(example, ModelPass),
        "Gradients and the state of the optimizer are in memory too.": requires.training and not learns,
        "A gradient for each weight is in memory too.": requires.objective and not requires.training,
        "The teacher is in memory too.": requires.teacher,
        "The uncompressed model runs alongside, block by block.": requires.reference,
        "Trains each block by gradients.": learns,
        f"Its time grows with `{step.repeats}`.": step.repeats is not None,
    }
    return " ".join(sentence for sentence, holds in sentences.items() if holds)


def _example(key: str, step: type[Pass]) -> Pass | None:
    path = shipped().get(key)
    steps = [] if path is None else [item[key] for item in steps_of(path) if isinstance(item, dict) and key in item]
    for options in ({}, *steps):
        try:
            return step.model_validate(options)
        except ValidationError:
            continue
    return None


def pages_of_all(plugins: Sequence[str]) -> dict[str, Callable[[], PassPage]]:
    """Return, by key, a function that makes the page of each pass: built-in, installed and from plugin files.

    Raises:
        RecipeError: if a plugin cannot be loaded.
    """
    return {key: partial(page_of, key, step) for key, step in available(plugins).items()}


def summary_of(step: type[Pass]) -> str:
    """Return the first line of the docstring of a pass."""
    return inspect.cleandoc(step.__doc__ or "").partition("\n")[0].strip()


class _AnyValue(GenerateJsonSchema):
    """JSON schema in which a type that only has a validator accepts any value; the option's description says more."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> dict[str, Any]:
        return {}


def options_of(step: type[BaseModel], within: str = "") -> Iterator[Option]:
    """Yield the options of a pass in the order of the class, nested options as `name.option`.

    Args:
        within: prefix of nested options: the name of the outer option with its dot.
    """
    for name, field in step.model_fields.items():
        adapter = TypeAdapter[Any](field.rebuild_annotation())
        default = None
        if not field.is_required():
            default = json.dumps(adapter.dump_python(field.get_default(call_default_factory=True), mode="json"))
        schema = adapter.json_schema(schema_generator=_AnyValue)
        values = " or ".join(dict.fromkeys(_words(schema, schema.get("$defs", {}))))
        yield Option(f"{within}{field.alias or name}", values, default, field.description or "")
        for kind in (field.annotation, *get_args(field.annotation)):
            if is_class(kind) and issubclass(kind, Options):
                yield from options_of(kind, f"{within}{name}.")


def _words(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[str]:
    """Yield the alternatives of a JSON schema in words; nothing for a schema that accepts any value."""
    if "$ref" in schema:
        yield from _words(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    elif "anyOf" in schema or "oneOf" in schema:
        for alternative in schema.get("anyOf", schema.get("oneOf")):
            yield from _words(alternative, definitions)
    elif "const" in schema or "enum" in schema:
        yield ", ".join(str(value) for value in schema.get("enum", [schema.get("const")]))
    elif "type" in schema:
        items = "".join(_words(schema.get("items", {}), definitions)) if "enum" in schema.get("items", {}) else ""
        kind: str = schema["type"]
        yield _TYPES.get(kind, kind) + (f" of {items}" if items else "") + _range(schema)


_TYPES = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "a name",
    "null": "null",
    "array": "a list",
    "object": "a mapping",
}
_BOUNDS = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}


def _range(schema: Mapping[str, Any]) -> str:
    bounds = [f"{words} {schema[key]:g}" for key, words in _BOUNDS.items() if key in schema]
    return " " + " and ".join(bounds) if bounds else ""
