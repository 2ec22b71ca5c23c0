"""The lower bounds of the dependencies, which `make wheels` installs."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement


@pytest.fixture
def wheels(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "eval" / "benchmarks"))
    import wheels

    return wheels


@pytest.mark.parametrize("kind", ["newest", "lowest"])
def test_every_dependency_has_one_lower_bound(wheels, kind):
    found = [wheels.lowest(one) for one in wheels.requirements(wheels.EXTRAS[kind])]
    assert len(found) > 15 and any(one.startswith("torch==2.") for one in found)


@pytest.mark.parametrize("line", ["torch", "torch<3", "torch>=2,>=3"])
def test_a_dependency_without_a_lower_bound_is_an_error(wheels, line):
    with pytest.raises(ValueError, match="has no lower bound; write one in pyproject.toml"):
        wheels.lowest(Requirement(line))


def test_the_parts_that_run_are_there(wheels):
    assert all((wheels.ROOT / part).exists() for part in wheels.PARTS)
