"""The page of a pass: what it does and is for, its options with defaults and ranges, its paper, and measured rows.

`compress passes NAME` prints it, and docs/passes/ holds all pages as Markdown. Everything comes from the class of the
pass (`compress.recipe.described`), the presets, and the measured rows. What comes from the class is stored in `pages/`
by `make docs`, because importing a pass takes seconds; this module imports nothing slow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from compress.passes import PASSES
from compress.recipe.measured import HEAD, Row, Table, measured, rows_of, spelled
from compress.recipe.outlines import outline_of_pass
from compress.recipe.presets import presets
from compress.recipe.shipped import shipped, steps_of

TEXTS = "summary", "text", "use_for", "not_for", "cost", "paper"
FACTS = "needs", "refuses", "makes"
"""The fields of a page that come from the class of its pass, with its options."""

DEEDS = {
    "masked": "prune",
    "quantized": "quantize weights",
    "activations_quantized": "quantize activations",
    "cache_quantized": "quantize the KV cache",
}
"""What a pass does that makes a fact true."""


@dataclass(frozen=True)
class Option:
    """An option of a pass.

    Attributes:
        values: its type and range in words.
        default: its default as JSON; None if the option is required.
        own: whether the class of the pass declares it, not a class that passes share.
    """

    name: str
    values: str
    default: str | None
    description: str
    own: bool = False


@dataclass(frozen=True)
class PassPage:
    """The page of a pass.

    Attributes:
        name: key of the pass in recipes.
        summary: one line.
        text: how the pass works.
        use_for: what the pass is good for.
        not_for: where something else is better.
        cost: what it reads, and what it keeps in memory.
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
    cost: str
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
        yield "Use it for", self.use_for
        yield "Not for", self.not_for
        yield "Order", " ".join(self._order())
        yield "Cost", self.cost
        yield "How it works", self.text
        yield "Source", self.paper

    def main_options(self) -> Iterator[Option]:
        """Yield the options that its class declares, and those that shipped chains set; nested options are others."""
        set_options = options_in_chains(self.name)
        yield from (option for option in self.options if option.own or option.name in set_options)

    def _order(self) -> Iterator[str]:
        if self.needs:
            yield f"An earlier pass must {' and '.join(DEEDS[fact] for fact in self.needs)}."
        if self.refuses:
            *others, last = (DEEDS[fact] for fact in self.refuses)
            yield f"No earlier pass may {', '.join(others)}{' or ' if others else ''}{last}."


def markdown(page: PassPage, recipe: str) -> str:
    """Format the page as Markdown.

    Args:
        page: page of a pass.
        recipe: YAML text of the recipe of the same name.
    """
    sections = dict(page.sections())
    lines = [f"# {page.name}", "", page.summary, "", "## When to use it", ""]
    lines += [f"- **{title}:** {sections[title]}" for title in ("Use it for", "Not for", "Order") if sections[title]]
    command = f"`compress run {page.name} --model MODEL` runs this recipe, `recipes/{page.name}.yaml`:"
    lines += ["", "## Recipe", "", command, "", "```yaml", recipe.strip(), "```"]
    if page.schemes:
        lines += ["", f"Schemes with this pass: {', '.join(f'`{name}`' for name in page.schemes)}."]
    main = list(page.main_options())
    others = [option for option in page.options if option not in main]
    lines += ["", "## Main options", "", *_option_lines(main)]
    lines += ["", "## Cost", "", sections["Cost"], *_measured_cost(page)]
    lines += ["", "## How it works", "", sections["How it works"], "", "## Measured", "", *_measured_lines(page)]
    if others:
        shared = "Most of them are [options that passes share](../reference/options.md)."
        lines += ["", "## Other options", "", shared, "", *_option_lines(others)]
    if sections["Source"]:
        lines += ["", "## Source", "", f"<{sections['Source']}>"]
    return "\n".join(lines) + "\n"


def _option_lines(options: list[Option]) -> Iterator[str]:
    yield from ("| option | values | default | |", "|---|---|---|---|")
    for option in options:
        default = "required" if option.default is None else f"`{option.default}`"
        cells = (f"`{option.name}`", option.values, default, option.description)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _measured_cost(page: PassPage) -> Iterator[str]:
    """Yield a sentence on the measured run of the pass alone with the fewest options, if there is one."""
    rows = [row for _, rows in page.measured for row in rows if len(row.passes) == 1 and row.seconds and row.peak_mb]
    if rows:
        row = min(rows, key=lambda row: len(spelled(row.passes[0])))
        amounts = f"{row.seconds} s and at most {row.peak_mb} MB"
        yield from ("", f"Measured: `{spelled(row.passes[0])}` took {amounts} (see [Measured](#measured)).")


def _measured_lines(page: PassPage) -> Iterator[str]:
    if page.measured:
        yield f"{measured().protocol}. Perplexity; uncompressed: {measured().uncompressed}."
    else:
        yield "No row of [the tables](../results-all.md) contains this pass."
    for table, rows in page.measured:
        yield from ("", f"{table.text}:", "", *table_lines(rows))


@cache
def options_in_chains(name: str) -> frozenset[str]:
    """Return the options of a pass that presets and shipped recipes set, those with the options of papers left out."""
    chains = [steps_of(path) for title, path in shipped().items() if not title.endswith("-paper")]
    steps = [step for chain in (*chains, *(preset.passes for preset in presets().values())) for step in chain]
    return frozenset(option for step in steps if isinstance(step, Mapping) for option in step.get(name) or ())


def table_lines(rows: tuple[Row, ...]) -> list[str]:
    """Format rows as a Markdown table, without empty columns."""
    cells = [row.cells() for row in rows]
    columns = [i for i in range(len(HEAD)) if any(row[i] for row in cells)]
    table = [[HEAD[i] for i in columns], ["---"] * len(columns), *([row[i] for i in columns] for row in cells)]
    return ["| " + " | ".join(line) + " |" for line in table]
