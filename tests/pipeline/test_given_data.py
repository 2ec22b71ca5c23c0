"""Arguments in Python: calibration data of every usual form, devices, trainable models, and what plugins return."""

import json
from typing import ClassVar

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

import compress
from compress import GPTQ, RTN, Calibration, Recipe
from compress.errors import CalibrationError, OutputError, RecipeError, SeveralErrors, TargetError
from compress.passes.contract.journal import Journal
from compress.passes.contract.layers import Layer, Solution
from compress.passes.contract.passes import LayerPass

TEXT = "The quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture
def tokenizer(pico):
    return AutoTokenizer.from_pretrained(pico)


def applied(model, data, tokenizer=None):
    """The weight of the first linear after GPTQ with this data."""
    step = GPTQ(group_size=32, targets="model.layers.0.self_attn.q_proj")
    compress.apply(model, step, data, tokenizer=tokenizer)
    return model.model.layers[0].self_attn.q_proj.weight.detach().clone()


class Rows:
    """A data set as torch has them: an item by its number."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


FORMS = {
    "lists": lambda ids: ids.tolist(),
    "tensors": lambda ids: list(ids),
    "rows": lambda ids: [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids.tolist()],
    "data set": lambda ids: Rows([{"input_ids": row} for row in ids]),
    "tensor data set": lambda ids: Rows(list(ids)),
    "loader": lambda ids: DataLoader([{"input_ids": row} for row in ids], batch_size=4),
    "loader of tensors": lambda ids: DataLoader(ids, batch_size=4),
    "generator": lambda ids: ({"input_ids": row} for row in ids),
    "int32": lambda ids: ids.int(),
    "padding": lambda ids: [
        {"input_ids": torch.cat([row, row[:3]]), "attention_mask": torch.tensor([1] * len(row) + [0] * 3)}
        for row in ids
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_token_ids_is_the_same_data(form, pico, pico_ids):
    models = [compress.load(pico, trainable=True)[0] for _ in range(2)]
    assert torch.equal(applied(models[0], FORMS[form](pico_ids)), applied(models[1], pico_ids))


def test_datasets_of_the_library(pico_model, pico_ids):
    datasets = pytest.importorskip("datasets")
    applied(pico_model, datasets.Dataset.from_dict({"input_ids": pico_ids.tolist()}))


@pytest.mark.parametrize(
    "data",
    [
        [TEXT, TEXT],
        (TEXT,),
        [{"text": TEXT}],
        [{"messages": [{"role": "user", "content": TEXT}]}],
        Rows([TEXT]),
        DataLoader([TEXT], batch_size=None),
        Calibration(source="embedded", sequences=2, length=32),
        "embedded",
    ],
    ids=["texts", "tuple", "rows", "chat", "data set", "loader", "calibration", "name"],
)
def test_texts_are_tokenized(data, pico_model, tokenizer):
    before = pico_model.model.layers[0].self_attn.q_proj.weight.detach().clone()
    assert not torch.equal(applied(pico_model, data, tokenizer), before)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "calibration: is of class int; give token ids"),
        (object(), "is of class object"),
        ([], "holds nothing"),
        ([TEXT], "texts need a tokenizer; give tokenizer="),
        ([TEXT, torch.ones(4).long()], "holds texts and token ids"),
        ([1, 2, 3], "holds items of class int"),
        ([None], "holds items of class NoneType"),
        ([{"input_ids": ["a"]}], r"calibration\[0\] input_ids: holds no token ids"),
        (torch.ones(2, 8), "holds torch.float32 numbers, not token ids"),
        (torch.full((2, 8), 100_000), "holds the token id 100000, but the model's vocabulary has"),
        (torch.full((2, 8), -1), "holds the token id -1"),
        ([[1, 2, 100_000]], "holds the token id 100000"),
        ({"input_ids": torch.full((2, 8), 100_000)}, "holds the token id 100000|mapping"),
        (Calibration(source="embedded", sequences=2, length=32), "no tokenizer"),
    ],
)
def test_other_data_is_one_line(data, message, pico_model):
    with pytest.raises(CalibrationError, match=message) as caught:
        applied(pico_model, data)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500 and "--" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_does_not_exist(pico):
    with pytest.raises(RecipeError, match="device: cuda does not exist: this machine has no CUDA device"):
        compress.load(pico, device="cuda")
    with pytest.raises(RecipeError, match="device 'gpu' is not known; use auto, cpu, cuda, or cuda:N"):
        compress.load(pico, device="gpu")
    assert compress.load(pico, device="auto")[0].device.type == "cpu"


def test_a_trainable_model_learns(pico, pico_ids):
    model, _ = compress.load(pico, trainable=True)
    assert all(parameter.requires_grad for parameter in model.parameters())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        loss = model(input_ids=pico_ids, labels=pico_ids).loss
        losses.append(float(loss))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[1] < losses[0]
    again = compress.load(pico)[0]  # the files are the same
    assert float(again(input_ids=pico_ids, labels=pico_ids).loss) == pytest.approx(losses[0], rel=1e-5)
    assert not any(parameter.requires_grad for parameter in again.parameters())


class Unpublished(LayerPass):
    """A pass without a paper, whose solution is a function of random numbers."""

    def solve(self, weight, statistics, layer):
        return Solution(torch.randn(weight.shape, generator=layer.generator))


def test_a_pass_has_seeded_random_numbers_for_each_layer(pico):
    weights = [
        compress.apply(compress.load(pico, trainable=True)[0], Unpublished()).model.layers[0].self_attn
        for _ in range(2)
    ]
    assert torch.equal(weights[0].q_proj.weight, weights[1].q_proj.weight)
    assert not torch.equal(weights[0].k_proj.weight, weights[0].v_proj.weight)
    log = Journal().add
    draws = [torch.rand(4, generator=Layer("a", None, torch.float32, log, seed=seed).generator) for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert Unpublished.paper == ""


class Wrong(LayerPass):
    """A pass that returns what is wrong."""

    results: ClassVar[list] = []

    def solve(self, weight, statistics, layer):
        return self.results[-1](weight)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda w: Solution(w[1:]), "the weight of the solution is 127 x 128, but the layer is 128 x 128"),
        (lambda w: Solution(w[0]), "the weight of the solution is 128, but the layer is 128 x 128"),
        (lambda w: Solution(w, w.bool()[:, 1:]), "the mask of the solution is 128 x 127, but the layer is 128 x 128"),
        (lambda w: w, "the pass returns Tensor; return a Solution"),
        (lambda w: None, "the pass returns NoneType; return a Solution"),
    ],
)
def test_a_wrong_solution_names_pass_and_layer(result, message, pico_model):
    Wrong.results.append(result)
    with pytest.raises(TargetError) as caught:
        compress.apply(pico_model, Wrong(targets="model.layers.1.self_attn.q_proj"))
    assert str(caught.value) == f"passes[0] wrong model.layers.1.self_attn.q_proj: {message}"


def test_a_recipe_with_texts_says_what_to_write(pico):
    with pytest.raises(RecipeError, match="calibration: must be a mapping of options") as caught:
        compress.Recipe(model=pico, passes=[RTN()], calibration=[TEXT] * 100)
    assert len(str(caught.value)) < 300


# Calibration and evaluation data of a run

ROWS = [{"text": TEXT.replace("fox", animal)} for animal in ("fox", "cat", "hen", "cow")]
SHAPE = {"sequences": 8, "length": 32, "batch": 4}


def asked(pico, source="embedded", test="embedded"):
    return Recipe(
        model=pico,
        passes=[GPTQ(group_size=32)],
        calibration=Calibration(source=str(source), **SHAPE),
        eval={"perplexity": [str(test)], "windows": 2, "length": 32, "top_k": None},
    )


RUN_FORMS = {
    "texts": lambda rows: [row["text"] for row in rows],
    "rows": lambda rows: rows,
    "data set": lambda rows: pytest.importorskip("datasets").Dataset.from_list(rows),
    "torch data set": lambda rows: Rows(rows),
}


@pytest.mark.parametrize("form", RUN_FORMS)
def test_a_run_reads_texts_of_a_program_as_those_of_a_file(form, pico, tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    of_file = compress.run(asked(pico, tmp_path / "rows.jsonl"), tmp_path / "file", progress=False).report
    data = RUN_FORMS[form](ROWS)
    report = compress.run(asked(pico), tmp_path / "out", progress=False, calibration=data).report
    assert report["checkpoint_sha256"] == of_file["checkpoint_sha256"]
    used, expected = report["reproduce"]["texts"][0], of_file["reproduce"]["texts"][0]
    assert {**used, "text": None} == {**expected, "text": None} and used["text"] == "4 texts of a program"


def test_a_run_reads_token_ids_of_a_program_as_those_of_a_file(pico, pico_ids, texts, recipe, tmp_path):
    stored = recipe(GPTQ(group_size=32))
    of_file = compress.run(stored, tmp_path / "file", progress=False).report
    for name, data in {
        "tensor": pico_ids,
        "loader": FORMS["loader"](pico_ids),
        "padding": FORMS["padding"](pico_ids),
    }.items():
        report = compress.run(stored, tmp_path / name, progress=False, calibration=data).report
        assert report["checkpoint_sha256"] == of_file["checkpoint_sha256"]


def test_a_run_takes_calibration_values_and_names(pico, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    runs = [
        compress.run(asked(pico), tmp_path / "value", calibration=Calibration(source=str(tmp_path / "a.txt"), **SHAPE)),
        compress.run(asked(pico), tmp_path / "path", calibration=tmp_path / "a.txt"),
        compress.run(asked(pico), tmp_path / "text", calibration=[TEXT]),
    ]
    assert len({run.report["checkpoint_sha256"] for run in runs}) == 1
    assert [run.report["reproduce"]["texts"][0]["text"] for run in runs] == ["a.txt", "a.txt", "1 texts of a program"]


def test_evaluation_data_of_a_program_are_divided_and_recorded(pico, tmp_path):
    rows = [{"text": f"{number} {row['text']}"} for number, row in enumerate(ROWS * 2)]
    report = compress.run(asked(pico), tmp_path / "out", progress=False, calibration=rows, evaluation=rows).report
    calibrated, tested = report["reproduce"]["texts"]
    assert calibrated["sha256"] == tested["sha256"]
    assert (tested["share"]["stop"], calibrated["share"]["start"]) == (2, 2)
    notes = [entry["message"] for entry in report["journal"]["entries"] if entry["where"] == "data"]
    assert len(notes) == 1 and notes[0].startswith("8 texts of a program (sha256 ")
    assert "the recipe, which alone does not repeat this run" in notes[0]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"does not hold the calibration data (8 texts of a program, sha256 `{calibrated['sha256']}`)" in card
    assert 'compress.run("recipe.yaml", calibration=DATA)' in card and "`compress run recipe.yaml` makes" not in card
    with pytest.raises(
        SeveralErrors, match="calibration: source python is data of a program.*(\n.*)*eval: source python"
    ):
        compress.run(tmp_path / "out" / "recipe.yaml", tmp_path / "again")
    again = compress.run(
        tmp_path / "out" / "recipe.yaml", tmp_path / "again", progress=False, calibration=rows, evaluation=rows
    ).report
    assert again["checkpoint_sha256"] == report["checkpoint_sha256"]
    with pytest.raises(OutputError, match="the calibration text is another one"):
        compress.run(asked(pico), tmp_path / "out", progress=False, calibration=rows[1:], evaluation=rows)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "is of class int"),
        ([], "holds nothing"),
        ([[1, 2, 3], [1, 2]], "a run reads token ids of one length; give texts, or cut the sequences"),
        ({"input_features": torch.ones(2, 3)}, "a run reads texts or token ids"),
        ([None], "holds items of class NoneType"),
    ],
)
def test_other_data_of_a_run_is_one_line(data, message, pico, tmp_path):
    with pytest.raises(CalibrationError, match=f"^calibration: {message}"):
        compress.run(asked(pico), tmp_path / "out", calibration=data)
    with pytest.raises(CalibrationError, match=f"^evaluation: {message}"):
        compress.run(asked(pico), tmp_path / "out", evaluation=data)
