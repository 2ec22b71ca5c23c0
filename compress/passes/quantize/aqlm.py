"""AQLM: runs of weights as sums of codebook entries that are fitted to the layer's output (Egiazarian 2024)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from compress.layers.parts.codebook import CodebookPart, CodebookScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.additive import alternate, start
from compress.passes.contract.facts import Effects, Fact
from compress.passes.contract.layers import Layer, Solution
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram
from compress.passes.families.compensation import CompensatingPass


class AQLM(CompensatingPass):
    """Store each run of `length` weights as indices into `books` codebooks of the layer, whose entries are summed.

    Minimize ||W X - Q X||^2 over codes, codebooks and a scale per row (section 3 of the paper).

    Start: the first codebook holds the k-means centers of the runs of normalized rows. Each further codebook is fitted
    to what the ones before it leave. The codes of a single codebook start with a sweep in which later runs compensate
    the error of earlier ones (GPTVQ, arXiv 2402.15319, section 3.2).

    Improvement: codebooks, scales and codes are improved in turns. Codebooks come from least squares by conjugate
    gradients, codes from coordinate descent run by run, in place of the paper's beam search. The error never rises,
    except by rounding to the stored dtype.

    Size: bits * books / length bits per weight, and 16 * 2^bits * length * books bits per layer for the codebooks.

    `distill` and `lkd` with `train: [scales]` learn the entries of a single codebook. This is the continuous half of
    PV-Tuning (arXiv 2405.14852).
    """

    use_for: ClassVar[str] = (
        "2 bits and fewer. Two indices of 8 bits for 8 weights, or one for 4, give 2 bits. Train the entries with "
        "distill afterwards."
    )
    not_for: ClassVar[str] = (
        "3 bits and more, where gptq is as good, and faster to make and to run. Small layers, for which the codebooks"
        " are large."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2401.06118"
    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized", "masked"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"quantized"})

    bits: int = Field(default=8, ge=2, le=8, description="bits of an index; a book has 2^bits entries")
    length: int = Field(default=4, ge=2, le=16, description="weights of a run, which share their indices")
    books: int = Field(default=1, ge=1, le=8, description="codebooks whose entries are summed")
    rounds: int = Field(default=8, ge=0, description="times that books, scales and codes are improved in turns")
    steps: int = Field(default=8, ge=1, description="steps of conjugate gradients for the books in each round")
    seed: int = Field(default=0, ge=0, description="seed of the first entries of k-means")

    def without_effect(self) -> dict[str, str]:
        return super().without_effect() | ({"steps": "with rounds: 0; leave it out"} if self.rounds == 0 else {})

    def effects(self, layer: LayerScheme) -> Effects:
        part = CodebookScheme(self.bits, self.length, self.books, "tensor", scaled=True)
        return replace(super().effects(layer), scheme=layer.with_parts(part))

    def memory(self, size: ProblemSize) -> int:
        return 10 * 4 * size.shape[0] * size.shape[1] + 3 * 4 * size.shape[1] ** 2

    def solve(self, weight: Float[Tensor, "out in"], statistics: Gram, layer: Layer) -> Solution:
        factor = statistics.factor_of(layer.name, layer.log, self.regularization)
        hessian = statistics.damped(self.regularization)
        weight = self.fitted(weight.float(), statistics)
        state = start(weight, hessian, factor, 2**self.bits, self.length, self.books, self.seed)
        alternate(state, self.rounds, self.steps)
        state.books, state.scale = (t.to(layer.storage).float() for t in (state.books, state.scale))
        for book in range(self.books if self.rounds else 0):
            state.fit_codes(book)
        stored = state.books[None].to(layer.storage), state.scale.to(layer.storage)
        return Solution([CodebookPart.of(state.codes.permute(1, 2, 0), *stored)])
