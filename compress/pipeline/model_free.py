"""Quantize the tensors of a folder by rounding to nearest, without the class of the model and without data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.containers.files import user_path
from compress.checkpoint.containers.safetensors import Header
from compress.checkpoint.formats import FORMATS
from compress.checkpoint.layers import check_finite
from compress.checkpoint.save import dense_names
from compress.checkpoint.sources.stored import read_stored, stored_tensors
from compress.checkpoint.sources.tensor_roles import WEIGHT
from compress.checkpoint.tensor_folder import TensorFolder
from compress.checkpoint.writer import TensorWriter
from compress.errors import ModelError, RecipeError, VerificationError
from compress.layers.linear import CompressedLinear
from compress.layers.names import kind_of
from compress.layers.scheme import LayerScheme
from compress.models.computation import device_of
from compress.passes.contract.facts import Log
from compress.passes.contract.journal import Journal
from compress.passes.quantize.rtn import RTN
from compress.pipeline.export import check_new_folder, new_folder
from compress.pipeline.output import check_space
from compress.pipeline.tensor_plan import TensorPlan, rounding_of
from compress.recipe.presets import preset, presets
from compress.recipe.starts import quantize_line
from compress.recipe.tables import ResultTable, Shown, megabytes
from compress.report.card import ModelFreeFacts, write_model_free_card
from compress.version import __version__

FORMAT = "compressed-tensors"
TABLE, HEAD = "embedding", "LM head"
"""Roles of the ends of a model."""
IGNORED = "left out by the patterns"


@dataclass(frozen=True)
class QuantizedTensors:
    """Linears of one kind: names that differ only in numbers, equal shapes and schemes. size_bytes: of all of them."""

    name: str
    shape: tuple[int, int]
    stored_as: str
    count: int
    size_bytes: int


@dataclass(frozen=True, repr=False)
class FolderResult(Shown):
    """The result of `quantize_folder`.

    Attributes:
        folder: The output folder.
        scheme: The scheme, or the grid of `bits`.
        source_bytes: Bytes of the tensors of the source.
        tensor_bytes: Bytes of the written tensors.
        layers: The quantized linears by kind.
        unchanged: Other matrices that were copied, by kind: (reason, number).
        notes: Groups of weights that became zero.
    """

    folder: Path
    scheme: str
    source_bytes: int
    tensor_bytes: int
    layers: tuple[QuantizedTensors, ...]
    unchanged: dict[str, tuple[str, int]]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values; the folder is left out."""
        values = asdict(self)
        del values["folder"]
        return values

    def tables(self) -> list[ResultTable]:
        """Return the quantized linears, and the matrices that were copied."""
        title = f"{self.folder}: {megabytes(self.source_bytes)} MB -> {megabytes(self.tensor_bytes)} MB of tensors"
        rows = [
            (row.name, f"{row.count}", f"{row.shape[0]} x {row.shape[1]}", row.stored_as, megabytes(row.size_bytes))
            for row in self.layers
        ]
        copied = [(name, f"{count}", reason) for name, (reason, count) in self.unchanged.items()]
        return [
            ResultTable(title, ("quantized", "count", "out x in", "stored as", "MB"), rows),
            ResultTable("", ("unchanged", "count", "because it is"), copied),
        ]


def quantize_folder(
    source: str | Path,
    scheme: str | None = None,
    out: str | Path | None = None,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    targets: Sequence[str] = ("*",),
    ignore: Sequence[str] = (),
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> FolderResult:
    """Quantize the weights of a folder by rounding to nearest, tensor by tensor, without the class of its model.

    Works for architectures that transformers does not know. No model is built, no text is read and nothing is run, so
    that the quality is not known. The output is in format compressed-tensors.

    Quantized are the matrices `*.weight` in 16 or 32 bits, but for embeddings, LM head, norms and routers, which are
    recognized by their names and by the size of the vocabulary in config.json. All others are copied unchanged, stacks
    of experts among them.

    Args:
        source: Local folder with safetensors files and config.json, or hub id.
        scheme: A name of `compress schemes` whose grid needs no data, such as 'FP8-dynamic'.
        out: Output folder, new or empty; by default a folder of out/ with the names of the model and the scheme.
        bits: In place of a scheme: integers of so many bits, 2 to 8.
        group_size: With `bits`: the number of weights that share a scale.
        targets: Patterns of the linears to quantize, as of passes.
        ignore: Patterns of linears that are left unchanged.
        device: Device that computes codes.
        progress: Is called with (number of written tensors, number of tensors of the source) after every tensor.

    Returns:
        What was quantized and what was copied.

    Raises:
        RecipeError: for a scheme that needs data, with those that do not; for both a scheme and bits or none of them.
        ModelError: for a folder that cannot be read, or that is quantized already, and for weights that are not finite.
        TargetError: for weights that the scheme does not fit.
        OutputError: for an output folder that is not empty.
        VerificationError: if codes read back differently.
    """
    source, name = str(source), scheme or f"int{bits}"
    data, default = quantize_line(source, scheme, bits, group_size)
    step = _rounding(data, scheme)
    step = type(step).model_validate(step.model_dump(exclude_unset=True) | {"targets": targets, "ignore": ignore})
    target = default if out is None else user_path(out)
    check_new_folder(target)
    folder, format_ = TensorFolder.open(source), FORMATS[FORMAT]
    plan = TensorPlan.of(step, folder.roles, format_)
    work = _Work(folder, plan, _headers(folder, plan), device_of(device), progress)
    check_space(target, work.tensor_bytes)
    with new_folder(target) as part:
        work.write(part)
        work.verify(part, target)
        result = work.result(target, name)
        facts = ModelFreeFacts(source, f"{name}, rounded to nearest", result.tables(), format_.name)
        write_model_free_card(part, facts)
    return result


def data_free_schemes() -> list[str]:
    """Return the names of the schemes whose grid needs no data."""
    names = []
    for name, candidate in presets().items():
        try:
            rounding_of(candidate.passes, candidate.save)
        except RecipeError:
            continue
        names.append(name)
    return names


def _rounding(data: Mapping[str, Any], scheme: str | None) -> RTN:
    """Return the pass of a recipe of one line. Raises RecipeError for a scheme that needs data."""
    try:
        return rounding_of(data["passes"] if scheme is None else preset(scheme).passes, data.get("save", {}))
    except RecipeError as error:
        works = ", ".join(data_free_schemes())
        raise RecipeError(f"scheme {scheme}: without a model it cannot be used: {error}; use one of {works}") from error


def _module(name: str, plan: TensorPlan) -> str | None:
    """Return the module of a tensor that is quantized; None for one that is copied."""
    module = name.removesuffix(WEIGHT)
    return module if module != name and module in plan.steps else None


def _headers(folder: TensorFolder, plan: TensorPlan) -> dict[Path, dict[str, Header]]:
    """Return dtype and shape of the tensors that each file becomes. Raises ModelError for a name that is taken."""
    headers_by_file: dict[Path, dict[str, Header]] = {}
    for path in folder.files:
        headers = headers_by_file.setdefault(path, {})
        for name in folder.names_in(path):
            module = _module(name, plan)
            stored = {name: folder.places[name].header} if module is None else plan.headers(module)
            if clash := [key for key in stored if key in headers or (key != name and key in folder.places)]:
                raise ModelError(f"model: {folder.folder} holds {clash[0]}, which codes are stored as; remove it")
            headers |= stored
    return headers_by_file


@dataclass(frozen=True)
class _Work:
    """The writing of one folder; one tensor is in memory at a time.

    Attributes:
        folder: The source.
        plan: The quantized linears.
        headers: Dtype and shape of the tensors that each file becomes.
        device: Where codes are computed.
        progress: Is called with (number of written tensors, number of tensors).
        journal: Receives notes.
        schemes: The scheme of each written linear, and its sha256.
        absmax: The largest magnitude of linears that share a factor of their scales.
    """

    folder: TensorFolder
    plan: TensorPlan
    headers: dict[Path, dict[str, Header]]
    device: torch.device
    progress: Callable[[int, int], None] | None = None
    journal: Journal = field(default_factory=Journal)
    schemes: dict[str, tuple[LayerScheme, str]] = field(default_factory=dict)
    absmax: dict[tuple[str, ...], float] = field(default_factory=dict)

    @property
    def tensor_bytes(self) -> int:
        """The bytes of the written tensors."""
        return sum(header.size_bytes for headers in self.headers.values() for header in headers.values())

    def write(self, part: Path) -> None:
        """Write all files of the checkpoint but the card."""
        writer = TensorWriter(part)
        done = count(1)
        for number, (path, headers) in enumerate(self.headers.items(), 1):
            writer.add(number, len(self.headers), headers, self._tensors(path, done))
        shapes = {name: header.shape for headers in self.headers.values() for name, header in headers.items()}
        tables = {name.removesuffix(WEIGHT) for name, role in self.folder.roles.unchanged.items() if role == TABLE}
        dense = dense_names(self._tied_head(), shapes, self.schemes.keys() | tables)
        stated = {name: scheme for name, (scheme, _) in self.schemes.items()}
        quantization = self.plan.format.config(stated, dense, __version__)
        config = self.folder.config | {"quantization_config": quantization}
        writer.close(config, self.folder.copied(), self.plan.format.files(quantization))

    def verify(self, part: Path, folder: Path) -> None:
        """Read the codes of every linear back. Raises VerificationError if one differs."""
        places = stored_tensors(part)
        for name, (scheme, digest) in self.schemes.items():
            keys = [key for key in self.plan.headers(name) if key in places]
            tensors = {key.removeprefix(f"{name}."): read_stored(places[key]) for key in keys}
            layer = CompressedLinear(torch.empty(scheme.shape, device="meta"), None)
            layer.read(*self.plan.format.read(tensors, scheme))
            if layer.sha256() != digest:
                raise VerificationError(f"{folder}: {name} differs after reading it back")

    def result(self, folder: Path, scheme: str) -> FolderResult:
        """Return the result."""
        kinds: dict[tuple[str, tuple[int, int], str], list[int]] = {}
        for name, (stored, _) in self.schemes.items():
            size = sum(header.size_bytes for header in self.plan.headers(name).values())
            kinds.setdefault((kind_of(name), stored.shape, stored.text), []).append(size)
        layers = [QuantizedTensors(*kind, len(sizes), sum(sizes)) for kind, sizes in kinds.items()]
        reasons = self.folder.roles.unchanged | {f"{name}{WEIGHT}": IGNORED for name in self.plan.skipped}
        counts = Counter((kind_of(name), reason) for name, reason in reasons.items())
        unchanged = {kind: (reason, count) for (kind, reason), count in counts.items()}
        source_bytes = sum(place.header.size_bytes for place in self.folder.places.values())
        notes = [f"{entry.where}: {entry.message}" for entry in self.journal.entries]
        return FolderResult(folder, scheme, source_bytes, self.tensor_bytes, tuple(layers), unchanged, tuple(notes))

    def _tensors(self, path: Path, done: Iterator[int]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that a file becomes, one source tensor after the other.

        done: counts the tensors of all files.
        """
        for name in self.folder.names_in(path):
            tensor, module = self._read(name), _module(name, self.plan)
            if module is None:
                yield name, tensor
            else:
                layer = self.plan.quantized(module, tensor.to(self.device), self._absmax(module), self._log(module))
                self.schemes[module] = layer.scheme, layer.sha256()
                yield from self.plan.tensors(module, layer).items()
            if self.progress is not None:
                self.progress(next(done), len(self.folder.places))

    def _read(self, name: str) -> Tensor:
        """Read a tensor. Raises ModelError for weights that are NaN or infinite."""
        place = self.folder.places[name]
        tensor = read_stored(place)
        check_finite({f"{name} ({place.path})": tensor})
        return tensor

    def _absmax(self, module: str) -> float | None:
        """Return the largest magnitude of the linears that share a factor of their scales with one."""
        members = self.plan.together.get(module)
        if members is None:
            return None
        if members not in self.absmax:
            self.absmax[members] = max(float(self._read(f"{name}{WEIGHT}").abs().max()) for name in members)
        return self.absmax[members]

    def _log(self, name: str) -> Log:
        def log(kind: str, message: str, **figures: Any) -> None:
            self.journal.add(kind, name, message, **figures)

        return log

    def _tied_head(self) -> list[str]:
        """Return the name of an LM head without a weight: tied to the embedding, it is a linear of servers too."""
        stored = any(role == HEAD for role in self.folder.roles.unchanged.values())
        return [] if stored or self.folder.config.get("tie_word_embeddings") is False else ["lm_head"]
