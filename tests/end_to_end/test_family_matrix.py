"""docs/families.md is true: every pass works on every family as it says, or is refused for the reason that it names."""

from pathlib import Path

import pytest
from family_matrix import CHAINS, GROUPS, LATE, REASONS, WORKS, Family, document, read_document
from model_families import STRUCTURES

from compress import PASSES

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"
SAMPLE = [
    ("mamba", "distill"),  # reads the weight of a linear that it does not call
    ("mamba", "kv_cache"),
    ("phi3", "narrow"),
    ("cohere", "rotate"),
    ("albert", "gptq"),
]


@pytest.fixture(scope="module")
def stated() -> dict[str, dict[str, str]]:
    return read_document(DOCUMENT.read_text(encoding="utf-8"))


def test_the_document_has_every_pass_and_family(stated):
    assert set(CHAINS) == {key for keys in GROUPS.values() for key in keys} == set(PASSES)
    assert list(stated) == list(STRUCTURES) and len(STRUCTURES) >= 20
    assert all(set(cells) == set(CHAINS) for cells in stated.values())
    codes = {code.removesuffix(LATE) for cells in stated.values() for code in cells.values()}
    assert codes <= {WORKS, *REASONS}
    assert document(stated) == DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize(("family", "key"), SAMPLE)
def test_a_cell_is_as_the_document_says(family, key, stated, tmp_path):
    assert Family(family, tmp_path / family).cell(key).code == stated[family][key]


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("jamba", "kv_cache"),  # blocks with other states in the cache
        ("lfm2", "kv_cache"),
        ("llama4", "rtn"),  # a router that is a subclass of a linear
    ],
)
def test_what_once_crashed_works(family, key, tmp_path):
    assert Family(family, tmp_path / family).cell(key).code == WORKS


@pytest.mark.few(0, slow=11)
@pytest.mark.parametrize("family", STRUCTURES)
def test_every_sixth_pass_on_a_family_is_as_the_document_says(family, stated, tmp_path):
    """The first family starts with the first pass, the next one with the second; `families.py` tries all cells."""
    made, keys = Family(family, tmp_path / family), list(CHAINS)[list(STRUCTURES).index(family) % 6 :: 6]
    assert {key: made.cell(key).code for key in keys} == {key: stated[family][key] for key in keys}
