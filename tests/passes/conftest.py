"""What every solver is handed besides its weight: a layer that remembers its notes."""

import pytest
import torch

from compress.passes.contract.layers import Layer


class Notes(list):
    """note(kind, message, **figures), kept as (kind, message, figures)."""

    def __call__(self, kind, message, **figures):
        self.append((kind, message, figures))


@pytest.fixture
def notes():
    return Notes()


@pytest.fixture
def layer_of(notes):
    """layer_of(mask=None, storage=float32) -> Layer."""

    def make(mask=None, storage=torch.float32):
        return Layer("model.layers.0.mlp.up_proj", mask, storage, notes)

    return make
