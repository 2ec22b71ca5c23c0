"""The whole road on the pico model: recipe and Python agree, a killed run ends with the same bytes, readers agree."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tolerances import LOGITS

import compress
from compress.checkpoint.opening import open_model
from compress.errors import OutputError, RecipeError, TargetError
from compress.passes.contract.journal import Journal

PICO = Path(__file__).parents[1] / "pico" / "model"
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
    assert verified["layers"] == 21 and verified["own"] <= LOGITS
    assert verified["skipped"] or verified["transformers"] <= LOGITS


def test_the_mask_survives_quantization(finished):
    model, _ = compress.load(finished.folder)
    for result in finished.report["layers"]:
        if result["by"].endswith("wanda"):
            weight = model.get_submodule(result["layer"]).weight
            assert float((weight == 0).float().mean()) >= result["sparsity"] - 1e-6


@pytest.mark.slow
def test_a_killed_run_goes_on_at_the_next_block_and_ends_with_the_same_bytes(finished, tmp_path):
    recipe, out = tmp_path / "chain.yaml", tmp_path / "out"
    recipe.write_text(CHAIN)
    driver = textwrap.dedent(f"""
        import os, signal, torch, compress
        torch.set_num_threads({torch.get_num_threads()})  # the order of sums, and so the last bit, depends on it
        from compress.passes.contract.journal import Journal
        def dying(entry):
            if entry.kind == "block" and entry.figures["block"] == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        recipe = compress.Recipe.from_yaml({str(recipe)!r})
        compress.run(recipe, {str(out)!r}, journal=Journal(listeners=[dying]))
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
    with pytest.raises(OutputError, match="contains another run"):
        compress.run(other, finished.folder)


def test_files_that_are_no_run_are_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="was not written by compress"):
        compress.run(chain_in_python(), tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_order_is_checked_before_anything_loads():
    with pytest.raises(RecipeError, match=r"recipe:5:5: .*wanda: the layers are already quantized"):
        compress.Recipe.from_text("model: x\npasses:\n  - rtn\n  - wanda\n".replace("model: x\n", "model: x\n\n"))


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("model: x\npasses:\n  - gtpq\n", "did you mean 'gptq'"),
        ("model: x\npasses:\n  - gptq: {group_sise: 64}\n", "did you mean 'group_size'"),
        ("model: x\npasses:\n  - wanda: {sparsity: 1.5}\n", "less than 1"),
        ("model: x\npasses:\n  - wanda: {pattern: 2:4}\n", "quote N:M"),
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


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    [
        {"weights": "int8", "group_size": "channel", "activations": "int8"},
        {"weights": "int4", "group_size": 32, "symmetric": False},
        {"weights": "int3", "group_size": 32},
        {"weights": "int4", "group_size": 64, "scale": "mse"},
    ],
)
def test_every_kind_of_codes_reads_back(options, tmp_path):
    recipe = chain_in_python().model_copy(update={"passes": (compress.RTN(**options),)})
    report = compress.run(recipe, tmp_path).report
    assert report["verified"]["own"] <= LOGITS
    # codes of inputs may cross a border; compress.run compares with a wider tolerance
    assert "activations" in options or (report["verified"]["transformers"] or 0) <= LOGITS


def size_of_all_tensors(folder):
    shards = [load_file(path) for path in folder.glob("*.safetensors")]
    return sum(t.numel() * t.element_size() for shard in shards for t in shard.values())


NVFP4 = {"weights": "nvfp4", "activations": "nvfp4", "activation_scale": "static"}
FLOATS = [
    ("compressed-tensors", "bfloat16", {"weights": "fp8_e4m3", "group_size": "channel", "activations": "fp8_e4m3"}),
    ("compressed-tensors", "float32", {"weights": "fp8_e4m3", "group_size": "tensor"}),
    ("compressed-tensors", "bfloat16", {"weights": "nvfp4"}),
    ("compressed-tensors", "bfloat16", {"weights": "mxfp4", "activations": "mxfp4"}),
    ("compressed-tensors", "bfloat16", {"weights": "mxfp8", "activations": "mxfp8"}),
    ("compressed-tensors", "float32", {"weights": "mxfp8"}),
    ("compressed-tensors", "bfloat16", {"weights": "int4", "group_size": 32, "activations": "fp8_e4m3"}),
    ("compressed-tensors", "bfloat16", NVFP4),
    ("native", "bfloat16", NVFP4),
    ("compressed-tensors", "float32", {"weights": "mxfp4", "scale": "mse"}),
    ("compressed-tensors", "float16", {"weights": "mxfp4"}),
    ("native", "bfloat16", {"weights": "nf4_dq", "group_size": 50}),
    ("native", "bfloat16", {"weights": "nvfp4"}),
    ("native", "float16", {"weights": "fp4_e2m1_pow2", "group_size": 32}),
    ("native", "bfloat16", {"weights": "int4", "symmetric": False, "scale": "percentile"}),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("saved", "dtype", "options"), FLOATS, ids=str)
def test_every_kind_of_scale_reads_back_and_has_the_planned_size(saved, dtype, options, tmp_path):
    changed = {"passes": (compress.RTN(**options),), "dtype": dtype, "save": compress.Save(format=saved)}
    recipe = chain_in_python().model_copy(update=changed)
    report = compress.run(recipe, tmp_path).report
    assert report["verified"]["own"] <= LOGITS
    assert (report["verified"]["transformers"] is None) == (saved == "native")
    assert saved == "native" or "activations" in options or report["verified"]["transformers"] <= LOGITS
    assert compress.plan(recipe).checkpoint_bytes == size_of_all_tensors(tmp_path)
    assert compress.Recipe.from_yaml(tmp_path / "recipe.yaml") == recipe


def test_nvfp4_in_float32_is_compared_after_the_readers_rounding(tmp_path):
    recipe = chain_in_python().model_copy(update={"passes": (compress.RTN(weights="nvfp4"),)})
    result = compress.run(recipe, tmp_path)
    assert result.report["verified"]["own"] <= LOGITS
    assert result.report["verified"]["transformers"] > 0
    assert any("dequantizes these weights in bfloat16" in entry.message for entry in result.journal.entries)


@pytest.mark.parametrize("options", [NVFP4, {"weights": "mxfp8", "activations": "mxfp8"}], ids=str)
def test_transformers_runs_quantized_inputs_of_block_floats_in_bfloat16_only(options, tmp_path):
    recipe = chain_in_python().model_copy(update={"passes": (compress.RTN(**options),), "dtype": "float32"})
    verified = compress.run(recipe, tmp_path).report["verified"]
    assert verified["own"] <= LOGITS and verified["transformers"] is None
    assert verified["skipped"] == "transformers runs block floats with quantized activations in bfloat16 only"


@pytest.mark.parametrize(("dtype", "skipped"), [("bfloat16", None), ("float32", "in bfloat16 only")])
def test_4_bit_floats_beside_other_schemes(dtype, skipped, tmp_path):
    passes = (
        compress.RTN(weights="mxfp4", targets="*.mlp.*"),
        compress.RTN(weights="fp8_e4m3", group_size="channel", targets="*.self_attn.*"),
    )
    recipe = chain_in_python().model_copy(update={"passes": passes, "dtype": dtype})
    verified = compress.run(recipe, tmp_path).report["verified"]
    assert verified["own"] <= LOGITS
    if skipped is None:
        assert verified["transformers"] <= LOGITS
    else:
        assert verified["transformers"] is None and skipped in verified["skipped"]


@pytest.mark.parametrize("step", [compress.RTN(**NVFP4), compress.GPTQ(weights="nvfp4")], ids=lambda s: s.key())
def test_layers_that_read_the_same_input_share_a_global_scale(step, tmp_path):
    recipe = chain_in_python().model_copy(update={"passes": (step,)})
    compress.run(recipe, tmp_path)
    model, _ = compress.load(tmp_path)
    for index in range(3):
        layers = {
            name: float(model.get_submodule(f"model.layers.{index}.{name}").codes.shared)
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        }
        attention, mlp = list(layers.values())[:3], list(layers.values())[3:]
        assert len(set(attention)) == 1 == len(set(mlp))
        inputs = [model.get_submodule(f"model.layers.{index}.{name}").rounding for name in layers]
        shared = [rounding and float(rounding.shared) for rounding in inputs]
        assert len(set(shared[:3])) == 1 == len(set(shared[3:]))
        assert (shared[0] is None) == (step.activations == "none") and (step.activations == "none" or shared[0] > 1)
        if index == 0:
            block = load_file(PICO / "model.safetensors")
            names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
            assert attention[0] == pytest.approx(448 * 6 / max(float(block[name].abs().max()) for name in names))


def test_groups_that_became_zero_are_counted_in_the_journal(pico_model):
    journal = Journal()
    with torch.no_grad():
        pico_model.model.layers[1].mlp.up_proj.weight[3] *= 1e-12  # 8 groups of 16 columns
    compress.apply(pico_model, [compress.RTN(weights="nvfp4")], journal=journal)
    [entry] = [entry for entry in journal.entries if entry.kind == "fallback"]
    assert entry.where.endswith("rtn model.layers.1.mlp.up_proj")
    assert entry.message == "groups of weights became zero, because their scales are too small to store"
    assert entry.figures == {"groups": 8}


def test_apply_works_in_memory():
    opened = open_model(str(PICO))
    for block in opened.blocks:
        opened.weights.bring(block)
    model = compress.apply(opened.model, [compress.Wanda(pattern="2:4")], torch.arange(256).reshape(4, 64))
    weight = model.get_submodule("model.layers.0.mlp.up_proj").weight
    assert int(((weight != 0).reshape(-1, 4).sum(1) > 2).sum()) == 0
