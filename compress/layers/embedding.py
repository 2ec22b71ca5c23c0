"""CompressedEmbedding: an embedding that looks up rows of a compressed weight."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from compress.layers.linear import CompressedLinear

FEW = 64
"""Largest number of tokens whose rows are dequantized one by one; more tokens are deduplicated first."""


class CompressedEmbedding(nn.Module):
    """An embedding that looks up rows of the weight of a CompressedLinear and dequantizes only these rows.

    The original embedding module computes the output from these rows, so that its other operations (such as a scale)
    are preserved. The table of an untied embedding is a submodule. The table of a tied embedding is the LM head, which
    owns the tensors.

    Attributes:
        table: weight [vocabulary, width].
        own: the original embedding module without its weight.
        dtype_of_computation: empty tensor whose dtype is that of the output.
    """

    table: CompressedLinear
    dtype_of_computation: Tensor

    def __init__(self, embedding: nn.Embedding, table: CompressedLinear, tied: bool) -> None:
        """Create the embedding.

        Args:
            embedding: the dense original; it is not changed.
            table: weight [vocabulary, width].
            tied: whether `table` is the LM head of the model.
        """
        super().__init__()
        if tied:
            self.__dict__["table"] = table  # not a submodule: the LM head owns its tensors
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
        """Whether the table is the LM head."""
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
        """The dense weight, in the dtype of computation."""
        return self.table.weight_as(self.dtype_of_computation.dtype)

    def forward(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        if ids.numel() <= FEW:
            rows, positions = ids.flatten(), torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        else:
            rows, positions = ids.unique(return_inverse=True)
        row_weights = self.table.rows_at(rows, self.dtype_of_computation.dtype)
        return functional_call(self.own, {"weight": row_weights}, (positions,))

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
    """Return the compressed weight of a linear or an embedding; that of a dense module shares its tensor."""
    if isinstance(module, CompressedEmbedding):
        return module.table
    if isinstance(module, nn.Embedding):
        table = CompressedLinear(module.weight.detach(), None)
        table.role = "embedding"
        return table
    return CompressedLinear.of(module)
