"""apply(model, passes): compress a model in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.checkpoint.checkpoint import masked_in
from compress.checkpoint.masks import MaskPolicy, with_masks
from compress.checkpoint.saving import guard_saving
from compress.checkpoint.sources.supported import check_supported
from compress.errors import CalibrationError, ModelError
from compress.layers.linear import CompressedLinear
from compress.models.experts import open_experts
from compress.models.kinds.kinds import adapter_of
from compress.passes.contract.journal import Journal
from compress.passes.contract.passes import Pass
from compress.pipeline.divide import training_text
from compress.pipeline.engine import Memory, engine
from compress.pipeline.given_data import examples_in
from compress.pipeline.needs import check_original_given
from compress.pipeline.resolve import resolve, run_of, teachers
from compress.pipeline.sizes import within_size
from compress.pipeline.sources import in_memory
from compress.pipeline.texts import PROBE_TOKENS
from compress.recipe.calibration import Calibration
from compress.recipe.order import check_order
from compress.recipe.schema import Recipe, Save, read_passes


def apply(
    model: PreTrainedModel,
    passes: Pass | Sequence[Pass],
    calibration: Any = None,
    batch: int = 4,
    journal: Journal | None = None,
    teacher: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    masks: MaskPolicy = "keep",
) -> PreTrainedModel:
    """Apply passes to a model in memory, in place, and return it. Experts stored as 3-D weights become linears.

    Save the result with `compress.save`, or with `save_pretrained` if no layer is quantized.

    passes: a list, or one pass; also as recipes spell them, such as [{"scheme": "W4A16"}]. calibration: token ids
    [sequences, length]; a batch as a data collator of transformers returns it, for a model of recordings a mapping with
    input_features (or input_values) and labels; a Dataset, a DataLoader or a list of batches, of rows with input_ids or
    of texts; a `Calibration`, or the name or file of a text; required unless all passes are data-free. batch: sequences
    per batch. teacher: the uncompressed model, for passes that learn from it; by default a copy of the model.
    tokenizer: of texts; it also provides the mask token, for passes that train a masked language model or compute its
    loss. masks: 'keep': the zeros of a dense linear with more than a fifth of zeros stay zero; 'forget': they are
    ordinary weights.

    Raises RecipeError for an impossible order, TargetError, CalibrationError, ModelError for an unfit teacher or a
    missing mask token.
    """
    if not isinstance(model, PreTrainedModel):
        reason = (
            f"is {model}, which is not in memory" if isinstance(model, str | Path) else f"is of class {type(model)}"
        )
        raise ModelError(f"model: {reason}; load it first: model, tokenizer = compress.load(FOLDER)")
    passes = read_passes([passes] if isinstance(passes, Pass) else passes)
    check_order(passes, begun=True)
    check_supported(model)
    if not any(isinstance(module, CompressedLinear) for module in model.modules()):
        check_order(passes)
    guard_saving(model)
    journal = journal or Journal()
    for log in open_experts(model):
        journal.add("note", "model", log)
    opened = in_memory(model, tokenizer)
    for log in with_masks(opened, masked_in(model.config), masks).notes:
        journal.add("note", "model", log)
    stated = calibration if isinstance(calibration, Calibration) else Calibration()
    recipe = Recipe.model_construct(
        model=type(model).__name__,
        passes=passes,
        save=Save(format="native"),
        calibration=Calibration(  # the caller gives token ids
            sequences=None, length=None, experts=stated.experts, expert_tokens=stated.expert_tokens
        ),
        eval=None,
    )
    resolved = within_size(resolve(recipe, opened))
    for log in resolved.fitted:
        journal.add("note", "plan", log)
    if calibration is None and any(step.requires.data for step in passes):
        raise CalibrationError("calibration: these passes need token ids, an integer tensor [sequences, length]")
    examples = None if calibration is None else examples_in(calibration, opened, recipe)
    without_data = partial(adapter_of(model).probe, model, resolved.sample, PROBE_TOKENS)
    probe = without_data() if examples is None else examples.beginning(PROBE_TOKENS)
    open_original = None if teacher is None else partial(in_memory, teacher)
    check_original_given(resolved.steps, teacher is not None)
    services = {"open_teacher": teachers(passes, model, teacher, opened), "open_original": open_original}
    stream = training_text(calibration, opened, recipe.seed) if isinstance(calibration, Calibration) else None
    run = run_of(resolved, journal, calibration=examples, stream=stream, **services)
    engine(resolved, [] if examples is None else examples.batches(batch), probe, run, Memory())
    return model
