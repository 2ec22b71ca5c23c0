"""The page of a pass: what it does and is for, its options with defaults and ranges, its paper, and measured rows.

`compress passes NAME` prints it, and docs/passes/ holds all pages as Markdown. Everything comes from the class of the
pass, the presets, and the measured rows.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from compress.passes.contract.discovery import is_class
from compress.passes.contract.options import Options
from compress.passes.contract.passes import Pass
from compress.recipe.measured import HEAD, Row, Table, measured, rows_of
from compress.recipe.presets import presets


@dataclass(frozen=True)
class Option:
    """An option of a pass. values: its type and range in words. default: as JSON; None where it is required."""

    name: str
    values: str
    default: str | None
    description: str


@dataclass(frozen=True)
class PassPage:
    """The page of a pass.

    name: its key in recipes. summary: one line. text: how it works. needs, refuses, makes: facts of the model before
    and after it. schemes: the presets that contain it. measured: tables with the rows of chains that contain it.
    """

    name: str
    summary: str
    text: str
    use_for: str
    not_for: str
    paper: str
    needs: tuple[str, ...]
    refuses: tuple[str, ...]
    makes: tuple[str, ...]
    options: tuple[Option, ...]
    schemes: tuple[str, ...]
    measured: tuple[tuple[Table, tuple[Row, ...]], ...]

    @classmethod
    def of(cls, key: str, step: type[Pass]) -> PassPage:
        """The page of a class under its key in recipes."""
        return cls(
            name=key,
            summary=summary_of(step),
            text=inspect.cleandoc(step.__doc__ or "").partition("\n")[2].strip(),
            use_for=step.use_for,
            not_for=step.not_for,
            paper=step.paper,
            needs=tuple(sorted(step.after)),
            refuses=tuple(sorted(step.never_after)),
            makes=tuple(sorted(step.makes)),
            options=tuple(options_of(step)),
            schemes=tuple(name for name, preset in presets().items() if any(key in item for item in preset.passes)),
            measured=tuple((table, tuple(rows)) for table, rows in rows_of(key)),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values. measured: one list of rows, each with the name of its table."""
        rows = [{"table": table.name, **asdict(row)} for table, found in self.measured for row in found]
        return {**asdict(self), "measured": rows, "protocol": measured().protocol}

    def sections(self) -> Iterator[tuple[str, str]]:
        """(title, text) of each section but options and measured rows."""
        yield "", self.text
        yield "Use it for", self.use_for
        yield "Not for", self.not_for
        yield "Order", " ".join(self._order())
        yield "Paper", self.paper

    def _order(self) -> Iterator[str]:
        for facts, text in (
            (self.needs, "The layers must be {} before it."),
            (self.refuses, "The layers must not be {} before it."),
            (self.makes, "They are {} afterwards."),
        ):
            if facts:
                names = [fact.replace("_", " ") for fact in facts]
                yield text.format(" or ".join(names) if facts is self.refuses else " and ".join(names))


def summary_of(step: type[Pass]) -> str:
    """The first line of the documentation of a pass."""
    return inspect.cleandoc(step.__doc__ or "").partition("\n")[0].strip()


class _AnyValue(GenerateJsonSchema):
    """Types with a validator alone take any value in the schema; the description of the option tells more."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> dict[str, Any]:
        return {}


def options_of(step: type[BaseModel], within: str = "") -> Iterator[Option]:
    """The options of a pass in the order of the class; `name.option` for those of an option that is a mapping of them.

    within: the name of that mapping, with its dot.
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


def _words(schema: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[str]:
    """The alternatives of a JSON schema in words; none where the schema takes anything."""
    if "$ref" in schema:
        yield from _words(known[schema["$ref"].rpartition("/")[2]], known)
    elif "anyOf" in schema or "oneOf" in schema:
        for one in schema.get("anyOf", schema.get("oneOf")):
            yield from _words(one, known)
    elif "const" in schema or "enum" in schema:
        yield ", ".join(str(value) for value in schema.get("enum", [schema.get("const")]))
    elif "type" in schema:
        items = "".join(_words(schema.get("items", {}), known)) if "enum" in schema.get("items", {}) else ""
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


def markdown(page: PassPage, recipe: str) -> str:
    """The page as Markdown. recipe: the YAML text of the recipe of the same name."""
    lines = [f"# {page.name}", "", page.summary]
    for title, text in page.sections():
        if text:
            lines += [*([] if not title else ["", f"## {title}"]), "", f"<{text}>" if title == "Paper" else text]
    lines += ["", "## Options", "", "| option | values | default | |", "|---|---|---|---|"]
    for option in page.options:
        default = "required" if option.default is None else f"`{option.default}`"
        cells = (f"`{option.name}`", option.values, default, option.description)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    command = f"`compress run {page.name} --model MODEL` runs `recipes/{page.name}.yaml`:"
    lines += ["", "## Recipe", "", command, "", "```yaml", recipe.strip(), "```"]
    if page.schemes:
        lines += ["", f"Schemes with this pass: {', '.join(f'`{name}`' for name in page.schemes)}."]
    lines += ["", "## Measured", ""]
    if page.measured:
        lines.append(f"{measured().protocol}. Perplexity; uncompressed: {measured().uncompressed}.")
    else:
        lines.append("No row of [the tables](../measured.md) contains this pass.")
    for table, rows in page.measured:
        lines += ["", f"{table.text}:", "", *table_lines(rows)]
    return "\n".join(lines) + "\n"


def table_lines(rows: tuple[Row, ...]) -> list[str]:
    """Rows as a Markdown table; columns without a value are left out."""
    cells = [row.cells() for row in rows]
    kept = [i for i in range(len(HEAD)) if any(row[i] for row in cells)]
    table = [[HEAD[i] for i in kept], ["---"] * len(kept), *([row[i] for i in kept] for row in cells)]
    return ["| " + " | ".join(line) + " |" for line in table]
