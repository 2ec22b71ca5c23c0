"""Passes that change the shape of the model: fewer blocks, or narrower ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from transformers import PretrainedConfig, PreTrainedModel

from compress.errors import TargetError
from compress.passes.contract.facts import Fact, Requirements
from compress.passes.contract.passes import ModelPass, works_on


class ReshapingPass(ModelPass):
    """A pass that makes the model smaller in its configuration; the result is dense and has the same class.

    Later passes work on the smaller model: their patterns match its module names.
    """

    never_after: ClassVar[frozenset[Fact]] = frozenset(
        {"masked", "quantized", "activations_quantized", "cache_quantized"}
    )

    @property
    def requires(self) -> Requirements:
        return Requirements(data=True, new_shape=True, rehearsal=self)

    def check_all_taken(self, names: Iterable[str], label: str, why: str) -> None:
        """Raise TargetError if the targets exclude one of the linears.

        Args:
            why: what is the same in all of them.
        """
        for name in names:
            if not works_on(self, name):
                raise TargetError(f"{label}: {name} is left out by targets or ignore, but {why}")

    @abstractmethod
    def outcome(self, model: PreTrainedModel, label: str) -> PretrainedConfig: ...
