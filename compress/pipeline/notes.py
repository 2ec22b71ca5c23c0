"""Notes of a plan: copied tensors, stored bits, pruning that saves no bytes; and checks of the calibration."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from compress.blockwise.quantized_embeddings import embeddings_of
from compress.checkpoint.formats.base import Format
from compress.errors import RecipeError
from compress.layers.names import kind_of
from compress.layers.scheme import LayerScheme
from compress.models.experts import in_experts
from compress.passes.contract.facts import ANY_LAYER
from compress.passes.contract.observers import Gram
from compress.passes.contract.passes import LayerPass
from compress.pipeline.model_facts import ModelFacts
from compress.pipeline.resolve import ResolvedRecipe
from compress.recipe.calibration import Calibration
from compress.recipe.tables import megabytes

NOTABLE = 1.03  # ratio of stored to nominal bits per weight that a note states
SHOWN = 6  # kinds of tensors in a note
WIDE = 32  # groups in a row without padding: whole words for codes of every width


def undeclared_notes(resolved: ResolvedRecipe, facts: ModelFacts) -> list[str]:
    """Return a note that names the stored tensors of parts that the class of the model does not have."""
    opened, format_ = resolved.opened, resolved.format
    if not opened.undeclared:
        return []
    parts = sorted({kind_of(name) for name in opened.undeclared})
    more = f" and {len(parts) - SHOWN} more" if len(parts) > SHOWN else ""
    if format_.file is not None:
        treatment = f"left out, because format {format_.name} has no names for them"
    elif resolved.form is not opened:
        treatment = "left out, because a pass changes the shape of the model"
    else:
        treatment = f"copied unchanged ({megabytes(opened.undeclared_bytes)} MB)"
    names = f"{', '.join(parts[:SHOWN])}{more}"
    return [
        f"{len(opened.undeclared)} tensors that {type(opened.model).__name__} has no parts for are {treatment}: {names}"
    ]


def misread_notes(resolved: ResolvedRecipe, facts: ModelFacts) -> list[str]:
    """Return a note that names the programs that refuse the checkpoint, or compute something else."""
    format_ = resolved.format
    adapted = [format_.adapt(layer.scheme) for layer in facts.values()]
    texts = format_.misreadings([scheme for scheme in adapted if scheme is not None], resolved.form.config)
    return [f"save: format {format_.name}: {'; '.join(texts)}"] if texts else []


def dense_notes(resolved: ResolvedRecipe, facts: ModelFacts) -> list[str]:
    """Return a note for linears that stay dense because the format never stores them as codes."""
    if not any("quantized" in step.effects(ANY_LAYER).facts for _, step, _ in resolved.steps):
        return []
    stores_dense = resolved.format.stores_dense
    names = [name for name in resolved.form.linear_names() if stores_dense(name)]
    kinds = ", ".join(sorted({kind_of(name) for name in names}))
    return [f"{len(names)} linears stay dense ({kinds}): {stores_dense(names[0])}"] if names else []


def storage_notes(resolved: ResolvedRecipe, facts: ModelFacts) -> list[str]:
    """Return a note for layers whose stored bits per weight are notably more than the nominal bits of their scheme."""
    format_, storage = resolved.format, resolved.storage
    layers_of: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    quantizing = [step for step in resolved.steps if "quantized" in step[1].effects(ANY_LAYER).facts]
    rounds = {name: label for label, _, names in quantizing for name in names}
    for name, layer in facts.items():
        scheme, size = layer.scheme, layer.size_bytes
        nominal = nominal_bits(scheme, storage)
        if nominal is None or format_.adapt(scheme) is None or 8 * size <= NOTABLE * nominal * prod(scheme.shape):
            continue
        key = rounds.get(name, ""), f"{nominal:.2f}", _reason(scheme, format_, nominal, storage)
        layers_of.setdefault(key, []).append((size, prod(scheme.shape)))
    notes = []
    for (label, nominal, reason), sizes in layers_of.items():
        bits = 8 * sum(size for size, _ in sizes) / sum(count for _, count in sizes)
        text = f"{bits:.2f} bits per weight are stored instead of {nominal}"
        notes.append(f"{label}: in {len(sizes)} layers {text}: {reason}")
    return notes


def nominal_bits(scheme: LayerScheme, storage: torch.dtype) -> float | None:
    """Bits per weight with whole groups and whole words; None for layers that are not codes in groups of columns."""
    codes = scheme.codes
    if codes is None or not isinstance(codes.group_size, int):
        return None
    wide = replace(scheme, shape=(scheme.shape[0], WIDE * codes.group_size), transforms=())
    return 8 * wide.size_bytes(storage) / prod(wide.shape)


def _reason(scheme: LayerScheme, format_: Format, nominal: float, storage: torch.dtype) -> str:
    codes, width, stored = scheme.codes, scheme.shape[1], format_.adapt(scheme)
    assert codes is not None and isinstance(codes.group_size, int)
    size, adapted = codes.group_size, None if stored is None else stored.codes
    sizes = ", ".join(str(n) for n in range(16, 257) if width % n == 0)
    better = f"; group sizes that divide {width}: {sizes}, channel" if width % size else ""
    if adapted is not None and adapted.group_size != size:
        parts = f"groups of {adapted.group_size} with repeated scales"
        return f"group_size {size} does not divide {width} inputs, so format {format_.name} stores {parts}{better}"
    if width % size:
        return f"the last of the groups of {size} columns has only {width % size} of {width} inputs{better}"
    if adapted is not None and codes.symmetric and not adapted.symmetric:
        return f"format {format_.name} stores a zero point or a minimum for every group"
    if stored is not None and 8 * stored.size_bytes(storage) <= NOTABLE * nominal * prod(scheme.shape):
        return f"format {format_.name} stores more than the codes need, such as zero points or the group of each column"
    return f"rows of {width} inputs, or zero points, are padded to whole words of 32 bits"


def size_notes(resolved: ResolvedRecipe, checkpoint_bytes: int, dense_bytes: int) -> list[str]:
    """Return a note for a checkpoint with compressed layers that is larger than the uncompressed model.

    Args:
        resolved: The recipe.
        checkpoint_bytes: All tensors of the checkpoint.
        dense_bytes: All tensors of the uncompressed model in the storage dtype.
    """
    quantizes = any("quantized" in step.effects(ANY_LAYER).facts for _, step, _ in resolved.steps)
    if not quantizes or checkpoint_bytes <= dense_bytes:
        return []
    sizes = f"{megabytes(checkpoint_bytes)} > {megabytes(dense_bytes)} MB"
    text = f"the checkpoint is larger than the uncompressed model ({sizes})"
    before, after = (embeddings_of(opened) for opened in (resolved.opened, resolved.form))
    if before.tied and not after.tied:
        text += (
            ": the head, which was tied to the embeddings, is stored separately; compress both with "
            "rtn: {weights: int8, group_size: channel, targets: [lm_head, embed_tokens]} as the last pass"
        )
    return [text]


def pruning_notes(resolved: ResolvedRecipe, facts: ModelFacts) -> list[str]:
    """Return a note for every pruning pass whose zeros save no bytes."""
    notes, format_ = [], resolved.format
    for label, step, names in resolved.steps:
        layers = [facts[name] for name in names if name in facts]
        pruned = [layer for layer in layers if step.effects(layer.scheme).sparsities]
        if pruned and sum(layer.size_bytes for layer in pruned) >= sum(layer.with_zeros_bytes for layer in pruned):
            reason = f"format {format_.name} stores zeros like other weights; format: native packs sparse weights"
            if format_.sparse:
                reason = "positions of the nonzero weights would take as many; prune more, or by a pattern such as 2:4"
            notes.append(f"{label}: its zeros save no bytes: {reason}")
    return notes


def pass_notes(resolved: ResolvedRecipe, facts: ModelFacts) -> list[str]:
    """Return what passes say about their result in this format."""
    notes, format_ = [], resolved.format
    for label, step, _ in resolved.steps:
        effects = step.effects(ANY_LAYER)
        notes += [f"{label}: {note}" for note in effects.notes]
        if effects.negative_scales and not format_.negative_scales:
            notes.append(f"{label}: scales stay positive: not all readers of format {format_.name} take negative ones")
    return notes


def calibration_notes(resolved: ResolvedRecipe, facts: ModelFacts) -> list[str]:
    """Return a note for every layer pass with singular Gram matrices: of fewer tokens than a layer has inputs."""
    calibration = resolved.recipe.calibration
    if calibration.sequences is None or calibration.length is None:
        return []
    notes, tokens = [], calibration.sequences * calibration.length
    for label, step, names in resolved.steps:
        observes = isinstance(step, LayerPass) and issubclass(step.observer, Gram)
        widest = max((facts[name].scheme.shape[1] for name in names if name in facts), default=0)
        if observes and tokens < widest:
            least_sequences = -(-widest // calibration.length)
            notes.append(
                f"{label}: calibration has {tokens:,} tokens for layers of up to {widest:,} inputs, so the fit may "
                f"hold for this text alone; use at least sequences: {least_sequences}"
            )
    return notes


def stream_notes(resolved: ResolvedRecipe, facts: ModelFacts) -> list[str]:
    """Return a note on what every training pass reads of a calibration text with a stream.

    Raises:
        RecipeError: for a pass that cannot read new sequences.
    """
    calibration, notes = resolved.recipe.calibration, []
    if not any(text.streaming for text, _ in calibration.texts()):
        return []
    for label, step, _ in resolved.steps:
        count, problem = step.requires.new_sequences, step.requires.fixed_text
        if count is None:
            continue
        if not count or not calibration.streams():
            remedies = ["steps instead of epochs"] * (not count) + ["self_share: 0"] * bool(calibration.self_share)
            is_whole = all(text.streaming or text.sampled for text, _ in calibration.texts())
            remedies += [] if is_whole else ["streaming: true for every text"]
            notes.append(
                f"{label}: trains on the {calibration.sequences} sequences of the calibration; to read new ones of the "
                f"stream in every step, write {' and '.join(remedies)}"
            )
        elif problem is not None:
            raise RecipeError(f"{label}: {problem}")
        else:
            length = calibration.length or 0
            notes.append(
                f"{label}: every process reads {count:,} sequences of {length} tokens of the stream, "
                f"{count * length:,} tokens, when its steps need them; a text that ends begins again"
            )
    return notes


def check_experts(resolved: ResolvedRecipe, facts: ModelFacts) -> tuple[str, ...]:
    """Raise RecipeError for options of the calibration of experts if the model has none."""
    calibration, defaults = resolved.recipe.calibration, Calibration()
    stated = [name for name in ("experts", "expert_tokens") if getattr(calibration, name) != getattr(defaults, name)]
    if stated and not any(in_experts(block.module) for block in resolved.opened.blocks):
        raise RecipeError(
            f"calibration {stated[0]}: {type(resolved.opened.model).__name__} has no experts; leave it out"
        )
    return ()


def transform_notes(resolved: ResolvedRecipe, facts: ModelFacts) -> list[str]:
    """A note on scales and permutations of inputs that may stay at layers."""
    sizes = [layer.transform_bytes for layer in facts.values() if layer.transform_bytes is not None]
    if not sizes:
        return []
    return [
        f"{len(sizes)} layers may keep a scale or permutation of their inputs that no earlier layer can absorb; "
        f"it is not counted: at most {sum(sizes)} bytes more"
    ]
