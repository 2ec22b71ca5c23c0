"""About how much memory a run takes at its peak: what every pass says that it holds, and what the house does beside it.

Tensors alone are counted, and of the weights only those that are no views of a file (`model.held`), since the system
can take back the others. What is held is held for one block at a time, unless passes over the whole model, or several
sweeps, need all of them. Nothing is computed, and no weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from compress.api.memory import ProblemSize
from compress.api.observers import Sample
from compress.api.passes import LayerPass, ModelPass, Step
from compress.data.ids import extent
from compress.model.open.opening import OpenModel
from compress.model.open.resident import held_bytes
from compress.model.save import outside_state
from compress.model.structure.blocks import Block
from compress.numerics.dtypes import DTYPES
from compress.numerics.quant.codes import groups_in
from compress.recipe.schema import Recipe
from compress.stream.store import STORE_BYTES
from compress.weights.layer import LayerScheme

# Tensors of a forward pass through a block, as transformers' blocks have them: of the hidden width a shortcut, what a
# norm made of it, and what is next (queries, keys and values together, where those are wider than the widest input);
# and of the widest input of a linear what it is computed from (gate, up and activation).
NARROW, WIDE = 3, 3

Before = Callable[[int, str], LayerScheme]
"""(number of a step, full name of a linear) -> how the steps before it leave the linear."""


@dataclass
class Footprint:
    """The estimate for a recipe on a model. steps: of the recipe, resolved. shapes: (out, in) of linears by full name.

    store_bytes: the limit of an activation store.
    """

    recipe: Recipe
    opened: OpenModel
    steps: Sequence[Step]
    shapes: dict[str, tuple[int, int]]
    before: Before
    store_bytes: int = STORE_BYTES
    tokens: int = field(init=False)
    per_batch: int = field(init=False)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        calibration = self.recipe.calibration
        sequences, self.length = extent(calibration.source, calibration.sequences, calibration.length)
        batch = min(calibration.batch, sequences)
        if not any(step.requires.data for _, step, _ in self.steps):
            sequences = batch  # as the runner does
        self.tokens, self.per_batch = sequences * self.length, batch * self.length
        self.itemsize = self.opened.dtype.itemsize
        self.vocabulary: int = getattr(self.opened.config, "vocab_size", 0)
        self.widest = max(width for _, width in self.shapes.values())
        self.hidden: int = getattr(self.opened.config, "hidden_size", self.widest)
        self.states_bytes = self.tokens * self.hidden * self.itemsize
        self.outside = outside_state(self.opened)

    def peak_bytes(self) -> int:
        """The largest of all that is held at one time, what is outside of the blocks included."""
        whole = any(isinstance(step, ModelPass) for _, step, _ in self.steps)
        kept = self._all_blocks() if whole else 0
        found = [self._finished()]
        for i, (_, step, names) in enumerate(self.steps):
            if isinstance(step, ModelPass):
                found.append(kept + step.memory(self._size(i, names)))
        last = {self.block_of(block): block for block in self.opened.blocks}.values()  # one of those that are alike
        if not all(isinstance(step, ModelPass) for _, step, _ in self.steps):
            found += [kept + self._block(block, whole) for block in last]
        return self.held(self.outside) + max(found)

    def held(self, tensors: dict[str, Tensor]) -> int:
        """Of tensors of the model as it came, those that are held; all where they are rounded to a narrower dtype."""
        dtype = self.recipe.save.dtype
        if dtype != "auto" and DTYPES[dtype].itemsize < self.itemsize:
            return sum(tensor.nbytes for tensor in tensors.values())
        return held_bytes(self.opened, tensors)

    def block_of(self, block: Block) -> tuple[object, ...]:
        """What decides how much a block takes: its shapes, and the steps that work on each of its linears."""
        chosen = [{n.removeprefix(block.name) for n in names if self._inside(block, n)} for _, _, names in self.steps]
        sizes = tuple((name, tuple(t.shape)) for name, t in block.module.state_dict().items())
        return sizes, tuple(frozenset(names) for names in chosen)

    def _inside(self, block: Block, name: str) -> bool:
        return name.startswith(block.name + ".")

    def _tensors(self, block: Block) -> dict[str, Tensor]:
        return {f"{block.name}.{name}": tensor for name, tensor in block.module.state_dict().items()}

    def _all_blocks(self) -> int:
        """All blocks as they came, and what has become of their linears."""
        worked = [name for name in self.shapes if self._worked(len(self.steps), name)]
        every = {name: t for block in self.opened.blocks for name, t in self._tensors(block).items()}
        return self.held(every) + sum(self._became(len(self.steps), name) for name in worked)

    def _worked(self, count: int, name: str) -> bool:
        """Whether one of the first `count` steps works on a linear."""
        return any(name in names for _, _, names in self.steps[:count])

    def _became(self, count: int, name: str) -> int:
        """Bytes of what the first `count` steps make of a linear."""
        rows, width = self.shapes[name]
        scheme = self.before(count, name)
        return scheme.size_bytes(self.opened.dtype) if scheme.quantized else rows * width * self.itemsize

    def _finished(self) -> int:
        """While the checkpoint is evaluated: logits of one text."""
        length = extent(self.recipe.eval.perplexity[0], None, self.recipe.eval.length)[1] if self.texts else 0
        return length * self.vocabulary * self.itemsize

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts to evaluate on."""
        return self.recipe.eval.perplexity

    # A sweep

    def _block(self, block: Block, whole: bool) -> int:
        """The peak while a block is worked on; whole: weights of all blocks are counted already."""
        sweeps = [(i, step, names) for i, (_, step, names) in enumerate(self.steps) if not isinstance(step, ModelPass)]
        parts = [(i, step, [n for n in names if self._inside(block, n)]) for i, step, names in sweeps]
        mine = [(i, step, names) for i, step, names in parts if names]
        states = min(self.states_bytes, self.store_bytes)
        compared = any(step.requires.reference for _, step, _ in sweeps)
        original = any(step.requires.original for _, step, _ in mine)
        stores = states * (1 + 2 * compared + original)  # of the reference: before the block, and after it
        if any(step.requires.unquantized for _, step, _ in sweeps):
            stores += sum(4 * rows * width for n, (rows, width) in self.shapes.items() if self._inside(block, n))
        peak = self.forward_bytes(self.per_batch)
        for i, step, names in mine:
            if isinstance(step, LayerPass):
                found = self._layer_pass(step, names)
            else:
                found = step.memory(self._size(i, names, block))
            became = 0 if whole else sum(self._became(i + 1, n) for n in self.shapes if self._inside(block, n))
            peak = max(peak, found + became)
        return stores + peak + (0 if whole else self.held(self._tensors(block)))

    def forward_bytes(self, tokens: int, narrow: int = NARROW) -> int:
        """What a forward pass through a block holds for so many tokens."""
        return tokens * self.itemsize * (narrow * self.hidden + WIDE * self.widest)

    def _layer_pass(self, step: LayerPass, names: Sequence[str]) -> int:
        """Statistics, and either a forward pass or a solver.

        In lockstep (`true_sequential`) all batches stop inside of the block, and so do all of the uncompressed model
        where a pass compares with it: their activations there are no store's, and nothing limits them.
        """
        groups = self._inputs(names)
        seen = sum(step.observer.memory_bytes(width) + Sample.memory_bytes(width, self.itemsize) for width in groups)
        stopped = self.tokens * self.itemsize * (NARROW * self.hidden + self.widest)
        again = max(0, self.states_bytes - self.store_bytes)  # what was read from files
        times = step.true_sequential + step.requires.reference
        sizes = {name: ProblemSize.of_linear(self.shapes[name], self.itemsize) for name in names}
        solver = max((step.for_layer(name) or step).memory(size) for name, size in sizes.items())
        forward = self.forward_bytes(self.per_batch, 0 if times else NARROW)  # which are among those that have stopped
        return seen + times * (stopped + again) + max(solver, forward)

    def _inputs(self, names: Sequence[str]) -> tuple[int, ...]:
        """Widths of the tensors that linears read, taking those of one width in one module to read the same."""
        found = {(name.rpartition(".")[0], self.shapes[name][1]) for name in names}
        return tuple(sorted(width for _, width in found))

    def _size(self, index: int, names: Sequence[str], block: Block | None = None) -> ProblemSize:
        """What step `index` finds of these linears, in a block or in the whole model."""
        weights = packed = scales = 0
        for name in names:
            rows, width = self.shapes[name]
            scheme = self.before(index, name)
            if not scheme.quantized:
                weights += rows * width
                continue
            packed += rows * width
            for part in scheme.parts:
                size = part.scale_groups
                scales += 0 if size is None else 1 if size == "tensor" else rows * groups_in(width, size)
        within = {n: shape for n, shape in self.shapes.items() if block is None or self._inside(block, n)}
        sizes = [rows * width for rows, width in within.values()]
        around = self.outside if block is None else self._tensors(block)
        inside = 0 if block is None else sum(sizes)
        return ProblemSize(
            weights, scales, sum(t.numel() for t in around.values()) - inside,
            sum(rows + width for rows, width in within.values()), self.vocabulary if block is None else 0,
            self.length if block is None else self.per_batch, self.itemsize, packed, self._inputs(names),
            max(sizes, default=0), 0 if block is None else self.forward_bytes(self.per_batch),
            0 if block is None else self.states_bytes,
        )  # fmt: skip
