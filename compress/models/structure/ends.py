"""The ends of a model: the input embedding and the output head, found by the model's own accessors, never by name.

If both share one weight (tied weights), they are one end with two names, and one compressed tensor serves both.
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
    """An end of a model.

    name: the full name of its layer: of the head if tied, because the head holds the tensors. role: how its weight is
    used. head, embedding: the full names of the modules that use it; None: it is not used so.
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
    """The ends of a model, the embedding first. Modules of other kinds than linear and embedding are left out.

    So are the embeddings of a model with two stacks, which several modules read, with a head that is tied to one.
    """
    if not isinstance(model, PreTrainedModel):
        return []
    embedding, head = _input_embeddings(model), model.get_output_embeddings()
    if has_two_stacks(model):
        return [] if any(_tied(module, head) for module in model.modules()) else _ends(model, None, head)
    return _ends(model, embedding, head)


def _ends(model: PreTrainedModel, embedding: nn.Module | None, head: nn.Module | None) -> list[End]:
    found = []
    first = _name_of(model, embedding) if isinstance(embedding, nn.Embedding | CompressedEmbedding) else None
    last = _name_of(model, head) if isinstance(head, nn.Linear | CompressedLinear) else None
    if first is not None and last is not None and _tied(embedding, head):
        return [End(last, "tied", last, first)]
    found += [] if first is None else [End(first, "embedding", None, first)]
    return found + ([] if last is None else [End(last, "linear", last, None)])


def _input_embeddings(model: PreTrainedModel) -> nn.Module | None:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:  # no token embeddings
        return None


def _name_of(model: nn.Module, wanted: nn.Module | None) -> str | None:
    return next((name for name, module in model.named_modules() if module is wanted and name), None)


def _tied(embedding: nn.Module | None, head: nn.Module | None) -> bool:
    if isinstance(embedding, CompressedEmbedding):
        return embedding.table is head
    return isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear) and embedding.weight is head.weight


def vocabulary_size(model: PreTrainedModel) -> int:
    """The number of rows of the input embedding."""
    embedding = model.get_input_embeddings()
    if isinstance(embedding, CompressedEmbedding):
        return embedding.num_embeddings
    return embedding.get_parameter("weight").shape[0]


def compressed_ends(model: nn.Module) -> dict[str, CompressedLinear]:
    """The compressed layers among the ends of a model, by the names of the ends."""
    found = {end.name: model.get_submodule(end.name) for end in find_ends(model)}
    return {name: layer_of(m) for name, m in found.items() if isinstance(m, CompressedLinear | CompressedEmbedding)}


def end_layer(model: nn.Module, end: End) -> CompressedLinear:
    """The layer of an end; that of a dense one shares its tensor. The model does not change."""
    layer = layer_of(model.get_submodule(end.name))
    layer.role = end.role
    return layer


def replace_end(model: nn.Module, end: End) -> CompressedLinear:
    """Replace the modules of an end by compressed ones that share its weight, and return the layer."""
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
    """Put a compressed layer in the place of the end `name`; its role is that of the end."""
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

    without: the names of weights that stay as they are.
    """
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if target not in without and source not in without:
            parent, _, leaf = target.rpartition(".")
            setattr(model.get_submodule(parent), leaf, model.get_parameter_or_buffer(source))


def _compressed(model: nn.Module) -> Sequence[End]:
    known = compressed_ends(model)
    return [end for end in find_ends(model) if end.name in known]


def _share_embedding(model: PreTrainedModel) -> None:
    """Let the head use the weight of the embedding if the model ties them and one of them was replaced."""
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

    Raises ModelError for a head whose inputs are transformed in a way that no dense weight has.
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

    transformers' own expect a parameter `weight` in both. They are called again once both are dense.
    """

    model: PreTrainedModel

    def install(self) -> None:
        """Put the methods in the place of the model's own."""
        own = {"tie_weights": self.tie_weights, "resize_token_embeddings": self.resize_token_embeddings}
        vars(self.model).update(own)

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

        Raises ModelError for a head whose inputs are transformed in a way that no dense weight has.
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
