"""The whole road on the pico model: recipe and Python agree, a killed run ends with the same bytes, readers agree."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import compress
from compress.errors import OutputError, RecipeError, TargetError

PICO = Path(__file__).parent / "pico" / "model"
CHAIN = f"""
model: {PICO}
calibration: {{source: embedded, sequences: 8, length: 64}}
passes:
  - wanda: {{sparsity: 0.3}}
  - smoothquant: {{alpha: 0.5}}
  - gptq: {{weights: int4, group_size: 32}}
eval: {{perplexity: [embedded], windows: 2, length: 64}}
"""


def chain_in_python():
    return compress.Recipe(
        model=str(PICO),
        calibration=compress.Calibration(source="embedded", sequences=8, length=64),
        passes=[
            compress.Wanda(sparsity=0.3),
            compress.SmoothQuant(alpha=0.5),
            compress.GPTQ(weights="int4", group_size=32),
        ],
        eval=compress.Evaluate(perplexity=("embedded",), windows=2, length=64),
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return compress.run(compress.Recipe.from_text(CHAIN), tmp_path_factory.mktemp("chain"))


def test_recipe_and_python_are_equal_and_give_equal_bytes(finished, tmp_path):
    assert chain_in_python() == compress.Recipe.from_text(CHAIN)
    again = compress.run(chain_in_python(), tmp_path)
    assert again.report["checkpoint_sha256"] == finished.report["checkpoint_sha256"]


def test_both_readers_give_the_computed_logits(finished):
    verified = finished.report["verified"]
    assert verified["layers"] == 21 and verified["own"] == 0
    assert verified["transformers"] == 0 or verified["skipped"]


def test_the_mask_survives_quantization(finished):
    model, _ = compress.load(finished.folder)
    for result in finished.report["layers"]:
        if result["by"].endswith("wanda"):
            weight = model.get_submodule(result["layer"]).weight
            assert float((weight == 0).float().mean()) >= result["sparsity"] - 1e-6


def test_a_killed_run_goes_on_at_the_next_block_and_ends_with_the_same_bytes(finished, tmp_path):
    recipe, out = tmp_path / "chain.yaml", tmp_path / "out"
    recipe.write_text(CHAIN)
    driver = textwrap.dedent(f"""
        import os, signal, torch, compress
        torch.set_num_threads({torch.get_num_threads()})  # the order of sums, and so the last bit, depends on it
        from compress.runner import Job
        write = Job._write_block
        def dying(self, block, results):
            write(self, block, results)
            if block.index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        Job._write_block = dying
        compress.run(compress.Recipe.from_yaml({str(recipe)!r}), {str(out)!r})
    """)
    killed = subprocess.run([sys.executable, "-c", driver], env=os.environ, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    times = {p.name: p.stat().st_mtime_ns for p in out.glob("*.safetensors")}
    assert len(times) == 2
    resumed = compress.run(compress.Recipe.from_yaml(recipe), out)
    assert {n: (out / n).stat().st_mtime_ns for n in times} == times
    assert resumed.report["checkpoint_sha256"] == finished.report["checkpoint_sha256"]


def test_another_run_is_not_overwritten_silently(finished):
    other = chain_in_python().model_copy(update={"seed": 1})
    with pytest.raises(OutputError, match="holds another run"):
        compress.run(other, finished.folder)


def test_files_that_are_no_run_are_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="no run of compress"):
        compress.run(chain_in_python(), tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_order_is_checked_before_anything_loads():
    with pytest.raises(RecipeError, match=r"recipe:5:5: .*wanda: the model is quantized"):
        compress.Recipe.from_text("model: x\npasses:\n  - rtn\n  - wanda\n".replace("model: x\n", "model: x\n\n"))


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("model: x\npasses:\n  - gtpq\n", "did you mean 'gptq'"),
        ("model: x\npasses:\n  - gptq: {group_sise: 64}\n", "did you mean 'group_size'"),
        ("model: x\npasses:\n  - wanda: {sparsity: 1.5}\n", "less than 1"),
        ("model: x\npasses:\n  - wanda: {pattern: 2:4}\n", "needs quotes"),
    ],
)
def test_mistakes_name_line_and_remedy(text, hint):
    with pytest.raises(RecipeError, match=hint) as raised:
        compress.Recipe.from_text(text)
    assert "recipe:3:" in str(raised.value)


def test_a_target_that_matches_nothing(tmp_path):
    recipe = chain_in_python().model_copy(update={"passes": (compress.RTN(targets="*.q_porj"),)})
    with pytest.raises(TargetError, match="matches no linear"):
        compress.run(recipe, tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "int8", "group_size": "channel", "activations": "int8"},
        {"weights": "int4", "group_size": 64, "symmetric": False},
        {"weights": "int3", "group_size": 32},
        {"weights": "int4", "group_size": 64, "scale": "mse"},
    ],
)
def test_every_kind_of_codes_reads_back(options, tmp_path):
    recipe = chain_in_python().model_copy(update={"passes": (compress.RTN(**options),)})
    report = compress.run(recipe, tmp_path).report
    assert report["verified"]["own"] == 0
    assert report["verified"]["transformers"] in (0, None)


def test_apply_works_in_memory():
    opened = compress.plan.__globals__["open_model"](str(PICO))
    for block in opened.blocks:
        opened.weights.bring(block)
    model = compress.apply(opened.model, [compress.Wanda(pattern="2:4")], torch.arange(256).reshape(4, 64))
    weight = model.get_submodule("model.layers.0.mlp.up_proj").weight
    assert int(((weight != 0).reshape(-1, 4).sum(1) > 2).sum()) == 0
