"""The checkpoint as it grows: its manifest, its shards, and how a killed run takes them up and goes on.

A block that the last segment of the run has finished is a shard of the checkpoint. What earlier segments make of blocks
is a snapshot in `.compress/segments/`: the last complete one is kept, and the one that is being made.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from compress.api.context import Cost, Run
from compress.api.journal import Entry
from compress.api.passes import Step
from compress.errors import OutputError
from compress.formats.base import CacheScheme, Format
from compress.formats.containers.files import file_sha256, write_json, write_text
from compress.formats.containers.safetensors import shard_name, write_shard
from compress.model.kv_cache import SCALES, cache_records, stated_scheme
from compress.model.linear import CompressedLinear, linears, replace_linear
from compress.model.open.load import fill, fill_caches
from compress.model.open.opening import InMemory, Mapped, OpenModel, assign, stored_in
from compress.model.save import block_tensors, dense_linear_names, outside_tensors, store_as_planned, write_description
from compress.model.structure.blocks import Block
from compress.pipeline.engine import Segment
from compress.pipeline.resolve import follow
from compress.pipeline.snapshot import OUTSIDE, Snapshot, outside_of, read_part, read_snapshot, state_of, write_part
from compress.stream.install import LayerResult
from compress.version import __version__
from compress.weights.layer import LayerScheme

WORK = ".compress"
SEGMENTS = "segments"
PROBE_FILE = "probe.safetensors"
OWN_FILES = (
    "*.safetensors",
    "*.json",
    "*.part",
    "chat_template.jinja",
    "recipe.yaml",
    "report.md",
    "report.html",
    "training.svg",
)
"""What a run writes into its folder, and --overwrite therefore removes."""


@dataclass
class ShardEntry:
    """One finished shard: what it holds, what was done, and how it can be recognized.

    digests: sha256 of the codes per layer. schemes: how each layer is stored. results, journal: lines for the report.
    caches: attentions whose keys and values are rounded: {scheme, sha256}.
    """

    file: str
    sha256: str
    names: list[str]
    size_bytes: int
    digests: dict[str, str] = field(default_factory=dict)
    schemes: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)
    journal: list[dict[str, Any]] = field(default_factory=list)
    caches: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Manifest:
    """What an output folder holds; written atomically after every shard.

    fingerprint: a digest of all that the bytes depend on. complete: the checkpoint is whole. training: what the report
    says of passes that trained. reached: the model after the last complete segment but the very last. begun: what there
    is of the next one.
    """

    folder: Path
    fingerprint: str
    shards: dict[str, ShardEntry] = field(default_factory=dict)
    costs: dict[str, Any] = field(default_factory=dict)
    complete: bool = False
    training: dict[str, Any] = field(default_factory=dict)
    reached: Snapshot | None = None
    begun: Snapshot | None = None

    @property
    def path(self) -> Path:
        """Where the manifest is."""
        return self.folder / WORK / "manifest.json"

    def schemes_of(self, opened: OpenModel) -> dict[str, LayerScheme]:
        """How every compressed layer is stored, in the order of the model."""
        found = {name: values for entry in self.shards.values() for name, values in entry.schemes.items()}
        return {name: LayerScheme.from_json(found[name]) for name in opened.linear_names() if name in found}

    @property
    def caches(self) -> dict[str, CacheScheme]:
        """How keys and values are rounded, by attention, those that are."""
        record = {name: record for entry in self.shards.values() for name, record in entry.caches.items()}
        return {name: CacheScheme.from_json(values["scheme"]) for name, values in record.items()}

    def write(self) -> None:
        """Write atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        values = asdict(self) | {"folder": "."}
        write_json(self.path, values)


def fingerprint(**parts: Any) -> str:
    """A digest of named values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def open_folder(folder: Path, wanted: str, overwrite: bool) -> Manifest:
    """The manifest of an output folder: a new one, or that of an earlier start of the same run.

    Raises OutputError when the folder cannot be made, holds files that are no run, or, unless `overwrite` is set,
    another run; only the files of a run are ever removed.
    """
    path = folder / WORK / "manifest.json"
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: is a file; name a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        nothing = all(child.name == WORK for child in folder.iterdir())  # empty, or nothing was finished
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made or read ({error.strerror}); name another folder") from error
    found = _read(path, folder) if path.exists() else None
    if found is not None and found.fingerprint == wanted:
        return found
    if nothing and found is None:
        return Manifest(folder, wanted)
    if not path.exists():
        raise OutputError(f"{folder}: holds files that are no run of compress; name a new or empty folder")
    if not overwrite:
        raise OutputError(
            f"{folder}: holds another run (its recipe, model, calibration text or version differs); "
            "name a new folder, or pass --overwrite to replace it"
        )
    for pattern in OWN_FILES:
        for file in folder.glob(pattern):
            file.unlink()
    shutil.rmtree(folder / WORK)
    return Manifest(folder, wanted)


def _read(path: Path, folder: Path) -> Manifest | None:
    try:
        values = json.loads(path.read_text())
        shards = {name: ShardEntry(**entry) for name, entry in values.pop("shards").items()}
        between = {name: values[name] and Snapshot.from_json(values[name]) for name in ("reached", "begun")}
        return Manifest(**{**values, **between, "folder": folder, "shards": shards})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # written by another version, or damaged; it is not this run


def restore_block(
    block: Block, entry: ShardEntry, folder: Path, targets: Collection[str], format_: Format, dtype: torch.dtype,
    device: torch.device,
) -> bool:  # fmt: skip
    """Put a block's shard into the model, the linears called `targets` compressed; False where it is not whole."""
    path = folder / entry.file
    if not path.exists() or file_sha256(path) != entry.sha256:
        return False
    mapped = Mapped(stored_in(path), dtype, device)
    for name, layer in linears(block.module).items():
        if isinstance(layer, CompressedLinear):  # of an earlier segment: nothing of it must be left
            parent, _, leaf = name.rpartition(".")
            fresh = CompressedLinear(torch.empty(layer.shape, device="meta"), layer.bias, layer.transposed)
            setattr(block.module.get_submodule(parent), leaf, fresh)
        elif f"{block.name}.{name}" in targets:
            replace_linear(block.module, name)
    schemes = {name: LayerScheme.from_json(values) for name, values in entry.schemes.items()}
    fill(block.module, block.name + ".", mapped.read_raw(entry.names), schemes, format_, dtype)
    known = cache_records(block.name, block.module)
    caches = {n: CacheScheme.from_json(record["scheme"]) for n, record in entry.caches.items() if n not in known}
    scales = mapped.read([name for name in mapped.files if name.endswith(SCALES)])
    fill_caches(block.module, block.name + ".", scales, caches)
    _assign_dense(block, mapped, schemes)
    return True


def _assign_dense(block: Block, mapped: Mapped, schemes: Mapping[str, LayerScheme]) -> None:
    """Tensors that are stored as they are computed with."""
    tensors = mapped.read(list(mapped.files))
    for name, layer in linears(block.module).items():
        full = f"{block.name}.{name}"
        if isinstance(layer, CompressedLinear) and full not in schemes:
            weight = tensors.pop(f"{full}.weight")
            layer.put(weight.T if layer.transposed else weight)
    held = {f"{block.name}.{name}" for name in block.module.state_dict()}
    assign(block.module, {n.removeprefix(block.name + "."): t for n, t in tensors.items() if n in held})


@dataclass
class Shards:
    """The sink of `run`: a shard per finished block, snapshots between segments, and at last what describes them.

    probe: ids [1, length] whose logits are kept for the comparison after reloading. recipe: as YAML. first: whether
    this process writes; others of the same launcher do the same work. together: whether there may be others, which wait
    for one another where a segment ends.
    """

    opened: OpenModel
    run: Run
    steps: Sequence[Step]
    manifest: Manifest
    probe: Tensor
    recipe: str
    first: bool = True
    together: bool = False
    _began: int = field(init=False)
    _noted: int = field(init=False)
    _begun: Snapshot = field(init=False)
    _earlier: dict[str, list[dict[str, Any]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._began = len(self.run.journal.entries)

    def start(self, segments: Sequence[Segment]) -> int:
        """Take up what an earlier start of the same run has left, and mark the folder as this run's."""
        manifest, at = self.manifest, 0
        self.run.costs |= {name: Cost(**cost) for name, cost in manifest.costs.items()}
        reached = manifest.reached
        if reached is not None and reached.whole(self._folder(reached.segment)):
            at = reached.segment + 1
            self._take_up(reached, segments[at].first)
        elif len(segments) > 1 or not segments[0].swept:
            for block in self.opened.blocks:
                self.opened.weights.bring(block)
            self.opened.weights = InMemory()
        self._begin(at, segments[at].last)
        if self.first:
            manifest.write()
        return at

    def restore(self, segment: Segment, block: Block) -> bool:
        """Read a block that a killed run had finished: its shard, or its part of a snapshot."""
        opened, run = self.opened, self.run
        if segment.last:
            entry = self.manifest.shards.get(block.name)
            targets = {name for _, _, names in self.steps for name in names}
            folder = self.manifest.folder
            where = run.format, opened.dtype, opened.device
            if entry is None or not restore_block(block, entry, folder, targets, *where):
                return False
        else:
            entry = self._begun.parts.get(block.name)
            if entry is None or not read_part(self._folder(segment.index), entry, block.module, opened.device):
                return False
            self._earlier.setdefault(block.name, []).extend(entry.results)
        run.journal.entries[self._noted :] = [Entry(**values) for values in entry.journal]
        self._noted = len(run.journal.entries)
        return True

    def done(self, segment: Segment, block: Block, results: list[LayerResult]) -> None:
        """Write a finished block, and tell the journal's listeners when it is on disk."""
        if not self.first:
            return
        journal, made = self.run.journal, [asdict(result) for result in results]
        with self.run.phase("save"):
            notes = [asdict(entry) for entry in journal.entries[self._noted :]]
            if segment.last:
                entry = self._write_shard(block)
                entry.results, entry.journal = self._earlier.pop(block.name, []) + made, notes
                self.manifest.shards[block.name] = entry
            else:
                path = self._folder(segment.index) / self._file(block)
                part = write_part(path, *state_of(block.module))
                part.results, part.journal = made, notes
                self._earlier.setdefault(block.name, []).extend(made)
                self._begun.parts[block.name] = part
            self._noted = len(journal.entries)
            self._write()
        figures = {"block": block.index, "blocks": len(self.opened.blocks), "segment": segment.index}
        journal.add("block", "save", block.name, **figures)

    def close(self, segment: Segment, logits: Callable[[], Tensor]) -> None:
        """Write what the segment leaves besides blocks, after which the snapshot before it is not needed any more."""
        folder, label = self.manifest.folder, segment.steps[-1][0]
        if self.first and segment.last:
            write_shard(folder / WORK / PROBE_FILE, {"ids": self.probe, "logits": logits().cpu().contiguous()})
        elif self.first:
            self._complete_snapshot(segment)
        if self.together:
            PartialState().wait_for_everyone()  # all have read the snapshot before
        if not segment.last:
            self._begin(segment.index + 1, segment.index + 2 == segment.count)
        if self.first and segment.last:
            self._describe()
            for name in ("passes", SEGMENTS):
                shutil.rmtree(folder / WORK / name, ignore_errors=True)
        elif self.first:
            shutil.rmtree(self._folder(segment.index - 1), ignore_errors=True)
            self.run.journal.add("segment", "save", label, segment=segment.index, segments=segment.count)

    def _begin(self, index: int, last: bool) -> None:
        """Begin a segment. What the journal says of it is told block by block; the last one's with all before."""
        known = self.manifest.begun
        self._begun = known if known is not None and known.segment == index else Snapshot(index)
        self.manifest.begun = None if last else self._begun
        self._noted = self._began if last else len(self.run.journal.entries)

    def _take_up(self, reached: Snapshot, first: int) -> None:
        """The model as a snapshot has it; first: the number of the first pass to come."""
        with self.run.phase("restore"):
            if read_snapshot(reached, self._folder(reached.segment), self.opened):
                follow(self.steps, self.opened, self.run.format, first)
        self._earlier = {name: list(results) for name, results in reached.results.items()}
        self.run.training |= self.manifest.training
        self.run.journal.entries += [Entry(**values) for values in reached.journal]

    def _complete_snapshot(self, segment: Segment) -> None:
        with self.run.phase("save"):
            begun, config = self._begun, self.opened.config.to_dict()
            begun.parts[OUTSIDE] = write_part(self._folder(segment.index) / self._file(None), *outside_of(self.opened))
            begun.results = {name: list(results) for name, results in self._earlier.items()}
            begun.config, begun.complete = config, True
            begun.journal = [asdict(entry) for entry in self.run.journal.entries[self._began :]]
            self.manifest.reached, self.manifest.begun = begun, None
            self.manifest.training = self.run.training
            self._write()

    def _write_shard(self, block: Block) -> ShardEntry:
        run = self.run
        if run.format.sparse:
            store_as_planned(block.name, block.module, run.storage, run.sparse)
        tensors = block_tensors(block.name, block.module, run.format, run.storage)
        entry = _entry(self.manifest.folder / self._file(block), tensors)
        for name, layer in linears(block.module).items():
            if isinstance(layer, CompressedLinear) and not layer.scheme.plain:
                full = f"{block.name}.{name}"
                entry.digests[full] = layer.sha256()
                entry.schemes[full] = layer.scheme.to_json()
        entry.caches = cache_records(block.name, block.module)
        return entry

    def _describe(self) -> None:
        """The tensors outside of the blocks, and everything besides the shards."""
        manifest, folder, format_ = self.manifest, self.manifest.folder, self.run.format
        with self.run.phase("save"):
            tensors = outside_tensors(self.opened, self.run.storage)
            manifest.shards[OUTSIDE] = _entry(folder / self._file(None), tensors)
            schemes = manifest.schemes_of(self.opened)
            ignore = dense_linear_names(self.opened, set(schemes))
            stated = stated_scheme(self.opened.model, manifest.caches, format_)
            config = format_.config(schemes, ignore, __version__, stated)
            sizes = sum(entry.size_bytes for entry in manifest.shards.values())
            names = {entry.file: entry.names for entry in manifest.shards.values()}
            own = manifest.caches if stated is None else {}
            write_description(self.opened, folder, names, sizes, config, self.run.storage, own)
            write_text(folder / "recipe.yaml", self.recipe)
            manifest.training, manifest.complete = self.run.training, True
            manifest.reached = manifest.begun = None
            self._write()

    def _write(self) -> None:
        """The manifest, with the costs so far."""
        self.manifest.costs = {name: asdict(cost) for name, cost in self.run.costs.items()}
        self.manifest.write()

    def _folder(self, segment: int) -> Path:
        """The folder of a snapshot."""
        return self.manifest.folder / WORK / SEGMENTS / str(segment)

    def _file(self, block: Block | None) -> str:
        """The name of the file of a block, or of what is outside of them."""
        return shard_name(1 if block is None else block.index + 2, len(self.opened.blocks) + 1)


def _entry(path: Path, tensors: dict[str, Tensor]) -> ShardEntry:
    """Write a shard; its entry in the manifest."""
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    return ShardEntry(path.name, write_shard(path, tensors), list(tensors), size)
