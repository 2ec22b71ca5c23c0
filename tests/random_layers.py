"""Descriptions of layers drawn at random, and tensors for them: mostly of the form that a layer has, but not always."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from compress.layers.base import read_scheme
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.bits import pack
from compress.numerics.quant.grids import GRIDS

SIZES = (1, 2, 3, 7, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 256)
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
HADAMARD = (1, 2, 3, 4, 8, 12, 16, 20, 32, 2**40)


class RandomLayer:
    """The parts of a layer as JSON, one method per kind; a method is called by the name of its kind."""

    def __init__(self, chance: random.Random, shape: tuple[int, int] | None = None) -> None:
        self.chance = chance
        self.shape = shape or (chance.choice(SIZES), chance.choice(SIZES))

    def scheme(self) -> dict[str, Any]:
        """The description of a layer."""
        kinds = ("codes", "codes", "codes", "sparse", "codebook", "lattice", "low_rank", "outliers", "pairs", "trellis")
        parts = [self.component(self.chance.choice((*kinds, "dense"))) for _ in range(self.chance.choice((1, 1, 2, 3)))]
        inputs = ("hadamard", "permutation", "reassembly", "rounding", "rounding", "scale")
        transforms = [self.component(self.chance.choice(inputs)) for _ in range(self.chance.choice((0, 0, 1, 1, 2)))]
        role = {"role": self.chance.choice(("linear", "embedding", "tied"))} if self.chance.random() < 0.1 else {}
        return {"shape": list(self.shape), "parts": parts, "transforms": transforms, **role}

    def component(self, kind: str) -> dict[str, Any]:
        """A part or a transform of a kind; it is drawn again if the layer cannot have it, but not always."""
        for _ in range(self.chance.choice((1, 20, 20, 20))):
            values = {"kind": kind, **getattr(self, kind)()}
            with suppress(ValueError):
                if read_scheme(values).refuses(self.shape) is None:
                    break
        return values

    def some(self, **options: tuple[Any, ...]) -> dict[str, Any]:
        """Some of the options, each with one of its values."""
        return {name: self.chance.choice(values) for name, values in options.items() if self.chance.random() < 0.3}

    def codes(self) -> dict[str, Any]:
        name = self.chance.choice(sorted(GRIDS))
        grid, width = GRIDS[name], self.shape[1]
        group = self.chance.choice((grid.group_size or width, width, "channel", "tensor", *SIZES))
        symmetric = {"symmetric": False} if grid.offset else {}
        options = self.some(symmetric=(True, False), indexed=(True,), float_zeros=(True,), rows=(1, 2, 16, 128))
        return {"grid": name, "group_size": group, **symmetric, **options}

    def dense(self) -> dict[str, Any]:
        return self.some(dtype=("float16", "bfloat16", "float32"))

    def codebook(self) -> dict[str, Any]:
        options = self.some(length=(1, 2, 3, 8, 16, 64), count=(1, 2, 3), per=("tensor", "channel"), scaled=(True,))
        return {"bits": self.chance.randint(1, 9), **options}

    def lattice(self) -> dict[str, Any]:
        return {"bits": self.chance.choice((1, 2, 3, 4, 8)), **self.some(rotated=HADAMARD)}

    def low_rank(self) -> dict[str, Any]:
        rank, shape = self.chance.choice((1, 2, 3, 16, 64)), self.shape
        factors = {}
        for key, size in (("a", (rank, shape[1])), ("b", (shape[0], rank))):
            self.shape = size
            kind = self.chance.choice(("dense", "dense", "codes", "codes", "pairs", "codebook", "sparse", "outliers"))
            factors[key] = self.component(kind)
        self.shape = shape
        return {"rank": rank, **factors}

    def outliers(self) -> dict[str, Any]:
        counts = (1, 2, 5, self.shape[1], math.prod(self.shape) // 2, 2**40)
        return {"count": self.chance.choice(counts), **self.some(by=("column", "position"), dtype=("float16",))}

    def pairs(self) -> dict[str, Any]:
        return {"group_size": self.chance.choice(("channel", "tensor", 1, 2, 8, 16, 32, 33, self.shape[1]))}

    def sparse(self) -> dict[str, Any]:
        (rows, width), n, m = self.shape, *self.chance.choice(((1, 2), (2, 4), (3, 4), (5, 8), (255, 256)))
        inner = self.component(self.chance.choice(("dense", "codes")))
        if self.chance.random() < 0.5:
            return {"pattern": "bitmask", "kept": self.chance.randint(0, rows * width), "values": inner}
        return {"pattern": f"{n}:{m}", "kept": rows * (width // m * n + width % m), "values": inner}

    def trellis(self) -> dict[str, Any]:
        options = self.some(tile_rows=(1, 2, 3, 8, 64), tile_columns=(1, 2, 3, 8, 64), rotated=HADAMARD)
        bits, states = self.chance.choice((1, 1.5, 2, 3, 3.5, 4, 5)), self.chance.choice((2, 4, 7, 8, 12, 16, 17))
        return {"bits": bits, "states": states, "code": self.chance.choice(("1mad", "3inst", "hyb")), **options}

    def hadamard(self) -> dict[str, Any]:
        return {"block": self.chance.choice(HADAMARD)}

    def permutation(self) -> dict[str, Any]:
        return {}

    def reassembly(self) -> dict[str, Any]:
        return {}

    def scale(self) -> dict[str, Any]:
        return {}

    def rounding(self) -> dict[str, Any]:
        grids = ("int8", "int8", "int4", "fp8_e4m3", self.chance.choice(sorted(GRIDS)))
        sizes = {"group": SIZES, "groups": SIZES, "clip": (0.5, 1.0), "threshold": (0.5, 6.0)}
        options = self.some(scale=("token", "group", "static"), columns=(True,), symmetric=(False,), **sizes)
        return {"grid": self.chance.choice(grids), **options}


def random_tensors(scheme: LayerScheme, chance: random.Random) -> dict[str, Tensor]:
    """Tensors of the shapes and dtypes that a scheme states; their numbers are mostly those that a layer can have."""
    draw = torch.Generator().manual_seed(chance.randrange(2**31))
    storage, tensors = chance.choice(DTYPES), {}
    for name, spec in scheme.tensors().items():
        dtype = spec.dtype or (storage if chance.random() < 0.95 else chance.choice(DTYPES))
        if dtype.is_floating_point:
            tensors[name] = (torch.rand(spec.shape, generator=draw) + 0.1).to(dtype)
        elif dtype is torch.bool:
            tensors[name] = torch.rand(spec.shape, generator=draw) < 0.2
        else:
            info = torch.iinfo(dtype)
            drawn = torch.randint(info.min, info.max + 1, spec.shape, generator=draw).to(dtype)
            plausible = _plausible(name, scheme, drawn, draw)
            tensors[name] = drawn if plausible is None or chance.random() < 0.03 else plausible.to(dtype)
    return tensors


def _plausible(name: str, scheme: LayerScheme, drawn: Tensor, draw: torch.Generator) -> Tensor | None:
    """Numbers that a tensor of integers can have; None for tensors of codes, which can have all."""
    count, (rows, width) = drawn.numel(), scheme.shape
    sparse = scheme.parts[0].to_json()
    if name.endswith("signs"):
        return drawn.sign() + (drawn == 0)
    if name.endswith("g_idx"):
        groups = {key: spec.shape for key, spec in scheme.tensors().items()}.get(name.replace("g_idx", "scale"))
        index = torch.arange(count) // max(1, -(-count // (groups[-1] if groups else 1)))
        return index[torch.randperm(count, generator=draw)]
    if name.endswith(("permutation", "first", "second")):
        return torch.randperm(count, generator=draw)
    if name.endswith("rows"):  # of as many positions as possible in every row
        total = next(s.shape[0] for key, s in scheme.tensors().items() if key == name.replace("rows", "columns"))
        return (torch.arange(rows + 1) * width).clamp(max=total)
    if name.endswith("columns"):
        return torch.arange(count) % width
    if name.endswith("kept") and sparse["kind"] == "sparse":
        if sparse["pattern"] == "bitmask":
            order = torch.randperm(rows * width, generator=draw)
            return pack((order < sparse["kept"]).view(rows, width).to(torch.uint8), 1)
        n, m = map(int, sparse["pattern"].split(":"))
        return None if m > width else pack(torch.arange(n).repeat(rows, width // m), (m - 1).bit_length())
    if name.endswith("scale"):
        return drawn.clamp(0, 100)
    return drawn.clamp(-2, 1) if name.endswith("zero_point") else None
