"""Changes of the files of a checkpoint, drawn at random, for `fuzzing`."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from random_layers import RandomLayer, random_tensors
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from compress.checkpoint.checkpoint import STATED
from compress.layers.scheme import LayerScheme

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    -7,
    3,
    64,
    2**31,
    2**63,
    10**12,
    10**30,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "int4",
    "codes",
    "dense",
    "../outside/model.safetensors",
    "/dev/zero",
    "\0",
    "a" * 5000,
    [],
    {},
    [[]],
    {"kind": "codes"},
    [1, 2],
    [-1, 4],
    {"a": None},
    "float8_e4m3fn",
    "bitsandbytes",
    "LlamaForCausalLM",
    "pipeline",
    "some/repository",
]
KEYWORDS: list[Any] = ["int8", "nf4", "fp8_e4m3", "sparse", "low_rank", "rounding", "static", "bitmask", "3:4", 16, 128]
"""Further values, which mean something in a description of layers."""
SHAPES: list[Any] = [
    0,
    1,
    -1,
    2,
    2**31,
    2**62,
    2**64,
    "F16",
    "I8",
    "F8_E4M3",
    "F4",
    "C64",
    "BOOL",
    "U64",
    [],
    [1],
    [-1, 4],
    None,
]


@dataclass
class Draw:
    """The random choices of an input. outside: a folder with valid files that must not be opened."""

    folder: Path
    outside: Path
    random: random.Random

    def file(self, *suffixes: str) -> Path:
        """A file of the checkpoint."""
        files = sorted(p for p in self.folder.iterdir() if p.is_file() and not p.is_symlink())
        chosen = [p for p in files if p.suffix in suffixes] or files or [self.folder / "new.json"]
        return self.random.choice(chosen)

    def data(self, path: Path) -> bytearray:
        """The bytes of a file."""
        return bytearray(path.read_bytes() if path.is_file() and not path.is_symlink() else b"")

    def json(self, path: Path) -> Any:
        """The values of a JSON file; None if an earlier change broke it."""
        try:
            return json.loads(self.data(path))
        except (ValueError, RecursionError):
            return None

    def place(self, path: Path, data: bytes) -> None:
        """Write a file in the place of whatever is there."""
        if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
            path.unlink()
        if not path.is_dir():
            path.write_bytes(data)


def truncate(draw: Draw) -> None:
    """Cut a file."""
    path = draw.file()
    data = draw.data(path)
    sizes = [0, 1, 8, draw.random.randrange(len(data) + 1), max(0, len(data) - 1)]
    draw.place(path, data[: draw.random.choice(sizes)])


def flip(draw: Draw) -> None:
    """Change single bytes."""
    path = draw.file()
    data = draw.data(path)
    near = draw.random.choice([len(data), min(len(data), 400)])
    for _ in range(draw.random.choice([1, 2, 8]) if near else 0):
        data[draw.random.randrange(near)] = draw.random.randrange(256)
    draw.place(path, data)


def insert(draw: Draw) -> None:
    """Insert or append bytes."""
    path = draw.file()
    data = draw.data(path)
    at = draw.random.choice([0, len(data), draw.random.randrange(len(data) + 1)])
    draw.place(path, data[:at] + draw.random.randbytes(draw.random.choice([1, 7, 64])) + data[at:])


def lose(draw: Draw) -> None:
    """Remove a file, or put a folder in its place."""
    path = draw.file()
    path.unlink(missing_ok=True)
    if draw.random.random() < 0.2:
        path.mkdir(exist_ok=True)


def swap(draw: Draw) -> None:
    """Exchange two files."""
    one, two = draw.file(), draw.file()
    a, b = draw.data(one), draw.data(two)
    draw.place(one, b)
    draw.place(two, a)


def link(draw: Draw) -> None:
    """Put a link out of the folder, to itself, to a device, or a pipe in the place of a file."""
    path = draw.file()
    path.unlink(missing_ok=True)
    kind = draw.random.randrange(4)
    if kind == 0:
        other = draw.outside / path.name
        path.symlink_to(other if other.exists() else draw.outside / "model.safetensors")
    elif kind < 3:
        path.symlink_to(path if kind == 1 else "/dev/zero")
    else:
        os.mkfifo(path)


def encode(draw: Draw) -> None:
    """Write a JSON file in another encoding, or with bytes that are no text."""
    path = draw.file(".json")
    text = bytes(draw.data(path)).decode("utf-8", "replace")
    plain = text.encode()
    draw.place(path, draw.random.choice([text.encode("utf-16"), b"\xff\xfe\x00" + plain, plain + b"\xff"]))


def deepen(draw: Draw) -> None:
    """Nest values of a JSON file in many levels."""
    path, levels = draw.file(".json"), draw.random.choice([70, 300, 5_000, 100_000])
    first, last = draw.random.choice([("[", "]"), ('{"a":', "}")])
    nested = first * levels + "1" + last * levels
    whole = nested if draw.random.random() < 0.3 else '{"model_type": "llama", "x": ' + nested + "}"
    draw.place(path, whole.encode())


def entries(values: Any) -> Iterator[tuple[Any, Any]]:
    """(object or list, key or index) of every value in JSON."""
    inner = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in list(inner):
        yield values, key
        yield from entries(value)


def change_entry(draw: Draw, holder: Any, key: Any, values: list[Any]) -> None:
    """Change, remove, add or rename an entry of an object or list."""
    action = draw.random.random()
    if action < 0.65:
        holder[key] = draw.random.choice(values)
    elif action < 0.8 or isinstance(holder, list):
        del holder[key]
    elif action < 0.9:
        holder["zork"] = draw.random.choice(values)
    else:
        holder[key + "x"] = holder.pop(key)


def edit(draw: Draw) -> None:
    """Change an entry of a JSON file."""
    path = draw.random.choice([draw.folder / "config.json", draw.file(".json"), draw.file(".json")])
    values = draw.json(path)
    places = list(entries(values))
    if places:
        near = [place for place in places if place[0] is values]
        change_entry(draw, *draw.random.choice(draw.random.choice([places, near])), VALUES)
        draw.place(path, json.dumps(values).encode())


def quantization(draw: Draw) -> None:
    """Change an entry of the description of quantized layers, or of rounded caches."""
    path = draw.folder / "config.json"
    config = draw.json(path)
    places = [place for key in STATED for place in entries(config.get(key))] if isinstance(config, dict) else []
    if places:
        change_entry(draw, *draw.random.choice(places), [*VALUES, *KEYWORDS])
        draw.place(path, json.dumps(config).encode())


def index(draw: Draw) -> None:
    """Let the index name files elsewhere, or none."""
    path = draw.folder / "model.safetensors.index.json"
    files = sorted(p.name for p in draw.folder.glob("*.safetensors"))
    wrong = [
        f"../{draw.outside.name}/{files[0] if files else 'x'}",
        str(draw.outside / "model.safetensors"),
        "",
        ".",
        "..",
        "/dev/zero",
        "config.json",
        "no.safetensors",
        "\0.safetensors",
        "a/../../x.safetensors",
        7,
        None,
        [],
        "x" * 5000,
        "x" * 5000 + ".safetensors",
    ]
    values = draw.json(path)
    known = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(known, dict) or not known:
        values = known = {"weight_map": {"lm_head.weight": draw.random.choice(wrong)}}
    else:
        for name in draw.random.sample(sorted(known), draw.random.choice([1, 1, len(known)])):
            known[name] = draw.random.choice(wrong)
    draw.place(path, json.dumps(values).encode())


def header(draw: Draw) -> None:
    """Change the header of a safetensors file: shapes, dtypes, offsets, its own length."""
    path = draw.file(".safetensors")
    data = draw.data(path)
    try:
        (length,) = struct.unpack("<Q", data[:8])
        values = json.loads(data[8 : 8 + length])
        places = [place for place in entries(values) if place[0] is not values]
        holder, key = draw.random.choice(places)
    except (ValueError, struct.error, IndexError, RecursionError):
        return
    change_entry(draw, holder, key, [*SHAPES, *SHAPES, *VALUES])
    text = json.dumps(values).encode()
    stated = draw.random.choice([len(text)] * 8 + [0, 2**40, 2**63, len(text) + 1])
    draw.place(path, struct.pack("<Q", stated) + text + data[8 + length :])


def tensors(draw: Draw) -> None:
    """Write a valid safetensors file with another tensor in the place of one."""
    path = draw.file(".safetensors")
    try:
        held = {name: tensor.clone() for name, tensor in load_file(path).items()}
        name = draw.random.choice(sorted(held))
    except (SafetensorError, IndexError, OSError, ValueError, KeyError):  # an earlier change
        return
    tensor = held.pop(name)
    changes: list[Callable[[], torch.Tensor | None]] = [
        lambda: tensor.t().contiguous(),
        lambda: tensor.flatten(),
        lambda: tensor[:1].contiguous(),
        lambda: tensor[None],
        lambda: tensor.float() if tensor.dtype is not torch.float32 else tensor.half(),
        lambda: tensor.to(torch.int8),
        lambda: tensor.to(torch.int64),
        lambda: torch.zeros_like(tensor),
        lambda: torch.zeros(0),
        lambda: None,
        lambda: torch.full_like(tensor, -1) if not tensor.is_floating_point() else tensor * float("nan"),
        lambda: torch.full_like(tensor, 127),
        lambda: torch.zeros(7, 5, 3),
    ]
    try:
        changed = draw.random.choice(changes)()
    except (RuntimeError, IndexError):
        return
    if changed is not None:
        held[name if draw.random.random() < 0.9 else name + "x"] = changed
    save_file(held, path, metadata={"format": "pt"})


def climbing(values: torch.Tensor, whole: int) -> torch.Tensor:
    """Numbers of the same dtype that climb `whole` in all and wrap; the first and the last one stay."""
    info, count = torch.iinfo(values.dtype), values.numel()
    steps = [int(values[0]) + k * whole // max(count - 1, 1) for k in range(count)]
    found = [(step - info.min) % (info.max - info.min + 1) + info.min for step in steps]
    found[-1] = int(values[-1])
    return torch.tensor(found, dtype=values.dtype)


def indexes(draw: Draw) -> None:
    """Change a tensor of integers: numbers that wrap in their dtype, its limits, or numbers just beyond a layer."""
    path, chance = draw.file(".safetensors"), draw.random
    try:
        held = {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError, ValueError, KeyError):  # an earlier change
        return
    whole = {name: t for name, t in held.items() if not (t.is_floating_point() or t.dtype is torch.bool) and t.numel()}
    lines = {name: tensor for name, tensor in whole.items() if tensor.dim() == 1}  # such as columns and row starts
    if not whole:
        return
    name = chance.choice(sorted(lines if lines and chance.random() < 0.7 else whole))
    tensor = whole[name]
    # as numpy: torch has few operations on unsigned integers
    info, flat, at = torch.iinfo(tensor.dtype), tensor.flatten().numpy().copy(), chance.randrange(tensor.numel())
    size, kind = info.max - info.min + 1, chance.randrange(6)
    if kind == 0:
        flat = climbing(tensor.flatten(), chance.choice([size // 2, size, 2 * size, -size])).numpy()
    elif kind == 1:
        flat[at] = chance.choice([info.min, info.max, info.min + 1, info.max - 1])
    elif kind == 2:
        flat[at::2] = info.max
        flat[at + 1 :: 2] = info.min
    elif kind == 3:
        beyond = chance.choice([32, 33, 64, 65, len(flat), len(flat) + 1, -1, int(flat.max()) + 1, int(flat.min()) - 1])
        flat[at] = min(max(beyond, info.min), info.max)
    elif kind == 4:
        flat = flat[::-1].copy()
    else:
        flat[at:] = flat[at]
    held[name] = torch.from_numpy(flat).view(tensor.shape)
    save_file(held, path, metadata={"format": "pt"})


def layer(draw: Draw) -> None:
    """Describe a layer of format native anew, mostly with tensors of this description."""
    path = draw.folder / "config.json"
    config = draw.json(path)
    quantization = config.get("quantization_config") if isinstance(config, dict) else None
    layers = quantization.get("layers") if isinstance(quantization, dict) else None
    if not isinstance(layers, dict) or not layers:
        return
    name = draw.random.choice(sorted(layers))
    try:
        rows, width = layers[name]["shape"]
        layers[name] = RandomLayer(draw.random, (rows, width)).scheme()
        scheme = LayerScheme.from_json(layers[name])
    except (ValueError, TypeError, KeyError):  # an earlier change, or a description that is refused
        draw.place(path, json.dumps(config).encode())
        return
    draw.place(path, json.dumps(config).encode())
    tensors = {f"{name}.{key}": tensor for key, tensor in random_tensors(scheme, draw.random).items()}
    index = draw.folder / "model.safetensors.index.json"
    shards = [p for p in sorted(draw.folder.glob("*.safetensors")) if p.is_file() and not p.is_symlink()]
    for shard in shards:
        try:
            held = {key: tensor.clone() for key, tensor in load_file(shard).items()}
        except (SafetensorError, OSError, ValueError, KeyError):  # an earlier change
            continue
        earlier = {key for key in held if key.startswith(f"{name}.") and not key.endswith(".bias")}
        if earlier:
            save_file({k: t for k, t in held.items() if k not in earlier} | tensors, shard, metadata={"format": "pt"})
            listed = draw.json(index) if index.exists() else None
            if isinstance(listed, dict) and isinstance(listed.get("weight_map"), dict):
                places = {key: place for key, place in listed["weight_map"].items() if key not in earlier}
                listed["weight_map"] = places | dict.fromkeys(tensors, shard.name)
                draw.place(index, json.dumps(listed).encode())


PATTERNS = [
    "(a|a)*$",
    "((.*)*)*x",
    "(?:[a-z.]+)+0$",
    "(.|m)*(.|o)*z",
    ".*" * 40 + "z",
    "(" * 500 + "a",
    "a{1,99999999}",
]
"""Regular expressions for which backtracking takes exponential time, and some that are none."""
LARGE = [2**40, 10**7, 2**31, 2**62]


def bomb(draw: Draw) -> None:
    """Ask for work or memory that the files are too small for: sizes, lists and patterns of a config, a GGUF header."""
    chance, path = draw.random, draw.folder / "config.json"
    config, files = (
        draw.json(path),
        [p for p in sorted(draw.folder.glob("*.gguf")) if p.is_file() and not p.is_symlink()],
    )
    if files and chance.random() < 0.7:
        data = draw.data(files[0])
        at = chance.choice([8, 16, chance.randrange(24, max(25, min(len(data) - 8, 4000)))])
        data[at : at + 8] = struct.pack("<Q", chance.choice([2**62, 2**40, 2**63, 2**33, 1 << 24]))
        draw.place(files[0], data)
    stated = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(stated, dict):
        return
    pattern = chance.choice(PATTERNS)
    changes: list[Callable[[], Any]] = [
        lambda: stated.update(ignore=[f"re:{pattern}"] * chance.choice([1, 100])),
        lambda: stated.update(dynamic={f"+:{pattern}": {"bits": 4}, f"-:{pattern}": {}}),
        lambda: stated.update(group_size=chance.choice(LARGE)),
    ]
    places = [place for place in entries(stated) if isinstance(place[0][place[1]], int)]
    if places:
        holder, key = chance.choice(places)
        changes += [lambda: holder.update({key: chance.choice(LARGE)}) if isinstance(holder, dict) else None] * 3
    groups = [values for values, key in entries(stated) if key == "targets"]
    if groups:
        changes.append(lambda: groups[0].update(targets=[f"re:{pattern}"]))
    lists = [values for values, key in entries(stated) if key in ("parts", "transforms") and values[key]]
    if lists:
        values, key = chance.choice(lists), chance.choice(["parts", "transforms"])
        changes.append(lambda: values.update({key: (values.get(key) or values["parts"])[:1] * 20_000}))
    chance.choice(changes)()
    draw.place(path, json.dumps(config).encode())


CHANGES: tuple[Callable[[Draw], None], ...] = (
    truncate,
    flip,
    flip,
    insert,
    lose,
    swap,
    link,
    encode,
    deepen,
    edit,
    edit,
    edit,
    edit,
    quantization,
    quantization,
    quantization,
    index,
    header,
    header,
    header,
    tensors,
    tensors,
    indexes,
    indexes,
    indexes,
    layer,
    layer,
    bomb,
    bomb,
)
