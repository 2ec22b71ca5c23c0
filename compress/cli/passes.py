"""`compress passes`, `schemes` and `recipes`: list passes, schemes and shipped recipes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from compress.cli.complete import complete_pass, complete_shipped
from compress.cli.show import echo, print_items, print_json, print_pass
from compress.errors import RecipeError, did_you_mean

if TYPE_CHECKING:
    from compress.recipe.pages import PassPage


@click.command()
@click.argument("name", required=False, shell_complete=complete_pass)
@click.option("--plugin", multiple=True, help="Python file with a pass, which is executed; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def passes(name: str | None, plugin: tuple[str, ...], as_json: bool) -> None:
    """List the passes, or print the page of the pass NAME: its use, options, paper and measured rows."""
    from compress.passes import PASSES
    from compress.recipe.installed import installed

    if plugin or installed():
        from compress.recipe.described import pages_of_all

        pages = pages_of_all(plugin)
    else:
        pages = {key: partial(_page, key) for key in PASSES}
    if name is not None and name not in pages:
        raise RecipeError(f"pass {name!r} is not known{did_you_mean(name, pages)}")
    if name is not None:
        page = pages[name]()
        print_json(page.to_json()) if as_json else print_pass(page)
        return
    page_by_key = {key: read() for key, read in pages.items()}
    if as_json:
        print_json([{"name": key, "summary": page.summary, "paper": page.paper} for key, page in page_by_key.items()])
        return
    print_items({key: page.summary for key, page in page_by_key.items()})


def _page(key: str) -> PassPage:
    """Return the page of a built-in pass: the stored one, or one made from its class if the class has changed since."""
    from compress.recipe.pages import PassPage

    page = PassPage.stored(key)
    if page is None:
        from compress.passes import PASSES
        from compress.recipe.described import page_of

        page = page_of(key, PASSES[key])
    return page


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def schemes(as_json: bool) -> None:
    """List the schemes of `compress quantize`."""
    from compress.recipe.presets import presets

    if as_json:
        print_json(
            [
                {"name": preset.name, "summary": preset.summary, "passes": preset.passes, "save": preset.save}
                for preset in presets().values()
            ]
        )
        return
    print_items({preset.name: preset.summary for preset in presets().values()})


@click.command()
@click.argument("name", required=False, shell_complete=complete_shipped)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def recipes(name: str | None, as_json: bool) -> None:
    """List the shipped recipes, or print the text of the recipe NAME, to change it.

    `run`, `plan` and `roofline` take them by name, such as compress run best-int4 --model MODEL.
    """
    from compress.recipe.shipped import shipped, summary_of

    path_by_name = shipped()
    if name is not None and name not in path_by_name:
        raise RecipeError(f"recipe {name!r} is not among the shipped ones{did_you_mean(name, path_by_name)}")
    if name is not None:
        text = path_by_name[name].read_text(encoding="utf-8")
        values = {"name": name, "summary": summary_of(path_by_name[name]), "text": text}
        print_json(values) if as_json else echo(text, nl=False)
    elif as_json:
        print_json([{"name": key, "summary": summary_of(path)} for key, path in path_by_name.items()])
    else:
        print_items({key: summary_of(path) for key, path in path_by_name.items()})
