"""Uploading to file systems of fsspec: digests last, continued where it was interrupted, and never over other files."""

import hashlib
import json

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import compress
from compress.checkpoint.containers.digests import MANIFEST, SUMS, WORK
from compress.errors import OutputError, SaveError
from compress.pipeline.upload import check_place

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
NAMES = {*SHARDS, "model.safetensors.index.json", "config.json", SUMS, "report.json", "recipe.yaml"}


def write(folder, **changes: str) -> None:
    """A folder as a finished run leaves it. changes: the content of files, by the start of their names."""
    (folder / WORK).mkdir(parents=True, exist_ok=True)
    for name in NAMES - {SUMS, "report.json"}:
        (folder / name).write_text(next((text for key, text in changes.items() if name.startswith(key)), name))
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in SHARDS}
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
    (folder / "report.json").write_text(json.dumps({"reproduce": {"recipe": {"model": "pico"}}}))
    sizes = {name: (folder / name).stat().st_size for name in NAMES}
    (folder / WORK / MANIFEST).write_text(json.dumps({"complete": True, "files": sizes}))
    (folder / "notes.txt").write_text("of the user")


@pytest.fixture
def finished(tmp_path):
    write(tmp_path / "finished")
    return tmp_path / "finished"


@pytest.fixture
def url(request):
    """A folder of the file system in memory, which all tests of a process share."""
    address = f"memory://{request.node.name}/small"
    yield address
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def sent(monkeypatch):
    """The names of the files that are written, in order; `sent.fails`: numbers of those that fail."""

    class Sent(list):
        fails = frozenset()

    names = Sent()

    def noting(method):
        def write_file(self, *args, **kwargs):
            (path,) = [arg for arg in args if str(arg).startswith("/test_")]
            names.append(path.rpartition("/")[2])
            if len(names) in names.fails:
                raise ConnectionResetError("reset by peer")
            return method(self, *args, **kwargs)

        return write_file

    for name in ("put_file", "pipe_file"):
        monkeypatch.setattr(MemoryFileSystem, name, noting(getattr(MemoryFileSystem, name)))
    return names


def stored(url) -> dict[str, bytes]:
    files, root = fsspec.core.url_to_fs(url)
    return {path[len(root) + 1 :]: files.cat_file(path) for path in files.find(root)}


def test_what_the_run_wrote_is_uploaded_with_the_digests_last(finished, url, sent):
    check_place(url, finished)
    assert compress.upload(finished, f"{url}/") == url
    assert sent[-3:] == ["model.safetensors.index.json", "config.json", SUMS] and set(sent) == NAMES
    found = stored(url)
    assert found.pop("recipe.yaml") == b"model: pico\n"  # without folders of this machine
    assert found == {name: (finished / name).read_bytes() for name in NAMES - {"recipe.yaml"}}
    sent.clear()
    check_place(url, finished)
    compress.upload(finished, url)
    assert sent == []


def test_an_interrupted_upload_continues(finished, url, sent):
    sent.fails = {3}
    with pytest.raises(SaveError, match="ConnectionResetError: reset by peer.*the same command continues"):
        compress.upload(finished, url)
    assert len(stored(url)) == 2 and SUMS not in stored(url)
    first, sent.fails = sent[:2], frozenset()
    sent.clear()
    check_place(url, finished)  # what an upload of this folder has put there
    compress.upload(finished, url)
    assert not set(first) & set(sent) and set(first) | set(sent) == NAMES == stored(url).keys()


def test_a_file_that_is_damaged_there_is_sent_again(finished, url, sent):
    compress.upload(finished, url)
    files, root = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{root}/{SHARDS[0]}", b"short")
    sent.clear()
    compress.upload(finished, url)
    assert sent == [SHARDS[0], "model.safetensors.index.json", "config.json", SUMS]


def test_while_a_file_changes_the_place_has_no_digests(finished, url, sent):
    compress.upload(finished, url)
    write(finished, **{SHARDS[1]: "other weights"})
    sent.clear()
    sent.fails = {1}
    with pytest.raises(SaveError):
        compress.upload(finished, url)
    assert not {SUMS, "config.json"} & stored(url).keys()
    sent.fails = frozenset()
    compress.upload(finished, url)
    assert stored(url)[SHARDS[1]] == b"other weights" and stored(url).keys() == NAMES


def test_other_files_are_refused_and_another_checkpoint_is_replaced_if_asked(finished, tmp_path, url):
    files, root = fsspec.core.url_to_fs(url)
    old = f"{'0' * 64}  model-00009-of-00009.safetensors\n{'0' * 64}  ../outside.safetensors\n"
    for name, text in ((SUMS, old), ("model-00009-of-00009.safetensors", "old"), ("mine.txt", "mine")):
        files.pipe_file(f"{root}/{name}", text.encode())
    files.pipe_file(f"{root.rpartition('/')[0]}/outside.safetensors", b"outside")
    for call in (lambda: check_place(url, finished), lambda: compress.upload(finished, url)):
        with pytest.raises(OutputError, match="holds other files, such as SHA256SUMS; choose another address, or over"):
            call()
    check_place(url, finished, overwrite=True)
    compress.upload(finished, url, overwrite=True)
    assert stored(url).keys() == NAMES | {"mine.txt"} and files.exists(f"{root.rpartition('/')[0]}/outside.safetensors")


def test_a_folder_of_another_disk_is_a_place(finished, tmp_path):
    compress.upload(finished, f"file://{tmp_path}/there/small")
    assert {path.name for path in (tmp_path / "there" / "small").iterdir()} == NAMES


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("small", "small: is no address; write one such as s3://BUCKET/FOLDER"),
        ("s3://", "s3://: is no address"),
        ("nowhere://small", r"nowhere://small: cannot be opened \(ValueError: Protocol not known: nowhere.*s3://"),
    ],
)
def test_addresses_of_no_file_system(address, message, finished):
    with pytest.raises(OutputError, match=message):
        check_place(address, finished)


def test_a_run_that_is_not_finished_is_not_uploaded(tmp_path, url):
    with pytest.raises(OutputError, match="holds no finished run"):
        compress.upload(tmp_path, url)
    assert stored(url) == {}
