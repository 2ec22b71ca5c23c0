"""OpenModel: a model that a run works on, and Weights, the source of the weights of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from compress.checkpoint.checkpoint import UNDECLARED, Checkpoint
from compress.checkpoint.layers import DequantizedWeight, StoredTensor, check_finite
from compress.checkpoint.tensors import Reading
from compress.layers.linear import CompressedLinear, linears
from compress.layers.parts.dense import DensePart
from compress.models.caches.attentions import cache_policies
from compress.models.caches.base import tensor_names
from compress.models.computation import mark_kept, mark_read
from compress.models.paged import Paging
from compress.models.structure.blocks import Block, find_blocks
from compress.models.structure.ends import End
from compress.models.tensors import assign
from compress.numerics.quant.codes import SourceCodes
from compress.numerics.sparse.positions import SparseLayout


@dataclass
class Weights:
    """The source of the weights of blocks: a checkpoint, or none for a model that is entirely in memory.

    Attributes:
        checkpoint: blocks are brought from here; None: nothing is loaded or freed.
        masked: linears whose zeros are pruned weights.
        dense: layers whose codes are dequantized when they are loaded.
        keep: False drops the masks of linears that are not quantized.
        settle: called with every loaded block, for example to convert its linears to the forms of a format.
        sparsities: possible ways to store the masks that linears have before the first pass, by full name.
        reading: time in which `bring` waited for the disk.
        within: folder of the files that hold weights which are no views of the checkpoint; None: they are in memory.
    """

    checkpoint: Checkpoint | None = None
    masked: frozenset[str] = frozenset()
    dense: frozenset[str] = frozenset()
    keep: bool = True
    settle: Callable[[Block], None] | None = None
    sparsities: dict[str, list[SparseLayout]] = field(default_factory=dict)
    reading: Reading = field(default_factory=Reading)
    within: Path | None = None

    @property
    def has_layers(self) -> bool:
        """Whether blocks may be brought with compressed linears, masks or quantized KV caches."""
        checkpoint = self.checkpoint
        return checkpoint is not None and bool(
            self.masked or checkpoint.schemes.keys() - self.dense or checkpoint.caches
        )

    def bring(self, block: Block) -> None:
        """Load the weights of a block to the compute device; its linears are as in the checkpoint.

        Raises:
            ModelError: for damaged files, and for weights that are NaN or infinite.
        """
        if self.checkpoint is None:
            check_finite({f"{block.name}.{name}": tensor for name, tensor in block.module.state_dict().items()})
            return
        self.checkpoint.block(block, self.masked, self.reading)
        paging = Paging(self.within)
        for name, layer in linears(block.module).items():
            if isinstance(layer, CompressedLinear):
                if f"{block.name}.{name}" in self.dense:
                    self.dequantize(layer)
                self._unpack(layer)
                if self.keep and f"{block.name}.{name}" in self.masked and layer.positions is None:
                    mask_from_zeros(layer)
                paging.add(layer)
        paging.finish()
        if self.settle is not None:
            self.settle(block)

    def page_within(self, folder: Path) -> None:
        """Hold weights that are no views of the checkpoint in files of a folder from now on."""
        self.within = folder
        if self.checkpoint is not None:
            self.checkpoint.tensors.within = folder

    def dequantize(self, layer: CompressedLinear) -> None:
        """Make a layer of the checkpoint dense, in the dtype of computation, without transforms of its inputs."""
        assert self.checkpoint is not None
        layer.read([DensePart.of(layer.weight_as(torch.float32).to(self.checkpoint.dtype))], [])

    def source_codes(self, name: str) -> SourceCodes | None:
        """Return the codes from which a layer was dequantized; None for other layers."""
        if self.checkpoint is None or name not in self.dense:
            return None
        part = self.checkpoint.layers.codes(name)
        if part is None:
            return None
        codes = part.codes()
        return SourceCodes(codes, codes.dense(torch.float32).to(self.checkpoint.dtype))

    def ask(self, block: Block) -> None:
        """Begin to read everything that is stored of a block."""
        if self.checkpoint is not None:
            self.checkpoint.layers.ask(block)

    def release(self, block: Block) -> None:
        """Free the weights of a block if they can be loaded again; the tensors of its cache policies stay."""
        if self.checkpoint is not None:
            staying = tensor_names(cache_policies(block.module))
            state = {n: t for n, t in block.module.state_dict().items() if n not in staying}
            assign(block.module, {n: torch.empty_like(t, device="meta") for n, t in state.items()})

    def _unpack(self, layer: CompressedLinear) -> None:
        """Restore a pruned linear from its packed sparse weights: dense weights with a mask, as passes work on it."""
        if layer.positions is None or layer.quantized or len(layer.all_parts) > 1:
            return
        mask, weight = layer.mask, layer.weight
        layer.parts = torch.nn.ModuleList()
        layer.mask_words = layer.sparsity = None
        layer.put(weight, mask if self.keep else None)


def mask_from_zeros(layer: CompressedLinear) -> None:
    """Make the zeros of a linear its mask."""
    layer.put(layer.all_parts, layer.weight != 0)


@dataclass
class OpenModel:
    """A model that a run works on.

    Attributes:
        model: its block weights may be on the meta device until `weights.bring`.
        source: name of the model in the recipe.
        fingerprint: a digest of configuration and weights.
        dtype: dtype of computation.
        answers_digest: a digest of all that its answers depend on; results of the model are stored by it.
        side_files: texts of files that are copied to the checkpoint, by relative path (`read_side_files`).
        narrow: 16-bit dtype that holds the weights of the source; None: it needs wider ones, or is unknown.
        widened_from: dtype of the checkpoint if 'auto' chose a wider one for the computation.
        commit: commit of a model of the hub.
        undeclared: tensors of parts that the class of the model does not have, which are copied to the checkpoint.
        mapped_ends: ends that stay in a narrower dtype of their file (`Checkpoint.narrow_ends`).
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
    side_files: dict[str, str] = field(default_factory=dict)
    narrow: torch.dtype | None = None
    widened_from: torch.dtype | None = None
    commit: str | None = None
    mapped_ends: dict[str, End] = field(default_factory=dict)
    undeclared: dict[str, StoredTensor] = field(default_factory=dict)
    answers_digest: str = ""

    @classmethod
    def in_memory(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, source: str = "model"
    ) -> OpenModel:
        """Wrap a model that is entirely in memory."""
        mark_kept(model)
        mark_read(model)
        parameter, apart = next(model.parameters()), getattr(model, UNDECLARED, {})
        place = parameter.device, parameter.dtype
        return cls(model, find_blocks(model), Weights(), tokenizer, source, "", *place, undeclared=dict(apart))

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

    @property
    def undeclared_bytes(self) -> int:
        """The bytes of the tensors of `undeclared`."""
        return sum(stored.header.size_bytes for stored in self.undeclared.values())

    @property
    def dequantized_bytes(self) -> int:
        """The bytes of the tensors of `undeclared` that take memory when they are copied, and of one in float32.

        Tensors that are not dequantized are mapped.
        """
        headers = [stored.header for stored in self.undeclared.values() if isinstance(stored, DequantizedWeight)]
        return sum(header.size_bytes for header in headers) + 4 * max((header.count for header in headers), default=0)

    def linear_names(self) -> list[str]:
        """Return the full names of all linears inside the blocks, in order."""
        return [f"{block.name}.{name}" for block in self.blocks for name in linears(block.module)]

    def resident_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the bytes of tensors of the model, by full name, that are not views of a file; no weight is read."""
        checkpoint = self.weights.checkpoint
        views = set() if checkpoint is None else checkpoint.tensors.views(tensors)
        return sum(tensor.nbytes for name, tensor in tensors.items() if name not in views)

    def bring(self, block: Block) -> None:
        """Load the weights of a block, and ask for those of the next one, so that they are read in the meantime."""
        self.weights.bring(block)
        for following in self.blocks[block.index + 1 : block.index + 2]:
            self.weights.ask(following)

    def map_ends(self) -> None:
        """Map the ends of `mapped_ends` again, so that the pages that were read leave the process."""
        if self.weights.checkpoint is not None:
            self.weights.checkpoint.map_ends(self.mapped_ends)

    @contextmanager
    def streaming(self) -> Iterator[PreTrainedModel]:
        """Yield the whole model, ready to run: each block's weights are loaded for its forward pass only."""
        handles = []
        for block in self.blocks:
            handles.append(block.module.register_forward_pre_hook(lambda *_, b=block: self.bring(b)))
            handles.append(block.module.register_forward_hook(lambda *_, b=block: self.weights.release(b)))
        try:
            yield self.model
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def whole(self) -> Iterator[PreTrainedModel]:
        """Yield the model with the weights of all blocks, which are released at the end."""
        try:
            for block in self.blocks:
                self.bring(block)
            yield self.model
        finally:
            for block in self.blocks:
                self.weights.release(block)
