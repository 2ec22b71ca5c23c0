"""The manifest: written whole or not at all, and taken up only by the same run."""

import json

import pytest

import compress
from compress.api.journal import Journal
from compress.errors import OutputError, SaveError
from compress.pipeline.checkpoint import WORK, Manifest, ShardEntry, open_folder
from compress.pipeline.provenance import fingerprint
from compress.pipeline.run import prepare


def entry(file="model-00002-of-00002.safetensors") -> ShardEntry:
    scheme = {"model.layers.0.up": {"grid": "int4"}}
    return ShardEntry(file, "ab" * 32, ["a", "b"], 12, {"a": "cd"}, scheme, [{"layer": "a"}], [{"kind": "note"}])


def written(folder, wanted="one") -> Manifest:
    manifest = Manifest(folder, wanted, {"model.layers.0": entry()}, {"save": {"seconds": 1.5}}, True)
    manifest.write()
    return manifest


def test_it_reads_back_as_it_was_written(tmp_path):
    assert open_folder(tmp_path, "one", overwrite=False) == Manifest(tmp_path, "one")
    manifest = written(tmp_path)
    assert open_folder(tmp_path, "one", overwrite=False) == manifest


def test_a_folder_may_be_moved(tmp_path):
    (tmp_path / "a").mkdir()
    written(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    found = open_folder(tmp_path / "b", "one", overwrite=False)
    assert found.folder == tmp_path / "b" and found.complete


def test_a_write_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    manifest = written(tmp_path)
    before = manifest.path.read_bytes()
    manifest.complete = False

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(SaveError, match="the disk is full"):
        manifest.write()
    assert manifest.path.read_bytes() == before
    assert [path.name for path in manifest.path.parent.iterdir()] == ["manifest.json"]


def test_a_new_folder_is_made(tmp_path):
    assert open_folder(tmp_path / "a" / "b", "one", overwrite=False).shards == {}
    assert (tmp_path / "a" / "b").is_dir()


def test_a_start_that_was_killed_before_its_first_block_is_no_obstacle(tmp_path):
    (tmp_path / WORK).mkdir()
    assert open_folder(tmp_path, "one", overwrite=False) == Manifest(tmp_path, "one")


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(OutputError, match="out: is a file; choose another --out"):
        open_folder(tmp_path / "out", "one", overwrite=True)


def test_files_of_others_are_never_taken_for_a_run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="is not empty and was not written by compress"):
            open_folder(tmp_path, "one", overwrite)
    assert (tmp_path / "config.json").exists()


def test_another_run_is_replaced_only_when_asked(tmp_path):
    written(tmp_path)
    with pytest.raises(OutputError, match="contains another run .* pass --overwrite to replace it"):
        open_folder(tmp_path, "two", overwrite=False)
    for name in ("model-00002-of-00002.safetensors", "config.json", "a.part", "report.md", "notes.txt"):
        (tmp_path / name).write_text("x")
    assert open_folder(tmp_path, "two", overwrite=True) == Manifest(tmp_path, "two")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


UNREADABLE = ["", "[]", "{}", '{"shards": {"a": {"size": 1}}}', '{"shards": 3}', "null"]


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_manifest_that_cannot_be_read_is_another_run(text, tmp_path):
    path, shard = written(tmp_path).path, tmp_path / entry().file
    path.write_text(text)
    shard.write_text("finished by another version")
    with pytest.raises(OutputError, match="contains another run"):
        open_folder(tmp_path, "one", overwrite=False)
    assert shard.exists() and path.read_text() == text
    assert open_folder(tmp_path, "one", overwrite=True) == Manifest(tmp_path, "one")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_manifest_that_cannot_be_read_is_no_obstacle_where_nothing_was_finished(text, tmp_path):
    written(tmp_path).path.write_text(text)
    assert open_folder(tmp_path, "one", overwrite=False) == Manifest(tmp_path, "one")


def test_a_run_that_was_killed_in_its_first_shard_goes_on(tmp_path):
    begun = Manifest(tmp_path, "one")
    begun.write()
    (tmp_path / f"{entry().file}.part").write_text("half")
    assert open_folder(tmp_path, "one", overwrite=False) == begun
    with pytest.raises(OutputError, match="contains another run"):
        open_folder(tmp_path, "two", overwrite=False)


def test_a_manifest_of_more_fields_is_another_run(tmp_path):
    path = written(tmp_path).path
    (tmp_path / entry().file).write_text("finished by another version")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"unheard_of": 1}))
    with pytest.raises(OutputError, match="contains another run"):
        open_folder(tmp_path, "one", overwrite=False)


def test_a_fingerprint_is_of_names_and_values_not_of_their_order():
    assert fingerprint(a=1, b={"x": 1, "y": 2}) == fingerprint(b={"y": 2, "x": 1}, a=1)
    assert len({fingerprint(a=1), fingerprint(a=2), fingerprint(b=1), fingerprint(a="1"), fingerprint()}) == 5


@pytest.fixture
def fingerprint_of(tmp_path):
    """The fingerprint that a run of a recipe would have."""
    made = iter(range(100))
    return lambda recipe: prepare(recipe, tmp_path / str(next(made)), False, Journal()).manifest.fingerprint


def test_what_the_bytes_depend_on_changes_the_fingerprint(
    fingerprint_of, recipe, tiny, tiny_folder, tmp_path, monkeypatch
):
    folder = tiny_folder("llama")
    tiny("llama", seed=1).save_pretrained(tmp_path / "other")
    plain = recipe(compress.RTN(group_size=16), model=folder, save={"format": "native"})
    other = [
        recipe(compress.RTN(group_size=16, symmetric=False), model=folder, save={"format": "native"}),
        recipe(compress.RTN(group_size=16), model=folder, save={"format": "native", "dtype": "bfloat16"}),
        recipe(compress.RTN(group_size=16), model=folder, save={"format": "native"}, seed=1),
        recipe(compress.RTN(group_size=16), model=str(tmp_path / "other"), save={"format": "native"}),
        plain.model_copy(update={"calibration": plain.calibration.model_copy(update={"sequences": 2})}),
    ]
    found = [fingerprint_of(it) for it in (plain, *other)]
    monkeypatch.setattr("compress.pipeline.provenance.__version__", "0.0.0")
    found.append(fingerprint_of(plain))
    assert len(set(found)) == len(found) == 7


def test_the_tokens_count_not_the_name_of_their_file(fingerprint_of, recipe, tiny_folder, texts, tmp_path):
    import numpy as np

    ids = np.load(texts["tiny"])
    np.save(tmp_path / "changed.npy", (ids + 1) % 64)
    plain = recipe(compress.RTN(group_size=16), model=tiny_folder("llama"), save={"format": "native"})
    calibration = plain.calibration.model_copy(update={"source": str(tmp_path / "changed.npy")})
    before = fingerprint_of(plain.model_copy(update={"calibration": calibration}))
    np.save(tmp_path / "changed.npy", (ids + 2) % 64)
    assert fingerprint_of(plain.model_copy(update={"calibration": calibration})) != before


def test_where_the_model_lies_and_what_is_measured_do_not_matter(fingerprint_of, recipe, tiny_folder, tmp_path):
    import shutil

    folder = tiny_folder("llama")
    shutil.copytree(folder, tmp_path / "copy")
    plain = recipe(compress.RTN(group_size=16), model=folder, save={"format": "native"})
    moved = recipe(compress.RTN(group_size=16), model=str(tmp_path / "copy"), save={"format": "native"})
    unmeasured = plain.model_copy(update={"eval": compress.Evaluate(perplexity=())})
    assert fingerprint_of(plain) == fingerprint_of(moved) == fingerprint_of(unmeasured)
