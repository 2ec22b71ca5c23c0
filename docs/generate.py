"""Write what the documentation generates: pages of passes, the Python and recipe references, tables and figures.

`make docs` runs it, and then builds the site.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from figures import figures

import compress
import compress.authoring
from compress.cli.group import TASKS
from compress.passes import PASSES
from compress.recipe.described import options_of, page_of
from compress.recipe.measured import Row, figure, measured
from compress.recipe.pages import markdown, table_lines

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STORED = ROOT / "compress" / "recipe" / "pages"
BEST = (
    "w8a8-rotated-int8-embedding",
    "rtn-int8",
    "best-int4",
    "qtip-4-learned",
    "iq4_nl-learned",
    "w4a8-learned",
    "nvfp4-w4a4-learned",
    "best-int3",
    "qtip-3-learned",
    "qtip-2.5-learned",
    "best-int2",
    "qtip-learned",
    "qtip-1.5-learned",
)
"""Rows of the table of the best recipe at each size."""
ZEROS = (
    "alps-asymmetric",
    "permuted-sparsegpt-2:4-asymmetric",
    "finetune-unshrunk",
    "narrow-ffn-10",
    "drop-3-blocks",
)
"""Rows of the table of pruned models."""


def pages() -> dict[Path, str]:
    """The text of every generated page, and of the pages with generated parts."""
    texts, described = {}, {}
    for name, step in PASSES.items():
        recipe = (ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
        page = described[name] = page_of(name, step)
        texts[DOCS / "passes" / f"{name}.md"] = markdown(page, recipe)
        texts[STORED / f"{name}.json"] = json.dumps(page.of_class(), indent=1, ensure_ascii=False) + "\n"
    index = ["| pass | does | paper |", "|---|---|---|"]
    index += [
        f"| [`{name}`](passes/{name}.md) | {page.summary} | [paper]({page.paper}) |" for name, page in described.items()
    ]
    tables = {part.name: "\n".join([f"{part.text}:", "", *table_lines(part.rows)]) for part in measured().tables}
    parts = {
        "passes.md": {"passes": "\n".join(index)},
        "results-all.md": tables,
        "results.md": {"best": best_rows(BEST), "zeros": best_rows(ZEROS), "cache": tables["cache"]},
        "reference/commands.md": {"tasks": commands_by_task()},
        "reference/recipe.md": {"recipe": keys_of_recipes()},
        "reference/python.md": {"python": public_names()},
        "reference/authoring.md": {"authoring": "\n".join(documented(names_in(compress.authoring)))},
    }
    return texts | {DOCS / name: filled((DOCS / name).read_text(encoding="utf-8"), of) for name, of in parts.items()}


def best_rows(names: tuple[str, ...]) -> str:
    """A table of measured rows with the increase of the perplexity, and the KL divergence where it was measured."""
    rows = {row.name: row for part in measured().tables for row in part.rows}
    head = "| recipe or row | bits per weight | perplexity | increase | KL divergence | passes | |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *(best_row(rows[name]) for name in names)])


def best_row(row: Row) -> str:
    """A row of the table: the recipe if the row is one, otherwise the row's name."""
    recipe = re.match(r"recipe ([\w.-]+)\.yaml(?:: |, )?", row.note)
    name, note = (recipe[1], row.note[recipe.end() :]) if recipe else (row.name, row.note)
    increase = row.perplexity / measured().uncompressed - 1
    bits = "" if row.bits is None else f"{row.bits:g}"
    chain = ", ".join(f"[`{key}`](passes/{key}.md)" for step in row.passes for key in step)
    percent = f"{increase:+.0%}" if increase > 0.1 else f"{increase:+.1%}"
    return f"| `{name}` | {bits} | {figure(row.perplexity)} | {percent} | {row.divergence} | {chain} | {note} |"


def commands_by_task() -> str:
    """A table of the commands by the task that they serve, with an example of each task."""
    lines = ["| task | commands | example |", "|---|---|---|"]
    for title, task in TASKS.items():
        names = ", ".join(f"`{name}`" for name in task.commands)
        lines.append(f"| {title} | {names} | `{task.example}` |")
    return "\n".join(lines)


def keys_of_recipes() -> str:
    """A table of the keys of a recipe, and one for each of its sections."""
    options = list(options_of(compress.Recipe))
    lines = []
    for title in ("", "calibration", "save", "eval"):
        inside = f"{title}." if title else ""
        chosen = [o for o in options if (o.name.startswith(inside) if title else "." not in o.name)]
        lines += [f"## {title or 'Keys'}", "", "| key | values | default | |", "|---|---|---|---|"]
        for option in chosen:
            key = option.name.removeprefix(inside)
            default = "required" if option.default is None else f"`{option.default}`"
            default = f"see [{key}](#{key})" if option.default and option.default.startswith("{") else default
            cells = (f"`{key}`", option.values, default, option.description)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).strip()


def public_names() -> str:
    """The public names: those of passes in a table, the others with their docstrings."""
    passes = {step.__name__: key for key, step in PASSES.items()}
    lines = documented({name: getattr(compress, name) for name in compress.__all__ if name not in passes})
    lines += ["## Passes", "", "| class | key in recipes |", "|---|---|"]
    lines += [f"| `compress.{name}` | [`{key}`](../passes/{key}.md) |" for name, key in sorted(passes.items())]
    return "\n".join(lines)


def documented(names: dict[str, Any]) -> list[str]:
    """The lines that show the docstrings of classes and functions. Raises ValueError for one without a docstring."""
    lines = []
    for name, value in names.items():
        if (inspect.isclass(value) or inspect.isfunction(value)) and not value.__doc__:
            raise ValueError(f"{value.__module__}.{name} is public and has no docstring; write one")
        if inspect.isclass(value) and issubclass(value, compress.CompressError):
            lines += [f"## {name}", "", "The base of all [errors](errors.md).", ""]
        elif inspect.isclass(value) or inspect.isfunction(value):
            lines += [f"::: {value.__module__}.{value.__qualname__}", ""]
    return lines


def names_in(module: ModuleType) -> dict[str, Any]:
    """The public names of a module that lists them by imports, in alphabetical order."""
    return {name: value for name, value in sorted(vars(module).items()) if not name.startswith("_")}


def filled(text: str, parts: dict[str, str]) -> str:
    """The text with each part between its two marks. Raises KeyError for a mark without a part."""
    marks = re.compile(r"(<!-- generated: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return marks.sub(lambda match: f"{match[1]}\n{parts[match[2]]}\n\n{match[3]}", text)


def main() -> None:
    """Write all pages and figures."""
    for path, text in {**pages(), **figures()}.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
