"""A run that writes several formats: one calibration, the first format as ever, and the others converted from it."""

import json

import pytest
import torch
from click.testing import CliRunner
from tolerances import LOGITS

import compress
from compress import GPTQ, RTN, Recipe, Save
from compress.checkpoint.containers.files import file_sha256
from compress.cli import main
from compress.errors import OutputError, RecipeError, SaveError, TargetError
from compress.layers.linear import CompressedLinear
from compress.pipeline import conversions
from compress.pipeline.plan import plan
from compress.pipeline.publish import upload_operations

THREE = ["compressed-tensors", "gguf", "awq"]
INT4 = RTN(weights="int4", group_size=32)


def recipe_of(pico, texts, formats, *passes, **save):
    calibration = compress.Calibration(source=texts["calibration"], sequences=2, length=32)
    return Recipe(
        model=pico, calibration=calibration, passes=passes or (INT4,), save=Save(format=formats, **save), eval=None
    )


def digests(folder):
    return {p.relative_to(folder).as_posix(): file_sha256(p) for p in folder.rglob("*") if p.is_file()}


def checkpoint_of(folder, *suffixes):
    """The sha256 of the files of a checkpoint, without those that describe the run."""
    kinds = suffixes or (".safetensors", ".gguf")
    names = ("config.json", "SHA256SUMS", "model.safetensors.index.json", "tokenizer.json")
    return {p.name: file_sha256(p) for p in folder.iterdir() if p.suffix in kinds or p.name in names}


def weights(folder):
    model, _ = compress.load(folder)
    return {n: m.weight_as(torch.float32) for n, m in model.named_modules() if isinstance(m, CompressedLinear)}


@pytest.fixture(scope="module")
def three(pico, texts, tmp_path_factory):
    """A run with three formats."""
    out = tmp_path_factory.mktemp("three") / "out"
    gptq = GPTQ(weights="int4", group_size=32)
    return compress.run(recipe_of(pico, texts, THREE, gptq, dtype="float16"), out, progress=False)


def test_the_first_format_has_the_bytes_of_a_run_with_it_alone(three, pico, texts, tmp_path):
    gptq = GPTQ(weights="int4", group_size=32)
    alone = compress.run(recipe_of(pico, texts, THREE[0], gptq, dtype="float16"), tmp_path / "alone", progress=False)
    assert checkpoint_of(three.folder) == checkpoint_of(alone.folder)
    assert three.measured.checkpoint_sha256 == alone.measured.checkpoint_sha256
    assert three.measured.reproduce.fingerprint == alone.measured.reproduce.fingerprint
    assert not alone.measured.formats and list(alone.folders) == [THREE[0]]


def test_all_formats_hold_the_same_codes_and_the_report_names_them(three):
    assert three.folders == {name: three.folder / ("" if name == THREE[0] else name) for name in THREE}
    first, found = weights(three.folder), three.measured.formats
    assert list(found) == THREE[1:]
    for name in THREE[1:]:
        other = weights(three.folders[name])
        assert first.keys() <= other.keys()
        assert all(torch.equal(first[layer], other[layer]) for layer in first), name
        assert found[name].files == {
            p.name: file_sha256(p) for p in three.folders[name].iterdir() if p.name != "README.md"
        }
        assert found[name].verified.layers == len(first)
    assert [(row.name, row.after) for row in found["gguf"].rounded] == [("model.embed_tokens", "int8, group 32")]
    assert found["awq"].rounded == [] and found["awq"].verified.own <= LOGITS
    report = (three.folder / "report.md").read_text()
    assert "model.embed\\_tokens rounded" in report or "model.embed_tokens rounded" in report
    assert "| awq | awq |" in report and "lossless" in report and found["awq"].checkpoint_sha256 in report
    assert (
        "<h2" in (three.folder / "report.html").read_text() and "Formats" in (three.folder / "report.html").read_text()
    )
    card = (three.folder / "README.md").read_text()
    assert "- gguf" in card and "in other formats" in card
    assert "without another calibration" in (three.folders["gguf"] / "README.md").read_text()
    assert "lossless" in repr(three)


def test_transformers_reads_the_converted_file(three):
    pytest.importorskip("gguf")
    assert three.measured.formats["gguf"].verified.transformers is not None


def test_the_plan_predicts_the_bytes_of_each_format(three, pico, texts):
    gptq = GPTQ(weights="int4", group_size=32)
    planned = plan(recipe_of(pico, texts, THREE, gptq, dtype="float16"))
    found = three.measured.formats
    assert planned.formats == {name: found[name].tensor_bytes for name in THREE[1:]}
    assert planned.to_json()["formats"] == planned.formats
    assert planned.written_bytes == planned.checkpoint_bytes + sum(planned.formats.values())


@pytest.mark.parametrize(
    ("formats", "passes", "message"),
    [
        (["compressed-tensors", "bitsandbytes"], (), r"save: format bitsandbytes: .*q_proj: .*Leave bitsandbytes out"),
        (["gguf", "compressed-tensors"], (), r"gguf rounds model.embed_tokens.weight .*list compressed-tensors before"),
        (["dense", "gguf"], (), r"format dense stores dequantized weights.*write gguf before dense"),
        (["mlx", "awq"], (), r"awq cannot store what format mlx makes of the layers; list awq before mlx"),
        (
            ["native", "awq"],
            (RTN(weights="int4", group_size=32, ignore="*.down_proj"), RTN(group_size=16, targets="*.down_proj")),
            r"save: format awq: format awq has one group size for all layers",
        ),
        (
            ["compressed-tensors", "gguf"],
            (RTN(weights="int8", group_size="channel", activations="int8"),),
            r"save: format gguf: .*cannot state that activations are rounded",
        ),
        (
            ["native", "gguf"],
            (RTN(allocate={"bits": 6, "choices": [{"weights": "nf4"}, {"weights": "int8"}]}, group_size=32),),
            r"passes\[0\] rtn: save: format gguf: .*nf4",
        ),
    ],
)
def test_the_plan_refuses_what_one_of_the_formats_cannot_hold(formats, passes, message, pico, texts, tmp_path):
    with pytest.raises(TargetError, match=message):
        plan(recipe_of(pico, texts, formats, *passes))
    with pytest.raises(TargetError, match=message):
        compress.run(recipe_of(pico, texts, formats, *passes), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").rglob("*.safetensors"))


def test_a_killed_run_continues_and_writes_nothing_twice(three, pico, texts, tmp_path, monkeypatch):
    gptq = GPTQ(weights="int4", group_size=32)
    recipe, out = recipe_of(pico, texts, THREE, gptq, dtype="float16"), tmp_path / "out"
    convert = conversions.convert

    def killed(model, conversion, storage):
        rows = convert(model, conversion, storage)
        if conversion.form.name == "awq":
            raise KeyboardInterrupt
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(conversions, "convert", killed)
        with pytest.raises(KeyboardInterrupt):
            compress.run(recipe, out, progress=False)
    assert not (out / "report.json").exists() and not (out / "awq").exists()
    times = {p: p.stat().st_mtime_ns for p in [*out.glob("*.safetensors"), out / "gguf" / "model.gguf"]}
    (out / ".compress" / "new" / "awq").mkdir(parents=True, exist_ok=True)
    (out / ".compress" / "new" / "awq" / "model-00001-of-00004.safetensors").write_bytes(b"part of a file")
    result = compress.run(recipe, out, progress=False)
    assert {p: p.stat().st_mtime_ns for p in times} == times
    assert {n: f.checkpoint_sha256 for n, f in result.measured.formats.items()} == {
        n: f.checkpoint_sha256 for n, f in three.measured.formats.items()
    }
    assert any("gguf is already complete" in entry.message for entry in result.journal.entries)


def test_a_format_is_added_to_a_finished_run_and_a_damaged_one_is_written_again(pico, texts, tmp_path):
    out = tmp_path / "out"
    compress.run(recipe_of(pico, texts, "native"), out, progress=False)
    times = {p: p.stat().st_mtime_ns for p in out.glob("*.safetensors")}
    result = compress.run(recipe_of(pico, texts, ["native", "awq", "gptq"]), out, progress=False)
    assert {p: p.stat().st_mtime_ns for p in times} == times and list(result.measured.formats) == ["awq", "gptq"]
    written = {name: digests(out / name) for name in ("awq", "gptq")}
    shard = next((out / "awq").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    other = {p: p.stat().st_mtime_ns for p in (out / "gptq").iterdir()}
    compress.run(recipe_of(pico, texts, ["native", "awq", "gptq"]), out, progress=False)
    assert {name: digests(out / name) for name in written} == written
    assert {p: p.stat().st_mtime_ns for p in other} == other


def test_scales_that_float16_cannot_hold_are_reported_with_their_error(pico_model, texts, tmp_path):
    with torch.no_grad():
        pico_model.model.layers[0].mlp.up_proj.weight.mul_(1e-6)  # scales below the normal numbers of float16
    pico_model.save_pretrained(tmp_path / "model")
    result = compress.run(
        recipe_of(str(tmp_path / "model"), texts, ["native", "awq"]), tmp_path / "out", progress=False
    )
    rows = {row.name: row.error for row in result.measured.formats["awq"].rounded}
    assert 0 < rows["model.layers.*.mlp.up_proj"] < 0.9


def test_a_format_that_fails_leaves_the_others_and_the_report(pico, texts, tmp_path, monkeypatch):
    real = conversions.write_checkpoint

    def full(opened, run, folder, dtype):
        if run.format.name == "awq":
            raise SaveError("awq: the disk is full")
        return real(opened, run, folder, dtype)

    monkeypatch.setattr(conversions, "write_checkpoint", full)
    out = tmp_path / "out"
    with pytest.raises(SaveError, match="the disk is full"):
        compress.run(recipe_of(pico, texts, ["native", "awq", "gptq"]), out, progress=False)
    report = json.loads((out / "report.json").read_text())
    assert list(report["formats"]) == ["gptq"] and "the disk is full" in report["failed"]["awq"]
    assert "failed: awq" in (out / "report.md").read_text()
    monkeypatch.setattr(conversions, "write_checkpoint", real)
    result = compress.run(recipe_of(pico, texts, ["native", "awq", "gptq"]), out, progress=False)
    assert sorted(result.measured.formats) == ["awq", "gptq"] and not result.measured.failed


def test_files_of_the_user_are_refused_before_the_run(pico, texts, tmp_path):
    out = tmp_path / "out"
    compress.run(recipe_of(pico, texts, "native"), out, progress=False)
    (out / "awq").mkdir()
    (out / "awq" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"awq/notes\.txt that the run did not write; move it"):
        compress.run(recipe_of(pico, texts, ["native", "awq"]), out, progress=False)
    assert (out / "awq" / "notes.txt").read_text() == "mine"
    assert not any((out / "awq").glob("*.safetensors"))


def test_overwriting_removes_the_folders_and_an_upload_has_them(pico, texts, tmp_path):
    out = tmp_path / "out"
    compress.run(recipe_of(pico, texts, ["native", "awq"]), out, progress=False)
    names = {operation.path_in_repo for operation in upload_operations(out)}
    assert {"config.json", "awq/config.json", "awq/README.md", "awq/SHA256SUMS"} <= names
    other = recipe_of(pico, texts, "native", RTN(weights="int8", group_size=32))
    compress.run(other, out, overwrite=True, progress=False)
    assert not (out / "awq").exists()


def test_the_command_writes_what_the_settings_of_python_do(pico, texts, tmp_path):
    settings = {
        "calibration.source": texts["calibration"],
        "calibration.sequences": 2,
        "calibration.length": 32,
        "eval": None,
    }
    named = settings | {"save.format": ["compressed-tensors", "awq"]}
    result = compress.quantize(pico, bits=4, group_size=32, out=tmp_path / "python", settings=named, progress=False)
    sets = [
        part for key, value in settings.items() for part in ("--set", f"{key}={'null' if value is None else value}")
    ]
    formats = ["--format", "compressed-tensors", "--format", "awq"]
    arguments = ["quantize", pico, "--bits", "4", "--group-size", "32", *formats, *sets]
    done = CliRunner().invoke(main, [*arguments, "-o", str(tmp_path / "command")])
    assert done.exit_code == 0, done.output
    assert "awq" in done.output and "scales of" in done.output
    for name in ("", "awq"):
        assert checkpoint_of(tmp_path / "command" / name) == checkpoint_of(tmp_path / "python" / name)
    assert result.measured.reproduce.recipe["save"]["format"] == ["compressed-tensors", "awq"]
    again = Recipe.from_yaml(tmp_path / "command" / "recipe.yaml")
    assert again.save.formats == ("compressed-tensors", "awq")


def test_block_types_of_the_ends_are_for_the_format_that_has_them(pico, texts, tmp_path):
    recipe = recipe_of(pico, texts, ["compressed-tensors", "gguf"], embedding="dense", head="dense")
    found = compress.run(recipe, tmp_path / "out", progress=False).measured.formats["gguf"]
    assert not any(row.before == "dense" for row in found.layers)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "names no format"),
        (["awq", "awq"], "format awq is listed twice"),
        (["awq", "ggfu"], "format 'ggfu' is not known; did you mean 'gguf'"),
        ("ggfu", "format 'ggfu' is not known; did you mean 'gguf'"),
    ],
)
def test_mistakes_in_the_list_are_errors_of_the_recipe(value, message):
    with pytest.raises(RecipeError, match=message):
        Save(format=value)


def test_options_of_one_format_need_a_format_that_has_them():
    with pytest.raises(RecipeError, match="embedding: Q4_0 is for format gguf"):
        Save(format=["compressed-tensors", "awq"], embedding="Q4_0")
    with pytest.raises(RecipeError, match="type 'Q4_9' is not known"):
        Save(format=["compressed-tensors", "gguf"], embedding="Q4_9")
    assert Save(format=["compressed-tensors"]).format == "compressed-tensors"
    with pytest.raises(RecipeError, match="'always' is not possible"):
        Save(format=["compressed-tensors", "native"], sparse="always")
