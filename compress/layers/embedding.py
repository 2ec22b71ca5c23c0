"""CompressedEmbedding: an embedding that looks up rows of a compressed weight."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from compress.layers.linear import CompressedLinear

FEW = 64
"""Tokens that are looked up one by one; repeated ones among more tokens are dequantized once."""


class CompressedEmbedding(nn.Module):
    """Look up rows of the weight of a CompressedLinear; only the rows that are asked for are dequantized.

    The model's own embedding computes the output from these rows, so that what it adds (such as a scale) stays. The
    table of an untied embedding is a submodule. That of a tied one is the output head, which holds the tensors.
    """

    table: CompressedLinear
    dtype_of_computation: Tensor

    def __init__(self, embedding: nn.Embedding, table: CompressedLinear, tied: bool) -> None:
        """embedding: the dense original, which does not change. table: weight [vocabulary, width]."""
        super().__init__()
        if tied:
            self.__dict__["table"] = table  # no submodule: the head holds its tensors
        else:
            self.table = table
        table.role = "tied" if tied else "embedding"
        weight = embedding.weight
        self.own = copy.deepcopy(embedding, {id(weight): None})
        self.own.register_parameter("weight", None)
        self.own.padding_idx = None  # concerns gradients only, and counts rows of the whole weight
        device = torch.device("cpu") if weight.is_meta else weight.device
        self.register_buffer(
            "dtype_of_computation", torch.empty(0, dtype=weight.dtype, device=device), persistent=False
        )

    @property
    def tied(self) -> bool:
        """Whether the output head holds the table."""
        return self.table.role == "tied"

    @property
    def num_embeddings(self) -> int:
        """The number of rows."""
        return self.table.shape[0]

    @property
    def embedding_dim(self) -> int:
        """The width of a row."""
        return self.table.shape[1]

    @property
    def weight(self) -> Float[Tensor, "vocabulary width"]:
        """The whole dense weight, in the dtype of computation."""
        return self.table.weight_as(self.dtype_of_computation.dtype)

    def forward(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        if ids.numel() <= FEW:
            rows, places = ids.flatten(), torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        else:
            rows, places = ids.unique(return_inverse=True)
        known = self.table.rows_at(rows, self.dtype_of_computation.dtype)
        return functional_call(self.own, {"weight": known}, (places,))

    def share_table(self) -> None:
        """Leave the tensors of the table to the output head, which is to be the table."""
        table = self.table
        self._modules.pop("table", None)
        self.__dict__["table"] = table
        table.role = "tied"

    def dense(self) -> nn.Embedding:
        """The model's own embedding with the dequantized weight, in the dtype of computation."""
        own = copy.deepcopy(self.own)
        own.weight = nn.Parameter(self.weight.contiguous(), requires_grad=False)
        own.num_embeddings = self.num_embeddings
        return own

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.table.scheme.text}" + ", tied" * self.tied


def layer_of(module: nn.Module) -> CompressedLinear:
    """The compressed weight of a linear or an embedding; that of a dense one shares its tensor."""
    if isinstance(module, CompressedEmbedding):
        return module.table
    if isinstance(module, nn.Embedding):
        table = CompressedLinear(module.weight.detach(), None)
        table.role = "embedding"
        return table
    return CompressedLinear.of(module)
