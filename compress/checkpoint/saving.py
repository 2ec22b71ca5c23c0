"""What `save_pretrained` does with a model that has compressed linears.

transformers asks `model.hf_quantizer` whether a model can be saved and for its tensors. If all compressed linears are
plain (one dense weight and no transforms of inputs: pruned or trained layers), the checkpoint is an ordinary one, with
the names of the original model. Otherwise an error names `compress.save`: transformers has no form for the layers, and
dense weights are not written without being asked for.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from compress.checkpoint.checkpoint import state_masks
from compress.checkpoint.formats.native import Native
from compress.checkpoint.save import masks_as_zeros, model_tensors
from compress.errors import SaveError
from compress.layers.linear import CompressedLinear
from compress.models.caches.attentions import cache_policies
from compress.models.experts import Experts


def guard_saving(model: nn.Module) -> None:
    """Make `save_pretrained` of a model write its compressed linears correctly, or raise SaveError."""
    if isinstance(model, PreTrainedModel):
        vars(model)["hf_quantizer"] = Saving()  # a plain attribute


def unsaveable(model: nn.Module) -> str | None:
    """Why `save_pretrained` cannot write the model; None if it can."""
    for name, module in model.named_modules():
        if isinstance(module, CompressedLinear) and not module.scheme.plain:
            return f"{name} is stored as {module.scheme.text}" + (
                ", and its inputs are transformed" if module.all_transforms else ""
            )
        if isinstance(module, Experts) and not module.named:
            return f"{name} holds its experts one by one"
    attention = next(iter(cache_policies(model)), None)
    return None if attention is None else f"{attention} has a cache policy"


class Saving(HfQuantizer):
    """What transformers asks about a model that has this object as `hf_quantizer`. It has no state."""

    def __init__(self) -> None:
        """Skip the quantization config that transformers' own quantizers have."""

    def is_serializable(self) -> Any:  # transformers annotates none of the three
        """Whether `save_pretrained` may ask for the tensors."""
        return True

    def get_state_dict_and_metadata(self, model: nn.Module) -> Any:
        """The tensors to save, by the names of the original model. Raises SaveError, which names `compress.save`."""
        reason = unsaveable(model)
        if reason is not None:
            raise SaveError(
                f"save_pretrained: {reason}, which transformers cannot store; "
                "use compress.save(model, folder), or format='dense' there for dequantized weights"
            )
        if isinstance(model, PreTrainedModel):
            state_masks(model.config, masks_as_zeros(model))
        return model_tensors(model, Native()), {}

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile the model."""
        return True

    @property
    def is_trainable(self) -> Any:
        """Whether transformers' trainer may train the model's parameters."""
        return True
