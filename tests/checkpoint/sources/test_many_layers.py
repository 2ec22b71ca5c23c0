"""Models of very many layers, such as mixtures of experts: work grows with their number, not with its square."""

from cProfile import Profile
from itertools import pairwise
from pstats import Stats

import pytest
from transformers import AutoModelForCausalLM

import compress
from compress.checkpoint.sources.stored import by_owner

EXPERTS = (16, 32, 64)


def test_names_belong_to_the_module_above_them():
    names = ["a.b.weight", "a.b.parts.0.scale", "a.bias", "c", "a.bc.weight"]
    assert by_owner(names, ["a.b", "d"]) == {"a.b": ["a.b.weight", "a.b.parts.0.scale"], "d": []}


def calls(work) -> int:
    """The number of calls of functions, which does not depend on the machine."""
    profile = Profile()
    profile.runcall(work)
    return sum(calls for calls, *_ in Stats(profile).stats.values())


@pytest.fixture(scope="module")
def counts(tiny, recipe, tmp_path_factory):
    """The calls of each kind of work, for growing numbers of experts."""
    found = {}
    for count in EXPERTS:
        folder = tmp_path_factory.mktemp("experts")
        tiny("qwen3-moe", num_experts=count, num_hidden_layers=1).save_pretrained(folder / "model")
        work = recipe(compress.RTN(weights="int4", group_size=16), model=str(folder / "model"))
        for kind, run in {
            "run": lambda work=work, folder=folder: compress.run(work, folder / "out", overwrite=True, progress=False),
            "load": lambda folder=folder: compress.load(folder / "out"),
            "transformers": lambda folder=folder: AutoModelForCausalLM.from_pretrained(folder / "out"),
        }.items():
            if count == EXPERTS[0]:
                run()  # what is imported or found once
            found.setdefault(kind, []).append(calls(run))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "load", "transformers"])
def test_work_grows_with_the_number_of_experts(counts, kind):
    first, second = (after - before for before, after in pairwise(counts[kind]))
    assert second / first < 2.4  # 4 if each layer looked at all others
