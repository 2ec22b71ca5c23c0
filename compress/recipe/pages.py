"""The page of a pass: what it does and is for, its options with defaults and ranges, its paper, and measured rows.

`compress passes NAME` prints it, and docs/passes/ holds all pages as Markdown. Everything comes from the class of the
pass (`compress.recipe.described`), the presets, and the measured rows. What comes from the class is stored in `pages/`
by `make docs`, because importing a pass takes seconds; this module imports nothing slow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from compress.passes import PASSES
from compress.recipe.measured import HEAD, Row, Table, measured, rows_of
from compress.recipe.outlines import outline_of_pass
from compress.recipe.presets import presets

TEXTS = "summary", "text", "use_for", "not_for", "paper"
FACTS = "needs", "refuses", "makes"
"""The fields of a page that come from the class of its pass, with its options."""


@dataclass(frozen=True)
class Option:
    """An option of a pass.

    Attributes:
        values: its type and range in words.
        default: its default as JSON; None if the option is required.
    """

    name: str
    values: str
    default: str | None
    description: str


@dataclass(frozen=True)
class PassPage:
    """The page of a pass.

    Attributes:
        name: key of the pass in recipes.
        summary: one line.
        text: how the pass works.
        needs: facts that must hold before the pass.
        refuses: facts that must not hold before the pass.
        makes: facts that hold after the pass.
        schemes: presets that contain the pass.
        measured: tables with the rows of chains that contain the pass.
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
    def stored(cls, name: str) -> PassPage | None:
        """Read the page of a built-in pass from its file in `pages/`; None if its class has changed since."""
        file = files("compress.recipe").joinpath("pages", f"{name}.json")
        if not file.is_file():
            return None
        values = json.loads(file.read_text(encoding="utf-8"))
        outline = outline_of_pass(name, PASSES.kind(name))
        options = [option["name"] for option in values["options"] if "." not in option["name"]]
        if values["summary"] != outline.summary or set(options) != set(outline.options):
            return None
        return cls.of_values(name, values)

    @classmethod
    def of_values(cls, name: str, values: Mapping[str, Any]) -> PassPage:
        """Make the page from the values that the class of a pass states, and add schemes and measured rows."""
        options = tuple(Option(**option) for option in values["options"])
        texts: dict[str, Any] = {key: values[key] for key in TEXTS}
        facts: dict[str, Any] = {key: tuple(values[key]) for key in FACTS}
        return cls(
            name=name,
            **texts,
            **facts,
            options=options,
            schemes=tuple(title for title, preset in presets().items() if any(name in item for item in preset.passes)),
            measured=tuple((table, tuple(rows)) for table, rows in rows_of(name)),
        )

    def of_class(self) -> dict[str, Any]:
        """Return the plain values that the class of the pass states, the input of `of_values`."""
        values = asdict(self)
        return {key: values[key] for key in (*TEXTS, *FACTS, "options")}

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `measured` is one list of rows, each with the name of its table."""
        rows = [{"table": table.name, **asdict(row)} for table, table_rows in self.measured for row in table_rows]
        return {**asdict(self), "measured": rows, "protocol": measured().protocol}

    def sections(self) -> Iterator[tuple[str, str]]:
        """Yield (title, text) of each section except options and measured rows."""
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


def markdown(page: PassPage, recipe: str) -> str:
    """Format the page as Markdown.

    Args:
        page: page of a pass.
        recipe: YAML text of the recipe of the same name.
    """
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
        lines.append("No row of [the tables](../results-all.md) contains this pass.")
    for table, rows in page.measured:
        lines += ["", f"{table.text}:", "", *table_lines(rows)]
    return "\n".join(lines) + "\n"


def table_lines(rows: tuple[Row, ...]) -> list[str]:
    """Format rows as a Markdown table, without empty columns."""
    cells = [row.cells() for row in rows]
    columns = [i for i in range(len(HEAD)) if any(row[i] for row in cells)]
    table = [[HEAD[i] for i in columns], ["---"] * len(columns), *([row[i] for i in columns] for row in cells)]
    return ["| " + " | ".join(line) + " |" for line in table]
