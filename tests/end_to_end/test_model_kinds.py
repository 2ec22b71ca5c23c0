"""Kinds of models: those that are not supported are refused in one line before any work, by `plan`, `run` and `apply`;
of models with images among their inputs the language model is compressed, and the rest stays as it is."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from tolerances import LOGITS

import compress
from compress import GPTQ, RTN, Distill, SliceGPT, Wanda, cli
from compress.blockwise.capture import ModelShell
from compress.checkpoint.opening import open_model
from compress.errors import ModelError
from compress.layers.linear import CompressedLinear
from compress.models.structure.blocks import find_blocks

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
SECTIONS = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
ENCODER_DECODER = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

UNSUPPORTED = {
    "BertForMultipleChoice": (lambda: transformers.BertConfig(**SIZES), "is of no other supported kind"),
    "BertForNextSentencePrediction": (lambda: transformers.BertConfig(**SIZES), "is of no other supported kind"),
    "AlbertModel": (
        lambda: transformers.AlbertConfig(**SIZES, embedding_size=16),
        "runs encoder.albert_layer_groups.0 several times in a forward pass",
    ),
    "BertForPreTraining": (lambda: transformers.BertConfig(**SIZES), "returns no logits"),
    "T5ForConditionalGeneration": (
        lambda: transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
        "does not say which token its decoder starts with; add decoder_start_token_id",
    ),
    "T5Model": (
        lambda: transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
        "is an encoder-decoder model without a language-model head, or for other inputs than text and sound",
    ),
    "BartForSequenceClassification": (
        lambda: transformers.BartConfig(**ENCODER_DECODER, max_position_embeddings=64),
        "is an encoder-decoder model without a language-model head, or for other inputs than text and sound",
    ),
    "WhisperModel": (
        lambda: transformers.WhisperConfig(**ENCODER_DECODER, num_mel_bins=8, max_source_positions=16),
        "does not take token ids",
    ),
    "ViTForImageClassification": (lambda: transformers.ViTConfig(**IMAGE), "does not take token ids"),
    "CLIPModel": (
        lambda: transformers.CLIPConfig(text_config=SIZES, vision_config=IMAGE),
        "has no one table of token embeddings",
    ),
    "MllamaForConditionalGeneration": (  # blocks that run only with an image
        lambda: transformers.MllamaConfig(
            text_config={
                **GROUPED,
                "cross_attention_layers": [1],
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 4,
                "image_size": 16,
                "patch_size": 8,
                "intermediate_layers_indices": [0],
                "vision_output_dim": 64,
                "supported_aspect_ratios": [[1, 1]],
                "max_num_tiles": 1,
            },
        ),
        "1 of 2 blocks ran in a forward pass on token ids",
    ),
}

WITH_IMAGES = {
    "Qwen2_5_VLForConditionalGeneration": lambda: transformers.Qwen2_5_VLConfig(
        text_config={**GROUPED, "rope_parameters": SECTIONS},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "out_hidden_size": 32,
            "patch_size": 8,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        image_token_id=60,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    ),
    "Mistral3ForConditionalGeneration": lambda: transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**GROUPED),
        vision_config=transformers.PixtralVisionConfig(**IMAGE),
        image_token_index=60,
    ),
    "Gemma3ForConditionalGeneration": lambda: transformers.Gemma3Config(
        text_config={**GROUPED, "head_dim": 8, "sliding_window": 8},
        vision_config=IMAGE,
        mm_tokens_per_image=4,
        image_token_index=60,
        boi_token_index=61,
        eoi_token_index=62,
    ),
    "LlavaForConditionalGeneration": lambda: transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**GROUPED),
        vision_config=transformers.CLIPVisionConfig(**{**IMAGE, "num_hidden_layers": 6}),  # more than in the blocks
        image_token_index=60,
    ),
}


@pytest.fixture(scope="module")
def model_of():
    """model_of(class name, its config) -> a random model."""

    def build(kind, config):
        torch.manual_seed(0)
        return getattr(transformers, kind)(config).eval()

    return build


def told(code: int, *args) -> str:
    """The one line on standard error of a command that must fail with this code."""
    result = CliRunner().invoke(cli.main, [str(a) for a in args])
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert all(line.startswith("error: ") for line in result.stderr.splitlines()), result.stderr
    return result.stderr


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_model_that_is_not_supported_is_refused_before_any_work(kind, model_of, recipe, texts, tmp_path):
    config, message = UNSUPPORTED[kind]
    model, folder, out = model_of(kind, config()), tmp_path / "model", tmp_path / "out"
    model.save_pretrained(folder)
    path = tmp_path / "r.yaml"
    path.write_text(recipe(RTN(group_size=16), model=str(folder)).to_yaml())
    for command in (
        ["plan", path],
        ["run", path, "-o", out],
        ["eval", folder, "--text", texts["tiny"], "--length", 24],
    ):
        line = told(2, *command)
        assert line.startswith("error: model: ") and message in line and "; " in line
    assert not out.exists()
    with pytest.raises(ModelError, match=message):
        compress.apply(model, [RTN(group_size=16)])
    assert not any(isinstance(module, CompressedLinear) for module in model.modules())


@pytest.mark.parametrize("kind", ["BertForMultipleChoice", "T5Model"])
def test_a_teacher_that_is_not_supported_is_refused_by_the_plan(kind, model_of, recipe, tiny_folder, tiny, tmp_path):
    config, message = UNSUPPORTED[kind]
    model = model_of(kind, config())
    model.save_pretrained(tmp_path)
    steps = RTN(group_size=16), Distill(teacher=str(tmp_path), steps=1)
    with pytest.raises(ModelError, match=f"teacher: .*{message}"):
        compress.plan(recipe(*steps, model=tiny_folder("llama")))
    with pytest.raises(ModelError, match=f"teacher: .*{message}"):
        compress.apply(tiny("llama"), [RTN(group_size=16), Distill(steps=1)], torch.zeros(1, 8).long(), teacher=model)


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_the_language_model_of_a_model_with_images_is_compressed(kind, model_of, recipe, ids, tmp_path):
    model, out = model_of(kind, WITH_IMAGES[kind]()), tmp_path / "out"
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text('{"image_processor_type": "any"}')
    steps = Wanda(sparsity=0.5), GPTQ(group_size=16)
    result = compress.run(recipe(*steps, model=str(tmp_path / "model")), out)
    verified = result.report["verified"]
    assert verified["layers"] == 14 and verified["own"] <= LOGITS and verified["transformers"] <= LOGITS
    loaded, _ = compress.load(out)
    packed = {name for name, module in loaded.named_modules() if isinstance(module, CompressedLinear)}
    assert len(packed) == 14 and all("language_model" in name for name in packed)
    before, after = model.state_dict(), loaded.state_dict()
    vision = [name for name in before if "vision" in name or "visual" in name or "projector" in name]
    assert vision and all(torch.equal(before[name], after[name]) for name in vision)
    applied = compress.apply(model, steps, recipe_ids(result))
    with torch.no_grad():
        torch.testing.assert_close(applied(input_ids=ids()).logits, loaded(input_ids=ids()).logits, rtol=0, atol=1e-3)
    assert json.loads((out / "preprocessor_config.json").read_text()) == {"image_processor_type": "any"}


def recipe_ids(result) -> torch.Tensor:
    """The calibration ids of a run whose calibration source is a .npy file."""
    import numpy as np

    recipe = compress.Recipe.from_yaml(result.folder / "recipe.yaml")
    return torch.from_numpy(np.load(recipe.calibration.source))


def test_images_are_read_as_before(model_of, recipe, tmp_path):
    model = model_of("LlavaForConditionalGeneration", WITH_IMAGES["LlavaForConditionalGeneration"]())
    model.save_pretrained(tmp_path / "model")
    asked = recipe(RTN(group_size=16, weights="int8"), model=str(tmp_path / "model"))
    compress.run(asked, tmp_path / "out")
    loaded, _ = compress.load(tmp_path / "out")
    other = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    inputs = {"input_ids": torch.tensor([[0, *[60] * 4, 5, 6]]), "pixel_values": torch.randn(1, 3, 16, 16)}
    with torch.no_grad():
        wanted, ours, theirs = (each(**inputs).logits for each in (model, loaded, other))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=0.05)  # as near as int8 is
    assert not torch.equal(ours, wanted)


def test_the_hidden_width_of_a_model_with_images_is_fixed(model_of, recipe, tmp_path):
    model_of("LlavaForConditionalGeneration", WITH_IMAGES["LlavaForConditionalGeneration"]()).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="such as a vision model, that write into its hidden states"):
        compress.plan(recipe(SliceGPT(), model=str(tmp_path)))


def test_the_blocks_are_those_of_the_part_with_the_token_embeddings(model_of):
    model = model_of("LlavaForConditionalGeneration", WITH_IMAGES["LlavaForConditionalGeneration"]())
    assert [block.name for block in find_blocks(model)] == [f"model.language_model.layers.{i}" for i in range(2)]


@pytest.mark.parametrize("family", ["llama", "bloom", "qwen3-moe", "bert"])
def test_the_check_reads_no_weight_of_a_block(family, tiny_folder, monkeypatch):
    opened = open_model(tiny_folder(family))
    monkeypatch.setattr(type(opened.weights), "bring", lambda *_: pytest.fail("a block was brought"))
    ModelShell(opened).check()


def test_a_config_that_transformers_cannot_build(tiny_folder, tmp_path):
    for path in Path(tiny_folder("llama")).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "sillyu"}))
    with pytest.raises(ModelError, match=r"cannot build LlamaForCausalLM from .*config\.json .*sillyu"):
        open_model(str(tmp_path))
