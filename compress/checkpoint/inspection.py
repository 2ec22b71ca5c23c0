"""What is in a checkpoint of any program: its modules with their grids, groups, bits and bytes, from headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os.path import expanduser
from pathlib import Path
from typing import Any

from compress.checkpoint.containers.safetensors import Header
from compress.checkpoint.formats import OWN_METHOD, STACKED
from compress.checkpoint.inspected import Inspection, Module
from compress.checkpoint.recognize import Recognized, recognize
from compress.checkpoint.sources.gguf_parts import check_magic, gguf_of, open_parts, parts_of
from compress.checkpoint.sources.stated import stated_quantization
from compress.checkpoint.sources.untrusted import check_folder, read_json, unread_files
from compress.checkpoint.sources.weight_files import headers_in, in_all_files
from compress.errors import CannotRun, ModelError, call_foreign, one_line
from compress.models.terms import CACHE_KEY


def inspect(source: str | Path, values: bool = False) -> Inspection:
    """Describe a folder with safetensors files, one such file, or a .gguf file, quantized by any program or dense.

    values: also read the weights, to count zeros. Raises ModelError.
    """
    path = Path(expanduser(source))
    if (file := gguf_of(path)) is not None:
        return _inspect_gguf(file)
    if path.is_file() and path.suffix == ".safetensors":
        return _inspect_files(
            str(source), path.parent, {}, {name: (path, h) for name, h in headers_in(path).items()}, values
        )
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
    return _inspect_files(str(source), path, config, in_all_files(path, headers_in), values)


def _inspect_files(
    source: str, folder: Path, config: Mapping[str, Any], stored: Mapping[str, tuple[Path, Header]], values: bool
) -> Inspection:
    quantization = stated_quantization(config, folder)
    stated = quantization if isinstance(quantization, dict) else {}
    method = stated.get("quant_method")
    stacked = STACKED.get(method, {}) if isinstance(method, str) else {}
    modules: dict[str, dict[str, Header]] = {}
    for name in sorted(stored, key=_natural):
        module, leaf = _split(name, stacked)
        modules.setdefault(module, {})[leaf] = stored[name][1]
    inspected = [_recognized(n, tensors, _settings(stated, n)) for n, tensors in modules.items()]
    files = {path.name: path.stat().st_size for path in sorted({path for path, _ in stored.values()})}
    inspection = Inspection(source, _method(stated), files, inspected, unread_files(folder) if config else [])
    if method == OWN_METHOD or config.get(CACHE_KEY):
        from compress.checkpoint.contents import with_contents

        inspection = with_contents(inspection, folder, config)
    if values:
        from compress.checkpoint.zeros import with_zeros

        inspection = with_zeros(inspection, stored, folder, config)
    return inspection


def _settings(stated: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a `quantization_config` with the entry of a module, as MLX has them."""
    settings = stated.get(name)
    return {**stated, **settings} if isinstance(settings, dict) else stated


def _method(config: Mapping[str, Any]) -> str:
    method, layout = config.get("quant_method"), config.get("format") or config.get("checkpoint_format")
    if method is None:
        return "not quantized" if not config else "a quantization_config without quant_method"
    remark = " (format native of compress)" if method == OWN_METHOD else ""
    return f"{method}{remark}" + (f", {layout}" if isinstance(layout, str) else "")


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


def _recognized(name: str, tensors: Mapping[str, Header], config: Mapping[str, Any]) -> Module:
    bias = [header for leaf, header in tensors.items() if leaf == "bias" and len(tensors) > 1]
    headers = {leaf: header for leaf, header in tensors.items() if not (leaf == "bias" and bias)}
    recognized: Recognized = recognize(headers, config)
    group = "" if recognized.group_size is None else f", group {recognized.group_size}"
    extra = "".join(f", {part}" for part in recognized.parts[1:])
    return Module(
        name,
        f"{recognized.grid}{group}{extra}",
        recognized.grid,
        recognized.shape,
        recognized.group_size,
        recognized.parts,
        tuple(sorted({header.dtype for header in headers.values()})),
        recognized.count,
        sum(header.size_bytes for header in headers.values()),
    )


def _inspect_gguf(path: Path) -> Inspection:
    try:
        import gguf  # noqa: F401  an optional dependency
    except ImportError as error:
        raise ModelError(f"model: {path} needs the package gguf; install the extra: compress-llm[gguf]") from error
    parts = parts_of(path)
    for part in parts:
        check_magic(part)
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
