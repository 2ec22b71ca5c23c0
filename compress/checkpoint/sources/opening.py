"""Open a model: a hub id, a local folder or a .gguf file, with the weights of blocks memory-mapped until needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from os.path import expanduser
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor
from transformers import (
    AutoConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from compress.checkpoint.sources import gguf
from compress.checkpoint.sources.files import fingerprint_of, read_processor, stamp_of
from compress.checkpoint.sources.hub import check_revision, fetch
from compress.checkpoint.sources.limits import limited, limited_modules
from compress.checkpoint.sources.matching import lacking, match
from compress.checkpoint.sources.narrow import narrow_dtype
from compress.checkpoint.sources.prefetch import Prefetch, copied, read
from compress.checkpoint.sources.reading import Reading
from compress.checkpoint.sources.sentence import read_sentence_files
from compress.checkpoint.sources.stored import by_file, headers_of, opened_file, stored_tensors
from compress.checkpoint.sources.stored_ends import map_ends, stored_ends
from compress.checkpoint.sources.supported import check_supported, class_of
from compress.checkpoint.sources.tokenizer import read_tokenizer
from compress.checkpoint.sources.untrusted import check_config, check_folder, read_json
from compress.errors import CannotRun, ModelError, call_foreign, one_line
from compress.layers.linear import linears
from compress.models.caches.base import CONFIG_KEY
from compress.models.computation import compute_dtype, to_device, widened
from compress.models.experts import open_experts
from compress.models.structure.blocks import Block, find_blocks
from compress.models.structure.ends import End, tie
from compress.models.tensors import assign, is_finite

SMALL_MODEL = 1 << 24
"""Numbers of a model that may be missing in its files before transformers is asked, which allocates them."""


class Weights(Protocol):
    """The source of the weights of blocks. reading: the time in which `bring` waited for the disk."""

    reading: Reading

    def bring(self, block: Block) -> None:
        """Load the block's weights to the compute device and check that they are finite."""
        ...

    def release(self, block: Block) -> None:
        """Free the block's weights if they can be loaded again."""
        ...

    def ask(self, block: Block) -> None:
        """Begin to read the block's weights: the system, where it has a way to; for an accelerator, also a thread."""
        ...


@dataclass
class InMemory:
    """Weights of a model that is entirely in memory; nothing is loaded or freed."""

    reading: Reading = field(default_factory=Reading)

    def bring(self, block: Block) -> None:
        check_finite(block.name, block.module.state_dict())

    def release(self, block: Block) -> None:
        return

    def ask(self, block: Block) -> None:
        return


@dataclass
class Mapped:
    """Weights memory-mapped from safetensors files, loaded block by block.

    A file that was replaced or changed since is an error. files: tensor name in the model -> (file, name in the file).
    On a CPU with an unchanged dtype, a tensor is a view of the file and takes only memory that the system can reclaim.
    ahead: reads the next block for an accelerator; by default one with CUDA.
    """

    files: dict[str, tuple[Path, str]]
    dtype: torch.dtype
    device: torch.device
    reading: Reading = field(default_factory=Reading, kw_only=True)
    stamps: dict[Path, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False, kw_only=True)
    ahead: Prefetch | None = field(default=None, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.ahead is None and self.device.type == "cuda":
            self.ahead = Prefetch()
        self.stamps = {p: self.stamps.get(p) or stamp_of(p) for p in {path for path, _ in self.files.values()}}

    def names(self, prefix: str) -> list[str]:
        """Tensor names below a module name."""
        return [name for name in self.files if name.startswith(prefix + ".")]

    def read(self, names: list[str], waited: bool = False) -> dict[str, Tensor]:
        """Tensors by name, on the device; floating-point tensors in the dtype of computation. waited: see `read_raw`"""
        found = self.read_raw(names, waited)
        return {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in found.items()}

    def read_raw(self, names: list[str], waited: bool = False) -> dict[str, Tensor]:
        """Tensors by name, on the device, in their stored dtype. waited: read the pages now; `reading` has the time."""
        found: dict[str, Tensor] = {}
        for path, keys in by_file(self.files, names).items():
            if stamp_of(path) != self.stamps[path]:
                raise ModelError(
                    f"model: {path} was replaced or changed after it was opened; put the file back and start the same "
                    "command again, or start with --overwrite for the new file"
                )
            with opened_file(path) as file:
                tensors = read(file, path, dict.fromkeys(keys.values()), self.ahead, self.reading if waited else None)
                tensors = copied(tensors, self.device)
                found |= {name: tensors[key] for name, key in keys.items()}
        return found

    def ask(self, block: Block) -> None:
        places = by_file(self.files, self.names(block.name))
        for path, keys in places.items():
            with opened_file(path) as file:
                file.ask(list(keys.values()))
        if self.ahead is not None:
            self.ahead.start({path: dict.fromkeys(keys.values()) for path, keys in places.items()})

    def bring(self, block: Block) -> None:
        tensors = self.read(self.names(block.name), waited=True)
        check_finite("", tensors, self.files)
        assign(block.module, {name.removeprefix(block.name + "."): t for name, t in tensors.items()})

    def release(self, block: Block) -> None:
        empty = {n: torch.empty_like(t, device="meta") for n, t in block.module.state_dict().items()}
        assign(block.module, empty)


@dataclass
class OpenModel:
    """An open model and the source of its weights.

    model: its block weights may be on the meta device until `weights.bring`. source: the model's name in the recipe.
    fingerprint: a digest of configuration and weights. dtype: of the computation. processor: the text of each of
    `PROCESSOR_FILES` and of the files of sentence-transformers that exists. narrow: the 16-bit dtype that holds the
    weights of the source; None: the source needs wider ones, or is unknown. widened_from: the dtype of the checkpoint
    if `auto` chose a wider one for the computation. commit: of a model of the hub. mapped_ends: see `stored_ends`.
    """

    model: PreTrainedModel
    blocks: list[Block]
    weights: Weights
    tokenizer: PreTrainedTokenizerBase | None
    source: str
    fingerprint: str
    device: torch.device
    dtype: torch.dtype
    notes: list[str] = field(default_factory=list)
    processor: dict[str, str] = field(default_factory=dict)
    narrow: torch.dtype | None = None
    widened_from: torch.dtype | None = None
    commit: str | None = None
    mapped_ends: dict[str, End] = field(default_factory=dict)

    @property
    def storage(self) -> torch.dtype:
        """The dtype in which a run stores scales and dense tensors, if its recipe names none."""
        return self.dtype if self.narrow is None or self.dtype.itemsize <= self.narrow.itemsize else self.narrow

    @property
    def loads_in(self) -> torch.dtype:
        """The dtype in which a written checkpoint is computed on a processor that is as fast in all of them."""
        return self.widened_from or self.dtype

    @property
    def config(self) -> PretrainedConfig:
        """The transformers configuration."""
        return self.model.config

    def linear_names(self) -> list[str]:
        """Full names of all linears inside the blocks, in order."""
        return [f"{block.name}.{name}" for block in self.blocks for name in linears(block.module)]

    def bring(self, block: Block) -> None:
        """Load the weights of a block, and ask for those of the next one, so that they are read in the meantime."""
        self.weights.bring(block)
        for following in self.blocks[block.index + 1 : block.index + 2]:
            self.weights.ask(following)

    def map_ends(self) -> None:
        """Map the ends of `mapped_ends` again, so that the pages that were read leave the process."""
        if isinstance(self.weights, Mapped):
            map_ends(self.model, self.mapped_ends, self.weights)

    @contextmanager
    def streaming(self) -> Iterator[PreTrainedModel]:
        """The whole model, ready to run: each block's weights are loaded for its forward pass only."""
        handles = []
        for block in self.blocks:
            handles.append(block.module.register_forward_pre_hook(lambda *_, b=block: self.bring(b)))
            handles.append(block.module.register_forward_hook(lambda *_, b=block: self.weights.release(b)))
        try:
            yield self.model
        finally:
            for handle in handles:
                handle.remove()


def check_finite(prefix: str, tensors: dict[str, Tensor], files: Mapping[str, tuple[Path, str]] | None = None) -> None:
    """Raise ModelError, naming the tensor and its file, when a weight holds NaN or infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not is_finite(tensor):
            bad = int((~torch.isfinite(tensor)).sum())
            full = f"{prefix}.{name}" if prefix else name
            where = f" ({files[name][0]})" if files and name in files else ""
            raise ModelError(
                f"model: {full} holds {bad} NaN or infinite weights; the checkpoint is damaged; fetch it again{where}"
            )


def open_model(
    source: str,
    dtype: str = "auto",
    device: torch.device | None = None,
    trust_remote_code: bool = False,
    narrow_ends: bool = False,
) -> OpenModel:
    """Open a model by hub id (also OWNER/NAME@REVISION), local folder, or path of a .gguf file.

    dtype: the dtype of computation: 'auto' (that of the checkpoint), 'float32', 'bfloat16' or 'float16'. narrow_ends:
    see `read_outside`.

    Raises ModelError: not found, unreadable, truncated, no safetensors, missing tensors, NaN in the weights outside the
    blocks (those inside are checked when a block is loaded).
    """
    device = device or torch.device("cpu")
    folder = folder_of(source)
    config = read_config(folder, source, trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"model: {source} is already quantized; start from the dense model (compress.load reads it)")
    if getattr(config, CONFIG_KEY, None) is not None:
        raise ModelError(f"model: {source} has a KV cache with a policy of compress; start from the original model")
    compute, widened_from = compute_dtype(config, dtype, device)
    stored = stored_tensors(folder)
    model = empty_model(folder, config, compute, trust_remote_code).eval()
    check_supported(model, f"model: {source}")
    common: dict[str, Any] = {"source": source, "device": device, "dtype": compute, "widened_from": widened_from}
    sentence, left_out = read_sentence_files(folder)
    common |= {"tokenizer": read_tokenizer(folder, trust_remote_code), "processor": read_processor(folder) | sentence}
    with limited_modules(folder):
        notes, files = left_out + open_experts(model) + widened(widened_from), match(model, stored)
    fingerprint = fingerprint_of(folder, sorted({path for path, _ in stored.values()}))
    common["narrow"] = narrow_dtype(folder, stored)
    if files is None:
        whole = load_whole(model, folder, stored, compute, device)
        open_experts(whole)
        notes.append(
            "the checkpoint stores tensors under other names or shapes, so transformers loaded the whole model"
        )
        return OpenModel(whole, find_blocks(whole), InMemory(), fingerprint=fingerprint, notes=notes, **common)
    blocks = find_blocks(model)
    ends = read_outside(model, blocks, weights := Mapped(files, compute, device), narrow_ends)
    return OpenModel(model, blocks, weights, fingerprint=fingerprint, notes=notes, mapped_ends=ends, **common)


def read_outside(
    model: PreTrainedModel, blocks: list[Block], weights: Mapped, narrow_ends: bool = False
) -> dict[str, End]:
    """Read the tensors outside of the blocks. Raises ModelError.

    narrow_ends: embedding and head stay in a narrower dtype of their file (`stored_ends`); returns these.
    """
    inside = tuple(f"{block.name}." for block in blocks)
    ends = stored_ends(model, weights.files, weights.dtype) if narrow_ends else {}
    names = [name for name in weights.files if not name.startswith(inside) and name not in ends]
    tensors = weights.read(names, waited=True)
    check_finite("", tensors | weights.read_raw(list(ends), waited=True), weights.files)
    assign(model, tensors)
    map_ends(model, ends, weights)
    tie(model)
    to_device(model, weights.device)
    return ends


def empty_model(folder: Path, config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Build the configuration's model without weights, with the folder's generation config. Raises ModelError."""
    kind = class_of(config, trust_remote_code)
    model = _built(kind, folder, config, dtype, without_data=True)
    if model is None or any(buffer.is_meta for buffer in model.buffers()):  # it computes with such tensors
        model = _built(kind, folder, config, dtype, without_data=False)
    assert model is not None
    model.tie_weights()
    generation = folder / "generation_config.json"
    try:
        if generation.exists():
            read_json(generation)
            model.generation_config = call_foreign(GenerationConfig.from_pretrained, folder)
    except (ValueError, CannotRun) as error:
        raise ModelError(
            f"model: {generation} cannot be read ({_reason(error)}); correct the file, or fetch it again"
        ) from error
    return model


def _built(
    kind: type[PreTrainedModel], folder: Path, config: PretrainedConfig, dtype: torch.dtype, without_data: bool
) -> PreTrainedModel | None:
    """The model of a configuration, with parameters on the meta device; None: it needs the data of `torch.empty`.

    without_data: see `limited`. Raises ModelError.
    """
    # no_init_weights skips random initialization: 5 ms per linear
    with init_empty_weights(), no_init_weights(), limited(folder, without_data):
        try:
            return call_foreign(kind._from_config, config, dtype=dtype)
        except CannotRun as error:
            if without_data and isinstance(error.cause, RuntimeError):
                return None
            raise ModelError(
                f"model: transformers {transformers.__version__} cannot build {kind.__name__} from "
                f"{folder}/config.json ({type(error.cause).__name__}: {error.cause}); correct the file, or fetch it "
                "again"
            ) from error


def folder_of(source: str) -> Path:
    """Return a local folder that holds the model as safetensors; fetch or convert the model if needed."""
    path = Path(expanduser(source))
    check_revision(source)
    if source.endswith(".gguf"):
        return gguf.as_safetensors(path)
    if path.is_dir():
        return path
    if path.exists() or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ModelError(f"model: no folder {source}; use a hub id, a local folder, or a .gguf file")
    return fetch(source)


def read_config(folder: Path, source: str, trust_remote_code: bool) -> PretrainedConfig:
    """Read the configuration of a model folder; source: the user's name of the model. Raises ModelError."""
    check_folder(folder)
    try:
        check_config(read_json(folder / "config.json"), trust_remote_code)
        return call_foreign(AutoConfig.from_pretrained, folder, trust_remote_code=trust_remote_code)
    except (ValueError, CannotRun) as error:
        raise ModelError(f"model: {source} has no readable config.json ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    """Return the reason of an error in one line, without the name of its class."""
    return one_line(error.cause if isinstance(error, CannotRun) else error)


def load_whole(
    model: PreTrainedModel, folder: Path, stored: dict[str, tuple[Path, str]], dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Load the model with transformers, which converts stored layouts to those of the model.

    model: without weights. transformers gets the tensors, and opens no files itself.
    """
    wanted = sum(tensor.numel() for tensor in model.state_dict(keep_vars=True).values())
    held = sum(prod(header.shape) for header in headers_of(stored).values())
    if wanted > 2 * held + SMALL_MODEL:
        raise lacking(model, folder, stored)
    tensors = Mapped(stored, dtype, torch.device("cpu")).read_raw(list(stored))
    try:
        options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # reported below
        options |= {"config": model.config, "state_dict": tensors, "dtype": dtype}
        loaded: Any = call_foreign(type(model).from_pretrained, None, **options)
    except CannotRun as error:
        raise ModelError(f"model: transformers cannot load {folder}: {error.cause}") from error
    built, info = loaded
    if info["mismatched_keys"]:
        name, there, here = min(info["mismatched_keys"])
        raise ModelError(f"model: {name} is {list(there)} in {folder}, but {list(here)} by its config.json")
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"model: {folder} lacks {len(missing)} tensors, the first {missing[0]}; fetch it again")
    built.generation_config = model.generation_config
    return built.eval().requires_grad_(False).to(device)
