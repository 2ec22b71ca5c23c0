"""The growing checkpoint: its manifest, its shards, and the resumption of a killed run.

The last segment of a run writes each finished block as a shard of the checkpoint. Earlier segments write snapshots to
`.compress/segments/`; only the last complete snapshot and the unfinished one are kept.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.blockwise.quantized_embeddings import embeddings_of, quantize_embeddings
from compress.checkpoint.codec import FormatCodec, Outside, ShardEntry, layer_schemes
from compress.checkpoint.containers.digests import MANIFEST, SUMS, WORK
from compress.checkpoint.containers.files import write_text
from compress.checkpoint.containers.safetensors import INDEX
from compress.checkpoint.exact import ExactCodec, restore_exact
from compress.checkpoint.opened import OpenModel, Weights
from compress.checkpoint.writer import OUTSIDE, CheckpointWriter, write_probe
from compress.errors import OutputError
from compress.layers.scheme import LayerScheme
from compress.models.kinds.batch import Batch
from compress.models.structure.blocks import Block
from compress.models.structure.ends import compressed_ends
from compress.passes.contract.context import Run
from compress.passes.contract.journal import JournalEntry
from compress.passes.contract.passes import Step
from compress.passes.contract.records import LayerResult, PhaseCost
from compress.pipeline.engine import Segment
from compress.pipeline.lock import LOCK
from compress.pipeline.output import (
    STAGED,
    UNRELATED,
    check_files,
    check_folder,
    listed_files,
    move_staged,
    remove_files,
    staged_sizes,
    staging_folder,
)
from compress.pipeline.provenance import changed_code, changed_inputs
from compress.pipeline.resolve import update_targets
from compress.pipeline.restore import restore_block
from compress.pipeline.snapshot import Snapshot, read_snapshot

SEGMENTS = "segments"
PROBE_FILE = "probe.safetensors"


@dataclass
class Manifest:
    """The content of an output folder; it is written atomically after every shard.

    fingerprint: a digest of everything that determines the checkpoint's bytes. complete: the checkpoint is complete.
    training: the report's records of training passes. reached: the last complete snapshot. begun: the unfinished
    snapshot of the next segment. code: digests of the code of the run (`provenance.code_of`). files: the size of every
    file that the run has put into the folder, or is about to, by name. inputs: the other inputs of the fingerprint.
    formats: the record of each further format that is complete and verified, as plain values of a `FormatResult`.
    """

    folder: Path
    fingerprint: str
    shards: dict[str, ShardEntry] = field(default_factory=dict)
    costs: dict[str, Any] = field(default_factory=dict)
    complete: bool = False
    training: dict[str, Any] = field(default_factory=dict)
    reached: Snapshot | None = None
    begun: Snapshot | None = None
    code: dict[str, str] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    formats: dict[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """A digest of what a start of the run continues with; the files of a shared folder may be seen late."""
        values = vars(self) | {"folder": "", "costs": {}}
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=vars).encode()).hexdigest()

    @property
    def path(self) -> Path:
        """Where the manifest is."""
        return self.folder / WORK / MANIFEST

    def schemes_of(self, opened: OpenModel) -> dict[str, LayerScheme]:
        """The storage scheme of every compressed layer, in the order of the model."""
        return layer_schemes(self.shards, opened)

    def damaged(self) -> list[str]:
        """The files of a complete checkpoint that are missing or changed."""
        entries = {entry.file: entry for entry in self.shards.values()}
        changed = [name for name, entry in entries.items() if not entry.is_unchanged(self.folder)]
        required = [f"{WORK}/{PROBE_FILE}", "config.json", SUMS]
        required += [INDEX] if any(name.endswith(".safetensors") for name in entries) else []
        return changed + [name for name in required if not (self.folder / name).exists()]

    def write(self) -> None:
        """Write atomically, without copies of the values and without indents: every block writes all of it again."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(vars(self) | {"folder": "."}, default=vars) + "\n")

    @property
    def staged(self) -> Path:
        """The folder for files that `publish` puts into the output folder; it is created."""
        return staging_folder(self.folder)

    def publish(self) -> None:
        """Move the files of `staged` into the output folder, after the manifest lists them.

        Raises OutputError for a name that a file of the user has.
        """
        sizes = staged_sizes(self.folder, self.files)
        self.files |= sizes
        self.write()
        move_staged(self.folder, sizes)


def open_folder(
    folder: Path,
    fingerprint: str,
    overwrite: bool,
    code: Mapping[str, str] | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Manifest:
    """Return the manifest of an output folder: a new one, or the one of an earlier start of the same run.

    Args:
        fingerprint: The fingerprint of the run.
        overwrite: Whether to replace another run in the folder.
        code: The digests of the run's code; if they differ, the error says which.
        inputs: The other inputs of the fingerprint (`provenance.inputs_of`); the error says which differ.

    Raises:
        OutputError: The folder cannot be created or contains files of no run, or it contains another run and
            `overwrite` is false or its files look like the user's (`listed_files`, `remove_files`).
    """
    path = folder / WORK / MANIFEST
    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        nothing = all(child.name in UNRELATED for child in folder.iterdir())  # empty, or no block is finished
    except OSError as error:
        raise OutputError(f"{folder}: cannot be created or read ({error.strerror}); choose another folder") from error
    manifest = _read(path, folder) if path.exists() else None
    new = Manifest(folder, fingerprint, code=dict(code or {}), inputs=dict(inputs or {}))
    if manifest is not None and manifest.fingerprint == fingerprint:
        return manifest
    if nothing and manifest is None:
        return new
    if not overwrite:
        changes = [] if manifest is None else [changed_inputs(manifest.inputs, new.inputs)]
        changes += [] if manifest is None else [changed_code(manifest.code, new.code)]
        reason = "; ".join(filter(None, changes)) or "its recipe, model, calibration text or version differs"
        raise OutputError(f"{folder}: contains another run ({reason}); choose another folder, or overwrite it")
    remove_files(folder, listed_files(folder))
    for child in sorted((folder / WORK).iterdir(), key=lambda child: child == path):  # the manifest last
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        elif child.name != LOCK:  # the lock of this run
            child.unlink()
    if not any((folder / WORK).iterdir()):
        (folder / WORK).rmdir()
    return new


def recorded_inputs(folder: Path) -> Mapping[str, Any]:
    """Return the inputs of the run in a folder (`provenance.inputs_of`); empty if it holds none that can be read."""
    path = folder / WORK / MANIFEST
    manifest = _read(path, folder) if path.exists() else None
    return {} if manifest is None else manifest.inputs


def is_complete(folder: Path) -> bool:
    """Return whether a folder has a complete checkpoint of a run, of which no file is missing or changed."""
    path = folder / WORK / MANIFEST
    manifest = _read(path, folder) if path.exists() else None
    return manifest is not None and manifest.complete and not manifest.damaged()


def _read(path: Path, folder: Path) -> Manifest | None:
    """Return the manifest in a file; None if it is damaged or of another version, and so of another run."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    try:
        return _from_json(values, folder)
    except (KeyError, TypeError, AttributeError):
        return None


def _from_json(values: Any, folder: Path) -> Manifest:
    """Return the manifest of JSON values. Raises TypeError, KeyError or AttributeError for those of another version."""
    shards = {name: ShardEntry(**entry) for name, entry in values.pop("shards").items()}
    snapshots = {name: values[name] and Snapshot.from_json(values[name]) for name in ("reached", "begun")}
    files = check_files(values["files"], folder)
    return Manifest(**{**values, **snapshots, "folder": folder, "shards": shards, "files": files})


@dataclass
class Shards:
    """The sink of `run`: it writes a shard per finished block, snapshots between segments, and other files at the end.

    probe: a sequence; its logits are stored for the comparison after reloading. recipe: the files that state the
    recipe, by name. loads_in: the dtype of computation that the checkpoint states. accept: raises an error for the name
    of a block and the final schemes of its linears, by full name, that must not be written. Of several processes, rank
    0 writes, and every one restores; all wait for each other at the end of a segment.
    """

    opened: OpenModel
    run: Run
    steps: Sequence[Step]
    manifest: Manifest
    probe: Batch
    recipe: Mapping[str, str]
    loads_in: torch.dtype = torch.float32
    accept: Callable[[str, Mapping[str, LayerScheme]], None] | None = None
    _began: int = field(init=False)
    _noted: int = field(init=False)
    _begun: Snapshot = field(init=False)
    _earlier: dict[str, list[dict[str, Any]]] = field(init=False, default_factory=dict)
    _writer: CheckpointWriter = field(init=False)

    def __post_init__(self) -> None:
        self._began = len(self.run.journal.entries)
        run, manifest = self.run, self.manifest
        codec = FormatCodec(run.format, run.storage, run.sparse, self.accept, run.weights_folder)
        staging, publish = manifest.folder / WORK / STAGED, manifest.publish
        self._writer = CheckpointWriter(self.opened, codec, manifest.folder, staging, manifest.shards, publish)

    @property
    def first(self) -> bool:
        """Whether this process writes."""
        return self.run.processes.first

    def start(self, segments: Sequence[Segment]) -> int:
        """Resume from the files of an earlier start of the same run, and write the manifest."""
        manifest, at = self.manifest, 0
        self.run.costs.update({name: PhaseCost(**cost) for name, cost in manifest.costs.items()})
        reached = manifest.reached
        if reached is not None and reached.is_intact(self._folder(reached.segment)):
            at = reached.segment + 1
            self._resume_from(reached, segments[at].first_step)
        elif len(segments) > 1 or not segments[0].swept:
            for block in self.opened.blocks:
                self.opened.bring(block)
            self.opened.weights = Weights(reading=self.opened.weights.reading)
        self._begin(at, segments[at].last)
        if self.first:
            shutil.rmtree(manifest.staged)  # what a killed run had not finished
            manifest.write()
        return at

    def restore(self, segment: Segment, block: Block) -> bool:
        """Restore a block that a killed run had finished, from its shard or from a snapshot."""
        opened, run = self.opened, self.run
        if segment.last:
            entry = self.manifest.shards.get(block.name)
            targets = {name for _, _, names in self.steps for name in names}
            folder = self.manifest.folder
            if entry is None or not restore_block(block, entry, folder, targets, run.format, opened):
                return False
        else:
            entry = self._begun.parts.get(block.name)
            if entry is None or not restore_exact(self._folder(segment.index), entry, block.module, opened.device):
                return False
            self._earlier.setdefault(block.name, []).extend(entry.results)
        run.journal.entries[self._noted :] = [JournalEntry(**values) for values in entry.journal]
        self._noted = len(run.journal.entries)
        return True

    def done(self, segment: Segment, block: Block, results: list[LayerResult]) -> None:
        """Write a finished block, then notify the journal's listeners."""
        if not self.first:
            return
        journal, records = self.run.journal, [asdict(result) for result in results]
        with self.run.phase("save"):
            notes = [asdict(entry) for entry in journal.entries[self._noted :]]
            entry = (self._writer if segment.last else self._snapshot_writer(segment)).add(block)
            entry.results, entry.journal = records, notes
            if segment.last:
                entry.results = self._earlier.pop(block.name, []) + records
            else:
                self._earlier.setdefault(block.name, []).extend(records)
            self._noted = len(journal.entries)
            self._write()
        figures = {"block": block.index, "blocks": len(self.opened.blocks), "segment": segment.index}
        journal.add("block", "save", block.name, **figures)

    def close(self, segment: Segment, logits: Callable[[], Tensor], ends: list[LayerResult]) -> None:
        """Write the tensors outside of blocks and the manifest, and remove the previous snapshot."""
        folder, label = self.manifest.folder, segment.steps[-1][0]
        quantize_embeddings(self.opened, self.run, self.steps)
        self._earlier.setdefault(OUTSIDE, []).extend(asdict(result) for result in ends)
        if self.first and segment.last:
            write_probe(folder / WORK / PROBE_FILE, self.probe.tensors(), logits())
        elif self.first:
            self._complete_snapshot(segment)
        self.run.processes.wait()  # all processes have read the previous snapshot
        if not segment.last:
            self._begin(segment.index + 1, segment.index + 2 == segment.count)
        if self.first and segment.last:
            self._describe()
            for name in ("passes", SEGMENTS):
                shutil.rmtree(folder / WORK / name, ignore_errors=True)
        elif self.first:
            shutil.rmtree(self._folder(segment.index - 1), ignore_errors=True)
            self.run.journal.add("segment", "save", label, segment=segment.index, segments=segment.count)

    def _begin(self, index: int, is_last: bool) -> None:
        """Begin a segment. Its journal entries are stored per block; the last segment also stores earlier entries."""
        begun = self.manifest.begun
        self._begun = begun if begun is not None and begun.segment == index else Snapshot(index)
        self.manifest.begun = None if is_last else self._begun
        self._noted = self._began if is_last else len(self.run.journal.entries)

    def _resume_from(self, reached: Snapshot, first_step: int) -> None:
        """Restore the model from a snapshot. first_step: the number of the first pass after it."""
        with self.run.phase("restore"):
            if read_snapshot(reached, self._folder(reached.segment), self.opened):
                update_targets(self.steps, self.opened, self.run.format, first_step)
        self._earlier = {name: list(results) for name, results in reached.results.items()}
        self.run.training.update(self.manifest.training)
        self.run.journal.entries += [JournalEntry(**values) for values in reached.journal]

    def _complete_snapshot(self, segment: Segment) -> None:
        with self.run.phase("save"):
            begun, config = self._begun, self.opened.config.to_dict()
            self._snapshot_writer(segment).add_outside(self._outside())
            begun.results = {name: list(results) for name, results in self._earlier.items()}
            begun.config, begun.complete = config, True
            begun.journal = [asdict(entry) for entry in self.run.journal.entries[self._began :]]
            self.manifest.reached, self.manifest.begun = begun, None
            self.manifest.training = self.run.training
            self._write()

    def _describe(self) -> None:
        """Write the tensors outside of the blocks, the configuration, the recipe and the final manifest."""
        manifest, run = self.manifest, self.run
        with run.phase("save"):
            replaced = self._writer.close(run.format, self._outside(), self.loads_in, self.recipe)
            manifest.shards[OUTSIDE].results = self._earlier.pop(OUTSIDE, [])
            manifest.training, manifest.complete = run.training, True
            manifest.reached = manifest.begun = None
            self._write()
            for name in replaced:
                (manifest.folder / name).unlink()

    def _outside(self) -> Outside:
        """Return the embedding, the LM head and the codes of those that the format quantizes."""
        return Outside(embeddings_of(self.opened), compressed_ends(self.opened.model), self.run.ends)

    def _snapshot_writer(self, segment: Segment) -> CheckpointWriter:
        """Return the writer of the snapshot after a segment."""
        folder = self._folder(segment.index)
        return CheckpointWriter(self.opened, ExactCodec(), folder, folder, self._begun.parts)

    def _write(self) -> None:
        """Write the manifest with the costs so far, and publish what is staged."""
        self.manifest.costs = {name: asdict(cost) for name, cost in self.run.costs.items()}
        self.manifest.publish()

    def _folder(self, segment: int) -> Path:
        """The folder of the snapshot of a segment."""
        return self.manifest.folder / WORK / SEGMENTS / str(segment)
