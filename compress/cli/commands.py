"""The commands: each reads its options, calls one function of the package, and prints what it returns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compress.cli.complete import complete_pruning, complete_scheme
from compress.cli.group import ErrorGroup, Interrupt, without_collection
from compress.cli.model_free import check_model_free, quantize_tensors
from compress.cli.options import MEMORY, MODEL, RECIPE, Fraction, output_options, recipe_options, settings_of
from compress.cli.paths import UserPath
from compress.cli.show import echo, print_hardware_plan, print_json, print_plan, print_report
from compress.recipe.shipped import find_recipe
from compress.version import __version__

if TYPE_CHECKING:
    from compress.recipe.schema import Recipe
    from compress.recipe.settings import Setting

SPINNING = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
"""Variables that say how long a waiting thread of OpenMP spins; its runtime reads them when torch is imported."""

SPINS = "1000"  # some microseconds; the default of 300,000 and more takes the processor from others at every barrier


@click.group(cls=ErrorGroup)
@click.version_option(__version__, prog_name="compress")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Make language models smaller and faster by chaining small passes."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not any(name in os.environ for name in SPINNING):
        os.environ[SPINNING[0]] = SPINS


class SchemesCommand(click.Command):
    """A command whose help ends with the list of all schemes."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the name and the summary of every scheme."""
        with formatter.section("Schemes"):
            from compress.recipe.presets import presets

            formatter.write_dl([(preset.name, preset.summary) for preset in presets().values()])


@main.command()
@RECIPE
@MODEL
@recipe_options
@output_options
def run(
    recipe: str,
    model: str | None,
    out: Path | None,
    overwrite: bool,
    memory: str | None,
    push_to_hub: str | None,
    public: bool,
    upload: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compress the model of RECIPE, verify and evaluate the checkpoint. Resumes an interrupted run.

    RECIPE is a file, or a name of `compress recipes`.
    """
    folder = out or Path("out") / find_recipe(recipe).stem
    _run(_read(recipe, model, options), folder, overwrite, (push_to_hub, public, upload), as_json, memory)


@main.command(cls=SchemesCommand)
@click.argument("model")
@click.option(
    "--scheme",
    shell_complete=complete_scheme,
    help="Numbers of the weights and inputs, such as W4A16; listed below.",
)
@click.option("--bits", type=click.IntRange(2, 8), help="Instead of a scheme: GPTQ to integers of so many bits.")
@click.option("--group-size", type=click.IntRange(min=1), help="With --bits: weights that share a scale.")
@click.option(
    "--size",
    metavar="SIZE",
    help="With --scheme gguf, or alone: the size of the checkpoint, such as 90MB; the bits of each layer are chosen.",
)
@click.option(
    "--model-free",
    is_flag=True,
    help="Round the tensors of a folder to nearest, one by one, without the class of the model and without text.",
)
@click.option("--targets", multiple=True, metavar="PATTERN", help="With --model-free: linears to quantize; repeatable.")
@click.option("--ignore", multiple=True, metavar="PATTERN", help="With --model-free: linears to leave; repeatable.")
@recipe_options
@output_options
def quantize(
    model: str,
    scheme: str | None,
    bits: int | None,
    group_size: int | None,
    size: str | None,
    model_free: bool,
    targets: tuple[str, ...],
    ignore: tuple[str, ...],
    out: Path | None,
    overwrite: bool,
    memory: str | None,
    push_to_hub: str | None,
    public: bool,
    upload: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Quantize MODEL by a scheme: a tested chain of passes."""
    from compress.recipe import starts

    if scheme is not None and bits is not None:
        raise click.UsageError(f"--bits {bits} replaces a scheme; leave out --scheme {scheme}, or --bits")
    if size is None and scheme is None and bits is None:
        raise click.UsageError("write --scheme, such as --scheme W4A16, or --bits, such as --bits 4 --group-size 128")
    if group_size is not None and scheme is not None:
        raise click.UsageError("--group-size is an option of --bits; a scheme has its own groups")
    if model_free:
        if size is not None:
            raise click.UsageError("--size needs the model, which measures the layers; leave --model-free out")
        ineffective = {**options, "overwrite": overwrite, "memory": memory, "public": public}
        check_model_free(ineffective | {"push_to_hub": push_to_hub, "upload": upload})
        values = {"bits": bits, "group_size": group_size, "targets": targets or ("*",), "ignore": ignore}
        quantize_tensors(model, scheme, out, values | {"device": options["device"] or "cpu"}, as_json)
        return
    if targets or ignore:
        raise click.UsageError(
            "--targets and --ignore are options of --model-free; write --set passes.0.gptq.ignore=[PATTERN] for a pass"
        )
    data, folder = starts.quantize_line(model, scheme, bits, group_size, size)
    _run(_build(data, options), out or folder, overwrite, (push_to_hub, public, upload), as_json, memory)


@main.command()
@click.argument("model")
@click.option("--pattern", help="Pattern of the zeros: row, layer, N:M such as 2:4, or blocks such as 4x1.")
@click.option(
    "--sparsity",
    type=Fraction(),
    help="Fraction of weights to remove, such as 0.5 or 50%; an N:M pattern fixes it.  [default: 0.5]",
)
@click.option(
    "--method", default="sparsegpt", show_default=True, shell_complete=complete_pruning, help="The pass that prunes."
)
@recipe_options
@output_options
def prune(
    model: str,
    pattern: str | None,
    sparsity: float | None,
    method: str,
    out: Path | None,
    overwrite: bool,
    memory: str | None,
    push_to_hub: str | None,
    public: bool,
    upload: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Prune MODEL and store it as plain weights with zeros."""
    from compress.recipe import starts
    from compress.recipe.settings import Setting

    data, folder = starts.prune_line(model, method, pattern, sparsity)
    typed = [Setting(("passes", 0), data["passes"][0], f"--method {method}")]  # names what is wrong
    for key, value in data["passes"][0][method].items():
        typed.append(Setting(("passes", 0, method, key), value, f"--{key} {value}"))
    _run(_build(data, options, typed), out or folder, overwrite, (push_to_hub, public, upload), as_json, memory)


@main.command()
@click.argument("student")
@click.option("--teacher", required=True, help="Model of the same tokenizer: hub id, local folder or .gguf file.")
@recipe_options
@output_options
def distill(
    student: str,
    teacher: str,
    out: Path | None,
    overwrite: bool,
    memory: str | None,
    push_to_hub: str | None,
    public: bool,
    upload: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train all weights of STUDENT on the outputs of a larger model."""
    from compress.recipe import starts

    data, folder = starts.distill_line(student, teacher)
    _run(_build(data, options), out or folder, overwrite, (push_to_hub, public, upload), as_json, memory)


@main.command()
@RECIPE
@MODEL
@recipe_options
@click.option("-o", "--out", type=UserPath(), help="Also check this output folder and the disk.")
@click.option("--all", "all_modules", is_flag=True, help="A row for every module instead of every kind of module.")
@MEMORY
@click.option("--time", is_flag=True, help="Predict the time: runs the passes on one block, once per machine.")
@click.option(
    "--hardware",
    metavar="HARDWARE",
    help="Plan for other devices, such as 8xH100 or 1x4090,64GB (RAM), or for this; see compress roofline --devices.",
)
@click.option(
    "--scheme", shell_complete=complete_scheme, help="Instead of a recipe: RECIPE is a model, and this its scheme."
)
@click.option("--size", metavar="SIZE", help="With --scheme gguf: the size of the file, such as 90MB.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every module.")
def plan(
    recipe: str,
    model: str | None,
    hardware: str | None,
    scheme: str | None,
    size: str | None,
    out: Path | None,
    all_modules: bool,
    memory: str | None,
    time: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Show the effect of RECIPE on the modules, the size of the checkpoint, the peak memory and the time.

    RECIPE is a file, or a name of `compress recipes`; with --scheme, a model.

    With --hardware, show the memory, the disk and the time on these devices instead of the modules, and the number of
    devices that takes the least device-hours. No weights are read.
    """
    if size is not None and scheme is None:
        raise click.UsageError("--size is an option of --scheme gguf; in a recipe write allocate: {size: ...}")
    parsed_recipe = (
        _read(recipe, model, options) if scheme is None else _of_scheme(recipe, model, scheme, size, options)
    )
    from compress.pipeline.progress import Waiting

    if hardware is not None:
        _plan_hardware(parsed_recipe, hardware, (out, all_modules), memory, time, as_json)
        return
    from compress.pipeline.plan import plan as make_plan

    with Waiting(f"planning the compression of {parsed_recipe.model}"):
        planned = make_plan(parsed_recipe, out, time, memory)
    if as_json:
        print_json(planned.to_json())
    else:
        print_plan(planned, all_modules)


def _of_scheme(source: str, model: str | None, scheme: str, size: str | None, options: dict[str, Any]) -> Recipe:
    """Build the recipe of `compress quantize` for a model and a scheme."""
    from compress.recipe import starts

    if model is not None:
        raise click.UsageError(f"--model is an option of a recipe; with --scheme write only the model: {source}")
    return _build(starts.quantize_line(source, scheme, None, None, size)[0], options)


def _plan_hardware(
    recipe: Recipe, hardware: str, of_modules: tuple[Path | None, bool], memory: str | None, time: bool, as_json: bool
) -> None:
    """Plan for a hardware, and print the plan.

    of_modules: the options that have no effect.
    """
    from compress.pipeline.hardware import plan_hardware
    from compress.pipeline.progress import Waiting

    if any(of_modules):
        raise click.UsageError("--hardware shows no modules and checks no folder; leave out --all and --out")
    with Waiting(f"planning the compression of {recipe.model} on {hardware}"):
        planned = plan_hardware(recipe, hardware, memory, time)
    if as_json:
        print_json(planned.to_json())
    else:
        print_hardware_plan(planned)


def _read(recipe: str, model: str | None, options: dict[str, Any]) -> Recipe:
    """Read a recipe with the settings of `recipe_options`."""
    from compress.recipe.names import check_file

    settings = settings_of(**options, model=model)
    check_file(recipe, settings)
    with without_collection():
        from compress.recipe.schema import Recipe  # torch takes seconds to import; --help does not need it

    return Recipe.from_yaml(recipe, settings)


def _build(data: dict[str, Any], options: dict[str, Any], typed: Sequence[Setting] = ()) -> Recipe:
    """Build a recipe from plain values with the settings of `recipe_options`, after those of other options."""
    from compress.recipe.names import check_data

    settings = [*typed, *settings_of(**options)]
    check_data(data, settings)
    with without_collection():
        from compress.recipe.schema import Recipe

    return Recipe.from_data(data, settings)


def _run(
    recipe: Recipe,
    folder: Path,
    overwrite: bool,
    targets: tuple[str | None, bool, str | None],
    as_json: bool,
    memory: str | None,
) -> None:
    """Run a recipe, print its evidence (or report.json), and upload the checkpoint.

    targets: the repository of the hub, if one is given, whether it is public, and the address of another place.
    """
    from compress.passes.contract.journal import Journal
    from compress.pipeline import publish, upload
    from compress.pipeline.progress import Waiting
    from compress.pipeline.run import run as run_recipe

    repository, public, url = targets
    if public and repository is None:
        raise click.UsageError("--public has no effect without --push-to-hub")
    if repository is not None:
        publish.check_login(repository, private=not public)  # before hours of work
    if url is not None:
        upload.check_place(url, folder, overwrite)

    def show(report: dict[str, Any]) -> None:
        if as_json:
            print_json(report)
        else:
            print_report(report, folder)

    journal = Journal()
    with Interrupt() as interrupt:
        journal.listeners.append(interrupt)
        result = run_recipe(recipe, folder, overwrite, journal, True, memory, show)
    if result.report:
        show(result.report)
        if repository is not None:
            with Waiting(f"uploading {folder} to {repository}"):
                address = publish.push_to_hub(folder, repository, not public)
            echo(f"uploaded: {address}", err=as_json)
        if url is not None:
            with Waiting(f"uploading {folder} to {url}"):
                address = upload.upload(folder, url, overwrite)
            echo(f"uploaded: {address}", err=as_json)
