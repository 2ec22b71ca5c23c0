"""Open any model as the input of a run: dense or sparse models, and compressed checkpoints.

The compressed linears of a checkpoint come back with their codes, scales, masks and transforms, one block at a time. A
dense checkpoint stores no masks; there the zeros of a linear are its mask (`checkpoint.sources.masks`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import chain
from os.path import expanduser
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint.caches import install_policies
from compress.checkpoint.formats.base import Format
from compress.checkpoint.save import masked_in
from compress.checkpoint.sources import opening
from compress.checkpoint.sources.files import fingerprint_of, read_processor, stamp_of
from compress.checkpoint.sources.gguf_codes import checkpoint_of
from compress.checkpoint.sources.hub import commit_of
from compress.checkpoint.sources.load import describe, fill, weights_in_codes
from compress.checkpoint.sources.masks import MaskPolicy, Zeros, mask_from_zeros, told, zeros_of
from compress.checkpoint.sources.narrow import narrow_dtype
from compress.checkpoint.sources.opening import Mapped, OpenModel
from compress.checkpoint.sources.sentence import read_sentence_files
from compress.checkpoint.sources.stored import by_owner
from compress.checkpoint.sources.supported import check_supported
from compress.checkpoint.sources.untrusted import read_json
from compress.errors import ModelError
from compress.layers.linear import CompressedLinear, linears, renew_linear
from compress.layers.scheme import LayerScheme
from compress.models.caches.attentions import cache_policies
from compress.models.caches.base import CONFIG_KEY, tensor_names
from compress.models.computation import widened
from compress.models.structure.blocks import Block, find_blocks
from compress.models.structure.ends import find_ends
from compress.models.tensors import assign
from compress.numerics.sparse.positions import SparseLayout, sparsities

STATED = ("quantization_config", CONFIG_KEY)
"""The entries of config.json of a compressed checkpoint."""


@dataclass
class Packed(Mapped):
    """The weights of a checkpoint with compressed linears or masks, loaded block by block.

    files: only the tensors that are stored as they are. stored: all stored tensors by name. schemes: of the compressed
    linears. masked: linears whose zeros are pruned weights. keep: False drops masks of linears that are not quantized.
    settle: called with every loaded block, for example to convert its linears to the forms of a format.
    """

    stored: dict[str, tuple[Path, str]] = field(default_factory=dict)
    schemes: dict[str, LayerScheme] = field(default_factory=dict)
    format: Format | None = None
    masked: frozenset[str] = frozenset()
    keep: bool = True
    settle: Callable[[Block], None] | None = None
    sparsities: dict[str, list[SparseLayout]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stamps |= {path: stamp_of(path) for path in {path for path, _ in self.stored.values()}}

    def bring(self, block: Block) -> None:
        """Load a block; its linears are as in the checkpoint, whatever they were before."""
        prefix = block.name + "."
        for name, layer in linears(block.module).items():
            if isinstance(layer, CompressedLinear) or prefix + name in self.masked:
                renew_linear(block.module, name)
        tensors = self.read(self.names(block.name), waited=True)
        opening.check_finite("", tensors, self.files)
        dense = {name: tensors.pop(f"{name}.weight") for name in self.masked if f"{name}.weight" in tensors}
        assign(block.module, {name.removeprefix(prefix): t for name, t in tensors.items()})
        if self.format is not None:
            fill(block.module, prefix, self._packed(prefix), self.schemes, self.format, self.dtype, self.stored)
        for name, weight in dense.items():
            layer = block.module.get_submodule(name.removeprefix(prefix))
            assert isinstance(layer, CompressedLinear)
            layer.put(weight.T if layer.transposed else weight)
        for name, layer in linears(block.module).items():
            if isinstance(layer, CompressedLinear):
                self._unpack(layer)
                if self.keep and prefix + name in self.masked and layer.positions is None:
                    mask_from_zeros(layer)
        if self.settle is not None:
            self.settle(block)

    def ask(self, block: Block) -> None:
        """Ask for everything that is stored of a block."""
        self._all_stored().ask(block)

    def release(self, block: Block) -> None:
        """Free the weights of a block; the tensors of its cache policies stay."""
        staying = tensor_names(cache_policies(block.module))
        state = {n: t for n, t in block.module.state_dict().items() if n not in staying}
        assign(block.module, {n: torch.empty_like(t, device="meta") for n, t in state.items()})

    def _all_stored(self) -> Mapped:
        """Every stored tensor, packed ones included."""
        same = {"reading": self.reading, "stamps": self.stamps, "ahead": self.ahead}
        return Mapped(self.stored, self.dtype, self.device, **same)

    def _packed(self, prefix: str) -> dict[str, Tensor]:
        """The tensors of the compressed linears of a block, in their stored dtype."""
        layers = (name for name in self.schemes if name.startswith(prefix))
        names = by_owner((name for name in self.stored if name.startswith(prefix)), layers)
        found = self._all_stored().read_raw(list(chain.from_iterable(names.values())), waited=True)
        wide = {n: t for n, t in found.items() if t.is_floating_point() and t.element_size() > 1}
        opening.check_finite("", wide, self.stored)
        return found

    def _unpack(self, layer: CompressedLinear) -> None:
        """Restore a pruned linear from its kept weights: dense weights with a mask, as passes work on it."""
        if layer.positions is None or layer.quantized or len(layer.all_parts) > 1:
            return
        mask, weight = layer.mask, layer.weight
        layer.parts = torch.nn.ModuleList()
        layer.mask_words = layer.sparsity = None
        layer.put(weight, mask if self.keep else None)


def is_compressed(source: str) -> bool:
    """Whether a model is a local folder with quantized weights or a cache policy."""
    try:
        config = read_json(Path(expanduser(source)) / "config.json")
    except ValueError:
        return False
    return any(config.get(key) is not None for key in STATED)


def open_input(
    source: str,
    dtype: str = "auto",
    device: torch.device | None = None,
    trust_remote_code: bool = False,
    masks: MaskPolicy = "keep",
    codes: bool = False,
    narrow_ends: bool = False,
) -> OpenModel:
    """Open a model as `open_model` does; it may also be a compressed checkpoint or the result of pruning.

    masks: 'keep': pruned weights stay zero; 'forget': the zeros of linears that are not quantized are ordinary weights.
    codes: a .gguf file of another program keeps its codes, if they are known; otherwise it is a dense model.
    narrow_ends: embedding and head of a dense model stay in a narrower dtype of their file.

    Raises ModelError.
    """
    folder = checkpoint_of(source) if codes else opening.folder_of(source)
    config = opening.read_config(folder, source, trust_remote_code)
    recorded = masked_in(config)
    if any(getattr(config, key, None) is not None for key in STATED):
        opened = _open_compressed(folder, source, dtype, device or torch.device("cpu"), trust_remote_code)
    else:
        opened = opening.open_model(str(folder), dtype, device, trust_remote_code, narrow_ends)
        opened = replace(opened, source=source)
        masked_in(opened.config)
    return with_masks(replace(opened, commit=commit_of(folder)), recorded, masks)


def with_masks(opened: OpenModel, recorded: Collection[str] = (), masks: MaskPolicy = "keep") -> OpenModel:
    """Give linears the masks that their zeros state, and write a note about them. `opened` may change in place.

    recorded: names of linears that are known to be pruned.
    """
    weights = opened.weights
    found = zeros_of(opened, recorded, weights.schemes if isinstance(weights, Packed) else ())
    masked = frozenset(found if masks == "keep" else ())
    if isinstance(weights, Mapped) and (masked or isinstance(weights, Packed)):
        packed = weights
        if not isinstance(packed, Packed):
            packed = Packed(weights.files, weights.dtype, weights.device, reading=weights.reading)
        packed = replace(packed, masked=masked, keep=masks == "keep")
        for block in opened.blocks:
            packed.bring(block)
            found |= _stored_masks(block, packed, found)
            packed.release(block)
        opened = replace(opened, weights=packed)
    elif masked:
        for name in masked:
            mask_from_zeros(_linear(opened, name))
    if found:
        opened.notes.extend(told(found, masks))
    if masked:
        digest = hashlib.sha256(repr((opened.fingerprint, sorted(masked))).encode())
        opened = replace(opened, fingerprint=digest.hexdigest())
    return opened


def starting_sparsities(opened: OpenModel) -> dict[str, list[SparseLayout]]:
    """The possible ways to store the masks that linears have before the first pass, by full name."""
    return opened.weights.sparsities if isinstance(opened.weights, Packed) else {}


def _stored_masks(block: Block, weights: Packed, found: dict[str, Zeros]) -> dict[str, Zeros]:
    """Record the masks of a loaded block in `weights`; returns those that the checkpoint stores."""
    stored = {}
    for name, layer in linears(block.module).items():
        full = f"{block.name}.{name}"
        mask = layer.mask if isinstance(layer, CompressedLinear) else None
        if mask is not None:
            weights.sparsities[full] = sparsities(mask)
            if full not in found:
                stored[full] = Zeros.of(mask, recorded=True)
    return stored


def _linear(opened: OpenModel, name: str) -> CompressedLinear:
    found = opened.model.get_submodule(name)
    if not isinstance(found, CompressedLinear):
        parent, _, leaf = name.rpartition(".")
        found = CompressedLinear.of(found)
        setattr(opened.model.get_submodule(parent), leaf, found)
    return found


def _open_compressed(folder: Path, source: str, dtype: str, device: torch.device, trust_remote_code: bool) -> OpenModel:
    """Open a compressed checkpoint; the weights of its blocks are loaded when they are needed. Raises ModelError."""
    found = describe(folder, source, dtype, device, trust_remote_code)
    model = found.model.eval()
    check_supported(model, f"model: {source}")
    if found.files is None:
        raise opening.lacking(model, folder, found.stored, weights_in_codes(model, found.schemes))
    blocks = find_blocks(model)
    inside, ends = tuple(f"{block.name}." for block in blocks), {end.name for end in find_ends(model)}
    outside = {name: scheme for name, scheme in found.schemes.items() if not name.startswith(inside)}
    if others := [name for name in outside if name not in ends]:
        raise ModelError(
            f"model: {source} has a quantized {others[0]}, outside of its blocks, where passes do not work; "
            "start from its dense model"
        )
    files = {name: found.files[name] for name in found.dense_names()}
    weights = Packed(files, found.dtype, device, found.stored, found.schemes, found.format)
    stored = Mapped(found.stored, found.dtype, device)
    install_policies(model, "", stored.read(found.cache_tensor_names()), found.caches)
    opening.read_outside(model, blocks, weights)
    if found.format is not None:
        starts = tuple(f"{name}." for name in outside)
        packed = stored.read_raw([name for name in found.stored if outside and name.startswith(starts)])
        fill(model, "", packed, outside, found.format, found.dtype, found.stored)
    paths = sorted({path for path, _ in found.stored.values()})
    sentence, left_out = read_sentence_files(folder)
    return OpenModel(
        model,
        blocks,
        weights,
        opening.read_tokenizer(folder, trust_remote_code),
        source,
        fingerprint_of(folder, paths),
        device,
        found.dtype,
        left_out + widened(found.widened_from),
        read_processor(folder) | sentence,
        narrow_dtype(folder, files),
        found.widened_from,
    )
