"""compress.export to ONNX Runtime GenAI, with a stand-in for its model builder and runtime.

The stand-in keeps the folder that it is given, and computes logits with `compress`; `make conformance OWNER=onnx` runs
the programs themselves.
"""

import json
import re
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

import compress
from compress.checkpoint.inspection import inspect
from compress.cli import main
from compress.errors import ModelError, TargetError, UserError, VerificationError
from compress.passes.prune.magnitude import Magnitude
from compress.passes.quantize.gptq import GPTQ
from compress.passes.quantize.rtn import RTN

RUNTIME = """
    from pathlib import Path

    import compress
    import torch


    class Model:
        def __init__(self, folder):
            self.model, _ = compress.load(Path(folder) / "source", "float32")


    class GeneratorParams:
        def __init__(self, model):
            self.options = {}

        def set_search_options(self, **options):
            self.options = options


    class Generator:
        def __init__(self, model, params):
            self.model, self.longest = model.model, params.options["max_length"]

        def append_tokens(self, ids):
            assert len(ids) < self.longest
            with torch.no_grad():
                self.logits = FACTOR * self.model(input_ids=torch.as_tensor(ids).long()[None]).logits

        def get_output(self, name):
            assert name == "logits"
            return self.logits.numpy()
"""
BUILDER = """
    import json, shutil, sys
    from pathlib import Path

    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    source, out = Path(arguments["-i"]), Path(arguments["-o"])
    config = json.loads((source / "config.json").read_text())
    if config["architectures"] != ["ARCHITECTURE"]:
        raise NotImplementedError(f"The {source} model is not currently supported.")
    shutil.copytree(source, out / "source")
    stated = {"precision": arguments["-p"], "quantization": config.get("quantization_config"), "dense": sys.argv[-2]}
    (out / "genai_config.json").write_text(json.dumps(stated))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """stand_in(factor, architecture): install the stand-in, which multiplies logits and knows one architecture."""

    def install(factor=1.0, architecture="LlamaForCausalLM"):
        place = tmp_path / "packages"
        for name in ("onnxruntime_genai/models", "onnxruntime", "onnx", "onnx_ir"):
            (place / name).mkdir(parents=True)
            (place / name / "__init__.py").touch()
        runtime = textwrap.dedent(RUNTIME).replace("FACTOR", str(factor))
        (place / "onnxruntime_genai" / "__init__.py").write_text(runtime)
        builder = textwrap.dedent(BUILDER).replace("ARCHITECTURE", architecture)
        (place / "onnxruntime_genai" / "models" / "builder.py").write_text(builder)
        monkeypatch.syspath_prepend(place)
        monkeypatch.setenv("PYTHONPATH", str(place))

    return install


@pytest.fixture(scope="module")
def checkpoint(pico, ids, tmp_path_factory):
    """checkpoint(pass, format): a folder with pico after the pass."""

    def write(step, form="native"):
        model = compress.apply(AutoModelForCausalLM.from_pretrained(pico), [step], calibration=ids())
        return compress.save(model, tmp_path_factory.mktemp("of") / "model", form, AutoTokenizer.from_pretrained(pico))

    return write


def given(out):
    """What the builder was given: the precision and the quantization of the folder."""
    stated = json.loads((Path(out) / "genai_config.json").read_text())
    assert stated["dense"] == "nodes_to_exclude=/lm_head/MatMul,/model/embed_tokens/Gather"
    return stated["precision"], stated["quantization"]


INT4_AND_DENSE = RTN(group_size=32, overrides={"*.o_proj": {"weights": "none"}})
INT8_DOWN = RTN(group_size=32, overrides={"*.down_proj": {"weights": "int8"}})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("step", "form", "method", "size"),
    [
        (RTN(group_size="channel", symmetric=False), "compressed-tensors", "awq", 32),
        (RTN(weights="int8", group_size=64), "native", "gptq", 64),
        (INT8_DOWN, "native", "gptq", 32),
        (RTN(group_size=32, symmetric=False), "gptq", "awq", 32),  # zero points that the builder would misread
    ],
)
def test_codes_reach_the_builder_in_a_layout_that_it_reads_right(
    checkpoint, stand_in, tmp_path, step, form, method, size
):
    stand_in()
    source, out = checkpoint(step, form), tmp_path / "out"
    rows = compress.export(source, out, "onnx")
    precision, quantization = given(out)
    assert precision == "int4" and (quantization["quant_method"], quantization["group_size"]) == (method, size)
    assert max(row.error for row in rows) < 1e-3 and sum(row.count for row in rows) == 21  # scales become float16
    assert quantization.get("sym", method == "gptq") is (method == "gptq")
    card = (out / "README.md").read_text()
    assert "og.Model" in card and "ran the model" in card and "compress.load(" not in card


@pytest.mark.slow
def test_a_dense_or_pruned_model_is_not_rounded(checkpoint, stand_in, tmp_path):
    stand_in()
    assert compress.export(checkpoint(Magnitude(pattern="2:4")), tmp_path / "out", "onnx") == []
    assert given(tmp_path / "out") == ("fp32", None)


def test_the_command_prints_the_comparison_and_the_result_is_not_a_checkpoint(pico, stand_in, tmp_path):
    stand_in()
    out = tmp_path / "out"
    result = CliRunner().invoke(main, ["export", str(pico), "--format", "onnx", "-o", str(out), "--json"])
    assert result.exit_code == 0, result.output
    check = json.loads(result.output)["check"]
    assert check["difference"] < 1e-5 and check["nll"] == pytest.approx(check["expected_nll"], rel=1e-4)
    for read in (compress.load, inspect):
        with pytest.raises(ModelError, match="ONNX Runtime GenAI, which that program runs"):
            read(out)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (RTN(weights="int3", group_size=32), "int8 without zero points.*not of int3"),
        (RTN(weights="int8", group_size=32, symmetric=False), "misreads zero points of format gptq"),
        (GPTQ(group_size=32, act_order="group"), "use act_order: static"),
    ],
)
def test_other_codes_are_refused(checkpoint, stand_in, tmp_path, step, words):
    stand_in()
    with pytest.raises(TargetError, match=words):
        compress.export(checkpoint(step), tmp_path / "out", "onnx")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_other_codes_are_rounded_again_on_request(checkpoint, stand_in, tmp_path):
    stand_in()
    rows = compress.export(checkpoint(RTN(weights="int3", group_size=32)), tmp_path / "out", "onnx", requantize=True)
    assert all(row.error > 0 and row.after.startswith("int4") for row in rows)


@pytest.mark.parametrize("step", [INT4_AND_DENSE, INT4_AND_DENSE.model_copy(update={"symmetric": False})])
def test_a_dense_linear_among_codes_is_refused_before_the_builder_stops_at_it(checkpoint, stand_in, tmp_path, step):
    stand_in()
    with pytest.raises(TargetError, match=r"self_attn.o_proj is dense.*quantize it too.*or use format openvino"):
        compress.export(checkpoint(step), tmp_path / "out", "onnx")
    assert not (tmp_path / "out").exists()


def test_bits_and_groups_that_differ_are_named_by_patterns_of_tensors(checkpoint, stand_in, tmp_path):
    stand_in()
    changes = {"*.down_proj": {"weights": "int8"}, "*.v_proj": {"weights": "int8", "group_size": 64}}
    rows = compress.export(checkpoint(RTN(group_size=32, overrides=changes)), tmp_path / "out", "onnx")
    assert max(row.error for row in rows) < 1e-3
    _, quantization = given(tmp_path / "out")

    def stated(tensor):  # as the builder reads the settings of a tensor
        patterns = {pattern.removeprefix("+:"): changed for pattern, changed in quantization["dynamic"].items()}
        changed = next((changed for pattern, changed in patterns.items() if re.match(pattern, tensor)), {})
        return {**quantization, **changed}["bits"], {**quantization, **changed}["group_size"]

    assert stated("model.layers.1.mlp.down_proj.qweight") == (8, 32)
    assert stated("model.layers.1.self_attn.v_proj.scales") == (8, 64)
    assert stated("model.layers.1.self_attn.k_proj.qweight") == (4, 32)


def test_a_model_with_few_positions_is_compared_on_fewer_tokens(pico, stand_in, tmp_path):
    stand_in()
    model = AutoModelForCausalLM.from_pretrained(pico)
    model.config.max_position_embeddings = 16
    model.save_pretrained(tmp_path / "short")
    AutoTokenizer.from_pretrained(pico).save_pretrained(tmp_path / "short")
    arguments = ["export", str(tmp_path / "short"), "--format", "onnx", "-o", str(tmp_path / "out"), "--json"]
    assert json.loads(CliRunner().invoke(main, arguments).output)["check"]["tokens"] == 15


def test_a_missing_package_names_the_extra(pico, stand_in, tmp_path, monkeypatch):
    stand_in()
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", None)
    with pytest.raises(UserError, match=r"needs onnxruntime-genai; install the extra: compress-llm\[onnx\]"):
        compress.export(pico, tmp_path / "out", "onnx")


def test_an_architecture_that_the_builder_does_not_know_is_named(pico, stand_in, tmp_path):
    stand_in(architecture="OtherForCausalLM")
    with pytest.raises(UserError, match="does not know LlamaForCausalLM; use another format"):
        compress.export(pico, tmp_path / "out", "onnx")
    assert not (tmp_path / "out").exists()


def test_a_model_that_computes_other_values_is_refused(pico, stand_in, tmp_path):
    stand_in(factor=1.5)
    with pytest.raises(VerificationError, match="differ by .* of the largest, more than 1e-03; nothing was written"):
        compress.export(pico, tmp_path / "out", "onnx")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [({"dtype": "float16"}, "stores float32, not float16"), ({"type": "Q8_0"}, "is for format gguf")],
)
def test_options_of_other_formats_are_refused(pico, stand_in, tmp_path, options, words):
    stand_in()
    with pytest.raises(UserError, match=words):
        compress.export(pico, tmp_path / "out", "onnx", **options)
