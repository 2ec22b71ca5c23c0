"""Numbers for readers: few digits, readable units, and round ticks of an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

STEPS = 1, 2, 2.5, 5, 10  # of ticks, times a power of ten


def number(value: float, digits: int = 3) -> str:
    """A number with about `digits` significant digits, and with an exponent only where it is tiny or huge."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size != 0 and (size < 1e-4 or size >= 1e7):
        return f"{value:.{digits - 1}e}"
    whole = 0 if size == 0 else math.floor(math.log10(size)) + 1
    shown = f"{value:,.{max(digits - whole, 0)}f}"
    return shown.rstrip("0").rstrip(".") if size < 1e-3 or float(shown.replace(",", "")) == int(value) else shown


def data_size(size_bytes: float) -> str:
    """Bytes in decimal units, as file managers show them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= size:
            return f"{number(size_bytes / size)} {unit}"
    return f"{size_bytes:.0f} bytes"


def duration(seconds: float) -> str:
    """Seconds as hours and minutes, minutes and seconds, or seconds."""
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 / 60:.0f} min"
    if seconds >= 60:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds:.1f} s" if seconds >= 0.05 else f"{seconds * 1000:.0f} ms"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round values in [low, high]."""
    if high <= low:
        return [low]
    rough = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in STEPS if s * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def span(values: Sequence[float], zero: bool = False) -> tuple[float, float]:
    """The range of an axis: that of the values with a margin, and with zero if asked for."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    margin = (high - low or abs(high) or 1.0) * 0.08
    low, high = low - margin, high + margin
    return (min(low, 0.0) if low < 0 and min(finite) < 0 else 0.0, max(high, 0.0)) if zero else (low, high)
