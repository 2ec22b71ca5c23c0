"""Distillation: the compressed model learns to give the uncompressed one's next-token distributions (Hinton 2015)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from compress.families.training import TrainingPass


class Distill(TrainingPass):
    """Minimize the divergence from the uncompressed model on the calibration text, by a few steps of AdamW.

    What is compressed stays so: codes are fixed, and a factor of each scale is learned (with `train: [scales, norms]`
    this is the end-to-end stage of EfficientQAT, Chen 2024, arXiv 2407.11062, section 3.3, with a teacher in place of
    the text's own next tokens); pruned weights stay zero. Scales, weights and biases are those of the targets; norms
    are trained where their own names match the targets. The head and the embeddings are not trained.

    Of models that predict masked tokens the loss is the triple one of Sanh 2019 (arXiv 1910.01108, section 3) with
    `{top_k: null, temperature: 2, ce_weight: 0.286, cosine: 0.143}`: soft targets, masked tokens and the direction of
    the last hidden states, weighed 5 : 2 : 1 as in the authors' code.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/1503.02531"

    ce_weight: float = Field(
        default=0.0, ge=0, le=1, description="share of the loss that is cross-entropy with the text"
    )
