"""Training on a stream: new sequences in every step, the same after a kill, in one process and in several."""

import json
from pathlib import Path

import datasets
import pytest
import torch
from encoders import tokenizer
from killing import Killed, dying
from safetensors.torch import load_file
from test_two_processes import KINDS as LAUNCHERS
from test_two_processes import ended, killed_with, launched
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, BertConfig

import compress
from compress import Calibration, Recipe
from compress.data.text_source import TextSource
from compress.data.training_text import TrainingText
from compress.errors import RecipeError
from compress.passes.contract.journal import Journal
from compress.train.loop import TrainingContext, train
from compress.train.options import TrainingOptions
from compress.train.student import KINDS, Student

FILES, ROWS = 6, 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder of several files."""
    place = tmp_path_factory.mktemp("stream") / "texts"
    place.mkdir()
    for file in range(FILES):
        rows = [
            f"file {file} row {row} " + " ".join(f"w{(file * 31 + row * 7 + i) % 97}" for i in range(40))
            for row in range(ROWS)
        ]
        datasets.Dataset.from_list([{"text": text} for text in rows]).to_parquet(place / f"f{file}.parquet")
    return place


class Point(nn.Module):
    """One number."""

    def __init__(self):
        super().__init__()
        self.at = nn.Parameter(torch.zeros(1))


@pytest.fixture(scope="module")
def pico_model(pico):
    return AutoModelForCausalLM.from_pretrained(pico)


class Counting:
    """A tokenizer that notes the documents that it tokenizes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.documents = tokenizer, []

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, text, **options):
        self.documents += [text] if isinstance(text, str) else list(text)
        return self.tokenizer(text, **options)


@pytest.fixture
def text(folder, pico, pico_model):
    source = TextSource(dataset=str(folder), streaming=True)
    return TrainingText((source,), (1.0,), pico_model, Counting(AutoTokenizer.from_pretrained(pico)), 8, 32, 0)


class Reading:
    """An objective that notes the sequences it is given."""

    def __init__(self):
        self.seen, self.rows = [], []

    def __call__(self, model, examples, rows):
        ids = examples.batch().inputs["input_ids"]
        if torch.is_grad_enabled():
            self.seen += map(tuple, ids.tolist())
            self.rows += rows
        return (model.at - ids.float().mean() / 100).square().sum()


def run(text, objective, settings, work=None, journal=None):
    model = Point()
    student = Student(model, {kind: {"at": model.at} if kind == "norms" else {} for kind in KINDS})
    record = train(student, objective, text, settings, TrainingContext("here", journal or Journal(), work))
    return model.at.detach().clone(), record


OPTIONS = {"steps": 10, "batch": 2, "accumulate": 2, "learning_rate": 0.1, "checkpoint_every": 3}


def documents_in(text) -> list[str]:
    return [document for document in text.tokenizer.documents if document.startswith("file")]


def test_every_step_reads_new_sequences_and_no_more_are_tokenized(text):
    objective = Reading()
    _, record = run(text, objective, TrainingOptions(**OPTIONS))
    assert objective.rows == list(range(40)) and len(set(objective.seen)) == 40
    (use,) = record["streams"]
    assert use["sequences"] == 40 and use["rounds"] == 1 and record["steps"] == 10
    documents = documents_in(text)
    assert len(documents) == len(set(documents)) == use["documents"] < FILES * ROWS / 2
    assert use["tokens"] < 40 * 32 + 4096


@pytest.mark.parametrize("hold_out", [0.0, 0.3])
@pytest.mark.parametrize("killed_in", [9, 13, 14, 19])
def test_a_killed_training_reads_on_at_its_position(text, tmp_path, killed_in, hold_out):
    settings = TrainingOptions(**OPTIONS, hold_out=hold_out, evaluate_every=4)
    whole, first, second = Reading(), Reading(), Reading()
    expected, record = run(text, whole, settings)
    with pytest.raises(Killed):
        run(text, dying(first, killed_in), settings, work=tmp_path)
    state = load_file(tmp_path / "training.safetensors")
    done = 4 * int(state["step/at"])
    documents = documents_in(text)[: record["streams"][0]["documents"]]
    text.tokenizer.documents.clear()
    journal = Journal()
    found, again = run(text, second, settings, work=tmp_path, journal=journal)
    assert first.seen[:done] + second.seen == whole.seen and 0 < done < 40
    assert second.rows == list(range(done, 40))
    assert torch.equal(found, expected) and again["curve"] == record["curve"]
    assert again["streams"] == record["streams"] and again["best"] == record["best"]
    assert any(entry.message == "training resumes" for entry in journal.entries)
    if not hold_out:  # no document is tokenized again
        read = documents_in(text)
        assert read == documents[len(documents) - len(read) :] and len(read) < len(documents) - done * 32 / 200


def test_held_out_sequences_are_evaluated_and_never_trained_on(text):
    objective, evaluated = Reading(), set()

    def noting(model, examples, rows):
        if not torch.is_grad_enabled():
            evaluated.update(map(tuple, examples.batch().inputs["input_ids"].tolist()))
        return objective(model, examples, rows)

    _, record = run(text, noting, TrainingOptions(**OPTIONS, hold_out=0.3))
    assert len(evaluated) == 2 == len(record["held_out"]) and not evaluated & set(objective.seen)
    assert record["best"] is not None


def test_a_stream_that_ends_is_noted(text):
    journal = Journal()
    short = TrainingText((text.sources[0].model_copy(update={"max_documents": 20}),), *list(vars(text).values())[1:])
    _, record = run(short, Reading(), TrainingOptions(**OPTIONS | {"steps": 60}), journal=journal)
    ends = [entry for entry in journal.entries if "has ended and begins again" in entry.message]
    assert len(ends) == record["streams"][0]["rounds"] - 1 > 0


def recipe(pico, folder, *passes, **calibration) -> Recipe:
    calibration = {"dataset": str(folder), "streaming": True, "sequences": 4, "length": 32} | calibration
    return Recipe(model=pico, calibration=Calibration(**calibration), passes=passes, save={"verify": "own"}, eval=None)


def test_a_run_trains_on_the_stream_and_the_plan_says_what_it_reads(pico, folder, tmp_path):
    step = compress.Distill(steps=5, batch=3, accumulate=2, top_k=None)
    chain = recipe(pico, folder, compress.RTN(weights="int4", group_size=32), step)
    note = "every process reads 30 sequences of 32 tokens of the stream, 960 tokens, when its steps need them"
    assert any(note in text for text in compress.plan(chain).notes)
    result = compress.run(chain, tmp_path / "out", progress=False)
    (record,) = result.measured.training.values()
    assert [(use.sequences, use.rank, use.rounds) for use in record.streams] == [(30, 0, 1)]
    assert record.streams[0].tokens < 960 + 4096
    again = compress.run(chain, tmp_path / "again", progress=False)
    assert again.report["files"] == result.report["files"]
    report = (tmp_path / "out" / "report.md").read_text()
    assert record.streams[0].sha256[:12] in report and "| once |" in report


def test_epochs_train_on_the_sequences_of_the_calibration(pico, folder, tmp_path):
    chain = recipe(pico, folder, compress.Finetune(epochs=1, batch=2))
    note = "trains on the 4 sequences of the calibration; to read new ones of the stream in every step, write "
    assert any(f"{note}steps instead of epochs" in text for text in compress.plan(chain).notes)
    (record,) = compress.run(chain, tmp_path / "out", progress=False).measured.training.values()
    assert record.steps == 2 and record.streams == []
    mixture = [{"source": str(folder), "streaming": True}, {"source": "embedded"}]
    mixed = recipe(pico, folder, compress.Finetune(steps=2), mixture=mixture, dataset=None, streaming=False)
    assert any(f"{note}streaming: true for every text" in text for text in compress.plan(mixed).notes)
    sampled = recipe(pico, folder, compress.Finetune(epochs=1), self_share=0.5)
    assert any(f"{note}steps instead of epochs and self_share: 0" in text for text in compress.plan(sampled).notes)


def test_stored_outputs_of_a_teacher_need_a_fixed_set(pico, folder, pico_model):
    message = "top_k stores the outputs of the teacher for a fixed set; write top_k: null, or epochs instead of steps"
    with pytest.raises(RecipeError, match=message):
        compress.plan(recipe(pico, folder, compress.Distill(steps=2)))
    calibration = Calibration(dataset=str(folder), streaming=True, sequences=2, length=32)
    with pytest.raises(RecipeError, match=message):
        compress.apply(
            pico_model, [compress.Distill(steps=2)], calibration, tokenizer=AutoTokenizer.from_pretrained(pico)
        )


def test_rounds_of_pruning_train_on_the_stream(pico, folder, tmp_path):
    step = compress.IterativePruning(sparsity=0.5, rounds=2, steps=4, batch=2, rewind_to=0.5)
    records = compress.run(recipe(pico, folder, step), tmp_path / "out", progress=False).measured.training.values()
    assert [record.streams[0].sequences for record in records] == [4, 4]
    assert len({record.streams[0].sha256 for record in records}) == 1


def test_masked_tokens_of_a_stream(folder, tmp_path):
    """Sequences stand between special tokens, and those of each step have masks of their own."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(BertConfig(vocab_size=64, **sizes)).eval()
    calibration = Calibration(dataset=str(folder), streaming=True, sequences=4, length=16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compress.apply(model, compress.Finetune(steps=3, batch=2, hold_out=0.3), calibration, tokenizer=tokenizer())
    assert any(not tensor.equal(before[name]) for name, tensor in model.state_dict().items())


RECIPE = """
model: {model}
calibration: {{dataset: {folder}, streaming: true, sequences: 4, length: 32}}
passes:
  - rtn: {{weights: int4, group_size: 32}}
  - distill: {{steps: 12, batch: 2, checkpoint_every: 2, top_k: null, hold_out: 0.25, learning_rate: 0.01}}
save: {{format: native, verify: own}}
eval: null
"""


def launch(pico, folder: Path, place: Path) -> list[str]:
    place.mkdir()
    (place / "recipe.yaml").write_text(RECIPE.format(model=pico, folder=folder))
    return ["-m", "compress", "run", str(place / "recipe.yaml"), "-o", str(place / "out")]


def streams_of(place: Path) -> list[dict]:
    ((record),) = json.loads((place / "out" / "report.json").read_text())["training"].values()
    return record["streams"]


def tensors_of(place: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted((place / "out").glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAUNCHERS)
def test_two_processes_read_different_files_and_go_on_after_a_kill(pico, folder, tmp_path, kind):
    command = launch(pico, folder, tmp_path / "whole")
    ended(launched(command, 2, kind))
    uses = streams_of(tmp_path / "whole")
    assert [(use["rank"], use["sequences"]) for use in uses] == [(0, 24), (1, 24)]
    assert uses[0]["sha256"] != uses[1]["sha256"]

    command = launch(pico, folder, tmp_path / "killed")
    started = launched(command, 2, kind)
    state = tmp_path / "killed" / "out" / ".compress" / "passes" / "passes-1--distill" / "training.safetensors"
    killed_with(state, started)
    ended(launched(command, 2, kind))
    assert "training resumes" in (tmp_path / "killed" / "out" / "report.json").read_text()
    assert streams_of(tmp_path / "killed") == uses
    others = tensors_of(tmp_path / "killed")
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors_of(tmp_path / "whole").items())
