"""A split GGUF file is read whole, by the name of any part or of the folder that holds the parts."""

import shutil
import struct
import subprocess

import huggingface_hub.constants
import pytest
import torch
import transformers
from tolerances import same_logits

import compress
from compress.checkpoint.inspection import inspect
from compress.checkpoint.opening import open_model
from compress.checkpoint.sources import gguf as reading
from compress.errors import ModelError
from compress.pipeline.sources import source_bytes

gguf = pytest.importorskip("gguf")

from gguf_writing import cached_models, write_pico  # noqa: E402  needs gguf

KINDS = ["F32", "Q4_0"]  # read by transformers, and by our own reader of codes
IDS = torch.arange(30, 60)[None]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The user's cache, empty; files are converted in this process, which starts sooner."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "cache"))

    def run(function, *paths):
        function(*paths)
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(reading, "run_function", run)
    return tmp_path / "cache" / "compress"


@pytest.fixture(scope="module", params=KINDS)
def written(request, pico, tmp_path_factory):
    """(the whole file, the folder of its three parts)."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "parts").mkdir()
    write_pico(pico, folder / "a.gguf", request.param)
    write_pico(pico, folder / "parts" / "b.gguf", request.param, split_max_tensors=10)
    return folder / "a.gguf", folder / "parts"


@pytest.fixture
def parts(written, tmp_path):
    """A copy of the folder of parts."""
    return shutil.copytree(written[1], tmp_path / "copied")


def count_cached(cache):
    return sum(len(cached_models(kind)) for kind in cache.iterdir())


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(
    "name", ["b-00001-of-00003.gguf", "b-00003-of-00003.gguf", ""], ids=["first", "last", "folder"]
)
def test_every_name_of_a_split_file_is_the_whole_model(name, written, cache):
    whole, folder = written
    model, tokenizer = compress.load(folder / name)
    expected, its_tokenizer = compress.load(whole)
    assert same_logits(logits(model), logits(expected))
    assert tokenizer.get_vocab() == its_tokenizer.get_vocab()
    assert count_cached(cache) == 2
    assert not any(path.name == "merged.gguf" for path in cache.rglob("*"))
    compress.load(folder / "b-00002-of-00003.gguf")
    assert count_cached(cache) == 2  # the same entry for each part


def test_a_run_reads_and_counts_all_parts(written, pico):
    whole, folder = written
    opened = open_model(str(folder))
    with opened.streaming() as model, open_model(str(whole)).streaming() as expected:
        assert same_logits(logits(model), logits(expected))
    assert source_bytes(opened) == sum(part.stat().st_size for part in folder.iterdir())


def test_inspect_lists_all_parts(written):
    whole, folder = written
    for name in ("b-00002-of-00003.gguf", ""):
        shown = inspect(folder / name)
        assert shown.modules == inspect(whole).modules
        assert list(shown.files) == [f"b-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


def test_another_part_is_another_model(parts):
    before = compress.load(parts, "float32")[0]
    path = parts / "b-00003-of-00003.gguf"
    data = bytearray(path.read_bytes())
    data[-64] ^= 1
    path.write_bytes(bytes(data))
    assert not torch.equal(logits(compress.load(parts, "float32")[0]), logits(before))


@pytest.mark.parametrize("opened_by", [compress.load, lambda path: open_model(str(path)), inspect])
def test_a_missing_part_is_named(opened_by, parts, cache):
    (parts / "b-00002-of-00003.gguf").unlink()
    for path in (parts, parts / "b-00001-of-00003.gguf", parts / "b-00003-of-00003.gguf"):
        with pytest.raises(ModelError, match=r"lacks parts of a split file: b-00002-of-00003\.gguf; fetch all 3 parts"):
            opened_by(path)
    assert not cache.exists()


@pytest.mark.parametrize("opened_by", [compress.load, inspect])
def test_parts_that_are_not_of_one_file(opened_by, parts):
    """Parts in another order, or one twice, are another model; so is a part under the name of a whole file."""
    shutil.copy(parts / "b-00001-of-00003.gguf", parts / "b-00002-of-00003.gguf")
    with pytest.raises(ModelError, match=r"b-0000\d-of-00003\.gguf states split\.\S+ = \d+, but it is"):
        opened_by(parts)
    shutil.move(parts / "b-00003-of-00003.gguf", parts / "c.gguf")
    with pytest.raises(ModelError, match=r"c\.gguf states split\.no = 2, but it is 0 by the names of the files"):
        opened_by(parts / "c.gguf")


@pytest.mark.parametrize("opened_by", [compress.load, inspect])
def test_parts_of_fewer_tensors_than_they_state(opened_by, parts):
    path = parts / "b-00002-of-00003.gguf"
    data = bytearray(path.read_bytes())
    key = b"split.tensors.count"
    start = data.index(key) + len(key) + 4  # after the type of the value
    (count,) = struct.unpack_from("<i", data, start)
    struct.pack_into("<i", data, start, count + 1)
    path.write_bytes(bytes(data))
    with pytest.raises(ModelError, match=rf"states split\.tensors\.count = {count + 1}, but it is {count} by"):
        opened_by(parts)


def test_a_folder_with_several_files_is_no_file(parts, written):
    shutil.copy(written[0], parts / "a.gguf")
    with pytest.raises(ModelError):
        compress.load(parts)


def text_bytes(value):
    return struct.pack("<Q", len(value)) + value.encode()


@pytest.mark.parametrize("tensors", [0, 1], ids=["none", "one"])
def test_a_header_alone_is_refused_before_a_model_is_built(tensors, tmp_path, monkeypatch, recipe):
    """133 bytes without hyperparameters describe a Llama of 7 billion weights by the defaults of its class."""

    def built(*_, **__):
        raise AssertionError("a model is built")

    pairs = {"general.architecture": "llama", "general.name": "x", "tokenizer.ggml.model": "gpt2"}
    data = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(pairs) + tensors)
    data += b"".join(text_bytes(key) + struct.pack("<I", 8) + text_bytes(value) for key, value in pairs.items())
    if tensors:  # 32 floats, in one block instead of 32
        data += text_bytes("llama.block_count") + struct.pack("<II", 4, 1)
        data += text_bytes("output_norm.weight") + struct.pack("<IQIQ", 1, 32, 0, 0)
        data += bytes(-len(data) % 32 + 128)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(data)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", built)
    asked = recipe({"rtn": {"weights": "int4"}}, model=str(path))
    for opened_by in (compress.load, lambda path: open_model(str(path)), lambda _: compress.plan(asked)):
        with pytest.raises(ModelError, match="lacks tensors of the model" if tensors else "holds no tensors"):
            opened_by(path)
    if not tensors:
        with pytest.raises(ModelError, match=r"tiny\.gguf holds no tensors, only metadata"):
            inspect(path)
