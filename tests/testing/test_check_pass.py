"""check_pass passes what keeps the contract, and names what does not."""

from typing import ClassVar

import pytest
import torch
from pydantic import Field

import compress
from compress.errors import RecipeError
from compress.layers.linear import linears, replace_linear
from compress.passes.contract.layers import Solution
from compress.passes.contract.passes import LayerPass, ModelPass
from compress.testing import check_pass


class Halved(LayerPass):
    """Half of every weight."""

    paper: ClassVar[str] = "https://example.org/halved"

    factor: float = Field(default=0.5, description="the factor")

    def solve(self, weight, seen, layer):
        return Solution(weight * self.factor)


def test_what_keeps_the_contract_passes():
    check_pass(Halved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "around"),
    [
        (compress.RTN, {}),
        (compress.Wanda(pattern="2:4"), {}),
        (compress.LoRC, {"before": [compress.RTN()]}),
        (compress.AWQ(), {"after": [compress.RTN()]}),
    ],
    ids=["rtn", "wanda", "lorc", "awq"],
)
def test_the_passes_of_the_package_pass(step, around):
    check_pass(step, **around)


def test_a_file_of_a_plugin(tmp_path):
    (tmp_path / "half.py").write_text(
        "from typing import ClassVar\n\nfrom compress.passes.contract.layers import Solution\nfrom compress.passes.contract.passes import LayerPass\n\n\n"
        "class Half(LayerPass):\n    '''Half of every weight.'''\n\n"
        "    paper: ClassVar[str] = 'https://example.org/half'\n\n"
        "    def solve(self, weight, seen, layer):\n        return Solution(weight / 2)\n"
    )
    check_pass(tmp_path / "half.py")


class Drawing(Halved):
    """Noise from the global random state."""

    def solve(self, weight, seen, layer):
        return Solution(weight + torch.randn_like(weight))


class Idle(Halved):
    """Nothing."""

    def solve(self, weight, seen, layer):
        return Solution()


class Silent(Halved):
    """A mask that is not declared."""

    def solve(self, weight, seen, layer):
        keep = weight > 0
        return Solution(weight * keep, keep)


class Boasting(Halved):
    """A fact that is not true."""

    makes: ClassVar = frozenset({"quantized"})


class Unpruning(Halved):
    """Pruned weights come back."""

    def solve(self, weight, seen, layer):
        return Solution(weight + 1, None if layer.mask is None else torch.ones_like(layer.mask))


class Everywhere(ModelPass):
    """All linears, whatever the targets."""

    paper: ClassVar[str] = "https://example.org/everywhere"

    def apply(self, model, run):
        for name in linears(model):
            layer = replace_linear(model, name)
            layer.put(2 * layer.weight)


class Counting(Halved):
    """State in the class."""

    seen: ClassVar[list] = []

    def solve(self, weight, seen, layer):
        self.seen.append(layer.name)
        return Solution(weight * len(self.seen))


class Undescribed(Halved):
    """An option without a text."""

    other: int = 1


class Unpublished(Halved):
    """No address."""

    paper: ClassVar[str] = "a book"


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Drawing, "it draws from the global random state"),
        (Idle, "it changes nothing"),
        (Silent, "is masked afterwards; add the fact to makes"),
        (Boasting, "it declares quantized, but .* is not afterwards"),
        (Unpruning, "the mask of an earlier pass is lost|pruned weights are not exactly zero"),
        (Everywhere, r"with targets: model\.layers\.1\.\* it changes|a pattern that matches nothing"),
        (Counting, "a second time it gives other values"),
        (Undescribed, "options without a description: other"),
        (Unpublished, "write the https address"),
        (dict, "dict is not a pass"),
    ],
)
def test_what_breaks_it_is_named(step, message):
    with pytest.raises(AssertionError, match=message):
        check_pass(step)


def test_a_class_that_no_recipe_could_name():
    class Local(Halved):
        """Of a function."""

    with pytest.raises(RecipeError, match="put it into a separate file"):
        check_pass(Local)
