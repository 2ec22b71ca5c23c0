"""What all tests share: the pico model, token ids for it, and tiny random models of several families."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():  # Triton's interpreter runs GPU kernels; triton, which others import, reads this once
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.pop("COLUMNS", None)  # of the processes of pytest-xdist; a test sees a pipe unless it sets a width
os.environ["HF_HUB_OFFLINE"] = "1"  # read once, too: no test asks the hub, which would be tried again for half a minute

import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from batches import batch_of
from hypothesis import HealthCheck, settings
from model_families import VOCAB, tiny_model
from products import SETS
from transformers import AutoModelForCausalLM, AutoTokenizer

import compress
from compress import Calibration, Evaluate, Recipe, Save
from compress.blockwise.capture import ModelShell
from compress.checkpoint.opened import OpenModel
from compress.data import ids as ids_of
from compress.data.ids import token_ids
from compress.data.pieces import PIECE
from compress.native.library import library
from compress.passes.contract.journal import Journal, JournalEntry

# Property tests try the same inputs in every run of the suite; `make explore` tries new ones.
_any_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
settings.register_profile("same", _any_machine, derandomize=True)
settings.register_profile("explore", _any_machine, max_examples=300, print_blob=True)
settings.load_profile("same")

PICO = Path(__file__).parent / "pico" / "model"


@pytest.fixture(scope="session", autouse=True)
def threads():
    """One, or COMPRESS_TEST_THREADS: tiny matrices gain nothing from more, but all must hold with more, too."""
    torch.set_num_threads(int(os.environ.get("COMPRESS_TEST_THREADS", "1")))


@pytest.fixture(params=SETS)
def chosen(request):
    """One instruction set of the kernels after the other."""
    assert library().compress_use(request.param.encode()) == 0
    yield request.param
    library().compress_use(SETS[0].encode())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`few(count, slow=count)`: so many sets of a test's parameters, evenly spaced, are in every run, and so many slow.

    The others are exhaustive; without `slow`, all others are slow.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in tests.values():
        few = found[0].get_closest_marker("few")
        (count,), slow = few.args, few.kwargs.get("slow", len(found))
        every, often = ({round(i * len(found) / n) for i in range(n)} for n in (count, slow))
        for i, item in enumerate(found):
            if i not in every:
                item.add_marker(pytest.mark.slow if i in often else pytest.mark.exhaustive)


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
    encode, done = ids_of.encode, {}

    def cached(pieces, tokenizer, limit=None, together=PIECE):
        if together != PIECE:  # a stream, which is not read whole
            return encode(pieces, tokenizer, limit, together)
        pieces = pieces if isinstance(pieces, Sequence) else list(pieces)
        if Path(tokenizer.name_or_path) != PICO or limit is not None or len(pieces) < 20:
            return encode(iter(pieces), tokenizer, limit)
        key = (tokenizer.eos_token_id, *pieces)
        if key not in done:
            done[key] = list(encode(iter(pieces), tokenizer))
        return iter(done[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ids_of, "encode", cached)
        yield


@pytest.fixture(autouse=True)
def base_models(tmp_path_factory, monkeypatch):
    """Results of base models are shared by the runs of one test only; the folder is made when a run writes it."""
    folder = tmp_path_factory.getbasetemp() / f"base-models-{time.monotonic_ns()}"
    monkeypatch.setattr("compress.evaluation.store.BASE_MODELS", str(folder))  # absolute, so not below the cache


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
    return tiny_model


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
        return OpenModel.in_memory(model, source="test")

    return wrap


@pytest.fixture(scope="session")
def ids():
    """ids(sequences, length) -> random token ids that every tiny model knows."""

    def draw(sequences: int = 4, length: int = 16, seed: int = 0) -> torch.Tensor:
        return torch.randint(VOCAB, (sequences, length), generator=torch.Generator().manual_seed(seed))

    return draw


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> dict[str, str]:
    """.npy files of token ids: 'calibration' and 'test' of the embedded text for pico, 'tiny' and 'tiny test' for the tiny models."""
    folder = tmp_path_factory.mktemp("texts")
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    made = {
        "calibration": token_ids("embedded", "calibration", tokenizer, 6, 64, seed=0),
        "test": token_ids("embedded", "test", tokenizer, 2, 64, seed=0),
        "tiny": torch.randint(VOCAB, (6, 24), generator=torch.Generator().manual_seed(0)),
        "tiny test": torch.randint(VOCAB, (6, 24), generator=torch.Generator().manual_seed(1)),
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
        source, test = (texts["calibration"], texts["test"]) if model == pico else (texts["tiny"], texts["tiny test"])
        calibration = Calibration(source=source, sequences=None, length=None, batch=4)
        measured = Evaluate(perplexity=(test,), windows=2, length=None)
        usual = {"model": model, "calibration": calibration, "eval": measured, "save": Save(**(save or {}))}
        return Recipe(passes=passes, **{**usual, **options})

    return build


@pytest.fixture
def stop():
    """stop(recipe, folder, here): a run that is interrupted at an entry of its journal; by default, when its second
    block is on disk."""

    def second_block(entry: JournalEntry) -> bool:
        return entry.kind == "block" and entry.figures["block"] == 1

    def interrupted(recipe: Recipe, folder: Path, here: Callable[[JournalEntry], bool] = second_block) -> None:
        def listener(entry: JournalEntry) -> None:
            if here(entry):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            compress.run(recipe, folder, journal=Journal(listeners=[listener]))

    return interrupted


@pytest.fixture
def manifest_of():
    """manifest_of(folder) -> the manifest of a run as plain values."""
    return lambda folder: json.loads((Path(folder) / ".compress" / "manifest.json").read_text())


# A real block with its real inputs, as the tests of structure discovery want it


@pytest.fixture
def second_block(tiny, in_memory, ids):
    """second_block(family) -> (its second block, a forward pass of it on captured inputs, with all routes open)."""

    def make(family):
        opened = in_memory(tiny(family))
        captured = ModelShell(opened).capture(batch_of(ids()))
        with torch.no_grad():
            hidden = captured.calls[0].run(opened.blocks[0].module, captured.hidden)

        def forward(block):
            with torch.no_grad():
                return captured.calls[1].run(block, hidden)

        return opened.blocks[1].module, forward

    return make
