"""compress.quantize, prune, distill, evaluate and compare: what the commands of these names do, as Python functions."""

import json

import pytest
from click.testing import CliRunner

import compress
from compress.cli import main
from compress.passes.contract.journal import Journal
from compress.pipeline.finish import Result
from compress.recipe.evaluation import Evaluate

LITTLE = {"calibration.sequences": 2, "calibration.length": 32, "eval": None}


def sha256(folder):
    return json.loads((folder / "report.json").read_text())["checkpoint_sha256"]


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (lambda pico, out, **o: compress.quantize(pico, "W8A16", out, **o), ["quantize", "--scheme", "W8A16"]),
        (
            lambda pico, out, **o: compress.quantize(pico, bits=3, group_size=32, out=out, **o),
            ["quantize", "--bits", "3", "--group-size", "32"],
        ),
        (
            lambda pico, out, **o: compress.prune(pico, "wanda", out, pattern="2:4", **o),
            ["prune", "--method", "wanda", "--pattern", "2:4"],
        ),
    ],
)
def test_a_function_makes_the_bytes_of_its_command(call, arguments, pico, texts, tmp_path):
    settings = LITTLE | {"calibration.source": texts["calibration"]}
    result = call(pico, tmp_path / "function", settings=settings, progress=False)
    assert result.folder == tmp_path / "function" and result.measured.size.checkpoint_bytes > 0
    name, *options = arguments
    sets = [
        part for key, value in settings.items() for part in ("--set", f"{key}={'null' if value is None else value}")
    ]
    done = CliRunner().invoke(main, [name, pico, *options, *sets, "-o", str(tmp_path / "command")])
    assert done.exit_code == 0, done.output
    assert sha256(tmp_path / "command") == sha256(tmp_path / "function")


def test_distill_trains_on_a_teacher(pico, texts, tmp_path):
    settings = LITTLE | {"calibration.source": texts["calibration"], "passes.0.distill.steps": 1}
    result = compress.distill(pico, pico, tmp_path / "out", settings=settings, progress=False)
    assert list(result.measured.training) and "out" in repr(result) and "<table>" in result._repr_html_()


def test_the_default_folder_is_that_of_the_command(pico, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = LITTLE | {"calibration.source": texts["calibration"]}
    result = compress.quantize(pico, bits=8, settings=settings, progress=False)
    assert any((tmp_path / result.folder).glob("*.safetensors")) and result.folder.parts[0] == "out"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "scheme: write one, such as scheme='W4A16', or bits"),
        ({"scheme": "W4A16", "bits": 4}, "bits: replace a scheme; leave out bits=4, or scheme='W4A16'"),
        ({"scheme": "W4A16", "group_size": 32}, "group_size: is an option of bits"),
        ({"scheme": "W4A17"}, "W4A16"),
        ({"bits": 4, "settings": {"passes.0.gptq.dampng": 1}}, "settings passes.0.gptq.dampng: .*damping"),
        ({"bits": 4, "settings": {"passes.1.gptq.damping": 1}}, "settings passes.1.gptq.damping: "),
    ],
)
def test_a_mistake_is_named_as_python_spells_it(arguments, message, pico):
    with pytest.raises(compress.CompressError, match=message):
        compress.quantize(pico, **arguments)


def test_a_pass_that_does_not_prune_is_refused(pico):
    with pytest.raises(compress.CompressError, match="removes no weights"):
        compress.prune(pico, "gptq")


def test_models_are_measured_and_compared(pico, texts, tmp_path):
    settings = LITTLE | {"calibration.source": texts["calibration"]}
    out = compress.quantize(pico, bits=2, group_size=32, out=tmp_path / "out", settings=settings, progress=False).folder
    asked = Evaluate(perplexity=[texts["test"]], windows=2, length=64)
    alone = compress.evaluate(pico, asked, work=None)
    assert [model.source for model in alone.models] == [pico] and "perplexity" in repr(alone)
    compared = compress.compare([out], pico, asked, work=tmp_path / "work")
    [variant] = compared.models
    assert compared.comparison is not None and variant.loss > 0 and variant.source == str(out)
    assert variant.source in repr(compared) and "<table>" in compared._repr_html_()
    with pytest.raises(compress.CompressError, match="nothing is compared with the base"):
        compress.compare([pico], measure=True)


@pytest.mark.parametrize("function", [compress.evaluate, compress.compare])
def test_no_model_is_named(function):
    with pytest.raises(compress.CompressError, match="models: name at least one"):
        function([])


def test_one_folder_is_compared_by_its_path(pico, texts, tmp_path):
    settings = {"calibration.sequences": 2, "calibration.length": 32, "eval.perplexity": [texts["test"]]}
    settings |= {"calibration.source": texts["calibration"], "eval.windows": 2, "eval.length": 32}
    out = compress.quantize(pico, "W8A16", tmp_path / "out", settings=settings, progress=False).folder
    assert [variant.source for variant in compress.compare(out).models] == [str(out)]


def test_a_result_without_its_report_is_shown(tmp_path):
    result = Result(tmp_path / "out", {}, Journal())
    assert str(tmp_path / "out") in repr(result) and "<table>" in result._repr_html_()


def test_sensitivities_are_shown(pico, texts, tmp_path):
    shown = repr(compress.sensitivity(pico, ["int2"], text=texts["test"], windows=2, length=32))
    assert "kind of layer" in shown and len(shown.splitlines()) <= 30
