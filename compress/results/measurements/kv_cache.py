"""Size and error of a KV cache with a policy."""

from __future__ import annotations

from typing import Any, ClassVar

from compress.results.measurements.base import Measurement, Record, SummaryRow


class BytesPerToken(Record):
    """Bytes of one token's keys and values over all attention modules, without and with their cache policies.

    Exact keys and values count in the storage dtype.
    """

    before: float
    after: float


class CacheError(Record):
    """Relative error of the keys, or the values, of attention modules that store them in the same way."""

    attentions: int
    mean_error: float
    largest_error: float


class KVCacheResult(Record):
    """The result of the evaluator.

    Attributes:
        bytes_per_token: Without and with the policies.
        simulated: Whether these bytes are those of a program that stores the cache packed: here, it stays in floats.
        stated: Whether config.json tells other programs to apply the policy.
        of: Errors on the probe, by keys or values and the text of the policy.
        attentions: The policy of each attention module, as JSON.
        summaries: Sentences about the policies.
    """

    bytes_per_token: BytesPerToken
    simulated: bool
    stated: bool
    of: dict[str, CacheError]
    attentions: dict[str, dict[str, Any]]
    summaries: tuple[str, ...] = ()


class KVCacheMeasurement(Measurement):
    """The size and the errors of a KV cache."""

    value_type: ClassVar[Any] = KVCacheResult

    @classmethod
    def summary(cls, value: KVCacheResult) -> list[SummaryRow]:
        bytes_before, bytes_after = value.bytes_per_token.before, value.bytes_per_token.after
        ratio = f"{bytes_before / bytes_after:.2f}x smaller" + (", simulated" if value.simulated else "")
        return [("KV cache, bytes per token", f"{bytes_before:g}", f"{bytes_after:g}", ratio)]
