"""Other options for some layers of a quantizing pass: overrides, and fallbacks for widths that a grid does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field, model_validator
from typing_extensions import Self

from compress.errors import TargetError
from compress.layers.scheme import LayerScheme
from compress.models.structure.select import ModuleNames, select
from compress.models.structure.select import chosen as is_chosen
from compress.passes.contract.facts import Effects
from compress.passes.contract.options import INHERITED, Override, read_overrides, resolve_overrides
from compress.passes.families.weight_grid import GridName, WeightGrid, known_grid

PLAIN_GROUP = 32
"""The group size of `fallback`."""


class Overridden(WeightGrid):
    """The options of the weights' grid, and others for some layers."""

    fallback: GridName | None = Field(
        default=None,
        description="grid, in groups of 32, for layers whose inputs are no multiple of the super-blocks of `weights`; "
        "without it such a layer is an error",
    )
    overrides: tuple[Override, ...] = Field(
        default=(), description="other options for some layers: {pattern: {weights: int8}}; weights: none skips layers"
    )

    @model_validator(mode="before")
    @classmethod
    def _read_overrides(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "overrides" not in data:
            return data
        base = {name: value for name, value in data.items() if name != "overrides"}
        cls.model_validate(base)  # the pass's own mistakes come first
        return {**base, "overrides": read_overrides(cls, base, data["overrides"])}

    def on_model(self, names: ModuleNames, where: str) -> Self:
        found = super().on_model(names, where)
        changed, ends = [], names.reached(self.targets)
        for override in found.overrides:
            targets = override.targets
            if override.blocks is not None:
                override = self._in_blocks(override, names, where)
                targets = override.targets
            targets = names.ignored(targets, ends) if override.dense else names.full(targets)
            if targets:
                same = targets == override.targets
                changed.append(override if same else override.model_copy(update={"targets": targets}))
        new = tuple(changed)
        found = found if new == found.overrides else found.model_copy(update={"overrides": new})
        found = found.model_copy(update={"overrides": found._fallen_back(names)})
        found._check_overrides(names, where)
        return found

    def _in_blocks(self, override: Override, names: ModuleNames, where: str) -> Override:
        """The override for the layers of its blocks. Raises TargetError if there are none."""
        blocks, count = override.blocks, len(names.blocks)
        assert blocks is not None
        inside = [n for n in names.linears if override.takes(n) and blocks.takes(names.block_of(n), count)]
        if not inside:
            raise TargetError(f"{where} overrides: no layer matches {', '.join(override.targets)} in the chosen blocks")
        return override.model_copy(update={"targets": tuple(inside), "blocks": None})

    def _fallen_back(self, names: ModuleNames) -> tuple[Override, ...]:
        """The overrides, with further ones for layers whose width the super-blocks do not divide."""
        left = [name for name in names.linears if is_chosen(name, self.targets, self.ignore)]
        changed: list[Override] = []
        fell = False
        for override in (*self.overrides, None):
            own = self if override is None else None if override.dense else self._with_override(override)
            mine = dict.fromkeys(name for name in left if override is None or override.takes(name))
            left = [name for name in left if name not in mine]
            block = None if own is None or own.fallback is None else own.grid.block
            fallen = dict.fromkeys(name for name in mine if block is not None and names.shapes[name][1] % block)
            stay = [name for name in mine if name not in fallen]
            if fallen:
                assert own is not None
                options = {"weights": own.fallback, "group_size": PLAIN_GROUP}
                changed.append(Override.model_validate({"targets": tuple(fallen), **options}))
                fell = True
            if override is not None and (stay or not fallen):
                changed.append(override.model_copy(update={"targets": tuple(stay)}) if fallen else override)
        return tuple(changed) if fell else self.overrides

    def _check_overrides(self, names: ModuleNames, where: str) -> None:
        """Raise TargetError for an override that matches none of the layers, or if overrides skip all layers."""
        targeted = select(names.candidates(self.targets), self.targets, self.ignore, where)
        override_of = resolve_overrides(self.overrides, targeted, where)
        if all(name in override_of and override_of[name].dense for name in targeted):
            raise TargetError(
                f"{where}: the overrides skip all {len(targeted)} linears; remove weights: none from one of them"
            )

    def for_layer(self, name: str) -> Self | None:
        for override in self.overrides:
            if override.takes(name):
                return None if override.dense else self._with_override(override)
        return self

    def _with_override(self, override: Override) -> Self:
        own = {name: getattr(self, name) for name in type(self).model_fields if name != "overrides"}
        own = {**self.under(own, override.options), **override.options}
        return type(self).model_validate(own, context=INHERITED)

    @classmethod
    def under(cls, base: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
        """The options of the pass that hold under an override: those that follow from the grid are left out."""
        before = known_grid(base.get("weights", cls.model_fields["weights"].default))
        grid = known_grid(changed.get("weights")) or before
        gone = set()
        if grid is not None and before is not None:
            gone |= {"group_size"} if grid.group_size is not None else set()  # the grid fixes it
            gone |= {"scale"} if grid.averaged != before.averaged else set()
            gone |= {"symmetric"} if grid.offset != before.offset else set()
        if changed.get("group_size") == "tensor" and base.get("scale") == "importance":
            gone |= {"scale"}
        return {name: value for name, value in base.items() if name not in gone}

    def variants(self) -> list[Self]:
        """The pass with its own options, and with those of each override."""
        return [self, *(self._with_override(override) for override in self.overrides if not override.dense)]

    def effects(self, layer: LayerScheme) -> Effects:
        effects = super().effects(layer)
        dense = tuple(pattern for override in self.overrides if override.dense for pattern in override.targets)
        return replace(effects, skipped=effects.skipped + dense)
