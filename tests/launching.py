"""Start several processes as a launcher does, for tests."""

import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from forks import ENVIRONMENT as READ_WHILE_IMPORTED
from forks import Forked

import compress
from compress.layers.linear import CompressedLinear, linears
from compress.passes.contract.processes import Processes

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), **READ_WHILE_IMPORTED}


def free_port() -> int:
    """A port that no process listens on."""
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def ranks(processes: int) -> list[dict[str, str]]:
    """The variables of torchrun for each process, by which they find each other; none for one process."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
    found = [{**where, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return found if processes > 1 else [{}]


def start(command: Sequence[str], processes: int) -> list[subprocess.Popen]:
    """Processes of `python command` as torchrun starts them; nobody watches over them."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen([sys.executable, *command], env={**ENVIRONMENT, **at}, **pipes) for at in ranks(processes)]


def fork(command: Sequence[str], processes: int, **variables: str) -> list[Forked]:
    """The same without the time that they need to import. variables: of the environment."""
    return [Forked(command, {**variables, **at}) for at in ranks(processes)]


def finish(started: Sequence[subprocess.Popen | Forked], seconds: float = 300) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each process."""
    try:
        ended = [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(started, ended, strict=True)]


def agreement(one: Path, two: Path) -> float:
    """The share of weights that two checkpoints agree on."""
    same = total = 0
    others = linears(compress.load(two)[0])
    for name, module in linears(compress.load(one)[0]).items():
        pair = [CompressedLinear.of(layer).weight.float() for layer in (module, others[name])]
        same += int(torch.isclose(*pair, rtol=1e-2, atol=1e-5).sum())
        total += pair[0].numel()
    return same / total


class ThreadLink:
    """The link between threads of a test that stand for processes; values are pickled on their way."""

    def __init__(self, rank: int, barrier: threading.Barrier, slot: list, sent: dict):
        self.rank, self.barrier, self.slot, self.sent = rank, barrier, slot, sent

    def meet(self) -> None:
        self.barrier.wait(600)

    def broadcast(self, value, source: int):
        if self.rank == source:
            self.slot[0] = pickle.dumps(value)
        self.meet()
        found = value if self.rank == source else pickle.loads(self.slot[0])
        self.meet()
        return found

    def gather(self, value):
        return [self.broadcast(value, source) for source in range(self.barrier.parties)]

    def exchange(self, parts):
        return torch.stack([self.broadcast(parts, source)[self.rank] for source in range(self.barrier.parties)])

    def collect(self, part):
        return torch.stack([self.broadcast(part, source) for source in range(self.barrier.parties)])

    def send(self, tensor, to: int) -> None:
        self.sent[self.rank, to].put(pickle.dumps(tensor.clone()))

    def receive(self, into, source: int):
        while self.sent[source, self.rank].empty():
            if self.barrier.broken:  # another thread has failed
                raise threading.BrokenBarrierError
            time.sleep(0.001)
        into.copy_(pickle.loads(self.sent[source, self.rank].get()))
        return into

    def fail(self, code: int, message: str) -> bool:
        self.barrier.abort()
        return True


def in_threads(size: int, work: Callable[[Processes], Any]) -> list[Any]:
    """work(processes) in each of some threads that stand for processes; an error in one of them is raised here."""
    barrier, slot, sent = threading.Barrier(size), [None], defaultdict(queue.Queue)

    def run(rank: int) -> Any:
        try:
            return work(Processes(rank, size, ThreadLink(rank, barrier, slot, sent)))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        started = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in started if (error := future.exception()) is not None]
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return [future.result() for future in started]
