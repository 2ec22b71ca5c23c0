"""What all tests share: the pico model, token ids for it, and tiny random models of several families."""

# ruff: noqa: E402
from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():  # Triton's interpreter runs GPU kernels; triton, which others import, reads this once
    os.environ["TRITON_INTERPRET"] = "1"

import gc
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

import compress
from compress import Calibration, Evaluate, Recipe, Save
from compress.api.journal import Entry, Journal
from compress.data import ids as ids_of
from compress.data.ids import token_ids
from compress.model.open.opening import InMemory, OpenModel
from compress.model.structure.blocks import find_blocks

# Property tests try the same inputs in every run of the suite; `make explore` tries new ones.
_any_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
settings.register_profile("same", _any_machine, derandomize=True)
settings.register_profile("explore", _any_machine, max_examples=300, print_blob=True)
settings.load_profile("same")

PICO = Path(__file__).parent / "pico" / "model"
VOCAB, WIDTH = 64, 32

_usual = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_grouped = {**_usual, "num_key_value_heads": 2}
_opt = {
    **{key: value for key, value in _usual.items() if key != "intermediate_size"},
    "ffn_dim": 48,
    "word_embed_proj_dim": WIDTH,
}
_short = {key: value for key, value in _usual.items() if key in ("vocab_size", "hidden_size", "eos_token_id")}
FAMILIES = {
    "llama": lambda: LlamaConfig(**_grouped, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**_grouped),
    "qwen3": lambda: Qwen3Config(**_grouped, head_dim=8),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1
    ),
    "opt": lambda: OPTConfig(**_opt),
    "opt-post-norm": lambda: OPTConfig(**_opt, do_layer_norm_before=False),
    "gpt-neox": lambda: GPTNeoXConfig(**_usual, use_parallel_residual=False),
    "gpt-neox-parallel": lambda: GPTNeoXConfig(**_usual, use_parallel_residual=True),
    "gemma2": lambda: Gemma2Config(**_grouped, head_dim=8, sliding_window=4),
    "gemma3": lambda: Gemma3TextConfig(**_grouped, head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    "phi3": lambda: Phi3Config(**_grouped),
    "bloom": lambda: BloomConfig(**_short, n_layer=3, n_head=4),
    "falcon": lambda: FalconConfig(**_short, num_hidden_layers=3, num_attention_heads=4),  # parallel, multi-query
    "mixtral": lambda: MixtralConfig(**_grouped, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_grouped, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    ),
    "bert": lambda: BertConfig(**_usual),
}


@pytest.fixture(scope="session", autouse=True)
def threads():
    """One, or COMPRESS_TEST_THREADS: tiny matrices gain nothing from more, but all must hold with more, too."""
    torch.set_num_threads(int(os.environ.get("COMPRESS_TEST_THREADS", "1")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`few(count)`: of a parametrized test so many sets of parameters, evenly spaced, are for every run; others slow."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in tests.values():
        (count,) = found[0].get_closest_marker("few").args
        kept = {round(i * len(found) / count) for i in range(count)}
        for i, item in enumerate(found):
            if i not in kept:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """What was imported stays: no collection of garbage looks through it again, of which every run makes two."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """At the end, it is collected: the library of triton writes about every object that is left."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def one_tokenization():
    """The embedded text is cut into pico's tokens once: that would be a third of every small run."""
    tokenize, done = ids_of.token_stream, {}

    def token_stream(documents, tokenizer):
        if Path(tokenizer.name_or_path) != PICO:
            return tokenize(documents, tokenizer)
        key = (tokenizer.eos_token_id, *documents)
        if key not in done:
            done[key] = tokenize(documents, tokenizer)
        return done[key].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ids_of, "token_stream", token_stream)
        yield


@pytest.fixture(scope="session")
def pico() -> str:
    """The folder of a small, really trained Llama."""
    return str(PICO)


@pytest.fixture
def pico_model():
    """A fresh copy of the pico model, dense and in memory."""
    return AutoModelForCausalLM.from_pretrained(PICO).eval()


@pytest.fixture(scope="session")
def tiny():
    """tiny(family, seed=0, **changes of its config) -> a random model in which no weight is 0 or 1."""

    def build(family: str, seed: int = 0, **changes):
        config = FAMILIES[family]()
        for key, value in changes.items():
            setattr(config, key, value)
        torch.manual_seed(seed)
        auto = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
        model = auto.from_config(config).eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        return model

    return build


@pytest.fixture(scope="session")
def tiny_folder(tiny, tmp_path_factory):
    """tiny_folder(family) -> a folder with a random model in safetensors; it is shared, so it must not be changed."""
    made: dict[str, str] = {}

    def save(family: str) -> str:
        if family not in made:
            folder = tmp_path_factory.mktemp("models") / family
            tiny(family).save_pretrained(folder)
            made[family] = str(folder)
        return made[family]

    return save


@pytest.fixture(scope="session")
def one_block(tiny, tmp_path_factory):
    """one_block(family) -> as tiny_folder, of a model with a single block, for tests that run many recipes."""
    made: dict[str, str] = {}

    def save(family: str) -> str:
        if family not in made:
            folder = tmp_path_factory.mktemp("models") / f"{family}-one-block"
            tiny(family, num_hidden_layers=1).save_pretrained(folder)
            made[family] = str(folder)
        return made[family]

    return save


@pytest.fixture(scope="session")
def in_memory():
    """in_memory(model) -> the OpenModel of a model that is in memory."""

    def wrap(model) -> OpenModel:
        first = next(model.parameters())
        return OpenModel(model, find_blocks(model), InMemory(), None, "test", "", first.device, first.dtype)

    return wrap


@pytest.fixture(scope="session")
def ids():
    """ids(sequences, length) -> random token ids that every tiny model knows."""

    def draw(sequences: int = 4, length: int = 16, seed: int = 0) -> torch.Tensor:
        return torch.randint(VOCAB, (sequences, length), generator=torch.Generator().manual_seed(seed))

    return draw


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> dict[str, str]:
    """.npy files of token ids: 'calibration' and 'test' of the embedded text for pico, 'tiny' for the tiny models."""
    folder = tmp_path_factory.mktemp("texts")
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    made = {
        "calibration": token_ids("embedded", "calibration", tokenizer, 6, 64, seed=0),
        "test": token_ids("embedded", "test", tokenizer, 2, 64, seed=0),
        "tiny": torch.randint(VOCAB, (6, 24), generator=torch.Generator().manual_seed(0)),
    }
    for name, found in made.items():
        np.save(folder / f"{name}.npy", found.numpy())
    return {name: str(folder / f"{name}.npy") for name in made}


@pytest.fixture(scope="session")
def pico_ids(texts) -> torch.Tensor:
    """[6, 64] token ids of the embedded text, to calibrate the pico model with; they are shared."""
    return torch.from_numpy(np.load(texts["calibration"]).astype(np.int64))


@pytest.fixture(scope="session")
def recipe(pico, texts):
    """recipe(*passes, model=pico, save={...}, **options) -> a Recipe that runs in a second; other models are tiny."""

    def build(*passes, model: str = pico, save: dict | None = None, **options) -> Recipe:
        source, test = (texts["calibration"], texts["test"]) if model == pico else (texts["tiny"], texts["tiny"])
        calibration = Calibration(source=source, sequences=None, length=None, batch=4)
        measured = Evaluate(perplexity=(test,), windows=2, length=None)
        usual = {"model": model, "calibration": calibration, "eval": measured, "save": Save(**(save or {}))}
        return Recipe(passes=passes, **{**usual, **options})

    return build


@pytest.fixture
def stop():
    """stop(recipe, folder, here): a run that is interrupted at an entry of its journal; by default, when its second
    block is on disk."""

    def second_block(entry: Entry) -> bool:
        return entry.kind == "block" and entry.figures["block"] == 1

    def interrupted(recipe: Recipe, folder: Path, here: Callable[[Entry], bool] = second_block) -> None:
        def listener(entry: Entry) -> None:
            if here(entry):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            compress.run(recipe, folder, journal=Journal(listeners=[listener]))

    return interrupted


@pytest.fixture
def manifest_of():
    """manifest_of(folder) -> the manifest of a run as plain values."""
    return lambda folder: json.loads((Path(folder) / ".compress" / "manifest.json").read_text())
