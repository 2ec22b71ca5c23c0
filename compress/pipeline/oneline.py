"""quantize, prune and distill: runs of recipes that a line states, as the commands of these names start them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from compress.passes.contract.journal import Journal
from compress.pipeline.finish import Result
from compress.pipeline.run import run
from compress.recipe.schema import Recipe
from compress.recipe.settings import Setting, place_of
from compress.recipe.starts import distill_line, prune_line, quantize_line

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RunOptions(TypedDict, total=False):
    """Options of `compress.run`, which describes them.

    Attributes:
        overwrite: Whether to replace another run in the output folder.
        journal: Receives notes and progress.
        progress: Whether to show a progress bar.
        memory: Limit of memory, such as '8GB' or a number of bytes.
        calibration: Data in place of the calibration text.
        evaluation: Data in place of the evaluation text.
    """

    overwrite: bool
    journal: Journal
    progress: bool
    memory: str | int
    calibration: Any
    evaluation: Any


def quantize(
    model: str | Path,
    scheme: str | None = None,
    out: str | Path | None = None,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    size: str | int | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Unpack[RunOptions],
) -> Result:
    """Quantize a model by a scheme: a tested chain of passes.

    The model samples half of the calibration text; `calibration.self_share: 0` among the settings turns this off.

    Args:
        model: Hub id, local folder or .gguf file.
        scheme: A name of `compress schemes`, such as 'W4A16'.
        out: Output folder; by default a folder of out/ with the names of the model and the scheme.
        bits: In place of a scheme: GPTQ to integers of so many bits, 2 to 8.
        group_size: With `bits`: the number of weights that share a scale.
        size: With the scheme 'gguf', or without a scheme: the size of the checkpoint, such as '90MB', or a number of
            bytes. The bits of each layer are chosen within it.
        settings: Values of the recipe by their keys, such as {'passes.0.gptq.damping': 0.05, 'device': 'cuda'}.
        **options: Options of `compress.run`.

    Returns:
        The folder of the checkpoint and its measurements.

    Raises:
        RecipeError: for an unknown scheme, both a scheme and bits, or a setting that does not exist.
        CompressError: as `compress.run`.
    """
    return _run(quantize_line(str(model), scheme, bits, group_size, size), out, settings, options)


def prune(
    model: str | Path,
    method: str = "sparsegpt",
    out: str | Path | None = None,
    *,
    sparsity: float | None = None,
    pattern: str | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Unpack[RunOptions],
) -> Result:
    """Prune a model, and store it as plain weights with zeros. Its calibration text is that of `quantize`.

    Args:
        model: Hub id, local folder or .gguf file.
        method: Name of a pass that prunes.
        out: Output folder; by default a folder of out/ with the names of the model and the method.
        sparsity: Fraction of weights to remove, by default 0.5; an N:M pattern fixes it.
        pattern: Pattern of the zeros: 'row', 'layer', N:M such as '2:4', or blocks such as '4x1'.
        settings: Values of the recipe by their keys, such as {'calibration.sequences': 64}.
        **options: Options of `compress.run`.

    Returns:
        The folder of the checkpoint and its measurements.

    Raises:
        RecipeError: for a pass that does not prune, or an invalid option.
        CompressError: as `compress.run`.
    """
    return _run(prune_line(str(model), method, pattern, sparsity), out, settings, options)


def distill(
    student: str | Path,
    teacher: str | Path,
    out: str | Path | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    **options: Unpack[RunOptions],
) -> Result:
    """Train all weights of a student on the outputs of a larger model.

    Args:
        student: Hub id, local folder or .gguf file of the model that is trained.
        teacher: The same of a model with the same tokenizer.
        out: Output folder; by default a folder of out/ with the name of the student.
        settings: Values of the recipe by their keys, such as {'passes.0.distill.epochs': 2}.
        **options: Options of `compress.run`.

    Returns:
        The folder of the checkpoint and its measurements.

    Raises:
        CompressError: as `compress.run`.
    """
    return _run(distill_line(str(student), str(teacher)), out, settings, options)


def _run(
    line: tuple[dict[str, Any], Path],
    out: str | Path | None,
    settings: Mapping[str, Any] | None,
    options: RunOptions,
) -> Result:
    """Run the recipe of a line; without `out`, in its default folder."""
    data, folder = line
    changes = [Setting(place_of(key), value, f"settings {key}") for key, value in (settings or {}).items()]
    return run(Recipe.from_data(data, changes), folder if out is None else out, **options)
