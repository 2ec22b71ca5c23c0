"""Channel permutation: the function stays, more is kept, and orders are folded, kept with inputs, or refused."""

import json

import pytest
import torch
from followers import Unpruned, Unrounded
from gated import Gated
from masks import kept_score
from safetensors.torch import load_file, save_file
from tolerances import LOGITS
from torch import nn

import compress
from compress import ChannelPermutation, Magnitude, SmoothQuant, Wanda
from compress.errors import CalibrationError, ModelError, TargetError
from compress.kernels.dispatch import plain_torch
from compress.layers.linear import CompressedLinear, linears, replace_linear
from compress.models.structure.permutations import find_permutations, permute
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.journal import Journal
from compress.passes.contract.options import OptionError
from compress.train.linear import TrainedLinear

Q, K, V, OUT = (f"model.layers.1.self_attn.{name}_proj" for name in "qkvo")
GATE, UP, DOWN = (f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down"))
FAST = {"score": "magnitude", "escapes": 0}


def orders(model):
    """Linear -> the order kept with its inputs, or None."""
    return {name: CompressedLinear.of(layer).input_permutation for name, layer in linears(model).items()}


def kept(model, n=2, m=4):
    """Of all magnitudes, what n:m keeps."""
    weights = {name: CompressedLinear.of(layer).weight.abs() for name, layer in linears(model).items()}
    return {name: float(kept_score(weight, n, m)) for name, weight in weights.items() if "head" not in name}


FAMILIES = ["llama", "qwen3", "gpt2", "opt", "phi3", "gpt-neox-parallel", "mixtral"]


@pytest.mark.few(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("unlinked", ["keep", "skip"])
def test_the_function_stays_as_it_was(tiny, ids, family, unlinked):
    model = tiny(family)
    with torch.no_grad():
        wanted = model(input_ids=ids()).logits
        compress.apply(model, [ChannelPermutation(**FAST, unlinked=unlinked), Unpruned()])
        torch.testing.assert_close(model(input_ids=ids()).logits, wanted, rtol=1e-4, atol=1e-5)
    assert not any(order is not None for order in orders(model).values()), "stored dense, so taken back"


@pytest.mark.few(3)
@pytest.mark.parametrize("family", [*FAMILIES, "pico"])
def test_what_pruning_keeps_rises_in_every_family(tiny, pico_model, ids, family):
    """After magnitude pruning with and without; layers of which nothing is folded keep their order."""
    pruning = Magnitude(pattern="2:4")
    model, other = (pico_model, None) if family == "pico" else (tiny(family), tiny(family))
    before = kept(model)
    compress.apply(model, [ChannelPermutation(**FAST), pruning])
    after, left = kept(model), orders(model)
    assert all(after[name] >= before[name] * (1 - 1e-6) for name in before)
    assert sum(after.values()) > 1.005 * sum(before.values())
    assert any(order is not None for order in left.values())
    for name, layer in linears(model).items():
        if isinstance(layer, CompressedLinear):
            groups = layer.mask[:, : layer.shape[1] // 4 * 4].reshape(-1, 4)
            assert bool((groups.sum(1) == 2).all()), name
    if other is not None:
        compress.apply(other, [ChannelPermutation(**FAST, unlinked="skip"), pruning])
        assert not any(order is not None for order in orders(other).values())


@pytest.fixture(scope="module")
def permuted(pico):
    """The pico model in a new order, pruned to 2:4."""
    model = compress.load(pico)[0]
    return compress.apply(model, [ChannelPermutation(**FAST), Magnitude(pattern="2:4")])


def test_what_one_tensor_feeds_shares_an_order_and_what_is_linked_needs_none(permuted):
    found = orders(permuted)
    assert torch.equal(found[Q], found[K]) and torch.equal(found[Q], found[V]) and torch.equal(found[GATE], found[UP])
    assert not torch.equal(found[Q], found[GATE])
    assert found[OUT] is None and found[DOWN] is None
    assert torch.equal(found[Q].sort().values, torch.arange(128, dtype=torch.int32))


def test_linked_layers_keep_more_too(pico_model, permuted):
    before, after = kept(pico_model), kept(permuted)
    assert after[DOWN] > 1.003 * before[DOWN] and after[OUT] > 1.0005 * before[OUT]


def test_the_journal_tells_what_is_kept_before_and_after(pico_model):
    journal = Journal()
    compress.apply(pico_model, [ChannelPermutation(**FAST, targets="model.layers.1.*"), Unpruned()], journal=journal)
    record = {e.message.partition(":")[0]: e for e in journal.entries if "kept_before" in e.figures}
    assert set(record) == {
        "self_attn.o_proj",
        "mlp.down_proj",
        "mlp.gate_proj, mlp.up_proj",
        "self_attn.q_proj, self_attn.k_proj, self_attn.v_proj",
    }
    assert all(0.5 < e.figures["kept_before"] < e.figures["kept_after"] < 1 for e in record.values())
    assert "folded into mlp.gate_proj, mlp.up_proj" in record["mlp.down_proj"].message
    undone = [e.message for e in journal.entries if "stored dense" in e.message]
    assert len(undone) == 1 and "self_attn.q_proj" in undone[0] and "N:M no longer holds in consecutive" in undone[0]


# ---- refusals ----


RESIDUAL = "its input comes from input_layernorm and so from the residual stream, whose channels all blocks"


def test_folding_alone_is_refused_where_a_residual_feeds_the_layer(pico_model):
    message = (
        rf"channel_permutation model\.layers\.0\.self_attn\.q_proj cannot be permuted by folding: {RESIDUAL}.*keep"
    )
    with pytest.raises(TargetError, match=message):
        compress.apply(pico_model, [ChannelPermutation(**FAST, unlinked="refuse"), Unpruned()])


@pytest.mark.slow
def test_a_layer_that_is_asked_for_by_name_is_not_skipped(pico_model):
    with pytest.raises(TargetError, match=rf"{Q} cannot be permuted by folding: {RESIDUAL}"):
        compress.apply(pico_model, [ChannelPermutation(**FAST, unlinked="skip", targets=[Q, DOWN]), Unpruned()])
    journal = Journal()
    steps = [ChannelPermutation(**FAST, unlinked="skip", targets="*.q_proj"), Unpruned()]
    compress.apply(pico_model, steps, journal=journal)
    assert sum(RESIDUAL in entry.message for entry in journal.entries) == 3
    compress.apply(pico_model, [ChannelPermutation(**FAST, unlinked="refuse", targets=[DOWN]), Unpruned()])


def test_heads_that_are_no_whole_groups_are_not_linked(tiny):
    """Of 8 channels in a head, 3 do not stand apart from those of the next."""
    reason = "channels may be permuted only inside of heads, whose width is no multiple of 3 columns"
    with pytest.raises(TargetError, match=f"o_proj cannot be permuted by folding: {reason}"):
        refusing = ChannelPermutation(**FAST, pattern="1:3", unlinked="refuse", targets="*.o_proj")
        compress.apply(tiny("llama"), [refusing, Unpruned(n_of_m=(1, 3))])
    model = compress.apply(tiny("llama"), [ChannelPermutation(**FAST, pattern="1:3"), Magnitude(pattern="1:3")])
    assert orders(model)["model.layers.0.self_attn.o_proj"] is not None


def test_sources_that_are_quantized_stay_as_they_are(pico_model):
    journal = Journal()
    steps = [
        compress.RTN(group_size=32, targets="*.v_proj"),
        ChannelPermutation(**FAST, unlinked="skip", targets="*.o_proj"),
        Unpruned(),
    ]
    compress.apply(pico_model, steps, journal=journal)
    assert any("self_attn.v_proj, which writes its input, is quantized already" in e.message for e in journal.entries)
    assert pico_model.get_submodule(V).codes is not None


def test_only_n_of_m_asks_for_an_order():
    with pytest.raises(OptionError, match="pattern row does not depend on the order; use N:M such as 2:4"):
        ChannelPermutation(pattern="row")


@pytest.mark.slow
def test_scores_of_inputs_need_data_and_magnitudes_do_not(pico_model, pico_ids):
    assert not ChannelPermutation(score="magnitude").requires.data and ChannelPermutation(score="ria").requires.data
    with pytest.raises(CalibrationError):
        compress.apply(pico_model, [ChannelPermutation(), Unpruned()])
    model = compress.apply(
        pico_model, [ChannelPermutation(score="ria", escapes=0), compress.RIA(pattern="2:4")], pico_ids
    )
    assert orders(model)[Q] is not None


# ---- stored, loaded, undone ----


def chain(*more):
    return ChannelPermutation(escapes=0), Wanda(pattern="2:4"), *more


@pytest.mark.slow
def test_native_holds_the_order_and_dense_puts_columns_back(recipe, tmp_path):
    native = compress.run(recipe(*chain(), save={"format": "native"}), tmp_path / "native").report
    dense = compress.run(recipe(*chain(), save={"format": "dense"}), tmp_path / "dense")
    assert max(native["verified"]["own"], dense.report["verified"]["own"]) <= LOGITS
    here, plain = compress.load(tmp_path / "native")[0], compress.load(tmp_path / "dense")[0]
    layer = here.get_submodule(Q)
    assert layer.input_permutation is not None and layer.scheme.text == "2:4"
    first = Q.replace("1", "0", 1)  # later blocks may end in other optima: their inputs are summed in another order
    layer, weight = here.get_submodule(first), plain.get_submodule(first).weight
    assert torch.equal(layer.weight[:, layer.input_permutation.long().argsort()], weight)
    assert bool((weight[:, layer.input_permutation.long()] != 0).reshape(-1, 4).sum(1).le(2).all())
    assert bool((weight != 0).reshape(-1, 4).sum(1).gt(2).any())
    assert any("N:M no longer holds in consecutive columns" in entry.message for entry in dense.journal.entries)
    size, predicted = native["size"]["tensor_bytes"], native["predicted"]["tensor_bytes"]
    assert size == predicted + 3 * 5 * 128 * 4  # of five layers of each block, known only afterwards


@pytest.mark.few(1)
@pytest.mark.parametrize("format_", ["native", "dense"])
def test_quantization_keeps_the_permuted_mask(recipe, tmp_path, format_):
    steps = chain(compress.GPTQ(weights="int8", group_size=32))
    save = {"format": format_} | ({"sparse": "always"} if format_ == "native" else {})
    report = compress.run(recipe(*steps, save=save), tmp_path).report
    assert report["verified"]["own"] <= LOGITS
    model, _ = compress.load(tmp_path)
    for name in (Q, UP, DOWN, OUT):
        layer = CompressedLinear.of(model.get_submodule(name))
        if format_ == "native":
            assert bool((layer.mask.reshape(-1, 4).sum(1) == 2).all()) and not bool(layer.weight[~layer.mask].any())
        assert float((layer.weight == 0).float().mean()) >= 0.5


def test_a_format_that_cannot_hold_an_order_says_so_before_the_run_and_skipping_helps(recipe):
    quantizing = compress.RTN(group_size=32)
    with pytest.raises(
        TargetError, match=r"q_proj: it may be that its inputs are permuted.*format: native, or unlinked: skip"
    ):
        compress.plan(recipe(*chain(quantizing)))
    steps = ChannelPermutation(escapes=0, unlinked="skip"), Wanda(pattern="2:4"), quantizing
    assert not any("permutation" in note for note in compress.plan(recipe(*steps)).notes)


def test_the_plan_tells_the_bytes_of_orders_that_may_stay(recipe, tmp_path):
    asked = recipe(*chain(), save={"format": "native"})
    (note,) = [note for note in compress.plan(asked).notes if "permutation of their inputs" in note]
    result = compress.run(asked, tmp_path)
    more = result.report["size"]["tensor_bytes"] - result.report["predicted"]["tensor_bytes"]
    assert 0 < more <= int(note.split("at most ")[1].split()[0])


@pytest.mark.slow
def test_a_run_that_skips_orders_is_stored_in_groups(recipe, tmp_path):
    steps = ChannelPermutation(escapes=0, unlinked="skip"), Wanda(pattern="2:4"), compress.RTN(group_size=32)
    report = compress.run(recipe(*steps), tmp_path / "skip").report
    assert report["verified"]["own"] <= LOGITS


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_orders_in_place(recipe, stop, tmp_path):
    asked = recipe(*chain(), save={"format": "native"})
    whole = compress.run(asked, tmp_path / "whole").report
    stop(asked, tmp_path / "stopped")
    assert compress.run(asked, tmp_path / "stopped").report["checkpoint_sha256"] == whole["checkpoint_sha256"]
    shard = tmp_path / "whole" / "model-00003-of-00004.safetensors"
    tensors = load_file(shard)
    tensors[f"{Q}.input_permutation"][0] = tensors[f"{Q}.input_permutation"][1]
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="q_proj.input_permutation does not hold each number below 128 once"):
        compress.load(tmp_path / "whole")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())["quantization_config"]["layers"]
    assert [transform["kind"] for transform in config[Q]["transforms"]] == ["permutation"]
    assert "transforms" not in config.get(DOWN, {})


# ---- with other changes of inputs ----


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return CompressedLinear.of(nn.Linear(12, 7))


def test_orders_and_scales_of_inputs_are_taken_together_and_back(layer):
    x, mask = random(3, 12), random(7, 12, seed=1) > 0
    layer.put(layer.weight * mask, mask)
    before, weight = layer(x), layer.weight.clone()
    first, second = torch.randperm(12), torch.randperm(12)
    layer.permute_input(first)
    layer.rescale_input(random(12, seed=2).exp())
    layer.permute_input(second)
    torch.testing.assert_close(layer(x), before)
    assert torch.equal(layer.input_permutation.long(), first[second])
    assert torch.equal(layer.mask, mask[:, first[second]]) and not bool(layer.weight[~layer.mask].any())
    layer.absorb_inputs()
    assert not layer.all_transforms
    torch.testing.assert_close(layer.weight, weight)
    assert torch.equal(layer.mask, mask)


def test_codes_cannot_be_permuted(layer):
    layer.put(quantize(layer.weight, GRIDS["int8"]))
    with pytest.raises(AssertionError, match="codes cannot be permuted"):
        layer.permute_input(torch.randperm(12))


def test_a_permuted_layer_is_trained_as_it_runs(layer):
    x = random(3, 12)
    layer.permute_input(torch.randperm(12))
    student = TrainedLinear(layer)
    weight = student.train_weight()
    with plain_torch():
        assert torch.equal(student(x), layer(x))
    student(x).square().sum().backward()
    wanted = torch.autograd.grad((x[:, layer.input_permutation.long()] @ weight.T + layer.bias).square().sum(), weight)
    torch.testing.assert_close(weight.grad, wanted[0])


@pytest.mark.slow
def test_smoothing_works_behind_a_permutation_as_before_it(pico_model, pico, pico_ids):
    """The scale of each channel is the same, whatever the order of columns is."""
    other = compress.load(pico)[0]
    steps = ChannelPermutation(**FAST), Magnitude(pattern="2:4"), SmoothQuant(), Unrounded()
    permuted = compress.apply(pico_model, steps, pico_ids)
    with torch.no_grad():
        before = permuted(input_ids=pico_ids[:1]).logits
    unsmoothed = compress.apply(other, steps[:2], pico_ids)
    with torch.no_grad():
        torch.testing.assert_close(before, unsmoothed(input_ids=pico_ids[:1]).logits, rtol=1e-3, atol=1e-3)
    one, two = permuted.get_submodule(Q), unsmoothed.get_submodule(Q)
    assert torch.equal(one.mask, two.mask) and torch.equal(one.input_permutation, two.input_permutation)
    assert not torch.allclose(one.weight, two.weight)
    norm = permuted.model.layers[1].input_layernorm.weight, unsmoothed.model.layers[1].input_layernorm.weight
    scale = (norm[1] / norm[0])[one.input_permutation.long()]
    torch.testing.assert_close(one.weight, two.weight * scale, rtol=1e-4, atol=1e-6)


def test_a_reader_in_an_order_of_its_own_is_no_end_of_a_link_and_a_link_of_another_block_is_proved():
    torch.manual_seed(0)
    block = Gated(nn.LayerNorm(6), 6, 8)
    x = random(2, 9, 6)
    forward = lambda b: b(x)  # noqa: E731
    (link,) = find_permutations(block, forward)
    assert find_permutations(block, forward, [link]) == [link]
    assert permute(block, link, torch.arange(8).flip(0), forward).is_kept
    replace_linear(block, "out").permute_input(torch.arange(8).flip(0))
    assert find_permutations(block, forward, [link]) == find_permutations(block, forward) == []


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (
            [Magnitude(pattern="4:8")],
            r"passes\[1\] magnitude does not do what it is prepared for: it needs pattern 2:4",
        ),
        (
            [Magnitude(sparsity=0.5)],
            r"magnitude does not do what it is prepared for: it needs pattern 2:4; write the same",
        ),
        (
            [Magnitude(pattern="2:4", ignore="*.o_proj")],
            r"o_proj: only reorders channels; add a pruning pass after it, such as wanda, or leave the layer out",
        ),
    ],
)
def test_an_order_for_another_pattern_is_an_error_before_any_work(later, message, pico_model):
    with pytest.raises(TargetError, match=message):
        compress.apply(pico_model, [ChannelPermutation(**FAST), *later])


def test_an_order_that_nothing_follows_is_an_error(pico_model):
    for chain in ([ChannelPermutation(**FAST)], [ChannelPermutation(**FAST), compress.RTN()]):
        with pytest.raises(
            compress.CompressError, match=r"only reorders channels; add a pruning pass after it, such as wanda"
        ):
            compress.apply(pico_model, chain)
