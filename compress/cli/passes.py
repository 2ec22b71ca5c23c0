"""`compress passes` and `compress schemes`: what recipes can be made of."""

from __future__ import annotations

import click

from compress.cli.complete import complete_pass
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
