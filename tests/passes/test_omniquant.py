"""OmniQuant: less error than rounding alone, folds that are proved, and channels with outliers that it scales down."""

import copy

import pytest
import torch
from draws import random
from gated import Gated, Inputs
from torch import nn

import compress
from compress import RTN, OmniQuant, Wanda
from compress.layers.linear import CompressedLinear
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.journal import Journal
from compress.passes.contract.layers import Layer
from compress.passes.contract.observers import UnitGram
from compress.passes.contract.options import OptionError
from compress.passes.quantize.omniquant import Transformation

FIRST = "model.layers.0.*"
INT3 = {"weights": "int3", "group_size": 32, "targets": FIRST}
WIDTH = 24


@pytest.fixture(scope="module")
def ids(pico_ids):
    return pico_ids[:, :48]


def applied(model, steps, ids, journal=None):
    return compress.apply(copy.deepcopy(model), steps, calibration=ids, batch=2, journal=journal or Journal())


def distance(model, original, ids):
    with torch.no_grad():
        found, wanted = (m(input_ids=ids, output_hidden_states=True).hidden_states[1] for m in (model, original))
    return float((found - wanted).norm() / wanted.norm())


def layers_of(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, CompressedLinear)}


@pytest.mark.parametrize(
    "options",
    [{}, {"scale": "mse"}, {"symmetric": False}, {"transform": True}, {"activations": "int4"}, {"error": "symmetric"}],
)
def test_the_block_is_nearer_than_by_rounding_alone(options, pico_model, ids):
    options = {"scale": "absmax", **options}
    rounding = {name: value for name, value in options.items() if name in ("scale", "symmetric", "activations")}
    learned = applied(pico_model, [OmniQuant(epochs=8, learning_rate=0.1, hold_out=0, **INT3, **options)], ids)
    rounded = applied(pico_model, [RTN(**INT3, **rounding)], ids)
    assert distance(learned, pico_model, ids) < 0.93 * distance(rounded, pico_model, ids)


def test_the_result_is_a_stock_model(pico_model, ids):
    learned = applied(pico_model, [OmniQuant(epochs=3, activations="int4", learning_rate=0.05, **INT3)], ids)
    layers = layers_of(learned)
    assert len(layers) == 7
    assert all(len(layer.all_transforms) == 1 and layer.rounding is not None for layer in layers.values())
    name = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(learned.get_parameter(name), pico_model.get_parameter(name))  # scales are in the norms


def test_weights_alone_are_clipped_only(pico_model, ids):
    learned = applied(pico_model, [OmniQuant(epochs=1, **INT3)], ids)
    name = "model.layers.0.input_layernorm.weight"
    assert torch.equal(learned.get_parameter(name), pico_model.get_parameter(name))


@pytest.mark.parametrize("options", [{}, {"activations": "int8"}])
def test_the_same_run_gives_the_same_codes(options, pico_model, ids):
    step = OmniQuant(epochs=2, **INT3, **options)
    first, second = (applied(pico_model, [step], ids).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_where_nothing_is_gained_weights_are_rounded_without_it(pico_model, ids):
    journal = Journal()
    wild = OmniQuant(
        weights="int8",
        group_size=32,
        learning_rate=90.0,
        transform_rate=9.0,
        epochs=1,
        hold_out=0,
        transform=True,
        targets=FIRST,
    )
    learned = applied(pico_model, [wild], ids, journal)
    fallbacks = [entry for entry in journal.entries if entry.kind == "fallback" and "without it" in entry.message]
    assert fallbacks  # the start of SmoothQuant loses with weights alone, and wild steps do not mend it
    for name, parameter in pico_model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, learned.get_parameter(name))


def test_what_was_pruned_stays_pruned(pico_model, ids):
    steps = [Wanda(sparsity=0.5, targets=FIRST), OmniQuant(symmetric=False, transform=True, epochs=1, **INT3)]
    for layer in layers_of(applied(pico_model, steps, ids)).values():
        assert layer.mask is not None and (layer.weight[~layer.mask] == 0).all()


def test_layers_may_differ(pico_model, ids):
    step = OmniQuant(epochs=1, activations="int8", overrides={"*.down_proj": {"weights": "int8"}}, **INT3)
    layers = layers_of(applied(pico_model, [step], ids))
    assert {m.codes.grid.name for n, m in layers.items() if n.endswith("down_proj")} == {"int8"}
    assert {m.codes.grid.name for n, m in layers.items() if n.endswith("up_proj")} == {"int3"}


def test_an_expert_without_tokens_in_a_batch_is_no_obstacle(tiny):
    ids = torch.tensor([[3] * 16, [5] * 16, [7] * 16])  # each batch reaches two of four experts
    step = OmniQuant(weights="int3", group_size=16, epochs=2, transform=True)
    model = compress.apply(tiny("mixtral"), [step], ids, batch=1)
    assert all(layer.codes is not None for layer in layers_of(model).values())


class Sweep(Inputs):
    """BlockInputs with what a pass that learns needs; what it puts is kept in `found`."""

    storage = torch.float32
    label = name = "block"

    def __init__(self, block, batches, names):
        super().__init__(block, batches, names)
        self.rows, self.batches, self.found = batches, len(batches), {}

    def observe(self, observer):
        count, self.batches = self.batches, self.rows
        seen = super().observe(observer)
        self.batches = count
        return seen

    def forward(self, block, batch):
        return block(self.rows[batch])

    def layer(self, name):
        return Layer(name, None, torch.float32, lambda *_, **__: None)

    def put(self, name, solution):
        self.found[name] = solution
        layer = CompressedLinear.of(self.block.get_submodule(name))
        layer.put(solution.weight)
        for transform in solution.transforms:
            layer.set_transform(transform)
        setattr(self.block, name, layer)


def outlying(norm):
    """A block whose norm writes outliers of the channels 1 and 5, with centers other than zero if it has a bias."""
    torch.manual_seed(0)
    block = Gated(norm, WIDTH, 16)
    block.b = nn.Linear(WIDTH, 16).requires_grad_(False)
    for name in ("a", "b", "out"):
        block.get_submodule(name).weight.data *= 0.1
    block.norm.weight.data = torch.ones(WIDTH).index_copy_(0, torch.tensor([1, 3, 5]), torch.tensor([40.0, 0.1, 8.0]))
    if getattr(norm, "bias", None) is not None:
        block.norm.bias.data = torch.zeros(WIDTH).index_copy_(0, torch.tensor([1, 2]), torch.tensor([30.0, -5.0]))
    return block


@pytest.mark.parametrize("norm", [nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)])
def test_a_learned_change_of_channels_leaves_the_block_as_it_was(norm, notes):
    block, rows = outlying(norm), random(4, 5, WIDTH, seed=1)
    inputs = Sweep(block, [rows], ["a", "b", "out"])
    before = block(rows)
    (link,) = [link for link in inputs.links if link.source == "norm"]
    change = Transformation.start(block, link, torch.full((WIDTH,), -2.0), torch.full((WIDTH,), 3.0), inputs, notes)
    assert len(change.parameters) == (2 if isinstance(norm, nn.LayerNorm) else 1)  # an RMSNorm has no bias
    with torch.no_grad():
        change.growth.copy_(random(WIDTH, seed=2))
        change.offset.copy_(random(WIDTH, seed=3))
    written, scale, shift = block.norm(rows), change.scale, change.shift
    change.fold(block, inputs, notes)
    torch.testing.assert_close(block(rows), before, rtol=1e-4, atol=1e-4)
    wanted = (written if shift is None else written - shift) / scale
    torch.testing.assert_close(block.norm(rows), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", [nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)])
def test_channels_with_outliers_are_scaled_down(norm, notes):
    rows = [random(4, 9, WIDTH, seed=seed) for seed in range(3)]
    errors = {}
    for transform in (False, True):
        block = outlying(copy.deepcopy(norm))
        wanted = [block(x) for x in rows]
        step = OmniQuant(
            weights="int8",
            group_size="channel",
            activations="int4",
            transform=transform,
            epochs=10,
            error="symmetric",
            hold_out=0,
        )
        inputs = Sweep(block, rows, ["a", "b", "out"])
        with torch.no_grad():
            step.solve_block(block, inputs, notes)
        errors[transform] = sum(float((block(x) - y).square().sum()) for x, y in zip(rows, wanted, strict=True))
    assert errors[True] < 0.3 * errors[False]


def test_the_sweep_keeps_the_learned_scales(notes):
    """finish: gptq changes codes, not scales, and reduces the error of the outputs that its Hessian weighs."""
    rows = random(300, 32, seed=1) @ random(32, 32, seed=2)
    weight = random(16, 32, seed=3)
    nearest = quantize(weight, GRIDS["int3"], 8, symmetric=False)
    seen = UnitGram(32, torch.device("cpu"))
    seen.update(rows)
    layer = Layer("layer", None, torch.float32, notes)
    step = OmniQuant(weights="int3", group_size=8, symmetric=False, finish="gptq")
    swept = step.swept(weight, nearest, seen, layer)
    assert torch.equal(swept.scale, nearest.scale) and torch.equal(swept.zero, nearest.zero)
    unit = rows / rows.norm(dim=1, keepdim=True)
    near, found = (float((unit @ (codes.dense() - weight).T).norm()) for codes in (nearest, swept))
    assert found < 0.8 * near


def test_a_run_with_the_sweep(pico_model, ids):
    learned = applied(pico_model, [OmniQuant(epochs=2, finish="gptq", hold_out=0, **INT3)], ids)
    nearest = applied(pico_model, [RTN(scale="mse", **INT3)], ids)
    assert distance(learned, pico_model, ids) < 0.93 * distance(nearest, pico_model, ids)


def test_two_bits_have_twice_the_epochs():
    assert OmniQuant().epochs == OmniQuant(weights="int3").epochs == 20  # section 4.1
    assert OmniQuant(weights="int2").epochs == 40
    assert OmniQuant(weights="int2", epochs=5).epochs == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "mxfp4"}, "weights mxfp4: its scales are no plain floats to be learned; use the pass signround"),
        ({"group_size": "tensor"}, "group_size: tensor has one range for all rows, .* use channel"),
        ({"activations": "int8", "activation_scale": "static"}, "is not supported by this pass; use token"),
        ({"transform_rate": 0.1}, "transform_rate has no effect without transform; write transform: true"),
        ({"activations": "int8", "transform": False, "transform_rate": 0.1}, "transform_rate has no effect"),
        ({"transform": "shift"}, "transform"),
        ({"scale": "importance"}, "use scale: mse"),
        ({"epochs": 0}, "greater than or equal to 1"),
        ({"finish": "awq"}, "'nearest' or 'gptq'"),
        ({"overrides": {"*.up_proj": {"epochs": 3}}}, "epochs"),
    ],
)
def test_a_wrong_option_says_what_is_right(options, message):
    with pytest.raises(OptionError, match=message):
        OmniQuant(**options)
