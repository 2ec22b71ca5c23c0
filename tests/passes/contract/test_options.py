"""Options per layer: what may be overridden, where a mistake stands, and what becomes of the layers."""

import pytest
from tolerances import LOGITS

import compress
from compress import (
    GMP,
    GPTQ,
    HQQ,
    QAT,
    Distill,
    Finetune,
    IterativePruning,
    LoRC,
    Narrow,
    SignRound,
    SparseGPT,
)
from compress.checkpoint.formats import FORMATS
from compress.errors import RecipeError, TargetError
from compress.layers.linear import CompressedLinear
from compress.passes.contract.options import OptionError
from compress.pipeline.plan import plan
from compress.pipeline.resolve import resolve_passes

DOWN = "model.layers.1.mlp.down_proj"
UP = "model.layers.1.mlp.up_proj"


def test_a_layer_takes_the_options_of_the_first_override_that_matches():
    step = compress.RTN(
        scale="mse",
        overrides=[
            {"targets": ["*.down_proj", "*.o_proj"], "weights": "int8", "group_size": "channel"},
            {"targets": "*.mlp.*", "weights": "none"},
        ],
    )
    own = step.for_layer(DOWN)
    assert (own.weights, own.group_size, own.scale) == ("int8", "channel", "mse")
    assert step.for_layer(UP) is None
    assert step.for_layer("model.layers.1.self_attn.q_proj") is step
    assert [s.weights for s in step.variants()] == ["int4", "int8"]


def test_a_mapping_and_a_list_are_two_spellings_of_one_value_and_yaml_keeps_it():
    mapping = compress.GPTQ(overrides={"*.down_proj": {"weights": "int8", "act_order": "static"}})
    listed = compress.GPTQ(overrides=[{"targets": "*.down_proj", "weights": "int8", "act_order": "static"}])
    assert mapping == listed and hash(mapping) == hash(listed)
    rest = compress.RTN(targets="a", overrides={"a.*": {"weights": "none"}})
    recipe = compress.Recipe(model="x", passes=[mapping.model_copy(update={"targets": ("b",)}), rest])
    assert compress.Recipe.from_text(recipe.to_yaml()) == recipe


@pytest.mark.parametrize(
    ("overrides", "at", "message"),
    [
        ("{'*.a': {wieghts: int8}}", "wieghts", r"overrides \*.a wieghts: unknown option; did you mean 'weights'"),
        (
            "[{targets: '*.a', wieghts: int8}]",
            "wieghts",
            r"overrides\[0\] wieghts: unknown option; did you mean 'weights'",
        ),
        ("{'*.a': {weights: int9}}", "weights", r"overrides \*.a weights: grid 'int9' is not known"),
        ("[{targets: '*.a', group_size: 0}]", "group_size", r"overrides\[0\] group_size: group_size 0 must be"),
        (
            "[{targets: '*.a', weights: nf4, symmetric: false}]",
            "{targets",
            "symmetric: false needs an integer grid; nf4",
        ),
        ("[{weights: int8}]", "{weights", r"overrides\[0\] targets: is missing"),
        ("{'re:(': {weights: int8}}", "'re:(", "'re:\\(' is not a regular expression"),
        (
            "{'*.a': {weights: none, scale: mse}}",
            "'*.a'",
            "weights: none skips the layers, so scale would have no effect",
        ),
        ("{'*.a': {}}", "'*.a'", "changes nothing"),
        ("{'*.a': int8}", "'*.a'", "must be a mapping of options"),
        ("int8", "overrides", "overrides: must be a list such as"),
        ("{'*.a': {true_sequential: false}}", "true_seq", "applies to the whole pass"),
        ("{'*.a': {targets: b}}", "targets: b", "applies to the whole pass"),
    ],
)
def test_a_mistake_is_told_with_its_place(overrides, at, message):
    line = f"  - rtn: {{overrides: {overrides}}}"
    with pytest.raises(RecipeError, match=message) as raised:
        compress.Recipe.from_text(f"model: x\npasses:\n{line}\n")
    assert str(raised.value).startswith(f"recipe:3:{line.index(at) + 1}:"), raised.value


def test_in_python_a_mistake_names_its_place_too():
    with pytest.raises(OptionError, match=r"overrides\[0\] weights: grid 'int9' is not known"):
        compress.RTN(overrides=[{"targets": "*", "weights": "int9"}])


def test_the_pass_itself_is_checked_before_its_overrides():
    with pytest.raises(RecipeError, match="rtn group_size: group_size 0 must be"):
        compress.Recipe.from_text("model: x\npasses:\n  - rtn: {group_size: 0, overrides: {a: {weights: int9}}}")


@pytest.fixture(scope="module")
def opened(pico):
    from compress.checkpoint.opening import open_model

    return open_model(pico)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"*.dwon_proj": {"weights": "int8"}},
            "overrides: targets pattern '\\*.dwon_proj' matches no linear .*down_proj",
        ),
        (
            {"*.q_proj": {"weights": "int8"}},
            "overrides: targets pattern '\\*.q_proj' matches no linear",
        ),  # not its layer
        (
            {"*.mlp.*": {"scale": "mse"}, "*.up_proj": {"weights": "int8"}},
            "earlier overrides match; put this override before",
        ),
        ({"*": {"weights": "none"}}, "the overrides skip all 9 linears; remove weights: none from one of them"),
        (
            {"*.up_proj": {"group_size": 4096}},
            "model.layers.0.mlp.up_proj: group_size 4096 is larger than its .* inputs",
        ),
        ({"*.up_proj": {"weights": "nf4"}}, "model.layers.0.mlp.up_proj: weights nf4 have no layout"),
    ],
)
def test_patterns_and_layers_are_checked_against_the_model(opened, overrides, message):
    step = compress.RTN(targets="*.mlp.*", group_size=32, overrides=overrides)
    with pytest.raises(TargetError, match=message):
        resolve_passes([step], opened, FORMATS["compressed-tensors"])


def test_the_plan_the_checkpoint_and_both_readers_follow(recipe, tmp_path):
    step = compress.RTN(
        group_size=32,
        overrides={
            "*.down_proj": {"weights": "int8", "group_size": "channel", "activations": "int8"},
            "re:.*[qk]_proj": {"weights": "none"},
            "*.v_proj": {"weights": "int3"},
        },
    )
    ends = {layer.name: layer.scheme for layer in plan(recipe(step)).layers}
    assert (ends[DOWN].codes.grid.name, ends[DOWN].codes.group_size) == ("int8", "channel")
    assert ends["model.layers.0.self_attn.q_proj"].plain
    report = compress.run(recipe(step), tmp_path).report
    assert report["verified"]["own"] <= LOGITS and report["verified"]["transformers"] <= LOGITS
    assert report["verified"]["layers"] == 15
    model, _ = compress.load(tmp_path)
    assert {name: CompressedLinear.of(model.get_submodule(name)).scheme.plain for name in ends} == {
        name: scheme.plain for name, scheme in ends.items()
    }
    assert model.get_submodule(DOWN).rounding.grid.name == "int8" and model.get_submodule(UP).rounding is None
    assert model.get_submodule("model.layers.2.self_attn.v_proj").codes.grid.name == "int3"


def test_a_layer_with_options_of_its_own_is_what_a_pass_with_these_options_makes_of_it(pico_model, pico, ids):
    from transformers import AutoModelForCausalLM

    step = compress.GPTQ(group_size=32, overrides={"model.layers.0.self_attn.*": {"weights": "int8", "damping": 0.1}})
    mixed = compress.apply(pico_model, [step], ids())
    whole = compress.apply(
        AutoModelForCausalLM.from_pretrained(pico).eval(),
        [compress.GPTQ(group_size=32, weights="int8", damping=0.1)],
        ids(),
    )
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"):
        assert mixed.get_submodule(name).sha256() == whole.get_submodule(name).sha256()
    assert mixed.get_submodule(UP).codes.grid.name == "int4"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: compress.GPTQ(bits=4), "gptq bits: unknown option; did you mean 'weights'? Write weights: int4"),
        (lambda: compress.RTN(sym=False), "rtn sym: unknown option; did you mean 'symmetric'? Write symmetric: false"),
        (
            lambda: compress.GPTQ(desc_act=True),
            "gptq desc_act: unknown option; did you mean 'act_order'? Write act_order: static",
        ),
        (lambda: compress.GPTQ(groupsize=64), "gptq groupsize: unknown option; did you mean 'group_size'?"),
        (lambda: compress.Calibration(length=1), "calibration length: input should be greater than 1, not 1"),
        (lambda: compress.Evaluate(window=3), "eval window: unknown option; did you mean 'windows'?"),
    ],
)
def test_a_constructor_gives_the_error_of_yaml_in_one_line(build, message):
    with pytest.raises(OptionError) as raised:
        build()
    assert str(raised.value) == message
    assert isinstance(raised.value, compress.CompressError) and isinstance(raised.value, ValueError)
    assert raised.value.__cause__ is None and raised.value.__suppress_context__  # no page of pydantic above it


def test_yaml_gives_the_same_text():
    with pytest.raises(
        RecipeError,
        match=r"^f:2:18: passes\[0\] gptq bits: unknown option; did you mean 'weights'\? Write weights: int4$",
    ):
        compress.Recipe.from_text("model: m\npasses: [{gptq: {bits: 4}}]\n", "f")


IDLE = [
    (Finetune, {"teacher": "x"}, {"ce_weight": 0.5}),
    (Finetune, {"temperature": 2.0}, {"ce_weight": 0.5}),
    (GMP, {"divergence": "js"}, {"ce_weight": 0.5}),
    (QAT, {"top_k": 3}, {"ce_weight": 0.5}),
    (Distill, {"divergence": "js", "ce_weight": 1.0}, {"ce_weight": 0.5}),
    (Finetune, {"divergence": "js", "hidden": 1.0, "top_k": None}, {"ce_weight": 0.5}),
    (Distill, {"layer_map": [[0, 0]], "top_k": None}, {"hidden": 1.0}),
    (Finetune, {"lora_alpha": 2.0}, {"lora_rank": 2}),
    (Finetune, {"weight_rate": 0.5, "lora_rank": 2}, {"train": ["weights", "biases"]}),
    (IterativePruning, {"final_rate": 0.5}, {"retrain": "finetune"}),
    (SignRound, {"weights": "mxfp4", "scale_rate": 0.5}, {"weights": "int4"}),
    (Narrow, {"ffn": 0.5, "repair": "none", "damping": 0.5}, {"repair": "least_squares"}),
    (GPTQ, {"alpha": 0.3}, {"error": "asymmetric"}),
    (LoRC, {"error": "weight", "damping": 0.5, "rank": 2}, {"error": "activation"}),
    (SparseGPT, {"scale": "mse"}, {"weights": "int4"}),
    (HQQ, {"zero_point": "float", "symmetric": True}, {"symmetric": False}),
]


@pytest.mark.parametrize(("kind", "options", "remedy"), IDLE, ids=[f"{k.__name__} {next(iter(o))}" for k, o, _ in IDLE])
def test_an_option_without_effect_is_an_error_and_with_the_remedy_it_is_none(kind, options, remedy):
    with pytest.raises(OptionError, match=r"has no effect with(out)? .*; "):
        kind(**options)
    kind(**{**options, **remedy})


def test_an_override_may_make_an_option_of_the_pass_idle_for_its_layers():
    step = SignRound(scale_rate=0.5, overrides={"*.down_proj": {"weights": "mxfp4"}})
    assert step.for_layer(DOWN).weights == "mxfp4"


def test_a_default_that_is_written_out_is_no_mistake():
    for kind in dict.fromkeys(kind for kind, _, _ in IDLE):
        step = kind(ffn=0.5) if kind is Narrow else kind()
        assert kind(**step.model_dump()) == step
