"""Vision-language models calibrated with pictures: from a list to a checkpoint, and in memory."""

import json
from typing import ClassVar

import pytest
import torch
import transformers
from pictures import GROUPED, IMAGE, PLACEHOLDERS, write_model, write_pictures
from safetensors.torch import save_file
from tolerances import LOGITS
from transformers import AutoModelForImageTextToText

import compress
from compress import GPTQ, RTN, Calibration, Evaluate
from compress.data.ids import model_sample
from compress.errors import CalibrationError
from compress.layers.linear import CompressedLinear
from compress.models.kinds.kinds import examples_of, kind_of, objective_of
from compress.models.kinds.vision_language import VisionLanguage
from compress.passes.contract.layers import Solution
from compress.passes.contract.observers import InputNorm
from compress.passes.contract.passes import LayerPass
from compress.train.objective import LanguageLoss

INT4 = {"weights": "int4", "group_size": 16}


def qwen():
    """Pictures of 4 x 4 patches, four of which are one position of the language model."""
    torch.manual_seed(0)
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            **GROUPED,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        vision_config={**vision, "patch_size": 8, "window_size": 16, "fullatt_block_indexes": [1]},
        image_token_id=IMAGE,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """The path of a list of four pictures with texts of 3, 4, 3 and 2 words."""
    return write_pictures(tmp_path_factory.mktemp("pictures"))


def opened(folder):
    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def sample(folder, source, count=None, length=None):
    return model_sample(opened(folder), None, source, "test", count, length)[0]


def loss_of_transformers(model, examples):
    """The mean loss over the tokens of the texts, one example at a time."""
    total, count = 0.0, 0
    with torch.no_grad():
        for example in examples:
            targets = int((example.labels[:, 1:] != -100).sum())
            total += targets * float(model(**example.inputs, labels=example.labels).loss)
            count += targets
    return total / count


def test_from_a_list_of_pictures_to_a_checkpoint(folder, pictures, recipe, tmp_path):
    asked = recipe(
        GPTQ(**INT4),
        model=folder,
        calibration=Calibration(source=pictures, sequences=4, length=32, batch=2, divided=False),
        eval=Evaluate(perplexity=(pictures,), windows=4, length=32),
        save={"format": "native"},
    )
    report = compress.run(asked, tmp_path / "out").report
    assert report["verified"]["own"] <= LOGITS and len(report["layers"]) == 2 * 7
    (quality,) = report["perplexity"]
    examples = sample(folder, pictures)
    assert (quality["windows"], quality["length"], quality["base"]["tokens"]) == (4, PLACEHOLDERS + 6, 12 + 4)
    assert quality["base"]["loss"] == pytest.approx(loss_of_transformers(opened(folder), examples), rel=1e-4)
    model, _ = compress.load(tmp_path / "out", verify=True)
    packed = {name for name, module in model.named_modules() if isinstance(module, CompressedLinear)}
    assert len(packed) == 14 and all(name.startswith("model.language_model.layers.") for name in packed)
    stock = opened(tmp_path / "out")
    assert quality["compressed"]["loss"] == pytest.approx(loss_of_transformers(model, examples), rel=1e-4)
    with torch.no_grad():
        ours, theirs = (each(**examples[0].inputs).logits for each in (model, stock))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert "pipeline_tag: image-text-to-text" in (tmp_path / "out" / "README.md").read_text()


def test_pictures_and_texts_become_examples(folder, pictures):
    examples = sample(folder, pictures)
    assert kind_of(opened(folder)) == VisionLanguage()
    first = examples[0]
    assert first.inputs["input_ids"].tolist() == [[2, *[IMAGE] * PLACEHOLDERS, 5, 6, 7, 3]]
    assert first.labels.tolist() == [[2, *[-100] * PLACEHOLDERS, 5, 6, 7, 3]]
    assert first.inputs["pixel_values"].shape == (1, 3, 16, 16)
    assert [len(batch) for batch in examples.batches(4)] == [2, 1, 1]
    assert sample(folder, pictures, length=7)[0].inputs["input_ids"].shape == (1, 7)
    with pytest.raises(CalibrationError, match="list.jsonl:1: its image does not end within 3 tokens"):
        sample(folder, pictures, length=3)


def test_a_text_alone_is_read_as_by_other_models(folder, recipe, tmp_path):
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "w5 w6 w7 w8 w9 w10 w11 w12"}), encoding="utf-8")
    words = transformers.AutoTokenizer.from_pretrained(folder)
    found, _ = model_sample(opened(folder), words, str(tmp_path / "text.jsonl"), "test", 2, 4)
    assert [set(example.inputs) for example in found] == [{"input_ids"}] * 2


def test_the_plan_counts_pixels(folder, pictures, recipe):
    """Those of the calibration, of its batches and of the evaluation."""
    asked = recipe(
        GPTQ(**INT4),
        model=folder,
        calibration=Calibration(source=pictures, sequences=4, length=32, batch=2, divided=False),
        eval=Evaluate(perplexity=(pictures,), windows=3, length=32),
        save={"format": "native"},
    )
    needs = compress.plan(asked).fit.needs
    assert {need.parts["examples"] for need in needs} == {(4 + 4 + 3) * 4 * 3 * 16 * 16}
    assert VisionLanguage().feature_bytes(qwen(), 4) == qwen_inputs(1)["pixel_values"].nbytes


seen: dict[str, int] = {}


class CountingTokens(LayerPass):
    """Counts the tokens that each layer sees, and leaves its weight."""

    paper: ClassVar[str] = "none"
    observes: ClassVar = InputNorm

    def solve(self, weight, statistics, layer):
        seen[layer.name] = statistics.tokens
        return Solution(weight)


def qwen_inputs(count=3):
    """Inputs as the processor of Qwen2.5-VL makes them: the patches of all pictures, one after the other."""
    draw = torch.Generator().manual_seed(1)
    ids = [[5 + i, 62, *[IMAGE] * PLACEHOLDERS, 63, 6 + i, 7, 8] for i in range(count)]
    patches = torch.randn(count * 16, 3 * 2 * 8 * 8, generator=draw)
    inputs = {"input_ids": torch.tensor(ids), "pixel_values": patches}
    inputs |= {"image_grid_thw": torch.tensor([[1, 4, 4]] * count)}
    return inputs | {"mm_token_type_ids": (inputs["input_ids"] == IMAGE).int()}


def test_the_sweep_sees_the_positions_of_images():
    seen.clear()
    compress.apply(qwen(), CountingTokens(), qwen_inputs(), batch=2)
    assert set(seen.values()) == {3 * 10} and len(seen) == 14


@pytest.mark.parametrize("step", [RTN(**INT4), GPTQ(**INT4)])
def test_a_model_with_patches_of_pictures(step, tmp_path):
    model, inputs = qwen(), qwen_inputs()
    with torch.no_grad():
        before = model(**inputs).logits
        tower = {name: tensor.clone() for name, tensor in model.model.visual.state_dict().items()}
        compress.apply(model, step, inputs, batch=2)
        after = model(**inputs).logits
        assert 0 < float((after - before).norm() / before.norm()) < 0.5
        assert all(torch.equal(tensor, tower[name]) for name, tensor in model.model.visual.state_dict().items())
        compress.save(model, tmp_path, "native")
        loaded, _ = compress.load(tmp_path)
        torch.testing.assert_close(loaded(**inputs).logits, after, rtol=0, atol=1e-5)


def test_the_loss_is_that_of_the_text():
    model = qwen()
    examples = examples_of(model, qwen_inputs())
    with torch.no_grad():
        found = LanguageLoss(lm_objective=objective_of(model, None))(model, examples, range(3))
    assert float(found) == pytest.approx(loss_of_transformers(model, examples), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pixel_values": None}, "give input_ids and pixel_values"),
        ({"pixel_values": torch.randn(47, 384)}, "pixel_values cannot be divided over 3 rows"),
        ({"attention_mask": torch.tensor([[1] * 9 + [0]] * 3)}, "attention_mask has zeros; give rows of one length"),
        ({"input_ids": torch.full((3, 10), 64)}, "picture 0: has the token id 64, but the model's vocabulary has 64"),
    ],
)
def test_wrong_inputs(change, said):
    given = {name: tensor for name, tensor in {**qwen_inputs(), **change}.items() if tensor is not None}
    with pytest.raises(CalibrationError, match=f"calibration: .*{said}"):
        compress.apply(qwen(), GPTQ(**INT4), given)


def test_a_text_that_is_too_long(folder, tmp_path):
    path = write_pictures(tmp_path, ["w5 " * 60])
    with pytest.raises(
        CalibrationError, match="list.jsonl:1: has 66 tokens, but the model has 64 positions; use a length"
    ):
        sample(folder, path)
    assert sample(folder, path, length=64)[0].length == 64


def test_stored_inputs(folder, tmp_path, pictures):
    """A .safetensors file holds what a processor made."""
    examples = sample(folder, pictures)[[0, 2]]
    tensors = {"input_ids": torch.cat([each.inputs["input_ids"] for each in examples])}
    tensors |= {"pixel_values": torch.cat([each.inputs["pixel_values"] for each in examples])}
    save_file({**tensors, "labels": tensors["input_ids"].clone()}, tmp_path / "a.safetensors")
    assert sample(folder, str(tmp_path / "a.safetensors")).sha256() == examples.sha256()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"image": "none.png", "text": "w5"}, "cannot read .*none.png .*; write the path of a picture"),
        ({"image": "list.jsonl", "text": "w5"}, "cannot read .*list.jsonl .*; write the path of a picture"),
        ({"image": "none.png"}, r"no text in the column text \(columns: image\)"),
    ],
)
def test_wrong_lines(line, said, folder, tmp_path):
    (tmp_path / "list.jsonl").write_text(json.dumps(line), encoding="utf-8")
    with pytest.raises(CalibrationError, match=f"list.jsonl:1: {said}"):
        sample(folder, str(tmp_path / "list.jsonl"))
