"""What is in a checkpoint of any program: its modules with their grids, groups, bits and bytes, from headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os.path import expanduser
from pathlib import Path
from typing import Any

from torch import nn

from compress.checkpoint.containers.safetensors import Header
from compress.checkpoint.formats import format_of
from compress.checkpoint.formats.native import Native
from compress.checkpoint.load import load
from compress.checkpoint.recognize import Recognized, recognize
from compress.checkpoint.sources.files import stated_quantization
from compress.checkpoint.sources.gguf_parts import gguf_of, open_parts, parts_of
from compress.checkpoint.sources.stored import Place, read_stored, stored_in, stored_tensors
from compress.checkpoint.sources.untrusted import check_folder, read_json
from compress.errors import CannotRun, ModelError, call_foreign, one_line
from compress.layers.linear import CompressedLinear, kind_of
from compress.layers.scheme import LayerScheme
from compress.models.caches.base import CONFIG_KEY, read_policy


@dataclass(frozen=True)
class Module:
    """A module of a checkpoint, or, of `groups`, all alike.

    stored_as: grid and parts in words. shape: (out, in), None if unknown. weights: their number. dtypes: of its
    tensors. size_bytes: of its tensors without the bias. zeros: the share of zeros, None if it was not asked for.
    """

    name: str
    stored_as: str
    grid: str
    shape: tuple[int, ...] | None
    group_size: int | str | None
    parts: tuple[str, ...]
    dtypes: tuple[str, ...]
    weights: int
    size_bytes: int
    zeros: float | None = None
    count: int = 1

    @property
    def bits_per_weight(self) -> float:
        """Bits of storage per weight."""
        return self.size_bytes * 8 / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class Inspection:
    """A checkpoint. method: its format in words. files: bytes by file. modules: in the order of the files."""

    source: str
    method: str
    files: dict[str, int]
    modules: list[Module]
    notes: list[str] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors but biases of modules with weights."""
        return sum(module.size_bytes for module in self.modules)

    @property
    def weights(self) -> int:
        """The number of all weights."""
        return sum(module.weights for module in self.modules)

    @property
    def bits_per_weight(self) -> float:
        """Bits of storage per weight."""
        return self.size_bytes * 8 / max(1, self.weights)

    def groups(self) -> list[Module]:
        """Return the modules by kind: those that differ in the numbers of their names only."""
        modules_by_kind: dict[Any, list[Module]] = {}
        for module in self.modules:
            kind = replace(module, name=kind_of(module.name), zeros=None)
            modules_by_kind.setdefault(kind, []).append(module)
        summaries = []
        for kind, members in modules_by_kind.items():
            zeros = [m.zeros for m in members if m.zeros is not None]
            weights, size = sum(m.weights for m in members), sum(m.size_bytes for m in members)
            share = sum(zeros) / len(zeros) if zeros else None
            summaries.append(replace(kind, weights=weights, size_bytes=size, zeros=share, count=len(members)))
        return summaries

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        modules = [{**asdict(m), "bits_per_weight": round(m.bits_per_weight, 4)} for m in self.modules]
        totals = {"weights": self.weights, "bytes": self.size_bytes, "file_bytes": sum(self.files.values())}
        shown = {"source": self.source, "method": self.method, "files": self.files, "modules": modules}
        return {**shown, "totals": {**totals, "bits_per_weight": round(self.bits_per_weight, 4)}, "notes": self.notes}


def inspect(source: str | Path, values: bool = False) -> Inspection:
    """Describe a folder with safetensors files, one such file, or a .gguf file, quantized by any program or dense.

    values: also read the weights, to count zeros. Raises ModelError.
    """
    path = Path(expanduser(source))
    if (file := gguf_of(path)) is not None:
        return _inspect_gguf(file)
    if path.is_file() and path.suffix == ".safetensors":
        return _inspect_files(str(source), path.parent, {}, stored_in(path), values)
    if not path.is_dir():
        raise ModelError(f"model: no folder {source}; use a local folder, a .safetensors file, or a .gguf file")
    check_folder(path)
    try:
        config = read_json(path / "config.json") if (path / "config.json").exists() else {}
    except ValueError as error:
        raise ModelError(f"model: {path / 'config.json'} cannot be read: {error}") from error
    gguf = sorted(path.glob("*.gguf"))
    if gguf and not any(path.glob("*.safetensors")):
        return _inspect_gguf(gguf[0])
    return _inspect_files(str(source), path, config, stored_tensors(path), values)


def _inspect_files(
    source: str, folder: Path, config: Mapping[str, Any], stored: Mapping[str, Place], values: bool
) -> Inspection:
    quantization = stated_quantization(config, folder)
    stated = quantization if isinstance(quantization, dict) else {}
    schemes = _own_schemes(stated, folder)
    format_ = format_of(stated.get("quant_method"))
    stacked = {} if format_ is None else format_.stacked
    modules: dict[str, dict[str, Header]] = {}
    for name in sorted(stored, key=_natural):
        module, leaf = _split(name, stacked)
        modules.setdefault(module, {})[leaf] = stored[name].header
    inspected = [_module(n, tensors, _settings(stated, n), schemes.get(n)) for n, tensors in modules.items()]
    zeros, notes = _zeros(folder, inspected, stored, stated) if values else ({}, [])
    inspected = [replace(module, zeros=zeros.get(module.name)) for module in inspected]
    files = {path.name: path.stat().st_size for path in sorted({place.path for place in stored.values()})}
    return Inspection(source, _method(stated), files, inspected, [*_cache_notes(config, folder), *notes])


def _settings(stated: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a `quantization_config` with the entry of a module, as MLX has them."""
    settings = stated.get(name)
    return {**stated, **settings} if isinstance(settings, dict) else stated


def _cache_notes(config: Mapping[str, Any], folder: Path) -> list[str]:
    """The cache policies that compress stated, with the number of their attention modules."""
    try:
        texts = Counter(read_policy(values).text for values in (config.get(CONFIG_KEY) or {}).values())
    except (ValueError, AttributeError) as error:
        raise ModelError(f"model: {folder / 'config.json'}: {CONFIG_KEY} cannot be read ({error})") from error
    return [f"KV cache of {count} attention modules: {text}" for text, count in texts.items()]


def _method(config: Mapping[str, Any]) -> str:
    method, layout = config.get("quant_method"), config.get("format") or config.get("checkpoint_format")
    if method is None:
        return "not quantized" if not config else "a quantization_config without quant_method"
    remark = " (format native of compress)" if method == Native.quant_method else ""
    return f"{method}{remark}" + (f", {layout}" if isinstance(layout, str) else "")


def _own_schemes(config: Mapping[str, Any], folder: Path) -> dict[str, LayerScheme]:
    """The schemes that format native states. Raises ModelError."""
    if config.get("quant_method") != Native.quant_method:
        return {}
    try:
        return Native().schemes(config, {}, {})
    except ValueError as error:
        raise ModelError(f"model: {folder / 'config.json'}: quantization_config cannot be read ({error})") from error


def _split(name: str, stacked: Mapping[str, str]) -> tuple[str, str]:
    """Return the module of a tensor, and the tensor's name inside of it; bitsandbytes has names such as weight.absmax.

    Args:
        stacked: as of `Format`.
    """
    end = next((end for end in stacked if name.endswith(end)), None)
    if end is not None:
        return name.removesuffix(end), stacked[end]
    if ".weight." in name:
        module, _, leaf = name.partition(".weight.")
        return module, f"weight.{leaf}"
    module, _, leaf = name.rpartition(".")
    return module or name, leaf


def _natural(name: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _module(name: str, tensors: Mapping[str, Header], config: Mapping[str, Any], scheme: LayerScheme | None) -> Module:
    bias = [header for leaf, header in tensors.items() if leaf == "bias" and len(tensors) > 1]
    headers = {leaf: header for leaf, header in tensors.items() if not (leaf == "bias" and bias)}
    size, dtypes = sum(h.size_bytes for h in headers.values()), tuple(sorted({h.dtype for h in headers.values()}))
    if scheme is not None:
        codes = scheme.all_codes[0] if scheme.all_codes else None
        grid = scheme.grids[0].name if scheme.grids else "dense"
        kinds = tuple(component.kind for component in (*scheme.parts, *scheme.transforms))
        groups = codes.group_size if codes is not None else next((p.scale_groups for p in scheme.parts), None)
        text = ", ".join([scheme.text, *(t.text for t in scheme.transforms)])
        return Module(name, text, grid, scheme.shape, groups, kinds, dtypes, scheme.shape[0] * scheme.shape[1], size)
    recognized: Recognized = recognize(headers, config)
    group = "" if recognized.group_size is None else f", group {recognized.group_size}"
    extra = "".join(f", {part}" for part in recognized.parts[1:])
    text = f"{recognized.grid}{group}{extra}"
    return Module(
        name,
        text,
        recognized.grid,
        recognized.shape,
        recognized.group_size,
        recognized.parts,
        dtypes,
        recognized.count,
        size,
    )


def _zeros(
    folder: Path, modules: list[Module], stored: Mapping[str, Place], config: Mapping[str, Any]
) -> tuple[dict[str, float], list[str]]:
    """Return the share of zeros by module, and notes. Layers of formats that compress cannot decode have no share."""
    shares: dict[str, float] = {}
    for module in modules:
        place = stored.get(f"{module.name}.weight")
        if module.grid == "dense" and place is not None:
            weight = read_stored(place)
            shares[module.name] = 1 - int(weight.count_nonzero()) / max(1, weight.numel())
    coded = [module for module in modules if module.grid != "dense"]
    if not coded or not (folder / "config.json").exists():
        return shares, []
    if format_of(config.get("quant_method")) is None:
        return shares, [f"the zeros of layers quantized by {config.get('quant_method')!r} cannot be counted"]
    return shares | _coded_zeros(load(folder)[0]), []


def _coded_zeros(model: nn.Module) -> dict[str, float]:
    layers = {n: m for n, m in model.named_modules() if isinstance(m, CompressedLinear)}
    return {n: 1 - int(m.weight.count_nonzero()) / (m.shape[0] * m.shape[1]) for n, m in layers.items()}


def _inspect_gguf(path: Path) -> Inspection:
    try:
        import gguf  # noqa: F401  an optional dependency
    except ImportError as error:
        raise ModelError(f"model: {path} needs the package gguf; install the extra: compress-llm[gguf]") from error
    parts = parts_of(path)
    try:
        stated, modules = call_foreign(_gguf_modules, parts)
    except CannotRun as error:
        raise ModelError(
            f"model: {path} is truncated or not a GGUF file ({one_line(error.cause)}); fetch it again"
        ) from error
    return Inspection(str(path), f"GGUF{stated}", {part.name: part.stat().st_size for part in parts}, modules)


def _gguf_modules(paths: Sequence[Path]) -> tuple[str, list[Module]]:
    """Return the architecture, as an addition to a title, and the tensors of a GGUF file."""
    from gguf import GGML_QUANT_SIZES

    readers = open_parts(paths)
    architecture = readers[0].get_field("general.architecture")
    modules = []
    for tensor in (tensor for reader in readers for tensor in reader.tensors):
        block, _ = GGML_QUANT_SIZES[tensor.tensor_type]
        kind, shape = tensor.tensor_type.name, tuple(int(n) for n in reversed(tensor.shape))
        group, weights = (block if block > 1 else None), int(tensor.n_elements)
        grid = kind if block > 1 else "dense"
        text = f"{kind}, blocks of {block}" if block > 1 else "dense"
        name = tensor.name.removesuffix(".weight")
        parts = ("codes",) if block > 1 else ("dense",)
        modules.append(Module(name, text, grid, shape, group, parts, (kind,), weights, int(tensor.n_bytes)))
    return "" if architecture is None else f", architecture {architecture.contents()}", modules
