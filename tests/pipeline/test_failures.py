"""Failures of disk, memory, device and source files in the middle of a run: named, and the same command goes on."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import compress
from compress import GPTQ, RTN, Finetune, Wanda, cli
from compress.checkpoint.containers import files
from compress.errors import DeviceError, ModelError, NumericError, SaveError, ShortageError
from compress.evaluation.perplexity import Perplexity
from compress.passes.contract.context import Run
from compress.report.write import read_report

STEPS = Wanda(sparsity=0.5), Finetune(steps=1, batch=2), GPTQ(weights="int4", group_size=32)


@pytest.fixture(scope="module")
def asked(recipe, pico):
    """A recipe of two sweeps with a training between them."""
    return recipe(*STEPS, save={"format": "native", "verify": "own"}, eval=None, device="cpu")


@pytest.fixture(scope="module")
def unbroken(asked, tmp_path_factory):
    """The number of files that a run writes, and the digest of its checkpoint."""
    real, count = os.replace, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, "replace", lambda *paths: (count.append(paths[1]), real(*paths)))
        report = compress.run(asked, tmp_path_factory.mktemp("unbroken"), progress=False).report
    return len(count), report["checkpoint_sha256"]


@pytest.mark.parametrize("role", ["base", "compressed"])
def test_what_was_measured_before_an_evaluator_fails_is_reported(role, recipe, monkeypatch, tmp_path):
    measure = Perplexity.measure

    def broken(self, model, context):
        if context.role == role:
            raise NumericError("the loss is\nnot a number")
        return measure(self, model, context)

    path, out = tmp_path / "asked.yaml", tmp_path / "out"
    path.write_text(recipe(Wanda(sparsity=0.5), save={"format": "native"}).to_yaml())
    monkeypatch.setattr(Perplexity, "measure", broken)
    done = CliRunner().invoke(cli.main, ["run", str(path), "-o", str(out)])
    reason = "NumericError: the loss is not a number; what follows was not measured"
    assert done.exit_code == 1 and done.stderr.endswith("error: the loss is not a number\n")
    assert f"failed: perplexity: {reason}" in done.stdout and "checkpoint sha256: " in done.stdout
    report = read_report(out)
    assert report.failed == {"perplexity": reason} and report.texts == []
    assert f"failed: perplexity: {reason}" in (out / "report.md").read_text()
    assert (report.evaluations.get("sparsity") is not None) == (role == "compressed")
    monkeypatch.undo()
    again = compress.run(path, out, progress=False).report
    assert again["failed"] == {} and again["perplexity"] and again["checkpoint_sha256"] == report.checkpoint_sha256


@pytest.fixture
def failing(monkeypatch):
    """failing(count, number): the write of a file after `count` others fails with an error of the system."""

    def fail(count: int, number: int) -> None:
        real, done = os.replace, []

        def replace(source, target):
            done.append(target)
            if len(done) == count + 1:
                raise OSError(number, os.strerror(number), str(target))
            real(source, target)

        monkeypatch.setattr(files.os, "replace", replace)

    return fail


@pytest.mark.few(3, slow=6)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_a_disk_that_fails_at_any_write(share, number, asked, unbroken, failing, monkeypatch, tmp_path):
    writes, digest = unbroken
    failing(int(share * writes), number)
    with pytest.raises(SaveError) as caught:
        compress.run(asked, tmp_path, progress=False)
    reason = "the disk is full" if number == errno.ENOSPC else "cannot be written (.*Read-only file system"
    assert reason.split(" (")[0] in str(caught.value) and str(tmp_path) in str(caught.value)
    assert "finished blocks are kept, and the same command resumes after them" in str(caught.value)
    assert not list(tmp_path.rglob("*.part"))
    monkeypatch.undo()
    assert compress.run(asked, tmp_path, progress=False).report["checkpoint_sha256"] == digest


def test_a_disk_that_is_full_when_a_model_is_saved_leaves_nothing(pico_model, failing, tmp_path):
    compress.apply(pico_model, [RTN(group_size=32)])
    failing(1, errno.ENOSPC)
    with pytest.raises(SaveError) as caught:
        compress.save(pico_model, tmp_path / "out")
    reason = "the disk is full; nothing was written; free disk space, or name another folder, and start again"
    assert str(caught.value).startswith(str(tmp_path / "out") + os.sep) and str(caught.value).endswith(reason)
    assert not list(tmp_path.iterdir())


def test_a_library_that_cannot_write_is_told_alike(recipe, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "tokenizer.json")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", full)
    with pytest.raises(SaveError, match=r"tokenizer\.json: the disk is full; finished blocks are kept"):
        compress.run(recipe(RTN(), eval=None), tmp_path, progress=False)


def test_a_lock_that_cannot_be_written(recipe, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("compress.pipeline.lock.json.dumps", full)
    with pytest.raises(SaveError, match="the disk is full"):
        compress.run(recipe(RTN(), eval=None), tmp_path, progress=False)


# ---- the model's files ----


def changed_after(block: int, change):
    """A journal's listener that changes something when a block is written."""
    from compress.passes.contract.journal import Journal

    def listener(entry):
        if entry.kind == "block" and entry.figures["block"] == block:
            change()

    return Journal(listeners=[listener])


@pytest.mark.parametrize("how", ["replaced", "touched", "removed"])
def test_a_model_that_changes_during_the_run(how, recipe, pico, tmp_path):
    folder = Path(shutil.copytree(pico, tmp_path / "model"))
    weights = folder / "model.safetensors"

    def change():
        if how == "replaced":
            shutil.copyfile(weights, folder / "new")
            os.replace(folder / "new", weights)
        elif how == "touched":
            os.utime(weights, (1, 1))
        else:
            weights.unlink()

    with pytest.raises(ModelError, match=r"model\.safetensors was replaced or changed after it was opened; put the"):
        asked = recipe(RTN(), model=str(folder), eval=None, calibration=compress.Calibration(sequences=2, length=32))
        compress.run(asked, tmp_path / "out", journal=changed_after(0, change), progress=False)


def test_a_compressed_source_that_changes_during_the_run(recipe, pico, tmp_path):
    calibration = compress.Calibration(sequences=2, length=32)
    compress.run(recipe(Wanda(), eval=None, save={"format": "native"}), tmp_path / "first", progress=False)
    source = tmp_path / "first"

    def change():
        for path in source.glob("model-*.safetensors"):
            os.utime(path, (1, 1))

    with pytest.raises(ModelError, match="was replaced or changed after it was opened"):
        asked = recipe(RTN(), model=str(source), eval=None, calibration=calibration)
        compress.run(asked, tmp_path / "out", journal=changed_after(0, change), progress=False)


# ---- memory and device ----


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), ShortageError, "memory of cpu"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), ShortageError, "calibration.batch"),
        (MemoryError(), ShortageError, r"if the pass trains, also a smaller batch of the pass; compress plan"),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), DeviceError, "the same command resumes"),
        (RuntimeError("CUDA error: device-side assert"), DeviceError, "the device cpu failed .*finished blocks are"),
    ],
)
def test_a_failure_names_the_pass_and_a_remedy_and_the_run_goes_on(
    error, kind, message, asked, unbroken, monkeypatch, tmp_path
):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("compress.passes.contract.observers.Gram.factor", fail)
    with pytest.raises(kind, match=rf"^passes\[2\] gptq: .*{message}") as caught:
        compress.run(asked, tmp_path, progress=False)
    assert caught.value.exit_code == 1
    monkeypatch.undo()
    if error.__class__ is MemoryError:  # one of them: a run takes seconds
        assert compress.run(asked, tmp_path, progress=False).report["checkpoint_sha256"] == unbroken[1]


def test_a_failure_of_training_names_its_pass(recipe, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("torch.optim.AdamW.step", fail)
    path = tmp_path / "r.yaml"
    path.write_text(recipe(Finetune(steps=1, batch=2), save={"format": "dense"}, eval=None).to_yaml())
    result = CliRunner().invoke(cli.main, ["run", str(path), "-o", str(tmp_path / "out")])
    assert result.exit_code == 1 and "error: passes[0] finetune: a batch does not fit" in result.stderr


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="^mat1 and mat2$"), Run().phase("capture"):
        raise RuntimeError("mat1 and mat2")
