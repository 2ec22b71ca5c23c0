"""The roofline: the published table of Llama-2-7B, counts by hand, all families, devices, and what a user sees."""

import dataclasses
import json

import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM

import compress
from compress import cli
from compress.errors import ModelError, RecipeError, TargetError
from compress.layers.linear import CompressedLinear, linears
from compress.models.experts import open_experts
from compress.pipeline.rooflines import roofline
from compress.roofline.devices import devices, read_device
from compress.roofline.estimate import StoredWeight, estimate
from compress.roofline.host import measured_host
from compress.roofline.trace import trace

LENGTH = 32


def on_meta(model):
    """A copy without data."""
    with torch.device("meta"):
        actual = type(model)(model.config).eval()
    open_experts(actual)
    return actual


@pytest.fixture(scope="module")
def llama2():
    """Prefill and decoding of Llama-2-7B on an A6000: 2048 tokens, batch 1, 16 bits."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=4096)).eval()
    return [estimate(actual, {}, 2, read_device("a6000")) for actual in trace(model, 1, 2048)]


def cost_of(actual, name):
    return next(cost for cost in actual.costs if cost.name.endswith(name))


def test_the_published_table_of_llama_2_7b(llama2):
    """LLM Inference Unveiled (Yuan 2024), table 1: q_proj on an A6000."""
    prefill, decode = (cost_of(actual, "q_proj") for actual in llama2)
    assert prefill.count == decode.count == 32
    assert (round(prefill.operations / 32e9), round(prefill.size_bytes / 32e6)) == (69, 67)
    assert (prefill.intensity, prefill.bound) == (1024, "compute")
    assert (round(decode.operations / 32e6), round(decode.size_bytes / 32e6)) == (34, 34)
    assert (round(decode.intensity), decode.bound) == (1, "memory")


def test_attention_and_cache_by_hand(llama2):
    prefill, decode = (cost_of(actual, "(attention)") for actual in llama2)
    assert prefill.operations == 32 * 2 * 2 * 2048 * 2048 * 4096  # scores and their product with the values
    assert decode.operations == 32 * 2 * 2 * 2049 * 4096
    assert decode.size_bytes == 32 * 2 * (2 * 2049 + 2) * 4096  # keys, values, query, output
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_key_value_heads=8)).eval()
    assert trace(model, 3, 100)[0].cached == 2 * 3 * 100 * 8 * 128


@pytest.mark.parametrize("batch", [1, 4])
def test_a_product_takes_the_longer_of_its_operations_and_its_bytes(batch):
    device = read_device("{tflops: 1, tops_int8: 4, gbps: 10, memory_gb: 1}")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1)).eval()
    _, decode = trace(model, batch, 8)
    name = "model.layers.0.mlp.up_proj"
    rows, width = 11008, 4096
    stored = {name: StoredWeight(rows * width // 2, "int8")}
    cost = cost_of(estimate(decode, stored, 2, device), "mlp.up_proj")
    assert cost.size_bytes == rows * width // 2 + 2 * batch * (rows + width)
    assert cost.seconds == max(cost.operations / 4e12, cost.size_bytes / 10e9)
    dense = cost_of(estimate(decode, {}, 2, device), "mlp.up_proj")
    assert dense.seconds == max(dense.operations / 1e12, dense.size_bytes / 10e9) > cost.seconds


@pytest.mark.parametrize("grid", ["int8", "int4", "fp8_e4m3", None])
def test_only_rounded_inputs_use_the_fast_numbers(grid):
    numbers = {"int8": "int8", "int4": "int8", "fp8_e4m3": "float8", None: "float16"}
    assert StoredWeight(1, grid).numbers == numbers[grid]


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "opt", "gemma2", "phi3", "bloom", "falcon", "mixtral", "qwen3-moe", "bert"]
)
def test_families_run_without_data(family, tiny):
    """Linears of the blocks are all seen, each with two operations per weight and token."""
    model = tiny(family)
    prefill, decode = trace(on_meta(model), 1, LENGTH)
    actual = {p.module: p for p in prefill.products if p.kind == "linear"}
    assert len(actual) > 4
    for product in actual.values():
        tokens = product.operations / (2 * product.rows * product.width)
        assert 1 <= tokens <= LENGTH and product.moved == tokens * (product.rows + product.width)
    assert (decode is None) == (family == "bert")
    assert decode is None or 0 < len(decode.products) <= len(prefill.products)
    attention = [p for p in prefill.products if p.kind != "linear"]
    assert len(attention) >= model.config.num_hidden_layers


def test_experts_share_the_tokens(tiny):
    model = tiny("qwen3-moe")
    prefill, decode = trace(on_meta(model), 1, LENGTH)
    chosen, count = model.config.num_experts_per_tok, model.config.num_experts
    first_result = [p for p in prefill.products if ".0.mlp.experts." in p.module and p.module.endswith("up_proj")]
    assert len(first_result) == count
    assert sum(p.operations for p in first_result) >= 2 * LENGTH * chosen * first_result[0].rows * first_result[0].width
    single = [p for p in decode.products if ".0.mlp.experts." in p.module and p.module.endswith("up_proj")]
    assert len(single) == chosen


def test_a_recipe_before_its_run_and_its_checkpoint_after_it(recipe, tmp_path):
    requested = recipe(compress.RTN(weights="int4", group_size=32))
    planned = roofline(requested, "A6000", context=LENGTH)
    folder = compress.run(requested, tmp_path / "out", progress=False).folder
    actual = roofline(folder, "A6000", context=LENGTH)
    assert planned.after == actual.after and planned.before == actual.before
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 0.9 * size < actual.after.weight_bytes <= size
    assert actual.after.decode.seconds < actual.before.decode.seconds
    assert actual.after.cache_bytes == actual.before.cache_bytes > 0


def test_a_simulated_cache_saves_nothing(recipe, tmp_path):
    requested = recipe(compress.KVCache(keys="int2", values="int2"), save={"format": "native"})
    folder = compress.run(requested, tmp_path / "out", progress=False).folder
    for subject in (requested, folder):
        estimated = roofline(subject, "A6000", context=LENGTH)
        [policy] = estimated.simulated
        assert "keys int2" in policy
        sides = [side for side in (estimated.before, estimated.after) if side is not None]
        assert len({side.cache_bytes for side in sides}) == 1 and sides[0].cache_bytes > 0
    run = CliRunner().invoke(cli.main, ["roofline", str(folder), "--on", "A6000", "--context", f"{LENGTH}"])
    assert "int2" in run.output and "is simulated; the figures are those of an exact cache" in run.output
    assert roofline(recipe(compress.RTN(group_size=32)), "A6000", context=LENGTH).simulated == ()


def test_a_dense_model_has_one_side_and_removed_blocks_cost_nothing(pico, recipe):
    assert roofline(pico, "T4", context=LENGTH).after is None
    shorter = roofline(recipe(compress.DropBlocks(count=1)), "T4", context=LENGTH)
    counts = [cost_of(side.prefill, "q_proj").count for side in (shorter.before, shorter.after)]
    assert counts == [3, 2]


def test_this_machine_is_measured(pico):
    device = measured_host(torch.float32)
    assert device.bandwidth > 1e8 and device.rate("float16") > 1e8 and 0 < device.call_seconds < 1e-3
    actual = roofline(pico, "here", context=LENGTH)
    assert actual.before.decode.seconds > sum(cost.seconds for cost in actual.before.decode.costs)


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (compress.RTN(weights="int4", group_size=32), CompressedLinear),
        (compress.Magnitude(pattern="2:4"), torch.nn.Linear),  # zeros are no positions of kept weights
    ],
)
def test_this_machine_is_measured_with_packed_blocks(asked, kind, recipe, monkeypatch):
    """Those that `load` makes, before the run, too; layers that zeros cannot fill stay dense."""
    timed = []

    def decoded(models, *_):
        timed.append({type(layer) for model in models for layer in linears(model).values()})
        return [0.0, 0.0]

    monkeypatch.setattr("compress.roofline.host.decode_seconds", decoded)
    actual = roofline(recipe(asked, save={"format": "native"}), "here", context=LENGTH)
    assert timed[0] == {torch.nn.Linear} and kind in timed[1]
    assert actual.after.call_seconds > 0 and actual.device.call_seconds == actual.before.call_seconds


def test_devices_are_complete():
    assert all(device.bandwidth > 1e11 and device.rate("float16") > 1e13 for device in devices().values())
    assert read_device("h100-sxm").rate("float8") == 1979e12 and read_device("V100").rate("int8") == 112e12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("H1000", "device H1000: unknown device; known: V100, .*, H100-PCIe, H100-SXM, .*, here, or '{tflops: 100"),
        ("{tflops: 1", "device {tflops: 1: cannot be read; write '{tflops: 100"),
        ("{tflops: 1, gbps: 2}", "device: memory_gb missing; write for example"),
        ("{tflops: 1, gbps: 2, memory: 3}", r"device: memory: unknown; did you mean 'memory_gb'\?"),
        ("{tflops: -1, gbps: 2, memory_gb: 3}", "device: tflops: -1 is no number above 0"),
        ("{tflops: fast, gbps: 2, memory_gb: 3}", "device: tflops: 'fast' is no number above 0"),
    ],
)
def test_a_device_that_cannot_be_read(text, message):
    with pytest.raises(RecipeError, match=message):
        read_device(text)


def test_bad_input(pico, recipe):
    with pytest.raises(ModelError, match="context 9999 exceeds the model's 512 positions; use at most 512"):
        roofline(pico, "T4", context=9999)
    with pytest.raises(RecipeError, match="must be at least 1"):
        roofline(pico, "T4", batch=0)
    with pytest.raises(TargetError, match="matches no linear"):
        roofline(recipe(compress.RTN(targets="nothing")), "T4", context=LENGTH)


def test_what_the_command_prints(pico, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    file = tmp_path / "r.yaml"
    file.write_text(f"model: {json.dumps(pico)}\npasses: [{{rtn: {{group_size: 32}}}}]\n")
    run = CliRunner().invoke(cli.main, ["roofline", str(file), "--on", "A6000", "--context", f"{LENGTH}"])
    assert run.exit_code == 0, run.output
    assert "model.layers.*.self_attn.q_proj" in run.output and "memory: weights 2.44 MB ->" in run.output
    assert "decode: " in run.output and "fits in 48 GB" in run.output
    plain = CliRunner().invoke(cli.main, ["roofline", pico, "--on", "A6000", "--context", f"{LENGTH}", "--json"])
    assert json.loads(plain.output)["before"]["decode"]["costs"][0]["count"] == 3
    listed = CliRunner().invoke(cli.main, ["roofline", "--devices"]).output
    assert "float16, 10^12/s" in listed and all(name in listed for name in devices())
    wrong = CliRunner().invoke(cli.main, ["roofline", pico, "--on", "A600"])
    assert wrong.exit_code == 2 and "known: V100" in wrong.output


def test_a_call_takes_what_real_blocks_show_besides_their_products(tiny, monkeypatch):
    """Two models that differ by two blocks; each block of the larger one takes 5 ms more than its products."""
    from compress.roofline import host as measured

    models = [tiny("llama", num_hidden_layers=count) for count in (1, 3)]
    traces = [trace(on_meta(model), 1, 8)[1] for model in models]
    device = read_device("{tflops: 1, gbps: 10, memory_gb: 1}")
    products = [estimate(single, {}, 4, device).seconds for single in traces]
    clock, decoded = [0.0], []

    def run(module, args, kwargs):
        if kwargs.get("past_key_values") is not None:
            decoded.append(module)
            clock[0] += products[models.index(module)] + (0.002, 0.012)[models.index(module)]

    for model in models:
        model.register_forward_pre_hook(run, with_kwargs=True)
    monkeypatch.setattr(measured, "perf_counter", lambda: clock[0])
    actual = measured.with_calls(device, models, traces, 1, 8, {}, 4)
    calls = traces[1].calls - traces[0].calls
    assert actual.call_seconds == pytest.approx(0.010 / calls) and {id(m) for m in decoded} == {id(m) for m in models}
    assert [c.name for c in estimate(traces[1], {}, 4, actual).costs] == [
        c.name for c in estimate(traces[1], {}, 4, device).costs
    ]
    slower = measured.with_calls(dataclasses.replace(device, call_seconds=1.0), models, traces, 1, 8, {}, 4)
    assert slower.call_seconds == 1.0  # at least that of the shortest call


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma2"])
def test_this_machine_is_measured_with_blocks_of_the_model(family, tiny_folder):
    plain = measured_host(torch.float32).call_seconds
    actual = roofline(tiny_folder(family), "here", context=LENGTH)
    assert actual.device.name == "here" and actual.device.call_seconds > plain / 3
