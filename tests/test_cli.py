"""The command line: what it prints, its exit codes, one line for a mistake, a bar on a terminal, Ctrl-C and again."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

import compress
from compress import cli
from compress.cli.options import settings_of
from compress.errors import NumericError, RecipeError
from compress.passes import PASSES
from compress.recipe.presets import presets
from compress.recipe.schema import DType

RTN = "- rtn: {group_size: 32}"


@pytest.fixture
def spell(pico, texts, tmp_path):
    """spell(passes in YAML, **top-level keys) -> a recipe file for the pico model."""

    def write(passes: str = RTN, **more: str) -> str:
        keys = {
            "model": pico,
            "calibration": f"{{source: {texts['calibration']}, sequences: null, length: null}}",
            "eval": f"{{perplexity: [{texts['test']}], windows: 2, length: null}}",
            "save": "{verify: own}",
            **more,
        }
        lines = [f"{key}: {value}" for key, value in keys.items()]
        path = tmp_path / "r.yaml"
        path.write_text("\n".join([*lines, "passes:", *("  " + p for p in passes.splitlines())]) + "\n")
        return str(path)

    return write


def call(*args):
    """compress ARGS; returns click's result, whose stdout and stderr are apart."""
    return CliRunner().invoke(cli.main, [str(a) for a in args])


# ---- the environment ----


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
        ({"GOMP_SPINCOUNT": "infinite"}, {"GOMP_SPINCOUNT": "infinite"}),
    ],
)
def test_waiting_threads_do_not_spin_unless_the_user_says_so(monkeypatch, given, expected):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert call("schemes").exit_code == 0
    assert {name: os.environ[name] for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if name in os.environ} == expected


@pytest.mark.slow
def test_the_runtime_reads_what_the_command_line_sets(pico):
    env = {name: v for name, v in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-m", "compress", "passes", "rtn"]
    done = subprocess.run(command, env={**env, "OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True)
    if "GOMP_" not in done.stderr:
        pytest.skip("this torch does not use libgomp")
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr


# ---- the commands ----


def test_run_prints_the_evidence(spell, tmp_path):
    out = tmp_path / "out"
    done = call("run", spell(), "--out", out)
    assert done.exit_code == 0, done.output
    report = json.loads((out / "report.json").read_text())
    text = " ".join(done.stdout.split())
    assert f"checkpoint sha256: {report['checkpoint_sha256']}" in text and "report.md" in text
    assert "codes of 21 layers read back bit for bit" in text
    assert f"{report['perplexity'][0]['compressed']['perplexity']:.2f}" in text
    assert "model.layers.0 passes[0] rtn 0/3" in " ".join(done.stderr.split())  # no terminal: plain lines
    assert "\x1b" not in done.output


def test_without_out_the_folder_is_named_after_the_recipe(spell, tmp_path, monkeypatch):
    path = spell()
    monkeypatch.chdir(tmp_path)
    assert call("run", path).exit_code == 0
    assert (tmp_path / "out" / "r" / "config.json").exists()


def test_the_model_can_be_overridden(spell, tiny_folder, texts, tmp_path):
    texts_of_tiny = {
        "calibration": f"{{source: {texts['tiny']}, sequences: null, length: null}}",
        "eval": f"{{perplexity: [{texts['tiny']}], windows: 2, length: null}}",
    }
    path, other = spell("- rtn: {group_size: 16}", **texts_of_tiny), tiny_folder("llama")
    assert "32 x 32" in call("plan", path, "--model", other).stdout
    assert call("run", path, "--model", other, "-o", tmp_path / "out").exit_code == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["model"]["source"] == Path(other).name
    assert (tmp_path / "out" / report["reproduce"]["recipe"]["model"]).resolve() == Path(other).resolve()
    wrong = call("plan", path, "--model", "/no/such")
    assert (wrong.exit_code, wrong.stderr.count("\n")) == (2, 1) and "no folder /no/such" in wrong.stderr


def test_plan_all_lists_every_module_and_writes_nothing(spell, tmp_path):
    path = spell("- rtn: {group_size: 32, targets: '*.mlp.*'}")
    before = sorted(tmp_path.iterdir())
    done = call("plan", path, "--all")
    planned = compress.plan(compress.Recipe.from_yaml(path))
    text = "".join(done.stdout.replace("│", " ").split())
    assert done.exit_code == 0 and sorted(tmp_path.iterdir()) == before
    sizes = [f"{size / 1e6:.3g}MB" for size in (planned.checkpoint_bytes, planned.dense_bytes, planned.memory_bytes)]
    assert f"checkpoint:{sizes[0]}oftensors({sizes[1]}dense)" in text
    assert f"memory:needsabout0.6GB({sizes[2]}oftensors,600MBforPythonandtorch)" in text
    assert text.count("passes[0]rtn") == 9 + 1 and text.count("unchanged") == 12  # and its memory


def test_plan_groups_modules_of_one_kind_and_json_has_every_module(spell):
    path = spell("- rtn: {group_size: 32, targets: '*.mlp.*'}")
    text = call("plan", path).stdout
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    counts = [row[1] for row in rows if row[1]]
    assert counts == ["3"] * 7  # 21 linears of 3 blocks are 7 kinds
    assert "model.layers.*.self_attn.q_proj" in "".join(row[0] for row in rows)
    planned = compress.plan(compress.Recipe.from_yaml(path))
    assert json.loads(call("plan", path, "--json").stdout) == planned.to_json()
    assert len(planned.to_json()["layers"]) == 21 and sum(g.count for g in planned.groups()) == 21
    assert sum(g.size_bytes for g in planned.groups()) == sum(layer.size_bytes for layer in planned.layers)


def test_eval_agrees_with_the_report(spell, texts, tmp_path):
    out = tmp_path / "out"
    assert call("run", spell(), "--out", out).exit_code == 0
    report = json.loads((out / "report.json").read_text())
    done = call("eval", out, "--text", texts["test"], "--windows", 2, "--length", 64)
    assert done.exit_code == 0
    assert f"{report['perplexity'][0]['compressed']['perplexity']:.4f}" in done.stdout and "next tokens" in done.stdout


def test_passes_is_a_list_with_a_line_for_each():
    lines = call("passes").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(PASSES)
    assert all(line.endswith(".") and len(line.split()) > 3 for line in lines)


def test_the_page_of_a_pass_has_every_option_with_its_default():
    for key, step in PASSES.items():
        page = call("passes", key).stdout
        assert page.startswith(f"{key}\n") and step.paper in page and f"\n  compress run {key} --model MODEL\n" in page
        assert [n for n, f in step.model_fields.items() if f"\n  {f.alias or n} = " not in page] == []
    page = call("passes", "gptq").stdout
    assert 'act_order = "static"' in page and "damping = 0.01" in page and "\nschemes:\n" in page and "W4A16" in page
    fails(call("passes", "gtpq"), 2, "pass 'gtpq' is not known; did you mean 'gptq'?")


def test_schemes_are_listed_with_a_line_for_each():
    names = [line.split()[0] for line in call("schemes").stdout.splitlines()]
    assert names == list(presets()) and {"W8A8", "W4A16", "FP8-dynamic"} <= set(names)
    shown = call("quantize", "--help").stdout
    assert all(name in shown for name in names)


def test_version_and_help():
    assert compress.__version__ in call("--version").stdout
    shown = call("--help").stdout
    for command in cli.main.commands:
        assert call(command, "--help").exit_code == 0 and f"  {command} " in shown


# ---- one line is enough ----

LITTLE = ["--set", "calibration.sequences=4", "--set", "calibration.length=64", "--eval", "none"]


def test_quantize_runs_a_scheme_and_writes_its_recipe(pico, tmp_path):
    out = tmp_path / "out"
    done = call("quantize", pico, "--scheme", "w8a16", "-o", out, *LITTLE, "--set", "passes.0.gptq.scale=absmax")
    assert done.exit_code == 0, done.output
    written = compress.Recipe.from_yaml(out / "recipe.yaml")
    assert written.eval is None and written.calibration.sequences == 4
    wanted = compress.GPTQ(weights="int8", group_size="channel", act_order="static", scale="absmax")
    assert written.passes == (wanted,)
    again = call("run", out / "recipe.yaml", "-o", out)  # the recipe alone is the same run
    assert again.exit_code == 0 and "sha256" in again.stdout
    report = json.loads((out / "report.json").read_text())
    assert report["perplexity"] is None and report["checkpoint_sha256"] in done.stdout


def test_without_o_a_command_names_its_folder(pico, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr("compress.pipeline.run.run", lambda recipe, *rest: seen.append((recipe, *rest)) or Empty)
    assert call("quantize", pico, "--scheme", "FP8_DYNAMIC").exit_code == 0
    assert call("prune", pico, "--pattern", "2:4").exit_code == 0
    assert call("prune", pico, "--sparsity", "0.4", "--method", "wanda").exit_code == 0
    assert call("distill", pico, "--teacher", pico, "--seed", "3").exit_code == 2  # click: no such option
    assert call("distill", pico, "--teacher", pico, "--set", "seed=3").exit_code == 0
    assert [folder.as_posix() for _, folder, *_ in seen] == [
        "out/model-FP8_DYNAMIC",
        "out/model-sparsegpt-2-4",
        "out/model-wanda-0.4",
        "out/model-distill",
    ]
    rounded, structured, pruned, trained = [recipe for recipe, *_ in seen]
    assert rounded.passes[0].weights == "fp8_e4m3" and rounded.save.format == "compressed-tensors"
    assert structured.passes == (compress.SparseGPT(pattern="2:4"),) and structured.save.format == "dense"
    assert pruned.passes == (compress.Wanda(sparsity=0.4),)
    assert trained.passes == (compress.Distill(teacher=pico),) and trained.seed == 3


class Empty:
    report: dict = {}


PRUNING = ["alps", "gmp", "iterative_pruning", "magnitude", "ria", "sparsegpt", "sr_ste", "top_kast", "wanda"]


@pytest.mark.parametrize("method", sorted(set(PASSES) - set(PRUNING)))
def test_prune_accepts_only_passes_that_prune(pico, method, tmp_path):
    done = call("prune", pico, "--method", method, "--sparsity", 0.4, "-o", tmp_path / "out")
    assert done.exit_code == 2 and f"error: method {method}: this pass removes no weights" in done.stderr
    assert f"use one of {', '.join(PRUNING)}, or" in done.stderr and f"compress passes {method}" in done.stderr
    with pytest.raises(RecipeError, match=f"^method {method}: this pass removes no weights"):
        compress.prune(pico, method, tmp_path / "out", sparsity=0.4)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", PRUNING)
def test_a_pass_that_prunes_gets_the_sparsity_and_the_pattern(pico, method, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("compress.pipeline.run.run", lambda recipe, *rest: seen.append(recipe.passes) or Empty)
    asked = ("prune", pico, "--method", method, "-o", tmp_path / "out")
    done = [call(*asked, *option) for option in (("--sparsity", 0.4), ("--pattern", "2:4"))]
    pruning = PASSES[method]
    if method == "sr_ste":  # it trains N:M patterns alone
        assert done[0].exit_code == 2 and "pattern 2:4 fixes sparsity 0.5; leave sparsity out" in done[0].stderr
        assert done[1].exit_code == 0 and seen == [(pruning(pattern="2:4"),)]
    else:
        assert [one.exit_code for one in done] == [0, 0]
        assert seen == [(pruning(sparsity=0.4),), (pruning(pattern="2:4"),)]


def test_a_limit_of_quality_ends_a_command_with_3(pico, tmp_path):
    arguments = ["prune", pico, "--method", "magnitude", "--sparsity", "0.9", "-o", tmp_path / "pruned", *LITTLE[:-2]]
    arguments += ["--set", "eval.windows=2", "--set", "eval.length=64"]
    done = call(*arguments, "--fail-if", "kl=0.0001")
    assert done.exit_code == 3 and "is above fail_if kl: 0.0001" in done.stderr and (tmp_path / "pruned").is_dir()
    wrong = call(*arguments, "--fail-if", "kl")
    assert wrong.exit_code == 2 and "--fail-if kl: write NAME=LIMIT" in wrong.stderr
    unmeasured = call(*arguments, "--fail-if", "kl=1", "--eval", "none")
    assert unmeasured.exit_code == 2 and "has no effect with --eval none" in unmeasured.stderr
    unknown = call(*arguments, "--fail-if", "kll=1")
    assert unknown.exit_code == 2 and "kll" in unknown.stderr


def test_prune_and_distill_run(pico, tmp_path):
    done = call("prune", pico, "--pattern", "2:4", "--method", "magnitude", "-o", tmp_path / "pruned", *LITTLE)
    assert done.exit_code == 0, done.output
    weight = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "pruned").get_submodule("model.layers.0.mlp.up_proj").weight
    )
    assert (weight.reshape(-1, 4) == 0).sum(1).min() == 2
    student = ["--set", "passes.0.distill.steps=1", "--set", "passes.0.distill.top_k=null"]
    done = call("distill", tmp_path / "pruned", "--teacher", pico, "-o", tmp_path / "student", *LITTLE, *student)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "student" / "README.md").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--scheme", "Q4_K_X"], "scheme Q4_K_X: this type of GGUF files is not written; use one of IQ2_S, IQ2_XS, "),
        (["--scheme", "W4A61"], "scheme 'W4A61' is not known; did you mean 'W4A16'?"),
        (["--scheme", "W8A8", "--dtype", "float23"], "--dtype float23: dtype: input should be 'auto'"),
        (
            ["--scheme", "W8A8", "--device", "gpu"],
            "--device gpu: device: device 'gpu' is not known; use auto, cpu, cuda",
        ),
        (
            ["--scheme", "W8A8", "--set", "passes.0.gptq.x=1"],
            "--set passes.0.gptq.x=1: passes.0 is smoothquant, not gptq",
        ),
        (["--scheme", "W8A8", "--set", "passes.1.gptq.group_sise=64"], "unknown option; did you mean 'group_size'?"),
        (["--scheme", "W8A8", "--calibration", "none.txt"], "cannot read none.txt"),
    ],
)
def test_a_mistake_in_one_line_is_one_line(args, message, pico):
    fails(call("quantize", pico, *args), 2, message)


def test_options_replace_the_values_of_a_recipe(spell, texts):
    path = spell("- rtn: {group_size: 32}")
    small = call("plan", path, "--json", "--set", "passes.0.rtn.weights=int2", "--dtype", "bfloat16")
    assert {layer["stored_as"] for layer in json.loads(small.stdout)["layers"]} == {"int2, group 32"}
    fails(call("plan", path, "--set", "passes.0.rtn.weigths=int2"), 2, "unknown option; did you mean 'weights'?")
    for args, key, value in [
        (["--calibration", "other.npy"], "calibration", "other.npy"),
        (["--eval", "a.txt", "--eval", "b.txt"], "eval", ("a.txt", "b.txt")),
        (["--eval", "none"], "eval", None),
    ]:
        asked = compress.Recipe.from_yaml(path, settings_of((), tuple(args[1::2]))) if key == "eval" else None
        asked = asked or compress.Recipe.from_yaml(path, settings_of((), (), calibration=value))
        found = getattr(asked, key)
        assert value == (found and (found.perplexity if key == "eval" else found.source))


@pytest.mark.parametrize(("share", "value"), [("0.5", 0.5), ("auto", "auto")])
def test_a_share_of_sampled_text_is_an_option(share, value):
    text = "model: m\npasses: [gptq]\ncalibration: {source: self, temperature: 0.7, sequences: 8}\n"
    settings = settings_of((), (), calibration="mixed", self_share=share)
    assert compress.Recipe.from_text(text, settings=settings).calibration.self_share == value


def test_a_model_can_be_left_to_the_command_line(pico, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("passes: [{scheme: FP8-dynamic}]\n")
    assert call("plan", path, "--model", pico).exit_code == 0
    fails(call("plan", path), 2, "r.yaml:1:1: model: is missing")


def test_generate_answers(pico, tiny_folder):
    done = call("generate", pico, "The with statement is used to", "--tokens", 8)
    assert done.exit_code == 0 and done.stdout.strip()
    assert done.stdout == call("generate", pico, "The with statement is used to", "--tokens", 8, "--plain").stdout
    fails(call("generate", pico, ""), 2, "prompt: is empty")
    fails(call("generate", pico, "x", "--activations", "int8"), 2, "the model has no layers of integer codes")
    fails(call("generate", tiny_folder("llama"), "x"), 2, "has no tokenizer; add its tokenizer files")
    fails(call("generate", tiny_folder("bert"), "x"), 2, "predicts masked tokens and generates no text")


def test_push_to_hub_asks_for_the_login_first_and_uploads_last(spell, tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr("compress.pipeline.publish.check_login", lambda repository, private: order.append(private))
    monkeypatch.setattr("compress.pipeline.publish.push_to_hub", lambda *args: order.append(args) or "URL")
    out = tmp_path / "out"
    done = call("run", spell(), "-o", out, "--push-to-hub", "me/small", "--eval", "none")
    assert done.exit_code == 0 and "uploaded: URL" in done.stdout
    assert order == [True, (out, "me/small", True)]
    done = call("run", spell(), "-o", out, "--push-to-hub", "me/small", "--public", "--eval", "none")
    assert done.exit_code == 0 and order[2:] == [False, (out, "me/small", False)]
    assert "no effect without --push-to-hub" in call("run", spell(), "-o", out, "--public").stderr


def test_upload_checks_the_place_first_and_uploads_last(spell, tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr("compress.pipeline.upload.check_place", lambda *args: order.append(args))
    monkeypatch.setattr("compress.pipeline.upload.upload", lambda *args: order.append(args) or args[1])
    out = tmp_path / "out"
    done = call("run", spell(), "-o", out, "--upload", "memory://small", "--eval", "none")
    assert done.exit_code == 0 and "uploaded: memory://small" in done.stdout
    assert order == [("memory://small", out, False), (out, "memory://small", False)]


# ---- what goes wrong ----


def fails(result, code: int, message: str):
    """One line on standard error, nothing on standard output."""
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert message in result.stderr


def test_a_mistake_is_one_line_and_exit_code_2(spell):
    fails(call("run", spell("- rtn: {group_sise: 3}")), 2, "r.yaml:6:11: passes[0] rtn group_sise: unknown option")
    fails(call("plan", "none.yaml"), 2, "none.yaml: cannot be read")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (NumericError("model.layers.1: NaN"), 1, "model.layers.1: NaN"),
        (compress.CompressError("one\n  two"), 1, "error: one two"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left on device"),
        (KeyboardInterrupt(), 130, "interrupted; run the same command again to resume"),
    ],
)
def test_a_failure_is_one_line_and_its_exit_code(error, code, message, spell, monkeypatch):
    def fail(*_):
        raise error

    path = spell()
    monkeypatch.setattr("compress.pipeline.run.run", fail)
    result = call("run", path)
    result_line = result.stderr.lstrip("\n")  # click ends the line of ^C
    assert (result.exit_code, result.stdout, result_line.count("\n")) == (code, "", 1)
    assert message in result_line
    for place in (["--debug", "run", path], ["run", path, "--debug"]):
        shown = call(*place)
        assert shown.exit_code == code
        assert "Traceback (most recent call last)" in shown.stderr and type(error).__name__ in shown.stderr


def test_a_bug_is_one_line_with_its_type_and_a_request_to_report_it(spell, monkeypatch, tmp_path):
    def solve(*_):
        raise ZeroDivisionError("division\n by zero")

    path, out = spell(), tmp_path / "out"
    monkeypatch.setattr(PASSES["rtn"], "solve", solve)
    result = call("run", path, "--out", out)
    line = result.stderr.splitlines()[-1]
    assert (result.exit_code, result.stdout) == (1, "") and "Traceback" not in result.stderr
    assert line.startswith("error: unexpected ZeroDivisionError: division by zero; ")
    assert "--debug" in line and "report it as a bug" in line
    shown = call("--debug", "run", path, "--out", out)
    assert shown.exit_code == 1 and "Traceback (most recent call last)" in shown.stderr and "in solve" in shown.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["rnu"], "No such command 'rnu'"),
        (["run"], "Missing argument 'RECIPE'"),
        (["run", "a.yaml", "--ot", "x"], "No such option"),
        (["eval", "x", "--windows", "0"], "Invalid value for '--windows'"),
        (["eval", "x", "--length", "1"], "Invalid value for '--length'"),
    ],
)
def test_commands_that_are_none(args, message):
    result = call(*args)
    assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dtype", "float23"], "dtype 'float23' is not known; did you mean 'float32'?"),
        (["--text", "embeded"], "unknown source 'embeded'; did you mean 'embedded'"),
        (["--text", "none.txt"], "cannot read none.txt"),
        (["--length", "513"], "length 513 exceeds the model's 512 positions"),
    ],
)
def test_what_eval_cannot_do(args, message, pico):
    fails(call("eval", pico, *args), 2, message)


def test_eval_checks_ids_against_the_vocabulary_and_the_tokenizer(tiny_folder, texts):
    narrow = ["--windows", 2, "--length", 24]
    fails(call("eval", tiny_folder("llama"), "--text", texts["test"], *narrow), 2, "the model's vocabulary has 64")
    fails(call("eval", tiny_folder("llama")), 2, "the model has no tokenizer; use token ids in a .npy file")


def test_every_dtype_of_a_recipe_can_be_evaluated_in(pico, texts):
    for dtype in get_args(DType):
        done = call("eval", pico, "--dtype", dtype, "--text", texts["test"], "--windows", 1, "--length", 16)
        assert done.exit_code == 0, done.stderr


# ---- Ctrl-C ----


def test_ctrl_c_that_a_library_swallows_ends_the_run_at_its_next_step(spell, monkeypatch):
    before, steps = signal.getsignal(signal.SIGINT), []

    def run(recipe, folder, overwrite, journal, *rest):
        with suppress(KeyboardInterrupt):  # as where an exception in a callback is printed and forgotten
            signal.raise_signal(signal.SIGINT)
        for step in range(3):
            steps.append(step)
            journal.add("progress", "x", "working", done=step, of=3)

    path = spell()
    monkeypatch.setattr("compress.pipeline.run.run", run)
    result = call("run", path)
    assert result.exit_code == 130 and "interrupted; run the same command again" in result.stderr
    assert steps == [0] and signal.getsignal(signal.SIGINT) is before


def test_a_launcher_that_terminates_the_run_is_told_how_to_resume(spell, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)

    def run(recipe, folder, overwrite, journal, *rest):
        signal.raise_signal(signal.SIGTERM)

    path = spell()
    monkeypatch.setattr("compress.pipeline.run.run", run)
    result = call("run", path)
    assert result.exit_code == 1 and "error: terminated" in result.stderr
    assert "run the same command again to resume" in result.stderr and signal.getsignal(signal.SIGTERM) is before


def test_a_terminated_evaluation_is_no_failed_one(spell, tmp_path, monkeypatch):
    """Else the run would go on, and its report would have a reason that says nothing of the model."""

    def terminated(*args):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("compress.pipeline.finish.measure_all", terminated)
    result = call("run", spell(), "--out", tmp_path / "out")
    assert result.exit_code == 1 and "error: terminated" in result.stderr
    assert not (tmp_path / "out" / "report.json").exists()
    monkeypatch.undo()
    assert call("run", spell(), "--out", tmp_path / "out").exit_code == 0


# ---- real processes ----


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_ctrl_c_on_a_terminal_and_the_same_command_again(spell, tmp_path):
    import fcntl
    import pty
    import termios

    slow = "{source: embedded, sequences: 24, length: 512}"  # half a second per block
    path, out = spell("- gptq: {group_size: 32}", calibration=slow), tmp_path / "out"
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "compress", "run", path, "--out", str(out)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"},
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    shown, pressed, manifest = b"", False, out / ".compress" / "manifest.json"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            shown += os.read(master, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not pressed and manifest.exists() and b"model.layers.0" in manifest.read_bytes():
            os.write(master, b"\x03")
            pressed = True
    os.close(master)
    assert process.wait(timeout=30) == 130, shown.decode()
    text = shown.decode()
    assert "━" in text and "\x1b[" in text  # the bar
    assert "error: interrupted; run the same command again to resume" in text and "Traceback" not in text
    assert not (out / "config.json").exists() and not list(out.glob("*.part"))
    done = {p: p.stat().st_mtime_ns for p in out.glob("*.safetensors")}
    assert 1 <= len(done) < 4
    again = call("run", path, "--out", out)
    assert again.exit_code == 0 and (out / "report.json").exists()
    assert "model.layers.0  restored" in again.stderr
    assert {p: p.stat().st_mtime_ns for p in done} == done


@pytest.mark.parametrize("args", [["run", "--help"], ["quantize", "--help"], ["schemes"]])
def test_help_and_schemes_import_nothing_slow(args):
    slow = "{'torch', 'transformers', 'pydantic', 'numpy', 'rich', 'huggingface_hub'}"
    code = f"import sys, compress.cli as c\ntry: c.main({args})\nfinally: assert not {slow} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert (done.returncode, done.stderr) == (0, "") and done.stdout


def test_a_plan_imports_no_library_that_it_does_not_need(pico, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(f"model: {pico}\npasses: [{{scheme: W4A16}}]\n")
    unneeded = "{'datasets', 'pandas', 'pyarrow', 'lm_eval', 'compressed_tensors', 'compress.pipeline.run'}"
    code = f"import sys, compress.cli as c\ntry: c.main(['plan', {str(path)!r}])\nfinally: print(*{unneeded} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "", done.stdout + done.stderr
    assert done.stderr == ""
