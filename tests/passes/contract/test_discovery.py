"""Which values are classes, on every Python version."""

import types

import pytest

from compress.passes.contract.discovery import class_of_file, is_class


@pytest.mark.parametrize("value", [dict[str, int], tuple[int, int], list[str] | None, "text", None])
def test_what_is_no_class(value):
    assert not is_class(value)


def test_a_file_of_a_pass_may_name_types():
    module = types.ModuleType("a_pass")

    class Base:
        pass

    class APass(Base):
        __module__ = "a_pass"

    module.APass, module.Cuts = APass, dict[str, dict[int, int]]
    assert is_class(APass) and class_of_file(module, "a_pass", Base) is APass
