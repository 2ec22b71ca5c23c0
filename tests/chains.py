"""Random chains of passes with random options, for models of width 32: what a user might write."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from family_matrix import CHAINS
from hypothesis import strategies as st

from compress import PASSES
from compress.checkpoint.formats import FORMATS
from compress.errors import CompressError
from compress.numerics.quant.grids import GRIDS
from compress.numerics.sparse.masks import Pattern
from compress.passes.families.allocation import Allocation
from compress.passes.families.bits import Bits
from compress.recipe.schema import read_passes

TARGETS = ["*", "*.0.*", "re:.*(mlp|fc|ff|dense).*", "re:.*[qo]_.*", "lm_head", "embed_tokens"]
"""Patterns of linears; a pattern that matches nothing is refused."""

SAMPLES: dict[str, st.SearchStrategy[Any]] = {
    "weights": st.sampled_from(["int2", "int3", "int4", "int8", *GRIDS]),
    "group_size": st.sampled_from([8, 16, 16, 16, 20, 32, "channel", "tensor"]),
    "fallback": st.sampled_from(["int8", "nf4"]),
    "targets": st.lists(st.sampled_from(TARGETS), min_size=1, max_size=2, unique=True),
    "ignore": st.lists(st.sampled_from(TARGETS[1:]), min_size=1, max_size=1),
    "online": st.just(["*.down_proj"]),
    "overrides": st.dictionaries(
        st.sampled_from(TARGETS[1:]),
        st.sampled_from([{"weights": "none"}, {"weights": "int8"}, {"weights": "nf4"}, {"group_size": 8}]),
        min_size=1,
        max_size=1,
    ),
    "steps": st.just(1),
    "epochs": st.just(1.0),
    "iterations": st.just(2),
    "layer_map": st.just([[1, 1]]),
    "teacher": st.nothing(),
}
"""Values of options by name; all others are drawn by their type and limits."""

BY_CLASS: dict[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    str: st.nothing(),
    Pattern: st.sampled_from(["row", "layer", "2:4", "4:8", "4x1", "1x4"]),
    Allocation: st.sampled_from(["uniform", "global", "owl", "sensitivity"]),
    Bits: st.sampled_from([{"bits": 4}, {"bits": 6}]),
}


def _within(values: list[Any], metadata: list[Any]) -> list[Any]:
    """The values that the limits of a field allow."""
    limits = {
        name: getattr(item, name) for item in metadata for name in ("gt", "ge", "lt", "le") if hasattr(item, name)
    }
    low, high = limits.get("ge", limits.get("gt")), limits.get("le", limits.get("lt"))
    values = [*values, *(type(values[0])(limit) for limit in (low, high) if limit is not None)]
    return [
        value
        for value in values
        if (low is None or value > low or ("ge" in limits and value == low))
        and (high is None or value < high or ("le" in limits and value == high))
    ]


def _of_type(kind: Any, metadata: list[Any]) -> st.SearchStrategy[Any]:
    """Values of a type within limits."""
    if kind in BY_CLASS:
        return BY_CLASS[kind]
    if kind is int:
        return st.sampled_from(_within([1, 2, 3, 8, 16], metadata))
    if kind is float:
        return st.sampled_from(_within([0.01, 0.25, 0.5, 0.9], metadata))
    if kind is NoneType:
        return st.none()
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, UnionType):
        return st.one_of([_of_type(item, metadata) for item in inner])
    if origin is tuple and get_origin(inner[0]) is Literal:
        return st.lists(_of_type(inner[0], []), min_size=1, max_size=3, unique=True)
    return st.nothing()


def _options(key: str) -> dict[str, st.SearchStrategy[Any]]:
    fields = PASSES[key].model_fields
    drawn = {
        name: SAMPLES[name] if name in SAMPLES else _of_type(field.annotation, field.metadata)
        for name, field in fields.items()
    }
    return {name: values for name, values in drawn.items() if not values.is_empty}


OPTIONS = {key: _options(key) for key in PASSES}


def _is_valid(step: dict[str, Any]) -> bool:
    try:
        read_passes([step])
    except CompressError:
        return False
    return True


@st.composite
def _varied(draw: st.DrawFn, key: str, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A pass with up to three options other than these."""
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS[key])), max_size=3, unique=True))
    return {key: options | {name: draw(OPTIONS[key][name]) for name in names}}


@st.composite
def chains(draw: st.DrawFn) -> list[dict[str, dict[str, Any]]]:
    """The passes of one or two chains of the matrix of families, with other options, as YAML spells them."""
    keys = draw(st.lists(st.sampled_from(sorted(CHAINS)), min_size=1, max_size=2, unique=True))
    steps = [item for key in keys for step in CHAINS[key] for item in step.items()]
    return [draw(_varied(key, options).filter(_is_valid)) for key, options in steps]


@st.composite
def saves(draw: st.DrawFn) -> dict[str, Any]:
    """The options of the checkpoint; most chains need format native."""
    return {
        "format": draw(st.sampled_from(["native"] * 6 + sorted(FORMATS))),
        "verify": draw(st.sampled_from(["own", "full"])),
        "dtype": draw(st.sampled_from(["auto", "auto", "float32", "bfloat16", "float16"])),
        "sparse": draw(st.sampled_from(["auto", "off", "always"])),
    }
