"""GGUF files are converted once, exactly, and kept in the user's cache."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import huggingface_hub.constants
import pytest
import torch
from tolerances import near

from compress.checkpoint.opening import open_model
from compress.checkpoint.sources import gguf as reading
from compress.errors import ModelError

gguf = pytest.importorskip("gguf")
quants = pytest.importorskip("gguf.quants")

from gguf_writing import cached_models, write_pico  # noqa: E402  needs gguf

Q8_0 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(scope="module")
def files(pico, tmp_path_factory):
    """The pico model as GGUF: 'F32' and 'Q8_0'."""
    folder = tmp_path_factory.mktemp("gguf")
    for kind in ("F32", "Q8_0"):
        write_pico(pico, folder / f"{kind}.gguf", kind)
    return folder


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The user's cache, empty."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compress" / "gguf-5"


@pytest.fixture
def converted_here(monkeypatch):
    """Convert in this process, which is what the other one does but quicker to start; counts the conversions."""
    conversions = []

    def run(function, *paths):
        conversions.append(paths)
        function(*paths)
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(reading, "run_function", run)
    return conversions


def logits(opened, ids):
    with torch.no_grad(), opened.streaming() as model:
        return model(input_ids=ids).logits


def test_a_float_file_opens_as_the_model_it_was_made_of(files, pico, cache, converted_here):
    opened = open_model(str(files / "F32.gguf"))
    ids = torch.arange(30, 60)[None]
    assert near(logits(opened, ids), logits(open_model(pico), ids))
    assert opened.dtype == torch.float32 and opened.notes == []
    text = "def f(x): return x"
    assert opened.tokenizer(text).input_ids == open_model(pico).tokenizer(text).input_ids


def test_quantized_weights_are_multiplied_out(files, pico, cache, converted_here):
    opened, dense = open_model(str(files / "Q8_0.gguf")), open_model(pico)
    for model in (opened, dense):
        model.weights.bring(model.blocks[0])
    ours, was = (m.blocks[0].module.mlp.down_proj.weight for m in (opened, dense))
    expected = quants.dequantize(quants.quantize(was.numpy(), Q8_0), Q8_0)
    assert torch.equal(ours, torch.from_numpy(expected))
    assert not torch.equal(ours, was)


def test_a_file_is_converted_once(files, cache, converted_here, tmp_path):
    source = str(files / "F32.gguf")
    first, again = open_model(source), open_model(source)
    renamed = tmp_path / "other.gguf"
    renamed.write_bytes((files / "F32.gguf").read_bytes())
    assert open_model(str(renamed)).fingerprint == first.fingerprint == again.fingerprint
    assert len(converted_here) == 1
    assert len(cached_models(cache)) == 1  # and no .part is left
    open_model(str(files / "Q8_0.gguf"))
    assert len(converted_here) == 2 and len(cached_models(cache)) == 2


@pytest.mark.slow
def test_what_a_killed_conversion_left_is_replaced(files, cache, converted_here):
    folder = reading.as_safetensors(files / "F32.gguf")
    folder.rename(folder.with_suffix(".part"))
    for name in ("model.safetensors", "model-00001-of-00002.safetensors"):
        (folder.with_suffix(".part") / name).write_bytes(b"half")
    assert reading.as_safetensors(files / "F32.gguf") == folder
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert len(converted_here) == 2
    assert [child.name for child in cached_models(cache)] == [folder.name]


def test_commands_at_the_same_time_convert_a_file_once(files, cache):
    conversions = []

    def make(folder):
        conversions.append(folder)
        sleep(0.2)  # the others find the folder of parts
        (folder / "config.json").write_text("{}")

    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(lambda _: reading.made_once(files / "F32.gguf", "compress/gguf-5", make), range(4)))
    assert len(conversions) == 1 and len(folders) == 1
    assert [child.name for child in cached_models(cache)] == [folders.pop().name]


def test_a_converted_file_is_read_from_a_cache_that_cannot_be_written(files, cache, monkeypatch):
    """The cache of a cluster is written by one user and read by all; a lock is a file that is written."""

    def make(folder):
        (folder / "config.json").write_text("{}")

    folder = reading.made_once(files / "F32.gguf", "compress/gguf-5", make)
    monkeypatch.setattr(reading, "FileLock", None)
    assert reading.made_once(files / "F32.gguf", "compress/gguf-5", make) == folder


def test_no_such_file():
    with pytest.raises(ModelError, match=r"model: no file .*/nothing\.gguf"):
        open_model("/no/nothing.gguf")


def test_not_a_gguf_file(tmp_path, cache):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ModelError, match=r"a\.gguf is not a GGUF file \(it does not begin with 'GGUF'\)"):
        open_model(str(path))


@pytest.mark.parametrize(
    ("stderr", "reason"), [("Traceback\nValueError: bad magic\n", "ValueError: bad magic"), ("", "exit code 3")]
)
def test_a_file_that_cannot_be_read(stderr, reason, tmp_path, cache, monkeypatch):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF and nothing")
    monkeypatch.setattr(reading, "run_function", lambda *_: subprocess.CompletedProcess([], 3, "", stderr))
    with pytest.raises(
        ModelError,
        match=rf"cannot be read \({reason}\); if the gguf package is missing, install the extra: compress-llm\[gguf\]",
    ):
        open_model(str(path))
    assert cached_models(cache) == []


@pytest.mark.slow
def test_the_conversion_in_a_process_of_its_own(files, pico, cache, tmp_path):
    ids = torch.arange(30, 60)[None]
    assert near(logits(open_model(str(files / "F32.gguf")), ids), logits(open_model(pico), ids))
    path = tmp_path / "a.gguf"
    path.write_bytes((files / "F32.gguf").read_bytes()[:2000])
    with pytest.raises(ModelError, match=r"a\.gguf cannot be read \("):
        open_model(str(path))
