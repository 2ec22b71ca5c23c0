"""report.html in a headless chromium: no console error, every plot drawn, no horizontal scrolling, enough contrast."""

import pytest
from browser import FOUND, REASON, browser
from sample_report import HOSTILE, sample

from compress.report.pareto import Variant, Variants
from compress.report.render import html
from compress.results.result import RunResult

pytestmark = pytest.mark.skipif(FOUND is None, reason=REASON)

PHONE, DESK = 390, 1280
ENOUGH = 4.5  # WCAG 2.1, success criterion 1.4.3: contrast of text

FAINT = """(() => {
  const parse = color => {
    const found = color.match(/[\\d.]+/g).map(Number);
    const unit = color.startsWith("color(") ? 255 : 1;
    return {rgb: found.slice(0, 3).map(v => v * unit), alpha: found.length > 3 ? found[3] : 1};
  };
  const light = rgb => {
    const [r, g, b] = rgb.map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.alpha === 1) return color.rgb;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let count = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || element.tagName.toLowerCase() === "title") continue;
    const style = getComputedStyle(element);
    const color = parse(element instanceof SVGElement ? style.fill : style.color).rgb;
    const [low, high] = [light(color), light(behind(element))].sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    count += 1;
    if (contrast < LIMIT) found.push(`${contrast.toFixed(2)} ${element.className.baseVal ?? element.className}`);
  }
  return {count, found: [...new Set(found)]};
})()""".replace("LIMIT", str(ENOUGH))

DRAWN = """(() => {
  const empty = [];
  const plots = [...document.querySelectorAll("svg.plot")];
  for (const plot of plots) {
    const size = plot.getBoundingClientRect();
    const marks = [...plot.querySelectorAll("path, use, text")].filter(mark => {
      const style = getComputedStyle(mark);
      return !mark.closest("defs") && (style.fill !== "none" || style.stroke !== "none");
    });
    const seen = marks.filter(mark => {
      const box = mark.getBoundingClientRect();
      return box.width + box.height > 1 && box.left >= size.left - 1 && box.right <= size.right + 1
        && box.top >= size.top - 1 && box.bottom <= size.bottom + 1;
    });
    if (!marks.length || seen.length < marks.length || size.width < 40) empty.push(plot.closest("[aria-label]").getAttribute("aria-label"));
  }
  return {count: plots.length, empty};
})()"""

CLIPPED = """[...document.querySelectorAll("main *")].filter(element => {
  if (element.closest("svg, .wide, details:not([open])")) return false;
  const box = element.getBoundingClientRect();
  return box.width && (box.right > document.documentElement.clientWidth + 0.5 || box.left < -0.5);
}).map(element => `${element.tagName} ${element.className}`)"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    variants = [
        Variant(
            source=f"out/{i}",
            size_bytes=10**8 * (i + 1),
            base_bytes=10**9,
            text="t",
            loss=0.4 / (i + 1),
            loss_stderr=0.02,
        )
        for i in range(3)
    ]
    texts = {
        "report": html(RunResult.from_json(sample("organization/a-model-with-a-rather-long-name-135M-Instruct-2026"))),
        "hostile": html(RunResult.from_json(sample(HOSTILE))),
        "comparison": Variants(variants).html(),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("name", ["report", "hostile", "comparison"])
def test_a_page_is_readable(tab, pages, name, width, theme):
    path = pages / f"{name}.html"
    tab.open(path, width, theme=theme)
    dark = tab.value("matchMedia('(prefers-color-scheme: dark)').matches")
    assert dark == (theme == "dark") and tab.value("innerWidth") == width
    tab.value("document.querySelectorAll('details').forEach(found => { found.open = true })")
    assert tab.messages() == [] and tab.requests() == [path.as_uri()]
    assert tab.value("document.documentElement.scrollWidth") <= width and tab.value(CLIPPED) == []
    drawn = tab.value(DRAWN)
    assert drawn["empty"] == [] and drawn["count"] >= (1 if name == "comparison" else 13)
    contrast = tab.value(FAINT)
    assert contrast["found"] == [] and contrast["count"] > 20
    assert tab.value("document.scripts.length") == 0


def test_both_themes_differ(tab, pages):
    colors = []
    for theme in ("light", "dark"):
        tab.open(pages / "report.html", theme=theme)
        colors.append(tab.value("getComputedStyle(document.body).backgroundColor"))
    assert colors[0] != colors[1]


def test_it_prints_in_light_colors_with_all_details(tab, pages):
    tab.open(pages / "report.html", theme="light", media="screen")
    light = tab.value("getComputedStyle(document.body).backgroundColor")
    tab.open(pages / "report.html", theme="dark", media="print")
    assert tab.value("getComputedStyle(document.body).backgroundColor") == light
    hidden = (
        "[...document.querySelectorAll('details > pre')].filter(found => !found.getBoundingClientRect().height).length"
    )
    assert tab.value(hidden) == 0 and len(tab("Page.printToPDF")["data"]) > 10_000


def test_the_checks_see_what_is_wrong(tab, tmp_path):
    """A page with every mistake that the tests look for."""
    path = tmp_path / "bad.html"
    path.write_text(
        "<meta name='viewport' content='width=device-width'><main><p style='color: #999; width: 500px'>faint and wide</p><div aria-label='empty'><svg class='plot'></svg></div>"
        "<script>console.error('wrong')</script></main>"
    )
    tab.open(path, PHONE)
    assert "wrong" in tab.messages()[0] and tab.value("document.documentElement.scrollWidth") > PHONE
    assert tab.value(DRAWN)["empty"] == ["empty"] and tab.value(FAINT)["found"][0].startswith("2.8")
    assert tab.value(CLIPPED) == ["P "]
