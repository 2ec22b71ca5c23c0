"""The manifest: written whole or not at all, and taken up only by the same run."""

import json
import os

import pytest

import compress
from compress.checkpoint.codec import ShardEntry
from compress.checkpoint.containers.digests import WORK
from compress.errors import OutputError, SaveError
from compress.passes.contract.journal import Journal
from compress.pipeline.checkpoint import Manifest, open_folder
from compress.pipeline.prepare import prepare
from compress.pipeline.provenance import fingerprint


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
    with pytest.raises(OutputError, match="out: is a file; choose another folder"):
        open_folder(tmp_path / "out", "one", overwrite=True)


def test_files_of_others_are_never_taken_for_a_run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="is not empty and was not written by compress"):
            open_folder(tmp_path, "one", overwrite)
    assert (tmp_path / "config.json").exists()


def test_another_run_is_replaced_only_when_asked(tmp_path):
    written(tmp_path)
    with pytest.raises(OutputError, match="contains another run .* overwrite it"):
        open_folder(tmp_path, "two", overwrite=False)
    publish(tmp_path, {"model-00002-of-00002.safetensors": "x", "config.json": "x", "plugins/own.py": "x"})
    (tmp_path / "notes.txt").write_text("x")
    assert open_folder(tmp_path, "two", overwrite=True) == Manifest(tmp_path, "two")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def publish(folder, texts, wanted="one") -> Manifest:
    """A run that has written files with these texts by name."""
    manifest = written(folder, wanted)
    for name, text in texts.items():
        (manifest.staged / name).parent.mkdir(parents=True, exist_ok=True)
        (manifest.staged / name).write_text(text)
    manifest.publish()
    return manifest


def texts_in(folder) -> dict[str, str]:
    """All files of an output folder outside of the work folder, by name."""
    found = ((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file())
    return {name: path.read_text() for name, path in found if not name.startswith(WORK)}


USERS = {
    "mine.json": "1",
    "other.safetensors": "2",
    "other.gguf": "3",
    "a.part": "4",
    "plugins/mine.py": "5",
    "sensitivity.json": "6",
}


def test_files_that_the_user_put_into_the_folder_stay(tmp_path):
    publish(
        tmp_path, {"config.json": "ours", "README.md": "ours", "plugins/own.py": "ours", "inner/deep/a.json": "ours"}
    )
    for name, text in USERS.items():
        (tmp_path / name).write_text(text)
    assert open_folder(tmp_path, "two", overwrite=True) == Manifest(tmp_path, "two")
    assert texts_in(tmp_path) == USERS
    assert not (tmp_path / "inner").exists() and not (tmp_path / WORK).exists()


@pytest.mark.parametrize("name", ["README.md", "config.json", "plugins/own.py"])
def test_a_file_that_the_user_changed_is_told_and_stays(name, tmp_path):
    publish(tmp_path, {"config.json": "ours", "README.md": "ours", "plugins/own.py": "ours"})
    (tmp_path / name).write_text("changed by the user")
    before = texts_in(tmp_path)
    with pytest.raises(OutputError, match=rf"did not write {name} as it is now; move it, or use another folder"):
        open_folder(tmp_path, "two", overwrite=True)
    assert texts_in(tmp_path) == before
    (tmp_path / name).rename(tmp_path / "kept.txt")
    open_folder(tmp_path, "two", overwrite=True)
    assert texts_in(tmp_path) == {"kept.txt": "changed by the user"}


@pytest.mark.parametrize("name", ["README.md", "report.json", "model.gguf", "model-00001-of-00004.safetensors"])
def test_a_file_of_the_user_in_the_place_of_one_of_the_new_run_is_told_and_stays(name, tmp_path):
    publish(tmp_path, {"config.json": "ours"})
    (tmp_path / name).write_text("the user's")
    with pytest.raises(OutputError, match=rf"did not write {name} as it is now"):
        open_folder(tmp_path, "two", overwrite=True)
    assert texts_in(tmp_path) == {"config.json": "ours", name: "the user's"}


def test_nothing_is_removed_through_links(tmp_path):
    elsewhere, out = tmp_path / "elsewhere", tmp_path / "out"
    elsewhere.mkdir()
    out.mkdir()
    publish(out, {"config.json": "ours", "plugins/own.py": "ours"})
    (elsewhere / "own.py").write_text("four")
    (elsewhere / "config.json").write_text("four")  # as long as the file of the run
    (out / "plugins").rename(tmp_path / "plugins")
    (out / "plugins").symlink_to(elsewhere)
    with pytest.raises(OutputError, match=r"did not write plugins/own\.py as it is now"):
        open_folder(out, "two", overwrite=True)
    (out / "plugins").unlink()
    (out / "config.json").unlink()
    (out / "config.json").symlink_to(elsewhere / "config.json")
    with pytest.raises(OutputError, match=r"did not write config\.json as it is now"):
        open_folder(out, "two", overwrite=True)
    (out / "config.json").unlink()
    (out / WORK / "segments").symlink_to(elsewhere)
    assert open_folder(out, "two", overwrite=True) == Manifest(out, "two")
    assert texts_in(elsewhere) == {"own.py": "four", "config.json": "four"} and list(out.iterdir()) == []


def test_a_work_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    written(tmp_path / "other")
    (tmp_path / "out" / WORK).symlink_to(tmp_path / "other" / WORK)
    with pytest.raises(OutputError, match="is a link, not a folder of compress"):
        open_folder(tmp_path / "out", "two", overwrite=True)
    assert (tmp_path / "other" / WORK / "manifest.json").exists()


@pytest.mark.parametrize(
    "name",
    ["../victim", "plugins/../../victim", "{folder}/victim", ".compress/lock", "", ".", "C:/victim", "a\\..\\b", "./a"],
)
def test_names_that_lead_out_of_the_folder_are_refused(name, tmp_path):
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    victim.write_text("four")
    path = publish(out, {"config.json": "ours"}).path
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"files": values["files"] | {name.format(folder=tmp_path): 4}}))
    with pytest.raises(OutputError, match="which is no file of a run"):
        open_folder(out, "two", overwrite=True)
    assert victim.read_text() == "four" and texts_in(out) == {"config.json": "ours"}


@pytest.mark.parametrize("files", [["config.json"], {"config.json": None}, {"config.json": True}, None, "config.json"])
def test_a_list_of_other_values_is_refused(files, tmp_path):
    path = publish(tmp_path, {"config.json": "ours"}).path
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": files}))
    with pytest.raises(OutputError, match="which is no file of a run"):
        open_folder(tmp_path, "two", overwrite=True)
    assert texts_in(tmp_path) == {"config.json": "ours"}


def test_a_folder_of_a_version_that_listed_no_files_is_refused(tmp_path):
    path = publish(tmp_path, {"config.json": "ours"}).path
    values = json.loads(path.read_text())
    del values["files"]
    path.write_text(json.dumps(values))
    with pytest.raises(
        OutputError, match="does not list the files of its run .*; remove the folder yourself, or choose"
    ):
        open_folder(tmp_path, "two", overwrite=True)
    assert texts_in(tmp_path) == {"config.json": "ours"}


def test_a_run_killed_before_or_while_its_files_appear_has_listed_them(tmp_path, monkeypatch):
    moved = []

    def stop(source, target):
        if not str(target).endswith("manifest.json"):
            moved.append(target)
            if len(moved) == 2:
                raise KeyboardInterrupt
        return replace(source, target)

    replace = os.replace
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", stop)
        with pytest.raises(KeyboardInterrupt):
            publish(tmp_path, {"a.json": "1", "b.json": "22"})
    assert texts_in(tmp_path) == {"a.json": "1"}
    (tmp_path / "mine.json").write_text("mine")
    open_folder(tmp_path, "two", overwrite=True)
    assert texts_in(tmp_path) == {"mine.json": "mine"} and not (tmp_path / WORK).exists()


def test_a_file_that_the_user_put_in_the_place_of_one_to_come_is_not_replaced(tmp_path):
    manifest = publish(tmp_path, {"a.json": "1"})
    (tmp_path / "b.json").write_text("mine")
    (manifest.staged / "b.json").write_text("ours")
    with pytest.raises(
        OutputError, match=r"holds b\.json, which the run did not write; move it, and run the same command"
    ):
        manifest.publish()
    assert texts_in(tmp_path) == {"a.json": "1", "b.json": "mine"}


UNREADABLE = ["", "[]", "{}", '{"shards": {"a": {"size": 1}}}', '{"shards": 3}', "null"]


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_manifest_that_cannot_be_read_is_another_run(text, tmp_path):
    path, shard = written(tmp_path).path, tmp_path / entry().file
    path.write_text(text)
    shard.write_text("finished by another version")
    with pytest.raises(OutputError, match="contains another run"):
        open_folder(tmp_path, "one", overwrite=False)
    with pytest.raises(OutputError, match="does not list the files of its run"):
        open_folder(tmp_path, "one", overwrite=True)
    assert shard.exists() and path.read_text() == text


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


def test_results_of_evaluations_are_not_in_the_way_of_a_run(recipe, tmp_path):
    out = tmp_path / "out"
    (out / "evaluation" / "0123").mkdir(parents=True)
    (out / "evaluation" / "0123" / "0.jsonl").write_text("kept")
    asked = recipe(compress.RTN(group_size=32), eval=None)
    compress.run(asked, out, progress=False)
    compress.run(recipe(compress.RTN(group_size=16), eval=None), out, overwrite=True, progress=False)
    assert (out / "evaluation" / "0123" / "0.jsonl").read_text() == "kept" and compress.load(out)
    (tmp_path / "other" / "evaluations").mkdir(parents=True)
    with pytest.raises(OutputError, match="is not empty"):
        compress.run(asked, tmp_path / "other", progress=False)
