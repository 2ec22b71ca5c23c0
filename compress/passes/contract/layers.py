"""What passes get and return: a layer, its solution, the inputs of a block."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from compress.layers.base import InputTransform, WeightPart
from compress.layers.linear import CompressedLinear, Weight
from compress.layers.scheme import LayerScheme
from compress.models.structure.links import Group, Link
from compress.models.structure.permutations import Permutation
from compress.numerics.quant.codes import Codes, SourceCodes
from compress.passes.contract.facts import Log, RequiredSparsity
from compress.passes.contract.observers import Observer
from compress.passes.contract.processes import Processes
from compress.passes.contract.records import LayerResult as LayerResult


def no_codes(*_: Any) -> None:
    """Return None: there are no codes, or no importance matrices."""
    return


def _rows_of(source: Callable[[], SourceCodes | None], rows: slice) -> SourceCodes | None:
    codes = source()
    return None if codes is None else codes.rows(rows)


@dataclass(frozen=True)
class Layer:
    """The information for a solver in addition to the weight and the statistics.

    Attributes:
        name: full module name.
        mask: True where weights are kept, or None.
        storage: the dtype of stored scales.
        log: log(kind, message, **figures) writes to the journal.
        inputs: the observer of `watches`, or None.
        shared_absmax: the largest magnitude of all weights that read the same input, including this weight; servers
            fuse such layers, so the common factor of their scales is computed from it.
        allocated: the layer's value from the survey of the pass.
        unquantized: the weight before a pass of the same sweep quantized it, for passes that require it.
        negative_scales: whether the readers of the format take negative scales of integers.
        seed: the seed of the recipe.
        source: returns the codes that the layer has in a source that is quantized already, or None.
        importance: returns the mean square of each input, [in], that an importance matrix of llama.cpp states; of its
            file and the number of inputs.
    """

    name: str
    mask: Bool[Tensor, "out in"] | None
    storage: torch.dtype
    log: Log
    inputs: Any = None
    shared_absmax: float | None = None
    allocated: Any = None
    unquantized: Float[Tensor, "out in"] | None = None
    negative_scales: bool = False
    seed: int = 0
    source: Callable[[], SourceCodes | None] = no_codes
    importance: Callable[[str, int], Tensor | None] = no_codes

    @property
    def generator(self) -> torch.Generator:
        """A new generator of random numbers on the CPU, seeded by the recipe's seed and the name of the layer."""
        return torch.Generator().manual_seed(self.seed ^ zlib.crc32(self.name.encode()))

    def of_rows(self, rows: slice) -> Layer:
        """Return the same for some rows of the weight."""
        mask, unquantized = (None if t is None else t[rows] for t in (self.mask, self.unquantized))
        return replace(self, mask=mask, unquantized=unquantized, source=partial(_rows_of, self.source, rows))


@dataclass(frozen=True)
class Solution:
    """A solved layer.

    Attributes:
        weight: the replacement of all parts of the weight: floats, codes, or parts; None: the parts do not change.
        mask: True where weights are kept; None: the mask does not change.
        transforms: input transforms; each replaces the transform of the same kind.
        zeros: the sparsity that is due, which is checked in the checkpoint.
        added: further parts of the weight.
    """

    weight: Weight | None = None
    mask: Bool[Tensor, "out in"] | None = None
    transforms: tuple[InputTransform, ...] = ()
    zeros: RequiredSparsity | None = None
    added: tuple[WeightPart, ...] = ()

    @classmethod
    def of_rows(cls, parts: Sequence[Solution]) -> Solution:
        """The solution of a layer from those of its rows, in order; all but weights and masks are common to them."""
        weights, masks = [part.weight for part in parts], [part.mask for part in parts if part.mask is not None]
        codes, floats = [w for w in weights if isinstance(w, Codes)], [w for w in weights if isinstance(w, Tensor)]
        assert len(codes) == len(parts) or len(floats) == len(parts), "a pass that solves rows apart gives no parts"
        weight = Codes.of_rows(codes) if codes else torch.cat(floats)
        return replace(parts[0], weight=weight, mask=torch.cat(masks) if masks else None)


@dataclass(frozen=True)
class Surveyed:
    """One layer in a survey.

    Attributes:
        statistics: the survey's observer.
        rows: sampled inputs, [rows, in], or None.
        together: a name that is common to the linears that are stored alike: those of one module with the same input,
            which servers compute as one, and the same ones of all experts.
        stored_bytes: returns the bytes that the format of the checkpoint takes for a scheme of this layer.
    """

    layer: Layer
    module: CompressedLinear
    statistics: Any
    rows: Float[Tensor, "rows in"] | None
    together: str = ""
    stored_bytes: Callable[[LayerScheme], int] | None = None

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """The weight in float32."""
        return self.module.weight.float()


class BlockInputs(Protocol):
    """The inputs of a block, for a block pass."""

    groups: list[Group]
    """Groups with linears that the pass works on, in the order of execution."""
    names: list[str]
    """The linears inside the block that the pass works on; groups may contain others that read the same tensor."""

    @property
    def name(self) -> str:
        """The block's full name."""
        ...

    @property
    def label(self) -> str:
        """The label of the pass and the block in errors."""
        ...

    @property
    def storage(self) -> torch.dtype:
        """The dtype of stored scales and dense tensors."""
        ...

    @property
    def links(self) -> list[Link]:
        """Links into which a scale per channel can be folded; the pass works on at least one reader of each."""
        ...

    @property
    def permutations(self) -> list[Permutation]:
        """Channels that may be permuted; the pass works on at least one reader of each."""
        ...

    @property
    def processes(self) -> Processes:
        """The processes of a launcher, which divide the sequences of every batch; a pass that runs the block by itself
        combines its results with theirs."""
        ...

    def observe(self, observer: type[Observer]) -> dict[Group, Any]:
        """Run all calibration inputs through the block once; return the observer of each group's input."""
        ...

    def probe(self, block: nn.Module) -> Tensor:
        """Return the output of the block (or of a copy) for one short fixed input, to prove rewrites."""
        ...

    def replayed(self, observer: type[Observer]) -> Mapping[Group, Any]:
        """Return the observer of each group's input, for passes that require `replays`.

        The observers of `Run.inputs_at_once` groups are in memory at once: when another one is read, the calibration
        inputs run again through the block as it is now. Read them in the order of the groups, in every process, and
        do not change them.
        """
        ...

    @property
    def batches(self) -> int:
        """The number of calibration batches; with several processes, each has some sequences of a batch."""
        ...

    def forward(self, block: nn.Module, batch: int) -> Tensor:
        """Return the output of the block (or a copy) for one batch."""
        ...

    def reference(self, batch: int) -> Tensor:
        """Return the uncompressed model's activations after this block; only for passes that require `reference`."""
        ...

    def original(self, batch: int) -> Tensor:
        """Return the original block's output for the same inputs; only for passes that require `original`."""
        ...

    @property
    def work(self) -> Path | None:
        """A folder for files that a killed run needs again, until the block is done; None if the run has no folder."""
        ...

    def layer(self, name: str) -> Layer:
        """Return the information for a solver about a linear."""
        ...

    def put(self, name: str, solution: Solution) -> None:
        """Install a solved layer in its storage form, and measure its error."""
        ...
