"""Read a window in chunks through the KV cache, as decoding does, so that the cache's policy acts as in generation.

In one pass over a whole window, a cache policy that leaves the latest tokens exact (`residual`, incomplete groups of
keys) does so for the end of the window alone. In chunks, the tokens before each chunk are exact too.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compress.errors import CalibrationError
from compress.models.caches.attentions import attentions_with_cache, without_policies
from compress.models.kinds.batch import IDS, Batch
from compress.models.kinds.contract import run_on
from compress.models.kinds.kinds import adapter_of, described
from compress.numerics.metrics import relative_error

PROBED_CHUNKS = 4  # of the first window, which are computed both ways before the cache is trusted
TOLERANCE = 0.1  # relative, of the logits: 16-bit sums in another order stay below it, a lost state does not


def check_chunk(model: nn.Module, chunk: int | None) -> None:
    """Check that a model can read windows in chunks.

    Args:
        model: The model.
        chunk: Tokens of a chunk; None for whole windows.

    Raises:
        CalibrationError: for a model without a KV cache.
    """
    if chunk is None:
        return
    if not adapter_of(model).streams or not attentions_with_cache(model):
        raise CalibrationError(f"test: chunk {chunk} needs a KV cache: {described(model)}; write chunk: null")


@torch.no_grad()
def read_in_chunks(model: nn.Module, ids: Int[Tensor, "1 length"], chunk: int) -> Float[Tensor, "1 length vocabulary"]:
    """Compute the logits of all tokens, some tokens at a time.

    Args:
        model: Model with a KV cache.
        ids: Token ids of a window.
        chunk: Tokens of a forward pass; the cache has those before it.

    Raises:
        CalibrationError: if the model returns no KV cache.
    """
    logits, cache = [], None
    for part in ids.split(chunk, dim=1):
        output = model(input_ids=part, past_key_values=cache, use_cache=True)
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            raise CalibrationError(f"test: chunk {chunk}: {type(model).__name__} returns no cache; write chunk: null")
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


def prove_chunks(model: nn.Module, window: Batch, chunk: int) -> None:
    """Check that the model computes the same logits in chunks and at once, both without its cache policies.

    Args:
        model: Model with a KV cache.
        window: Its first tokens are read.
        chunk: Tokens of a chunk.

    Raises:
        CalibrationError: if the logits differ, as those of models do that keep other states than keys and values.
    """
    ids = window.inputs[IDS][:, : PROBED_CHUNKS * chunk]
    with without_policies(model), torch.no_grad():
        whole = run_on(model, Batch({IDS: ids})).logits
        error = relative_error(read_in_chunks(model, ids, chunk), whole)
    if not error <= TOLERANCE:
        raise CalibrationError(
            f"test: chunk {chunk}: {type(model).__name__} computes other logits in chunks than at once (relative "
            f"difference {error:.2g}); write chunk: {'null' if chunk == 1 else '1, or null'}"
        )
