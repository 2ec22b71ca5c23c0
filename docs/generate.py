"""Write the generated pages of docs/: one for each pass, and the tables of measured.md. `make docs` runs it."""

from __future__ import annotations

import re
from pathlib import Path

from compress.passes import PASSES
from compress.recipe.measured import measured
from compress.recipe.pages import PassPage, markdown, summary_of, table_lines

ROOT = Path(__file__).parents[1]
MEASURED, PASSES_PAGE = ROOT / "docs" / "measured.md", ROOT / "docs" / "passes.md"


def pages() -> dict[Path, str]:
    """The text of every generated page, and of the pages with generated parts."""
    found = {}
    for name, step in PASSES.items():
        recipe = (ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
        found[ROOT / "docs" / "passes" / f"{name}.md"] = markdown(PassPage.of(name, step), recipe)
    tables = {table.name: "\n".join([f"{table.text}:", "", *table_lines(table.rows)]) for table in measured().tables}
    found[MEASURED] = filled(MEASURED.read_text(encoding="utf-8"), tables)
    index = "\n".join(f"- [`{name}`](passes/{name}.md): {summary_of(step)}" for name, step in PASSES.items())
    found[PASSES_PAGE] = filled(PASSES_PAGE.read_text(encoding="utf-8"), {"passes": index})
    return found


def filled(text: str, parts: dict[str, str]) -> str:
    """The text with each part between its two marks. Raises KeyError for a mark without a part."""
    marks = re.compile(r"(<!-- generated: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return marks.sub(lambda found: f"{found[1]}\n{parts[found[2]]}\n\n{found[3]}", text)


def main() -> None:
    """Write all pages."""
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
