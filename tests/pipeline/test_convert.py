"""compress.export: lossless between formats, refused with what would be, and --requantize with the error it adds."""

import json

import gguf
import pytest
import torch
from click.testing import CliRunner
from tolerances import LOGITS
from transformers import AutoModelForCausalLM, AutoTokenizer

import compress
from compress.cli import main
from compress.errors import ModelError, OutputError, TargetError, UserError, VerificationError
from compress.layers.linear import CompressedLinear
from compress.passes.quantize.llm_int8 import LLMInt8
from compress.passes.quantize.rtn import RTN
from compress.pipeline import convert


@pytest.fixture(scope="module")
def written(pico, tmp_path_factory):
    """written(format, pass) -> a folder with pico, rounded by the pass and saved in the format."""
    made = {}

    def write(form, step):
        key = f"{form} {step}"
        if key not in made:
            model = compress.apply(AutoModelForCausalLM.from_pretrained(pico), [step])
            tokenizer = AutoTokenizer.from_pretrained(pico)
            made[key] = compress.save(model, tmp_path_factory.mktemp("from") / "model", form, tokenizer)
        return made[key]

    return write


def layers(folder):
    model, _ = compress.load(folder)
    return {n: m for n, m in model.named_modules() if isinstance(m, CompressedLinear)}


def weights(folder):
    """The weights of all linears in float32, whatever the dtype of their scales."""
    model, _ = compress.load(folder)
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | CompressedLinear)]
    return {n: CompressedLinear.of(m).weight_as(torch.float32) for n, m in found}


INT4 = {"native", "compressed-tensors", "gptq", "awq", "dense"}


@pytest.mark.few(3)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("first", ["compressed-tensors", "gptq", "awq", "native"])
def test_int4_moves_between_all_formats_that_hold_it_and_back(written, tmp_path, first, symmetric):
    step = RTN(weights="int4", group_size=32, symmetric=symmetric)
    source = written("gptq", step)  # scales are float16, so every format can hold them
    compress.export(source, tmp_path / "a", first)
    before = weights(source)
    for form in sorted(INT4):
        found = compress.export(tmp_path / "a", tmp_path / form, form)
        assert {kind.error for kind in found} == {0.0}
        after = weights(tmp_path / form)
        assert all(torch.equal(before[name], after[name]) for name in before), form
    compress.export(tmp_path / "awq", tmp_path / "back", "gptq")
    ours, theirs = layers(source), layers(tmp_path / "back")
    assert {n: m.sha256() for n, m in ours.items()} == {n: m.sha256() for n, m in theirs.items()}


@pytest.mark.parametrize("group_size", [64, "channel"])
def test_groups_that_share_a_scale_are_split_for_formats_with_smaller_ones(written, tmp_path, group_size):
    source = written("gptq", RTN(weights="int4", group_size=group_size, ignore="*.down_proj"))
    found = compress.export(source, tmp_path / "a", "gguf")
    ends = [kind for kind in found if kind.error]
    assert [(kind.name, kind.before, kind.after) for kind in ends] == [
        ("model.embed_tokens", "dense", "int8, group 32")
    ]
    assert ends[0].error < 0.01 and {kind.after for kind in found} == {"int4, group 32", "int8, group 32"}
    before, after = layers(source), layers(tmp_path / "a")
    for name, layer in before.items():
        assert torch.equal(layer.weight_as(torch.float32), after[name].weight_as(torch.float32)), name


def test_zero_points_are_refused_by_gguf_with_the_formats_that_hold_them(written, tmp_path):
    source = written("gptq", RTN(weights="int4", group_size="channel", symmetric=False))
    with pytest.raises(
        TargetError, match=r"no block type of GGUF holds int4.* zero points; use weights: uint4.* Lossl"
    ):
        compress.export(source, tmp_path / "a", "gguf")
    found = compress.export(source, tmp_path / "a", "gguf", requantize=True)
    assert all(0 < kind.error < 0.1 for kind in found)


def test_what_a_format_cannot_hold_is_refused_with_the_formats_that_can(written, tmp_path):
    source = written("bitsandbytes", RTN(weights="nf4", group_size=32))
    with pytest.raises(TargetError, match=r"q_proj: format gptq holds weights int2.* Lossless formats: native, bitsan"):
        compress.export(source, tmp_path / "a", "gptq")
    assert list(tmp_path.iterdir()) == []


def test_codes_may_be_rounded_again_to_suit_rounded_scales(written, tmp_path):
    source = written("native", RTN(weights="int4", group_size=32))  # float32
    found = compress.export(source, tmp_path / "a", "gptq", requantize=True)
    assert all(0 < kind.error < 1e-3 for kind in found)  # that of float16, with codes that suit the new scales


def test_requantize_takes_the_nearest_grid_and_tells_the_error(written, tmp_path):
    source = written("bitsandbytes", RTN(weights="nf4", group_size=32))
    found = compress.export(source, tmp_path / "a", "gptq", requantize=True)
    assert {(kind.before, kind.after) for kind in found} == {("nf4, group 32", "int4, group 32")}
    before, after = weights(source), weights(tmp_path / "a")
    kind = next(kind for kind in found if kind.name == "model.layers.*.mlp.up_proj")
    names = [f"model.layers.{i}.mlp.up_proj" for i in range(3)]
    error = sum((after[n] - before[n]).square().sum() for n in names) / sum(before[n].square().sum() for n in names)
    assert kind.count == 3 and kind.error == pytest.approx(float(error.sqrt()), rel=1e-4)
    assert 0.02 < kind.error < 0.2


def test_codes_stay_when_only_the_rounding_of_inputs_cannot_be_stated(written, tmp_path):
    source = written("bitsandbytes", LLMInt8())
    with pytest.raises(TargetError, match="Lossless formats: native, bitsandbytes"):
        compress.export(source, tmp_path / "a", "dense")
    found = compress.export(source, tmp_path / "a", "dense", requantize=True)
    assert {kind.error for kind in found} == {0.0}
    before, after = weights(source), weights(tmp_path / "a")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_one_grid_is_found_for_layers_that_must_agree(written, tmp_path):
    step = RTN(weights="int4", group_size=32, overrides={"*.down_proj": {"weights": "int8", "group_size": "channel"}})
    compress.export(written("gptq", step), tmp_path / "a", "awq", requantize=True)
    assert {m.scheme.text for m in layers(tmp_path / "a").values()} == {"int4, group 32"}


def test_mistakes(written, pico, tmp_path):
    source = written("gptq", RTN(weights="int4", group_size=32))
    with pytest.raises(UserError, match="export: format 'gpt' is not known; did you mean 'gptq'"):
        compress.export(source, tmp_path / "a", "gpt")
    with pytest.raises(TargetError, match="holds no compressed layers; compress it first"):
        compress.export(pico, tmp_path / "a", "gptq")
    with pytest.raises(ModelError, match="no folder"):
        compress.export(tmp_path / "none", tmp_path / "a", "gptq")
    with pytest.raises(OutputError, match="exists already"):
        compress.export(source, source, "awq")


def test_the_command_prints_a_line_per_kind_and_writes_a_card(written, tmp_path):
    source = written("gptq", RTN(weights="int4", group_size=32))
    found = CliRunner().invoke(main, ["export", str(source), "--format", "awq", "-o", str(tmp_path / "a")])
    assert found.exit_code == 0, found.output
    assert "0 (lossless)" in found.output and "model card" in found.output
    card = (tmp_path / "a" / "README.md").read_text()
    assert "int4, group 32" in card and "GPTQModel, AutoAWQ, vLLM read such checkpoints too" in card
    again = CliRunner().invoke(main, ["export", str(source), "--format", "bitsandbytes", "-o", str(tmp_path / "b")])
    assert again.exit_code == 2 and "add requantize" in again.output


@pytest.mark.parametrize("form", ["gguf", "gptq", "awq"])
def test_a_format_that_fixes_the_dtype_of_scales_rounds_them(form, written, tmp_path):
    step = RTN(weights="int4", group_size=32)
    source = written("native", step)
    scales = {name: layer.codes.scale for name, layer in layers(source).items()}
    assert {scale.dtype for scale in scales.values()} == {torch.float32}
    run = CliRunner().invoke(
        main, ["export", str(source), "--format", form, "-o", str(tmp_path / "out"), "--dtype", "float32"]
    )
    assert run.exit_code == 0, run.output
    assert "fixes the dtype of scales" in run.output and "lossless" not in run.output
    before, after = layers(source), layers(tmp_path / "out")
    for name, layer in after.items():
        rounded, exact = layer.codes.scale.float(), scales[name]
        assert torch.equal(rounded, exact.half().float())
        codes = [
            part.dense(torch.float64) / s.double().repeat_interleave(32, 1)
            for part, s in ((layer.codes, rounded), (before[name].codes, exact))
        ]
        assert torch.equal(codes[0].round(), codes[1].round())


def test_scales_that_the_dtype_of_a_format_cannot_hold_are_refused(pico, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(pico)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight *= 1e-8  # below the normal numbers of float16
    model = compress.apply(model, [RTN(weights="int4", group_size=32)])
    source = compress.save(model, tmp_path / "source", "native", AutoTokenizer.from_pretrained(pico))
    with pytest.raises(
        TargetError, match="layers.0.mlp.down_proj: its scales are .*cannot represent; add requantize"
    ) as refused:
        compress.export(source, tmp_path / "out", "gptq")
    assert "dtype float32" not in str(refused.value)


def types_of(folder):
    """The number type of each tensor of a GGUF file."""
    return {str(t.name): t.tensor_type.name for t in gguf.GGUFReader(folder / "model.gguf").tensors}


@pytest.mark.parametrize("kind", ["auto", "F32", "F16", "BF16"])
def test_a_dense_model_is_written_as_gguf_in_each_number_type(pico, tmp_path, kind):
    assert compress.export(pico, tmp_path / "a", "gguf", type=kind) == []
    wanted = {"auto": "F32"}.get(kind, kind)
    found = types_of(tmp_path / "a")
    assert {found[name] for name in ("blk.0.attn_q.weight", "token_embd.weight")} == {wanted}
    assert found["output_norm.weight"] == "F32"
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[wanted]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "a", gguf_file="model.gguf", dtype=dtype).state_dict()
    model = AutoModelForCausalLM.from_pretrained(pico)
    norm = next(t for t in gguf.GGUFReader(tmp_path / "a" / "model.gguf").tensors if t.name == "output_norm.weight")
    assert torch.equal(torch.from_numpy(norm.data.copy()), model.model.norm.weight)  # in float32, whatever the type
    for name, tensor in model.to(dtype).state_dict().items():
        assert torch.equal(theirs[name], tensor), name
    text = "Once upon a time, 12 foxes"
    tokenizers = (
        AutoTokenizer.from_pretrained(tmp_path / "a", gguf_file="model.gguf"),
        AutoTokenizer.from_pretrained(pico),
    )
    assert tokenizers[0](text).input_ids == tokenizers[1](text).input_ids


def test_a_dense_model_is_rounded_to_q8_0(pico, tmp_path):
    found = compress.export(pico, tmp_path / "a", "gguf", type="Q8_0")
    assert {line.before for line in found} == {"dense"} and {line.after for line in found} == {"int8, group 32"}
    assert all(0 < line.error < 0.01 for line in found) and sum(line.count for line in found) == 7 * 3 + 1
    assert set(types_of(tmp_path / "a").values()) == {"Q8_0", "F32"}
    before, after = weights(pico), weights(tmp_path / "a")
    name = "model.layers.1.mlp.up_proj"
    absmax = before[name].view(-1, 32).abs().amax(1, keepdim=True)  # half a step of 127 levels, and a float16 scale
    assert bool(((after[name] - before[name]).view(-1, 32).abs() <= absmax * (0.5 / 127 + 1e-3)).all())


def with_sizes(pico, folder, **sizes):
    """A random model with pico's tokenizer and other sizes; returns its folder."""
    config = AutoModelForCausalLM.from_pretrained(pico).config
    for name, value in {"num_hidden_layers": 2, **sizes}.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(pico).save_pretrained(folder)
    return folder


def test_widths_that_q8_0_does_not_hold_stay_dense_and_have_lines(pico, tmp_path):
    source = with_sizes(pico, tmp_path / "source", intermediate_size=72)
    found = {line.name: line for line in compress.export(source, tmp_path / "a", "gguf", type="Q8_0")}
    line = found["model.layers.*.mlp.down_proj"]
    assert (line.after, line.count, line.error) == ("dense (72 inputs are no multiple of 32)", 2, 0)
    assert found["model.layers.*.mlp.up_proj"].after == "int8, group 32"
    assert types_of(tmp_path / "a")["blk.0.ffn_down.weight"] == "F32"
    assert "dense (72 inputs are no multiple of 32)" in (tmp_path / "a" / "README.md").read_text()
    name = "model.layers.1.mlp.down_proj"
    assert torch.equal(weights(source)[name], weights(tmp_path / "a")[name])


def test_an_embedding_that_q8_0_does_not_hold_has_a_line_in_the_table_of_the_command(pico, tmp_path):
    source = with_sizes(pico, tmp_path / "source", hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    command = ["export", str(source), "--format", "gguf", "--type", "Q8_0", "-o", str(tmp_path / "a"), "--json"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    lines = {line["name"]: line["after"] for line in json.loads(result.stdout)["layers"]}
    assert (
        lines["model.embed_tokens"] == lines["model.layers.*.mlp.up_proj"] == "dense (48 inputs are no multiple of 32)"
    )
    assert lines["model.layers.*.mlp.down_proj"] == "int8, group 32"
    assert types_of(tmp_path / "a")["token_embd.weight"] == "F32"


def test_weights_outside_of_the_range_of_float16_are_refused(pico, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(pico)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = 1e5
    model.save_pretrained(tmp_path / "source")
    AutoTokenizer.from_pretrained(pico).save_pretrained(tmp_path / "source")
    message = "layers.1.mlp.up_proj.weight has values outside of the range of float16; use type BF16 or F32"
    with pytest.raises(TargetError, match=message):
        compress.export(tmp_path / "source", tmp_path / "a", "gguf", type="F16")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("end", ["1.post_attention_layernorm.weight", "layers.2.mlp.down_proj.weight"])
def test_a_tensor_that_reads_back_differently_is_an_error(pico, end, tmp_path, monkeypatch):
    opened = convert.load

    def damaged(folder, *options):
        model, tokenizer = opened(folder, *options)
        if folder == tmp_path / "a":
            (weight,) = (weight for name, weight in model.named_parameters() if name.endswith(end))
            weight.mul_(1.5)
        return model, tokenizer

    monkeypatch.setattr(convert, "load", damaged)
    with pytest.raises(VerificationError, match=f"{end} differs after reloading"):
        compress.export(pico, tmp_path / "a", "gguf", type="F16")


STEPS = [
    compress.Wanda(pattern="2:4"),
    compress.Narrow(ffn=1 / 3, importance="weight", repair="none"),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: type(step).__name__)
def test_a_recipe_that_leaves_linears_dense_writes_gguf(recipe, step, tmp_path):
    save = {"format": "gguf", "embedding": "dense", "head": "dense", "dtype": "float16"}
    report = compress.run(recipe(step, save=save), tmp_path, progress=False).report
    assert report["verified"]["own"] <= LOGITS and report["verified"]["transformers"] <= LOGITS
    assert set(types_of(tmp_path).values()) == {"F16", "F32"}
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert reader.get_field("general.file_type").contents() == 1  # mostly F16
    ours = weights(tmp_path)
    if isinstance(step, compress.Narrow):
        assert reader.get_field("llama.feed_forward_length").contents() == 192
        assert ours["model.layers.1.mlp.down_proj"].shape[1] == 192
    else:
        assert all((w.view(-1, 4) != 0).sum(1).max() <= 2 for name, w in ours.items() if name != "lm_head")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).state_dict()
    assert all(torch.equal(theirs[f"{name}.weight"], weight) for name, weight in ours.items())


@pytest.mark.parametrize("form", ["native", "dense"])
@pytest.mark.parametrize("kind", ["auto", "Q8_0"])
def test_a_pruned_model_is_written_dense_with_its_zeros(pico, tmp_path, form, kind):
    step = compress.Magnitude(sparsity=0.6)
    model = compress.apply(AutoModelForCausalLM.from_pretrained(pico), [step])
    compress.save(model, tmp_path / "pruned", form, AutoTokenizer.from_pretrained(pico))
    compress.export(tmp_path / "pruned", tmp_path / "a", "gguf", type=kind)
    before, after = weights(tmp_path / "pruned"), weights(tmp_path / "a")
    zeros = before["model.layers.0.mlp.up_proj"] == 0
    assert 0.55 < zeros.float().mean() < 0.65
    for name in before:
        assert bool((after[name][before[name] == 0] == 0).all()), name
        assert kind == "Q8_0" or torch.equal(before[name], after[name]), name


@pytest.mark.parametrize(("kind", "matrices"), [("auto", "BF16"), ("Q8_0", "Q8_0")])
def test_a_pruned_bfloat16_model_is_written_on_any_processor(pico, tmp_path, kind, matrices):
    model = AutoModelForCausalLM.from_pretrained(pico, dtype=torch.bfloat16)
    model = compress.apply(model, [compress.Magnitude(pattern="2:4")])
    compress.save(model, tmp_path / "pruned", "native", AutoTokenizer.from_pretrained(pico))
    lines = compress.export(tmp_path / "pruned", tmp_path / "a", "gguf", type=kind)
    assert set(types_of(tmp_path / "a").values()) == {matrices, "F32"}
    assert ("model.embed_tokens" in {line.name for line in lines}) is (kind == "Q8_0")


def test_a_narrowed_model_is_written_as_gguf(pico, tmp_path):
    step = compress.Narrow(ffn=1 / 3, importance="weight", repair="none")
    model = compress.apply(AutoModelForCausalLM.from_pretrained(pico), [step], torch.arange(64).view(2, 32))
    compress.save(model, tmp_path / "narrow", "dense", AutoTokenizer.from_pretrained(pico))
    compress.export(tmp_path / "narrow", tmp_path / "a", "gguf")
    reader = gguf.GGUFReader(tmp_path / "a" / "model.gguf")
    assert reader.get_field("llama.feed_forward_length").contents() == 192
    ids = torch.arange(20)[None]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "a", gguf_file="model.gguf", dtype=torch.float32)
    assert torch.allclose(theirs(ids).logits, model(ids).logits, atol=1e-4)


@pytest.mark.parametrize(
    ("form", "options", "message"),
    [
        (
            "gguf",
            {"type": "Q4_0"},
            "type 'Q4_0' is not written for dense models; use one of auto, F32, F16, BF16, Q8_0",
        ),
        ("native", {"type": "F16"}, "type F16 is for format gguf; format native has dtype: float16"),
        ("gguf", {"type": "F16", "dtype": "bfloat16"}, "type F16 and dtype bfloat16 contradict each other"),
    ],
)
def test_types_that_are_not_written_are_errors(pico, tmp_path, form, options, message):
    with pytest.raises(UserError, match=message):
        compress.export(pico, tmp_path / "a", form, **options)
    assert not (tmp_path / "a").exists()


def test_a_type_of_dense_models_is_refused_for_codes(written, tmp_path):
    source = written("gptq", RTN(weights="int4", group_size=32))
    with pytest.raises(UserError, match="type F16 is for a dense model, but .* holds codes; leave type out"):
        compress.export(source, tmp_path / "a", "gguf", type="F16")
