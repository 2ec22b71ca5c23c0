"""Outlines of passes: what the source says is what the classes say, and stored pages are those of the classes."""

from pathlib import Path

import compress
from compress.passes import PASSES
from compress.recipe.described import summary_of
from compress.recipe.outlines import outline_of_pass


def names_of(model) -> list[str]:
    return sorted(field.alias or name for name, field in model.model_fields.items())


def test_outlines_of_passes_are_those_of_the_classes():
    found = {key: outline_of_pass(key, PASSES.kind(key)) for key in PASSES}
    assert {key: sorted(one.options) for key, one in found.items()} == {k: names_of(c) for k, c in PASSES.items()}
    assert {key: one.summary for key, one in found.items()} == {k: summary_of(c) for k, c in PASSES.items()}


def test_the_page_of_a_changed_class_is_not_the_stored_one(monkeypatch):
    from compress.recipe import pages

    assert pages.PassPage.stored("rtn") is not None and pages.PassPage.stored("none") is None
    other = outline_of_pass("gptq", "quantize")
    monkeypatch.setattr(pages, "outline_of_pass", lambda key, kind: other)
    assert pages.PassPage.stored("rtn") is None


def test_a_stored_page_is_that_of_the_class():
    from compress.recipe.described import page_of
    from compress.recipe.pages import PassPage

    assert PassPage.stored("gptq") == page_of("gptq", compress.GPTQ)
    assert {path.stem for path in (Path(pages_folder())).glob("*.json")} == set(PASSES)


def pages_folder() -> Path:
    return Path(compress.__file__).parent / "recipe" / "pages"
