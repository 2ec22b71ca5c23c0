"""`compress init`: a commented recipe to start from."""

from __future__ import annotations

from pathlib import Path
from shlex import join

import click

from compress.cli.complete import complete_target
from compress.cli.group import without_collection
from compress.cli.paths import UserPath
from compress.cli.show import echo, print_json, print_sentence, process_memory
from compress.recipe.tables import megabytes


class InitCommand(click.Command):
    """A command whose help ends with the words of targets."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the values of every kind."""
        from compress.recipe.targets import describe

        with formatter.section("Words of a target, one or several of them"):
            formatter.write_dl(describe())


@click.command(cls=InitCommand)
@click.argument("model")
@click.option(
    "--target",
    default="4 bits",
    show_default=True,
    shell_complete=complete_target,
    help="What the model is to become, such as '4 bits, CPU' or 'half the size, no visible loss'.",
)
@click.option(
    "-o",
    "--out",
    type=UserPath(),
    default=Path("recipe.yaml"),
    show_default=True,
    help="The file to write.",
)
@click.option(
    "--text",
    "source",
    default="embedded",
    show_default=True,
    help="Text of the calibration and the evaluation, or a list of recordings.",
)
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
@click.option(
    "--no-check",
    "check",
    is_flag=True,
    default=True,
    flag_value=False,
    help="Do not open the model to see whether the recipe fits.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def init(model: str, target: str, out: Path, source: str, overwrite: bool, check: bool, as_json: bool) -> None:
    """Write a commented recipe for MODEL to start from, and see that it can be planned."""
    with without_collection():
        from compress.pipeline.progress import Waiting
        from compress.pipeline.starting import start_recipe
    with Waiting(f"planning the compression of {model}"):
        draft = start_recipe(model, target, out, overwrite, check, source)
    sizes = None
    if draft.planned is not None:
        sizes = {name: getattr(draft.planned, name) for name in ("dense_bytes", "checkpoint_bytes", "memory_bytes")}
    if as_json:
        print_json(
            {
                "recipe": str(out),
                "start": draft.start.name,
                "summary": draft.start.summary,
                "changed": draft.changed,
                "planned": sizes,
            }
        )
        return
    echo(f"{out}: {draft.start.summary}")
    for line in draft.changed:
        print_sentence(f"note: {line}")
    if draft.planned is not None and sizes is not None:
        for line in draft.planned.notes:
            print_sentence(f"note: {line}")
        dense, small = megabytes(sizes["dense_bytes"]), megabytes(sizes["checkpoint_bytes"])
        print_sentence(f"plan: {dense} MB become {small} MB; the run needs {process_memory(sizes['memory_bytes'])}")
    echo(f"next: {join(['compress', 'run', str(out), '-o', f'out/{out.stem}'])}")
