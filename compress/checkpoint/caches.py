"""Cache policies in checkpoints: read them from config.json, and install them with their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.checkpoint.formats.base import Format
from compress.checkpoint.tensors import StoredTensors
from compress.errors import CannotRun, ModelError, call_foreign
from compress.models.caches.attentions import attentions_with_cache, cache_policies, set_policy
from compress.models.caches.base import CachePolicy, read_policy, tensor_names
from compress.models.terms import CACHE_KEY


def read_policies(
    model: nn.Module, record: Any, format_: Format | None, quantization: Mapping[str, Any]
) -> dict[str, CachePolicy]:
    """Read the cache policies of a checkpoint, by the names of the attention modules.

    Args:
        record: the value of `CACHE_KEY`.
        quantization: the `quantization_config` of the format.

    Raises:
        ModelError: for invalid entries of config.json.
    """
    try:
        common_policy = None if format_ is None else call_foreign(format_.read_cache, quantization)
        if common_policy is not None:
            return dict.fromkeys(attentions_with_cache(model), common_policy)
        if record is not None and not isinstance(record, dict):
            raise ValueError(f"{CACHE_KEY} is no object")
        return {name: call_foreign(read_policy, values) for name, values in (record or {}).items()}
    except (ValueError, CannotRun) as error:
        cause = error.cause if isinstance(error, CannotRun) else error
        reason = str(cause) if isinstance(cause, ValueError) else f"its KV cache cannot be read ({cause!r})"
        raise ModelError(f"model: config.json: {reason}") from error


def install_policies(root: nn.Module, prefix: str, stored: StoredTensors, policies: Mapping[str, CachePolicy]) -> None:
    """Install cache policies in the attention modules below `root`.

    Args:
        prefix: prefix of full names; prefix + name below `root` is the full name.
        stored: stored tensors, among them those of the policies.
        policies: policies by full names of the modules.

    Raises:
        ModelError: for a missing or invalid tensor, and for an attention module that does not exist.
    """
    tensors = stored.read(name for name in tensor_names(policies) if name in stored.files)
    attentions = attentions_with_cache(root) if policies else {}
    for module_name, policy in policies.items():
        attention = attentions.get(f"{module_name}.".removeprefix(prefix).removesuffix("."))  # "" is the root
        if attention is None:
            raise ModelError(
                f"model: {module_name} has no cache of keys and values; correct config.json in {_folders(stored)}, or "
                "fetch it again"
            )
        numbers = {name: f"{module_name}.{name}" for name in policy.tensors()}
        set_policy(attention, policy, {name: _checked(policy, n, name, tensors, stored) for name, n in numbers.items()})


def _folders(stored: StoredTensors) -> str:
    """Return the folders of the stored tensors, in words."""
    return " and ".join(sorted({str(place.path.parent) for place in stored.files.values()}))


def _checked(policy: CachePolicy, full: str, name: str, tensors: Mapping[str, Tensor], stored: StoredTensors) -> Tensor:
    """Return a stored tensor of a policy, in the shape of its specification. Raises ModelError."""
    shape = policy.tensors()[name].shape
    if full not in tensors:
        raise ModelError(f"model: {full} is missing in {_folders(stored)}; write the checkpoint again")
    tensor = tensors[full]
    has_size = tensor.numel() == prod(shape)
    reason = policy.refuses(name, tensor) if has_size else f"not of shape {list(shape)}"
    if reason is not None:
        raise ModelError(
            f"model: {full} in {stored.files[full].path} is {tensor.flatten().tolist()[:4]}, {reason}; write the "
            "checkpoint again"
        )
    return tensor.reshape(shape)


def stated_policy(model: PreTrainedModel, policies: Mapping[str, CachePolicy], format_: Format) -> CachePolicy | None:
    """Return the common policy of all attention modules of a model if a format states it, else None."""
    distinct = set(policies.values())
    if len(distinct) != 1 or policies.keys() != attentions_with_cache(model).keys():
        return None
    policy = distinct.pop()
    return policy if format_.states(policy, model.config) else None


def policy_entries(policies: Mapping[str, CachePolicy]) -> dict[str, Any]:
    """Return the entry of config.json that states cache policies; empty without policies."""
    return {CACHE_KEY: {name: policy.to_json() for name, policy in policies.items()}} if policies else {}


def state_policies(model: PreTrainedModel) -> None:
    """State the cache policies of a model in its configuration."""
    vars(model.config).update(policy_entries(cache_policies(model)))
