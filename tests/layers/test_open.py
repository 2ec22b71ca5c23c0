"""A kind of part, a kind of transform and a pass that the package has never seen work everywhere."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from tolerances import LOGITS
from torch import nn

import compress
from compress import LKD, RTN, Distill
from compress.checkpoint.formats import FORMATS
from compress.errors import TargetError
from compress.kernels import dispatch
from compress.layers.base import InputTransform, PartScheme, TensorSpec, TransformScheme, WeightPart, stored_name
from compress.layers.linear import CompressedLinear
from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.layers.parts.dense import DensePart
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.permutation import PermutationScheme
from compress.layers.transforms.scale import ScaleScheme
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.layers import Solution
from compress.passes.contract.observers import Nothing
from compress.passes.contract.passes import LayerPass

UP = "model.layers.1.mlp.up_proj"


@dataclass(frozen=True)
class OuterScheme(PartScheme):
    """u v^T."""

    kind: ClassVar[str] = "outer"

    def tensors(self, shape, lattice=None):
        return {"u": TensorSpec((shape[0],)), "v": TensorSpec((shape[1],))}


class OuterPart(WeightPart):
    """u v^T, of rank one."""

    kind: ClassVar[str] = "outer"
    names: ClassVar[Mapping[str, str]] = {"u": "u", "v": "v"}

    @classmethod
    def of(cls, u, v):
        return cls(OuterScheme(), (len(u), len(v)), {"u": u, "v": v})

    @property
    def dtype(self):
        return self.u.dtype

    def dense(self, dtype):
        return torch.outer(self.u.to(dtype), self.v.to(dtype))

    def in_storage(self, dtype):
        return OuterPart.of(self.u.to(dtype), self.v.to(dtype))

    def round_to(self, dtype):
        self.u.data, self.v.data = self.u.to(dtype).to(self.u.dtype), self.v.to(dtype).to(self.v.dtype)


@dataclass(frozen=True)
class FlipScheme(TransformScheme):
    """A sign per channel."""

    kind: ClassVar[str] = "flip"
    effect: ClassVar[str] = "the signs of its inputs are flipped"

    def tensors(self, shape):
        return {"signs": TensorSpec((shape[1],), torch.int8)}


class Flip(InputTransform):
    """x * signs."""

    kind: ClassVar[str] = "flip"
    names: ClassVar[Mapping[str, str]] = {"signs": "signs"}
    rank: ClassVar[int] = 2

    @classmethod
    def of(cls, signs, shape):
        return cls(FlipScheme(), shape, {"signs": signs.to(torch.int8)})

    def forward(self, x):
        return x * self.signs

    def absorbed(self, weight):
        return weight * self.signs

    def permuted(self, order):
        return Flip.of(self.signs[order], self.shape)

    def validate(self, prefix):
        if not bool((self.signs.abs() == 1).all()):
            raise ValueError(f"{stored_name(prefix, 'signs')} holds other numbers than 1 and -1")


class Residual(LayerPass):
    """int4 of what a matrix of rank one leaves, for flipped inputs."""

    paper: ClassVar[str] = ""
    observes: ClassVar = Nothing

    makes: ClassVar = frozenset({"quantized"})

    def effects(self, layer):
        scheme = layer.with_parts(CodesScheme(GRIDS["int4"], 32), OuterScheme())
        return replace(super().effects(layer), scheme=scheme.with_transform(FlipScheme()))

    def solve(self, weight, seen, layer):
        signs = (weight.sum(0) >= 0).float() * 2 - 1
        u, s, v = torch.linalg.svd(weight * signs, full_matrices=False)
        outer = OuterPart.of(u[:, 0] * s[0], v[0]).in_storage(layer.storage)
        rest = weight * signs - outer.dense(torch.float32)
        codes = CodesPart.of(quantize(rest, GRIDS["int4"], 32, dtype=layer.storage))
        return Solution([codes, outer], transforms=(Flip.of(signs, weight.shape),))


class Correct(LayerPass):
    """One more matrix of rank one, added to whatever the weight is."""

    paper: ClassVar[str] = ""
    observes: ClassVar = Nothing

    def effects(self, layer):
        return replace(super().effects(layer), scheme=layer.with_parts(*layer.parts, OuterScheme()))

    def solve(self, weight, seen, layer):
        rows, width = weight.shape
        return Solution(added=(OuterPart.of(torch.full((rows,), 0.01), torch.linspace(-0.1, 0.1, width)),))


def stored(folder):
    """All tensors of a checkpoint."""
    return {name: t for path in Path(folder).glob("*.safetensors") for name, t in load_file(path).items()}


def size_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.parametrize(
    ("steps", "dtype"),
    [
        ([Residual()], "float32"),
        ([Residual(), Correct()], "bfloat16"),
        ([RTN(group_size=32), Correct()], "float32"),
        ([Correct(targets="*.mlp.*")], "bfloat16"),
    ],
    ids=["parts", "added", "to codes", "to a dense weight"],
)
def test_a_run_solves_plans_stores_verifies_and_loads_it(steps, dtype, recipe, tmp_path):
    asked = recipe(*steps, save={"format": "native", "dtype": dtype})
    planned = compress.plan(asked)
    report = compress.run(asked, tmp_path).report
    assert report["verified"]["own"] <= LOGITS and report["verified"]["layers"] == len(steps[-1:]) * sum(
        bool(layer.passes) for layer in planned.layers
    )
    tensors = stored(tmp_path)
    assert size_of(tensors) == planned.checkpoint_bytes == report["size"]["tensor_bytes"]
    layer = compress.load(tmp_path, dtype="float32")[0].get_submodule(UP)
    [scheme] = [found.scheme for found in planned.layers if found.name == UP]
    assert isinstance(layer, CompressedLinear) and layer.scheme == scheme
    described = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["layers"][UP]
    assert LayerScheme.from_json(described) == scheme
    assert {n.removeprefix(UP + ".") for n in tensors if n.startswith(UP + ".")} == set(scheme.tensors())
    x = torch.randn(3, layer.shape[1])
    weight = sum(part.dense(torch.float32) for part in layer.all_parts)
    flip = layer.transform_of(Flip)
    inside = x if flip is None else x * flip.signs
    torch.testing.assert_close(layer(x), nn.functional.linear(inside, weight), rtol=1e-4, atol=1e-5)


def test_it_approximates_the_weight_that_it_replaces(pico_model):
    before = pico_model.get_submodule(UP).weight.detach().clone()
    layer = compress.apply(pico_model, [Residual()]).get_submodule(UP)
    assert layer.scheme.text == "int4, group 32 + outer"
    effective = layer.transform_of(Flip).absorbed(layer.weight)
    assert float((effective - before).norm() / before.norm()) < 0.15


def test_a_run_that_was_stopped_ends_with_the_same_bytes(recipe, tmp_path, stop):
    asked = recipe(Residual(), save={"format": "native"})
    whole = compress.run(asked, tmp_path / "whole").report
    stop(asked, tmp_path / "stopped")
    assert compress.run(asked, tmp_path / "stopped").report["checkpoint_sha256"] == whole["checkpoint_sha256"]


@pytest.mark.parametrize("step", [LKD(train=["scales"], steps=4), Distill(steps=2)], ids=["lkd", "distill"])
def test_scales_of_its_codes_are_trained_and_the_rest_stays(step, recipe, tmp_path):
    compress.run(recipe(Residual(), save={"format": "native"}), tmp_path / "before")
    steps = [Residual(), step]
    report = compress.run(recipe(*steps, save={"format": "native"}), tmp_path / "after").report
    assert report["verified"]["own"] <= LOGITS
    before, after = stored(tmp_path / "before"), stored(tmp_path / "after")
    assert before.keys() == after.keys()
    moved = {name.rpartition(".")[2] for name, t in before.items() if UP in name and not torch.equal(t, after[name])}
    assert moved == {"weight_scale"}


def test_a_kernel_may_know_it(monkeypatch):
    class Outer:
        prepared = 0

        def supports(self, part, x, rounding):
            return part.kind == "outer"

        def prepare(self, part):
            self.prepared += 1
            return part.u[:, None], part.v[:, None]

        def product(self, x, part, prepared, rounding, bias):
            u, v = prepared
            y = (x @ v) @ u.T
            return y if bias is None else y + bias

    layer = CompressedLinear(torch.randn(6, 8), torch.randn(6))
    layer.put([*layer.all_parts, OuterPart.of(torch.randn(6), torch.randn(8))])
    x, kernel = torch.randn(3, 8), Outer()
    wanted = layer(x)
    monkeypatch.setattr(dispatch, "KERNELS", [kernel])
    for _ in range(3):
        torch.testing.assert_close(layer(x), wanted)
    assert kernel.prepared == 1


def test_formats_of_other_programs_refuse_it_before_the_work(recipe):
    with pytest.raises(TargetError, match=r"residual: model\.layers\.0\..*: the signs of its inputs are flipped"):
        compress.plan(recipe(Residual()))
    with pytest.raises(TargetError, match="holds only codes, not int4, group 64 \\+ outer; use format: native"):
        compress.plan(recipe(RTN(), Correct()))


class Flipped(LayerPass):
    """Flipped inputs, and a weight that makes up for it."""

    paper: ClassVar[str] = ""
    observes: ClassVar = Nothing

    def effects(self, layer):
        return replace(super().effects(layer), scheme=layer.with_transform(FlipScheme()))

    def solve(self, weight, seen, layer):
        signs = torch.ones(weight.shape[1])
        signs[::3] = -1
        return Solution(weight * signs, transforms=(Flip.of(signs, weight.shape),))


@pytest.mark.parametrize("steps", [[Residual()], [Correct()], [Flipped()]], ids=["codes", "floats", "transform"])
def test_format_dense_multiplies_it_out(steps, recipe, tmp_path):
    asked = recipe(*steps, save={"format": "dense"})
    report = compress.run(asked, tmp_path).report
    assert report["verified"]["transformers"] <= 1e-3
    assert size_of(stored(tmp_path)) == compress.plan(asked).checkpoint_bytes
    if isinstance(steps[0], Flipped):
        before = stored(asked.model)
        assert all(torch.equal(t, before[name]) for name, t in stored(tmp_path).items())


def test_a_transform_is_folded_into_a_dense_weight_and_stored_with_several_parts(recipe, tmp_path):
    asked = recipe(Flipped(), save={"format": "native"})
    assert compress.run(asked, tmp_path / "folded").report["verified"]["own"] <= LOGITS
    assert size_of(stored(tmp_path / "folded")) == compress.plan(asked).checkpoint_bytes
    before = stored(asked.model)
    assert all(torch.equal(t, before[name]) for name, t in stored(tmp_path / "folded").items())

    asked = recipe(Flipped(), Correct(), save={"format": "native"})
    assert compress.run(asked, tmp_path / "parts").report["verified"]["own"] <= LOGITS
    assert size_of(stored(tmp_path / "parts")) == compress.plan(asked).checkpoint_bytes
    assert compress.load(tmp_path / "parts")[0].get_submodule(UP).scheme.transforms == (FlipScheme(),)


def test_a_transform_that_moves_zeros_stays_where_kept_weights_are_stored_alone():
    scheme = LayerScheme((3, 4), transforms=(PermutationScheme(), ScaleScheme(), FlipScheme()))
    assert scheme.folded(keep_zeros=False).transforms == ()
    assert scheme.folded(keep_zeros=True).transforms == scheme.transforms  # flips are not stated to keep zeros
    assert replace(scheme, transforms=scheme.transforms[:2]).folded(keep_zeros=True).transforms == (
        PermutationScheme(),
    )
    rounded = replace(scheme, parts=(CodesScheme(GRIDS["int4"], 4),))
    assert rounded.folded(keep_zeros=False) == rounded


def test_damage_is_named():
    parts, flip = [OuterPart.of(torch.ones(3), torch.ones(4))], Flip.of(torch.ones(4), (3, 4))
    scheme = LayerScheme((3, 4), (OuterScheme(),), (FlipScheme(),))
    tensors = FORMATS["native"].encode(scheme, parts, [flip])
    assert set(tensors) == {"weight_u", "weight_v", "input_signs"}
    with pytest.raises(ValueError, match="input_signs holds other numbers"):
        FORMATS["native"].read({**tensors, "input_signs": tensors["input_signs"] * 2}, scheme)
    with pytest.raises(KeyError, match="weight_v"):
        FORMATS["native"].decode({n: t for n, t in tensors.items() if n != "weight_v"}, scheme)


# ---- two parts of kinds that are known ----


def test_a_layer_of_codes_and_floats():
    bias, dense = torch.randn(6), DensePart.of(torch.randn(6, 64))
    codes = CodesPart.of(quantize(torch.randn(6, 64), GRIDS["int4"], 16))
    layer = CompressedLinear([codes, dense], bias)
    weight = codes.dense(torch.float32) + dense.weight
    assert torch.equal(layer.weight, weight)
    assert layer.weight_as(torch.bfloat16).dtype == torch.bfloat16
    x = torch.randn(2, 3, 64)
    wanted = codes.product(x) + dense.product(x) + bias  # once
    torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)
    assert layer.quantized and layer.codes is None and layer.scheme.prefixes == ("weight", "dense")
    tensors = FORMATS["native"].encode(layer.scheme, layer.all_parts, [])
    read = CompressedLinear(torch.zeros(6, 64), bias)
    read.read(*FORMATS["native"].decode(tensors, layer.scheme))
    assert torch.equal(read(x), layer(x)) and read.sha256() == layer.sha256()


class Halves(Residual):
    """int4, and what it leaves in floats."""

    def effects(self, layer):
        scheme = layer.with_parts(CodesScheme(GRIDS["int4"], 32), *LayerScheme(layer.shape).parts)
        return replace(super().effects(layer), scheme=scheme)

    def solve(self, weight, seen, layer):
        codes = CodesPart.of(quantize(weight, GRIDS["int4"], 32, dtype=layer.storage))
        return Solution([codes, DensePart.of(weight - codes.dense(torch.float32))])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_and_floats_survive_a_stop(dtype, recipe, tmp_path, stop):
    asked = recipe(Halves(), save={"format": "native", "dtype": dtype})
    whole = compress.run(asked, tmp_path / "whole").report
    assert whole["verified"]["own"] <= LOGITS
    assert size_of(stored(tmp_path / "whole")) == compress.plan(asked).checkpoint_bytes
    stop(asked, tmp_path / "stopped")
    assert compress.run(asked, tmp_path / "stopped").report["checkpoint_sha256"] == whole["checkpoint_sha256"]
