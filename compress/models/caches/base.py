"""The contract of cache policies: how the keys and values of attention are stored, and which tokens are kept.

A policy is one file of this folder with one class, a frozen dataclass whose `kind` is the name of the file. Plans,
formats, loading, evaluation and reports use this contract only; a new policy and the pass that installs it are two
files. An attention module with a policy gets a `CacheProxy` in place of its cache (`attentions.set_policy`), so that
`CachePolicy.update` receives all keys and values: in training, in the sweep over blocks, in evaluation, and in
`generate` with any cache class of transformers.

    <attention>.<name>                                       tensors of the policy, such as static scales
    config.json: compress_kv_cache = {<attention>: {...}}    `to_json` of the policy of each attention module; omitted
                                                             where the format states the policy (`Format.states`)

Policies that are smaller in memory fit as follows:

- Packed codes: `update` appends codes and scales to the cache as integer tensors [batch, heads, length, bytes], and
  dequantizes the tensors that `AttentionCache.append` returns. `token_bytes` is the size of these tensors.
- Token eviction: `update` returns what `append` returns, and then removes tokens from `AttentionCache.cache`. Attention
  masks of the call fit, because the model computes them for the tokens that are stored before. `text_of` is None if
  the remaining keys and values are exact, and `summary` says which tokens are kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from jaxtyping import Float
from torch import Tensor

from compress.layers.base import Specification, TensorSpec

CachePart = Literal["keys", "values"]
CACHE_PARTS: tuple[CachePart, ...] = get_args(CachePart)
"""The two tensors of a cache."""

DEFAULT_KIND = "grid"
"""The kind of a policy whose JSON has no kind; checkpoints had no other policy at first."""

CACHE_POLICIES: dict[str, type[CachePolicy]] = {}
"""Every kind of policy by its name; a class is registered when it is defined."""


@dataclass(frozen=True)
class AttentionCache:
    """The cache of an attention module during one forward pass.

    Attributes:
        cache: cache of transformers; None for a forward pass without a cache.
        args: further arguments of its method `update`: the index of the module's layer.
        kwargs: further keyword arguments of its method `update`.
    """

    cache: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens.

        Returns:
            Keys and values of all tokens in the cache. A static cache has room for later tokens after them.
        """
        return (keys, values) if self.cache is None else self.cache.update(keys, values, *self.args, **self.kwargs)

    def token_count(self, keys: Tensor) -> int | Tensor:
        """Return the number of tokens from the first token of the text on; a sliding window contains the last of them.

        Args:
            keys: keys that `append` returned.
        """
        if self.cache is None:
            return keys.shape[-2]
        return self.cache.get_seq_length(self.args[0] if self.args else self.kwargs["layer_idx"])


@dataclass(frozen=True)
class CachePolicy(Specification):
    """How an attention module stores keys and values.

    Attributes:
        traceable: whether traced steps (`compress.decode`) compute a decode step with this policy.
        simulated: whether the cache holds rounded floats, so that `token_bytes` is not its size in memory.
    """

    traceable: ClassVar[bool] = False
    simulated: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in vars(cls):
            CACHE_POLICIES[cls.kind] = cls

    @abstractmethod
    def update(
        self,
        cache: AttentionCache,
        tensors: Mapping[str, Tensor],
        keys: Float[Tensor, "batch heads length width"],
        values: Float[Tensor, "batch heads length width"],
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens.

        Args:
            cache: cache of the module.
            tensors: tensors of the policy by name.
            keys: keys in the form in which they are cached, which includes rotary position embeddings.
            values: values of the same tokens.

        Returns:
            The keys and values that attention reads, of all tokens.
        """

    @abstractmethod
    def token_bytes(self, part: CachePart, heads: int, width: int, itemsize: int) -> float:
        """Return the bytes of the keys, or of the values, of one token, with its share of scales and zero points.

        Args:
            part: 'keys' or 'values'.
            heads: number of heads.
            width: channels of a head.
            itemsize: bytes of a float of the storage dtype.
        """

    @abstractmethod
    def text_of(self, part: CachePart) -> str | None:
        """Return how keys, or values, are approximated, such as 'int4 per token and head'; None if they are exact."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """One sentence for reports: when keys and values are changed, and what the cache holds in memory."""

    def tensors(self) -> dict[str, TensorSpec]:
        """Return the specifications of the tensors that a checkpoint stores for the policy, by name."""
        return {}

    def refuses(self, name: str, tensor: Tensor) -> str | None:
        """Return why the policy cannot use a stored tensor, such as 'not one positive number'; None if it can."""
        return None

    @property
    def text(self) -> str:
        """A short text for tables, such as 'keys int4 per channel and 64 tokens, values exact'."""
        return ", ".join(f"{part} {self.text_of(part) or 'exact'}" for part in CACHE_PARTS)


def read_policy(values: Any) -> CachePolicy:
    """Read a policy of any kind from the values of `CachePolicy.to_json`.

    Raises:
        ValueError: for values that do not describe a policy.
    """
    kind = values.get("kind", DEFAULT_KIND) if isinstance(values, Mapping) else None
    if not isinstance(kind, str) or kind not in CACHE_POLICIES:
        kinds = ", ".join(sorted(CACHE_POLICIES))
        raise ValueError(f"{str(values)[:100]!r} describes no cache policy; kinds: {kinds}")
    return CACHE_POLICIES[kind].from_json(values)


def tensor_names(policies: Mapping[str, CachePolicy]) -> list[str]:
    """Return the names of the tensors of policies, from the names of their modules."""
    return [f"{name}.{tensor}".removeprefix(".") for name, policy in policies.items() for tensor in policy.tensors()]
