"""compare(models): variants of one model by size and loss, from their reports or measured now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from compress.errors import RecipeError
from compress.passes.contract.journal import Journal
from compress.pipeline.evaluation import evaluate
from compress.pipeline.models import Model, is_loaded, key_of, models_in
from compress.recipe.evaluation import Evaluate
from compress.report.pareto import Variants
from compress.results.comparison import Comparison

if TYPE_CHECKING:
    from typing_extensions import Unpack


class EvaluationOptions(TypedDict, total=False):
    """Options of `compress.evaluate`, which describes them.

    Attributes:
        work: Folder of stored results.
        dtype: Dtype of computation.
        device: Device of computation.
        journal: Receives notes and progress.
        progress: Whether to show a progress bar.
        on_failure: Receives what was measured before an error.
    """

    work: Path | None
    dtype: str
    device: str
    journal: Journal
    progress: bool
    on_failure: Callable[[Comparison], None]


def compare(
    models: Model | Sequence[Model],
    base: Model | None = None,
    settings: Evaluate | None = None,
    *,
    measure: bool = False,
    **options: Unpack[EvaluationOptions],
) -> Variants:
    """Compare variants of one model by size and loss.

    Args:
        models: Output folders of runs, whose reports are read. If the models are measured: checkpoint folders, hub ids,
            .gguf files, or models in memory as pairs (model, tokenizer).
        base: Uncompressed model to measure against; without it, the first model is the base of a measurement.
        settings: What is measured.
        measure: Whether to measure all models now; so does a base, or settings.
        **options: Options of `compress.evaluate`.

    Returns:
        The variants; the base is not among them.

    Raises:
        RecipeError: for no model, and if the base is the only one.
        ReportError: if reports are missing, or of different texts or models.
        CompressError: as `compress.evaluate`, if the models are measured.
    """
    sources = models_in(models)
    if not (measure or base is not None or settings is not None or any(map(is_loaded, sources))):
        return Variants.from_reports([Path(str(model)) for model in sources])
    if not {*map(key_of, sources)} - {key_of(sources[0] if base is None else base)}:
        raise RecipeError("nothing is compared with the base; name another MODEL too")
    return Variants.from_comparison(evaluate(sources, settings, base=base, **options))
