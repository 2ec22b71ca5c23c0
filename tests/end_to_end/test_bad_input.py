"""What a user can get wrong, and what can go wrong on the way: one line, the right exit code, nothing lost.

Mistakes in a recipe are in test_recipe.py, of targets and group sizes in test_plan.py, of texts and the hub in
test_corpus.py, of model folders in checkpoint/sources/test_open.py; here each kind goes the whole way through the command line.
"""

import errno
import resource
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tolerances import LOGITS

import compress
from compress import GPTQ, RTN, SmoothQuant, Wanda, cli
from compress.blockwise.store import ActivationStore
from compress.errors import NumericError, OutputError, SaveError, ShortageError
from compress.pipeline.checkpoint import open_folder


def one_line(code: int, *args) -> str:
    """The line on standard error of a command that must fail with this code."""
    result = CliRunner().invoke(cli.main, [str(a) for a in args])
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    *progress, last = result.stderr.splitlines()
    assert last.startswith("error: ") and not [line for line in progress if "error:" in line or "Traceback" in line]
    return last


@pytest.fixture
def file_of(tmp_path):
    """file_of(recipe) -> its YAML file."""

    def write(recipe) -> Path:
        (tmp_path / "r.yaml").write_text(recipe.to_yaml())
        return tmp_path / "r.yaml"

    return write


@pytest.fixture
def damaged(pico, tmp_path):
    """damaged(change of the tensors) -> a copy of the pico model."""

    def copy(change) -> str:
        folder = Path(shutil.copytree(pico, tmp_path / "model"))
        tensors = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)

    return copy


# ---- the command line, kind by kind ----


def test_a_target_that_matches_nothing(recipe, file_of, tmp_path):
    line = one_line(2, "run", file_of(recipe(RTN(targets="*.q_porj"))), "-o", tmp_path / "out")
    assert "passes[0] rtn: targets pattern '*.q_porj' matches no linear" in line and "did you mean 'q_proj'" in line
    assert not (tmp_path / "out").exists()


def test_a_group_size_that_does_not_fit(recipe, file_of, tmp_path):
    line = one_line(2, "run", file_of(recipe(RTN(group_size=100))), "-o", tmp_path / "out")
    assert "group_size 100 does not divide the 128 inputs; use 16, 32, 64, 128, channel, or format: native" in line


def test_a_text_that_is_too_short(recipe, file_of, tmp_path):
    (tmp_path / "short.txt").write_text("A few words only.")
    asked = recipe(Wanda(), calibration=compress.Calibration(source=str(tmp_path / "short.txt"), length=512))
    line = one_line(2, "run", file_of(asked), "-o", tmp_path / "out")
    assert "short.txt text has" in line and "fewer than one sequence of 512; use a shorter length" in line


def test_weights_that_are_not_finite(recipe, file_of, damaged, tmp_path):
    def poison(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("inf")

    line = one_line(2, "run", file_of(recipe(RTN())), "--model", damaged(poison), "-o", tmp_path / "out")
    assert "model.layers.1.mlp.up_proj.weight holds 1 NaN or infinite weights" in line


@pytest.mark.parametrize("steps", [[RTN()], [Wanda()], [GPTQ()], [SmoothQuant(), RTN()]])
def test_activations_that_are_not_finite(steps, recipe, file_of, damaged, tmp_path):
    def overflow(tensors):
        for part in ("up_proj", "gate_proj"):  # finite themselves, but not what comes of them in the second block
            tensors[f"model.layers.1.mlp.{part}.weight"] *= 1e25

    line = one_line(1, "run", file_of(recipe(*steps)), "--model", damaged(overflow), "-o", tmp_path / "out")
    assert "model.layers.1" in line and "NaN or infinity" in line


def test_a_truncated_model(recipe, file_of, pico, tmp_path):
    folder = Path(shutil.copytree(pico, tmp_path / "model"))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:100_000])
    line = one_line(2, "plan", file_of(recipe(RTN())), "--model", folder)
    assert "model.safetensors is truncated or not a safetensors file" in line


def test_a_model_that_cannot_be_fetched(recipe, file_of, monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    line = one_line(2, "plan", file_of(recipe(RTN())), "--model", "some/one")
    assert "some/one" in line and "use a local folder, a .gguf file, or a hub id" in line


def test_a_text_that_cannot_be_fetched(recipe, file_of, monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")

    def refuse(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    asked = recipe(Wanda(), calibration=compress.Calibration(source="wikitext"))
    line = one_line(2, "run", file_of(asked), "-o", tmp_path / "out")
    assert "offline sources: embedded, self, or the path of a .txt, .jsonl or .npy file" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_device_that_is_not_there(command, recipe, file_of):
    line = one_line(2, command, file_of(recipe(RTN(), device="cuda")))
    assert "device: cuda does not exist: this machine has no CUDA" in line and "write device: auto, or cpu" in line


# ---- the output folder ----


def test_another_run_is_replaced_only_when_asked(recipe, file_of, tmp_path):
    out = tmp_path / "out"
    compress.run(recipe(RTN()), out)
    for name in ("notes.md", "notes.json", "other.safetensors"):
        (out / name).write_text("mine")
    assert CliRunner().invoke(cli.main, ["report", str(out), "--no-open"]).exit_code == 0  # writes some files again
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    path = file_of(recipe(RTN(weights="int8")))
    line = one_line(2, "run", path, "-o", out)
    assert "contains another run" in line and "overwrite it" in line
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == before
    done = CliRunner().invoke(cli.main, ["run", str(path), "-o", str(out), "--overwrite"])
    assert done.exit_code == 0, done.output
    assert {(out / name).read_text() for name in ("notes.md", "notes.json", "other.safetensors")} == {"mine"}
    assert compress.load(out)[0].get_submodule("model.layers.0.mlp.up_proj").codes.grid.name == "int8"


@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_files_are_never_touched(overwrite, tmp_path):
    (tmp_path / "model.safetensors").write_text("another's")
    with pytest.raises(
        OutputError, match="is not empty and was not written by compress; choose another folder, or empty the"
    ):
        open_folder(tmp_path, "a", overwrite)
    assert (tmp_path / "model.safetensors").read_text() == "another's"


def test_folders_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="is a file; choose another folder"):
        open_folder(tmp_path / "file", "a", False)
    with pytest.raises(OutputError, match="cannot be written .*; choose another place"):
        open_folder(tmp_path / "file" / "out", "a", False)


@pytest.mark.parametrize("text", ["", "[]", '{"shards": []}', '{"shards": {"a": 3}}', '{"fingerprint": "a"}'])
def test_a_broken_manifest_is_another_run(text, tmp_path):
    (tmp_path / ".compress").mkdir()
    (tmp_path / ".compress" / "manifest.json").write_text(text)
    assert open_folder(tmp_path, "a", False).shards == {}  # nothing else there: nothing to lose
    (tmp_path / "model-00002-of-00004.safetensors").write_text("weights")
    with pytest.raises(OutputError, match="contains another run"):
        open_folder(tmp_path, "a", False)


def test_a_run_that_died_between_its_first_shard_and_the_manifest_goes_on(recipe, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def die(path, tensors):
        path.with_name(path.name + ".part").write_bytes(b"half")
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("compress.checkpoint.writer.write_shard", die)
        compress.run(recipe(RTN()), tmp_path)
    assert [p.name for p in tmp_path.rglob("*.part")] == ["model-00002-of-00004.safetensors.part"]
    assert compress.run(recipe(RTN()), tmp_path).report["verified"]["own"] <= LOGITS
    assert not list(tmp_path.rglob("*.part"))


# ---- the disk ----


def test_a_full_disk_keeps_what_is_finished_and_the_same_command_goes_on(recipe, file_of, tmp_path):
    out, path = tmp_path / "out", file_of(recipe(RTN(targets="*.layers.0.*", group_size=32)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))  # the packed block has 0.1 MB, a dense one 0.6
    try:
        line = one_line(1, "run", path, "-o", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "the disk is full; finished blocks are kept, and the same command resumes after them" in line
    shards = {p.name: p.stat().st_mtime_ns for p in out.glob("*.safetensors*")}
    assert list(shards) == ["model-00002-of-00004.safetensors"]
    again = CliRunner().invoke(cli.main, ["run", str(path), "-o", str(out)])
    assert again.exit_code == 0 and "model.layers.0  restored" in again.stderr
    assert (out / "model-00002-of-00004.safetensors").stat().st_mtime_ns == shards["model-00002-of-00004.safetensors"]


def test_a_full_disk_under_the_activations(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("compress.blockwise.store.save_file", full)
    store = ActivationStore(16, tmp_path)
    store.append(torch.zeros(4))
    with pytest.raises(SaveError, match="activations between blocks cannot be written to .*No space left") as caught:
        store.append(torch.zeros(4))
    assert str(tmp_path) in str(caught.value) and "free disk space there, or use fewer" in str(caught.value)
    assert caught.value.exit_code == 1


def test_a_calibration_batch_that_does_not_fit(recipe, tmp_path, monkeypatch):
    def fail(self, regularization, order=None):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr("compress.passes.contract.observers.Gram.factor", fail)
    with pytest.raises(ShortageError, match="does not fit into the memory of cpu; use a smaller calibration.batch"):
        compress.run(recipe(GPTQ(), device="cpu"), tmp_path)


# ---- solvers ----


def test_a_solver_that_fails_is_named_with_its_layer(recipe, tmp_path, monkeypatch):
    def fail(self, regularization, order=None):
        raise NumericError("the Hessian is not positive definite")

    monkeypatch.setattr("compress.passes.contract.observers.Gram.factor", fail)
    with pytest.raises(
        NumericError, match=r"^passes\[0\] gptq model\.layers\.0\.self_attn\.q_proj: the Hessian is not"
    ):
        compress.run(recipe(GPTQ()), tmp_path)
