"""The site of `make docs` in a browser: at both widths and in both themes no page is wider than its window."""

from pathlib import Path

import pytest
from browser import FOUND, REASON, browser

SITE = Path(__file__).parents[1] / "out" / "site"
PAGES = (
    "index.html",
    "results/index.html",
    "families/index.html",
    "passes/gptq/index.html",
    "reference/commands/index.html",
    "reference/recipe/index.html",
)
WIDER = """(() => {
  const width = document.documentElement.clientWidth;
  const scrolls = element => element && element.tagName != "ARTICLE" && (/auto|scroll|hidden/.test(getComputedStyle(element).overflowX)
    || scrolls(element.parentElement));
  return [...document.querySelectorAll("article *")]
    .filter(element => element.getBoundingClientRect().right > width + 1 && !scrolls(element.parentElement))
    .map(element => element.outerHTML.slice(0, 80));
})()"""
"""Elements that leave the window and are in nothing that scrolls, as wide tables are."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOUND is None, reason=REASON),
    pytest.mark.skipif(not SITE.is_dir(), reason="make docs has not built the site"),
]


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("page", PAGES)
def test_no_page_is_wider_than_its_window(page, tab):
    colors = {}
    for width in (1280, 390):
        for theme in ("light", "dark"):
            tab.open(SITE / page, width=width, theme=theme)
            tab.value("localStorage.clear()")  # the theme of the page before
            tab.open(SITE / page, width=width, theme=theme)
            assert tab.value("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
            assert tab.value(WIDER) == [], f"{width} pixels, {theme}"
            colors[theme] = tab.value("getComputedStyle(document.body).backgroundColor")
    assert colors["light"] != colors["dark"]


def test_a_wide_element_would_be_found(tab):
    tab.open(SITE / PAGES[0], width=390)
    wide = "const wide = document.createElement('div'); wide.style.width = '2000px'; wide.style.height = '1px';"
    tab.value(f"(() => {{ {wide} document.querySelector('article').append(wide); }})()")
    assert len(tab.value(WIDER)) == 1
