"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, TypeVar

import click

from compress.cli.complete import complete_compute, complete_format, complete_recipe
from compress.cli.paths import UserPath
from compress.errors import RecipeError

F = TypeVar("F", bound=Callable[..., Any])

RECIPE = click.argument("recipe", shell_complete=complete_recipe)
MODEL = click.option("--model", help="Model to use instead of the recipe's: hub id, local folder or .gguf file.")
DTYPE = click.option("--dtype", default="auto", help="Dtype of computation.")
DEVICE = click.option(
    "--device",
    default="auto",
    shell_complete=complete_compute,
    help="Device of computation: auto, cpu, cuda, or cuda:N.",
)

OF_A_TEXT = (
    "dataset",
    "mixture",
    "config",
    "split",
    "streaming",
    "revision",
    "column",
    "chat_template",
    "max_documents",
    "max_tokens_per_document",
    "packing",
    "bos",
    "temperature",
    "max_repetition",
    "conversations",
    "self_share",
)
"""Options of a calibration text, which another text does not take over."""


class Fraction(click.ParamType):
    """A number such as 0.5, or a percentage such as 50%."""

    name = "fraction"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number that a text states."""
        if isinstance(value, float):
            return value
        text = str(value).strip()
        try:
            return float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            self.fail(f"{text!r} is no fraction; write a number such as 0.5, or 50%", param, ctx)


NEGATIONS = ("no", "off", "false", "null", "0")

FAIL_IF = click.option(
    "--fail-if",
    "limits",
    multiple=True,
    metavar="NAME=LIMIT",
    help="End with exit code 3 if kl, loss (nats per token) or task_drop is above a limit; repeatable.",
)
SETTINGS = (
    click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="KEY=VALUE",
        help="Set an option of the recipe, such as passes.0.gptq.group_size=128 or seed=1; repeatable.",
    ),
    click.option(
        "--device", shell_complete=complete_compute, help="Device of computation: auto, cpu, cuda, or cuda:N."
    ),
    click.option("--dtype", help="Dtype of computation: auto, float32, bfloat16 or float16."),
    click.option(
        "--format",
        "formats",
        multiple=True,
        shell_complete=complete_format,
        metavar="FORMAT",
        help="Format of the checkpoint; repeated: also in these formats, each in a folder of its name inside.",
    ),
    click.option("--calibration", metavar="SOURCE", help="Calibration text: a name, or a .txt, .jsonl or .npy file."),
    click.option("--self-share", metavar="SHARE", help="Share of the calibration that the model samples, or auto."),
    click.option(
        "--eval", "texts", multiple=True, metavar="SOURCE", help="Evaluation text, or none for no evaluation."
    ),
    FAIL_IF,
)
MEMORY = click.option(
    "--memory",
    metavar="SIZE",
    help="Limit of memory, such as 8GB: activations go to files, batches shrink; an error if the run needs more.",
)
OUTPUT = (
    click.option("-o", "--out", type=UserPath(), help="Output folder; default: a folder in out/."),
    click.option(
        "--overwrite", is_flag=True, help="Replace another run in the output folder; other files are never removed."
    ),
    MEMORY,
    click.option(
        "--push-to-hub", metavar="REPO", help="Upload the verified checkpoint to this private repository of the hub."
    ),
    click.option("--public", is_flag=True, help="With --push-to-hub: to a public repository."),
    click.option(
        "--upload",
        metavar="URL",
        help="Upload the verified checkpoint to a folder of fsspec, such as s3://BUCKET/NAME.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print report.json."),
)


def recipe_options(command: F) -> F:
    """Add the options that change values of a recipe."""
    return reduce(lambda decorated, option: option(decorated), reversed(SETTINGS), command)


def output_options(command: F) -> F:
    """Add the options of the output."""
    return reduce(lambda decorated, option: option(decorated), reversed(OUTPUT), command)


def limits_of(limits: tuple[str, ...]) -> dict[str, float]:
    """Read the values of --fail-if, such as 'kl=0.2'.

    Raises:
        RecipeError: if one is no name with a number.
    """
    values: dict[str, float] = {}
    for text in limits:
        name, _, limit = text.partition("=")
        try:
            values[name.strip()] = float(limit)
        except ValueError as error:
            raise RecipeError(
                f"--fail-if {text}: write NAME=LIMIT, such as kl=0.2, loss=0.1 or task_drop=0.02"
            ) from error
    return values


def settings_of(
    sets: tuple[str, ...],
    texts: tuple[str, ...],
    limits: tuple[str, ...] = (),
    formats: tuple[str, ...] = (),
    **values: str | None,
) -> list[Any]:
    """Return the settings that the options of `recipe_options` state, in the order in which they apply: --set last.

    Args:
        sets: Values of --set.
        texts: Values of --eval.
        limits: Values of --fail-if.
        formats: Values of --format.
        values: Values of --model, --device, --dtype, --calibration and --self-share; None for an option without one.
    """
    from compress.recipe.settings import Setting, read_setting

    stated = {name: value for name, value in values.items() if value is not None}
    settings = [
        Setting((name,), stated[name], f"--{name} {stated[name]}")
        for name in ("model", "device", "dtype")
        if name in stated
    ]
    if formats:
        spelled = " ".join(f"--format {name}" for name in formats)
        settings.append(Setting(("save", "format"), formats[0] if len(formats) == 1 else list(formats), spelled))
    if (calibration := stated.get("calibration")) is not None:
        settings.append(Setting(("calibration", "source"), calibration, f"--calibration {calibration}", OF_A_TEXT))
    if (share := stated.get("self_share")) is not None:
        settings.append(Setting(("calibration", "self_share"), share, f"--self-share {share}"))
    if negations := [text for text in texts if text.lower() in NEGATIONS]:
        raise RecipeError(f"--eval {negations[0]}: write --eval none for no evaluation, or the name of a text")
    if texts:
        spelled = " ".join(f"--eval {text}" for text in texts)
        nothing = texts == ("none",)
        places = (("eval",),) if nothing else (("eval", "perplexity"), ("eval", "agreement"))
        settings += [Setting(place, None if nothing else list(texts), spelled) for place in places]
    if limits and texts == ("none",):
        raise RecipeError("--fail-if has no effect with --eval none; leave out one of them")
    for name, limit in limits_of(limits).items():
        settings.append(Setting(("eval", "fail_if", name), limit, f"--fail-if {name}={limit:g}"))
    return settings + [read_setting(text) for text in sets]
