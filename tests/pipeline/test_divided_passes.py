"""Passes over the whole model: which of them several processes divide is what the guide's table states."""

import re
from pathlib import Path

import pytest
import torch
from batches import batch_of
from launching import in_threads

import compress
from compress.models.kinds.batch import Examples
from compress.passes import PASSES
from compress.passes.contract.journal import Journal
from compress.passes.contract.passes import ModelPass
from compress.pipeline.divide import own_batches
from compress.pipeline.engine import Memory, engine
from compress.pipeline.resolve import resolve, run_of
from compress.pipeline.sources import in_memory

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "several-gpus.md"
WHOLE = {name: step for name, step in PASSES.items() if issubclass(step, ModelPass)}
LEARNS = "learn"
"""An option with which a pass trains."""


def table() -> dict[str, str]:
    """The second column of the guide's table by the first one, a pass of which is a name, and maybe an option."""
    text = GUIDE.read_text(encoding="utf-8").partition("## Passes over the whole model")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    stated = {}
    for names, divided, _ in rows[2:]:
        words = re.findall(r"`(\w+)`", names)
        if words[0] == "allocate":  # an option of passes that sweep
            continue
        keys = [" ".join(words)] if " with " in names else words
        stated |= dict.fromkeys(keys, divided)
    return stated


def step_of(name: str) -> ModelPass:
    """The pass as its recipe states it."""
    passes = compress.Recipe.from_yaml(ROOT / "recipes" / f"{name}.yaml").passes
    return next(step for step in passes if isinstance(step, WHOLE[name]))


def test_the_guide_states_which_passes_over_the_whole_model_are_divided():
    stated = table()
    steps = {name: step_of(name) for name in WHOLE}
    expected = {name: "every step" if step.requires.training else "no" for name, step in steps.items()}
    learning = {name for name in WHOLE if LEARNS in WHOLE[name].model_fields and expected[name] == "no"}
    assert learning and all(
        WHOLE[name].model_validate({**dict(steps[name]), LEARNS: {}}).requires.training for name in learning
    )
    expected |= {f"{name} {LEARNS}": "every step" for name in learning}
    assert stated == expected


class Seen(compress.DropBlocks):
    """Notes the processes and the sequences that it is given."""

    def apply(self, model, run):
        seen.append((run.processes.size, len(run.calibration)))
        super().apply(model, run)


seen = []


@pytest.mark.parametrize("processes", [1, 2])
def test_a_pass_that_is_not_divided_has_all_sequences_in_each_process(processes, tiny, ids):
    text = ids(4, 8)
    seen.clear()

    models = [tiny("llama", num_hidden_layers=2) for _ in range(processes)]  # no thread builds one beside another

    def work(each):
        opened = in_memory(models[each.rank])
        steps = [Seen(count=1)]
        resolved = resolve(compress.Recipe(model="pico", passes=steps, save={"format": "native"}, eval=None), opened)
        examples = Examples.of_ids(text)
        run = run_of(resolved, Journal(), processes=each, calibration=examples)
        with torch.no_grad():
            engine(resolved, own_batches(examples, 2, each), batch_of(text[:1]), run, Memory())
        return len(opened.blocks)

    assert in_threads(processes, work) == [1] * processes
    assert seen == [(1, 4)] * processes
