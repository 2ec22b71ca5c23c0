"""Devices: upper limits of operations and bytes per second."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from compress.errors import RecipeError, did_you_mean

TABLE = Path(__file__).with_name("devices.yaml")
RATES = ("tflops", "gbps", "memory_gb", "tflops_fp32", "tflops_fp8", "tops_int8")
"""The keys of a device; the first three are needed."""
KIND, OTHER_NAMES = "kind", "also"
"""Further keys of the table: 'gpu' (the default), 'cpu' or 'apple', and other names of the device."""

HERE = "here"


@dataclass(frozen=True)
class Device:
    """Limits of a device.

    Attributes:
        name: its name.
        rates: operations per second by kind of numbers: 'float16', 'float32', 'float8' or 'int8'.
        bandwidth: bytes per second.
        memory: bytes.
        call_seconds: time of every call of the framework, in addition to its operations and bytes.
        kind: 'gpu'; 'cpu': a processor, whose memory is that of the machine, `memory` at most; 'apple': a processor
            and a GPU with the same memory, whose figures are those of the GPU.
        other_names: names that people also write.
    """

    name: str
    rates: dict[str, float] = field(hash=False)
    bandwidth: float
    memory: float
    call_seconds: float = 0.0
    kind: str = "gpu"
    other_names: tuple[str, ...] = ()

    def rate(self, kind: str) -> float:
        """Return operations per second of a kind of numbers, or those of 16-bit floats if it has no rate."""
        return self.rates.get(kind, self.rates["float16"])

    def seconds(self, operations: float, size: float, kind: str) -> float:
        """Return the least time of a product: that of its operations or of its bytes, whichever is longer."""
        return max(operations / self.rate(kind), size / self.bandwidth)


@cache
def devices() -> dict[str, Device]:
    """Return the known devices by name."""
    device_by_name = {}
    for name, values in yaml.safe_load(TABLE.read_text("utf-8")).items():
        kind, names = values.pop(KIND, "gpu"), tuple(map(str, values.pop(OTHER_NAMES, ())))
        device_by_name[name] = replace(_device(name, values), kind=kind, other_names=names)
    return device_by_name


def named_device(text: str) -> Device | None:
    """Return a known device by one of its names; case, spaces, '-' and '_' are ignored. None if no device has it."""
    for device in devices().values():
        if _plain(text) in map(_plain, (device.name, *device.other_names)):
            return device
    return None


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def read_device(text: str) -> Device:
    """Return a device by name, in any case, or from '{tflops: 100, gbps: 500, memory_gb: 24}'.

    Raises:
        RecipeError: if the text is neither.
    """
    device = named_device(text)
    if device is not None:
        return device
    if not text.lstrip().startswith("{"):
        raise RecipeError(f"device {text}: unknown device; known: {', '.join(devices())}, {HERE}, or {_example()}")
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        raise RecipeError(f"device {text}: cannot be read; write {_example()}") from None
    return _device("custom", values)


def _example() -> str:
    return "'{tflops: 100, gbps: 500, memory_gb: 24}'"


def _device(name: str, values: Any) -> Device:
    if not isinstance(values, dict):
        raise RecipeError(f"device: a device is {_example()}")
    for key, value in values.items():
        if key not in RATES:
            raise RecipeError(f"device: {key}: unknown{did_you_mean(str(key), RATES)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise RecipeError(f"device: {key}: {value!r} is no number above 0")
    missing = [key for key in RATES[:3] if key not in values]
    if missing:
        raise RecipeError(f"device: {', '.join(missing)} missing; write for example {_example()}")
    kinds = {"float16": "tflops", "float32": "tflops_fp32", "float8": "tflops_fp8", "int8": "tops_int8"}
    rates = {kind: values[key] * 1e12 for kind, key in kinds.items() if key in values}
    return Device(name, rates, values["gbps"] * 1e9, values["memory_gb"] * 1e9)
