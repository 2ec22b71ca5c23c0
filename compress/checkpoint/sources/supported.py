"""Check, without weights, that a model is of a supported kind: known inputs, a known answer."""

from __future__ import annotations

import inspect

from transformers import PreTrainedModel

from compress.errors import ModelError
from compress.models.kinds.contract import SUPPORTED, unreadable_text
from compress.models.kinds.kinds import kind_of


def check_supported(model: PreTrainedModel, subject: str = "model") -> None:
    """Raise ModelError unless a model is of a known kind and takes its inputs.

    Only the class, the configuration and the modules are read.

    Args:
        model: the model, which may be without weights.
        subject: beginning of the message.

    Raises:
        ModelError: for another model.
    """
    reason = _unsupported(model)
    if reason is not None:
        raise ModelError(f"{subject}: {type(model).__name__} {reason}")


def _unsupported(model: PreTrainedModel) -> str | None:
    """Why a model is not supported, and a remedy; None if it is."""
    arguments, kind = inspect.signature(model.forward).parameters, kind_of(model)
    reason = unreadable_text(model, arguments) if kind is None else kind.unreadable(model, arguments)
    if kind is not None or reason is not None:
        return reason
    if getattr(model.config, "is_encoder_decoder", False):
        reason = "is an encoder-decoder model without a language-model head, or for other inputs than text and sound"
        return f"{reason}; {SUPPORTED}"
    return f"has no language-model head and is of no other supported kind; {SUPPORTED}"
