"""`compress eval`: perplexity or agreement, divergence, tasks and answers of models on the same items."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compress.cli.complete import complete_suite
from compress.cli.options import DEVICE, DTYPE, FAIL_IF, limits_of
from compress.cli.paths import UserPath
from compress.cli.show import echo, print_sentence, print_table
from compress.errors import Failure, ProcessError

if TYPE_CHECKING:
    from compress.recipe.evaluation import Evaluate
    from compress.results.comparison import Comparison

SETTINGS = (
    click.option(
        "--suite",
        shell_complete=complete_suite,
        help="What is measured: quick, standard, full, or a YAML file; options replace values.",
    ),
    click.option(
        "--text",
        multiple=True,
        help="Text: embedded, wikitext, or a .txt, .jsonl or .npy file; recordings: a .jsonl file; none for no text.",
    ),
    click.option(
        "--windows",
        type=click.IntRange(min=1),
        help="Windows per text, or all of a text that has fewer.  [default: 16]",
    ),
    click.option("--length", type=click.IntRange(min=2), help="Tokens per window.  [default: 512]"),
    click.option(
        "--stride", type=click.IntRange(min=1), help="Tokens from one window to the next.  [default: the length]"
    ),
    click.option(
        "--chunk",
        type=click.IntRange(min=1),
        help="Tokens read at a time, with the KV cache between them; 1: as in decoding.  [default: whole windows]",
    ),
    click.option("--tasks", help="Tasks of lm-eval, separated by commas; none for no tasks."),
    click.option(
        "--data", help="Folder with local data (TASK/SPLIT.parquet, .json or .arrow) and task files, whose code is run."
    ),
    click.option("--limit", type=click.IntRange(min=1), help="Items of each task.  [default: all]"),
    click.option("--fewshot", type=click.IntRange(min=0), help="Worked examples in each prompt of a task."),
    click.option("--chat-template", is_flag=True, default=None, help="Put prompts into the model's chat template."),
    click.option("--generation", is_flag=True, default=None, help="Compare greedy answers to fixed prompts."),
)

OF_TASKS = ("data", "limit", "fewshot", "chat_template")
"""The options of tasks."""


def settings_options(command: Any) -> Any:
    """Add the options that select what is measured."""
    for option in reversed(SETTINGS):
        command = option(command)
    return command


@click.command("eval")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@settings_options
@FAIL_IF
@click.option("--base", help="Model that the others are compared with.  [default: the first of several]")
@DTYPE
@DEVICE
@click.option(
    "--work",
    type=UserPath(),
    default=Path("out/evaluation"),
    show_default=True,
    help="Folder of kept results: a killed evaluation continues, and a base model is measured once.",
)
@click.option("-o", "--out", type=UserPath(), help="Also write the results to this JSON file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def evaluate(
    models: tuple[str, ...],
    base: str | None,
    dtype: str,
    device: str,
    work: Path,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure MODELs: compressed checkpoints or any other models. Several are compared on the same text and items."""
    from compress.checkpoint.containers.files import check_output_file, write_text
    from compress.models.computation import device_of
    from compress.passes.contract.processes import Processes
    from compress.pipeline.evaluation import evaluate as evaluate_models
    from compress.results.gate import check_models

    if out is not None:
        check_output_file(out, (".json",))
    processes = Processes.launched(cpu=device_of(device).type == "cpu")

    def show(comparison: Comparison) -> None:
        if not processes.first:
            return
        text = comparison.model_dump_json(indent=2)
        if as_json:
            echo(text)
        else:
            print_evaluation(comparison)
        if out is not None:
            write_text(out, text + "\n")

    with processes.together():
        comparison = evaluate_models(
            models,
            settings_of(options),
            base=base,
            work=work,
            dtype=dtype,
            device=device,
            progress=True,
            on_failure=show,
        )
    if not processes.first:
        if comparison.failed:
            raise ProcessError("tasks failed", told=True)
        return
    show(comparison)
    if comparison.failed:
        raise Failure(f"{len(comparison.failed)} tasks failed: {', '.join(comparison.failed)}; the others are complete")
    check_models(comparison)


def settings_of(options: dict[str, Any]) -> Evaluate:
    """Return the evaluation settings that the options state.

    Raises:
        RecipeError: if a value is invalid.
        UsageError: for options of tasks without any.
    """
    from compress.recipe.evaluation import Evaluate, read_suite

    changes = {key: options[key] for key in ("windows", "length", "stride", "chunk", "data", "limit", "fewshot")}
    changes |= {key: options[key] for key in ("chat_template", "generation")}
    if options["text"]:
        changes["perplexity"] = changes["agreement"] = () if options["text"] == ("none",) else options["text"]
    if options["tasks"] is not None:
        tasks = [name.strip() for name in options["tasks"].split(",") if name.strip()]
        changes["tasks"] = () if tasks == ["none"] else tuple(tasks)
    changes["fail_if"] = limits_of(options.get("limits", ())) or None
    values = {key: value for key, value in changes.items() if value is not None}
    settings = Evaluate(**values) if options["suite"] is None else read_suite(options["suite"], **values)
    unused = [f"--{key.replace('_', '-')}" for key in OF_TASKS if key in values]
    if unused and not settings.tasks:
        raise click.UsageError(f"{', '.join(unused)}: of no effect without tasks; add --tasks, or leave it out")
    return settings


def print_evaluation(comparison: Comparison) -> None:
    """Print the tables of an evaluation, its notes and its failures."""
    for table in comparison.tables():
        print_table(table)
    for note in comparison.notes:
        print_sentence(note if note.startswith("warning: ") else f"note: {note}")
    for name, reason in comparison.failed.items():
        print_sentence(f"failed: {name}: {reason}")
