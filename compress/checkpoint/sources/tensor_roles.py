"""Which stored tensors are the weights of linears, from names and shapes alone, for models without a class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compress.checkpoint.containers.safetensors import Header
from compress.numerics.dtypes import DTYPES, SAFETENSORS

WEIGHT = ".weight"
ROLES = {
    "LM head": r"lm_head|embed_out",
    "embedding": r"\w*embed\w*|wte|wpe|\w*position\w*|\w*_bias",
    "norm": r"\w*norm\w*|ln_\w+",
    "router or gate": r"gate|\w*router\w*|\w*expert_gate",
}
"""Roles of modules that stay dense, by a pattern of the last or the second last part of their names."""
VOCABULARY = "vocab_size"
"""The entry of a configuration, or of one inside of it, with the rows of an embedding and of an LM head."""
STACK = "a stack of matrices, such as experts"


@dataclass(frozen=True)
class TensorRoles:
    """The stored tensors of a folder by their roles.

    Attributes:
        linears: (out, in) of the weights of linears, by the names of the modules.
        dtypes: dtypes of these weights.
        unchanged: the role of each other tensor that holds weights in matrices, by its name.
        transposed: modules whose weight is [in, out], as the length of their bias shows.
    """

    linears: dict[str, tuple[int, int]] = field(default_factory=dict)
    dtypes: dict[str, Any] = field(default_factory=dict)
    unchanged: dict[str, str] = field(default_factory=dict)
    transposed: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, headers: Mapping[str, Header], config: Mapping[str, Any]) -> TensorRoles:
        """Find the roles of stored tensors.

        Args:
            headers: dtype and shape of each tensor by name.
            config: the content of config.json.
        """
        roles, vocabularies = cls(), set(_vocabularies(config))
        for name, header in headers.items():
            if len(header.shape) < 2 or not header.floating:
                continue
            role = _role(name, header, vocabularies)
            if role is not None:
                roles.unchanged[name] = role
                continue
            module, (rows, width) = name.removesuffix(WEIGHT), header.shape
            roles.linears[module], roles.dtypes[module] = (rows, width), SAFETENSORS[header.dtype]
            bias = headers.get(f"{module}.bias")
            if bias is not None and rows != width and bias.shape == (width,):
                roles.transposed.append(module)
        return roles


def _role(name: str, header: Header, vocabularies: set[int]) -> str | None:
    """Return why a tensor is not the weight of a linear that is quantized; None if it is."""
    if len(header.shape) > 2:
        return STACK if len(header.shape) == 3 and min(header.shape[1:]) > 1 else "no matrix"
    module = name.removesuffix(WEIGHT)
    if module == name or not module:
        return "no weight of a linear"
    if SAFETENSORS.get(header.dtype) not in DTYPES.values():
        return f"{header.dtype} numbers"
    parts = module.split(".")[-2:]
    for role, pattern in ROLES.items():
        if any(re.fullmatch(pattern, part) for part in parts):
            return role
    if vocabularies.intersection(header.shape[:1]):
        return "LM head"
    return "one row or column" if 1 in header.shape else None


def _vocabularies(config: Mapping[str, Any]) -> list[int]:
    """Return the sizes of the vocabularies that a configuration states, those of inner configurations included."""
    own = [config[VOCABULARY]] if isinstance(config.get(VOCABULARY), int) else []
    inner = [size for value in config.values() if isinstance(value, Mapping) for size in _vocabularies(value)]
    return own + inner
