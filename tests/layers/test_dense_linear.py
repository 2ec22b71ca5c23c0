"""Which modules are linears: those that compute x W + b, whatever their class is called."""

import pytest
import torch
from model_families import tiny_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from compress.layers.dense_linear import is_linear
from compress.layers.linear import linears
from compress.models.caches.attentions import attentions_with_cache


class Router(nn.Linear):
    def forward(self, x):
        return super().forward(x).topk(1)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Needy(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.factor


class Spelled(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T + self.bias


class Turned(Conv1D):
    def forward(self, x):
        return x @ self.weight + self.bias


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (nn.Linear, True),
        (Conv1D, True),
        (Spelled, True),
        (Turned, True),
        (nn.LayerNorm, False),
        (Router, False),
        (Scaled, False),
        (Needy, False),
    ],
)
def test_a_subclass_is_a_linear_if_it_computes_the_same(kind, wanted):
    state = torch.get_rng_state()
    assert is_linear(kind) == wanted and torch.equal(torch.get_rng_state(), state)


def test_the_router_of_a_model_is_no_linear():
    found = linears(tiny_model("llama4"))
    assert not any(name.endswith(".router") for name in found) and any(name.endswith(".q_proj") for name in found)


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("jamba", ["model.layers.1.self_attn"]),
        ("qwen3-next", ["model.layers.1.self_attn"]),
        ("lfm2", ["model.layers.1.self_attn"]),
        ("bamba", ["model.layers.1.self_attn"]),
        ("mamba", []),
        ("llama", [f"model.layers.{i}.self_attn" for i in range(3)]),
    ],
)
def test_blocks_with_other_states_have_no_keys_and_values(family, wanted):
    assert list(attentions_with_cache(tiny_model(family))) == wanted
