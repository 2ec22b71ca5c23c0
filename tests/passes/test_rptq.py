"""RPTQ and PEG: clusters by hand, their scales on a model, orders that are folded, kept or left, and the refusals."""

import pytest
import torch
from tolerances import CROSSED_LOGITS

import compress
from compress import GPTQ, RPTQ, RTN, Magnitude
from compress.errors import NumericError, RecipeError, SeveralErrors, TargetError
from compress.layers.linear import CompressedLinear, linears
from compress.layers.transforms.permutation import PermutationScheme
from compress.passes.contract.journal import Journal
from compress.passes.contract.options import OptionError
from compress.passes.quantize.rptq import cluster

BLOCK = "model.layers.0"
Q, OUT, GATE, UP, DOWN = (
    f"{BLOCK}.{name}"
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
)
INT8 = {"weights": "int8", "group_size": "channel"}
FEW = {"clusters": 4}


# ---- clusters ----


def test_clusters_of_ranges_by_hand():
    """Two kinds of channels with the range 10, which the size alone cannot tell apart, and one with the range 1."""
    low, high = torch.tensor([0.0, -10.0, 0.1, -9.9, 0.0, -0.5]), torch.tensor([10.0, 0.0, 10.0, 0.0, 1.0, 0.5])
    found = cluster(low, high, 3, "kmeans").tolist()
    assert found[0] == found[2] != found[1] == found[3] and found[4] == found[5] == 0


def test_equal_groups_are_those_of_the_sorted_ranges():
    low, high = torch.tensor([-4.0, 0.0, -1.0, 0.0, -9.0, 0.0]), torch.tensor([4.0, 1.0, 2.0, 3.0, 0.0, 20.0])
    assert cluster(low, high, 3, "equal").tolist() == [1, 0, 0, 1, 2, 2]  # ranges 8, 1, 3, 3, 9, 20
    assert cluster(low, high, 4, "equal").tolist() == [2, 0, 0, 1, 2, 3]  # of 2, 1, 2 and 1 channels
    assert cluster(low, high, 6, "equal").tolist() == [3, 0, 1, 2, 4, 5]


# ---- on a model ----


def ranges(model, ids, name):
    """The least and the largest value of each input channel of a layer."""
    seen = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        model(input_ids=ids)
    hook.remove()
    rows = torch.cat(seen)
    return rows.amin(0), rows.amax(0)


@pytest.mark.parametrize("options", [FEW, {**FEW, "grouping": "equal"}], ids=["kmeans", "equal"])
def test_scales_cover_the_channels_of_each_cluster(pico_model, pico_ids, options):
    low, high = ranges(pico_model, pico_ids, Q)
    steps = [RPTQ(**options, targets=Q), RTN(**INT8, targets=Q)]
    compress.apply(pico_model, steps, pico_ids, batch=len(pico_ids))
    layer = pico_model.get_submodule(Q)
    order, rounding = layer.input_permutation.long(), layer.rounding
    index = rounding.group_index.long()
    assert torch.equal(index, index.sort().values), "clusters are contiguous"
    for number in range(4):
        members = order[index == number]
        bottom, top = low[members].min().clamp(max=0), high[members].max().clamp(min=0)
        torch.testing.assert_close(rounding.scale[number], (top - bottom) / 255)
        assert int(rounding.zero[number]) == round(-128 - float(bottom / rounding.scale[number]))


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("reorder", ["all", "folded", "none"])
def test_every_order_computes_the_same(tiny, ids, family, reorder):
    """Rounding to 8 bits moves the logits little, and the same however the channels are ordered.

    Sums in another order may move a value that lies between two codes to the other one, so a part of the rounding error
    differs.
    """
    found = []
    for order in ("none", reorder):
        model = tiny(family)
        exact = logits(model, ids())
        compress.apply(model, [RPTQ(clusters=4, reorder=order), RTN(**INT8)], ids())
        found.append(logits(model, ids()))
    error = float((found[0] - exact).norm())
    assert error < 0.1 * float(exact.norm())
    assert float((found[1] - found[0]).norm()) < 0.5 * error


def test_orders_are_folded_where_linears_write_the_channels(pico_model, pico_ids):
    journal = Journal()
    compress.apply(pico_model, [RPTQ(**FEW, targets=f"{BLOCK}.*"), RTN(**INT8)], pico_ids, journal=journal)
    layers = {name: pico_model.get_submodule(name) for name in (Q, OUT, GATE, UP, DOWN)}
    assert {name for name, layer in layers.items() if layer.input_permutation is None} == {DOWN}
    index = layers[DOWN].rounding.group_index
    assert torch.equal(index, index.sort().values)
    assert torch.equal(layers[GATE].input_permutation, layers[UP].input_permutation)
    messages = [e.message for e in journal.entries if e.message.startswith("mlp.down_proj: reordered")]
    assert messages == ["mlp.down_proj: reordered, folded into mlp.gate_proj, mlp.up_proj"]
    assert any(e.message == "self_attn.o_proj: reordered at run time" for e in journal.entries)


def test_folded_orders_alone_leave_the_others(pico_model, pico_ids):
    compress.apply(pico_model, [RPTQ(**FEW, reorder="folded"), RTN(**INT8)], pico_ids)
    left = linears(pico_model.get_submodule(BLOCK))
    assert all(CompressedLinear.of(layer).input_permutation is None for layer in left.values())
    down, out = pico_model.get_submodule(DOWN).rounding.group_index, pico_model.get_submodule(OUT).rounding.group_index
    assert torch.equal(down, down.sort().values) and not torch.equal(out, out.sort().values)


def test_equal_groups_of_each_token_are_those_that_kernels_know(pico_model, pico_ids):
    options = {"clusters": 2, "grouping": "equal", "activation_scale": "token", "symmetric": True}
    compress.apply(pico_model, [RPTQ(**options), RTN(weights="int8", group_size=64)], pico_ids)
    scheme = pico_model.get_submodule(Q).rounding.scheme
    assert (scheme.scale, scheme.group, scheme.groups) == ("group", 64, None)


def test_pruned_weights_stay_in_their_places(pico_model, pico_ids):
    journal = Journal()
    steps = [Magnitude(pattern="2:4"), RPTQ(**FEW, targets=(OUT, DOWN)), RTN(**INT8, targets=(OUT, DOWN))]
    compress.apply(pico_model, steps, pico_ids, journal=journal)
    for name in (OUT, DOWN):
        layer = pico_model.get_submodule(name)
        assert layer.input_permutation is None and bool((layer.mask.reshape(-1, 4).sum(1) == 2).all())
        assert bool((layer.weight[~layer.mask] == 0).all()) and layer.rounding.scheme.groups == 4
    assert sum("not reordered, so that its pruned weights" in e.message for e in journal.entries) == 2


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options", [{}, {"grouping": "equal", "activation_scale": "token"}, {"reorder": "none", "activations": "int4"}]
)
def test_a_checkpoint_computes_what_was_compressed(recipe, tmp_path, options):
    steps = RPTQ(**FEW, **options), GPTQ(weights="int8", group_size="channel")
    result = compress.run(recipe(*steps, save={"format": "native"}), tmp_path / "out")
    assert result.report["verified"]["own"] <= CROSSED_LOGITS


# ---- refusals ----


def test_more_clusters_than_channels_are_refused(pico_model, pico_ids):
    message = r"its 128 inputs have no 200 clusters; use clusters: 128 or fewer"
    with pytest.raises(TargetError, match=message):
        compress.apply(pico_model, [RPTQ(clusters=200), RTN(**INT8)], pico_ids)


def test_a_later_pass_that_rounds_inputs_again_is_refused(pico_model, pico_ids):
    with pytest.raises(TargetError, match="it would round the inputs in another way; leave activations out of it"):
        compress.apply(pico_model, [RPTQ(), RTN(**INT8, activations="int8")], pico_ids)


def test_it_comes_before_a_pass_that_quantizes_weights(recipe):
    with pytest.raises(RecipeError, match=r"passes\[0\] rptq: only rounds inputs; add a quantizing pass after it"):
        recipe(RPTQ())
    with pytest.raises(SeveralErrors, match=r"the layers are already quantized by passes\[0\] rtn; put rptq before it"):
        recipe(RTN(**INT8), RPTQ(), RTN(**INT8))


def test_formats_of_other_programs_refuse_groups_of_channels(recipe, tmp_path):
    steps = RPTQ(reorder="none"), RTN(**INT8)
    with pytest.raises(TargetError, match="cannot state scales of inputs for groups of channels; use format: native"):
        compress.run(recipe(*steps, save={"format": "compressed-tensors"}), tmp_path / "out")


def test_options_of_other_kinds_are_refused():
    with pytest.raises(OptionError, match="rptq grouping: input should be 'kmeans' or 'equal'"):
        RPTQ(grouping="sorted")


def test_a_layer_that_no_token_reaches_has_no_ranges(tiny, ids):
    """One token reaches two of the four experts of a block."""
    with pytest.raises(NumericError, match="no calibration token reached this layer, so its inputs have no ranges"):
        compress.apply(tiny("mixtral"), [RPTQ(clusters=4), RTN(**INT8)], ids(1, 1))


def test_the_schemes_are_known_before_the_run():
    before = compress.layers.linear.LayerScheme((8, 64))
    plain = RPTQ(clusters=8)
    assert plain.effects(before).scheme.rounding == plain.rounding_scheme(64, True)
    assert plain.effects(before).largest_scheme.maps_inputs == PermutationScheme()
    assert RPTQ(clusters=8, reorder="folded").effects(before).largest_scheme.maps_inputs is None
