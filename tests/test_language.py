"""Words that the glossary of CONTRIBUTING.md replaces are rare in pages, docstrings, messages, recipes and notebooks."""

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
AVOIDED = ("beside", "behind", "told", "held", "of its own", "what became of", "compare nothing", "such a one")
WORD = re.compile(rf"\b(?:{'|'.join(AVOIDED)})\b(?!-out\b| out\b)", re.IGNORECASE)
"""`held out` is the term for sequences that training does not read."""
MOST = 0.5
"""Avoided words per 1,000 words."""


def per_thousand(text: str) -> tuple[float, Counter]:
    """The avoided words per 1,000 words of a text, and how often each occurs."""
    avoided = Counter(word.lower() for word in WORD.findall(text))
    return 1000 * avoided.total() / max(len(text.split()), 1), avoided


def strings(docstrings: bool) -> str:
    """All docstrings of the package, or all of its other strings with a space, which are texts for users."""
    texts = []
    for path in sorted((ROOT / "compress").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docs = [ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)]
        documentation = {text for text in docs if text}
        values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        texts += (
            documentation
            if docstrings
            else [v for v in values if isinstance(v, str) and " " in v and v not in documentation]
        )
    return "\n".join(texts)


def joined(files: Iterable[Path]) -> str:
    texts = [file.read_text(encoding="utf-8") for file in files]
    assert texts
    return "\n".join(texts)


def pages() -> str:
    """README and the other pages of the repository, the templates of issues, and the site."""
    return joined(
        [
            *ROOT.glob("*.md"),
            *(ROOT / ".github").rglob("*.md"),
            *(ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"),
            *(ROOT / "docs").rglob("*.md"),
        ]
    )


def recipes() -> str:
    """Shipped recipes and other texts that commands print: schemes, targets, measured rows, pages of passes."""
    texts = ROOT / "compress" / "recipe"
    return joined([*(ROOT / "recipes").rglob("*.yaml"), *texts.rglob("*.yaml"), *texts.rglob("*.json")])


def notebooks() -> str:
    """The text of all cells of the notebooks, and of their comments."""
    books = [json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "notebooks").glob("*.ipynb")]
    return "\n".join("".join(cell["source"]) for book in books for cell in book["cells"])


TEXTS = {
    "pages": pages,
    "docstrings": lambda: strings(True),
    "messages": lambda: strings(False),
    "recipes": recipes,
    "notebooks": notebooks,
}


@pytest.mark.parametrize("name", TEXTS)
def test_avoided_words_are_rare(name):
    rate, avoided = per_thousand(TEXTS[name]())
    assert rate < MOST, f"{rate:.2f} per 1,000 words; write what the glossary of CONTRIBUTING.md says: {avoided}"


def test_avoided_words_are_found_in_every_spelling():
    rate, avoided = per_thousand("Beside it stands a row of its own, held by hand. Held-out and held out are terms.")
    assert avoided == {"beside": 1, "of its own": 1, "held": 1} and rate > 100
    assert per_thousand("withheld, shareholder, toldo") == (0, {})
