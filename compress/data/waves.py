"""Read WAV files: integers of 8 to 32 bits, channels mixed down, at the sampling rate that a model needs."""

from __future__ import annotations

import wave
from math import gcd
from pathlib import Path

import numpy as np
from jaxtyping import Float

from compress.errors import CalibrationError

Sound = Float[np.ndarray, " samples"]
"""Samples of one channel between -1 and 1, in float32."""

HOW = "write it as WAV with PCM integers of 8, 16, 24 or 32 bits, such as ffmpeg -i IN -c:a pcm_s16le OUT.wav"


def read_wave(path: Path, rate: int, where: str) -> Sound:
    """The samples of a file, `rate` of them per second. where: the place that names the file, for messages.

    Raises CalibrationError for a missing file, one that is no WAV file of integers, and one without samples.
    """
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, own = file.getnchannels(), file.getsampwidth(), file.getframerate()
            data = file.readframes(file.getnframes())
    except OSError as error:
        raise CalibrationError(
            f"{where}: cannot read {path}: {error.strerror}; write the path of a WAV file"
        ) from error
    except (wave.Error, EOFError) as error:
        reason = str(error) or "it ends early"
        raise CalibrationError(f"{where}: {path} is no WAV file of integers ({reason}); {HOW}") from error
    if own < 1 or width not in (1, 2, 3, 4):
        raise CalibrationError(f"{where}: {path} has {own} samples of {8 * width} bits per second; {HOW}")
    frames = len(data) // (channels * width)
    if not frames:
        raise CalibrationError(f"{where}: {path} holds no samples; leave its line out")
    samples = decoded(data[: frames * channels * width], width).reshape(frames, channels).mean(1)
    return resampled(samples, own, rate)


def decoded(data: bytes, width: int) -> Float[np.ndarray, " samples"]:
    """Numbers between -1 and 1 from little-endian integers of `width` bytes; those of one byte have no sign."""
    if width == 1:
        return (np.frombuffer(data, np.uint8).astype(np.float64) - 128) / 128
    whole = np.zeros((len(data) // width, 4), np.uint8)
    whole[:, 4 - width :] = np.frombuffer(data, np.uint8).reshape(-1, width)  # the upper bytes of 32 bits
    return whole.view("<i4")[:, 0] / float(1 << 31)


def resampled(samples: Float[np.ndarray, " samples"], own: int, rate: int) -> Sound:
    """Samples at another rate, by a polyphase filter that removes what the lower of the two rates cannot hold."""
    if own != rate:
        from scipy.signal import resample_poly  # takes a second to import; only recordings need it

        common = gcd(own, rate)
        samples = resample_poly(samples, rate // common, own // common)
    return samples.astype(np.float32)
