"""Plan a run on other hardware, or on this machine: bytes, memory, disk, time, and the cheapest setting that fits."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from compress.errors import RecipeError, ShortageError, did_you_mean
from compress.models.computation import device_of
from compress.passes.contract.limits import size_of
from compress.passes.contract.memory import available_bytes
from compress.pipeline.counted import Counted, counted
from compress.pipeline.fitting import LIBRARIES_BYTES, Fit, fitted, verification_notes, with_calibration
from compress.pipeline.rate_trials import known_rates, measured_rates
from compress.pipeline.workload import Division, Workload, evaluation_work, workload
from compress.recipe.schema import Recipe
from compress.recipe.tables import megabytes
from compress.roofline.devices import Device, devices, named_device
from compress.roofline.rates import Rates, reference_rates

THIS = "this"
"""This machine, as hardware."""
EXAMPLES = "8xH100, 1x4090,64GB or 2xEPYC-9654,768GB"
COUNTED = re.compile(r"(?P<count>\d+)\s*[xX*]\s*(?P<name>\S.*)")
MOST = 4096
"""The most devices of a hardware; every setting of one is planned."""


@dataclass(frozen=True)
class PlannedHardware:
    """Equal devices, each with one process. device: None for this machine. ram_bytes: of the machine, if stated."""

    count: int
    device: Device | None
    ram_bytes: int | None = None

    @property
    def text(self) -> str:
        """The hardware in words."""
        if self.device is None:
            return "this machine"
        memory = "" if self.device.kind != "gpu" else f" ({self.device.memory / 1e9:g} GB each)"
        ram = "" if self.ram_bytes is None else f", {self.ram_bytes / 1e9:g} GB of RAM"
        return f"{self.count} x {self.device.name}{memory}{ram}"

    @property
    def has_own_memory(self) -> bool:
        """Whether the devices have memory apart from the RAM of the machine."""
        return self.device is not None and self.device.kind == "gpu"

    @property
    def computes_on(self) -> torch.device:
        """The device of computation, which need not be on this machine."""
        if self.device is None:
            return device_of("auto")
        return torch.device("cuda" if self.device.kind == "gpu" else "cpu")


def read_hardware(text: str) -> PlannedHardware:
    """Read '8xH100', '1x4090,64GB' or 'this': a count, the name of a device, and the RAM of the machine.

    Raises:
        RecipeError: for a count, device or size that cannot be read, and for a processor without the size of its RAM.
    """
    named, *sizes = (part.strip() for part in text.split(","))
    if len(sizes) > 1 or "" in (named, *sizes):
        raise RecipeError(f"hardware {text!r}: write a count, a device and at most one size of RAM, such as {EXAMPLES}")
    ram_bytes = size_of(sizes[0]) if sizes else None
    if named.lower() == THIS:
        if sizes:
            raise RecipeError(f"hardware {text!r}: the RAM of this machine is not stated; write {THIS} alone")
        return PlannedHardware(1, None)
    match = COUNTED.fullmatch(named)
    device = named_device(match["name"] if match else named)
    if match is None:
        if device is None:
            raise RecipeError(f"hardware {text!r}: write a count and a device, such as {EXAMPLES}, or {THIS}")
        raise RecipeError(f"hardware {text!r}: the count is missing; write 1x{named} for one device")
    if not 1 <= int(match["count"]) <= MOST:
        raise RecipeError(f"hardware {text!r}: {match['count']} devices; write a count from 1 to {MOST}")
    if device is None:
        names = [name for entry in devices().values() for name in (entry.name, *entry.other_names)]
        raise RecipeError(
            f"hardware {text!r}: unknown device {match['name']!r}{did_you_mean(match['name'].upper(), names)}"
        )
    if device.kind != "gpu" and ram_bytes is None:
        raise RecipeError(
            f"hardware {text!r}: the RAM of a machine with {device.name} is missing; write {named},256GB for 256 GB"
        )
    return PlannedHardware(int(match["count"]), device, ram_bytes)


@dataclass(frozen=True)
class DeviceSetting:
    """A way to run on some of the devices.

    processes: one for each device. fit: batch, groups and stores of a process, and its memory. ram_bytes: of the
    machine, for all processes, besides the memory of the devices. file_bytes: of activations in files. seconds: by
    phase; None if the time is unknown.
    """

    processes: int
    fit: Fit
    ram_bytes: int
    file_bytes: int
    seconds: Mapping[str, float] | None

    @property
    def total_seconds(self) -> float | None:
        """Seconds of all phases."""
        return None if self.seconds is None else sum(self.seconds.values())

    @property
    def device_seconds(self) -> float | None:
        """Seconds of all phases, times the devices."""
        return None if self.total_seconds is None else self.processes * self.total_seconds

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        needs = [{"where": n.where, "bytes": n.size_bytes, "parts": n.parts} for n in self.fit.needs]
        return {
            "processes": self.processes,
            "batch": self.fit.batch,
            "inputs_at_once": self.fit.inputs_at_once,
            "store_bytes": self.fit.store_bytes,
            "process_bytes": self.fit.peak_bytes + LIBRARIES_BYTES,
            "ram_bytes": self.ram_bytes,
            "file_bytes": self.file_bytes,
            "seconds": None if self.seconds is None else dict(self.seconds),
            "total_seconds": self.total_seconds,
            "device_seconds": self.device_seconds,
            "memory": needs,
        }


@dataclass(frozen=True)
class HardwarePlan:
    """The plan of a run on a hardware.

    settings: those that fit, from one device to all. unfit: why others do not, by number of processes. cheapest: the
    setting with the least device-hours. rates: what the time is predicted from. unknown: what it does not contain.
    """

    hardware: PlannedHardware
    model: str
    dense_bytes: int
    checkpoint_bytes: int
    settings: tuple[DeviceSetting, ...]
    unfit: Mapping[int, str]
    rates: str
    unknown: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def disk_bytes(self) -> int:
        """Bytes of the model, the checkpoint, and the activations in files of the cheapest setting."""
        return self.dense_bytes + self.checkpoint_bytes + self.cheapest.file_bytes

    @property
    def libraries_bytes(self) -> int:
        """Bytes of Python, torch and what they import, in each process."""
        return LIBRARIES_BYTES

    @property
    def cheapest(self) -> DeviceSetting:
        """The setting that takes the least device-hours; without times, the fewest devices."""
        return min(self.settings, key=lambda setting: (setting.device_seconds or 0.0, setting.processes))

    @property
    def fastest(self) -> DeviceSetting:
        """The setting that takes the least time."""
        return min(self.settings, key=lambda setting: (setting.total_seconds or 0.0, setting.processes))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "hardware": self.hardware.text,
            "model": self.model,
            "predicted": True,
            "dense_bytes": self.dense_bytes,
            "checkpoint_bytes": self.checkpoint_bytes,
            "settings": [setting.to_json() for setting in self.settings],
            "cheapest": self.cheapest.processes,
            "fastest": self.fastest.processes,
            "unfit": {str(processes): reason for processes, reason in self.unfit.items()},
            "rates": self.rates,
            "unknown": list(self.unknown),
            "notes": list(self.notes),
        }


def plan_hardware(
    recipe: Recipe | str | Path, hardware: str, memory: str | int | None = None, time: bool = False
) -> HardwarePlan:
    """Plan a run on a hardware, from the configuration of the model alone.

    One block of each kind is built, so that a model of 671B parameters takes seconds. The time is that of the counted
    work (`compress.pipeline.workload`) at the fitted rates of this machine, or at the published rates of other devices
    times the efficiency that was measured on a processor.

    Args:
        recipe: a recipe, or the path of its YAML file.
        hardware: as of `read_hardware`.
        memory: the limit of memory of a process; the smaller of it and the device's counts.
        time: measure the rates of this machine, unless they are known.

    Raises:
        RecipeError: for a hardware that cannot be read.
        ShortageError: if the run fits no number of the devices.
    """
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.from_yaml(recipe)
    target = read_hardware(hardware)
    run = counted(recipe, target.computes_on)
    limit = None if memory is None else size_of(memory)
    local = (measured_rates() if time else known_rates()) or reference_rates()
    rates, reason = _rates_on(target, local, run)
    settings: list[DeviceSetting] = []
    unfit: dict[int, str] = {}
    notes = list(run.notes)
    for processes in _counts(target.count):
        own_bytes = process_limit(target, processes)
        own_bytes = own_bytes if limit is None else min(own_bytes, limit)
        try:
            settings.append(_setting(run, target, processes, own_bytes, rates))
        except ShortageError as error:
            unfit[processes] = str(error)
    if not settings:
        raise ShortageError(f"hardware {hardware}: {unfit[max(unfit)]}")
    if limit is not None:
        device_bytes = process_limit(target, target.count)
        smaller = "the one that was asked for" if limit < device_bytes else f"that of {target.text}"
        size = megabytes(min(limit, device_bytes))
        notes.append(f"the smaller of two limits of memory counts, {smaller}: {size} MB for each process")
    notes += _ram_notes(run, target)
    unknown = work_of(run, Division()).unknown if run.blocks is not None else ()
    unknown = (*unknown, *([reason] if reason else ()))
    return HardwarePlan(
        target,
        recipe.model,
        run.dense_bytes,
        run.checkpoint_bytes,
        tuple(settings),
        unfit,
        local.machine if rates is None else rates.machine,
        unknown,
        tuple(dict.fromkeys(notes)),
    )


def _counts(count: int) -> list[int]:
    """Return the numbers of processes that are planned: powers of two, and all devices."""
    return sorted({*(2**power for power in range(int(math.log2(count)) + 1)), count})


def process_limit(hardware: PlannedHardware, processes: int) -> int:
    """Return the memory of each of several processes: that of its device, or its share of the RAM."""
    if hardware.device is None:
        return available_bytes(hardware.computes_on) // processes
    if hardware.device.kind == "gpu":
        return int(hardware.device.memory)
    assert hardware.ram_bytes is not None, "read_hardware asks for it"
    return hardware.ram_bytes // processes


def _rates_on(hardware: PlannedHardware, local: Rates, run: Counted) -> tuple[Rates | None, str]:
    """Return the rates of the hardware; None and the reason if the time is unknown."""
    if run.blocks is None:
        return None, f"the time: {run.reason}"
    device = hardware.device
    if device is None:
        if hardware.computes_on.type != "cpu":
            return None, "the time on the accelerator of this machine; write its name, such as 1xH100"
        threads = torch.get_num_threads()
        return replace(local, seconds={kind: taken / threads for kind, taken in local.seconds.items()}), ""
    if device.kind == "apple":
        return None, f"the time: on {device.name} compress computes on the processor, whose rates are not published"
    return local.on(device, run.footprint.itemsize), ""


def work_of(run: Counted, division: Division) -> Workload:
    """Count the work of a run, with its evaluation."""
    assert run.blocks is not None
    stored = run.dense_bytes + run.checkpoint_bytes
    counted_work = workload(run.footprint, run.blocks, stored, division)
    evaluation, unknown = evaluation_work(run.footprint, run.blocks, division)
    phases = {**counted_work.phases, **({} if evaluation is None else {"evaluate": evaluation})}
    return Workload(phases, (*counted_work.unknown, *unknown))


def _setting(
    run: Counted, hardware: PlannedHardware, processes: int, limit_bytes: int, rates: Rates | None
) -> DeviceSetting:
    """Plan a number of processes. Raises ShortageError if a process does not fit its memory."""
    footprint = run.footprint
    sequences = math.ceil(footprint.sequences / processes)
    divided = footprint if processes == 1 else with_calibration(footprint, sequences=sequences)
    fit = fitted(divided, limit_bytes)
    ram_bytes = _ram_bytes(run, processes)
    if hardware.has_own_memory and hardware.ram_bytes is not None and ram_bytes > hardware.ram_bytes:
        raise ShortageError(
            f"memory: {processes} processes need {megabytes(ram_bytes)} MB of RAM, the machine has "
            f"{megabytes(hardware.ram_bytes)} MB; use fewer devices, or a smaller text"
        )
    seconds = None
    if rates is not None:
        phases = work_of(run, Division(processes, fit.inputs_at_once)).phases
        seconds = {phase: rates.of(work) for phase, work in phases.items()}
    return DeviceSetting(processes, fit, ram_bytes, _file_bytes(divided.states_bytes, fit) * processes, seconds)


def _file_bytes(states_bytes: int, fit: Fit) -> int:
    """Return the bytes of activations between blocks beyond the store."""
    return max(0, states_bytes - fit.store_bytes)


def _ram_bytes(run: Counted, processes: int) -> int:
    """Return the RAM of processes of devices with other memory: libraries, the text, and a block to write."""
    block = run.checkpoint_bytes // sum(run.counts)
    text = next((need.parts.get("the text", 0) for need in run.footprint.needs() if "the text" in need.parts), 0)
    return processes * (LIBRARIES_BYTES + text) + block


def _ram_notes(run: Counted, hardware: PlannedHardware) -> Sequence[str]:
    """Return a note if transformers needs more RAM to read the checkpoint back than the machine has."""
    if hardware.ram_bytes is None:
        return ()
    return verification_notes(run.resolved, run.dense_bytes, run.checkpoint_bytes, hardware.ram_bytes)
