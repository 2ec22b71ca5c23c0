"""LKD: each compressed block learns the output of the original block (ZeroQuant, Yao 2022)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import nn

from compress.layers.linear import replace_linear
from compress.passes.contract.facts import Log, Requirements
from compress.passes.contract.layers import BlockInputs
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.passes import COPIES
from compress.passes.families.reconstruction import ErrorName, ReconstructionPass, block_error


class LKD(ReconstructionPass):
    """Train compressed blocks to reproduce the outputs of the original ones; use it after passes that compress them.

    Minimize ||block(X) - target||^2 / ||target||^2 over the trained parameters of a block, by a few steps of AdamW. The
    original block is the teacher (section 3.3 of the paper). The pass must follow the passes that compress the block,
    in the same sweep.

    Codes are fixed, and a factor of each scale is learned; pruned weights stay zero. Norms are trained if their own
    names match the targets. With `train: norms` this is Norm Tweaking (Li 2023, arXiv 2309.02784).

    The learned parameters are kept if the block, in its stored form, has a smaller error on the held-out batches (on
    all batches if none are held out).
    """

    use_for: ClassVar[str] = (
        "3 and 2 bits when only one block fits into memory: each block is trained after it was quantized."
    )
    not_for: ClassVar[str] = "Models that fit into memory as a whole: distill, end to end, loses less."
    paper: ClassVar[str] = "https://arxiv.org/abs/2206.01861"

    error: ErrorName = Field(
        default="symmetric",
        description="target: 'symmetric': the original block's output for the same inputs; 'asymmetric': the "
        "uncompressed model's activations, which run alongside",
    )

    @property
    def requires(self) -> Requirements:
        return Requirements(
            data=True,
            reference=self.error == "asymmetric",
            original=True,
            training=True,
            trains=self.train or (),
            batches=True,
        )

    def memory(self, size: ProblemSize) -> int:
        """As for any training, plus the decoded codes as floats, which every step multiplies by the scales."""
        return super().memory(size) + 4 * (2 * size.packed + COPIES * size.largest)

    def solve_block(self, block: nn.Module, inputs: BlockInputs, log: Log) -> None:
        for name in inputs.names:
            replace_linear(block, name)
        targets = inputs.reference if self.error == "asymmetric" else inputs.original
        judged = self.judged(inputs.batches)
        start = block_error(block, inputs, targets, judged)
        if start == 0:
            log("note", "the block's output is unchanged; there is nothing to learn")
            return
        state_before = {name: t.clone() if t.dim() < 2 else t for name, t in block.state_dict().items()}
        steps, _ = self.learn(block, inputs, targets, log)
        learned = block_error(block, inputs, targets, judged)
        if learned < start:
            log("note", "error of the block's output", start=start, learned=learned, steps=steps)
        else:
            log("fallback", "training did not reduce the error; the block is not changed", start=start, learned=learned)
            block.load_state_dict(state_before, assign=True)
