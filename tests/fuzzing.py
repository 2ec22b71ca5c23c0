"""Damage checkpoints at random, and see what the readers make of them.

Every input is drawn from its seed alone: a checkpoint of some format, and one to three changes of its files. A failure
is anything but a model that its digests accept or reject, or one of our errors that names a file: another exception, a
hang, memory of more than twice the files, a file outside of the folder, pickle. Format `native` is also read by
transformers alone, whose own errors, memory and files are not judged: there a failure is another exception of our code.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import quantized_sources
import torch
import transformers
from fuzz_changes import CHANGES, Draw, indexes, layer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import compress
from compress.checkpoint.checkpoint import STATED
from compress.checkpoint.containers.digests import read_digests, verify_digests
from compress.checkpoint.formats import FORMATS
from compress.checkpoint.inspection import inspect
from compress.checkpoint.opening import open_model
from compress.errors import CompressError
from compress.kernels.dispatch import plain_torch

PICO = Path(__file__).parent / "pico" / "model"
CPU_SECONDS = 60.0
WALL_SECONDS = 900.0
"""Limits of an input. Other processes delay it, so the limit of wall time is only for one that waits forever."""
CONSTANT = 96 << 20
"""Bytes of memory for any input beyond twice its files."""


# Checkpoints of every format


def steps() -> dict[str, list[Any]]:
    """Lists of passes by name. A format is tried with each, and takes part with those that it can store."""
    int4 = compress.RTN(weights="int4", group_size=16)
    int4_inputs: dict[str, Any] = {"weights": "int4", "group_size": 16, "activations": "int4"}
    return {
        "plain": [],
        "int4": [int4],
        "q4_0": [compress.RTN(weights="int4_signed", group_size=32)],
        "int4-asymmetric": [compress.RTN(weights="int4", group_size=16, symmetric=False)],
        "nf4": [compress.RTN(weights="nf4", group_size=32)],
        "nf4-double": [compress.RTN(weights="nf4_bnb_dq", group_size=32)],
        "ends": [compress.RTN(weights="int8", group_size="channel", targets=["*", "lm_head", "embed_tokens"])],
        "w8a8": [compress.RTN(weights="int8", group_size="channel", activations="int8")],
        "fp8": [compress.RTN(weights="fp8_e4m3", group_size="channel")],
        "mxfp4": [compress.RTN(weights="mxfp4", group_size=32)],
        "nvfp4": [compress.RTN(weights="nvfp4", group_size=16)],
        "mxfp4-inputs": [compress.RTN(weights="mxfp4", activations="mxfp4")],
        "mxfp8-inputs": [compress.RTN(weights="mxfp8", activations="mxfp8")],
        "nvfp4-inputs": [compress.RTN(weights="nvfp4", activations="nvfp4", activation_scale="static")],
        "w4afp8": [compress.RTN(weights="int4", group_size=32, activations="fp8_e4m3")],
        "sparse": [compress.Magnitude(pattern="2:4"), int4],
        "dictionaries": [compress.SqueezeLLM(bits=2, sensitivity="none", outliers=0.01)],
        "outliers": [compress.OWQ(weights="int4", group_size=16, budget=0.5)],
        "llm-int8": [compress.LLMInt8()],
        "single-outliers": [compress.SqueezeLLM(bits=3, sensitivity="none", outliers=0.05)],
        "groups": [compress.GPTQ(weights="int4", group_size=16, act_order="group")],
        "permuted": [compress.ChannelPermutation(pattern="2:4", score="magnitude"), compress.Magnitude(pattern="2:4")],
        "reassembled": [compress.QLLM(**int4_inputs), compress.RTN(**int4_inputs)],
        "input-groups": [compress.RPTQ(activations="int8", clusters=4), int4],
        "lattice": [compress.QuipSharp(bits=2)],
        "trellis": [compress.QTIP(bits=2)],
        "books": [compress.AQLM(bits=4, length=4)],
        "pairs": [compress.Olive(compensate=False)],
        "low-rank": [int4, compress.LoRC(rank=2)],
        "cache": [compress.KVCache()],
    }


SOURCES: dict[str, Callable[[Path], object]] = {
    "fp8": lambda folder: quantized_sources.fp8(quantized_sources.qwen3(), folder),
    "fp8-static": lambda folder: quantized_sources.fp8(quantized_sources.llama(), folder, None),
    "mxfp4": lambda folder: quantized_sources.mxfp4(quantized_sources.gpt_oss(), folder),
    "modelopt-fp8-of-others": lambda folder: quantized_sources.modelopt_fp8(quantized_sources.llama(), folder),
    "modelopt-nvfp4-of-others": lambda folder: quantized_sources.modelopt_nvfp4(quantized_sources.llama(), folder),
}
"""Writers of sources that other programs have quantized, by name; they have no digests."""


def make(folder: Path) -> dict[str, Path]:
    """Write a checkpoint of a tiny model in every format and every form that the format takes; by name."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=1,
    )
    tokenizer, made = AutoTokenizer.from_pretrained(PICO), {}
    for label, passes in steps().items():
        torch.manual_seed(0)
        model, ids = LlamaForCausalLM(config).eval(), torch.randint(1024, (4, 16))
        with contextlib.suppress(CompressError):
            compress.apply(model, passes, ids) if passes else None
        for name in FORMATS:
            target = folder / f"{name}-{label}"
            try:
                compress.save(model, target, format=name, tokenizer=tokenizer)
            except CompressError:
                continue
            stated = json.loads((target / "config.json").read_text()).keys() & set(STATED)
            if stated or (name, label) == ("dense", "plain"):
                made[target.name] = target
    for name, write in SOURCES.items():
        write(folder / name)
        made[name] = folder / name
    missing = [name for name in FORMATS if not any(path.startswith(name) for path in made)]
    assert not missing, f"no passes of `steps` suit the formats {missing}; add some"
    return made


# What the readers make of changed checkpoints


@dataclass
class Outcome:
    """How an input ended. text: the message. failure: None for a good end. changes: the names of its changes."""

    end: str
    text: str
    failure: str | None
    changes: tuple[str, ...] = ()
    checkpoint: str = ""


class TooLong(BaseException):
    """An input took more time than it has."""


@dataclass
class Watch:
    """What happens while readers run: files that are opened in a folder, and classes that pickle asks for."""

    outside: Path
    on: bool = False
    seen: list[str] = field(default_factory=list)
    earlier: frozenset[str] = frozenset()

    def hear(self, event: str, args: Any) -> None:
        """An audit hook."""
        if self.on and event == "open" and isinstance(args[0], (str, bytes)):
            path = os.path.abspath(os.fsdecode(args[0]))
            if path.startswith((f"{self.outside}/", "/dev/zero")) or os.path.realpath(path).startswith(
                (f"{self.outside}/", "/dev/zero")
            ):
                self.seen.append(f"opened {path}")
        elif self.on and event == "pickle.find_class":
            self.seen.append(f"pickle asked for {args}")

    def begin(self) -> None:
        """Forget what an earlier input did. The garbage of its model, which transformers may have read, holds files."""
        self.seen.clear()
        if self._mappings():
            gc.collect()
        self.earlier = self._mappings()

    def mapped(self) -> None:
        """Note files of the folder that are memory-mapped; safetensors opens files without an audit event."""
        if self._mappings() - self.earlier:
            self.seen.append(f"mapped a file of {self.outside}")

    def _mappings(self) -> frozenset[str]:
        maps = Path("/proc/self/maps")
        lines = maps.read_text().splitlines() if maps.exists() else []
        return frozenset(line for line in lines if f"{self.outside}/" in line)


class Fuzzer:
    """Inputs by seed, in a folder for this work alone."""

    def __init__(self, work: Path) -> None:
        self.made = make(work / "made")
        self.outside, self.folder = work / "outside", work / "input"
        shutil.copytree(self.made["dense-plain"], self.outside)
        held = load_file(sorted(self.outside.glob("*.safetensors"))[0])
        save_file(held, self.outside / "model.safetensors", metadata={"format": "pt"})
        self.watch = Watch(self.outside)
        sys.addaudithook(self.watch.hear)
        for path in self.made.values():
            for reader in READERS:
                reader(path)  # imports and caches, and all readers read what is not damaged
            if path.name.startswith("native-"):
                read_by_transformers(path)

    def outcome(self, seed: int) -> Outcome:
        """Make the input of a seed, and read it."""
        chance = random.Random(seed)
        name = chance.choice(sorted(self.made))
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.made[name], self.folder)
        changes = chance.choices(CHANGES, k=chance.choice([1, 1, 1, 2, 3]))
        for change in changes:
            change(Draw(self.folder, self.outside, chance))
        self.watch.begin()
        before, reader = reset_peak(), reader_of(seed, name)
        with quiet():
            found = self._read(reader, name, runs=set(changes) <= {indexes, layer})
        found.changes, found.checkpoint = tuple(change.__name__ for change in changes), name
        if reader is read_by_transformers:
            return found
        grown, size = peak() - before, sum(p.stat().st_size for p in self.folder.rglob("*") if p.is_file())
        if grown > 2 * size + CONSTANT:
            found.failure = f"{grown >> 20} MiB of memory for files of {size >> 10} KiB"
        if self.watch.seen:
            found.failure = "; ".join(self.watch.seen)
        return found

    def _read(self, reader: Callable[[Path], Any], name: str, runs: bool) -> Outcome:
        """Read an input, and, if it `runs` and can, compute with it: indexes that are not checked end the process."""
        try:
            self.watch.on = True
            with nullcontext() if reader is read_by_transformers else within(CPU_SECONDS):
                found = reader(self.folder)
                self.watch.mapped()
                if runs and reader is compress.load:
                    with torch.no_grad():
                        computed = found[0](input_ids=torch.arange(3)[None]).logits
                        with plain_torch():
                            expected = found[0](input_ids=torch.arange(3)[None]).logits
                    differs = (computed - expected).norm() > 0.1 * expected.norm() + 1e-3
                    assert not expected.isfinite().all() or not differs, "kernels compute another output than torch"
        except CompressError as error:
            named = names_a_file(str(error), self.folder)
            return Outcome("error", str(error), None if named else "the message names no file")
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            if reader is read_by_transformers and not of_compress(error):
                return Outcome("error of transformers", str(error), None)
            if not isinstance(error, TooLong):
                return Outcome("exception", traceback.format_exc(), f"{type(error).__name__}: {error}"[:300])
            return Outcome("hang", traceback.format_exc(), str(error))
        finally:
            self.watch.on = False
        del found
        return self._check(name)

    def _check(self, name: str) -> Outcome:
        """The outcome of an input that became a model: its digests must reject it, unless it is as it was written."""
        if name in SOURCES:
            return Outcome("model without digests", "", None)
        try:
            with within(CPU_SECONDS):
                verify_digests(self.folder)
        except CompressError as error:
            return Outcome("model that its digests reject", str(error), None)
        files = read_digests(self.made[name])
        changed = [f for f in files if (self.folder / f).read_bytes() != (self.made[name] / f).read_bytes()]
        return Outcome(
            "model as it was written", "", f"digests accept {changed[0]}, which changed" if changed else None
        )


def read_input(folder: Path) -> Any:
    """Open a checkpoint as the model of a recipe, and load its blocks; those of other programs are dequantized."""
    opened = open_model(str(folder), codes=lambda opened: opened.linear_names())
    for block in opened.blocks:
        opened.weights.bring(block)
    return opened


def read_by_transformers(folder: Path) -> Any:
    """Load a checkpoint of format `native` as transformers does after `import compress`.

    transformers builds models of any size, so its time and memory are limited. Without a compressed layer, no code of
    compress runs before it opens the files, and it waits for a pipe without end.
    """
    config = folder / "config.json"
    ours = config.is_file() and b'"quant_method": "compress"' in config.read_bytes()
    if not ours and any(path.is_fifo() for path in folder.iterdir()):
        raise OSError("transformers waits for a pipe")
    with at_most(2 << 30), within(10.0):
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


READERS: tuple[Callable[[Path], Any], ...] = (compress.load, read_input, compress.load, inspect)


def reader_of(seed: int, name: str) -> Callable[[Path], Any]:
    """The reader of an input."""
    turn = seed % len(READERS)
    return read_by_transformers if turn == 2 and name.startswith("native-") else READERS[turn]


def of_compress(error: BaseException) -> bool:
    """Whether code of compress ran when an exception was raised."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(str(frame.f_globals.get("__name__")).startswith("compress.") for frame, _ in frames)


def names_a_file(text: str, folder: Path) -> bool:
    """Whether a message names a file of the folder, or the folder that lacks one."""
    return str(folder) in text or "config.json" in text


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings, and no logging of transformers."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)


@contextmanager
def within(cpu_seconds: float, wall_seconds: float = WALL_SECONDS) -> Iterator[None]:
    """Raise TooLong after some seconds of processor time of this process, or after some seconds of wall time."""

    def late(signum: int, _: object) -> None:
        kind = "processor" if signum == signal.SIGPROF else "wall"
        raise TooLong(f"more than {seconds_by_signal[signum]:g} seconds of {kind} time")

    timers = {signal.SIGPROF: signal.ITIMER_PROF, signal.SIGALRM: signal.ITIMER_REAL}
    seconds_by_signal: dict[int, float] = {signal.SIGPROF: cpu_seconds, signal.SIGALRM: wall_seconds}
    handlers = {signum: signal.signal(signum, late) for signum in timers}
    try:
        for signum, timer in timers.items():
            signal.setitimer(timer, seconds_by_signal[signum])
        yield
    finally:
        for timer in timers.values():
            signal.setitimer(timer, 0)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


@contextmanager
def at_most(more_bytes: int) -> Iterator[None]:
    """Limit the virtual memory to so many bytes more than now, where the system tells how many these are."""
    status = Path("/proc/self/status")
    found = re.search(r"VmSize:\s+(\d+) kB", status.read_text()) if status.exists() else None
    before = resource.getrlimit(resource.RLIMIT_AS)
    if found is not None:
        resource.setrlimit(resource.RLIMIT_AS, ((int(found[1]) << 10) + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def peak() -> int:
    """The peak of the resident memory in bytes since `reset_peak`; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return 0 if found is None else int(found[1]) << 10


def reset_peak() -> int:
    """Forget the peak of the resident memory so far; returns the resident memory."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak()
