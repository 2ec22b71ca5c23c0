"""Write the generated pages: one for each pass, in docs/ and for `compress passes NAME`, and the tables of measured.md.

`make docs` runs it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from compress.passes import PASSES
from compress.recipe.described import page_of
from compress.recipe.measured import measured
from compress.recipe.pages import markdown, table_lines

ROOT = Path(__file__).parents[1]
STORED = ROOT / "compress" / "recipe" / "pages"
MEASURED, PASSES_PAGE = ROOT / "docs" / "measured.md", ROOT / "docs" / "passes.md"


def pages() -> dict[Path, str]:
    """The text of every generated page, and of the pages with generated parts."""
    found, described = {}, {}
    for name, step in PASSES.items():
        recipe = (ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
        page = described[name] = page_of(name, step)
        found[ROOT / "docs" / "passes" / f"{name}.md"] = markdown(page, recipe)
        found[STORED / f"{name}.json"] = json.dumps(page.of_class(), indent=1, ensure_ascii=False) + "\n"
    tables = {table.name: "\n".join([f"{table.text}:", "", *table_lines(table.rows)]) for table in measured().tables}
    found[MEASURED] = filled(MEASURED.read_text(encoding="utf-8"), tables)
    index = "\n".join(f"- [`{name}`](passes/{name}.md): {page.summary}" for name, page in described.items())
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
