"""compress.export to OpenVINO: its constants, what it refuses; `make conformance OWNER=openvino` runs the program."""

import sys
from importlib.machinery import ModuleSpec

import pytest
import torch
from transformers import AutoModelForCausalLM

import compress
from compress.errors import ModelError, TargetError, UserError
from compress.passes.quantize.gptq import GPTQ
from compress.passes.quantize.rtn import RTN
from compress.pipeline.convert import Conversion, coded_layers, convert
from compress.pipeline.openvino import OpenVINOLayers, constants_of
from compress.pipeline.openvino_process import packed_codes


def compressed(pico, step, ids):
    return compress.apply(AutoModelForCausalLM.from_pretrained(pico), [step], calibration=ids())


@pytest.fixture
def installed(monkeypatch):
    """The packages of the extra, as far as their presence is asked for."""
    for name in ("openvino", "optimum", "optimum.intel"):
        module = type(sys)(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"group_size": 32}, "signed"),
        ({"group_size": 32, "symmetric": False}, "unsigned"),
        ({"group_size": "channel", "symmetric": False}, "unsigned"),
        ({"weights": "int8", "group_size": "channel"}, "signed"),
        ({"weights": "int8", "group_size": 32, "symmetric": False}, "unsigned"),
        ({"weights": "int8", "group_size": "tensor"}, "signed"),
    ],
)
def test_constants_are_the_weight_of_every_layer(pico, ids, options, kind):
    model = compressed(pico, RTN(**options), ids)
    rows = convert(model, Conversion(OpenVINOLayers()), torch.float32)
    assert max(row.error for row in rows) < 1e-3  # scales become float16
    for name, layer in coded_layers(model).items():
        constants = constants_of(name, layer)
        values, zero = constants[kind].float(), constants.get("zero", torch.tensor(0)).float()
        weight = ((values - zero) * constants["scale"].float()).reshape(layer.shape)
        assert torch.equal(weight, layer.weight_as(torch.float32)), name
        assert ("zero" in constants) is (kind == "unsigned") and constants["scale"].dtype == torch.float16


def test_two_codes_share_a_byte():
    signed = torch.tensor([[-8, 7, -1]], dtype=torch.int8)
    assert packed_codes(signed, 4).tolist() == [0x78, 0x0F]  # the low half first, an even number of codes
    assert packed_codes(signed, 8).tolist() == [0xF8, 0x07, 0xFF]
    assert packed_codes(torch.tensor([[0, 15], [3, 4]], dtype=torch.uint8), 4).tolist() == [0xF0, 0x43]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (RTN(weights="int3", group_size=32), "holds int4 and int8, not int3.*add requantize"),
        (GPTQ(group_size=32, act_order="group"), "use act_order: static"),
        (RTN(weights="int8", group_size="channel", activations="int8"), "use activations: none"),
        (RTN(weights="nf4"), "holds weights.*not nf4|holds int4 and int8, not nf4"),
    ],
)
def test_other_codes_are_refused(pico, ids, installed, tmp_path, step, words):
    source = compress.save(compressed(pico, step, ids), tmp_path / "model")
    with pytest.raises(TargetError, match=words):
        compress.export(source, tmp_path / "out", "openvino")
    assert not (tmp_path / "out").exists()


def test_missing_packages_and_other_options_are_named(pico, installed, tmp_path, monkeypatch):
    for options, words in [
        ({"dtype": "bfloat16"}, "stores float32 or float16"),
        ({"type": "Q8_0"}, "is for format gguf"),
    ]:
        with pytest.raises(UserError, match=words):
            compress.export(pico, tmp_path / "out", "openvino", **options)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(UserError, match=r"needs openvino; install the extra: compress-llm\[openvino\]"):
        compress.export(pico, tmp_path / "out", "openvino")


def test_a_recipe_says_how_files_of_other_programs_are_made(pico):
    for read in (lambda: compress.Save(format="openvino"), lambda: compress.Save(format=("native", "onnx"))):
        with pytest.raises((UserError, ValueError), match="write another format, and then compress export --format o"):
            read()


def test_the_files_of_openvino_are_no_checkpoint(tmp_path):
    (tmp_path / "openvino_model.xml").touch()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds a model of OpenVINO, which that program runs"):
        compress.load(tmp_path)
