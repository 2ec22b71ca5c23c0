"""Words that the glossary of CONTRIBUTING.md replaces are rare in pages, docstrings and messages."""

import ast
import re
from collections import Counter
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


def pages() -> str:
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@pytest.mark.parametrize(
    "text", [pages, lambda: strings(True), lambda: strings(False)], ids=["pages", "docstrings", "messages"]
)
def test_avoided_words_are_rare(text):
    rate, avoided = per_thousand(text())
    assert rate < MOST, f"{rate:.2f} per 1,000 words; write what the glossary of CONTRIBUTING.md says: {avoided}"


def test_avoided_words_are_found_in_every_spelling():
    rate, avoided = per_thousand("Beside it stands a row of its own, held by hand. Held-out and held out are terms.")
    assert avoided == {"beside": 1, "of its own": 1, "held": 1} and rate > 100
    assert per_thousand("withheld, shareholder, toldo") == (0, {})
