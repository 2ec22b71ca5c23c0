"""`load` rounds the inputs of layers of codes to int8 when it is asked to."""

import pytest
import torch

import compress
from compress.errors import ModelError
from compress.evaluation.speed import kernels_of
from compress.kernels.dispatch import plain_torch
from compress.layers.linear import linears

IDS = torch.arange(30, 94)[None]


@pytest.fixture(scope="module")
def packed(pico, tmp_path_factory):
    """The pico model in int4: groups of 32 but down_proj, which has rows."""
    out = tmp_path_factory.mktemp("run") / "out"
    passes = [{"rtn": {"weights": "int4", "group_size": 32, "overrides": {"down_proj": {"group_size": "channel"}}}}]
    compress.run(
        compress.Recipe.from_data({"model": pico, "passes": passes, "save": {"format": "native"}, "eval": None}),
        out,
        progress=False,
    )
    return out


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def test_layers_of_codes_round_their_inputs_in_their_groups(packed):
    model, _ = compress.load(packed, activations="int8")
    layers = {name: layer.rounding.scheme for name, layer in linears(model).items() if hasattr(layer, "rounding")}
    assert {scheme.group for name, scheme in layers.items() if "down_proj" in name} == {None}
    assert {scheme.group for name, scheme in layers.items() if "down_proj" not in name} == {32}
    exact, _ = compress.load(packed)
    with plain_torch():
        near, far = logits(model), logits(exact)
    error = float((near - far).norm() / far.norm())
    assert 0 < error < 0.03
    assert kernels_of(model) == kernels_of(exact)
    assert float((logits(model) - near).norm() / near.norm()) < 0.01  # the kernels compute the same


def test_what_the_checkpoint_states_stays(pico, tmp_path):
    passes = [{"rtn": {"weights": "int8", "group_size": "channel", "activations": "int8"}}]
    recipe = {"model": pico, "passes": passes, "save": {"format": "native"}, "eval": None}
    compress.run(compress.Recipe.from_data(recipe), tmp_path / "out", progress=False)
    for activations in (None, "int8"):
        model, _ = compress.load(tmp_path / "out", activations=activations)
        assert {layer.rounding.scheme.scale for layer in linears(model).values() if hasattr(layer, "rounding")} == {
            "token"
        }


def test_other_values_and_dense_models_are_errors(pico, packed):
    with pytest.raises(ModelError, match="activations: 'int4' is not known; use int8"):
        compress.load(packed, activations="int4")
    with pytest.raises(
        ModelError, match="activations: the model has no layers of integer codes; leave activations out"
    ):
        compress.load(pico, activations="int8")
