"""Learned rotations: their loss is that of the rotated model with rounded inputs, they stay orthogonal, and help."""

import pytest
import torch
from batches import batch_of
from torch import nn

import compress
from compress import Rotate
from compress.errors import RecipeError
from compress.layers.linear import replace_linear
from compress.layers.transforms.rounding import InputRounding, RoundingScheme
from compress.models.forward import logits_of
from compress.models.kinds.batch import Examples
from compress.models.structure.blocks import linears_of_blocks
from compress.numerics.hadamard import random_orthogonal
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.context import Run
from compress.passes.contract.journal import Journal
from compress.passes.contract.memory import ProblemSize
from compress.passes.families.learned_rotations import Learnable, Learned, RotationLearning, layers_of, learn_rotations
from compress.passes.prepare import rotate
from compress.train.rotations import rotated

COARSE = {"activations": "int4", "activation_clip": 0.9}


def learnt(model, ids, seed=0, **options):
    """The record of the training of a rotation, which is applied to the model."""
    run = Run(label="here", calibration=Examples.of_ids(ids))
    Rotate(seed=seed, learn=RotationLearning(**options)).apply(model, run)
    return run.training["here"]


def with_rounding(model, grid, clip, weights=None):
    """The model with inputs, and weights if asked, rounded in the layers themselves."""
    for name in linears_of_blocks(model):
        layer = replace_linear(model, name)
        if weights is not None:
            layer.put(quantize(layer.weight, GRIDS[weights], 8, True, "absmax", None, torch.float32).dense())
        layer.round_inputs(InputRounding(RoundingScheme(GRIDS[grid], clip=clip), layer.shape, {}))
    return model


@pytest.mark.parametrize(
    ("family", "step", "weights"),
    [
        ("pico", {}, None),
        ("pico", {"online": ["down_proj", "o_proj"]}, None),
        ("pico", {"values": False, "online": "*"}, None),
        ("pico", {}, "nf4"),
        ("qwen2", {}, None),
        pytest.param("qwen2", {}, "nf4", marks=pytest.mark.slow),
        pytest.param("opt", {"residual": False}, None, marks=pytest.mark.slow),
        pytest.param("gemma3", {"residual": False}, None, marks=pytest.mark.slow),
    ],
)
def test_a_loss_without_rotated_weights_is_that_of_the_folded_model(
    tiny, pico_model, ids, monkeypatch, family, step, weights
):
    """Any rotations: the folded model, rounded layer by layer, has the logits that they are learned with.

    For most tokens: a sum in another order may change a code, but not for half of them. A clip of 0.9, and weights in
    nf4, because the largest magnitude of int4 lies between two codes, if it is negative.
    """
    model, probe, seen = pico_model if family == "pico" else tiny(family), batch_of(ids(8, 6)), []
    options = {"activations": "int4", "activation_clip": 0.9} | (
        {"weights": weights, "group_size": 8} if weights else {}
    )

    def given(model, found, options, run):
        sizes = ([found.size] if found.size else []) + [link.size for link in found.values]
        turns = [random_orthogonal(size, 10 + i) for i, size in enumerate(sizes)]
        hidden, values = (turns[0], turns[1:]) if found.size else (None, turns)
        named = {f"values_{i}": turn for i, turn in enumerate(values)} | ({"hidden": hidden} if found.size else {})
        rotations = {name: nn.Parameter(turn.float()) for name, turn in named.items()}
        plain = logits_of(model, probe)
        with rotated(model, rotations, layers_of(model, found, options, rotations)):
            seen.extend((plain, logits_of(model, probe)))
        return Learned(hidden, values)

    monkeypatch.setattr(rotate, "learn_rotations", given)
    Rotate(**step, learn=options).apply(model, Run(label="here"))
    plain, found = seen
    errors = {"rounded": found - plain, "folded": found - logits_of(with_rounding(model, "int4", 0.9, weights), probe)}
    medians = {name: float((e.norm(dim=-1) / found.norm(dim=-1)).median()) for name, e in errors.items()}
    assert medians["folded"] < 1e-4 and medians["rounded"] > 1e-2


def test_learning_spreads_outliers(pico_model, pico_ids):
    """Two channels of every norm are 30 times as large, and the rotation starts at the identity.

    The loss is the divergence from the model without rounding, with all sequences in every step.
    """
    for block in pico_model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        for norm, readers in (
            (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            norm.weight.data[[3, 8]] *= 30
            for linear in readers:
                linear.weight.data[:, [3, 8]] /= 30
    names = linears_of_blocks(pico_model.requires_grad_(False))
    readers = frozenset(name for name in names if not name.endswith(("o_proj", "down_proj")))
    found = Learnable(names, 128, readers, frozenset(), (), lambda name: None)
    run = Run(label="here", calibration=Examples.of_ids(pico_ids))
    options = RotationLearning(steps=8, batch=6, hold_out=0, ce_weight=0)
    turned = learn_rotations(pico_model, found, options, run).hidden
    curve = run.training["here"]["curve"]
    assert curve[0]["loss"] > 3 and curve[-1]["loss"] < 0.8 * curve[0]["loss"]
    assert float(turned[[3, 8]].abs().max()) < 0.99  # of channels that do not stay alone
    assert [point["rate"] for point in curve] == pytest.approx([1 - i / 9 for i in range(1, 9)])


def test_the_embeddings_are_rotated_by_an_orthogonal_matrix(pico_model, pico_ids):
    embedding = pico_model.model.embed_tokens.weight.detach().clone()
    journal, held = Journal(), {"steps": 3, "evaluate_every": 1, "hold_out": 0.3}
    compress.apply(pico_model, Rotate(learn={**held, **COARSE}), pico_ids, journal=journal)
    (found,) = [e.figures for e in journal.entries if e.message == "trained"]
    assert found["steps"] == 3 and found["rotations"] == 128 * 128 + 3 * 32 * 32
    turned = pico_model.model.embed_tokens.weight.detach()
    rotation = torch.linalg.lstsq(embedding.double(), turned.double()).solution
    assert float((rotation.T @ rotation - torch.eye(128)).abs().max()) < 1e-5


def test_rotations_are_orthogonal_and_the_model_stays(pico_model, pico_ids):
    state = {name: tensor.clone() for name, tensor in pico_model.state_dict().items()}
    names = linears_of_blocks(pico_model)
    readers, writers = (frozenset(n for n in names if (n.endswith(("o_proj", "down_proj"))) == end) for end in (0, 1))
    found = Learnable(names, 128, readers, writers, (), lambda name: None)
    options = RotationLearning(steps=12, hold_out=0, momentum=0.5)
    done = learn_rotations(pico_model, found, options, Run(label="here", calibration=Examples.of_ids(pico_ids)))
    assert done.hidden.dtype == torch.float64 and not done.values
    assert float((done.hidden.T @ done.hidden - torch.eye(128)).abs().max()) < 1e-12
    assert float((done.hidden - torch.eye(128)).norm()) > 0.1
    after = pico_model.state_dict()
    assert after.keys() == state.keys() and all(torch.equal(after[name], tensor) for name, tensor in state.items())
    assert not hasattr(pico_model, "learned_rotations")


def test_memory_by_hand():
    """100 numbers and 2 * 20 logits for 2 * 8 tokens; 48 bytes for each of 7 * 7 numbers; six weights."""
    size = ProblemSize(weights=70, scales=0, outside=30, passed=100, vocabulary=20, length=8, itemsize=4, hidden=7)
    activations = 4 * 16 * (100 + 2 * 20)
    assert RotationLearning(batch=2).memory(size) == activations + 48 * 49
    assert RotationLearning(batch=2, weights="int4").memory(size) == activations + 48 * 49 + 24 * 70
    taught = activations + 4 * 16 * 2 * 20
    assert RotationLearning(batch=2, ce_weight=0.5).memory(size) == taught + 48 * 49
    assert Rotate().memory(size) == 3 * 4 * 100
    assert Rotate(learn={"batch": 2}).memory(size) == 2 * 4 * 100 + activations + 48 * 49


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"residual": False, "values": False, "online": "down_proj", "learn": {}}, "learn has no effect with residual"),
        ({"learn": {"activations": "none"}}, "rotate learn: activations and weights are both not rounded"),
        ({"learn": {"group_size": 32}}, "learn: group_size has no effect without weights.*leave group_size out"),
        (
            {"learn": {"activations": "none", "weights": "int4", "activation_clip": 0.9}},
            "learn: activation_clip has no effect with activations: none",
        ),
        ({"learn": {"hold_out": 0, "evaluate_every": 2}}, "learn: evaluate_every has no effect with hold_out: 0"),
        ({"learn": {"weights": "mxfp4", "group_size": 64}}, "mxfp4 has one scale for 32 columns; write 32"),
        ({"learn": {"rate": 1.5}}, "rotate learn rate: unknown option"),
        ({"learn": {"lr": 1.5}}, "did you mean 'learning_rate'"),
        ({"learn": {"steps": 0}}, "learn steps: .*greater than or equal to 1"),
        ({"learn": {"patience": 2, "hold_out": 0}}, "patience needs held-out sequences"),
        ({"learn": 100}, "rotate learn: must be a mapping of options"),
    ],
)
def test_options_without_effect_and_mistakes(options, message):
    with pytest.raises(RecipeError, match=message):
        compress.Recipe(model="m", passes=[{"rotate": options}])
