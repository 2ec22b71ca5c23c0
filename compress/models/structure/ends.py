"""The input embedding and the LM head of a model, found by the model's accessors, never by name.

If both share one weight (tied weights), they are one `End` with two names, and one compressed tensor serves both.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from compress.errors import ModelError
from compress.layers.embedding import CompressedEmbedding, layer_of
from compress.layers.linear import CompressedLinear, replace_linear, shape_of
from compress.layers.scheme import Role
from compress.models.structure.blocks import has_two_stacks

HEAD, EMBEDDING = "lm_head", "embed_tokens"
"""What recipes call the output head and the input embedding of every model, whatever the model's own names are."""


@dataclass(frozen=True)
class End:
    """The input embedding or the LM head of a model, or both if they are tied.

    Attributes:
        name: full name of its layer; if tied, that of the head, which holds the tensors.
        role: how the weight is used.
        head: full name of the LM head that uses the weight, or None.
        embedding: full name of the input embedding that uses the weight, or None.
    """

    name: str
    role: Role
    head: str | None
    embedding: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """The full names of its modules."""
        return tuple(name for name in (self.head, self.embedding) if name is not None)


def find_ends(model: nn.Module) -> list[End]:
    """Find the input embedding and the LM head of a model, the embedding first.

    Modules of other kinds than linear and embedding are left out. So are the embeddings of an encoder-decoder model,
    which several modules read, and an LM head that is tied to one of them.
    """
    if not isinstance(model, PreTrainedModel):
        return []
    embedding, head = _input_embeddings(model), model.get_output_embeddings()
    if has_two_stacks(model):
        return [] if any(_tied(module, head) for module in model.modules()) else _ends(model, None, head)
    return _ends(model, embedding, head)


def _ends(model: PreTrainedModel, embedding: nn.Module | None, head: nn.Module | None) -> list[End]:
    embedding_name = _name_of(model, embedding) if isinstance(embedding, nn.Embedding | CompressedEmbedding) else None
    head_name = _name_of(model, head) if isinstance(head, nn.Linear | CompressedLinear) else None
    if embedding_name is not None and head_name is not None and _tied(embedding, head):
        return [End(head_name, "tied", head_name, embedding_name)]
    ends = [] if embedding_name is None else [End(embedding_name, "embedding", None, embedding_name)]
    return ends + ([] if head_name is None else [End(head_name, "linear", head_name, None)])


def _input_embeddings(model: PreTrainedModel) -> nn.Module | None:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:  # no token embeddings
        return None


def _name_of(model: nn.Module, target: nn.Module | None) -> str | None:
    return next((name for name, module in model.named_modules() if module is target and name), None)


def _tied(embedding: nn.Module | None, head: nn.Module | None) -> bool:
    if isinstance(embedding, CompressedEmbedding):
        return embedding.table is head
    return isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear) and embedding.weight is head.weight


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of rows of the input embedding."""
    embedding = model.get_input_embeddings()
    if isinstance(embedding, CompressedEmbedding):
        return embedding.num_embeddings
    return embedding.get_parameter("weight").shape[0]


def compressed_ends(model: nn.Module) -> dict[str, CompressedLinear]:
    """Return the compressed embedding and LM head of a model by name."""
    modules = {end.name: model.get_submodule(end.name) for end in find_ends(model)}
    return {name: layer_of(m) for name, m in modules.items() if isinstance(m, CompressedLinear | CompressedEmbedding)}


def end_layer(model: nn.Module, end: End) -> CompressedLinear:
    """Return the layer of an embedding or LM head without changing the model; a dense one shares its tensor."""
    layer = layer_of(model.get_submodule(end.name))
    layer.role = end.role
    return layer


def replace_end(model: nn.Module, end: End) -> CompressedLinear:
    """Replace an embedding or LM head by compressed modules that share its weight, and return the layer."""
    if isinstance(model, PreTrainedModel):
        EndMethods(model).install()
    if end.head is None:
        module = model.get_submodule(end.name)
        layer = layer_of(module)
    else:
        layer = replace_linear(model, end.head)
    if end.embedding is not None:
        module = model.get_submodule(end.embedding)
        if isinstance(module, nn.Embedding):
            _put(model, end.embedding, CompressedEmbedding(module, layer, tied=end.head is not None))
    return layer


def put_end(model: nn.Module, name: str, layer: CompressedLinear) -> None:
    """Replace the embedding or LM head `name` by a compressed layer, which keeps the role of the weight."""
    end = next(end for end in find_ends(model) if end.name == name)
    replaced = replace_end(model, end)
    replaced.bias = layer.bias
    replaced.put(layer.all_parts, layer.mask)
    replaced.read(layer.all_parts, layer.all_transforms)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def tie(model: PreTrainedModel) -> None:
    """Tie the weights of a model as transformers does; those of compressed layers are tied already.

    A head or an embedding that replaced one of a compressed pair gets the weight of the embedding, as in transformers.
    """
    _share_embedding(model)
    compressed = tuple(f"{name}.weight" for end in _compressed(model) for name in end.names)
    if not compressed:
        type(model).tie_weights(model)
        return
    tie_recorded(model, compressed)


def tie_recorded(model: PreTrainedModel, without: Collection[str] = ()) -> None:
    """Tie the weights that the model lists as tied, also while transformers builds models without tying them.

    Args:
        model: model whose weights are tied.
        without: names of weights that stay as they are.
    """
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if target not in without and source not in without:
            parent, _, leaf = target.rpartition(".")
            setattr(model.get_submodule(parent), leaf, model.get_parameter_or_buffer(source))


def _compressed(model: nn.Module) -> Sequence[End]:
    compressed = compressed_ends(model)
    return [end for end in find_ends(model) if end.name in compressed]


def _share_embedding(model: PreTrainedModel) -> None:
    """Make the head use the weight of the embedding if the model ties them and one of them was replaced."""
    embedding, head = _input_embeddings(model), model.get_output_embeddings()
    listed = getattr(model, "_tied_weights_keys", None) or {}
    tied = getattr(model.config, "tie_word_embeddings", False) and f"{_name_of(model, head)}.weight" in listed
    if not tied or head is None or _tied(embedding, head):
        return
    if isinstance(embedding, CompressedEmbedding):
        embedding.table.bias = getattr(head, "bias", None)
        embedding.share_table()
        model.set_output_embeddings(embedding.table)
    elif isinstance(embedding, nn.Embedding) and isinstance(head, CompressedLinear):
        model.set_output_embeddings(_dense_head(embedding.get_parameter("weight"), head.bias))


def _dense_head(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.register_parameter("weight", weight)
    head.register_parameter("bias", bias)
    return head


def dequantize_ends(model: PreTrainedModel) -> None:
    """Replace the compressed embedding and head of a model by dense ones; a tied pair stays tied.

    Raises:
        ModelError: if the inputs of the head are transformed in a way that no dense weight can express.
    """
    embedding, head = _input_embeddings(model), model.get_output_embeddings()
    dtype = model.dtype
    if isinstance(embedding, CompressedEmbedding):
        dtype = embedding.dtype_of_computation.dtype
    new_head: nn.Linear | None = None
    if isinstance(head, CompressedLinear):
        layer = copy.deepcopy(head) if head.all_transforms else head
        layer.absorb_inputs()
        if layer.all_transforms:
            kinds = ", ".join(transform.kind for transform in layer.all_transforms)
            raise ModelError(
                f"resize_token_embeddings: the inputs of {_name_of(model, head)} are transformed ({kinds}), which a "
                "dense layer cannot do; resize the embeddings of the dense model, and compress it again"
            )
        new_head = _dense_head(nn.Parameter(layer.weight_as(dtype).contiguous(), requires_grad=False), head.bias)
    if isinstance(embedding, CompressedEmbedding):
        dense = embedding.dense()
        if new_head is not None and embedding.table is head:
            new_head.register_parameter("weight", dense.get_parameter("weight"))
        model.set_input_embeddings(dense)
    if new_head is not None:
        model.set_output_embeddings(new_head)


@dataclass(frozen=True)
class EndMethods:
    """The methods of transformers that change the embedding and the head, for a model in which these are compressed.

    The original methods expect a parameter `weight` in both. They are called again once both are dense.
    """

    model: PreTrainedModel

    def install(self) -> None:
        """Replace the methods of the model."""
        vars(self.model).update(tie_weights=self.tie_weights, resize_token_embeddings=self.resize_token_embeddings)

    def tie_weights(self, missing_keys: set[str] | None = None, recompute_mapping: bool = True) -> None:
        """Tie the weights that the model ties."""
        if missing_keys is not None:  # transformers loads the model, and has no compressed layers yet
            type(self.model).tie_weights(self.model, missing_keys, recompute_mapping)
            return
        tie(self.model)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Set the size of the vocabulary; another size makes the embedding and the head dense.

        Raises:
            ModelError: if the inputs of the head are transformed in a way that no dense weight can express.
        """
        model, present = self.model, vocabulary_size(self.model)
        rows = present if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            rows = -(-rows // pad_to_multiple_of) * pad_to_multiple_of
        head = model.get_output_embeddings()
        sizes = {present} if head is None else {present, shape_of(head)[0]}
        if sizes == {rows}:
            return model.get_input_embeddings()
        dequantize_ends(model)
        return type(model).resize_token_embeddings(model, new_num_tokens, pad_to_multiple_of, mean_resizing)
