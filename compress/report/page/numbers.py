"""Numbers for readers: few digits and readable units."""

from __future__ import annotations

import math

PLUS_MINUS = "\u00a0±\u00a0"  # with spaces that break no line


def number(value: float, digits: int = 3) -> str:
    """Format a number with about `digits` significant digits, and with an exponent only if it is tiny or huge."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size != 0 and (size < 1e-4 or size >= 1e7):
        return signed(f"{value:.{digits - 1}e}")
    integer_digits = 0 if size == 0 else math.floor(math.log10(size)) + 1
    return signed(f"{value:,.{max(digits - integer_digits, 0)}f}")


def signed(text: str) -> str:
    """Replace hyphens in the text of a number by minus signs."""
    return text.replace("-", "−")


def tick_name(value: float) -> str:
    """Format a round value of an axis without trailing zeros."""
    return signed(f"{value:.6g}")


def with_error(value: float, error: float | None, sign: str = "") -> str:
    """Format a value with its standard error, which gets two significant digits.

    Args:
        value: The value.
        error: Its standard error; None if it is unknown.
        sign: '+' shows the sign of positive values.
    """
    if error is None or not math.isfinite(error) or error <= 0:
        return signed(f"{value:{sign}.4f}")
    digits = min(max(1 - math.floor(math.log10(error)), 0), 8)
    return signed(f"{value:{sign}.{digits}f}") + f"{PLUS_MINUS}{error:.{digits}f}"


def upper_first(text: str) -> str:
    """Begin a sentence with a capital letter."""
    return text[:1].upper() + text[1:]


def data_size(size_bytes: float) -> str:
    """Format bytes in decimal units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= size:
            return f"{number(size_bytes / size)} {unit}"
    return f"{size_bytes:.0f} bytes"


def duration(seconds: float) -> str:
    """Format seconds as hours and minutes, minutes and seconds, or seconds."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    if minutes >= 60:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {whole_seconds} s"
    return f"{seconds:.1f} s" if seconds >= 0.05 else f"{seconds * 1000:.0f} ms"
