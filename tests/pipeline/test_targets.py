"""Targets and ignore patterns as users of other toolkits write them: leaf names, class names, the head."""

import pytest
import torch
from torch import nn

import compress
from compress.checkpoint.formats import FORMATS
from compress.checkpoint.opening import open_model
from compress.errors import TargetError
from compress.pipeline.resolve import resolve_passes

NATIVE = FORMATS["native"]


@pytest.fixture(scope="module")
def opened(pico):
    return open_model(pico)


def chosen(opened, step):
    """The linears that a pass works on."""
    [(_, _, names)], _ = resolve_passes([step], opened, NATIVE)
    return names


def leaves(names):
    return {name.rpartition(".")[2] for name in names}


@pytest.mark.parametrize(
    "ignore", ["lm_head", "re:.*lm_head", "re:^lm_head$", "embed_tokens", "*norm*", "LlamaRMSNorm"]
)
def test_modules_outside_of_the_linears_may_be_ignored(opened, ignore):
    assert chosen(opened, compress.RTN(group_size=32, ignore=ignore)) == opened.linear_names()


def test_lm_head_may_be_ignored_whatever_the_head_is_called(in_memory, tiny):
    opened = in_memory(tiny("bert"))
    assert not any(name.endswith("lm_head") for name, _ in opened.model.named_modules())
    assert chosen(opened, compress.RTN(group_size=16, ignore=["lm_head"])) == opened.linear_names()
    assert chosen(opened, compress.RTN(group_size=16, ignore=["decoder"])) == opened.linear_names()
    with pytest.raises(TargetError, match="the output head cls.predictions.decoder and the embedding .* are tied"):
        resolve_passes([compress.RTN(group_size=16, targets=["decoder"])], opened, NATIVE)


def test_ignoring_the_head_does_not_hide_an_impossible_order():
    with pytest.raises(compress.CompressError, match=r"the same layers would be quantized twice, by passes\[0\] rtn"):
        compress.Recipe(model="m", passes=[compress.RTN(ignore="lm_head"), compress.GPTQ()])


def test_leaf_names_and_class_names(opened):
    assert leaves(chosen(opened, compress.RTN(group_size=32, targets=["down_proj", "q_proj"]))) == {
        "down_proj",
        "q_proj",
    }
    assert "o_proj" not in leaves(chosen(opened, compress.RTN(group_size=32, ignore=["lm_head", "o_proj"])))
    assert chosen(opened, compress.RTN(group_size=32, targets="Linear")) == opened.linear_names()
    assert leaves(chosen(opened, compress.RTN(group_size=32, targets="re:.*down_proj$"))) == {"down_proj"}


class Scaled(nn.Linear):
    """A linear of another class, as models bring their own."""


@pytest.fixture
def mixed(in_memory, tiny):
    """A model whose down projections are of another class; in the last block, the gate is, too."""
    model = tiny("llama")
    for index, layer in enumerate(model.model.layers):
        for name in ("down_proj", "gate_proj") if index == 2 else ("down_proj",):
            old = getattr(layer.mlp, name)
            setattr(layer.mlp, name, Scaled(old.in_features, old.out_features, bias=False))
    return in_memory(model)


def test_a_class_of_some_linears(mixed):
    names = chosen(mixed, compress.RTN(group_size=16, targets="Scaled"))
    assert names == [
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.2.mlp.gate_proj",
        "model.layers.2.mlp.down_proj",
    ]
    assert chosen(mixed, compress.RTN(group_size=16, ignore="Scaled")) == [
        name for name in mixed.linear_names() if name not in names
    ]
    assert chosen(mixed, compress.RTN(group_size=16, targets="Linear")) == mixed.linear_names()  # a Scaled is one


def test_class_names_hold_after_a_pass_has_replaced_the_layers(pico_model, in_memory):
    compress.apply(pico_model, [compress.Magnitude(targets="Linear", sparsity=0.5)])
    opened = in_memory(pico_model)
    assert chosen(opened, compress.RTN(group_size=32, targets="Linear")) == opened.linear_names()


def test_class_names_hold_after_blocks_were_removed(tiny, ids):
    model = tiny("llama")
    steps = [compress.DropBlocks(count=1, by="spacing"), compress.RTN(group_size=16, targets="Linear", ignore="v_proj")]
    compress.apply(model, steps, ids())
    names = [n for n, m in model.named_modules() if getattr(m, "quantized", False)]
    assert len(model.model.layers) == 2 and len(names) == 2 * 6 and not any("v_proj" in name for name in names)


def test_overrides_follow_the_same_rules(opened):
    step = compress.RTN(
        group_size=32,
        overrides={"lm_head": {"weights": "none"}, "down_proj": {"weights": "int8"}, "q_proj": {"weights": "none"}},
    )
    [(_, own, names)], _ = resolve_passes([step], opened, NATIVE)
    assert "q_proj" not in leaves(names) and len(own.overrides) == 2
    assert own.for_layer("model.layers.1.mlp.down_proj").weights == "int8"
    whole = compress.RTN(targets="down_proj", group_size=32, overrides={"Linear": {"weights": "int8"}})
    [(_, own, _)], _ = resolve_passes([whole], opened, NATIVE)
    assert own.for_layer("model.layers.1.mlp.down_proj").weights == "int8"


def test_the_model_that_results_is_that_of_the_full_patterns(pico_model, pico, tiny, ids):
    short = compress.RTN(
        group_size=32, targets="Linear", ignore=["lm_head", "o_proj"], overrides={"up_proj": {"weights": "int8"}}
    )
    full = compress.RTN(group_size=32, ignore="*.o_proj", overrides={"*.up_proj": {"weights": "int8"}})
    one = compress.apply(pico_model, [short]).state_dict()
    other = compress.apply(type(pico_model).from_pretrained(pico), [full]).state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            {"targets": ["*", "lm_head"]},
            r"passes\[0\] rtn: the output head lm_head .*are tied.*add model.embed_tokens to",
        ),
        ({"targets": "embed_tokens"}, "tied: one tensor serves both, so target both or none: add lm_head to targets"),
        ({"targets": "Embedding"}, "add lm_head to targets, or remove model.embed_tokens"),
        ({"targets": "re:lm_head"}, "add model.embed_tokens to targets, or remove lm_head"),
        (
            {"overrides": {"lm_head": {"weights": "int8"}}},
            r"rtn overrides: targets pattern 'lm_head' matches no linear",
        ),
        ({"ignore": "layers"}, r"ignore pattern 'layers' matches no linear.*write '\*\.layers\.\*'"),
        ({"ignore": "lm_haed"}, "ignore pattern 'lm_haed' matches no linear"),
        ({"targets": "Linaer"}, "targets pattern 'Linaer' matches no linear"),
    ],
)
def test_patterns_that_choose_no_linear(opened, step, message):
    with pytest.raises(TargetError, match=message):
        resolve_passes([compress.RTN(group_size=32, **step)], opened, NATIVE)
