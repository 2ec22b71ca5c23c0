"""Check, without weights, that a model is of a supported kind: token ids or recordings in, a known answer out."""

from __future__ import annotations

import inspect

from transformers import PreTrainedModel

from compress.errors import ModelError
from compress.models.kinds.kinds import RECORDED, SUPPORTED, kind_of


def check_supported(model: PreTrainedModel, where: str = "model") -> None:
    """Raise ModelError unless a model takes token ids, or recordings, and is of a known kind.

    Only the class, the configuration and the modules are read. where: the beginning of the message.
    """
    reason = _unsupported(model)
    if reason is not None:
        raise ModelError(f"{where}: {type(model).__name__} {reason}")


def _unsupported(model: PreTrainedModel) -> str | None:
    """Why a model is not supported, and a remedy; None if it is."""
    arguments = inspect.signature(model.forward).parameters
    if kind_of(model) is RECORDED:
        lacking = next((n for n in (model.main_input_name, "decoder_input_ids") if n not in arguments), None)
        return None if lacking is None else f"hears recordings, but its forward pass takes no {lacking}; {SUPPORTED}"
    if "input_ids" not in arguments:
        return f"does not take token ids (input_ids); {SUPPORTED}"
    try:
        model.get_input_embeddings()
    except NotImplementedError:
        return f"has no one table of token embeddings; {SUPPORTED}"
    if kind_of(model) is None and getattr(model.config, "is_encoder_decoder", False):
        reason = "is an encoder-decoder model without a language-model head, or for other inputs than text and sound"
        return f"{reason}; {SUPPORTED}"
    if kind_of(model) is None:
        return f"has no language-model head and is of no other supported kind; {SUPPORTED}"
    return None
