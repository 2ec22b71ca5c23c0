"""Other options for some layers of a quantizing pass: overrides, and fallbacks for widths that a grid does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compress.errors import TargetError
from compress.models.structure.ends import End
from compress.models.structure.patterns import chosen, select
from compress.models.structure.select import ModuleNames
from compress.passes.contract.options import Override, resolve_overrides
from compress.passes.families.bits import PLAIN_GROUP
from compress.passes.families.weight_grid import known_grid

if TYPE_CHECKING:
    from compress.passes.families.quantizing import Quantizing


def overrides_on_model(
    step: Quantizing, named_ends: Sequence[End], names: ModuleNames, label: str
) -> tuple[Override, ...]:
    """Return the overrides with patterns that hold for one model; those without layers are left out.

    Args:
        named_ends: the embedding and LM head, if the recipe targets them.
        label: the label of the pass, for errors.

    Raises:
        TargetError: if an override matches no layer in its blocks.
    """
    overrides = []
    for override in step.overrides:
        if override.blocks is not None:
            override = _in_blocks(override, names, label)
        targets = names.ignored(override.targets, named_ends) if override.dense else names.full(override.targets)
        if targets:
            is_equal = targets == override.targets
            overrides.append(override if is_equal else override.model_copy(update={"targets": targets}))
    return tuple(overrides)


def _in_blocks(override: Override, names: ModuleNames, label: str) -> Override:
    blocks, count = override.blocks, len(names.blocks)
    assert blocks is not None
    inside = [n for n in names.linears if override.takes(n) and blocks.takes(names.block_of(n), count)]
    if not inside:
        raise TargetError(f"{label} overrides: no layer matches {', '.join(override.targets)} in the chosen blocks")
    return override.model_copy(update={"targets": tuple(inside), "blocks": None})


def with_fallbacks(step: Quantizing, names: ModuleNames) -> tuple[Override, ...]:
    """Return the overrides, with further ones for layers whose width the super-blocks of their grid do not divide."""
    remaining = [name for name in names.linears if chosen(name, step.targets, step.ignore)]
    overrides: list[Override] = []
    is_changed = False
    for override in (*step.overrides, None):
        own_step = step if override is None else None if override.dense else step.with_override(override)
        matched = dict.fromkeys(name for name in remaining if override is None or override.takes(name))
        remaining = [name for name in remaining if name not in matched]
        block = None if own_step is None or own_step.fallback is None else own_step.grid.block
        unfit = dict.fromkeys(name for name in matched if block is not None and names.shapes[name][1] % block)
        fit = [name for name in matched if name not in unfit]
        if unfit:
            assert own_step is not None
            options = {"weights": own_step.fallback, "group_size": PLAIN_GROUP}
            overrides.append(Override.model_validate({"targets": tuple(unfit), **options}))
            is_changed = True
        if override is not None and (fit or not unfit):
            overrides.append(override.model_copy(update={"targets": tuple(fit)}) if unfit else override)
    return tuple(overrides) if is_changed else step.overrides


def check_overrides(step: Quantizing, names: ModuleNames, label: str) -> None:
    """Raise TargetError for an override that matches none of the layers, or if overrides skip all layers."""
    targeted = select(names.candidates(step.targets), step.targets, step.ignore, label)
    override_of = resolve_overrides(step.overrides, targeted, label)
    if all(name in override_of and override_of[name].dense for name in targeted):
        raise TargetError(
            f"{label}: the overrides skip all {len(targeted)} linears; remove weights: none from one of them"
        )


def inherited_options(base: Mapping[str, Any], changed: Mapping[str, Any], weights: str) -> dict[str, Any]:
    """Return the options of a pass that hold under an override, without those that follow from another grid.

    Args:
        base: the options of the pass.
        changed: those of the override.
        weights: the default grid.
    """
    base_grid = known_grid(base.get("weights", weights))
    grid = known_grid(changed.get("weights")) or base_grid
    dropped = set()
    if grid is not None and base_grid is not None:
        dropped |= {"group_size"} if grid.group_size is not None else set()  # the grid fixes it
        dropped |= {"scale"} if grid.averaged != base_grid.averaged else set()
        dropped |= {"symmetric"} if grid.offset != base_grid.offset else set()
    if changed.get("group_size") == "tensor" and base.get("scale") == "importance":
        dropped |= {"scale"}
    return {name: value for name, value in base.items() if name not in dropped}
