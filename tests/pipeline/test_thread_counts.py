"""The bytes of a checkpoint and the number of threads: passes without calibration data give equal bytes with any number.

Threads add the parts of a long sum in another order. Passes that read calibration data sum over tokens, so their cards
name the number of threads; the cards of the others do not.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import compress
from compress import PASSES, Recipe
from compress.passes.contract.facts import ANY_LAYER

ROOT = Path(__file__).parents[2]
NAMED, ANY = "threads (", "any number of threads"


def chain_of(key):
    """The pass as its recipe has it, with the passes before it, and those after it if it prepares for them."""
    steps = Recipe.from_yaml(ROOT / "recipes" / f"{key}.yaml").passes
    place = [step.key() for step in steps].index(key)
    return steps if steps[place].effects(ANY_LAYER).prepares is not None else steps[: place + 1]


WITHOUT_DATA = [key for key in PASSES if not any(step.requires.data for step in chain_of(key))]


@pytest.fixture(scope="module")
def wide(pico, tmp_path_factory):
    """Two blocks whose weights are large enough for torch to divide work on them among threads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("wide")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(pico).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def written(recipe, wide, texts, tmp_path):
    """written(key, threads) -> (sha256 of the checkpoint, model card)."""

    def run(key, threads):
        calibration = {"source": texts["calibration"], "sequences": 2, "length": 32}
        save = {"format": "native", "verify": "own"}
        asked = recipe(*chain_of(key), model=wide, calibration=calibration, save=save, eval=None)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            result = compress.run(asked, tmp_path / f"{key}-{threads}", progress=False)
        finally:
            torch.set_num_threads(before)
        return result.report["checkpoint_sha256"], " ".join((result.folder / "README.md").read_text().split())

    return run


def test_some_passes_need_no_data():
    assert {"rtn", "hqq", "magnitude", "rotate"} <= set(WITHOUT_DATA) and "gptq" not in WITHOUT_DATA


@pytest.mark.parametrize("key", WITHOUT_DATA)
def test_passes_without_data_give_equal_bytes_with_any_number_of_threads(key, written):
    (one, card), *others = [written(key, threads) for threads in (1, 2, 3)]
    assert all(found == one for found, _ in others)
    assert ANY in card and NAMED not in card


@pytest.mark.few(1)
@pytest.mark.parametrize("key", ["wanda", "gptq", "alps", "sparsegpt"])
def test_cards_of_passes_with_data_name_the_number_of_threads(key, written):
    one, card = written(key, 1)
    assert f"{NAMED}1)" in card and ANY not in card
    if key != "wanda":
        two, card = written(key, 2)
        assert f"{NAMED}2)" in card
        if one == two:
            pytest.skip("on this processor, the sums of these sizes have one order")
