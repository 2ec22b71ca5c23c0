"""`compress passes`, `schemes` and `recipes`: what recipes can be made of, and the shipped ones."""

from __future__ import annotations

import click

from compress.cli.complete import complete_pass, complete_shipped
from compress.cli.show import print_json, print_pass
from compress.errors import RecipeError, did_you_mean


@click.command()
@click.argument("name", required=False, shell_complete=complete_pass)
@click.option("--plugin", multiple=True, help="Python file with a pass, which is executed; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def passes(name: str | None, plugin: tuple[str, ...], as_json: bool) -> None:
    """List the passes, or print the page of the pass NAME: its use, options, paper and measured rows."""
    from compress.recipe.pages import PassPage, summary_of
    from compress.recipe.plugins import available

    known = available(plugin)
    if name is None and as_json:
        print_json([{"name": key, "summary": summary_of(step), "paper": step.paper} for key, step in known.items()])
    elif name is None:
        width = max(map(len, known))
        for key, step in known.items():
            click.echo(f"{key:{width}}  {summary_of(step)}")
    elif name in known:
        page = PassPage.of(name, known[name])
        print_json(page.to_json()) if as_json else print_pass(page)
    else:
        raise RecipeError(f"pass {name!r} is not known{did_you_mean(name, known)}")


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
