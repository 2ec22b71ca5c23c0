"""Words of targets: what they mean, which recipe they lead to, and what is said where they lead to none."""

import pytest
import yaml

from compress.errors import RecipeError
from compress.passes import PASSES
from compress.recipe.schema import Recipe
from compress.recipe.targets import choose, listed, read_target, recipe_text, starts, words


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("4 bits, CPU", "int4"),
        ("4-bit on a CPU", "int4"),
        ("INT4 for vLLM", "int4-gpu"),
        ("best 4 bits", "int4-best"),
        ("4 bits, no data", "int4-quick"),
        ("a quarter of the size", "int4"),
        ("half the size, no visible loss", "int8"),
        ("half the size; llama.cpp", "q8-gguf"),
        ("w8a8 vllm", "w8a8"),
        ("fp8", "fp8"),
        ("3 bits", "int3"),
        ("some loss", "int3"),
        ("ollama", "q4-gguf"),
        ("no visible loss, gguf", "q6-gguf"),
        ("sparse 2:4 for a GPU", "two-of-four"),
        ("2:4, CPU", "two-of-four-cpu"),
        ("2:4 + 4 bits", "two-of-four-int4"),
        ("50% sparse", "half-zero"),
        ("fewer layers", "fewer-blocks"),
        ("long contexts, GPU", "long-context"),
    ],
)
def test_words_lead_to_a_start(target, name):
    assert choose(read_target(target)).name == name


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("7 bits", "'7' is not known; did you mean '"),
        ("4 bits, vlmm", "'vlmm' is not known; did you mean 'vllm'?; known: size: 8 bits,"),
        ("qqqqqqqq", "'qqqqqqqq' is not known; known: size: 8 bits,"),
        ("", "says nothing; known: size"),
        (" on a ", "says nothing; known: size"),
        (
            "2 bits, vLLM",
            "no recipe to start from; with vLLM: 8 bits, 8-bit inputs, fp8, 4 bits; with 2 bits: CPU, GPU",
        ),
        ("2 bits, no visible loss", "with no visible loss: 8 bits"),
        ("4 bits, 8 bits", "no recipe to start from; "),
    ],
)
def test_words_that_lead_nowhere_are_told_with_those_that_do(target, message):
    with pytest.raises(RecipeError, match="target") as error:
        choose(read_target(target))
    assert message in str(error.value)


def test_every_start_can_be_reached_and_answers_to_known_words():
    known = {kind: set(values) for kind, values in words().items()}
    for start in starts().values():
        assert set(start.answers) <= set(known)
        assert all(set(values) <= known[kind] for kind, values in start.answers.items()), start.name
    first = [(kind, values) for start in starts().values() for kind, values in start.answers.items()]
    for kind, values in known.items():
        assert values <= {value for answered, found in first if answered == kind for value in found}, kind
    reached = {choose([(kind, found[0]) for kind, found in start.answers.items()]).name for start in starts().values()}
    assert reached == set(starts())


def test_no_two_phrases_mean_two_things():
    phrases = [phrase for values in words().values() for found in values.values() for phrase in set(found)]
    assert len(phrases) == len(set(phrases)) and all(isinstance(phrase, str) for phrase in phrases)
    assert all(value in listed() for values in words().values() for value in values)


@pytest.mark.parametrize("name", list(starts()))
def test_every_line_of_a_recipe_has_a_comment(name):
    start = starts()[name]
    text = recipe_text(start, "org/model", "4 bits", "recipe.yaml")
    options = [line for line in text.splitlines() if line and not line.startswith("#")]
    bare = [line for line in options if "#" not in line and not line.startswith(("passes:", "save:"))]
    assert [line for line in bare if not line.lstrip().startswith('"re:')] == []
    assert all(len(line) <= 120 for line in text.splitlines())
    assert not start.summary.endswith(".") and start.next
    recipe = Recipe.from_text(text)
    needed = any(step.requires.data for step in recipe.passes)
    assert ("calibration" in yaml.safe_load(text)) is (start.sequences is not None) is needed
    assert set(recipe.passes) and all(type(step).key() in PASSES for step in recipe.passes)


def test_a_target_and_a_model_cannot_leave_their_lines():
    text = recipe_text(starts()["int8"], 'a: b # c\nd"', "4 bits\nmodel: evil\x1b[0m", "my recipe.yaml", 32, 64)
    data = yaml.safe_load(text)
    assert data["model"] == 'a: b # c\nd"' and "\x1b" not in text
    assert data["calibration"]["length"] == data["eval"]["length"] == 64
    assert (
        yaml.safe_load(recipe_text(starts()["int4"], "m", "x", "r.yaml", 32))["passes"][0]["gptq"]["group_size"] == 32
    )
