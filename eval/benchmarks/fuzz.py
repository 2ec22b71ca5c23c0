"""Read many damaged checkpoints, and print how they ended: `python eval/benchmarks/fuzz.py --inputs 100000`.

The inputs run in a child process, which is started again after every `CHUNK` inputs and after a crash. A child that
cannot be interrupted ends after `HANG_SECONDS` with the frames of its threads. Exit code 1 if any input failed; its
seed makes it again: `--first SEED --inputs 1 --show`.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

CHUNK = 10_000
HANG_SECONDS = 3_600.0
"""More than the wall time that an input has, and than the checkpoints take on a loaded machine."""
MARK = "input: "
"""The beginning of a line of the child."""


def work(first: int, count: int, show: bool) -> None:
    """The child: a JSON line before and after each input."""
    from fuzzing import Fuzzer

    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder))
        for seed in range(first, first + count):
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            print(MARK + json.dumps({"begin": seed, "cpu_seconds": time.process_time()}), flush=True)
            found = fuzzer.outcome(seed)
            line = {"seed": seed, "cpu_seconds": time.process_time(), **vars(found)}
            print(MARK + json.dumps(line if show or found.failure else {**line, "text": ""}), flush=True)


def main() -> int:
    """Run chunks of inputs until all are done or the time is over."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--inputs", type=int, default=100_000)
    options.add_argument("--minutes", type=float, default=None, help="Stop after this time.")
    options.add_argument("--show", action="store_true", help="Print every message.")
    options.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.child:
        work(asked.first, asked.inputs, asked.show)
        return 0
    ends: Counter[str] = Counter()
    failures, seed, last, begun = [], asked.first, asked.first + asked.inputs, time.monotonic()
    reading_seconds = 0.0
    late = lambda: asked.minutes is not None and time.monotonic() - begun > 60 * asked.minutes  # noqa: E731
    while seed < last and not late():
        count = min(CHUNK, last - seed)
        command = [sys.executable, __file__, "--child", "--first", str(seed), "--inputs", str(count)]
        child = subprocess.Popen([*command, *(["--show"] if asked.show else [])], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        current, begin_seconds = None, 0.0
        for text in child.stdout:
            if not text.startswith(MARK):
                continue  # printed by a library
            line = json.loads(text.removeprefix(MARK))
            if "begin" in line:
                current, begin_seconds = line["begin"], line["cpu_seconds"]
            if "end" not in line:
                continue
            seed = line["seed"] + 1
            ends[line["end"]] += 1
            reading_seconds += line["cpu_seconds"] - begin_seconds
            if line["failure"] or asked.show:
                print(json.dumps(line), flush=True)
            if line["failure"]:
                failures.append(line["seed"])
            if late():
                child.terminate()
                break
        child.stdout.close()
        if child.wait() != 0 and not late():
            print(f"input {current} ended the process with {child.returncode}", flush=True)
            failures.append(current)
            ends["crash"] += 1
            if current is None:
                break
            seed = current + 1
        inputs = sum(ends.values())
        print(
            f"{inputs} inputs in {time.monotonic() - begun:.0f} s, {reading_seconds / max(inputs, 1):.3f} s of the "
            f"processor for each: {dict(ends)}; failures: {failures or 'none'}",
            flush=True,
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
