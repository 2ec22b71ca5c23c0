"""What is trained of a model, and what becomes of it: by kind, by name, in which dtype, and put back as it was."""

import pytest
import torch
from tolerances import near

import compress
from compress.errors import TargetError
from compress.layers.linear import CompressedLinear, replace_linear
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.train.linear import TrainedLinear
from compress.train.student import trainable


def everything(name):
    return True


def student_of(model, train=None, takes=everything, storage=torch.float32):
    return trainable(model, train, takes, storage, "here")


def pack(model, name, grid="int4", group_size=8):
    layer = replace_linear(model, name)
    layer.put(quantize(layer.weight.float(), GRIDS[grid], group_size))
    return layer


def test_kinds_are_told_apart(tiny):
    model = tiny("opt")
    pack(model, "model.decoder.layers.1.fc1")
    with student_of(model) as student:
        found = {kind: set(group) for kind, group in student.parameters.items()}
        trainable_ = {name for name, p in model.named_parameters() if p.requires_grad}
        assert len(trainable_) == sum(map(len, found.values()))
    assert found["scales"] == {"model.decoder.layers.1.fc1.factor"}
    assert len(found["weights"]) == 3 * 6 - 1 and len(found["biases"]) == 3 * 6
    assert found["norms"] == {
        f"model.decoder.{norm}.{part}"
        for norm in (
            "final_layer_norm",
            *(f"layers.{i}.{n}_layer_norm" for i in range(3) for n in ("self_attn", "final")),
        )
        for part in ("weight", "bias")
    }
    assert not any("lm_head" in name or "embed" in name for group in found.values() for name in group)


def test_names_choose(tiny):
    model = tiny("llama")
    with student_of(model, takes=lambda name: name.startswith("model.layers.1.")) as student:
        names = list(student.named())
    assert len(names) == 7 + 2 and all(name.startswith("model.layers.1.") for name in names)


@pytest.mark.parametrize("kind", ["scales", "biases"])
def test_a_kind_that_applies_to_nothing_is_an_error(tiny, kind):
    model = tiny("llama")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    message = f"here: train: {kind} matches no parameter: none of the targeted modules"
    with pytest.raises(TargetError, match=message), student_of(model, train=["norms", kind]):
        raise AssertionError
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_nothing_to_train_is_an_error(tiny):
    message = "here: the targeted modules have no parameters to train"
    with pytest.raises(TargetError, match=message), student_of(tiny("llama"), takes=lambda name: False):
        raise AssertionError


def test_scales_that_are_no_plain_floats_stay(tiny):
    model = tiny("llama")
    pack(model, "model.layers.0.mlp.up_proj", "mxfp4", 32)
    pack(model, "model.layers.1.mlp.up_proj", "fp4_e2m1_pow2", 8)
    pack(model, "model.layers.2.mlp.up_proj")
    with student_of(model, train=["scales"]) as student:
        assert list(student.parameters["scales"]) == ["model.layers.2.mlp.up_proj.factor"]
        assert student.untrained_layers == ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "gemma2", "mixtral"])
def test_in_training_the_function_is_the_same_and_afterwards_everything_is_as_it_was(tiny, ids, family):
    model = compress.apply(tiny(family), [compress.RTN(group_size=16, targets="*.1.*")])
    wanted = model(input_ids=ids()).logits
    before = {name: t.clone() for name, t in model.state_dict().items()}
    kinds = {name: type(module) for name, module in model.named_modules() if not isinstance(module, torch.nn.Linear)}
    with student_of(model) as student:
        assert torch.allclose(model(input_ids=ids()).logits, wanted, atol=1e-4)
        assert all(isinstance(model.get_submodule(name), TrainedLinear) for name in student.layers)
    assert near(model(input_ids=ids()).logits, wanted)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name in after)
    assert all(kind is type(model.get_submodule(name)) for name, kind in kinds.items() if kind is CompressedLinear)
    assert not any(p.requires_grad for p in model.parameters())


def test_models_of_16_bits_are_trained_in_32_and_come_back_rounded(tiny, ids):
    model = compress.apply(tiny("opt").to(torch.bfloat16), [compress.RTN(group_size=16, targets="*.1.*")])
    model.model.decoder.layers[0].fc1.bias.requires_grad_(True)
    wanted = model(input_ids=ids()).logits
    with student_of(model, storage=torch.bfloat16) as student:
        assert {p.dtype for p in student.named().values()} == {torch.float32}
        assert model(input_ids=ids()).logits.dtype == torch.float32
        norm = student.parameters["norms"]["model.decoder.final_layer_norm.weight"]
        with torch.no_grad():
            norm += 0.001
        moved = norm.detach().clone()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.model.decoder.final_layer_norm.weight, moved.to(torch.bfloat16))
    model.model.decoder.final_layer_norm.weight.data = (moved - 0.001).to(torch.bfloat16)
    assert near(model(input_ids=ids()).logits, wanted)
    flags = {name for name, p in model.named_parameters() if p.requires_grad}
    assert flags == {"model.decoder.layers.0.fc1.bias"}


def test_it_is_put_back_when_training_fails(tiny):
    model = tiny("llama")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ZeroDivisionError), student_of(model, train=["norms"]):
        raise ZeroDivisionError
    assert not any(isinstance(module, TrainedLinear) for module in model.modules())
    assert model.state_dict().keys() >= {name for name in before if "norm" in name}
