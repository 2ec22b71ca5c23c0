"""Every row and point of SECURITY.md names what a test shows, and the files that it names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
FUZZ, CHILD = "end_to_end/test_fuzz.py", "models/test_child_process.py"

SHOWN_BY = {
    "checkpoint": f"{CHILD}::test_opening_a_file_imports_nothing_beside_it",
    "recipe": "recipe/test_plugins.py::test_a_file_beside_the_recipe_is_a_pass_under_its_name",
    "plugin": "recipe/test_plugins.py::test_a_class_of_an_importable_module",
    "text or data set": "data/test_pieces.py::test_two_sequences_of_a_large_text_take_little_memory",
    "task file of an evaluation": "evaluation/harness/test_tasks.py::test_task_files_in_the_folder_are_tasks",
    "model code": "checkpoint/sources/test_own_code.py::test_code_runs_only_if_the_user_trusts_it",
    "run code of the files": f"{CHILD}::test_no_module_of_the_working_directory_is_imported",
    "open files outside": f"{FUZZ}::test_a_link_out_of_the_folder",
    "read or write memory": f"{FUZZ}::test_row_starts_that_wrap_are_refused",
    "take memory or time": f"{FUZZ}::test_each_kind_of_damage_has_its_message",
    "send commands": "cli/test_printing.py::test_names_of_tensors_do_not_command_the_terminal",
    "compute with a layer": "checkpoint/formats/test_closed_lists.py::test_a_tensor_that_is_not_read_is_an_error",
    "code in files": "test_architecture.py::test_no_file_can_run_code",
    "files elsewhere": f"{FUZZ}::test_a_recipe_whose_model_is_a_pipe",
    "sizes and counts": f"{FUZZ}::test_each_kind_of_damage_of_other_formats_has_its_message",
    "layers that cannot": "layers/test_random_layers.py::test_a_layer_that_cannot_be_computed_is_refused_before_it_is_read",
    "regular expressions": "checkpoint/formats/test_patterns.py::test_no_pattern_takes_long",
    "chat templates": "models/test_chat_template.py::test_a_template_without_end",
    "terminal and Markdown": "report/test_markdown.py::test_names_of_files_are_text_in_markdown",
    "silent random": "checkpoint/sources/test_filling.py::test_without_compress_transformers_stops_and_says_what_to_write",
}
"""By the beginning of each row and point: a test of what it says."""


def claims():
    """The first cells of the rows of all tables, and the points of what must not happen."""
    rows = [line.split("|")[1].strip() for line in PAGE.splitlines() if line.startswith("| ")]
    points = PAGE.partition("must not, whatever")[2].partition("An error of type")[0]
    return [row for row in rows if row not in ("file", "threat")] + re.findall(r"^- (.*)$", points, re.MULTILINE)


def test_every_claim_has_a_test():
    unshown = [claim for claim in claims() if not any(claim.startswith(start) for start in SHOWN_BY)]
    assert len(claims()) == len(SHOWN_BY) and unshown == []


@pytest.mark.parametrize("claim", SHOWN_BY)
def test_the_test_of_a_claim_exists(claim):
    path, name = SHOWN_BY[claim].split("::")
    assert f"\ndef {name}(" in (ROOT / "tests" / path).read_text(encoding="utf-8")


def test_the_files_that_it_names_exist():
    names = re.findall(r"`([\w/]+\.py)`", PAGE)
    assert len(names) >= 5
    for name in names:
        assert list((ROOT / "compress").glob(f"**/{name}")), name
