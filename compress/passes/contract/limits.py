"""The limits of memory that a system sets for this process, and what is left of them; sizes as text."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from compress.errors import UserError

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?B)", re.IGNORECASE | re.ASCII)
GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
NAMES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""The files of a limit and of its use, in the second and the first version of control groups."""
FILES = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")
"""Entries of memory.stat: cached pages of files, which the system takes back when memory is short."""


def size_of(text: str | int, option: str = "memory") -> int:
    """Bytes of a size such as '8GB', '512 MB' or '6GiB'; an integer is a number of bytes. Raises UserError.

    option: the name of the option that states it, for the error.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size_bytes = text
    else:
        match = SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise UserError(f"{option}: {text!r} is no size; write a number and a unit, such as 8GB, 512MB or 6GiB")
        size_bytes = int(float(match[1]) * UNITS[match[2].upper()])
    if size_bytes <= 0:
        raise UserError(f"{option}: {text!r} is no {option} at all; write a size above zero, such as 8GB")
    return size_bytes


def limits_left(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> list[int]:
    """Return bytes that are left of each limit of this process: of its control groups, RLIMIT_DATA and RLIMIT_AS."""
    return [max(0, limit_bytes) for limit_bytes in (*_of_groups(groups, membership), *_of_process())]


def _of_groups(groups: Path, membership: Path) -> Iterator[int]:
    """Return the limits of the groups of this process and of the groups around them."""
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, kinds, inside = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            for root in (groups / "memory" if kinds else groups, groups / "unified"):
                place = root / inside.lstrip("/")
                for folder in (place, *(parent for parent in place.parents if parent.is_relative_to(root))):
                    yield from _of_group(folder)


def _of_group(folder: Path) -> Iterator[int]:
    for limit, use in NAMES:
        with suppress(OSError, ValueError):  # absent, or "max": no limit
            most, used = int((folder / limit).read_text()), int((folder / use).read_text())
            lines = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
            stated = {name: int(value) for name, value in lines if name in FILES}
            cached = max(
                sum(v for n, v in stated.items() if n.startswith("total_") == total) for total in (False, True)
            )
            yield most - max(0, used - cached)


def _of_process() -> Iterator[int]:
    """RLIMIT_DATA, which counts private writable mappings, and RLIMIT_AS, which counts all mappings."""
    if sys.platform == "win32":
        return
    import resource

    used = psutil.Process().memory_info()
    for kind, used_bytes in ((resource.RLIMIT_DATA, getattr(used, "data", used.rss)), (resource.RLIMIT_AS, used.vms)):
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            yield soft - used_bytes
