"""Passes that change the shape of the model: fewer blocks, or narrower ones."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from transformers import PretrainedConfig, PreTrainedModel

from compress.api.facts import Fact, Requirements
from compress.api.passes import ModelPass


class ReshapingPass(ModelPass):
    """A pass that makes the model smaller in its configuration; the result is dense and has the same class.

    Later passes work on the smaller model: their patterns match its module names.
    """

    never_after: ClassVar[frozenset[Fact]] = frozenset(
        {"masked", "quantized", "activations_quantized", "cache_quantized"}
    )

    @property
    def requires(self) -> Requirements:
        return Requirements(data=True, new_shape=True)

    @abstractmethod
    def outcome(self, model: PreTrainedModel, where: str) -> PretrainedConfig: ...
