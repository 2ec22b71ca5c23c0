"""Patterns choose modules in their order, and a pattern that does nothing is an error."""

import pytest

from compress.errors import TargetError
from compress.models.structure.patterns import matches, select

NAMES = [f"model.layers.{i}.{leaf}" for i in range(2) for leaf in ("mlp.up_proj", "mlp.down_proj", "attn.q_proj")]


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("*", "a.b", True),
        ("*.mlp.*", "model.mlp.up", True),
        ("*.mlp", "model.mlp.up", False),
        ("*.Up", "model.up", False),
        ("re:.*up", "model.up", True),
        ("re:up", "model.up", False),
        ("re:.*(up|down)", "model.down", True),
        ("re:.*down_proj$", "model.mlp.down_proj", True),
        ("down_proj", "model.mlp.down_proj", True),
        ("down_proj", "down_proj", True),
        ("down", "model.mlp.down_proj", False),
        ("mlp.down_proj", "model.mlp.down_proj", False),
    ],
)
def test_a_pattern_matches_the_whole_name(pattern, name, expected):
    assert matches(name, pattern) is expected


def test_the_order_of_the_model_is_kept():
    assert select(NAMES, ["*.down_proj", "*.up_proj"], [], "x") == [n for n in NAMES if "mlp" in n]


def test_what_is_ignored_is_left_out():
    assert select(NAMES, ["*"], [], "x") == NAMES
    assert select(NAMES, ["*"], ["*.0.*", "*.mlp.*"], "x") == ["model.layers.1.attn.q_proj"]


@pytest.mark.parametrize(
    ("targets", "ignore", "message"),
    [
        (
            ["*.mlp.up_prj"],
            [],
            r"p\[0\]: targets pattern '\*\.mlp\.up_prj' matches no linear.*did you mean 'up_proj'\?",
        ),
        (["*"], ["*.zzz"], r"p\[0\]: ignore pattern '\*\.zzz' matches no linear.*known: down_proj, q_proj, up_proj"),
        (
            ["*", "re:up_proj"],
            [],
            r"'re:up_proj' matches no linear inside the blocks; a regular expression must match the whole name, "
            r"as 're:\.\*up_proj\.\*' does",
        ),
        (["re:.*up_prj$"], [], r"'re:\.\*up_prj\$' matches no linear.*did you mean 'up_proj'\?"),
        (["down_prj"], [], r"targets pattern 'down_prj' matches no linear.*did you mean 'down_proj'\?"),
        (["mlp.down_proj"], [], r"matches no linear.*; write the full name, or '\*\.mlp\.down_proj'"),
        (["mlp"], [], r"for all linears inside of these modules write '\*\.mlp\.\*'"),
        (["*"], ["model.layers.0"], r"for all linears inside of these modules write 'model\.layers\.0\.\*'"),
        (["re:.*attn"], [], r"for all linears inside of these modules write 're:\.\*attn\\\\\.\.\*'"),
        (["*.mlp.*"], ["*_proj"], r"p\[0\]: the targets and ignore patterns select none of the 6 linears"),
    ],
)
def test_patterns_that_do_nothing(targets, ignore, message):
    with pytest.raises(TargetError, match=message):
        select(NAMES, targets, ignore, "p[0]")
