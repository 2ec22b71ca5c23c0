"""Open any model as the input of a run: dense or sparse models, and compressed checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.checkpoint.caches import install_policies
from compress.checkpoint.checkpoint import Checkpoint
from compress.checkpoint.masks import MaskPolicy, with_masks
from compress.checkpoint.opened import OpenModel, Weights
from compress.checkpoint.sources.files import read_sentence_files, read_side_files, read_tokenizer
from compress.checkpoint.sources.gguf_parts import gguf_of
from compress.checkpoint.sources.hub import commit_of, fetch_code, folder_of
from compress.checkpoint.sources.narrow import narrow_dtype, rounded_tensors
from compress.checkpoint.sources.supported import check_supported
from compress.checkpoint.sources.weight_files import weight_files
from compress.models.computation import widened
from compress.models.experts import open_experts
from compress.models.structure.blocks import Block, find_blocks
from compress.models.structure.ends import End, compressed_ends, tie
from compress.models.tensors import assign

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
"""Files of weights that are not read; a folder with them alone is refused."""
DenseLayers = Callable[[OpenModel], Collection[str]]
"""Returns the full names of the layers whose codes are dequantized."""
PLACEHOLDER = 0.01
"""The value of all weights of a model that is opened without weights."""


@dataclass
class Placeholders(Weights):
    """Weights of a model of which only the configuration is known: all have one value, and take no memory."""

    def bring(self, block: Block) -> None:
        """Give the block weights."""
        assign(block.module, _placeholders(block.module))

    def release(self, block: Block) -> None:
        """Take the weights from the block."""
        block.module.to(device="meta")


def open_for_plan(
    source: str,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    masks: MaskPolicy = "keep",
    codes: bool | DenseLayers = False,
) -> OpenModel:
    """Open a model to plan with it: a dense model from its configuration and tokenizer if its weights are not there.

    Of a model of the hub, no weights are fetched, unless it is compressed: its layers follow from the stored tensors.

    Args:
        source: as of `open_model`, and also a folder without weights.
        dtype: as of `open_model`.
        masks: as of `open_model`.
        codes: as of `open_model`.

    Raises:
        ModelError: for a model that is not found, damaged or not supported.
    """
    folder = None if gguf_of(source) is not None else folder_of(source, weights=False)
    if folder is None or _has_weights(folder):
        return open_model(source, dtype, None, trust_remote_code, masks, codes)
    if trust_remote_code:
        fetch_code(source)
    checkpoint = Checkpoint(folder, source, dtype, trust_remote_code=trust_remote_code)
    if checkpoint.format is not None or checkpoint.stated.caches:
        return open_model(source, dtype, None, trust_remote_code, masks, codes)
    checkpoint.stored = {}
    narrow = checkpoint.narrow_dtype
    model = checkpoint.skeleton().eval()
    check_supported(model, f"model: {source}")
    opened = replace(with_placeholders(checkpoint, model), narrow=narrow)
    opened.notes.append(
        "planned without the weights: zeros of an earlier pruning, and tensors that differ, are not known"
    )
    return opened


def with_placeholders(checkpoint: Checkpoint, model: PreTrainedModel) -> OpenModel:
    """Return a model without weights as it is opened to plan with: the tensors outside of the blocks are placeholders.

    Args:
        checkpoint: what its folder states.
        model: the model, on the meta device, with experts as linears.
    """
    blocks = find_blocks(model)
    prefixes = tuple(f"{block.name}." for block in blocks)
    assign(model, {n: t for n, t in _placeholders(model).items() if not n.startswith(prefixes)})
    tie(model)
    _sum_in_head(model)
    return _opened(checkpoint, model, blocks, Placeholders())


def _opened(checkpoint: Checkpoint, model: PreTrainedModel, blocks: list[Block], weights: Weights) -> OpenModel:
    """Return a model with what its folder holds besides weights."""
    folder, trusted = checkpoint.folder, checkpoint.trust_remote_code
    texts, notes = read_sentence_files(folder)
    return OpenModel(
        model,
        blocks,
        weights,
        read_tokenizer(folder, trusted),
        checkpoint.source,
        checkpoint.fingerprint,
        checkpoint.device,
        checkpoint.dtype,
        [*notes, *checkpoint.notes, *widened(checkpoint.dtypes[1])],
        read_side_files(folder, trusted) | texts,
        widened_from=checkpoint.dtypes[1],
        commit=commit_of(folder),
        undeclared=checkpoint.undeclared,
        answers_digest=checkpoint.answers_digest,
    )


def _dequantize(opened: OpenModel, checkpoint: Checkpoint, names: Collection[str]) -> None:
    """Make layers of a source that is quantized already dense: those of blocks when they are loaded, and the ends."""
    dense, schemes = frozenset(names) & checkpoint.schemes.keys(), checkpoint.schemes
    if not schemes or checkpoint.format is None:
        return
    if len(dense) < len(schemes):
        texts = sorted({scheme.text for name, scheme in schemes.items() if name not in dense})
        opened.notes.append(
            f"the source is quantized already ({checkpoint.format.name}: {'; '.join(texts)}): "
            f"{len(schemes) - len(dense)} layers keep their codes"
        )
    if not dense:
        return
    opened.weights.dense = dense
    for name, layer in compressed_ends(opened.model).items():
        if name in dense:
            opened.weights.dequantize(layer)
    grids = sorted({checkpoint.schemes[name].text for name in dense})
    opened.notes.append(
        f"the source is quantized already ({checkpoint.format.name}: {'; '.join(grids)}): {len(dense)} layers are "
        "dequantized on read; the base of comparison is the dequantized model"
    )
    inputs = sorted({t.text for name in dense for t in checkpoint.schemes[name].transforms})
    if inputs:
        opened.notes.append(
            f"the dequantized layers do not round their inputs, as the source states: {', '.join(inputs)}"
        )


def _sum_in_head(model: PreTrainedModel) -> None:
    """Compute the product of the output head with its placeholder as a sum: torch copies a weight to multiply it."""
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and head.bias is None:
        rows = head.out_features
        head.forward = lambda input: (input.sum(-1, keepdim=True) * PLACEHOLDER).expand(*input.shape[:-1], rows)


def _has_weights(folder: Path) -> bool:
    """Return whether weights are there; those of a local folder also in part, or in another form."""
    names = [path for pattern in ("*.safetensors", "*.gguf", *PICKLED) for path in folder.glob(pattern)]
    return bool(names) and (commit_of(folder) is None or all(path.exists() for path in weight_files(folder)))


def _placeholders(module: nn.Module) -> dict[str, Tensor]:
    """Return a value for every parameter without data: one number in memory, in the shape of the parameter."""
    return {
        name: torch.full((), PLACEHOLDER, dtype=parameter.dtype).expand(parameter.shape)
        for name, parameter in module.named_parameters()
        if parameter.is_meta
    }


def open_model(
    source: str,
    dtype: str = "auto",
    device: torch.device | None = None,
    trust_remote_code: bool = False,
    masks: MaskPolicy = "keep",
    codes: bool | DenseLayers = False,
    narrow_ends: bool = False,
) -> OpenModel:
    """Open a model as the input of a run; weights of blocks are loaded when they are needed.

    Args:
        source: hub id (also OWNER/NAME@REVISION), local folder, or path of a .gguf file.
        dtype: dtype of computation: 'auto' (that of the checkpoint), 'float32', 'bfloat16' or 'float16'.
        masks: 'keep': pruned weights stay zero; 'forget': the zeros of linears that are not quantized are ordinary
            weights.
        codes: True: a .gguf file of another program keeps its codes, if they are known; otherwise it is a dense model.
            A function: also the layers that it names are dequantized, if another program has quantized the model.
        narrow_ends: embedding and head of a dense model stay in a narrower dtype of their file.

    Raises:
        ModelError: for a model that is not found, damaged or not supported. Weights of blocks are checked when they are
            loaded.
    """
    checkpoint = Checkpoint.open(source, dtype, device or torch.device("cpu"), trust_remote_code, codes is True)
    folder, model = checkpoint.folder, checkpoint.skeleton().eval()
    check_supported(model, f"model: {source}")
    ends: dict[str, End] = {}
    if checkpoint.places is None:
        model = checkpoint.converted()
        open_experts(model)
        install_policies(model, "", checkpoint.tensors, checkpoint.caches)
        opened = _opened(checkpoint, model, find_blocks(model), Weights())
        opened.notes.append(
            "the checkpoint stores tensors under other names or shapes, so transformers loaded the whole model"
        )
    else:
        blocks, weights = find_blocks(model), Weights(checkpoint)
        ends = checkpoint.outside(blocks, weights.reading, narrow_ends)
        opened = _opened(checkpoint, model, blocks, weights)
        if checkpoint.requested == "auto":
            opened.notes.extend(rounded_tensors(model, checkpoint.places, checkpoint.dtypes[1] or checkpoint.dtype))
        if checkpoint.foreign and callable(codes):
            _dequantize(opened, checkpoint, codes(opened))
    dense_places = {name: checkpoint.tensors.files[name] for name in checkpoint.dense_names}
    narrow = narrow_dtype(folder, checkpoint.stored if checkpoint.format is None else dense_places)
    return with_masks(replace(opened, narrow=narrow, mapped_ends=ends), checkpoint.stated.masked, masks)
