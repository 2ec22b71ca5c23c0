"""The linears of a block that read the same tensor, found without weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from compress.blockwise.capture import Call, ModelShell
from compress.checkpoint.opened import OpenModel
from compress.errors import CannotRun, call_foreign
from compress.layers.linear import linears
from compress.models.structure.links import Group, find_groups

InputGroups = Mapping[frozenset[str], Sequence[Group]]
"""The groups of each kind of block; a kind is the set of the names of its linears, inside of the block."""


def input_groups(opened: OpenModel) -> InputGroups:
    """Find the linears that read the same tensor.

    Blocks run on tensors without data. A block that cannot run so has no groups.

    Args:
        opened: A model with the weights outside of its blocks, which passes over the model have not changed. Such
            passes change widths, weights and the number of blocks, but not which linears of a block read one tensor.
    """
    shell, captured = ModelShell(opened), None
    ids = shell.check()
    groups: dict[frozenset[str], Sequence[Group]] = {}
    for block in opened.blocks:
        if captured is None or block.index not in captured.calls:
            captured = shell.sketch(ids, block.stack, None if captured is None else captured.hidden)
        call, hidden = captured.calls[block.index], captured.hidden
        kind = frozenset(linears(block.module))
        if kind not in groups:
            groups[kind] = []
            with suppress(CannotRun), torch.no_grad():
                empty = copy.deepcopy(block.module).to("meta")
                args: Any = send_to_device(call.args, "meta")
                kwargs: Any = send_to_device(call.kwargs, "meta")
                meta_call = Call(args, kwargs, call.keyword)
                groups[kind] = find_groups(empty, partial(_on_meta, meta_call, hidden))
    return groups


def _on_meta(call: Call, hidden: Tensor, module: nn.Module) -> Tensor:
    return call_foreign(call.run, module, hidden.to("meta"))
