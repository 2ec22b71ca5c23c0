"""Whether a server can load a checkpoint: layers that it computes as one are stored alike, and layers can be split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from compress.checkpoint.formats.base import Format
from compress.checkpoint.opened import OpenModel
from compress.errors import TargetError
from compress.layers.linear import linears
from compress.layers.scheme import LayerScheme
from compress.models.kinds.contract import text_config
from compress.pipeline.input_groups import input_groups
from compress.pipeline.model_facts import ModelFacts
from compress.pipeline.resolve import ResolvedRecipe

MOST = 64
"""The largest number of devices that an error proposes."""


FusedSets = Mapping[frozenset[str], Sequence[tuple[str, ...]]]
"""The sets of linears that servers compute as one, by kind of block; names are those inside of the block."""


def fused_sets(opened: OpenModel) -> FusedSets:
    """Find the linears that servers compute as one: those of one module that read the same tensor (`input_groups`)."""
    return {
        kind: [part for group in groups for part in _of_one_module(group.linears) if len(part) > 1]
        for kind, groups in input_groups(opened).items()
    }


def _of_one_module(names: Sequence[str]) -> list[tuple[str, ...]]:
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(name.rpartition(".")[0], []).append(name)
    return [tuple(part) for part in parts.values()]


def check_servers(resolved: ResolvedRecipe, facts: ModelFacts) -> list[str]:
    """Return notes about what servers cannot load, for a recipe that does not say that one is to load the checkpoint.

    Raises TargetError for recipes that say so (`save.tensor_parallel`), and if
    groups or packed words do not divide over the devices.
    """
    form, format_, parts = resolved.form, resolved.format, resolved.recipe.save.tensor_parallel
    schemes = {n: format_.adapt(layer.scheme) or LayerScheme(layer.scheme.shape) for n, layer in facts.items()}
    coded = {name: scheme for name, scheme in schemes.items() if not scheme.plain}
    if not coded:
        return []
    differing = format_.fused and len({_stated(scheme) for scheme in schemes.values()}) > 1
    reason = None
    if differing:
        sets = fused_sets(resolved.opened)
        reasons = (_unlike(sets, block.name, frozenset(linears(block.module)), schemes) for block in form.blocks)
        reason = next((text for text in reasons if text is not None), None)
    if reason is not None and parts is not None:
        raise TargetError(f"save: tensor_parallel: {parts}: {reason}; give them the same options")
    if parts is not None and parts > 1:
        _check_split(parts, form, format_, coded)
    return [] if reason is None else [f"save: {reason}; save: {{tensor_parallel: 1}} makes this an error"]


def settled_check(resolved: ResolvedRecipe) -> Callable[[str, Mapping[str, LayerScheme]], None] | None:
    """A check of a block's name and of the schemes that its linears have at the end of a run, by their full names.

    None without `save.tensor_parallel`. Passes may choose schemes, and the blocks to drop, from calibration inputs,
    which no plan knows. The check raises TargetError as `check_servers` does.
    """
    parts, format_, form = resolved.recipe.save.tensor_parallel, resolved.format, resolved.form
    if parts is None:
        return None
    sets = fused_sets(resolved.opened) if format_.fused else {}

    def check(block: str, schemes: Mapping[str, LayerScheme]) -> None:
        reason = _unlike(sets, block, frozenset(name.removeprefix(f"{block}.") for name in schemes), schemes)
        if reason is not None:
            raise TargetError(
                f"save: tensor_parallel: {parts}: {reason}; a pass decided this during the run: change its options so "
                "that it treats linears with the same input alike, or leave tensor_parallel out"
            )
        coded = {name: scheme for name, scheme in schemes.items() if not scheme.plain}
        if parts > 1 and coded:
            _check_split(parts, form, format_, coded)

    return check


def _stated(scheme: LayerScheme) -> tuple[object, ...]:
    """What a config states of a layer."""
    return ((), ()) if scheme.plain else (scheme.parts, scheme.transforms)


def _unlike(sets: FusedSets, block: str, kind: frozenset[str], schemes: Mapping[str, LayerScheme]) -> str | None:
    """Return why servers refuse the layers of a block; None if the layers of each set are stored alike.

    kind: the names of its linears inside the block. schemes: of its linears by full names, and of others.
    """
    for names in sets.get(kind, ()):
        members = {name: schemes[name] for name in (f"{block}.{inside}" for inside in names)}
        reference = next(iter(members))
        different = next((name for name in members if _stated(members[name]) != _stated(members[reference])), None)
        if different is not None:
            texts = [f"{n.rpartition('.')[2]}: {'dense' if s.plain else s.text}" for n, s in members.items()]
            return (
                f"{different} is stored otherwise than {reference} ({', '.join(texts)}); servers such as vLLM compute "
                "linears with the same input as one, and refuse a checkpoint in which these differ"
            )
    return None


def _check_split(parts: int, form: OpenModel, format_: Format, schemes: Mapping[str, LayerScheme]) -> None:
    prefix = f"save: tensor_parallel: {parts}"
    reason = format_.unsplit()
    if reason is not None:
        raise TargetError(f"{prefix}: {reason}; write tensor_parallel: 1")
    split = {name: _Split(name, scheme.shape, format_.units(scheme), form) for name, scheme in schemes.items()}
    for layer in split.values():
        reason = layer.reason(parts)
        if reason is not None:
            able = [n for n in range(1, MOST + 1) if not any(candidate.reason(n) for candidate in split.values())]
            raise TargetError(
                f"{prefix}: {layer.name}: {reason}; these numbers work for all layers: {', '.join(map(str, able))}; or "
                "use a smaller group_size, or group_size: channel"
            )


class _Split:
    """How a linear is split over devices: by rows, by columns, or, if the model does not say it, in either way."""

    def __init__(self, name: str, shape: tuple[int, int], units: tuple[int, int], form: OpenModel) -> None:
        self.name, self.shape, self.units = name, shape, units
        config = text_config(form.config)
        self.ways = _ways(name, getattr(config, "base_model_tp_plan", None) or {})
        self.heads: int | None = getattr(config, "num_attention_heads", None)
        groups = getattr(config, "num_key_value_heads", None)
        width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // (self.heads or 1)
        self.shared = groups if groups is not None and groups != self.heads and shape[0] == groups * width else None

    def reason(self, parts: int) -> str | None:
        """Return why it cannot be split into so many parts; None if it can."""
        if self.heads is not None and self.heads % parts:
            return f"{self.heads} attention heads do not split over {parts} devices"
        if self.shared is not None and self.shared % parts and parts % self.shared:
            return f"{self.shared} heads of keys and values do not split over {parts} devices"
        for way, features, size, unit in zip(
            ("rows", "columns"), ("outputs", "inputs"), self.shape, self.units, strict=True
        ):
            count = parts if self.shared is None or way == "columns" else min(parts, self.shared)
            if way in self.ways and size % (count * unit):
                of = "" if unit == 1 else f" of whole groups or words of {unit}"
                return f"{size} {features} do not split into {count} equal parts{of}"
        return None


def _ways(name: str, plan: Mapping[str, str]) -> set[str]:
    """Return whether a linear is split by rows or by columns, by the plan of its model; both if it has none."""
    if not plan:
        return {"rows", "columns"}
    style = next((way for pattern, way in plan.items() if fnmatchcase(name, f"*{pattern}")), "")
    return {"rows"} if "colwise" in style else {"columns"} if "rowwise" in style else set()
