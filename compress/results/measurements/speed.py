"""Tokens per second of decoding and prefill, and the bytes that a token reads."""

from __future__ import annotations

from typing import Any, ClassVar

from compress.recipe.tables import megabytes
from compress.results.measurements.base import Measurement, Record, SummaryRow


class ModelSpeed(Record):
    """The speed of one model.

    Attributes:
        load_seconds: Time of loading; None if it was loaded before.
        resident_bytes: Growth of the resident memory by loading it and decoding a few tokens; None as above.
        decode: Tokens per second by number of sequences.
        prefill: Tokens per second of a prompt of 512 tokens.
        token_bytes: Bytes of weights that a decoded token reads (of experts, all).
        bandwidth_share: token_bytes times tokens per second of one sequence, relative to the measured read bandwidth.
        kernels: Number of linears by the kernel that computes them; 'torch' without one.
        dtype: Of the computation.
    """

    load_seconds: float | None
    resident_bytes: int | None
    decode: dict[int, float]
    prefill: float
    token_bytes: int
    bandwidth_share: float
    kernels: dict[str, int]
    dtype: str


class SpeedResult(Record):
    """The speed of several models on one machine.

    Attributes:
        models: Speed by name.
        instruction_set: Of the kernels.
        threads: Number of threads.
        read_bandwidth: Bytes per second.
    """

    models: dict[str, ModelSpeed]
    instruction_set: str
    threads: int
    read_bandwidth: float


def table(result: SpeedResult) -> list[tuple[str, ...]]:
    """List a row for each figure, with a column for each model."""
    models = list(result.models.values())
    loaded = [
        ("-", "-")
        if m.load_seconds is None or m.resident_bytes is None
        else (f"{m.load_seconds:.2f}", megabytes(m.resident_bytes))
        for m in models
    ]
    rows = [("load, seconds", *(seconds for seconds, _ in loaded)), ("resident MB", *(size for _, size in loaded))]
    rows += [
        (f"decode tokens/s, batch {batch}", *(f"{m.decode[batch]:.1f}" for m in models)) for batch in models[0].decode
    ]
    rows.append(("prefill tokens/s", *(f"{m.prefill:.0f}" for m in models)))
    rows.append(("MB read per token", *(megabytes(m.token_bytes) for m in models)))
    rows.append(("share of the bandwidth", *(f"{m.bandwidth_share:.0%}" for m in models)))
    kernels = [", ".join(f"{count} {name}" for name, count in m.kernels.items()) for m in models]
    return [*rows, ("linears by kernel", *kernels), ("computed in", *(m.dtype for m in models))]


class SpeedMeasurement(Measurement):
    """The speed of the checkpoint and of the base model."""

    value_type: ClassVar[Any] = SpeedResult

    @classmethod
    def summary(cls, value: SpeedResult) -> list[SummaryRow]:
        """Return a row for each figure: its name, the value of the first model, that of the last, and their ratio."""
        base, *_, compressed = [*value.models.values()] * 2
        rates = [
            (f"decode tokens/s, batch {batch}", old, compressed.decode[batch]) for batch, old in base.decode.items()
        ]
        rates.append(("prefill tokens/s", base.prefill, compressed.prefill))
        rows = [(name, f"{old:.1f}", f"{new:.1f}", f"{new / old:.2f}x") for name, old, new in rates]
        read = base.token_bytes, compressed.token_bytes
        rows.append(("MB read per token", megabytes(read[0]), megabytes(read[1]), f"{read[0] / read[1]:.2f}x smaller"))
        return rows
