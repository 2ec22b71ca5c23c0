"""Rotations change no function, spread outliers, stay at layers that need them, and are refused where they do not hold."""

import pytest
import torch
from headless import headless
from tolerances import LOGITS
from transformers import AutoModelForCausalLM

import compress
from compress import GPTQ, RTN, Distill, Magnitude, Narrow, Rotate, SliceGPT, SmoothQuant, Wanda
from compress.errors import ModelError, RecipeError, TargetError
from compress.layers.linear import CompressedLinear
from compress.numerics.hadamard import randomized
from compress.passes.contract.journal import Journal
from compress.pipeline.plan import plan

ONLINE, NATIVE = Rotate(online="down_proj"), {"format": "native"}


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def far(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def kinds(model, name="model.layers.0.mlp.down_proj"):
    layer = model.get_submodule(name)
    return [t.kind for t in layer.all_transforms] if isinstance(layer, CompressedLinear) else []


def slow(*families):
    return [pytest.param(family, marks=pytest.mark.slow) for family in families]


@pytest.mark.parametrize("family", ["llama", "qwen3", *slow("qwen2")])
@pytest.mark.parametrize("tied", [False, True])
def test_the_function_stays(tiny, ids, family, tied):
    model = tiny(family, tie_word_embeddings=tied)
    before, journal, embedding = logits(model, ids()), Journal(), model.model.embed_tokens.weight.clone()
    compress.apply(model, Rotate(online="*"), journal=journal)
    assert far(logits(model, ids()), before) < 1e-5 and not model.config.tie_word_embeddings
    norms = [m for name, m in model.named_modules() if name.endswith("layernorm") or name == "model.norm"]
    assert len(norms) == 7 and all(bool((norm.weight == 1).all()) for norm in norms)
    assert torch.allclose(model.model.embed_tokens.weight, embedding @ randomized(32, 0).float(), atol=1e-5)
    notes = {e.message: e.figures for e in journal.entries if e.kind == "note" and e.where == "passes[0] rotate"}
    assert notes["hidden states rotated by a Hadamard matrix"]["width"] == 32
    assert notes["values rotated"] == {"layers": 3, "head_sizes": [8]}
    assert notes["inputs rotated when layers run"] == {"layers": 21, "blocks": [32, 48]}


WITHOUT_RESIDUAL = ["gemma3", "opt", "qwen3-moe"]


@pytest.mark.parametrize("family", [*WITHOUT_RESIDUAL, *slow("gemma2", "mixtral", "opt-post-norm")])
def test_values_rotate_in_models_with_other_norms(tiny, ids, family):
    model = tiny(family)
    before = logits(model, ids())
    compress.apply(model, Rotate(residual=False))
    assert far(logits(model, ids()), before) < 1e-5


@pytest.mark.parametrize("family", ["gpt2", *slow("bloom", "falcon", "gpt-neox", "phi3")])
def test_inputs_rotate_in_every_model(tiny, ids, family):
    model = tiny(family)
    before = logits(model, ids())
    compress.apply(model, [Rotate(residual=False, values=False, online="*"), RTN(weights="int8", group_size="channel")])
    rotated = [m for m in model.modules() if isinstance(m, CompressedLinear)]
    assert len(rotated) == 12 and all([t.kind for t in m.all_transforms] == ["hadamard"] for m in rotated)
    assert far(logits(model, ids()), before) < 0.05


def test_phi3_rotates_but_for_its_fused_values(tiny, ids):
    model = tiny("phi3")
    before = logits(model, ids())
    compress.apply(model, Rotate(values=False))
    assert far(logits(model, ids()), before) < 1e-5


def test_values_by_hand(tiny):
    """Two heads of eight values, each read by two heads of queries: V' = R^T V and O' = O R, block by block."""
    model, turn = tiny("qwen2"), randomized(8, 1).float()
    attention = model.model.layers[1].self_attn
    value, bias, read = attention.v_proj.weight.clone(), attention.v_proj.bias.clone(), attention.o_proj.weight.clone()
    compress.apply(model, Rotate(residual=False))
    attention = model.model.layers[1].self_attn
    for head in range(2):
        rows = slice(8 * head, 8 * head + 8)
        assert torch.allclose(attention.v_proj.weight[rows], turn.T @ value[rows], atol=1e-5)
        assert torch.allclose(attention.v_proj.bias[rows], turn.T @ bias[rows], atol=1e-5)
    for head in range(4):
        columns = slice(8 * head, 8 * head + 8)
        assert torch.allclose(attention.o_proj.weight[:, columns], read[:, columns] @ turn, atol=1e-5)


def test_other_widths_get_a_random_orthogonal_matrix(tiny, ids):
    model, journal = tiny("llama", hidden_size=36, num_attention_heads=6, head_dim=6, num_key_value_heads=2), Journal()
    assert model.lm_head.weight.shape[1] == 36
    odd, seen = tiny("llama", hidden_size=30, num_attention_heads=6, head_dim=6, num_key_value_heads=2), Journal()
    for one, where, kind in ((model, journal, "Hadamard"), (odd, seen, "random orthogonal")):
        before = logits(one, ids())
        compress.apply(one, Rotate(), journal=where)
        assert far(logits(one, ids()), before) < 1e-5
        assert f"hidden states rotated by a {kind} matrix" in [entry.message for entry in where.entries]


def with_outliers(model):
    """The same function, with two channels of each norm and one input of each down_proj 60 times as large."""
    for block in model.model.layers:
        mlp = block.mlp
        block.post_attention_layernorm.weight[[3, 8]] *= 60
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight[:, [3, 8]] /= 60
        mlp.up_proj.weight[5] *= 60
        mlp.down_proj.weight[:, 5] /= 60
    return model


def test_less_is_lost_with_outliers(tiny, ids):
    """Norms are folded, so that weights have the outliers of channels; both kinds of rotation lower the loss."""
    errors = []
    for steps in ([], [Rotate()], [ONLINE]):
        model = with_outliers(tiny("llama"))
        before = logits(model, ids())
        compress.apply(model, [*steps, RTN(weights="int8", group_size="channel", activations="int8")])
        errors.append(far(logits(model, ids()), before))
    assert errors[2] < 0.7 * errors[1] and errors[1] < errors[0]


def test_seeds_draw_other_matrices(tiny):
    found = []
    for seed in (0, 0, 1):
        model = tiny("llama", num_hidden_layers=1)
        compress.apply(model, Rotate(seed=seed))
        found.append(model.model.embed_tokens.weight)
    assert torch.equal(found[0], found[1]) and not torch.allclose(found[0], found[2], atol=1e-2)


def test_a_quantized_layer_keeps_its_transform_and_a_dense_one_takes_it_back(recipe, ids, tmp_path):
    report = compress.run(recipe(ONLINE, RTN(group_size=32, ignore="*.1.mlp.down_proj"), save=NATIVE), tmp_path).report
    assert report["verified"]["own"] <= LOGITS
    model, _ = compress.load(tmp_path)
    assert kinds(model) == ["hadamard"] and not kinds(model, "model.layers.1.mlp.down_proj")
    assert not kinds(model, "model.layers.0.mlp.up_proj")
    folded = [e["where"] for e in report["journal"]["entries"] if "folded back" in e["message"]]
    assert folded == ["save model.layers.1"]


def test_stock_formats_hold_what_is_folded(recipe, tmp_path):
    report = compress.run(recipe(Rotate(), save={"format": "dense"}), tmp_path).report
    assert report["verified"]["transformers"] <= LOGITS
    assert not AutoModelForCausalLM.from_pretrained(tmp_path).config.tie_word_embeddings
    with pytest.raises(
        TargetError, match="multiplied by a Hadamard matrix when it runs, and .* use format: native, or"
    ):
        plan(recipe(ONLINE, RTN(group_size=32), save={"format": "compressed-tensors"}))


def test_the_plan_says_what_is_rotated(recipe):
    planned = plan(recipe(ONLINE, RTN(group_size=32), save=NATIVE))
    layers = {layer.name: layer for layer in planned.layers}
    down = layers["model.layers.0.mlp.down_proj"]
    assert [t.text for t in down.scheme.transforms] == ["inputs rotated in blocks of 288"]
    assert not layers["model.layers.0.mlp.up_proj"].scheme.transforms
    notes = [note for note in planned.notes if "rotate" in note]
    assert "hidden states and values are rotated in the weights; inputs of down_proj are rotated when" in notes[0]


@pytest.mark.slow
def test_the_plan_counts_the_bytes(recipe, tmp_path):
    asked = recipe(ONLINE, GPTQ(group_size=32), save=NATIVE)
    assert compress.run(asked, tmp_path).report["size"]["tensor_bytes"] == plan(asked).checkpoint_bytes


def test_passes_between_keep_the_transform(pico_model, pico_ids):
    """Scales of SmoothQuant are for rotated columns; a training pass between two sweeps does not undo the rotation."""
    before = logits(pico_model, pico_ids[:2])
    chain = [ONLINE, SmoothQuant(targets="down_proj", unlinked="scale"), Distill(steps=1, learning_rate=1e-9)]
    compress.apply(pico_model, [*chain, RTN(weights="int8", group_size="channel")], pico_ids[:2])
    assert kinds(pico_model) == ["hadamard", "scale"]
    assert far(logits(pico_model, pico_ids[:2]), before) < 0.05


LEARN = Rotate(online="down_proj", learn={"steps": 3, "activation_clip": 0.9, "hold_out": 0.3, "evaluate_every": 1})
W4A4 = GPTQ(group_size=32, activations="int4", activation_clip=0.9)


def test_learned_rotations_before_gptq(recipe, tmp_path):
    report = compress.run(recipe(LEARN, W4A4, save=NATIVE), tmp_path).report
    assert report["verified"]["own"] <= LOGITS
    record = report["training"]["passes[0] rotate"]
    assert record["steps"] == 3 and record["trained"] == {"rotations": 128 * 128 + 3 * 32 * 32}
    held = [point["held_out"] for point in record["curve"] if "held_out" in point]
    assert record["best"]["held_out"] == min(held) and len(held) == 4
    model, _ = compress.load(tmp_path)
    assert kinds(model) == ["hadamard", "rounding"]
    assert not [e for e in report["journal"]["entries"] if e["message"].startswith("training resumes")]


def test_a_killed_run_continues_to_the_same_bytes(recipe, stop, tmp_path):
    """Stopped in the second step, with a state on disk after every step."""
    learn = LEARN.learn.model_copy(update={"checkpoint_every": 1})
    asked = recipe(LEARN.model_copy(update={"learn": learn}), W4A4, save=NATIVE)
    whole = compress.run(asked, tmp_path / "whole").report
    stop(asked, tmp_path / "stopped", lambda entry: entry.figures.get("done") == 2 and "loss" in entry.figures)
    again = compress.run(asked, tmp_path / "stopped").report
    assert "training resumes" in [entry["message"] for entry in again["journal"]["entries"]]
    assert again["checkpoint_sha256"] == whole["checkpoint_sha256"]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"online": "*"}),
        *(
            pytest.param(family, options, marks=pytest.mark.slow)
            for family, options in [
                ("qwen2", {}),
                ("phi3", {"values": False, "online": "down_proj"}),
                *((family, {"residual": False}) for family in (*WITHOUT_RESIDUAL, "gemma2", "mixtral")),
            ]
        ),
    ],
)
def test_the_function_stays_with_learned_rotations(tiny, ids, family, options):
    """Experts, biases and norms (1 + weight): what rotates at random also learns."""
    model = tiny(family)
    before, journal = logits(model, ids()), Journal()
    learn = {"steps": 2, "batch": 2, "hold_out": 0, "weights": "int8", "group_size": 8}
    compress.apply(model, Rotate(**options, learn=learn), ids(), journal=journal)
    assert far(logits(model, ids()), before) < 1e-5
    (found,) = [e.figures for e in journal.entries if e.message == "trained"]
    assert found["rotations"] == 32 * 32 * options.get("residual", True) + 3 * 64 * options.get("values", True)


def test_a_plan_learns_nothing_and_counts_the_memory_of_learning(recipe, monkeypatch):
    def none(*_):
        raise AssertionError("a plan must not learn")

    monkeypatch.setattr("compress.passes.prepare.rotate.learn_rotations", none)
    found, plain = (plan(recipe(one, W4A4, save=NATIVE)) for one in (LEARN, ONLINE))
    (note,) = [note for note in found.notes if "rotate" in note]
    assert (
        "hidden states and values are rotated in the weights by matrices learned in 3 steps with inputs in int4" in note
    )
    needs = [{n.where: n.size_bytes for n in one.fit.needs}["passes[0] rotate"] for one in (found, plain)]
    logits = 4 * 64 * 2 * 1024  # the least of what is added to two copies of the model; a third one is away
    assert needs[0] > logits and found.process_bytes is not None and plain.process_bytes is None


# Bad input


def test_a_model_without_a_loss_learns_no_rotations(ids):
    with pytest.raises(RecipeError, match="leave learn out, which needs a loss on the text"):
        compress.apply(headless("encoder"), Rotate(residual=False, learn={}), ids())


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gpt2", r"look alike \(.*cannot express 16 of 32 hidden channels.*\); use residual: false"),
        ("opt", "both sides of .*k_proj have the hidden width.*; use residual: false"),
        (
            "gemma2",
            "post_attention_layernorm scales the channels of what is added to the hidden states.*residual: false",
        ),
        ("mixtral", "belongs to an expert: its norm is also read by a router.*; use residual: false"),
    ],
)
def test_hidden_states_that_cannot_be_rotated(tiny, family, message):
    model = tiny(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=f"rotate: .*{message}"):
        compress.apply(model, Rotate())
    after = model.state_dict()  # in which experts may be opened
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name in after)


def test_fused_values_are_refused(tiny):
    with pytest.raises(ModelError, match="not fused with queries and keys, .*; use values: false"):
        compress.apply(tiny("phi3"), Rotate(residual=False))


def test_nothing_to_rotate_is_an_error():
    with pytest.raises(RecipeError, match="residual, values and online are all off.*turn one on"):
        compress.Recipe(model="m", passes=[{"rotate": {"residual": False, "values": False}}])


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([Rotate(ignore="*.q_proj")], "q_proj is left out .* uniform: .* use residual: false"),
        ([Rotate(online="down_porj")], "rotate online: targets pattern 'down_porj' matches no linear.*down_proj"),
        ([Wanda(), Rotate()], "already pruned"),
        ([RTN(group_size=32), Rotate()], "already quantized"),
        ([ONLINE, Magnitude()], "down_proj: its inputs are multiplied by a Hadamard matrix .* zeros are lost"),
        ([ONLINE, Narrow(ffn=0.5)], "down_proj: its inputs .* so its columns have no channel; put narrow first"),
        ([ONLINE, SliceGPT()], "so its columns have no channel; put slicegpt first"),
        ([ONLINE, ONLINE], "so its columns have no channel; put rotate first"),
    ],
)
def test_orders_and_targets_that_make_no_sense(recipe, steps, message):
    with pytest.raises((RecipeError, TargetError), match=message):
        plan(recipe(*steps, save=NATIVE))


def test_a_width_that_no_hadamard_matrix_fits(tiny):
    model = tiny("llama", intermediate_size=30)
    with pytest.raises(TargetError, match=r"fits its 30 inputs, nor blocks of 16 or more .* next widths are 28 and 32"):
        compress.apply(model, ONLINE)


def test_a_width_that_only_blocks_fit(tiny, ids):
    model, journal = tiny("llama", intermediate_size=260), Journal()
    before = logits(model, ids())
    compress.apply(model, [ONLINE, RTN(weights="int8", group_size="channel")], journal=journal)
    (note,) = [e.figures for e in journal.entries if e.message == "inputs rotated when layers run"]
    assert note == {"layers": 3, "blocks": [52]} and far(logits(model, ids()), before) < 0.05
