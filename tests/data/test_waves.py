"""WAV files: integers of all widths, channels, other sampling rates, and files that are none."""

import numpy as np
import pytest
from speech import RATE, sweep, write_wave

from compress.data.waves import read_wave
from compress.errors import CalibrationError


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_integers_of_all_widths(width, tmp_path):
    samples = np.array([-1.0, -0.5, 0.0, 0.25, 0.5])
    write_wave(tmp_path / "a.wav", samples, width=width)
    found = read_wave(tmp_path / "a.wav", RATE, "here")
    assert found.dtype == np.float32 and found.tolist() == samples.tolist()


def test_channels_are_mixed_down(tmp_path):
    write_wave(tmp_path / "a.wav", np.array([[0.5, 0.25], [-0.5, 0.0], [0.25, -0.25]]))
    assert read_wave(tmp_path / "a.wav", RATE, "here").tolist() == [0.375, -0.25, 0.0]


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_another_rate_is_resampled(rate, tmp_path):
    """Away from the ends, the samples are those of the same sine at the rate of the model."""
    sine = lambda rate: 0.5 * np.sin(2 * np.pi * 440 * np.arange(rate // 2) / rate)  # noqa: E731
    write_wave(tmp_path / "a.wav", sine(rate), rate, 4)
    found, wanted = read_wave(tmp_path / "a.wav", RATE, "here"), sine(RATE)
    assert len(found) == len(wanted) and abs(found - wanted)[400:-400].max() < 2e-3


def test_what_the_lower_rate_cannot_hold_is_removed(tmp_path):
    """A sine of 12 kHz would be heard at 4 kHz in 16000 samples a second."""
    write_wave(tmp_path / "a.wav", 0.5 * np.sin(2 * np.pi * 12000 * np.arange(24000) / 48000), 48000, 4)
    assert abs(read_wave(tmp_path / "a.wav", RATE, "here"))[400:-400].max() < 2e-3


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"ID3 and the frames of an mp3", "is no WAV file of integers .*; write it as WAV with PCM integers"),
        (b"", "is no WAV file of integers .it ends early.; write"),
        (b"RIFF\x24\x00\x00\x00WAVEfmt \x10\x00\x00\x00\x03\x00\x01\x00", "is no WAV file of integers"),
    ],
)
def test_other_files(data, said, tmp_path):
    (tmp_path / "a.wav").write_bytes(data)
    with pytest.raises(CalibrationError, match=f"calls.jsonl:3: .*a.wav {said}"):
        read_wave(tmp_path / "a.wav", RATE, "calls.jsonl:3")


def test_floats_a_missing_file_and_no_samples(tmp_path):
    write_wave(tmp_path / "a.wav", sweep(0.01), width=4)
    data = bytearray((tmp_path / "a.wav").read_bytes())
    data[20] = 3  # the format of floats
    (tmp_path / "a.wav").write_bytes(data)
    with pytest.raises(CalibrationError, match=r"no WAV file of integers \(unknown format: 3\); write it as WAV"):
        read_wave(tmp_path / "a.wav", RATE, "here")
    with pytest.raises(CalibrationError, match=r"here: cannot read .*b.wav: No such file or directory; write the path"):
        read_wave(tmp_path / "b.wav", RATE, "here")
    write_wave(tmp_path / "c.wav", sweep(0.01)[:0])
    with pytest.raises(CalibrationError, match=r"here: .*c.wav holds no samples; leave its line out"):
        read_wave(tmp_path / "c.wav", RATE, "here")
