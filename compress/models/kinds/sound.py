"""Read WAV files with scipy: channels mixed down, at the sampling rate of a model."""

from __future__ import annotations

import warnings
from math import gcd
from pathlib import Path

import numpy as np
from jaxtyping import Float

from compress.errors import CalibrationError, CannotRun, call_foreign, one_line

Sound = Float[np.ndarray, " samples"]
"""Samples of one channel between -1 and 1, in float32."""

HOW = (
    "write it as WAV with PCM integers of 8, 16, 24 or 32 bits, such as ffmpeg -i IN -c:a pcm_s16le OUT.wav, or with "
    "floats"
)


def read_sound(path: Path, rate: int, place: str) -> Sound:
    """Return the samples of a WAV file, `rate` of them per second.

    Args:
        path: the file.
        rate: samples per second of the result.
        place: the place that names the file, for messages.

    Raises:
        CalibrationError: for a missing file, one that is no WAV file of integers or floats, and one without samples.
    """
    try:
        path.open("rb").close()
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise CalibrationError(f"{place}: cannot read {str(path)!r}: {reason}; write the path of a WAV file") from error
    try:
        sound = call_foreign(decoded, path, rate)
    except CannotRun as error:
        reason = one_line(error.cause)
        raise CalibrationError(f"{place}: {path} is no WAV file of integers or floats ({reason}); {HOW}") from error
    if not sound.size:
        raise CalibrationError(f"{place}: {path} holds no samples; leave its line out")
    if not np.isfinite(sound).all():
        raise CalibrationError(f"{place}: {path} holds NaN or infinity; {HOW}")
    return sound


def decoded(path: Path, rate: int) -> Sound:
    """Return the samples of a WAV file; raises what scipy raises.

    Integers of 8 bits have no sign; those of 24 bits are the upper ones of 32.
    """
    from scipy.io import wavfile  # scipy's modules take a second to import; only recordings need them
    from scipy.signal import resample_poly

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", wavfile.WavFileWarning)  # of chunks with other contents
        stored_rate, samples = wavfile.read(path)
    numbers = samples.astype(np.float64)
    if samples.dtype == np.uint8:
        numbers = (numbers - 128) / 128
    elif np.issubdtype(samples.dtype, np.integer):
        numbers /= -float(np.iinfo(samples.dtype).min)
    mixed = numbers.reshape(len(numbers), -1).mean(1) if numbers.size else numbers
    if stored_rate != rate:
        common = gcd(stored_rate, rate)
        mixed = resample_poly(mixed, rate // common, stored_rate // common)
    return mixed.astype(np.float32)
