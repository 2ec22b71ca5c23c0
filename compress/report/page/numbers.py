"""Numbers for readers: few digits, readable units, and round ticks of an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

PLUS_MINUS = "\u00a0±\u00a0"  # with spaces that break no line
STEPS = 1, 2, 2.5, 5, 10  # of ticks, times a power of ten


def number(value: float, digits: int = 3) -> str:
    """A number with about `digits` significant digits, and with an exponent only where it is tiny or huge."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size != 0 and (size < 1e-4 or size >= 1e7):
        return signed(f"{value:.{digits - 1}e}")
    whole = 0 if size == 0 else math.floor(math.log10(size)) + 1
    return signed(f"{value:,.{max(digits - whole, 0)}f}")


def signed(text: str) -> str:
    """The text of a number with the minus sign of typography."""
    return text.replace("-", "−")


def tick_name(value: float) -> str:
    """A round value of an axis, without zeros at its end."""
    return signed(f"{value:.6g}")


def with_error(value: float, error: float | None, sign: str = "") -> str:
    """A value with its standard error, which has two significant digits. sign: '+' shows that of positive values."""
    if error is None or not math.isfinite(error) or error <= 0:
        return signed(f"{value:{sign}.4f}")
    digits = min(max(1 - math.floor(math.log10(error)), 0), 8)
    return signed(f"{value:{sign}.{digits}f}") + f"{PLUS_MINUS}{error:.{digits}f}"


def upper_first(text: str) -> str:
    """A sentence with a capital letter."""
    return text[:1].upper() + text[1:]


def data_size(size_bytes: float) -> str:
    """Bytes in decimal units, as file managers show them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= size:
            return f"{number(size_bytes / size)} {unit}"
    return f"{size_bytes:.0f} bytes"


def duration(seconds: float) -> str:
    """Seconds as hours and minutes, minutes and seconds, or seconds."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        hours, left = divmod(round(seconds / 60), 60)
        return f"{hours} h {left} min"
    if minutes:
        return f"{minutes} min {rest} s"
    return f"{seconds:.1f} s" if seconds >= 0.05 else f"{seconds * 1000:.0f} ms"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round values in [low, high], and at least one less."""
    if high <= low:
        return [low]
    found: list[float] = []
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    for step in (factor * power for factor in (10 * STEPS[-2], *reversed(STEPS))):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        found = [i * step for i in range(first, last + 1)]
        if len(found) >= count - 1:
            break
    return found


def span(values: Sequence[float], zero: bool = False) -> tuple[float, float]:
    """The range of an axis: that of the finite values with a margin. zero: with zero at its end or inside."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    margin = (high - low or abs(high) or 1.0) * 0.08
    if zero:
        return min(0.0, low - margin if low < 0 else 0.0), max(0.0, high + margin if high > 0 else 0.0)
    return low - margin, high + margin
