"""Distillation: the compressed model learns the uncompressed model's token distributions (Hinton 2015)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from compress.passes.families.training import TrainingPass


class Distill(TrainingPass):
    """Train on the outputs of a teacher for the calibration text; the teacher is the uncompressed model by default.

    Trained: a factor of each scale, dense weights and biases of the targets, and norms whose own names match the
    targets. Not trained: codes, pruned weights (they stay zero), the LM head and the embedding.

    With `train: [scales, norms]` this is the end-to-end stage of EfficientQAT (Chen 2024, arXiv 2407.11062, section
    3.3), with a teacher instead of the next tokens of the text.

    For a masked language model, `{top_k: null, temperature: 2, ce_weight: 0.286, cosine: 0.143}` gives the triple loss
    of Sanh 2019 (arXiv 1910.01108, section 3): soft targets, masked tokens and the direction of the last hidden states,
    weighted 5 : 2 : 1 as in the authors' code.
    """

    use_for: ClassVar[str] = (
        "Recovering quality after quantization or pruning, in an hour of training or less: scales and norms after "
        "gptq, weights after sparsegpt."
    )
    not_for: ClassVar[str] = (
        "Models whose training does not fit into memory together with the teacher; lkd trains one block at a time."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/1503.02531"

    ce_weight: float = Field(default=0.0, ge=0, le=1, description="weight of the cross-entropy on the text in the loss")
