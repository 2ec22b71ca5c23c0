"""Calibration as recipes spell it: one text, a data set, or a mixture; mistakes with their place."""

import pytest

import compress
from compress import Calibration
from compress.errors import RecipeError
from compress.recipe.schema import Evaluate

HEAD = "model: m\npasses: [rtn]\n"


def read(text):
    return compress.Recipe.from_text(HEAD + text)


def test_old_recipes_mean_what_they_meant():
    known = compress.Calibration(source="wikitext", sequences=8, length=64)
    assert (known.source, known.dataset, known.mixture, known.packing) == ("wikitext", None, None, True)
    assert compress.Calibration().source == "embedded"


@pytest.mark.parametrize(
    "text",
    [
        "calibration: {dataset: some/set, config: en, split: validation, column: body, revision: v1, packing: false}",
        "calibration: {source: a.jsonl, chat_template: chat.jinja, max_tokens_per_document: 300}",
        "calibration: {mixture: [{source: embedded, weight: 2}, {dataset: some/set, max_documents: null}]}",
        "calibration: {mixture: [embedded, a.jsonl], sequences: 6}",
        "eval: {perplexity: [embedded, {dataset: some/set, split: test}]}",
    ],
)
def test_every_spelling_round_trips(text):
    recipe = read(text)
    again = compress.Recipe.from_text(recipe.to_yaml())
    assert again == recipe and again.to_yaml() == recipe.to_yaml()


def test_a_data_set_replaces_the_default_source():
    found = read("calibration: {dataset: some/set}").calibration
    assert (found.source, found.dataset, found.label) == (None, "some/set", "some/set")
    assert compress.Calibration(dataset="some/set") == found


def test_a_mixture_divides_the_sequences_by_weight():
    found = read("calibration: {mixture: [{source: embedded, weight: 2}, a.txt], sequences: 9}").calibration
    assert [(text.label, count) for text, count in found.texts()] == [("embedded", 6), ("a.txt", 3)]
    alone = compress.Calibration(source="a.npy", sequences=None, length=None)
    assert alone.texts() == [(alone, None)]


def test_another_source_replaces_every_kind_of_text():
    mixed = compress.Calibration(mixture=["embedded", "a.txt"], sequences=6, length=32, batch=2)
    wanted = compress.Calibration(source="b.txt", sequences=6, length=32, batch=2)
    assert mixed.with_source("b.txt") == wanted
    assert (
        compress.Calibration(dataset="x/y", split="s", sequences=6, length=32, batch=2).with_source("b.txt") == wanted
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{source: embedded, dataset: some/set}",
            "source and dataset are given together; give one of source, dataset, mix",
        ),
        ("{source: null}", "no text is given; give one of source, dataset, mixture"),
        ("{split: train}", "split has no effect: it is an option of data sets, and the source is embedded; remove it"),
        ("{source: a.txt, chat_template: x.jinja}", "chat_template has no effect: a.txt has no rows with columns"),
        ("{source: ultrachat, column: prompt}", "column has no effect: the columns of ultrachat are known"),
        ("{source: a.npy, bos: true}", "bos has no effect: the ids of a.npy are not changed; remove it"),
        ("{mixture: [embedded, a.txt], bos: true}", "bos has no effect: a mixture has this option in each"),
        ("{source: a.npy, packing: false}", "packing has no effect: a.npy has no documents"),
        ("{source: self, max_tokens_per_document: 5}", "max_tokens_per_document has no effect: self has no documents"),
        ("{mixture: [embedded, a.txt], packing: false}", "packing has no effect: a mixture has this option in each"),
        ("{mixture: []}", "mixture: must be a list of texts"),
        ("{mixture: embedded}", "mixture: must be a list of texts"),
        (
            "{mixture: [embedded, {source: a.txt, wieght: 2}]}",
            r"mixture\[1\] wieght: unknown option; did you mean 'weight'",
        ),
        ("{mixture: [{source: a.txt, weight: 0}]}", r"mixture\[0\] weight: input should be greater than 0"),
        ("{mixture: [embedded], length: null}", "a mixture needs sequences and length"),
        ("{mixture: [{source: a.txt, weight: 0.001}, embedded]}", "sequences 64 leave none for a.txt"),
        ("{max_tokens_per_document: 0}", "max_tokens_per_document: input should be greater than 0"),
    ],
)
def test_mistakes_in_calibration(text, message):
    with pytest.raises(RecipeError, match=message) as raised:
        read(f"calibration: {text}")
    assert str(raised.value).startswith("recipe:3:")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[embedded, embedded]", "perplexity: embedded is listed twice"),
        ("[self]", "perplexity: self is sampled from the model"),
        ("[{dataset: a/b, spilt: x}]", r"perplexity\[0\] spilt: unknown option; did you mean 'split'"),
    ],
)
def test_mistakes_in_evaluation(text, message):
    with pytest.raises(RecipeError, match=message):
        read(f"eval: {{perplexity: {text}}}")


def test_names_alone_stay_names():
    assert Evaluate(perplexity=["embedded", "a.txt"]).perplexity == ("embedded", "a.txt")


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"source": "mixed", "self_share": 0.5}, {"mixed": 4, "self": 4}),
        ({"dataset": "some/set", "self_share": 0.25}, {"some/set": 6, "self": 2}),
        (
            {"mixture": [{"source": "a.txt"}, {"source": "b.txt"}], "self_share": 0.5},
            {"a.txt": 2, "b.txt": 2, "self": 4},
        ),
        ({"source": "mixed", "self_share": "auto"}, {"mixed": 8}),  # until it is decided for a model
        ({"source": "mixed"}, {"mixed": 8}),
    ],
)
def test_sampled_text_takes_its_share_of_the_sequences(options, counts):
    texts = Calibration(**options, sequences=8).texts()
    assert {text.label: count for text, count in texts} == counts


def test_sampled_text_has_the_options_of_sampling():
    calibration = Calibration(source="mixed", self_share=0.5, temperature=0.7, sequences=8)
    assert calibration.texts()[1][0].temperature == 0.7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "self", "self_share": 0.5}, "self_share has no effect: the whole text is sampled"),
        ({"source": "mixed", "self_share": 1.0}, "self_share"),
        ({"source": "mixed", "self_share": 0.01, "sequences": 8}, "sequences 8 leave none for self"),
        ({"source": "a.npy", "self_share": 0.5, "sequences": None}, "self_share needs sequences and length"),
        ({"dataset": "some/set", "temperature": 0.5}, "temperature has no effect: some/set is not sampled"),
    ],
)
def test_a_share_that_cannot_be_sampled(options, message):
    with pytest.raises(ValueError, match=message):
        Calibration(**options)
