"""Models of the hub: names with a revision, the cache, and what a user is told when fetching fails."""

import json
import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants, errors

import compress
from compress import RTN
from compress.checkpoint.inspection import inspect
from compress.checkpoint.opening import open_model
from compress.checkpoint.sources.hub import at_commit, commit_of, split_revision
from compress.errors import ModelError
from compress.pipeline.rooflines import roofline

MAIN, OLD = "a" * 40, "b" * 40


@pytest.fixture
def cached(pico, tmp_path, monkeypatch):
    """A cache with two commits of one model, and no way to the hub."""
    repo = tmp_path / "hub" / "models--owner--small"
    for commit, names in ((MAIN, ["main"]), (OLD, ["v1.0"])):
        shutil.copytree(pico, repo / "snapshots" / commit)
        (repo / "refs").mkdir(exist_ok=True)
        for name in names:
            (repo / "refs" / name).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repo


def test_a_source_and_its_revision(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd@name").mkdir()
    assert split_revision("owner/small@v1.0") == ("owner/small", "v1.0")
    assert split_revision("owner/small") == ("owner/small", None)
    assert split_revision("odd@name") == ("odd@name", None)
    assert split_revision("./some@where") == ("./some@where", None)
    assert at_commit("owner/small@v1.0", OLD) == f"owner/small@{OLD}" and at_commit("x", None) == "x"
    assert commit_of(tmp_path / "snapshots" / OLD) == OLD and commit_of(tmp_path) is None


def test_a_run_of_a_revision_records_its_commit(cached, recipe, texts, tmp_path):
    asked = recipe(RTN(group_size=32), model="owner/small@v1.0", eval=None)
    calibration = compress.Calibration(source=texts["calibration"], sequences=None, length=None)
    result = compress.run(asked.model_copy(update={"calibration": calibration}), tmp_path / "out")
    out = tmp_path / "out"
    report = json.loads((out / "report.json").read_text())
    assert report["model"]["source"] == "owner/small@v1.0" and report["model"]["commit"] == OLD
    assert f"| model commit | {OLD} |" in (out / "report.md").read_text()
    assert yaml.safe_load((out / "recipe.yaml").read_text())["model"] == f"owner/small@{OLD}"
    card = (out / "README.md").read_text()
    assert "base_model: owner/small\n" in card and f"(commit `{OLD}`)" in card and "# small, compressed" in card
    again = compress.run(out / "recipe.yaml", tmp_path / "again")
    assert again.report["checkpoint_sha256"] == result.report["checkpoint_sha256"]


def test_the_main_branch_is_recorded_too(cached):
    assert open_model("owner/small").source == "owner/small"
    assert compress.plan(compress.Recipe(model="owner/small", passes=[RTN()]))  # a cached model needs no network


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("FOLDER@main", "is local and has no revisions; write .*model without @"),
        ("FILE.gguf@main", r"is local and has no revisions; write .*\.gguf without @"),
        ("owner/small@", "is no hub id with a revision; write OWNER/NAME@REVISION"),
        ("a/b/c@main", "is no hub id with a revision"),
    ],
)
def test_a_revision_of_something_that_has_none(source, message, pico, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"")
    source = source.replace("FOLDER", pico).replace("FILE", str(tmp_path / "x"))
    with pytest.raises(ModelError, match=f"^model: .*{message}"):
        open_model(source)


def response(status: int) -> SimpleNamespace:
    """What huggingface_hub's errors read of a response, whatever its library for HTTP."""
    return SimpleNamespace(status_code=status, headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError("gated", response=response(403)), "accept its terms .* `hf auth login` or set HF_TOKEN"),
        (errors.RepositoryNotFoundError("401", response=response(401)), "or it is private; correct the name, or run"),
        (errors.RevisionNotFoundError("404", response=response(404)), "no such revision of it; write a branch, a tag"),
        (errors.LocalEntryNotFoundError("not cached"), "the cache does not hold it; connect once to fetch it"),
        (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set .*; unset it, or use a local folder"),
        (ConnectionError("connection lost"), r"\(ConnectionError: connection lost\).*the same command continues"),
        (OSError(28, "No space left on device"), r"No space left on device\).*files that were fetched are kept"),
    ],
)
def test_a_failure_says_what_to_do(error, message, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=f"model: owner/small@x is not a local folder; .*{message}"):
        open_model("owner/small@x")


def test_a_model_that_is_not_cached_offline(cached):
    with pytest.raises(ModelError, match="the cache does not hold it"):
        open_model("owner/other")
    with pytest.raises(ModelError, match="the cache does not hold it"):
        open_model("owner/small@v9")


def test_a_partly_fetched_model_is_planned_and_its_missing_files_are_named(cached, pico_model, tmp_path):
    """Fetching was stopped after some of the shards; links to the others lead nowhere, or are not there."""
    snapshot = cached / "snapshots" / MAIN
    recipe = compress.Recipe(model="owner/small", passes=[RTN(group_size=32)])
    planned, estimated = compress.plan(recipe), roofline("owner/small", context=256)
    (snapshot / "model.safetensors").unlink()
    pico_model.save_pretrained(snapshot, max_shard_size="500KB")
    shards = sorted(path.name for path in snapshot.glob("*.safetensors"))
    assert len(shards) > 3
    (snapshot / shards[2]).unlink()
    with pytest.raises(ModelError, match=rf"{shards[2]} is missing, but the index lists it; fetch the model again"):
        open_model("owner/small")
    (snapshot / shards[1]).unlink()
    (snapshot / shards[1]).symlink_to(cached / "blobs" / "nothing")
    part, opened = compress.plan(recipe), roofline("owner/small", context=256)
    assert (part.layers, part.checkpoint_bytes, opened) == (planned.layers, planned.checkpoint_bytes, estimated)
    assert any("planned without the weights" in note for note in part.notes)
    missing = rf"lacks 2 of {len(shards)} files of weights that its index lists: {shards[1]}, {shards[2]}; fetch"
    for use in (open_model, lambda source: compress.run(recipe, tmp_path / "out")):
        with pytest.raises(ModelError, match=missing):
            use("owner/small")
    for use in (compress.load, inspect):
        with pytest.raises(ModelError, match=missing):
            use(snapshot)
