"""Models and tokenizers at the edge of what a run takes: no block, one block, no padding token."""

import json
import shutil

import pytest
from tolerances import LOGITS
from transformers import AutoTokenizer

import compress
from compress import GPTQ, RTN, DropBlocks, Evaluate, Finetune, Wanda
from compress.errors import CompressError, ModelError, TargetError


@pytest.fixture
def with_blocks(tiny, tmp_path):
    """with_blocks(count): the folder of a random model of so many blocks."""

    def save(count):
        tiny("llama", num_hidden_layers=count).save_pretrained(tmp_path / f"{count}")
        return str(tmp_path / f"{count}")

    return save


def test_a_model_of_one_block_is_pruned_trained_and_quantized(with_blocks, recipe, tmp_path):
    steps = Wanda(pattern="2:4"), Finetune(steps=2, batch=2), GPTQ(group_size=16)
    found = compress.run(recipe(*steps, model=with_blocks(1), save={"verify": "own"}), tmp_path / "out").report
    assert found["verified"]["own"] <= LOGITS and found["checkpoint_sha256"]
    assert {layer["layer"].split(".")[2] for layer in found["layers"]} == {"0"}


def test_the_only_block_cannot_go(with_blocks, recipe, tmp_path):
    with pytest.raises(TargetError, match="cannot remove 1 of 1 blocks, the only one; leave this pass out"):
        compress.run(recipe(DropBlocks(count=1), model=with_blocks(1)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_without_blocks_is_refused_before_work(with_blocks, recipe, tmp_path):
    with pytest.raises(CompressError) as raised:
        compress.run(recipe(RTN(group_size=16), model=with_blocks(0)), tmp_path / "out")
    assert isinstance(raised.value, (ModelError, TargetError)), raised.value
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_without_a_padding_token_calibrates_measures_and_generates(pico, recipe, tmp_path):
    source = tmp_path / "model"
    shutil.copytree(pico, source)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings.pop("pad_token", None)
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("config.json", "generation_config.json"):
        known = json.loads((source / name).read_text())
        known.pop("pad_token_id", None)
        (source / name).write_text(json.dumps(known))
    assert AutoTokenizer.from_pretrained(source).pad_token is None
    measured = Evaluate(perplexity=("embedded",), windows=2, length=32, generation=True)
    text = compress.Calibration(source="embedded", sequences=4, length=32)
    asked = recipe(GPTQ(group_size=32), model=str(source), calibration=text, eval=measured)
    found = compress.run(asked, tmp_path / "out").report
    assert found["generation"] is not None and found["perplexity"][0]["compressed"]["tokens"] == 62
    assert AutoTokenizer.from_pretrained(tmp_path / "out").pad_token is None
