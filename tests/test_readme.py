"""Everything that README and docs/ show is run or parsed: recipes and Python on the pico model, commands by their parsers."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pictures
import pytest
from click.testing import CliRunner
from speech import TEXTS, write_model, write_recordings
from tolerances import LOGITS

import compress
from compress import Recipe
from compress.checkpoint.formats import FORMATS
from compress.cli import main
from compress.evaluation.evidence import DESCRIPTIONS
from compress.recipe.presets import presets
from compress.recipe.shipped import shipped

ROOT = Path(__file__).parents[1]
PICO = Path(__file__).parent / "pico" / "model"
FRONT = ROOT / "README.md"
DOCS = ROOT / "docs"
RUN_AS_A_WHOLE = ("tutorials", "guides")
"""Folders of pages that tests/test_guides.py runs from their first line to their last."""
PAGES = [FRONT, *sorted(page for page in DOCS.rglob("*.md") if page.parent.name != "passes")]
ALONE = [page for page in PAGES if page.parent.name not in RUN_AS_A_WHOLE]
LONGEST = 120
"""Lines of the README; the rest belongs to docs/."""

SMALLER = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": str(PICO),
    "sequences: 32": "sequences: 4",
    "sequences=32": "sequences=4",
    "length: 512": "length: 64",
    "length=512": "length=64",
    "windows: 16": "windows: 2",
}
"""What is read instead of what stands there, so that it takes seconds."""
SPEECH = "openai/whisper-small"
VISION = "llava-hf/llava-1.5-7b-hf"


def blocks(text: str, language: str, title: str = "(?: title=[^\n]*)?") -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}{title}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str, indented: bool) -> list[str]:
    """Every line of a fenced shell block, and of an indented one, without its comment."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^    (\S.*)$", plain, re.MULTILINE) if indented else []
    lines += [
        line
        for kind in ("sh", "bash", "shell", "console")
        for block in blocks(text, kind)
        for line in block.splitlines()
    ]
    stripped = [re.sub(r"(^|\s)#.*$", "", line).strip().removeprefix("$ ") for line in lines]
    return [line for line in stripped if line]


def smaller(text: str) -> str:
    for written, read in SMALLER.items():
        text = text.replace(written, read)
    return text


def text_of(pages: list[Path]) -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def joined(text: str) -> str:
    """The text with each command in one line."""
    return text.replace("\\\n", " ")


YAML, PYTHON = blocks(text_of(ALONE), "yaml"), blocks(text_of(ALONE), "python")
RECIPES = blocks(text_of(PAGES), "yaml")
SHELL = commands(text_of([FRONT]), indented=True)
SHELL += list(dict.fromkeys(commands(joined(text_of(PAGES[1:])), indented=False)))


def test_there_is_something_to_run():
    assert YAML and PYTHON and SHELL
    for page in PAGES:
        fences = re.findall(r"^```(\w*)(?: title=.*)?$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(fences) <= {"", "yaml", "python", "sh", "bash", "shell", "console", "text", "json"}
        assert fences.count("") == len(fences) / 2, f"{page.name}: every block names its language"


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """What is read instead of a model that transcribes recordings, and of lists of them."""
    folder = tmp_path_factory.mktemp("speech")
    model, clips = write_model(folder / "model"), write_recordings(folder / "clips", TEXTS * 11)
    return {SPEECH: model, "clips.jsonl": clips, "test.jsonl": clips, "group_size: 64": "group_size: 16"}


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    """What is read instead of a vision-language model, and of lists of pictures."""
    folder = tmp_path_factory.mktemp("vision")
    model, listed = (
        pictures.write_model(folder / "model"),
        pictures.write_pictures(folder / "list", pictures.TEXTS * 16),
    )
    return {VISION: model, "pictures.jsonl": listed, "test.jsonl": listed, "group_size: 64": "group_size: 16"}


@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_every_recipe_is_valid(number, tmp_path, monkeypatch):
    """Files that a guide writes first are tests/test_guides.py's."""
    text = RECIPES[number]
    if "plugins:" not in text and "sensitivity:" not in text:
        written = Recipe.from_text(text, "docs")
        assert Recipe.from_text(written.to_yaml()) == written


@pytest.mark.parametrize("text", [text for text in RECIPES if text in YAML or SPEECH in text or VISION in text])
def test_every_recipe_can_be_planned(text, speech, vision):
    text = smaller(text)
    replaced = speech if SPEECH in text else vision if VISION in text else {}
    for name, read in replaced.items():
        text = text.replace(name, read)
    planned = compress.plan(Recipe.from_text(text))
    assert planned.checkpoint_bytes < planned.dense_bytes


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_every_python_block_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(smaller(PYTHON[number]), f"README.md, Python block {number + 1}", "exec"), names)
    if "result" in names:
        assert names["result"].report["verified"]["own"] <= LOGITS


def test_the_python_of_the_readme_is_its_recipe():
    """'The same in Python' is the same value."""
    text = FRONT.read_text(encoding="utf-8")
    [spelled], [block] = blocks(text, "yaml"), blocks(text, "python")
    names: dict = {}
    exec(block.split("compress.run(")[0].rpartition("\n")[0], names)
    assert names["recipe"] == Recipe.from_text(spelled).model_copy(update={"eval": compress.Evaluate()})


@pytest.mark.parametrize("line", SHELL)
def test_every_command_is_one_that_exists(line):
    words = shlex.split(line)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    check = CHECKS.get(words[0])
    assert check is not None, f"{line}: no check for the program {words[0]}"
    check(words[1:])


def parsed(arguments: list[str]) -> None:
    """click takes the line, option by option; nothing runs."""
    context = main.make_context("compress", list(arguments), resilient_parsing=False)
    rest = [*context._protected_args, *context.args] if hasattr(context, "_protected_args") else context.args
    name, command, rest = main.resolve_command(context, rest)
    assert command is not None
    command.make_context(name, rest, parent=context)


def made(arguments: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    wanted = [word for word in arguments if "=" not in word]
    assert wanted and set(wanted) <= targets


SERVERS = ("onnxruntime-genai", "onnx", "onnx-ir")
"""Packages of other programs, in blocks that say that they are not run."""


def installed(arguments: list[str]) -> None:
    """pip install of this project, with extras that it has, or of a server."""
    assert arguments[0] == "install"
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = set(re.findall(r"^([a-z-]+) = \[", project.partition("[project.optional-dependencies]")[2], re.MULTILINE))
    for word in arguments[1:]:
        asked = re.search(r"\[(.*)\]", word)
        assert not asked or set(asked[1].split(",")) <= extras
        assert word.startswith(("-", ".", "compress-llm", "'.", '".')) or word in SERVERS, word


def scripted(arguments: list[str]) -> None:
    """A script of the repository that knows every option; or a module, -m, that is here."""
    if arguments[0] == "-m":
        assert arguments[1].startswith(("compress", "onnxruntime_genai")) or (ROOT / arguments[1]).exists()
        return parsed(arguments[2:]) if arguments[1] == "compress" else None
    assert (ROOT / arguments[0]).is_file()
    shown = subprocess.run(
        [sys.executable, ROOT / arguments[0], "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert [word for word in arguments if word.startswith("--") and word.split("=")[0] not in shown.stdout] == []


def launched(arguments: list[str]) -> None:
    """A launcher of `compress` in several processes."""
    assert arguments[arguments.index("-m") + 1] == "compress"
    parsed(arguments[arguments.index("-m") + 2 :])


def cloned(arguments: list[str]) -> None:
    assert arguments[0] == "clone"


def shown(arguments: list[str]) -> None:
    """A file that a run writes into its folder."""
    assert [Path(name).name for name in arguments if Path(name).name not in DESCRIPTIONS] == []


CHECKS = {
    "accelerate": launched,
    "compress": parsed,
    "make": made,
    "pip": installed,
    "python": scripted,
    "torchrun": launched,
    "git": cloned,
    "cd": lambda arguments: None,
    "cat": shown,
    "compress-llm": parsed,
    "source": lambda arguments: None,
    **dict.fromkeys(
        ("curl", "echo", "llama-cli", "llama-quantize", "llama-server", "mlx_lm.server", "ollama", "vllm"),
        lambda arguments: None,  # other programs, in blocks that say that they are not run
    ),
}


def test_the_first_four_commands_lead_to_a_card(tmp_path, monkeypatch):
    """From one line to an answer, a perplexity and the model card, on the pico model with little text."""
    monkeypatch.chdir(tmp_path)
    start = next(i for i, line in enumerate(SHELL) if line.startswith("compress quantize"))
    quantize, generate, evaluate, card = SHELL[start : start + 4]
    little = " --set calibration.sequences=4 --set calibration.length=64 --set eval.windows=2 --set eval.length=64"
    evaluate = evaluate.replace("--text wikitext", "--windows 2 --length 64")
    for line in (smaller(quantize) + little, generate + " --tokens 4", evaluate):
        done = CliRunner().invoke(main, shlex.split(line)[1:])
        assert done.exit_code == 0 and done.stdout.strip(), done.output
    assert "perplexity" in Path(shlex.split(card)[1]).read_text()


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("compress squeeze recipe.yaml", click.UsageError),
        ("compress run recipe.yaml --fast", click.UsageError),
        ("compress run", click.UsageError),
        ("make coffee", AssertionError),
        ("pip install .[magic]", AssertionError),
        ("python eval/benchmarks/none.py", AssertionError),
        ("python eval/benchmarks/quality.py x --fast", AssertionError),
        ("wget https://example.org", AssertionError),
    ],
)
def test_a_wrong_command_would_be_found(line, error):
    with pytest.raises(error):
        test_every_command_is_one_that_exists(line)


def test_the_readme_is_short():
    assert len(FRONT.read_text(encoding="utf-8").splitlines()) <= LONGEST


def test_the_site_leads_to_every_page():
    """mkdocs.yml lists every page; those of passes are linked from their table."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"([\w/-]+\.md)$", text.partition("\nnav:")[2], re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES if page != FRONT)


def test_the_reference_lists_every_pass_with_its_paper_and_every_format():
    passes = (DOCS / "passes.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[`(\w+)`\](.*)$", passes, re.MULTILINE))
    assert rows.keys() == compress.PASSES.keys()
    assert [key for key, step in compress.PASSES.items() if f"]({step.paper})" not in rows[key]] == []
    assert all(f"(passes/{key}.md)" in rows[key] for key in compress.PASSES)
    formats = (DOCS / "reference" / "formats.md").read_text(encoding="utf-8")
    assert FORMATS.keys() == set(re.findall(r"^\| `([a-z-]+)` \|", formats.partition("\n## ")[0], re.MULTILINE))


def test_the_python_reference_has_every_public_name():
    text = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    missing = [
        name
        for name in compress.__all__
        if not re.search(rf"(::: [\w.]+\.{name}$|^## {name}$|`compress\.{name}`)", text, re.MULTILINE)
    ]
    assert missing == ["PASSES", "__version__"], "values, not functions and classes"


@pytest.mark.parametrize(
    "page", [*PAGES, *(ROOT / "eval").glob("*.md"), ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name
)
def test_every_local_link_leads_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8"))
    missing = []
    for name, anchor in links:
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(f"{name}#{anchor}")
    assert missing == []


def anchors(page: Path) -> set[str]:
    """The names of a page's headings in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_every_recipe_and_preset_that_the_table_of_goals_names_is_there():
    goals = FRONT.read_text(encoding="utf-8").partition("## Which recipe for which goal")[2].partition("\n## ")[0]
    names = re.findall(r"`([a-z][\w.-]+)`", goals)
    assert len(names) > 12 and [name for name in names if name not in {*shipped(), *compress.PASSES}] == []
    schemes = re.findall(r"`(?:--scheme )?([A-Z][\w-]+)`", goals)
    assert schemes and [name for name in schemes if name not in presets()] == []


def test_the_stated_numbers_of_passes_schemes_recipes_and_formats_are_right():
    counts = {"passes": compress.PASSES, "schemes": presets(), "shipped recipes": shipped(), "formats": FORMATS}
    stated = {name: {len(of)} for name, of in counts.items()}
    texts = FRONT.read_text(encoding="utf-8") + (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = {name: {int(count) for count in re.findall(rf"(\d+) {name}", texts)} for name in stated}
    assert found == stated
