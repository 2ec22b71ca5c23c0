"""Whether a server can load a checkpoint: layers that it computes as one are stored alike, and layers can be split."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from compress.checkpoint.formats.base import Format
from compress.checkpoint.sources.opening import OpenModel
from compress.errors import CannotRun, TargetError, call_foreign
from compress.layers.scheme import LayerScheme
from compress.models.kinds.objective import text_config
from compress.models.structure.links import block_signature, find_groups
from compress.recipe.schema import Recipe
from compress.sweep.capture import Call, ModelShell

MOST = 64
"""The largest number of devices that an error proposes."""


def fused_sets(opened: OpenModel) -> list[tuple[str, ...]]:
    """The linears that servers compute as one, by full names: those of one module that read the same tensor.

    Blocks run on tensors without data. A block that cannot run so has no sets.
    """
    shell, captured = ModelShell(opened), None
    ids = shell.check()
    known: dict[object, list[tuple[str, ...]]] = {}
    found = []
    for block in opened.blocks:
        if captured is None or block.index not in captured.calls:
            captured = shell.sketch(ids, block.stack, None if captured is None else captured.hidden)
        call, hidden = captured.calls[block.index], captured.hidden
        kind = block_signature(block.module)
        if kind not in known:
            known[kind] = []
            with suppress(CannotRun), torch.no_grad():  # then its linears are tried one by one
                empty = copy.deepcopy(block.module).to("meta")
                args: Any = send_to_device(call.args, "meta")
                kwargs: Any = send_to_device(call.kwargs, "meta")
                there = Call(args, kwargs, call.keyword)
                groups = call_foreign(find_groups, empty, partial(_on_meta, there, hidden))
                known[kind] = [part for group in groups for part in _of_one_module(group.linears) if len(part) > 1]
        found += [tuple(f"{block.name}.{name}" for name in part) for part in known[kind]]
    return found


def _on_meta(call: Call, hidden: Tensor, module: nn.Module) -> Tensor:
    return call.run(module, hidden.to("meta"))


def _of_one_module(names: Sequence[str]) -> list[tuple[str, ...]]:
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(name.rpartition(".")[0], []).append(name)
    return [tuple(part) for part in parts.values()]


def check_servers(recipe: Recipe, form: OpenModel, format_: Format, planned: Mapping[str, LayerScheme]) -> list[str]:
    """Notes about what servers cannot load, for a recipe that does not say that one is to load the checkpoint.

    form: the model in its final shape. planned: the final schemes of its linears. Raises TargetError for recipes that
    say so (`save.tensor_parallel`), and if groups or packed words do not divide over the devices.
    """
    parts = recipe.save.tensor_parallel
    schemes = {name: format_.adapt(scheme) or LayerScheme(scheme.shape) for name, scheme in planned.items()}
    coded = {name: scheme for name, scheme in schemes.items() if not scheme.plain}
    if not coded:
        return []
    differing = format_.fused and len({_stated(scheme) for scheme in schemes.values()}) > 1
    reason = _unlike(fused_sets(form), schemes) if differing else None
    if reason is not None and parts is not None:
        raise TargetError(f"save: tensor_parallel: {parts}: {reason}; give them the same options")
    if parts is not None and parts > 1:
        _check_split(parts, form, format_, coded)
    return [] if reason is None else [f"save: {reason}; save: {{tensor_parallel: 1}} makes this an error"]


def settled_check(recipe: Recipe, form: OpenModel) -> Callable[[Mapping[str, LayerScheme]], None] | None:
    """A check of the schemes that linears of a block have at the end of a run; None without `save.tensor_parallel`.

    Passes may choose schemes from calibration inputs, which no plan knows. The check raises TargetError as
    `check_servers` does. form: the model in its final shape.
    """
    parts, format_ = recipe.save.tensor_parallel, recipe.save.target()
    if parts is None:
        return None
    sets = fused_sets(form) if format_.fused else []

    def check(schemes: Mapping[str, LayerScheme]) -> None:
        reason = _unlike(sets, schemes)
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


def _unlike(sets: Sequence[Sequence[str]], schemes: Mapping[str, LayerScheme]) -> str | None:
    """Why servers refuse these layers; None if the layers of each set are stored alike."""
    for names in sets:
        found = {name: schemes[name] for name in names if name in schemes}
        other = next((name for name in found if _stated(found[name]) != _stated(found[names[0]])), None)
        if other is not None:
            texts = [f"{n.rpartition('.')[2]}: {'dense' if s.plain else s.text}" for n, s in found.items()]
            return (
                f"{other} is stored otherwise than {names[0]} ({', '.join(texts)}); servers such as vLLM compute "
                "linears with the same input as one, and refuse a checkpoint in which these differ"
            )
    return None


def _check_split(parts: int, form: OpenModel, format_: Format, schemes: Mapping[str, LayerScheme]) -> None:
    where = f"save: tensor_parallel: {parts}"
    reason = format_.unsplit()
    if reason is not None:
        raise TargetError(f"{where}: {reason}; write tensor_parallel: 1")
    split = {name: _Split(name, scheme.shape, format_.units(scheme), form) for name, scheme in schemes.items()}
    for one in split.values():
        reason = one.reason(parts)
        if reason is not None:
            able = [n for n in range(1, MOST + 1) if not any(other.reason(n) for other in split.values())]
            raise TargetError(
                f"{where}: {one.name}: {reason}; these numbers work for all layers: {', '.join(map(str, able))}; or "
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
        """Why it cannot be split into so many parts; None if it can."""
        if self.heads is not None and self.heads % parts:
            return f"{self.heads} attention heads do not split over {parts} devices"
        if self.shared is not None and self.shared % parts and parts % self.shared:
            return f"{self.shared} heads of keys and values do not split over {parts} devices"
        for way, what, size, unit in zip(
            ("rows", "columns"), ("outputs", "inputs"), self.shape, self.units, strict=True
        ):
            count = parts if self.shared is None or way == "columns" else min(parts, self.shared)
            if way in self.ways and size % (count * unit):
                of = "" if unit == 1 else f" of whole groups or words of {unit}"
                return f"{size} {what} do not split into {count} equal parts{of}"
        return None


def _ways(name: str, plan: Mapping[str, str]) -> set[str]:
    """Whether a linear is split by rows or by columns, by the plan of its model; both if it has none."""
    if not plan:
        return {"rows", "columns"}
    found = next((way for pattern, way in plan.items() if fnmatchcase(name, f"*{pattern}")), "")
    return {"rows"} if "colwise" in found else {"columns"} if "rowwise" in found else set()
