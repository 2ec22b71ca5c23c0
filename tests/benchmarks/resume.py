"""Kill a run with SIGKILL in the middle of its sweep, start it again, and compare the checkpoint's bytes.

    python tests/benchmarks/resume.py RECIPE.yaml --model PATH [--block 12] [--threads N]

Runs the recipe twice without a stop and once killed when block --block is finished and started again. Prints one JSON
line: the sha256 over all shards of each run, how many blocks the restarted run took over, and whether all are equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--model", required=True)
    parser.add_argument("--block", type=int, default=12, help="kill when this many blocks are written")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        digests = {}
        for name in ("first", "second"):
            start(arguments, Path(temporary) / name).wait()
            digests[name] = digest(Path(temporary) / name)
        out = Path(temporary) / "killed"
        taken_over = kill(start(arguments, out), out, arguments.block)
        start(arguments, out).wait()
        digests["killed"] = digest(out)
    print(json.dumps({**digests, "blocks_taken_over": taken_over, "equal": len(set(digests.values())) == 1}))
    sys.exit(len(set(digests.values())) != 1)


def start(arguments: argparse.Namespace, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "compress", "run", arguments.recipe, "--model", arguments.model, "--out", str(out)]
    threads = {"OMP_NUM_THREADS": str(arguments.threads)}
    return subprocess.Popen(command, env=os.environ | threads, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill(process: subprocess.Popen[bytes], out: Path, blocks: int) -> int:
    """SIGKILL as soon as `blocks` shards are complete; how many there are then."""
    while (found := len(written(out))) < blocks:
        if process.poll() is not None:
            sys.exit("the run ended before it could be killed; choose an earlier --block")
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return found


def written(out: Path) -> list[Path]:
    return sorted(out.glob("model-*.safetensors"))


def digest(out: Path) -> str:
    """sha256 over the names and bytes of all shards."""
    found = hashlib.sha256()
    for path in written(out):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
