"""WAV files: integers of all widths, floats, channels, other sampling rates, and files that are none."""

import struct

import numpy as np
import pytest
from speech import RATE, sweep, write_wave

from compress.errors import CalibrationError
from compress.models.kinds.sound import read_sound


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_integers_of_all_widths(width, tmp_path):
    samples = np.array([-1.0, -0.5, 0.0, 0.25, 0.5])
    write_wave(tmp_path / "a.wav", samples, width=width)
    found = read_sound(tmp_path / "a.wav", RATE, "here")
    assert found.dtype == np.float32 and found.tolist() == samples.tolist()


def test_channels_are_mixed_down(tmp_path):
    write_wave(tmp_path / "a.wav", np.array([[0.5, 0.25], [-0.5, 0.0], [0.25, -0.25]]))
    assert read_sound(tmp_path / "a.wav", RATE, "here").tolist() == [0.375, -0.25, 0.0]


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_another_rate_is_resampled(rate, tmp_path):
    """Away from the ends, the samples are those of the same sine at the rate of the model."""
    sine = lambda rate: 0.5 * np.sin(2 * np.pi * 440 * np.arange(rate // 2) / rate)  # noqa: E731
    write_wave(tmp_path / "a.wav", sine(rate), rate, 4)
    found, wanted = read_sound(tmp_path / "a.wav", RATE, "here"), sine(RATE)
    assert len(found) == len(wanted) and abs(found - wanted)[400:-400].max() < 2e-3


def test_what_the_lower_rate_cannot_hold_is_removed(tmp_path):
    """A sine of 12 kHz would be heard at 4 kHz in 16000 samples a second."""
    write_wave(tmp_path / "a.wav", 0.5 * np.sin(2 * np.pi * 12000 * np.arange(24000) / 48000), 48000, 4)
    assert abs(read_sound(tmp_path / "a.wav", RATE, "here"))[400:-400].max() < 2e-3


def riff(*chunks, size=None):
    """A RIFF file of (name, content); size: that which the last chunk states."""
    parts = [struct.pack("<4sI", name, len(content)) + content + b"\0" * (len(content) % 2) for name, content in chunks]
    if size is not None:
        parts[-1] = struct.pack("<4sI", chunks[-1][0], size) + chunks[-1][1]
    whole = b"WAVE" + b"".join(parts)
    return struct.pack("<4sI", b"RIFF", len(whole)) + whole


GUID = bytes.fromhex("000000001000800000aa00389b71")


def about(form, bits, channels=1, rate=RATE, guid=GUID, sub=None):
    """The chunk fmt; sub: the format in the extension of WAVE_FORMAT_EXTENSIBLE."""
    size = channels * ((bits + 7) // 8)
    plain = struct.pack("<HHIIHH", form, channels, rate, rate * size, size, bits)
    return plain if sub is None else plain + struct.pack("<HHIH", 22, bits, 4, sub) + guid


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_extensible_integers(bits, tmp_path):
    """As ffmpeg writes 24 bits. Chunks of odd sizes are padded, and those of other names skipped."""
    samples = [-1.0, -0.5, 0.0, 0.25, 0.5]
    data = b"".join(int(x * 2 ** (bits - 1)).to_bytes(bits // 8, "little", signed=True) for x in samples)
    chunks = (b"LIST", b"odd"), (b"fmt ", about(0xFFFE, bits, sub=1)), (b"data", data), (b"LIST", b"more")
    (tmp_path / "a.wav").write_bytes(riff(*chunks))
    assert read_sound(tmp_path / "a.wav", RATE, "here").tolist() == samples


@pytest.mark.parametrize("form", [{"form": 3}, {"form": 0xFFFE, "sub": 3}])
@pytest.mark.parametrize("size", [None, 0xFFFFFFFF])
def test_floats_and_data_of_unknown_size(form, size, tmp_path):
    """A program that writes to a pipe states no size."""
    samples = [-1.0, 0.25, 1.5]
    chunks = (b"fmt ", about(bits=32, **form)), (b"data", struct.pack("<3f", *samples))
    (tmp_path / "a.wav").write_bytes(riff(*chunks, size=size))
    assert read_sound(tmp_path / "a.wav", RATE, "here").tolist() == samples


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"ID3 and the frames of an mp3", "File format b'ID3 ' not understood"),
        (b"", "not understood"),
        (riff((b"fmt ", about(1, 16)), size=20), "data"),
        (riff((b"data", bytes(10))), "No fmt chunk before data"),
        (riff((b"fmt ", about(7, 8)), (b"data", bytes(10))), "Unknown wave file format: MULAW"),
        (riff((b"fmt ", about(0xFFFE, 16, sub=7)), (b"data", bytes(10))), "Unknown wave file format: MULAW"),
        (riff((b"fmt ", about(1, 16, channels=0)), (b"data", bytes(16))), "by zero"),
        (riff((b"fmt ", about(1, 16, rate=0)), (b"data", bytes(16))), "must be >= 1"),
    ],
)
def test_other_files(data, said, tmp_path):
    (tmp_path / "a.wav").write_bytes(data)
    with pytest.raises(
        CalibrationError, match=rf"calls.jsonl:3: .*a.wav is no WAV file of integers or floats .*{said}"
    ):
        read_sound(tmp_path / "a.wav", RATE, "calls.jsonl:3")


def test_nan_a_missing_file_and_no_samples(tmp_path):
    chunks = (b"fmt ", about(3, 32)), (b"data", struct.pack("<2f", 0.0, np.nan))
    (tmp_path / "a.wav").write_bytes(riff(*chunks))
    with pytest.raises(CalibrationError, match="a.wav holds NaN or infinity; write it as WAV"):
        read_sound(tmp_path / "a.wav", RATE, "here")
    with pytest.raises(
        CalibrationError, match=r"here: cannot read .*b.wav.: No such file or directory; write the path"
    ):
        read_sound(tmp_path / "b.wav", RATE, "here")
    with pytest.raises(CalibrationError, match=r"here: cannot read .*a.x00b.: embedded null byte; write the path"):
        read_sound(tmp_path / "a\0b", RATE, "here")
    write_wave(tmp_path / "c.wav", sweep(0.01)[:0])
    with pytest.raises(CalibrationError, match=r"here: .*c.wav holds no samples; leave its line out"):
        read_sound(tmp_path / "c.wav", RATE, "here")
