"""Scales that stay with the inputs of a layer: solved for, stored where that can be said, taken back where not."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from tolerances import LOGITS

import compress
from compress.errors import TargetError
from compress.layers.linear import CompressedLinear, replace_linear
from compress.layers.transforms.scale import Scale, ScaleScheme
from compress.passes.contract.observers import InputAbsMax
from compress.passes.contract.passes import BlockPass

ATTENTION, MLP = "*.self_attn.*", "*.mlp.*"


class Rescale(BlockPass):
    """Divide every input channel by its largest magnitude, right at the layer; the second of a group by twice that."""

    paper: ClassVar[str] = "https://example.org"
    twice: str = "nothing"

    def solve_block(self, block, inputs, log):
        for group, seen in inputs.observe(InputAbsMax).items():
            for name in group.linears:
                if name in inputs.names:
                    factor = 2 if name.endswith(self.twice) else 1
                    replace_linear(block, name).rescale_input(factor * seen.absmax.clamp(min=1e-3))


def tokens():
    return torch.arange(256).reshape(4, 64)


def inputs_of(model, name):
    """What reaches a layer on the calibration tokens, [tokens, in]."""
    seen = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(input_ids=tokens())
    handle.remove()
    return seen[0].reshape(-1, seen[0].shape[-1])


def test_layers_are_solved_for_the_inputs_that_their_weight_sees(pico_model):
    """Static scales of divided inputs: with every channel divided by its maximum, each is 1 / 127.5."""
    static = compress.RTN(weights="int8", group_size="channel", activations="int8", activation_scale="static")
    model = compress.apply(pico_model, [Rescale(targets="*.q_proj"), static], tokens())
    divided = model.get_submodule("model.layers.0.self_attn.q_proj")
    plain = model.get_submodule("model.layers.0.self_attn.k_proj")
    assert float(divided.rounding.scale) == pytest.approx(1 / 127.5)
    assert float(plain.rounding.scale) == pytest.approx(
        float(inputs_of(model, "model.layers.0.self_attn.k_proj").abs().max()) / 127.5, rel=1e-5
    )


def test_layers_of_one_input_and_several_scales_are_solved_each_for_its_own(pico_model):
    passes = [
        Rescale(targets=ATTENTION, twice="k_proj"),
        compress.RTN(weights="int8", group_size="channel", activations="int8", activation_scale="static"),
    ]
    model = compress.apply(pico_model, passes, tokens())
    for name, wanted in {"q_proj": 1, "k_proj": 0.5, "v_proj": 1}.items():
        layer = model.get_submodule(f"model.layers.0.self_attn.{name}")
        assert float(layer.rounding.scale) == pytest.approx(wanted / 127.5)


def test_the_native_checkpoint_holds_the_scales(recipe, tmp_path):
    passes = (Rescale(targets=ATTENTION), compress.GPTQ(group_size=32, activations="int8"))
    report = compress.run(recipe(*passes, save={"format": "native"}), tmp_path).report
    assert report["verified"]["own"] <= LOGITS
    layer = compress.load(tmp_path)[0].get_submodule("model.layers.1.self_attn.o_proj")
    assert layer.transform_of(Scale).scale.dtype == torch.float32 and layer.scheme.maps_inputs == ScaleScheme()
    predicted, size = report["predicted"]["tensor_bytes"], report["size"]["tensor_bytes"]
    assert size == predicted + 3 * 4 * layer.shape[1] * 4  # which layers keep a scale is known only afterwards
    assert f"{predicted} were predicted" in (tmp_path / "report.md").read_text()


def test_a_stopped_run_goes_on_with_scales_in_place(recipe, tmp_path, stop):
    """A file's `input_scale` is the static scale of the inputs; the layer's buffer of that name is another."""
    static = compress.RTN(weights="int8", group_size="channel", activations="int8", activation_scale="static")
    asked = recipe(Rescale(targets=ATTENTION), static, save={"format": "native"})
    whole = compress.run(asked, tmp_path / "whole").report
    stop(asked, tmp_path / "stopped")
    resumed = compress.run(asked, tmp_path / "stopped").report
    assert resumed["checkpoint_sha256"] == whole["checkpoint_sha256"]


@pytest.mark.parametrize("format_", ["native", "compressed-tensors"])
def test_layers_that_stay_dense_take_their_scale_back(pico, recipe, format_, tmp_path):
    asked = recipe(Rescale(targets=MLP), compress.RTN(targets=ATTENTION, group_size=32), save={"format": format_})
    report = compress.run(asked, tmp_path).report
    verified = report["verified"]
    assert verified["own"] <= LOGITS and (verified["transformers"] or 0) <= LOGITS
    name = "model.layers.2.mlp.down_proj.weight"
    found = {k: t for path in tmp_path.glob("*.safetensors") for k, t in load_file(path).items()}
    stored = {k: t for path in Path(pico).glob("*.safetensors") for k, t in load_file(path).items()}
    torch.testing.assert_close(found[name], stored[name].to(found[name].dtype), rtol=2e-2, atol=1e-4)


def test_the_dense_format_multiplies_the_scale_out(recipe, tmp_path):
    report = compress.run(recipe(Rescale(), compress.RTN(group_size=32), save={"format": "dense"}), tmp_path).report
    assert report["verified"]["transformers"] == pytest.approx(0, abs=1e-3)
    assert not any(isinstance(m, CompressedLinear) for m in compress.load(tmp_path)[0].modules())


def test_a_format_that_cannot_hold_a_scale_says_so(recipe, tmp_path):
    with pytest.raises(
        TargetError, match=r"passes\[1\] rtn: .*q_proj: its inputs are divided by a scale .*format: nat"
    ):
        compress.run(recipe(Rescale(targets=ATTENTION), compress.RTN(group_size=32)), tmp_path)
