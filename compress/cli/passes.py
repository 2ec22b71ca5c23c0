"""`compress passes`, `schemes` and `recipes`: what recipes can be made of, and the shipped ones."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from compress.cli.complete import complete_pass, complete_shipped
from compress.cli.show import print_json, print_pass
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
    found = {key: read() for key, read in pages.items()}
    if as_json:
        print_json([{"name": key, "summary": page.summary, "paper": page.paper} for key, page in found.items()])
        return
    width = max(map(len, found))
    for key, page in found.items():
        click.echo(f"{key:{width}}  {page.summary}")


def _page(key: str) -> PassPage:
    """The page of a pass of this package: the stored one, or that of its class if it has changed since."""
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
                {"name": one.name, "summary": one.summary, "passes": one.passes, "save": one.save}
                for one in presets().values()
            ]
        )
        return
    for one in presets().values():
        click.echo(f"{one.name:12}  {one.summary}")


@click.command()
@click.argument("name", required=False, shell_complete=complete_shipped)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def recipes(name: str | None, as_json: bool) -> None:
    """List the shipped recipes, or print the text of the recipe NAME, to change it.

    `run`, `plan` and `roofline` take them by name, such as compress run best-int4 --model MODEL.
    """
    from compress.recipe.shipped import shipped, summary_of

    known = shipped()
    if name is not None and name not in known:
        raise RecipeError(f"recipe {name!r} is not among the shipped ones{did_you_mean(name, known)}")
    if name is not None:
        text = known[name].read_text(encoding="utf-8")
        values = {"name": name, "summary": summary_of(known[name]), "text": text}
        print_json(values) if as_json else click.echo(text, nl=False)
    elif as_json:
        print_json([{"name": key, "summary": summary_of(path)} for key, path in known.items()])
    else:
        width = max(map(len, known))
        for key, path in known.items():
            click.echo(f"{key:{width}}  {summary_of(path)}")
