"""The processes of a launcher: how they divide work, exchange values, and learn that one of them has failed.

Values are combined in the order of ranks, so that the same number of processes gives the same bits. Exchanges go over
the CPU (gloo) on any device, those of numbers and short texts over the store of the launcher. Before each exchange the
processes meet in that store: a process may compute for hours meanwhile, but one that ended or lost its connection is
noticed within a minute.
"""

from __future__ import annotations

import atexit
import copy
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.nn import functional

from compress.errors import CompressError, ProcessError, Terminated

T = TypeVar("T")
S = TypeVar("S")

BEAT_SECONDS = 3.0  # between two signs of life
SILENT_SECONDS = 30.0  # without a sign of life, after which a process has ended
LEAVE_SECONDS = 10.0  # in which the others read the last values of the store
PAUSE_SECONDS = 0.01  # the longest pause between two looks whether the others have arrived
SMALL = 1 << 12  # characters of a value that goes over the store
BROADCAST = "-"  # in the store, of a value that does not
SENT_NUMBERS = 1 << 20  # numbers of a tensor that go to its owner at a time, so that it holds few of the others' parts
EXCHANGED_BYTES = 1 << 24  # of the values that processes exchange at a time
LATE = 0.05  # of the time of waiting, by which a process may notice too late that the others have arrived
AGAIN = "run the same command again to resume, with any number of processes"


@dataclass(frozen=True)
class Processes:
    """This process among those of the launcher; alone without a launcher.

    Attributes:
        rank: the number of this process.
        size: the number of processes.
        link: the connection to the others; None for one process.
        owners: the ranks that get sums, maxima and collected tensors (`to`); None: all.
    """

    rank: int = 0
    size: int = 1
    link: ProcessLink | None = field(default=None, compare=False, repr=False)
    owners: frozenset[int] | None = None

    @classmethod
    def launched(cls, cpu: bool) -> Processes:
        """Return the processes that `accelerate launch` or torchrun started.

        Args:
            cpu: computed on the CPU.
        """
        state = PartialState(cpu=cpu)
        return _launched(state.process_index, state.num_processes) if state.num_processes > 1 else ALONE

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def share(self, items: Sequence[T], offset: int = 0) -> list[T]:
        """Return the items of this process; every item belongs to one process.

        Args:
            offset: the number of the first item.
        """
        return list(items[(self.rank - offset) % self.size :: self.size])

    def to(self, owners: Iterable[int]) -> Processes:
        """Return the same processes, of which only `owners` get sums, maxima and collected tensors.

        The others send their parts and get their own part back, so that no process holds statistics of layers that it
        does not solve. The bits in the owners are those that all processes would get.
        """
        ranks = frozenset(owners)
        return replace(self, owners=None if len(ranks) == self.size else ranks)

    @property
    def owns(self) -> bool:
        """Whether this process gets sums, maxima and collected tensors."""
        return self.owners is None or self.rank in self.owners

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of ranks, in every process, whoever the owners are."""
        return [value] if self.link is None else self.link.gather(value)

    def collect(self, tensor: Tensor | None) -> list[Tensor]:
        """Return the tensors of all processes that have one, in the order of ranks; only the own one without `owns`."""
        own = [] if tensor is None else [tensor]
        if self.link is None:
            return own
        if self.owners is None:
            return [part for part in self.gather(tensor) if part is not None]
        headers = self.gather(None if tensor is None else _header(tensor))
        collected = own
        for owner in sorted(self.owners):
            if owner == self.rank:
                collected = [
                    tensor if source == self.rank and tensor is not None else self._received(header, source)
                    for source, header in enumerate(headers)
                    if header is not None
                ]
            elif tensor is not None:
                self.link.send(tensor.detach().cpu().contiguous(), owner)
        return collected

    def _received(self, header: tuple[Any, ...], source: int) -> Tensor:
        """Receive the tensor of a process, on a device of the same type."""
        assert self.link is not None
        device, dtype, *shape = header
        return self.link.receive(torch.empty(shape, dtype=getattr(torch, dtype)), source).to(device)

    def exchange(self, values: dict[int, T], sizes: Sequence[int]) -> Iterator[dict[int, T]]:
        """Yield the values of items by number to every process, a few items at a time.

        Args:
            values: those of this process; each item belongs to one process. They are removed when they are sent.
            sizes: bytes of the values of all items, by which few are sent at a time.
        """
        for numbers in _portions(sizes):
            parts = self.gather({number: values.pop(number) for number in numbers if number in values})
            yield {number: value for part in parts for number, value in part.items()}

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.link is not None:
            self.link.meet()

    @contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """Run the context in rank 0 before it runs in the other processes."""
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor of one shape over all processes, added in the order of ranks; see `to`."""
        return self.sums([tensor])[0]

    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`sum` of each tensor; the processes meet once."""
        self.wait()
        return [self._folded(tensor, torch.add) for tensor in tensors]

    def maximum(self, tensor: Tensor) -> Tensor:
        """Return the element-wise maximum of a tensor of one shape over all processes."""
        self.wait()
        return self._folded(tensor, torch.maximum)

    def totals(self, *values: float) -> tuple[float, ...]:
        """Return the sums of numbers over all processes."""
        return tuple(sum(parts) for parts in zip(*self.gather(values), strict=True))

    def spread(self, items: Sequence[S], compute: Callable[[S], T], costs: Sequence[float] | None = None) -> list[T]:
        """compute(item) of every item, each in one process; every process gets all values, in the order of items.

        Args:
            costs: of the items, by which they are divided.
        """
        if self.size == 1:
            return [compute(item) for item in items]
        owners = divided([1.0] * len(items) if costs is None else costs, self.size)
        mine = {i: compute(item) for i, item in enumerate(items) if owners[i] == self.rank}
        results = self.gather(mine)
        return [results[owner][i] for i, owner in enumerate(owners)]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Tell the other processes of an error in the context, so that all of them end; the first one tells the user.

        Raises:
            ProcessError: in the others.
        """
        if self.link is None:
            yield
            return
        try:
            yield
        except (Exception, Terminated) as error:
            cause = _lost(error) if isinstance(error, RuntimeError) and "gloo" in str(error) else error
            code = cause.exit_code if isinstance(cause, CompressError | Terminated) else 1
            was_reported = cause.told if isinstance(cause, ProcessError) else False
            if was_reported or not self.link.fail(code, str(cause)):
                raise ProcessError(str(cause), told=True, exit_code=code) from error
            raise cause from (None if cause is error else error)

    def _folded(self, tensor: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Combine tensors of all processes, which have met.

        Each process combines one part, so it sends two tensors at most, however many processes there are.
        """
        if self.link is None or not tensor.numel():
            return tensor
        flat = tensor.detach().cpu().reshape(-1)
        if self.owners is not None:
            return self._reduced(flat, combine).view(tensor.shape).to(tensor.device)
        length = -(-len(flat) // self.size)
        parts = functional.pad(flat, (0, length * self.size - len(flat))).view(self.size, length)
        folded = self.link.collect(reduce(combine, self.link.exchange(parts).unbind()))
        return folded.view(-1)[: len(flat)].view(tensor.shape).to(tensor.device)

    def _reduced(self, flat: Shaped[Tensor, " length"], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Combine flat tensors of all processes in the owners; the others get their own back.

        An owner receives a part of one process at a time.
        """
        assert self.link is not None and self.owners is not None
        combined = torch.empty_like(flat) if self.owns else flat
        for start in range(0, len(flat), SENT_NUMBERS):
            part = flat[start : start + SENT_NUMBERS]
            for owner in sorted(self.owners):
                if owner == self.rank:
                    parts = (
                        part if source == self.rank else self.link.receive(torch.empty_like(part), source)
                        for source in range(self.size)
                    )
                    combined[start : start + SENT_NUMBERS] = reduce(combine, parts)
                else:
                    self.link.send(part, owner)
        return combined


ALONE = Processes()
"""One process without a launcher."""


class ProcessLink:
    """The connection of a process to the others: a group of gloo, and the store of the launcher for signs of life."""

    def __init__(self, rank: int, size: int) -> None:
        self._others = [process for process in range(size) if process != rank]
        self._rank, self._met, self._beats = rank, 0, 0
        self._group: Any = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        self._store = PrefixStore("compress", _get_default_store())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="compress-processes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave the group. Rank 0, which may hold the store, waits a little until the others have read it."""
        self._ended.set()
        self._thread.join()
        with suppress(RuntimeError):  # the process of the store has ended
            self._store.set(f"left {self._rank}", "1")
            for _ in range(int(LEAVE_SECONDS / PAUSE_SECONDS) if self._rank == 0 else 0):
                if all(self._read(f"left {process}") for process in self._others):
                    break
                time.sleep(PAUSE_SECONDS)
        dist.destroy_process_group()

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of ranks.

        Numbers and texts go over the store, in which the processes meet anyway: gloo wakes up several times for each.
        """
        message, turn = json.dumps(value) if _plain(value) else BROADCAST, self._met % 2
        message = message if len(message) <= SMALL else BROADCAST
        with _connected():  # overwritten two meetings later, when all have read it
            self._store.set(f"told {self._rank} {turn}", message)
        self.meet()
        return [
            value if source == self._rank and message != BROADCAST else self._heard(source, turn, value)
            for source in range(len(self._others) + 1)
        ]

    def _heard(self, source: int, turn: int, value: Any) -> Any:
        """Return the value of a process that has sent it, or broadcasts it.

        Args:
            value: of this process.
        """
        with _connected():
            message = self._store.get(f"told {source} {turn}").decode()
        if message == BROADCAST:
            return self.broadcast(value, source)
        decoded = json.loads(message)
        return tuple(decoded) if isinstance(decoded, list) else decoded

    def broadcast(self, value: Any, source: int) -> Any:
        """Return the value of the process `source`, with its tensors on this process's device; after `meet`."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        is_source = source == self._rank
        values = [value if device is None or not is_source else moved(value, torch.device("cpu"))]
        with _connected():
            dist.broadcast_object_list(values, source, self._group, torch.device("cpu"))
        return value if is_source else values[0] if device is None else moved(values[0], device)

    def exchange(self, parts: Shaped[Tensor, "processes length"]) -> Shaped[Tensor, "processes length"]:
        """Send part i to process i, and return the parts for this process in the order of ranks.

        On the CPU, after `meet`.
        """
        parts_received = torch.empty_like(parts)
        with _connected():
            dist.all_to_all_single(parts_received, parts, group=self._group)
        return parts_received

    def collect(self, part: Shaped[Tensor, " length"]) -> Shaped[Tensor, "processes length"]:
        """Return the parts of all processes, of one length, in the order of ranks.

        On the CPU, after `meet`.
        """
        received = part.new_empty(len(self._others) + 1, len(part))
        received[self._rank] = part
        with _connected():
            for source, row in enumerate(received):  # all_gather: torch 2.6 sometimes hangs when it ends soon after one
                dist.broadcast(row, source, self._group)
        return received

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a contiguous tensor on the CPU to a process that receives it; after `meet`."""
        with _connected():
            dist.send(tensor, to, self._group)

    def receive(self, into: Tensor, source: int) -> Tensor:
        """Receive a tensor that a process sends, into one of its shape and dtype; after `meet`."""
        with _connected():
            dist.recv(into, source, self._group)
        return into

    def meet(self) -> None:
        """Wait until all processes are here.

        Raises:
            ProcessError: when one of them has failed, or has given no sign of life for half a minute.
        """
        self._met += 1
        with _connected():
            self._store.set(f"met {self._rank}", str(self._met))
            for process in self._others:
                self._await(process)

    def fail(self, code: int, message: str) -> bool:
        """Tell the others that this process fails; False if another one did so before."""
        mine = f"{code} {self._rank} {message}"
        try:
            return self._store.compare_set("failed", "", mine).decode() == mine
        except RuntimeError:  # the process of the store has ended
            return True

    def _await(self, process: int) -> None:
        beat, waited = "", 0.0
        while int(self._read(f"met {process}") or 0) < self._met:
            failed = self._read("failed")
            if failed:
                code, rank, message = failed.split(" ", 2)
                raise ProcessError(f"process {rank} failed: {message}", told=True, exit_code=int(code))
            alive = self._read(f"alive {process}")
            beat, waited = (beat, waited) if alive == beat else (alive, 0.0)
            if waited > SILENT_SECONDS:
                raise ProcessError(f"process {process} has ended or does not answer; {AGAIN}")
            pause = min(max(LATE * waited, PAUSE_SECONDS / 20), PAUSE_SECONDS)
            time.sleep(pause)
            waited += pause  # not the clock: this process may have been suspended, too

    def _read(self, key: str) -> str:
        """Return a value in the store; '' if there is none."""
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _beat(self) -> None:
        """Give signs of life until the link is closed or the store is gone."""
        while True:
            self._beats += 1
            try:
                self._store.set(f"alive {self._rank}", str(self._beats))
            except RuntimeError:  # the main thread notices, too
                return
            if self._ended.wait(BEAT_SECONDS):
                return


@cache
def _launched(rank: int, size: int) -> Processes:
    link = ProcessLink(rank, size)
    atexit.register(link.close)
    return Processes(rank, size, link)


@contextmanager
def _connected() -> Iterator[None]:
    """Raise ProcessError for errors of connections inside the context."""
    try:
        yield
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: RuntimeError) -> ProcessError:
    return ProcessError(f"another process has ended ({' '.join(str(error).split())[:100]}); {AGAIN}")


def _plain(value: Any) -> bool:
    """Return whether a value is a number, a text or nothing, or a tuple of those, of no other type."""
    values = value if type(value) is tuple else (value,)
    return all(type(item) in (bool, int, float, str, type(None)) for item in values)


def divided(costs: Sequence[float], size: int) -> list[int]:
    """Return the process of each item: the most expensive item first, each to the process with the least work."""
    work, owners = [0.0] * size, [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        owners[item] = work.index(min(work))
        work[owners[item]] += costs[item]
    return owners


def _header(tensor: Tensor) -> tuple[Any, ...]:
    """Return the type of device, the name of the dtype, and the shape of a tensor, as plain values."""
    return tensor.device.type, str(tensor.dtype).removeprefix("torch."), *tensor.shape


def _portions(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the numbers of consecutive items of at most `EXCHANGED_BYTES` together, or of one item."""
    portion: list[int] = []
    total = 0
    for number, size in enumerate(sizes):
        if portion and total + size > EXCHANGED_BYTES:
            yield portion
            portion, total = [], 0
        portion.append(number)
        total += size
    if portion:
        yield portion


def moved(value: Any, device: torch.device) -> Any:
    """Return a copy of nested values with all tensors on a device; modules are copied too."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(moved(item, device) for item in value)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved(getattr(value, f.name), device) for f in fields(value) if f.init})
    return value
