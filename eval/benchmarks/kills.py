"""Kill runs with SIGKILL at random moments, continue them by the same call, and compare the checkpoints' bytes.

    python eval/benchmarks/kills.py [--kinds sweep training ...] [--moments 20] [--seed 0] [--model tests/pico/model]

Each kind is a recipe (KINDS). It runs once without a stop; then, once per moment, in a new folder: the run is killed
at the moment, and the same call continues it to its end. `processes` runs as two processes that find each other as
under torchrun; every second time only one of them is killed, and the other one ends by itself.

The moments are drawn between the start and the end of a run, in its own clock: after so many finished units of work
(blocks, training steps) and so many seconds, so that the load of the machine moves no moment. The runs are forked from
one process that has imported the libraries, which takes longer than a run on the pico model.

Prints a Markdown table with a row per kind, and exits with 1 if one of these fails in any run:
- the sha256 of the shards (and of other files that say what was made, FILES) is that of the unbroken run, and so are
  the results of layers, of trainings and of the evaluation in the report;
- no finished block of a sweep is computed again, and no finished segment;
- at most `checkpoint_every` training steps are taken again.

resumed: where the killed runs went on. opening: nothing was written yet. blocks, training: in a segment, after some of
its blocks or steps. between passes: after a segment. evaluation: the checkpoint was complete.
repeated: the share of finished units that was computed twice, in the mean and at most; each unit counts with its
seconds in the unbroken run. time: the processor time of the killed and of the continued run, relative to that of the
unbroken one, in the mean; a continued run opens the model again, and runs the text through finished blocks.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from launching import ROOT, free_port
from safetensors import SafetensorError, safe_open

import compress
from compress.checkpoint.containers.files import file_sha256
from compress.passes.contract.journal import Journal, JournalEntry
from compress.passes.contract.processes import Processes
from compress.pipeline.engine import segments

KEEP_STEPS = 4
TRAINED = {"steps": 16, "batch": 4, "checkpoint_every": KEEP_STEPS}
KINDS: dict[str, list[dict[str, Any]]] = {
    "sweep": [{"awq": {"weights": "int4", "group_size": 32}}, {"gptq": {"weights": "int4", "group_size": 32}}],
    "training": [{"finetune": TRAINED}],
    "training-sweep": [{"finetune": TRAINED}, {"gptq": {"weights": "int4", "group_size": 32}}],
    "sweep-training": [
        {"gptq": {"weights": "int4", "group_size": 32}},
        {"distill": {**TRAINED, "train": ["scales"]}},
    ],
    "structured-sweep": [
        {"narrow": {"ffn": 0.25, "multiple": 32, "importance": "activation", "repair": "least_squares"}},
        {"gptq": {"weights": "int4", "group_size": 32}},
    ],
    "processes": [
        {"wanda": {"pattern": "2:4"}},
        {"finetune": TRAINED},
        {"gptq": {"weights": "int4", "group_size": 32}},
    ],
}
TOGETHER = {"processes": 2}
FILES = ("config.json", "recipe.yaml", "SHA256SUMS")
PAUSE_SECONDS = 0.001


@dataclass(frozen=True)
class Unit:
    """A finished unit of work: a block of a segment, a step of a training, a segment.

    seconds: since the start of the run.
    """

    kind: str
    name: str
    number: int
    seconds: float

    @property
    def key(self) -> tuple[str, str, int]:
        return self.kind, self.name, self.number


@dataclass(frozen=True)
class Unbroken:
    """The run without a stop. seconds: from its start to its end. processor: seconds of all its processes."""

    folder: Path
    units: list[Unit]
    seconds: float
    processor: float


@dataclass(frozen=True)
class Killed:
    """The outcome of one killed run. moment: share of the unbroken run; problems: what must not be, in words."""

    moment: float
    resumed: str
    repeated: float
    time: float
    problems: list[str]


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        import_all(arguments.model, Path(folder))
    rows, failed = [], []
    for kind in arguments.kinds:
        print(f"{kind} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            killed = trials(kind, Path(folder), arguments)
        rows.append(row(kind, killed))
        print(rows[-1], file=sys.stderr, flush=True)
        failed += [f"{kind} at {100 * one.moment:.1f}%: {problem}" for one in killed for problem in one.problems]
    print("| passes | kills | at, % of the run | resumed in | repeated: mean, most | time | same bytes |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    for line in failed:
        print(line, file=sys.stderr)
    sys.exit(bool(failed))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--moments", type=int, default=20, help="how often each kind is killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default=str(ROOT / "tests" / "pico" / "model"))
    return parser.parse_args()


def import_all(model: str, folder: Path) -> None:
    """Import what a run imports, so that no later run begins with it."""
    names = folder / "names"

    def first() -> None:
        work(recipe_of("sweep-training", model), folder / "out", folder / "log", {}, "0")
        names.write_text("\n".join(sys.modules))

    process = get_context("fork").Process(target=first)
    process.start()
    process.join()
    for name in names.read_text().split("\n"):
        with suppress(ImportError):
            importlib.import_module(name)


def recipe_of(kind: str, model: str) -> compress.Recipe:
    return compress.Recipe.model_validate(
        {
            "model": model,
            "calibration": {"source": "embedded", "sequences": 16, "length": 64},
            "passes": KINDS[kind],
            "save": {"format": "native", "verify": "own"},
            "eval": {"perplexity": ["embedded"], "windows": 16, "length": 64},
        }
    )


def trials(kind: str, folder: Path, arguments: argparse.Namespace) -> list[Killed]:
    """The outcome of every kill of a kind."""
    recipe, drawn = recipe_of(kind, arguments.model), random.Random(f"{arguments.seed} {kind}")
    log, count = folder / "whole.log", TOGETHER.get(kind, 1)
    begin = time.monotonic()
    codes, processor = ended(start(recipe, folder / "whole", log, count))
    seconds = time.monotonic() - begin
    if any(codes):
        sys.exit(f"{kind}: the unbroken run ended with {codes}\n{said(log)}")
    unbroken = Unbroken(folder / "whole", units(log), seconds, processor)
    found: list[Killed] = []
    while len(found) < arguments.moments:
        alone = drawn.randrange(count) if count > 1 and len(found) % 2 else None
        one = killed_once(recipe, count, folder / "again", unbroken, drawn.random() * seconds, alone)
        found += [one] if one is not None else []  # None: the run was over first
    return sorted(found, key=lambda one: one.moment)


def killed_once(
    recipe: compress.Recipe, count: int, folder: Path, unbroken: Unbroken, at: float, alone: int | None
) -> Killed | None:
    """Kill a run, continue it, and compare it with the unbroken one. alone: the rank that is killed, None: all."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    out, first, second = folder / "killed", folder / "first.log", folder / "second.log"
    started = start(recipe, out, first, count)
    if not wait_until(at, unbroken.units, first, started):
        ended(started)
        return None
    for rank, process in enumerate(started):
        if alone in (None, rank):
            process.kill()  # SIGKILL
    codes, until = ended(started)
    if 0 in codes:
        return None
    where, before = resumes_in(out), units(first)
    codes, after_it = ended(start(recipe, out, second, count))
    after = units(second)
    problems = differences(unbroken.folder, out) if not any(codes) else [f"the run ended with {codes}: {said(second)}"]
    twice = {unit.key for unit in before} & {unit.key for unit in after}
    steps = [key for key in twice if key[0] == "step"]
    twice -= {key for key in twice if key[0] == "block" and key[2] not in swept(recipe)}  # only written twice
    problems += [f"{key} was computed twice" for key in twice if key[0] != "step"]
    problems += [f"{len(steps)} steps were taken twice"] if len(steps) > KEEP_STEPS else []
    problems += missing({unit.key for unit in unbroken.units}, {unit.key for unit in (*before, *after)})
    took = (until + after_it) / unbroken.processor
    return Killed(at / unbroken.seconds, where, share(twice, unbroken.units), took, problems)


def swept(recipe: compress.Recipe) -> set[int]:
    """The numbers of the segments that are sweeps; in the others blocks are not computed one by one, only written."""
    return {one.index for one in segments([(step.key(), step, []) for step in recipe.passes]) if one.swept}


def missing(wanted: set[tuple[str, str, int]], found: set[tuple[str, str, int]]) -> list[str]:
    """Units of the unbroken run that were never computed; a kill between a write and its line in the log allows one."""
    lost = [key for key in wanted - found if key[0] != "segment"]
    return [f"{key} was not computed" for key in lost] if len(lost) > 1 else []


def start(recipe: compress.Recipe, out: Path, log: Path, count: int) -> list[Any]:
    """`count` new processes that run the recipe together; rank 0 writes finished units to the log."""
    port, context = str(free_port()), get_context("fork")
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)} if count > 1 else {}
    found = [context.Process(target=work, args=(recipe, out, log, where, str(rank))) for rank in range(count)]
    for process in found:
        process.start()
    return found


def work(recipe: compress.Recipe, out: Path, log: Path, where: Mapping[str, str], rank: str) -> None:
    """The run, in a process of its own. where: the variables of a launcher."""
    errors = os.open(log.with_suffix(".errors"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, sys.stderr.fileno())
    if where:
        os.environ |= {**where, "RANK": rank, "LOCAL_RANK": rank}
    begin, file = time.monotonic(), log.open("a", buffering=1)

    def listen(entry: JournalEntry) -> None:
        unit = unit_of(entry, time.monotonic() - begin)
        if unit is not None:
            file.write(json.dumps(vars(unit)) + "\n")

    compress.run(recipe, out, journal=Journal(listeners=[listen]), progress=False)
    link = Processes.launched(cpu=True).link
    if link is not None:
        link.close()  # as at the end of a command: a process stays until the others have read its last values


def unit_of(entry: JournalEntry, seconds: float) -> Unit | None:
    """The finished unit of work that a line of the journal tells of."""
    if entry.kind == "block":
        return Unit("block", entry.message, entry.figures["segment"], seconds)
    if entry.kind == "segment":
        return Unit("segment", entry.message, entry.figures["segment"], seconds)
    if entry.kind == "progress" and entry.message.startswith("training, "):
        return Unit("step", entry.where, entry.figures["done"], seconds)
    return None


def units(log: Path) -> list[Unit]:
    """The finished units of a log; a line that was being written is left out."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return [Unit(**json.loads(line)) for line in lines]


def wait_until(at: float, unbroken: list[Unit], log: Path, started: list[Any]) -> bool:
    """Wait for a moment of the unbroken run: the last unit before it, and the seconds after that unit.

    False: a process has ended before.
    """
    begin = time.monotonic()
    earlier = [unit for unit in unbroken if unit.seconds <= at]
    while len(units(log)) < len(earlier):
        if not all(process.is_alive() for process in started):
            return False
        time.sleep(PAUSE_SECONDS)
    since = begin + units(log)[len(earlier) - 1].seconds if earlier else begin
    time.sleep(max(0.0, since + at - (earlier[-1].seconds if earlier else 0.0) - time.monotonic()))
    return True


def ended(started: list[Any]) -> tuple[list[int], float]:
    """The exit codes of the processes, when all have ended, and their processor time in seconds."""
    before = of_children()
    for process in started:
        process.join()
    return [process.exitcode for process in started], of_children() - before


def of_children() -> float:
    """The processor time of all processes of this one that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def said(log: Path) -> str:
    """What a run wrote to standard error."""
    path = log.with_suffix(".errors")
    return path.read_text() if path.exists() else ""


def resumes_in(out: Path) -> str:
    """Where the next start of a killed run goes on, by what is in its folder."""
    try:
        manifest = json.loads((out / ".compress" / "manifest.json").read_text())
    except (OSError, ValueError):
        return "opening"
    if manifest["complete"]:
        return "evaluation"
    steps = [step for step in map(steps_of, (out / ".compress" / "passes").rglob("*.safetensors")) if step]
    if steps and not manifest["shards"] and not (manifest["begun"] or {}).get("parts"):
        return "training"
    if manifest["shards"] or (manifest["begun"] or {}).get("parts"):
        return "blocks"
    return "between passes" if manifest["reached"] else "opening"


def steps_of(path: Path) -> int:
    """The steps of a training state; 0 for another file."""
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads((file.metadata() or {}).get("state", "{}")).get("step", 0)
    except (OSError, SafetensorError):
        return 0


def share(twice: set[tuple[str, str, int]], unbroken: list[Unit]) -> float:
    """The share of the work that these units are of the unbroken run, by their seconds there."""
    spent = [after.seconds - before.seconds for before, after in pairwise(unbroken)]
    spent = [spent[0] if spent else 1.0, *spent]  # before the first unit the model is opened
    total = sum(spent)
    return sum(took for took, unit in zip(spent, unbroken, strict=True) if unit.key in twice) / total


def differences(whole: Path, out: Path) -> list[str]:
    """The files of a checkpoint, and the parts of its report, that are not those of the unbroken run."""
    names = {path.name for folder in (whole, out) for path in folder.glob("*.safetensors")} | set(FILES)
    found = [f"{name} differs" for name in sorted(names) if digest(whole / name) != digest(out / name)]
    reports = [results(json.loads((folder / "report.json").read_text())) for folder in (whole, out)]
    return found + [f"report: {key} differs" for key in reports[0] if reports[0][key] != reports[1][key]]


def digest(path: Path) -> str | None:
    return file_sha256(path) if path.exists() else None


def results(report: Mapping[str, Any]) -> dict[str, Any]:
    """What a report says of the result, without seconds."""
    return {name: without_seconds(report[name]) for name in ("layers", "training", "perplexity", "size", "masked")}


def without_seconds(value: Any) -> Any:
    if isinstance(value, list):
        return [without_seconds(one) for one in value]
    if isinstance(value, dict):
        return {name: without_seconds(one) for name, one in value.items() if name != "seconds"}
    return value


def row(kind: str, killed: list[Killed]) -> str:
    """The line of a kind in the table."""
    chain = ", ".join(f"`{name}`" for step in KINDS[kind] for name in step)
    chain += f"; {TOGETHER[kind]} processes" if kind in TOGETHER else ""
    moments = ", ".join(f"{100 * one.moment:.0f}" for one in killed)
    places = ", ".join(f"{where} {count}" for where, count in Counter(one.resumed for one in killed).items())
    repeated = [one.repeated for one in killed]
    mean = f"{100 * sum(repeated) / len(repeated):.1f}%, {100 * max(repeated):.1f}%" if repeated else "-"
    took = f"{sum(one.time for one in killed) / len(killed):.2f}" if killed else "-"
    equal = "yes" if not any(one.problems for one in killed) else "no"
    return f"| {chain} | {len(killed)} | {moments} | {places} | {mean} | {took} | {equal} |"


if __name__ == "__main__":
    main()
