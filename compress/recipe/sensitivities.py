"""Sensitivities as data: the file of `compress sensitivity -o FILE.json`, and the pass that a recipe makes of it.

    - sensitivity: {file: sensitivity.json, bits: 3.5}
    - sensitivity: {file: sensitivity.json, bits: 3.5, with: gptq}

Such an item among the passes of a recipe is expanded before they are read: to one pass whose `overrides` give each
layer one of the measured choices. A resolved recipe lists that pass, so the file is not needed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from compress.errors import RecipeError, did_you_mean
from compress.layers.names import kind_of
from compress.numerics.budget import within_budget
from compress.numerics.statistics import mean
from compress.passes import PASSES
from compress.passes.contract.options import OptionError
from compress.recipe.tables import ResultTable, Shown

OPTIONS = "file", "bits", "with"
FILE = "sensitivity.json"
"""The file in a run's folder whose heat maps the report shows."""

Level = Literal["layer", "block"]


class Sensitivity(BaseModel):
    """The cost of one choice in one layer or block.

    Attributes:
        name: name of the linear or of the block.
        weights: number of weights.
        bits: stored bits per weight, without embeddings and norms.
        kl: divergence from the original model in nats per token.
        kl_stderr: standard error of `kl` over the windows.
        loss: increase of the loss in nats per token.
        loss_stderr: standard error of `loss` over the windows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    choice: str
    weights: int
    bits: float
    kl: float
    kl_stderr: float | None
    loss: float
    loss_stderr: float | None

    @property
    def text(self) -> str:
        """The divergence with its standard error."""
        return f"{self.kl:.2e} ± {self.kl_stderr or 0:.1e}"


class Sensitivities(Shown, BaseModel):
    """The sensitivities of a model.

    Attributes:
        level: whether one layer or one block is changed at a time.
        choices: pass of each choice by name, as a recipe spells it.
        found: sensitivity of each layer or block for each choice.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    compress: str
    model: str
    fingerprint: str
    text: str
    windows: int
    length: int
    level: Level
    choices: dict[str, Any]
    found: list[Sensitivity]

    def tables(self) -> list[ResultTable]:
        """Return the mean divergences by kind of layer, and those of the most sensitive layers."""
        choices, title = tuple(self.choices), f"{self.model}: mean KL of one {self.level} alone, nats per token"
        kinds = [(kind, *(f"{row[choice]:.2e}" for choice in choices)) for kind, row in self.by_kind().items()]
        ordered = sorted(self.by_name().items(), key=lambda item: -max(cell.kl for cell in item[1].values()))
        rows = [(name, *(row[choice].text for choice in choices)) for name, row in ordered]
        return [
            ResultTable(title, (f"kind of {self.level}", *choices), kinds),
            ResultTable(f"{self.level}s, the most sensitive first: KL ± standard error", (self.level, *choices), rows),
        ]

    def by_name(self) -> dict[str, dict[str, Sensitivity]]:
        """Return name -> choice -> sensitivity, in the order of the model."""
        table: dict[str, dict[str, Sensitivity]] = {}
        for sensitivity in self.found:
            table.setdefault(sensitivity.name, {})[sensitivity.choice] = sensitivity
        return table

    def by_kind(self) -> dict[str, dict[str, float]]:
        """Return kind of name, in which numbers are '*' -> choice -> mean KL divergence."""
        kl_by_kind: dict[str, dict[str, list[float]]] = {}
        for sensitivity in self.found:
            kind = kind_of(sensitivity.name)
            kl_by_kind.setdefault(kind, {}).setdefault(sensitivity.choice, []).append(sensitivity.kl)
        return {kind: {choice: mean(kl).value for choice, kl in row.items()} for kind, row in kl_by_kind.items()}


def read_sensitivities(path: Path) -> Sensitivities:
    """Read a file of sensitivities.

    Raises:
        RecipeError: if the file cannot be read.
    """
    try:
        return Sensitivities.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, ValidationError) as error:
        reason = " ".join(str(error).split())[:160]
        raise RecipeError(
            f"{path}: no readable sensitivities ({reason}); write them by compress sensitivity MODEL --choice ... -o "
            f"{path.name}"
        ) from error


def allocation(measured: Sensitivities, bits: float, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a pass, as a recipe spells it, that gives each layer one of the measured choices within a budget.

    The sum of the measured divergences is minimized; they are assumed to be additive.

    Args:
        measured: sensitivities of the layers.
        bits: largest average of stored bits per weight.
        base: {pass: options} to use in place of the measured pass; the options of the choices replace its options.

    Raises:
        RecipeError: if the choices are of several passes, or the budget is out of their range.
    """
    kinds = {next(iter(spelled)) for spelled in measured.choices.values()}
    if measured.level != "layer" or len(kinds) != 1 or len(measured.choices) < 2:
        raise RecipeError(
            "bits: needs choices of one pass that differ in size, measured by layer, such as the choices int3 "
            "and int4 of compress sensitivity"
        )
    table = measured.by_name()
    items = {
        name: {choice: (sensitivity.bits * sensitivity.weights, sensitivity.kl) for choice, sensitivity in row.items()}
        for name, row in table.items()
    }
    weights = sum(next(iter(row.values())).weights for row in table.values())
    sizes = [[size for size, _ in options.values()] for options in items.values()]
    least, most = sum(map(min, sizes)) / weights, sum(map(max, sizes)) / weights
    if not least <= bits <= most:
        raise RecipeError(f"bits {bits:g}: the choices reach {least:.4g} to {most:.4g} bits per weight")
    [kind] = kinds
    [(key, common)] = (base or {kind: {}}).items()
    options = {choice: {**(common or {}), **spelled[kind]} for choice, spelled in measured.choices.items()}
    return {key: _overridden(key, options, within_budget(items, bits * weights))}


def _overridden(key: str, options: Mapping[str, dict[str, Any]], chosen: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of the most frequent choice, with overrides for layers with another choice."""
    common = max(options, key=lambda choice: list(chosen.values()).count(choice))
    fields = PASSES[key].model_fields
    overrides = []
    for choice, changes in options.items():
        names = [name for name, layer_choice in chosen.items() if layer_choice == choice]
        if choice != common and names:
            differ = sorted(
                name for name in {*changes, *options[common]} if changes.get(name) != options[common].get(name)
            )
            overrides.append({"targets": names} | {name: changes.get(name, fields[name].default) for name in differ})
    return {**options[common], "overrides": overrides}


def expand_sensitivity(spelled: Any) -> dict[str, Any]:
    """Return the pass, as a recipe spells it, that the item `sensitivity` stands for.

    Args:
        spelled: plain value of the item.

    Raises:
        RecipeError: if the item is invalid or its file cannot be read.
    """
    example = "write sensitivity: {file: sensitivity.json, bits: 3.5}"
    if not isinstance(spelled, Mapping) or not isinstance(spelled.get("file"), str):
        raise RecipeError(f"needs file and bits; {example}")
    for name in spelled:
        if name not in OPTIONS:
            raise OptionError((name,), f"unknown option{did_you_mean(str(name), OPTIONS)}")
    bits, base = spelled.get("bits"), spelled.get("with")
    if isinstance(bits, bool) or not isinstance(bits, (int, float)):
        raise OptionError(("bits",), f"{bits!r} is not a number of bits per weight; {example}")
    base = {base: {}} if isinstance(base, str) else base
    if base is not None and not (isinstance(base, Mapping) and len(base) == 1 and next(iter(base)) in PASSES):
        raise OptionError(("with",), "must be one pass, such as gptq or {gptq: {damping: 0.05}}")
    return allocation(read_sensitivities(Path(spelled["file"])), bits, base)
