"""The tutorials and guides run as they stand: files, commands and Python, page by page, on the pico model."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from compress.cli import main

ROOT = Path(__file__).parents[1]
PICO = Path(__file__).parent / "pico" / "model"
PAGES = sorted(page for kind in ("tutorials", "guides") for page in (ROOT / "docs" / kind).glob("*.md"))
BLOCK = re.compile(r'^( *)```(\w+)(?: title="([^"]*)")?\n(.*?)^ *```$', re.MULTILINE | re.DOTALL)
NOT_RUN = "not run here"
"""The title of a block whose programs, models or data are not on the machines of the tests."""
SMALLER = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": str(PICO),
    "sequences: 64": "sequences: 4",
    "sequences: 32": "sequences: 4",
    "length: 512": "length: 64",
    "length: 256": "length: 64",
    "windows: 16": "windows: 2",
    "sequences=32": "sequences=4",
    "length=512": "length=64",
    # widths and depth of the pico model
    "run bitsandbytes": "run bitsandbytes --set passes.0.rtn.group_size=32",
    "run gptq_checkpoint": "run gptq_checkpoint --set passes.0.gptq.group_size=32",
    "run awq_checkpoint": "run awq_checkpoint --set passes.0.awq.group_size=32 --set passes.1.gptq.group_size=32",
    "tensor_parallel: 3": "tensor_parallel: 1",
    "--context 2048": "--context 256",
    "120MB": "0.48MB",
}
"""What is read instead of what stands there, so that a page takes seconds."""
LITTLE_TEXT = ["--calibration", "embedded", "--set", "calibration.sequences=4", "--set", "calibration.length=64"]
LITTLE_EVAL = ["--eval", "embedded", "--set", "eval.windows=2", "--set", "eval.length=64"]
"""Options of commands that build a recipe or read a shipped one."""


def smaller(text: str) -> str:
    for written, read in SMALLER.items():
        text = text.replace(written, read)
    return text


def run_command(line: str) -> None:
    """Run a line of a page that is a command of compress."""
    words = shlex.split(smaller(line), comments=True)
    if words[:1] not in (["compress"], ["compress-llm"]):
        return
    reads_text = words[1] in ("quantize", "prune", "distill") and "--model-free" not in words
    if reads_text or (words[1] == "run" and not words[2].endswith(".yaml")):
        words += LITTLE_TEXT if "none" in words else LITTLE_TEXT + LITTLE_EVAL
    done = CliRunner().invoke(main, words[1:])
    assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception!r}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_from_its_first_line_to_its_last(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "page"}
    for _, language, title, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        text = re.sub(r"^    ", "", text, flags=re.MULTILINE) if text.startswith("    ") else text
        if title == NOT_RUN:
            continue
        if title:
            Path(title).parent.mkdir(parents=True, exist_ok=True)
            Path(title).write_text(smaller(text), encoding="utf-8")
        elif language == "python":
            exec(compile(smaller(text), page.name, "exec"), names)
        elif language == "sh":
            for line in text.replace("\\\n", " ").splitlines():
                run_command(line)


def test_every_program_that_is_not_run_is_marked():
    """A line of another program stands in a block that says so, or installs or starts what the tests have already."""
    ours = {"compress", "compress-llm", "make", "git", "cd", "source", "pip", "cat", "python", "accelerate", "torchrun"}
    for page in PAGES:
        for _, language, title, text in BLOCK.findall(page.read_text(encoding="utf-8")):
            if language == "sh" and title != NOT_RUN:
                lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
                programs = {next(w for w in words if "=" not in w) for words in lines if words}
                assert programs <= ours, f"{page.name}: {programs - ours}"
