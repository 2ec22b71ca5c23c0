"""Sizes as text, and the limits of memory of a process, from the files of a system of our own."""

import sys

import pytest

from compress.errors import UserError
from compress.passes.contract.limits import limits_left, size_of


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("8GB", 8 * 10**9),
        ("8 gb", 8 * 10**9),
        ("512MB", 512 * 10**6),
        ("1.5GiB", 3 * 2**29),
        ("6TiB", 6 * 2**40),
        ("100KB", 10**5),
        (" 2MiB ", 2**21),
        (4096, 4096),
    ],
)
def test_sizes(text, found):
    assert size_of(text) == found


@pytest.mark.parametrize("text", ["8", "8G", "GB", "-8GB", "8GB 3", "1e3MB", "8,5GB", "", "٣GB", True, None, 2.5])
def test_what_is_no_size(text):
    with pytest.raises(UserError, match=r"memory: .* is no size; write a number and a unit, such as 8GB"):
        size_of(text)


@pytest.mark.parametrize("text", ["0GB", 0, -5])
def test_no_memory_at_all(text):
    with pytest.raises(UserError, match="is no memory at all; write a size above zero"):
        size_of(text)


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def left(tmp_path, line):
    (tmp_path / "self").write_text(f"{line}\n")
    return limits_left(tmp_path / "groups", tmp_path / "self")


def test_groups_of_the_second_version(tmp_path):
    root = tmp_path / "groups"
    cached = "anon 100\nfile 260\ninactive_file 200\nactive_file 50\n"
    write(root / "a" / "b", memory__max="1000\n", memory__current="700\n", memory__stat=cached)
    write(root / "a", memory__max="900\n", memory__current="700\n", memory__stat="inactive_file 0\nactive_file 0\n")
    write(root, memory__max="max\n", memory__current="5\n", memory__stat="")
    assert sorted(left(tmp_path, "0::/a/b")) == [
        200,
        550,
    ]  # of the group around it, and of its own without cached pages


def test_groups_of_the_first_version(tmp_path):
    stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 30\ntotal_active_file 10\n"
    files = {"memory__limit_in_bytes": "500\n", "memory__usage_in_bytes": "140\n", "memory__stat": stat}
    write(tmp_path / "groups" / "memory" / "job", **files)
    assert left(tmp_path, "4:memory:/job") == [400]
    assert left(tmp_path, "4:cpu,cpuacct:/job") == left(tmp_path, "0::/job") == []


def test_without_the_module_of_posix_there_are_no_limits_of_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "resource", None)  # importing it is an error
    assert limits_left(tmp_path, tmp_path / "none") == []


@pytest.mark.skipif(sys.platform == "win32", reason="limits of processes are those of POSIX")
def test_limits_of_the_process(tmp_path):
    import resource

    assert limits_left(tmp_path, tmp_path / "none") == []
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 45, before[1]))
        (found,) = limits_left(tmp_path, tmp_path / "none")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert (1 << 44) < found < (1 << 45)
