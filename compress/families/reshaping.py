"""Passes after which the model has another shape: fewer blocks, or narrower ones."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from transformers import PretrainedConfig, PreTrainedModel

from compress.api.facts import Fact, Requirements
from compress.api.passes import ModelPass


class ReshapingPass(ModelPass):
    """The whole model made smaller in its configuration; what comes out is dense, and of the class that it was.

    Passes behind it work on the model as it leaves it: their patterns match the names that modules have then.
    """

    never_after: ClassVar[frozenset[Fact]] = frozenset(
        {"masked", "quantized", "activations_quantized", "cache_quantized"}
    )

    @property
    def requires(self) -> Requirements:
        return Requirements(data=True, new_shape=True)

    @abstractmethod
    def outcome(self, model: PreTrainedModel, where: str) -> PretrainedConfig: ...
