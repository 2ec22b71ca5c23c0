"""compress.quantize_folder: the codes of a run with rtn, without the class of the model, one tensor at a time."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import compress
from compress.checkpoint.containers.digests import damaged
from compress.checkpoint.containers.safetensors import Header
from compress.checkpoint.containers.safetensors_writing import write_streamed
from compress.checkpoint.sources.tensor_roles import TensorRoles
from compress.cli import main
from compress.errors import ModelError, OutputError, RecipeError, TargetError
from compress.pipeline.model_free import data_free_schemes
from compress.recipe.presets import preset, presets
from compress.recipe.starts import FITTED


def tensors_in(folder):
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def quantization(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


@pytest.fixture
def source(tmp_path):
    """source(tensors, **config) -> a folder with one file of tensors, of an architecture that nobody knows."""

    def write(tensors, files=1, **config):
        folder = tmp_path / "source"
        folder.mkdir()
        names = list(tensors)
        parts = [names[i::files] for i in range(files)]
        paths = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
        for path, part in zip(paths, parts, strict=True):
            save_file({name: tensors[name] for name in part}, folder / path, metadata={"format": "pt"})
        if files > 1:
            weight_map = {name: path for path, part in zip(paths, parts, strict=True) for name in part}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        values = {"model_type": "brand_new", "architectures": ["BrandNewForCausalLM"], "vocab_size": 96} | config
        (folder / "config.json").write_text(json.dumps(values))
        return folder

    return write


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.few(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["FP8-dynamic", "W8A16", "W4A16", "W4A16-asym", "MXFP4", "MXFP8", "NVFP4A16"])
def test_the_bits_are_those_of_a_run_with_rtn(scheme, dtype, pico, texts, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(pico, dtype=dtype)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(pico).save_pretrained(tmp_path / "model")
    ((_, options),) = preset(scheme).passes[-1].items()
    options = {name: value for name, value in options.items() if name not in FITTED}  # which needs text
    calibration = compress.Calibration(source=texts["calibration"], sequences=1, length=16)
    recipe = compress.Recipe(
        model=str(tmp_path / "model"), calibration=calibration, passes=[{"rtn": options}], eval=None
    )
    compress.run(recipe, tmp_path / "run", progress=False)
    result = compress.quantize_folder(tmp_path / "model", scheme, tmp_path / "free")
    ours, theirs = tensors_in(tmp_path / "free"), tensors_in(tmp_path / "run")
    assert ours.keys() == theirs.keys()
    names = [n for n in ours if scheme != "NVFP4A16" or "self_attn" not in n]  # o_proj shares the factor of q, k and v
    for name in names:
        assert ours[name].dtype == theirs[name].dtype and torch.equal(bits(ours[name]), bits(theirs[name])), name
    free, run = quantization(tmp_path / "free"), quantization(tmp_path / "run")
    assert set(free.pop("ignore")) == set(run.pop("ignore"))
    groups = [{k: v for k, v in g.items() if k != "targets"} for g in free.pop("config_groups").values()]
    expected = [{k: v for k, v in g.items() if k != "targets"} for g in run.pop("config_groups").values()]
    assert sorted(map(repr, groups)) == sorted(map(repr, expected)) and free == run
    assert result.tensor_bytes == sum(t.nbytes for t in ours.values())
    assert not damaged(tmp_path / "free")
    loaded, tokenizer = compress.load(tmp_path / "free")
    assert tokenizer is not None and torch.isfinite(loaded(torch.tensor([[1, 2, 3]])).logits).all()


def test_an_unknown_architecture_is_quantized_and_its_other_tensors_are_copied(source, tmp_path):
    tensors = {
        "model.embed_tokens.weight": random(96, 64),
        "model.layers.0.mixer.in_proj.weight": random(128, 64, seed=1),
        "model.layers.0.mixer.in_proj.bias": random(128),
        "model.layers.0.mixer.conv1d.weight": random(128, 1, 4),
        "model.layers.0.mixer.A_log": random(16, 8),
        "model.layers.0.norm.weight": random(64),
        "model.layers.0.mlp.gate.weight": random(8, 64),
        "model.layers.0.mlp.router.classifier.weight": random(8, 64),
        "model.layers.0.mlp.shared_expert_gate.weight": random(1, 64),
        "model.layers.0.mlp.experts.gate_up_proj": random(8, 64, 32),
        "model.layers.0.mlp.experts.down_proj": random(8, 16, 64),
        "model.layers.0.mlp.shared.0.up.weight": random(32, 64, seed=2, dtype=torch.bfloat16),
        "output.weight": random(96, 64),
        "counts": torch.arange(6).reshape(2, 3),
    }
    folder = source(tensors, files=3)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling_new.py").write_text("raise SystemExit('never run')\n")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"a": 1}')
    result = compress.quantize_folder(folder, "W8A8", tmp_path / "out")
    written, coded = tensors_in(tmp_path / "out"), {"model.layers.0.mixer.in_proj", "model.layers.0.mlp.shared.0.up"}
    assert {row.name for row in result.layers} == {"model.layers.*.mixer.in_proj", "model.layers.*.mlp.shared.*.up"}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module in coded:
            scale = written[f"{module}.weight_scale"]
            assert scale.dtype == tensor.dtype
            error = (written[f"{module}.weight"].float() * scale.float() - tensor.float()).abs()
            assert bool((error <= 0.502 * scale.float() + 1e-6).all())
        else:
            assert torch.equal(bits(written[name]), bits(tensor)), name
    ignored = quantization(tmp_path / "out")["ignore"]
    assert {"output", "model.layers.0.mlp.gate", "model.layers.0.mlp.router.classifier"} <= set(ignored)
    assert any("experts" in entry and entry.startswith("re:") for entry in ignored)
    assert quantization(tmp_path / "out")["config_groups"]["group_0"]["targets"] == ["Linear"]
    reasons = {name: reason for name, (reason, _) in result.unchanged.items()}
    assert reasons["model.layers.*.mlp.experts.down_proj"] == "a stack of matrices, such as experts"
    assert reasons["model.layers.*.mlp.gate.weight"] == "router or gate" and reasons["output.weight"] == "LM head"
    names = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert {"tokenizer.json", "modeling_new.py", "1_Pooling/config.json", "README.md", "SHA256SUMS"} <= names
    assert "pytorch_model.bin" not in names and len([n for n in names if n.endswith(".safetensors")]) == 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == written.keys() and not damaged(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Nothing was verified by running the model" in card and "a stack of matrices" in card
    with pytest.raises(ModelError, match="brand_new"):
        compress.load(tmp_path / "out")


def test_patterns_choose_the_linears(source, tmp_path):
    names = [f"layers.{i}.{kind}.weight" for i in range(2) for kind in ("up", "down")]
    folder = source({name: random(32, 32, seed=i) for i, name in enumerate(names)})
    chosen = compress.quantize_folder(
        folder, bits=8, group_size=32, out=tmp_path / "a", targets=["*.up"], ignore=["re:.*1.*"]
    )
    assert [(row.name, row.count) for row in chosen.layers] == [("layers.*.up", 1)]
    assert quantization(tmp_path / "a")["ignore"] == ["lm_head", r"re:.*\.down$", "layers.1.up"]
    with pytest.raises(TargetError, match=r"targets pattern '\*\.upp' matches no linear.*did you mean 'up'"):
        compress.quantize_folder(folder, "W8A16", tmp_path / "b", targets=["*.upp"])
    with pytest.raises(TargetError, match="select none"):
        compress.quantize_folder(folder, "W8A16", tmp_path / "b", ignore=["*"])
    assert not (tmp_path / "b").exists()


def test_weights_that_do_not_fit_groups_are_named_with_the_option_to_write(source, tmp_path):
    folder = source({"a.fit.weight": random(32, 128), "a.odd.weight": random(32, 37), "b.odd.weight": random(8, 30)})
    with pytest.raises(TargetError, match=r"a\.odd: .*37 inputs.*1 more weights do not fit.*ignore 'a.odd', 'b.odd'"):
        compress.quantize_folder(folder, "W4A16", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    result = compress.quantize_folder(folder, "W4A16", tmp_path / "out", ignore=["*.odd"])
    assert result.unchanged["a.odd.weight"] == ("left out by the patterns", 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["a.up.weight", "a.norm.weight"])
def test_weights_that_are_not_finite_are_an_error_and_leave_no_folder(name, value, source, tmp_path):
    tensors = {"a.up.weight": random(32, 32), "a.norm.weight": random(32)}
    tensors[name].view(-1)[5] = value
    with pytest.raises(ModelError, match=f"{name}.* holds 1 NaN or infinite"):
        compress.quantize_folder(source(tensors), "W8A16", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_names_with_odd_characters_survive(source, tmp_path):
    names = ['a "b".weight', "модель.слой 1.weight", "x\\y.weight", "p[0].(q)+.weight", "<m>|`c`.weight"]
    tensors = {name: random(32, 32, seed=i) for i, name in enumerate(names)}
    compress.quantize_folder(source(tensors), "FP8-dynamic", tmp_path / "out")
    written = tensors_in(tmp_path / "out")
    assert {f"{name}_scale" for name in names} <= written.keys()
    assert all(written[name].dtype == torch.float8_e4m3fn for name in names)


def test_folders_that_cannot_be_quantized(source, pico, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"config\.json: it is missing"):
        compress.quantize_folder(tmp_path / "empty", "W8A16", tmp_path / "out")
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds no .safetensors file"):
        compress.quantize_folder(tmp_path / "empty", "W8A16", tmp_path / "out")
    folder = source({"a.up.weight": random(32, 32)}, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ModelError, match="quantized already"):
        compress.quantize_folder(folder, "W8A16", tmp_path / "out")
    with pytest.raises(OutputError, match="name a new or empty folder"):
        compress.quantize_folder(pico, "W8A16", folder)
    with pytest.raises(ModelError, match=r"name a folder with safetensors"):
        compress.quantize_folder(tmp_path / "x.gguf", "W8A16", tmp_path / "out")


def test_transposed_weights_and_colliding_names_are_refused(source, tmp_path):
    folder = source(
        {"h.0.attn.c_attn.weight": random(32, 96, seed=3), "h.0.attn.c_attn.bias": random(96)}, vocab_size=7
    )
    with pytest.raises(ModelError, match=r"c_attn as \[in, out\] \(Conv1D\)"):
        compress.quantize_folder(folder, "W8A16", tmp_path / "out")
    shutil.rmtree(folder)
    folder = source({"a.up.weight": random(32, 32), "a.up.weight_scale": random(32)})
    with pytest.raises(ModelError, match="holds a.up.weight_scale, which codes are stored as"):
        compress.quantize_folder(folder, "W8A16", tmp_path / "out")


def test_a_folder_without_linears_names_what_it_holds(source, tmp_path):
    with pytest.raises(TargetError, match="matches no linear"):
        compress.quantize_folder(source({"embed_tokens.weight": random(96, 32)}), "W8A16", tmp_path / "out")


@pytest.mark.parametrize("scheme", sorted(set(presets()) - set(data_free_schemes())))
def test_schemes_that_need_data_are_refused_with_those_that_do_not(scheme, pico, tmp_path):
    with pytest.raises(RecipeError, match=rf"scheme {scheme}: without a model .*; use one of FP8-dynamic, MXFP4"):
        compress.quantize_folder(pico, scheme, tmp_path / "out")


def test_the_command_says_that_nothing_was_run_and_refuses_options_of_runs(pico, tmp_path):
    arguments = ["quantize", "--model-free", pico, "--scheme", "W8A16", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert "nothing was verified by running the model" in done.output and "embedding" in done.output
    shown = CliRunner().invoke(main, [*arguments[:-1], str(tmp_path / "json"), "--json"])
    assert json.loads(shown.stdout)["tensor_bytes"] == sum(t.nbytes for t in tensors_in(tmp_path / "out").values())
    for extra in (
        ["--eval", "none"],
        ["--set", "seed=1"],
        ["--format", "awq"],
        ["--memory", "1GB"],
        ["--overwrite"],
        ["--public"],
    ):
        refused = CliRunner().invoke(main, [*arguments, *extra])
        assert refused.exit_code == 2 and f"{extra[0]} has no effect with --model-free" in refused.output
    with pytest.raises(RecipeError, match="group_size: is an option of bits"):
        compress.quantize_folder(pico, "W8A16", group_size=32)
    alone = CliRunner().invoke(main, ["quantize", pico, "--scheme", "W8A16", "--ignore", "x"])
    assert alone.exit_code == 2 and "options of --model-free" in alone.output


SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple)
STORED = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda n: n != "__metadata__"), st.tuples(SHAPES, st.sampled_from(list(STORED)))
    )
)
def test_streamed_files_are_read_by_safetensors(tmp_path_factory, contents):
    path = tmp_path_factory.mktemp("streamed") / "x.safetensors"
    contents = {name: value for name, value in contents.items() if not any(0xD800 <= ord(c) < 0xE000 for c in name)}
    tensors = {
        name: random(*shape, seed=i).mul(50).to(torch.float32 if dtype == "BF16" else STORED[dtype]).to(STORED[dtype])
        for i, (name, (shape, dtype)) in enumerate(contents.items())
    }
    headers = {name: Header(dtype, shape) for name, (shape, dtype) in contents.items()}
    write_streamed(path, headers, reversed(list(tensors.items())))
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(bits(found[n]), bits(t)) and found[n].shape == t.shape for n, t in tensors.items())


def test_roles_follow_the_size_of_the_vocabulary_where_names_say_nothing():
    headers = {name: Header("BF16", shape) for name, shape in {"a.x.weight": (500, 8), "a.y.weight": (8, 8)}.items()}
    roles = TensorRoles.of(headers, {"text_config": {"vocab_size": 500}})
    assert roles.unchanged == {"a.x.weight": "LM head"} and list(roles.linears) == ["a.y"]
    packed = {"a.w.weight": Header("U8", (4, 4)), "a.f.weight": Header("F8_E4M3", (4, 4)), "a.v": Header("F32", (4, 4))}
    assert TensorRoles.of(packed, {}).unchanged == {"a.f.weight": "F8_E4M3 numbers", "a.v": "no weight of a linear"}


PEAK = """
import resource, sys
import compress
from compress.pipeline.model_free import quantize_folder
quantize_folder(sys.argv[1], "FP8-dynamic", sys.argv[3])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
quantize_folder(sys.argv[2], sys.argv[5], sys.argv[4])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.few(0, slow=1)
@pytest.mark.parametrize("scheme", ["FP8-dynamic", "W4A16", "NVFP4A16"])
def test_one_tensor_is_in_memory_at_a_time(scheme, source, tmp_path):
    small = tmp_path / "small"
    shutil.copytree(source({"a.up.weight": random(64, 128)}), small)
    shutil.rmtree(tmp_path / "source")
    size = 1024 * 2048 * 2
    folder = source({f"layers.{i}.up.weight": random(1024, 2048, seed=i, dtype=torch.bfloat16) for i in range(96)})
    command = [sys.executable, "-c", PEAK, small, folder, tmp_path / "warm", tmp_path / "out", scheme]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    grown = int(done.stdout) * 1024
    assert resource.RUSAGE_SELF == 0 and grown < 20 * size < 96 * size / 4, (
        f"{grown / 1e6:.0f} MB for {size / 1e6:.0f} MB"
    )
