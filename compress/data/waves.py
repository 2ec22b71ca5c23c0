"""Read WAV files: integers of 8 to 32 bits or floats of 32, channels mixed down, at the sampling rate of a model."""

from __future__ import annotations

import struct
from math import gcd
from pathlib import Path

import numpy as np
from jaxtyping import Float

from compress.errors import CalibrationError

Sound = Float[np.ndarray, " samples"]
"""Samples of one channel between -1 and 1, in float32."""

INTEGERS, FLOATS, EXTENSIBLE = 1, 3, 0xFFFE
"""Formats of samples. Files of the last one state the format in the first two bytes of a GUID."""
GUID = bytes.fromhex("000000001000800000aa00389b71")
"""The other bytes of the GUID of such a format."""
UNKNOWN = 0xFFFFFFFF
"""The size of a chunk of a program that could not seek back: the data end with the file."""

HOW = (
    "write it as WAV with PCM integers of 8, 16, 24 or 32 bits, such as ffmpeg -i IN -c:a pcm_s16le OUT.wav, or with "
    "floats of 32 bits"
)


def read_wave(path: Path, rate: int, where: str) -> Sound:
    """The samples of a file, `rate` of them per second. where: the place that names the file, for messages.

    Raises CalibrationError for a missing file, one that is no WAV file of integers or floats, and one without samples.
    """
    try:
        file = path.read_bytes()
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise CalibrationError(f"{where}: cannot read {str(path)!r}: {reason}; write the path of a WAV file") from error
    try:
        form, channels, own, width, data = samples_in(file)
    except ValueError as error:
        raise CalibrationError(f"{where}: {path} is no WAV file of integers or floats ({error}); {HOW}") from error
    frames = len(data) // (channels * width)
    if not frames:
        raise CalibrationError(f"{where}: {path} holds no samples; leave its line out")
    numbers = decoded(data[: frames * channels * width], width, form)
    if not np.isfinite(numbers).all():
        raise CalibrationError(f"{where}: {path} holds NaN or infinity; {HOW}")
    return resampled(numbers.reshape(frames, channels).mean(1), own, rate)


def chunks_of(file: bytes) -> dict[bytes, bytes]:
    """The contents of the chunks of a RIFF file by name; of equal names the first. Raises ValueError."""
    if file[:4] != b"RIFF" or file[8:12] != b"WAVE":
        raise ValueError("it does not begin with RIFF and WAVE")
    found: dict[bytes, bytes] = {}
    place = 12
    while place + 8 <= len(file) and b"data" not in found:
        name, size = struct.unpack_from("<4sI", file, place)
        found.setdefault(name, file[place + 8 : place + 8 + size])
        if len(found[name]) < size != UNKNOWN:
            raise ValueError("it ends early")
        place += 8 + size + size % 2  # chunks begin at even places
    return found


def samples_in(file: bytes) -> tuple[int, int, int, int, bytes]:
    """The format of the samples of a WAV file, its channels, its sampling rate, the bytes of a sample, and the samples.

    Raises ValueError.
    """
    chunks = chunks_of(file)
    about, data = chunks.get(b"fmt ", b""), chunks.get(b"data")
    if len(about) < 16 or data is None:
        raise ValueError("it lacks its chunk data" if len(about) >= 16 else "it lacks its chunk fmt before the data")
    form, channels, rate, _, size, bits = struct.unpack("<HHIIHH", about[:16])
    if form == EXTENSIBLE and about[26:40] == GUID:
        form = int.from_bytes(about[24:26], "little")
    if form not in (INTEGERS, FLOATS):
        raise ValueError(f"unknown format: {form}")
    width = (bits + 7) // 8
    if (
        width not in ((1, 2, 3, 4) if form == INTEGERS else (4,))
        or not channels
        or not rate
        or size != channels * width
    ):
        raise ValueError(f"{channels} channels of {bits} bits in {size} bytes, {rate} per second")
    return form, channels, rate, width, data


def decoded(data: bytes, width: int, form: int = INTEGERS) -> Float[np.ndarray, " samples"]:
    """Numbers from little-endian samples of `width` bytes: integers become those between -1 and 1.

    Integers of one byte have no sign.
    """
    if form == FLOATS:
        return np.frombuffer(data, "<f4").astype(np.float64)
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
