"""Terms of models that reports and readers of headers share, without torch."""

from __future__ import annotations

from typing import Literal

Compared = Literal["tokens", "classes", "labels", "score", "spans", "embeddings"]
"""What is compared of two models: probabilities of tokens, of classes, of each label for itself, one score, the start
and the end of a span, or embeddings."""

NEXT_TOKENS = "next tokens"
"""What a causal language model predicts."""

CACHE_KEY = "compress_kv_cache"
"""The entry of config.json with the policy of each attention module, where no format states it."""

Pooling = Literal["mean", "first", "last"]
"""How the embedding of a text is made of the hidden states of its tokens: their mean, or that of one token."""
