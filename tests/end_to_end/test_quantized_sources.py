"""Models that other programs have quantized are the source of a run: dequantized on read, block by block."""

import json

import pytest
import quantized_sources as sources
import torch
from batches import batch_of
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tolerances import LOGITS, near_rounded

import compress
from compress import RTN, Wanda
from compress.checkpoint.opening import open_model
from compress.cli import main
from compress.errors import TargetError
from compress.layers.linear import CompressedLinear
from compress.passes.contract.journal import Journal
from compress.pipeline.reference import check_source
from compress.pipeline.sources import open_start

CASES = {
    "fp8": lambda folder: sources.fp8(sources.qwen3(), folder),
    "fp8 experts": lambda folder: sources.fp8(sources.qwen3_moe(), folder, scale_dtype=torch.bfloat16),
    "deepseek": lambda folder: sources.fp8(sources.deepseek(), folder),
    "mxfp4": lambda folder: sources.mxfp4(sources.gpt_oss(), folder),
    "modelopt fp8": lambda folder: sources.modelopt_fp8(sources.llama(), folder),
    "modelopt nvfp4": lambda folder: sources.modelopt_nvfp4(sources.llama(), folder),
}
GRIDS = {"fp8": "fp8: fp8_e4m3, blocks 128 x 128", "fp8 experts": "fp8: fp8_e4m3, blocks 128 x 128"}
GRIDS |= {"deepseek": GRIDS["fp8"], "mxfp4": "mxfp4: mxfp4, group 32"}
GRIDS |= {"modelopt fp8": "modelopt: fp8_e4m3, group tensor", "modelopt nvfp4": "modelopt: nvfp4, group 16"}
PIECES = {"source": "embedded", "sequences": 2, "length": 32}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """made(case) -> (folder, dense weights by the names of the stored layers)."""
    return sources.maker(CASES, tmp_path_factory)


def recipe(model, *passes, evaluate=None, **save):
    values = {"model": str(model), "passes": list(passes), "calibration": PIECES, "eval": evaluate, "save": save}
    return compress.Recipe.from_data(values)


def tensors_in(folder):
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def notes_of(result):
    return [entry.message for entry in result.journal.entries if entry.kind == "note"]


@pytest.mark.parametrize("case", CASES)
def test_plan_and_run_say_that_the_source_is_dequantized(case, made, tmp_path):
    """A plan without error is followed by a run without error, whose checkpoint is verified."""
    folder, _ = made(case)
    asked = recipe(folder, {"rtn": {"weights": "int4", "group_size": 32}})
    planned = compress.plan(asked)
    said = f"the source is quantized already ({GRIDS[case]}"
    assert any(said in note and "the base of comparison is the dequantized model" in note for note in planned.notes)
    result = compress.run(asked, tmp_path / "out", progress=False)
    assert any(said in note for note in notes_of(result)) and said in (tmp_path / "out" / "report.md").read_text()
    assert result.report["verified"]["own"] <= LOGITS
    assert result.report["size"]["tensor_bytes"] == planned.checkpoint_bytes
    stored = (folder / "model.safetensors").stat().st_size
    assert result.report["size"]["source_bytes"] == stored < result.report["size"]["dense_bytes"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["quant_method"] == (
        "compressed-tensors"
    )
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


@pytest.mark.parametrize("case", ["fp8 experts", "mxfp4"])
def test_the_source_is_compared_with_the_model_of_transformers(case, made, tmp_path):
    result = compress.run(recipe(made(case)[0], {"rtn": {"group_size": 32}}), tmp_path / "out", progress=False)
    assert not any("compared with those of transformers" in note for note in notes_of(result))


def test_routers_that_are_undecided_in_16_bits_are_no_error(made):
    """Sums in another order choose another expert for one of these tokens."""
    asked = recipe(made("mxfp4")[0], {"rtn": {"group_size": 32}}).model_copy(update={"dtype": "bfloat16"})
    opened, journal = open_start(asked, torch.device("cpu")), Journal()
    ids = torch.randint(200, (48, 16), generator=torch.Generator().manual_seed(2))
    check_source(opened, batch_of(ids), asked, 1 << 30, journal)
    assert opened.dtype is torch.bfloat16 and not journal.entries


@pytest.mark.parametrize("case", CASES)
def test_blocks_hold_the_dequantized_weights(case, made):
    folder, dense = made(case)
    opened = open_start(recipe(folder, {"rtn": {"weights": "int4", "group_size": 32}}), torch.device("cpu"))
    seen = 0
    for block in opened.blocks:
        opened.bring(block)
        for name, layer in block.module.named_modules():
            if not isinstance(layer, CompressedLinear):
                continue
            assert layer.scheme.plain
            full = f"{block.name}.{name}"
            expert, _, leaf = full.rpartition(".")
            stacked = f"{expert.rpartition('.')[0]}.{leaf}"
            weight = dense[f"{full}.weight"] if stacked not in dense else dense[stacked][int(expert.rpartition(".")[2])]
            assert torch.allclose(layer.weight, weight.to(layer.weight.dtype), rtol=2**-7, atol=0), full  # one step
            seen += 1
        opened.weights.release(block)
    assert seen >= 14


def test_experts_in_mxfp4_keep_their_codes_on_the_same_grid(made, tmp_path):
    """Also those of groups whose scale no rounding finds again."""
    folder, _ = made("mxfp4")
    compress.run(recipe(folder, {"rtn": {"weights": "mxfp4"}}), tmp_path / "out", progress=False)
    source, stored = load_file(folder / "model.safetensors"), tensors_in(tmp_path / "out")
    for block in range(2):
        for leaf in ("gate_up_proj", "down_proj"):
            start = f"model.layers.{block}.mlp.experts"
            for expert in range(4):
                packed = source[f"{start}.{leaf}_blocks"][expert].flatten(1)
                assert torch.equal(stored[f"{start}.{expert}.{leaf}.weight_packed"], packed)
                assert torch.equal(
                    stored[f"{start}.{expert}.{leaf}.weight_scale"], source[f"{start}.{leaf}_scales"][expert]
                )


@pytest.mark.parametrize(("case", "dtype"), [("fp8 experts", "auto"), ("deepseek", "float32")])
def test_blocks_of_fp8_keep_codes_and_scales_on_the_same_grid(case, dtype, made, tmp_path):
    """Scales stay bit for bit where the storage dtype holds them."""
    folder, _ = made(case)
    blocks = RTN(weights="fp8_e4m3", group_size=128, block_rows=128)
    compress.run(recipe(folder, blocks, dtype=dtype), tmp_path / "out", progress=False)
    source, stored = load_file(folder / "model.safetensors"), tensors_in(tmp_path / "out")
    layers = [name.removesuffix(".weight_scale_inv") for name in source if name.endswith(".weight_scale_inv")]
    assert len(layers) >= 28
    for name in layers:
        assert torch.equal(*(t[f"{name}.weight"].view(torch.uint8) for t in (stored, source))), name
        assert torch.equal(stored[f"{name}.weight_scale"].float(), source[f"{name}.weight_scale_inv"].float()), name


def test_codes_of_float32_scales_stay_when_scales_are_stored_in_bfloat16(made, tmp_path):
    folder, _ = made("deepseek")
    blocks = RTN(weights="fp8_e4m3", group_size=128, block_rows=128)
    compress.run(recipe(folder, blocks), tmp_path / "out", progress=False)
    source, stored = load_file(folder / "model.safetensors"), tensors_in(tmp_path / "out")
    for name in (name for name in source if source[name].dtype is torch.float8_e4m3fn):
        assert torch.equal(stored[name].view(torch.uint8), source[name].view(torch.uint8)), name
        assert torch.equal(stored[f"{name}_scale"], source[f"{name}_scale_inv"].bfloat16()), name


def test_weights_that_changed_get_other_codes(made, tmp_path):
    folder, _ = made("fp8 experts")
    passes = Wanda(pattern="2:4"), RTN(weights="fp8_e4m3", group_size=128, block_rows=128)
    compress.run(recipe(folder, *passes, sparse="off"), tmp_path / "out", progress=False)
    name = "model.layers.0.self_attn.q_proj.weight"
    codes = tensors_in(tmp_path / "out")[name].float()
    assert float((codes == 0).float().mean()) >= 0.5
    assert not torch.equal(codes, load_file(folder / "model.safetensors")[name].float())


def test_layers_that_no_pass_works_on_keep_their_codes(made, tmp_path):
    folder, _ = made("mxfp4")
    attention = RTN(weights="int4", group_size=32, targets=("*.self_attn.*",))
    result = compress.run(recipe(folder, attention), tmp_path / "out", progress=False)
    assert any("16 layers keep their codes" in note for note in notes_of(result))
    source, stored = load_file(folder / "model.safetensors"), tensors_in(tmp_path / "out")
    name = "model.layers.1.mlp.experts"
    packed = source[f"{name}.down_proj_blocks"][3].flatten(1)
    assert torch.equal(stored[f"{name}.3.down_proj.weight_packed"], packed)
    assert stored["model.layers.1.self_attn.q_proj.weight_packed"].dtype is torch.int32


def test_export_keeps_codes_and_the_rounding_of_inputs(made, tmp_path):
    folder, _ = made("fp8 experts")
    compress.export(folder, tmp_path / "out", "compressed-tensors")
    group = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"][
        "group_0"
    ]
    assert group["weights"]["block_structure"] == [128, 128] and group["input_activations"]["group_size"] == 128
    before, after = compress.load(folder)[0], compress.load(tmp_path / "out")[0]
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert near_rounded(before(input_ids=ids).logits, after(input_ids=ids).logits)


def test_a_checkpoint_of_others_in_a_written_format_is_dequantized_too(pico, tmp_path):
    """compressed-tensors without the digests that checkpoints of compress have."""
    model, tokenizer = compress.load(pico)
    compress.apply(model, [RTN(weights="int8", group_size="channel")])
    own = compress.save(model, tmp_path / "own", "compressed-tensors", tokenizer=tokenizer)
    asked = {"rtn": {"weights": "int4", "group_size": 32}}
    with pytest.raises(TargetError, match="already quantized .* compress export FOLDER --format dense"):
        compress.plan(recipe(own, asked))
    (own / "SHA256SUMS").unlink()
    planned = compress.plan(recipe(own, asked))
    assert any("(compressed-tensors: int8, group channel): 21 layers are dequantized" in n for n in planned.notes)
    result = compress.run(
        recipe(own, asked, evaluate={"perplexity": ["embedded"], "windows": 2, "length": 32}),
        tmp_path / "out",
        progress=False,
    )
    quality = result.report["perplexity"][0]
    assert result.report["verified"]["layers"] == 21 and quality["base"]["loss"] != quality["compressed"]["loss"]


def test_the_base_of_comparison_is_the_dequantized_model(made, tmp_path):
    """Its inputs are not rounded, though the source states so."""
    folder, dense = made("fp8 experts")
    evaluate = {"perplexity": ["embedded"], "windows": 2, "length": 32}
    asked = recipe(folder, {"rtn": {"weights": "int8", "group_size": "channel"}}, evaluate=evaluate)
    asked = asked.model_copy(update={"dtype": "float32"})  # as below
    result = compress.run(asked, tmp_path / "out", progress=False)
    plain = tmp_path / "dense"
    tensors = sources.dense_tensors(sources.qwen3_moe(), plain)
    tensors |= {name: weight.contiguous() for name, weight in dense.items()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    alone = compress.evaluate([plain], compress.Evaluate(**evaluate), work=None, dtype="float32")
    found = result.report["perplexity"][0]["base"]["loss"]
    assert found == pytest.approx(alone.models[0].texts[0].compressed.loss, abs=1e-5)


def test_tensors_of_undeclared_layers_are_dequantized(tmp_path):
    folder = tmp_path / "model"
    sources.fp8(sources.deepseek(), folder)
    tensors = load_file(folder / "model.safetensors")
    weight = torch.randn(160, 128, generator=torch.Generator().manual_seed(1))
    codes, scales, dense = sources.fp8_blocks(weight, (128, 128))
    extra = {"model.layers.61.eh_proj.weight": codes, "model.layers.61.eh_proj.weight_scale_inv": scales}
    extra |= {"model.layers.61.enorm.weight": torch.ones(128).bfloat16()}
    save_file(tensors | extra, folder / "model.safetensors", {"format": "pt"})
    asked = recipe(folder, {"rtn": {"weights": "int4", "group_size": 32}})
    planned = compress.plan(asked)
    assert any("2 tensors that DeepseekV3ForCausalLM has no parts for are copied" in note for note in planned.notes)
    copied = next(need for need in planned.fit.needs if need.where == "copied tensors")
    assert copied.parts["dequantized weights"] == weight.numel() * (2 + 4)
    result = compress.run(asked, tmp_path / "out", progress=False)
    assert result.report["size"]["tensor_bytes"] == planned.checkpoint_bytes
    stored = tensors_in(tmp_path / "out")
    assert torch.equal(stored["model.layers.61.eh_proj.weight"], dense.bfloat16())
    assert "model.layers.61.eh_proj.weight_scale_inv" not in stored


@pytest.mark.parametrize("case", ["fp8", "mxfp4", "modelopt nvfp4"])
def test_the_commands_take_such_a_folder(case, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = str(made(case)[0])
    short = ["--set", "calibration.sequences=2", "--set", "calibration.length=32"]
    for command in (
        ["quantize", folder, "--scheme", "W4A16", *short, "--eval", "none", "-o", "int4"],
        ["prune", folder, "--pattern", "2:4", *short, "--eval", "none", "-o", "pruned"],
        ["inspect", folder],
        ["eval", folder, "--windows", "1", "--length", "32"],
    ):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, f"{command}: {result.output}"


def test_one_block_is_in_memory_at_a_time(made):
    folder, _ = made("fp8")
    opened = open_model(str(folder), codes=lambda opened: opened.linear_names())
    assert all(tensor.is_meta for block in opened.blocks for tensor in block.module.parameters())
    first, second = opened.blocks
    opened.bring(first)
    assert all(tensor.is_meta for tensor in second.module.parameters())
    opened.weights.release(first)
    assert all(tensor.is_meta for tensor in first.module.state_dict().values())
