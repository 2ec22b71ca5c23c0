"""Estimate the peak memory of a run: the memory of each pass, and of the pipeline.

Tensors are counted, and the modules of linears. Weights that are views of a mapped file are not counted
(`OpenModel.resident_bytes`), because the operating system can free their pages. One block is in memory at a time,
unless a pass over the whole model, or several sweeps, need all blocks. The estimate computes nothing and reads no
weights.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from compress.checkpoint.save import outside_dense
from compress.data.ids import extent, reading_bytes
from compress.data.listed import count_in, lists_of
from compress.data.text_source import TextSource, as_source
from compress.errors import CannotRun
from compress.layers.scheme import LayerScheme
from compress.models.experts import in_experts
from compress.models.kinds.contract import text_config
from compress.models.kinds.kinds import adapter_of, is_headless
from compress.models.paged import portion_bytes
from compress.models.reshape.experts import experts_per_token
from compress.models.structure.blocks import Block
from compress.models.structure.ends import find_ends
from compress.numerics.metrics import rows_of_chunk
from compress.numerics.quant.codes import groups_in
from compress.passes.contract.memory import STORE_BYTES, ProblemSize
from compress.passes.contract.passes import LayerPass, ModelPass, Pass, calibrates, measured_tokens
from compress.passes.contract.samples import Sample
from compress.pipeline.resolve import ResolvedRecipe
from compress.pipeline.sources import maps_ends
from compress.pipeline.texts import PROBE_TOKENS, texts_of
from compress.recipe.tables import megabytes
from compress.train.options import TrainingOptions

# Tensors of a forward pass through a block of transformers. With the hidden width: the residual, the output of a norm,
# and the next tensor (queries, keys and values together, if these are wider than the widest input). With the width of
# the widest input of a linear: the tensors that it is computed from (gate, up and activation).
NARROW, WIDE = 3, 3
WAITING = 2  # with the hidden width, while a batch waits at an input: the residual and the output of a norm
LOSS, BASE_LOSS = 1, 3  # copies of a chunk of logits: log-probabilities; also chances, and those without the top ones
CROSS = 2  # of a token of an earlier stack, while a block waits: keys and values of cross attention
SHOWN_BYTES = 100_000
"""The least size of a part that a text names."""
LINEAR_BYTES = 25_000
"""Memory of a linear without its weights: its modules, tensors without elements, names, results and entries of the
journal. Measured on blocks of 64 to 512 experts, 64 wide, with the process of eval/benchmarks/memory.py; it matters
where the experts are many and small."""
ROUTING_BYTES = 4 * 8  # of a token: the numbers of the experts that it has chosen, if these are eight
CHOSEN: WeakKeyDictionary[nn.Module, int | None] = WeakKeyDictionary()
"""The experts of a token by model; None if the model does not run without data."""
EVALUATION, TEXTS, COPIED = "evaluation", "reading texts", "copied tensors"

Before = Callable[[int, str], LayerScheme]
"""(number of a step, full name of a linear) -> the storage scheme of the linear before that step."""


def _can_recompute(step: Pass) -> bool:
    """Whether activations inside of a block can be recomputed for a pass instead of being stored."""
    return isinstance(step, LayerPass) and step.true_sequential and not step.requires.reference


@dataclass(frozen=True)
class Need:
    """The memory of one part of a run. where: the part. parts: bytes by what holds them."""

    where: str
    parts: dict[str, int]

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def text(self) -> str:
        """The parts in words, the largest first."""
        shown = sorted(((size, name) for name, size in self.parts.items() if size >= SHOWN_BYTES), reverse=True)
        parts = ", ".join(f"{name} {megabytes(size)} MB" for size, name in shown)
        return parts or f"parts below {megabytes(SHOWN_BYTES)} MB"


@dataclass
class Footprint:
    """The estimate for a recipe on a model.

    store_bytes: the memory limit of an activation store. copies_bytes: the most memory that the kernels' copies of
    packed weights may take; where all take more, the evaluation holds those of one module. inputs_at_once: the most
    input tensors of a block whose statistics are in memory at once; None: those of all layers. recomputes: whether
    activations inside of a block are computed again instead of stored (`recomputed`). unbuilt_linears: linears of the
    blocks that are not there because equal ones stand for them. pages_weights: whether weights of a block that are no
    views of its file, and solved ones, are in files (`Run.pages_weights`).
    """

    resolved: ResolvedRecipe
    before: Before
    store_bytes: int = STORE_BYTES
    copies_bytes: int = sys.maxsize
    inputs_at_once: int | None = None
    recomputes: bool = False
    several: bool = False
    unbuilt_linears: int = 0
    pages_weights: bool = False
    tokens: int = field(init=False)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.recipe, self.opened, self.steps = self.resolved.recipe, self.resolved.opened, self.resolved.steps
        self.shapes = self.resolved.shapes
        calibration = self.recipe.calibration
        sequences, self.length = extent(calibration, "calibration", calibration.sequences, calibration.length)
        if lists_of(self.opened.model, calibration) is not None:
            sequences = sequences or count_in(calibration, "calibration")
        else:
            self.length = measured_tokens(self.steps, self.length)
        batch = min(calibration.batch, sequences)
        read = sequences
        if not calibrates(self.steps):
            batch = sequences = min(1, sequences)  # as `run` does
        self.lengths = adapter_of(self.opened.model).stack_lengths(self.opened.model, self.length)
        self.length = sum(self.lengths)
        self.sequences, self.batch, self.tokens = sequences, batch, sequences * self.length
        self.itemsize = self.opened.dtype.itemsize
        described = text_config(self.opened.config)
        self.vocabulary: int = 0 if is_headless(self.opened.model) else getattr(described, "vocab_size", 0)
        self.widest = max(width for _, width in self.shapes.values())
        self.hidden: int = getattr(described, "hidden_size", self.widest)
        self.attention = self._attention_width(described)
        self.listed_bytes = self._listed_bytes(read + sequences)
        self.outside, self.ends = outside_dense(self.opened), find_ends(self.opened.model)

    def _attention_width(self, config: Any) -> int:
        """Return the numbers of a token while it waits at the output of attention.

        The output of the norm, queries, keys, values, and what attention has computed from them; the residual is the
        input of the block.
        """
        heads = getattr(config, "num_attention_heads", None) or 1
        size = getattr(config, "head_dim", None) or self.hidden // heads
        shared = getattr(config, "num_key_value_heads", None) or heads
        return self.hidden + 2 * heads * size + 2 * shared * size

    def _listed_bytes(self, calibrated: int) -> int:
        """Bytes of the examples of lists: those of the calibration, of its batches, and of the evaluation.

        Token ids of texts are counted by `_text_bytes`.
        """
        model, windows = self.opened.model, None if self.recipe.eval is None else self.recipe.eval.windows
        size = adapter_of(model).feature_bytes(model, self.lengths[-1])
        listed = [as_source(text) for text in self.texts if size and lists_of(model, as_source(text)) is not None]
        counts = [count_in(text, "test") for text in listed]
        evaluated = sum(counts if windows is None else (min(count, windows) for count in counts))
        calibrated = calibrated if lists_of(model, self.recipe.calibration) is not None else 0
        return (calibrated + evaluated) * size

    def _text_bytes(self) -> int:
        """The largest memory in which one text is read and tokenized; lists of files are counted by `_listed_bytes`."""
        settings, calibration, model = self.recipe.eval, self.recipe.calibration, self.opened.model
        sizes = [
            reading_bytes(text, "calibration", count, calibration.length)
            for text, count in calibration.texts()
            if lists_of(model, text) is None
        ]
        if settings is not None:
            texts = [as_source(text) for text in self.texts if lists_of(model, as_source(text)) is None]
            sizes += [reading_bytes(text, "test", settings.windows, settings.length) for text in texts]
        return max(sizes, default=0)

    @property
    def states_bytes(self) -> int:
        """Bytes of the activations that enter a block, of all sequences; in the stack where they are most."""
        return max(self._states_bytes(block) for block in self.opened.blocks)

    def peak_bytes(self) -> int:
        """The peak memory in bytes, including the tensors outside of the blocks."""
        return max(need.size_bytes for need in self.needs())

    def needs(self) -> list[Need]:
        """Return the memory of each pass, in the block where it takes most, and of the evaluation."""
        has_model_pass = any(isinstance(step, ModelPass) for _, step, _ in self.steps)
        outside = "tensors outside of the blocks"
        rows = {"examples": self.listed_bytes} if self.listed_bytes else {}
        rows["modules of linears"] = (len(self.opened.linear_names()) + self.unbuilt_linears) * LINEAR_BYTES
        always, whole_ends = rows | {outside: self.held(self._unmapped())}, rows | {outside: self.held(self.outside)}
        copies = self._copies()
        evaluated = {"logits of a text": self._logits_bytes(), "temporaries of the loss": self._loss_bytes(copies)}
        # the activations of the blocks are freed before there are logits
        evaluated["a forward pass"] = max(0, self.forward_bytes(self._scored) - sum(evaluated.values()))
        evaluated["weights in the layout of kernels"] = copies
        needs = [Need(EVALUATION, whole_ends | evaluated), Need(TEXTS, whole_ends | {"the text": self._text_bytes()})]
        if self.opened.dequantized_bytes and self.resolved.format.file is None:
            needs.append(Need(COPIED, whole_ends | {"dequantized weights": self.opened.dequantized_bytes}))
        if has_model_pass:
            always["all blocks"] = self._all_blocks()
        for i, (label, step, names) in enumerate(self.steps):
            survey = step.survey()
            if survey is not None and survey.whole:
                blocks = {} if has_model_pass else {"all blocks": self._all_blocks()}
                derivatives = {"derivatives": survey.memory(self._size(i, names))}
                needs.append(Need(f"{label} survey", always | blocks | derivatives))
            if isinstance(step, ModelPass):
                needs.append(Need(label, always | {"the pass": self._pass_bytes(step, self._size(i, names))}))
                continue
            for end in (end for end in self.ends if end.name in names):
                size = ProblemSize.of_linear(self.shapes[end.name], self.itemsize)
                parts = {"solution": step.memory(size), "compressed": self._compressed_bytes(i + 1, end.name)}
                needs.append(Need(f"{label} on {end.name}", always | parts))
        if not all(isinstance(step, ModelPass) for _, step, _ in self.steps):
            for block in self._kinds():
                needs += [Need(n.where, always | n.parts) for n in self._block_needs(block, has_model_pass)]
        largest: dict[str, Need] = {}
        for need in needs:
            key = need.where.partition(" on ")[0]
            if key not in largest or need.size_bytes > largest[key].size_bytes:
                largest[key] = need
        return list(largest.values())

    def held(self, tensors: dict[str, Tensor]) -> int:
        """Bytes of the original tensors that are in memory; all of them if they are rounded to a narrower dtype."""
        if self.resolved.storage.itemsize < self.itemsize:
            return sum(tensor.nbytes for tensor in tensors.values())
        return self.opened.resident_bytes(tensors)

    def _unmapped(self) -> dict[str, Tensor]:
        """The tensors outside of the blocks without the embedding and the head if the passes run with mapped ones."""
        checkpoint = self.opened.weights.checkpoint
        if checkpoint is None or not maps_ends(self.recipe):
            return self.outside
        mapped = checkpoint.narrow_ends(self.opened.model)
        return {name: tensor for name, tensor in self.outside.items() if name not in mapped}

    def block_key(self, block: Block) -> tuple[object, ...]:
        """A key that determines the memory of a block: its shapes, and the steps of each of its linears."""
        chosen = [{n.removeprefix(block.name) for n in names if self._inside(block, n)} for _, _, names in self.steps]
        sizes = tuple((name, tuple(t.shape)) for name, t in block.module.state_dict().items())
        return sizes, tuple(frozenset(names) for names in chosen)

    def _kinds(self) -> list[Block]:
        """The last block of each kind of equal blocks."""
        return list({self.block_key(block): block for block in self.opened.blocks}.values())

    def _read(self, block: Block) -> int:
        """The tokens of a sequence that a block reads: its own, and those of the stacks before."""
        return sum(self.lengths[: block.stack + 1])

    def _per_batch(self, block: Block) -> int:
        """The tokens of a batch that a block reads."""
        return self.batch * self._read(block)

    def _states_bytes(self, block: Block) -> int:
        """Bytes of the activations that enter a block, of all sequences."""
        return self.sequences * self.lengths[block.stack] * self.hidden * self.itemsize

    def _inside(self, block: Block, name: str) -> bool:
        return name.startswith(block.name + ".")

    def _tensors(self, block: Block) -> dict[str, Tensor]:
        return {f"{block.name}.{name}": tensor for name, tensor in block.module.state_dict().items()}

    def _all_blocks(self) -> int:
        """Return the bytes of all original blocks and of their compressed linears."""
        worked = [name for name in self.shapes if self._is_target(len(self.steps), name)]
        tensors = {name: t for block in self.opened.blocks for name, t in self._tensors(block).items()}
        return self.held(tensors) + sum(self._compressed_bytes(len(self.steps), name) for name in worked)

    def _is_target(self, count: int, name: str) -> bool:
        """Whether one of the first `count` steps works on a linear."""
        return any(name in names for _, _, names in self.steps[:count])

    def _compressed_bytes(self, count: int, name: str) -> int:
        """Bytes of a linear after the first `count` steps."""
        rows, width = self.shapes[name]
        scheme = self.before(count, name)
        return scheme.size_bytes(self.opened.dtype) if scheme.quantized else rows * width * self.itemsize

    def _logits_bytes(self) -> int:
        """Return the bytes of the logits of one text of the evaluation."""
        return self._scored * self.vocabulary * self.itemsize

    @property
    def _scored(self) -> int:
        """The tokens of one text of the evaluation."""
        settings = self.recipe.eval
        return extent(self.texts[0], "test", None, settings.length)[1] if settings is not None and self.texts else 0

    def _loss_bytes(self, copies: int) -> int:
        """Return the bytes of the temporaries of a loss, which is computed in chunks of the logits, in float32.

        The base model has more of them, but no copies of packed weights.
        """
        chunk = 4 * min(self._scored, rows_of_chunk(max(1, self.vocabulary))) * self.vocabulary
        cast = chunk if self.itemsize < 4 else 0
        return cast + max(LOSS * chunk, BASE_LOSS * chunk - copies)

    def _copies(self) -> int:
        """Bytes of the copies of packed weights that kernels hold during the evaluation of the checkpoint."""
        return self.copied_bytes if self.copied_bytes <= self.copies_bytes else max(self._packed_modules().values())

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies of all packed weights that kernels make during the evaluation."""
        is_copied = self.recipe.eval is not None and self.opened.device.type == "cpu"
        return sum(self._packed_modules().values()) if is_copied else 0

    def _packed_modules(self) -> dict[str, int]:
        """Bytes of the quantized linears of each module at the end of the recipe; they may be computed together."""
        sizes: dict[str, int] = {}
        for block in self.opened.blocks:
            for name in (name for name in self.shapes if self._inside(block, name)):
                scheme, module = self.before(len(self.steps), name), name.rpartition(".")[0]
                size = scheme.size_bytes(self.opened.dtype) if scheme.quantized else 0
                sizes[module] = sizes.get(module, 0) + size
        return sizes

    @property
    def texts(self) -> tuple[TextSource | str, ...]:
        """Texts to evaluate on."""
        return texts_of(self.recipe.eval, self.opened.model)

    # Sweeps

    def _block_needs(self, block: Block, has_all_blocks: bool) -> list[Need]:
        """Return the memory of each pass in a block. has_all_blocks: the weights of all blocks are already counted."""
        sweeps = [(i, step, names) for i, (_, step, names) in enumerate(self.steps) if not isinstance(step, ModelPass)]
        parts = [(i, step, [n for n in names if self._inside(block, n)]) for i, step, names in sweeps]
        mine = [(i, step, names) for i, step, names in parts if names]
        states = min(self._states_bytes(block), self.store_bytes)
        compared = any(step.requires.reference for _, step, _ in sweeps)
        original = any(step.requires.original for _, step, _ in mine)
        # the reference has one store before and one after the block
        around = {"activations between blocks": states * (1 + 2 * compared + original)}
        if block.stack:  # arguments of its calls, in stores of their own
            earlier = self.sequences * (self._read(block) - self.lengths[block.stack]) * self.hidden * self.itemsize
            around["outputs of the stack before"] = min(earlier, self.store_bytes) * (1 + compared)
        if any(step.requires.unquantized for _, step, _ in sweeps):
            unquantized = [4 * rows * width for n, (rows, width) in self.shapes.items() if self._inside(block, n)]
            around["unquantized weights"] = sum(unquantized)
        if not has_all_blocks:
            around["the block"] = self._unpaged(self.held(self._tensors(block)), block)
        forward = {"a forward pass": self.forward_bytes(self._per_batch(block))}
        needs = [Need(f"forward passes on {block.name}", around | forward)]
        for i, step, names in mine:
            pass_parts = around | self._parts_of(i, step, names, block)
            if not has_all_blocks:
                compressed = self._block_after(i, step, block)
                in_memory = self._unpaged(compressed, block) if isinstance(step, LayerPass) else compressed
                pass_parts["the compressed block"] = in_memory - min(in_memory, self._exchanged_bytes(i, step, names))
            needs.append(Need(f"{self.steps[i][0]} on {block.name}", pass_parts))
        if not has_all_blocks and mine:
            last = mine[-1][0]
            compressed = self._unpaged(self._block_after(last, self.steps[last][1], block), block)
            written = {
                "the compressed block": compressed,
                "its stored form": self._unpaged(self._encoded(block), block),
            }
            needs.append(Need(f"writing of {block.name}", around | written))
        return needs

    def _encoded(self, block: Block) -> int:
        """Return the bytes of the tensors of a block in their stored form that are not those of the block itself."""
        storage, size = self.resolved.storage, 0
        for name, (rows, width) in self.shapes.items():
            if self._inside(block, name):
                scheme = self.before(len(self.steps), name)
                if scheme.quantized:
                    size += self._encoded_codes(scheme)
                elif storage.itemsize != self.itemsize:
                    size += rows * width * storage.itemsize
        return size

    def _encoded_codes(self, scheme: LayerScheme) -> int:
        """Return the bytes of the stored tensors of a quantized linear that are no views of the linear's tensors.

        A view has the shape of one of them and as many bytes per number.
        """
        format_, storage = self.resolved.format, self.resolved.storage
        adapted = format_.adapt(scheme)
        if adapted is None or adapted.plain:
            return format_.size_bytes(scheme, storage)
        views = Counter((spec.shape, spec.size_bytes(storage)) for spec in adapted.tensors().values())
        stored = Counter((spec.shape, spec.size_bytes(storage)) for spec in format_.tensors(adapted).values())
        return sum(size * count for (_, size), count in (stored - views).items())

    def _block_after(self, index: int, step: Pass, block: Block) -> int:
        """Return the most bytes of the linears of a block during step `index`, after which they are compressed.

        A layer pass replaces one linear after the other, of which those that an earlier pass changed are no views. In
        lockstep, those with the widest input come last.
        """
        size, names = 0, self.steps[index][2]
        last = max((self.shapes[name][1] for name in names if self._inside(block, name)), default=0)
        for name in self.shapes:
            if self._inside(block, name):
                after = self._compressed_bytes(index + 1, name)
                waits = isinstance(step, LayerPass) and (not step.true_sequential or self.shapes[name][1] == last)
                changed = waits and self._changed_dense(index, name)
                size += max(after, self._compressed_bytes(index, name)) if changed else after
        return size

    def _changed_dense(self, count: int, name: str) -> bool:
        """Whether one of the first `count` steps changes a linear that stays dense."""
        return self._is_target(count, name) and not self.before(count, name).quantized

    @cached_property
    def can_page(self) -> bool:
        """Whether weights of a block may be in files: they take more than a portion of memory, and can be mapped.

        Passes over the whole model change weights in place, and the original model and weights before quantization are
        in memory.
        """
        steps = [step for _, step, _ in self.steps]
        checkpoint = self.opened.weights.checkpoint
        if checkpoint is None or self.opened.device.type != "cpu" or any(isinstance(step, ModelPass) for step in steps):
            return False
        if any(step.requires.original or step.requires.unquantized for step in steps):
            return False
        if any(place.path.suffix != ".safetensors" for place in checkpoint.named.values()):
            return False
        return any(self._largest_weights(block) > portion_bytes(0) for block in self._kinds())

    def _largest_weights(self, block: Block) -> int:
        """Return the bytes of the weights of a block that are no views, before the sweep or after a pass of it."""
        names = [name for name in self.shapes if self._inside(block, name)]
        after = (sum(self._compressed_bytes(i + 1, name) for name in names) for i in range(len(self.steps)))
        return max(self.held(self._tensors(block)), *after)

    def _unpaged(self, size: int, block: Block) -> int:
        """Return the bytes in memory of weights of a block, which are moved to files in portions."""
        if not self.pages_weights:
            return size
        largest = max((rows * width for n, (rows, width) in self.shapes.items() if self._inside(block, n)), default=0)
        return min(size, portion_bytes(self.itemsize * largest))

    def _parts_of(self, index: int, step: Pass, names: Sequence[str], block: Block) -> dict[str, int]:
        """The memory of one pass in a block."""
        if isinstance(step, LayerPass):
            return self._layer_pass_parts(step, names, block)
        return {"the pass": self._pass_bytes(step, self._size(index, names, block))}

    def _pass_bytes(self, step: Pass, size: ProblemSize) -> int:
        """Bytes of a block pass, or of a pass over the whole model."""
        shared = step.exchanged_bytes(size) if self.several and isinstance(step, TrainingOptions) else 0
        return step.memory(size) + shared

    def forward_bytes(self, tokens: int, narrow: int = NARROW, wide: int = WIDE) -> int:
        """Bytes of a forward pass through a block for a number of tokens."""
        return tokens * self.itemsize * (narrow * self.hidden + wide * self.widest)

    def _statistics(self, step: LayerPass, names: Sequence[str]) -> tuple[tuple[int, ...], int]:
        """Return the widths of the inputs whose statistics are in memory at once, and the bytes of the statistics."""
        widths = self._input_widths(names)
        observed = widths[-1:] if step.true_sequential else self._observed(widths)
        caches = [step.observer.cached_bytes(width) for width in observed]
        size = sum(step.observer.memory_bytes(width) for width in observed) - sum(caches) + max(caches, default=0)
        return observed, size + self._sample_bytes(names, len(observed))

    def _sample_bytes(self, names: Sequence[str], count: int) -> int:
        """Return the bytes of the sampled rows of the widest inputs."""
        return self.itemsize * self._sampled(names, count)

    def _sampled(self, names: Sequence[str], count: int) -> int:
        """Return the numbers of the sampled rows of the widest inputs; experts sample no more rows than they get."""
        inputs = sorted((width, module in self._experts) for module, width in self._inputs(names))[-count:]
        batches = -(-self.sequences // self.batch)
        size = 0
        for width, is_expert in set(inputs):
            every = inputs.count((width, is_expert)) * Sample.memory_bytes(width, 1, batches)
            routed = self._routed_rows * width if is_expert and self._routed_rows else every
            size += min(every, routed)
        return size

    @cached_property
    def _experts(self) -> frozenset[str]:
        """The full names of the modules of experts."""
        return frozenset(f"{block.name}.{name}" for block in self.opened.blocks for name in in_experts(block.module))

    @cached_property
    def _chosen(self) -> int | None:
        """The experts that get a token; None if it is not known, or if all do."""
        model = self.opened.model
        if self.recipe.calibration.experts == "all":
            return None
        if model not in CHOSEN:
            try:
                CHOSEN[model] = experts_per_token(model)
            except CannotRun:
                CHOSEN[model] = None
        return CHOSEN[model]

    @property
    def _routed_rows(self) -> int | None:
        """The rows that all experts of a block get together; None if it is not known."""
        return None if self._chosen is None else self.tokens * self._chosen

    def _passed(self, names: Collection[str]) -> int:
        """Return the inputs and outputs of linears for one token; of experts those of as many as get the token."""
        sets = Counter(expert.rpartition(".")[0] for expert in self._experts)
        numbers = 0.0
        for name in names:
            expert = name.rpartition(".")[0]
            is_routed = expert in self._experts and self._chosen is not None
            share = min(1.0, (self._chosen or 0) / sets[expert.rpartition(".")[0]]) if is_routed else 1.0
            numbers += share * sum(self.shapes[name])
        return round(numbers)

    def _exchanged_bytes(self, index: int, step: Pass, names: Sequence[str]) -> int:
        """Return the bytes of statistics that are freed before the last layers that they are of are compressed.

        Inputs that are observed together are solved one after the other, so their statistics and the compressed layers
        are not in memory at once. Layers that an earlier pass compressed are in memory from the start.
        """
        if not isinstance(step, LayerPass) or step.true_sequential:
            return 0
        observed, size = self._statistics(step, names)
        inputs = set(sorted(self._inputs(names), key=lambda item: item[::-1])[-len(observed) :])
        read = [name for name in names if (name.rpartition(".")[0], self.shapes[name][1]) in inputs]
        new = sum(self._compressed_bytes(index + 1, name) for name in read if not self._is_target(index, name))
        return min(size, new)

    def _layer_pass_parts(self, step: LayerPass, names: Sequence[str], block: Block) -> dict[str, int]:
        """Return the bytes of the statistics, and of either a forward pass or a solver.

        In lockstep (`true_sequential`) the statistics of one input are in memory at a time. All batches stop inside of
        the block, and also all batches of the uncompressed model if the pass compares with it. Their activations are
        in no store. If they are recomputed, only inputs of experts are stored.

        The parts of the input that takes most are returned.
        """
        if not step.true_sequential:
            return self._observed_parts(step, names, block, len(self._inputs(names)))
        by_width: dict[int, list[str]] = {}
        for name in names:
            by_width.setdefault(self.shapes[name][1], []).append(name)
        inputs = len(self._inputs(names))
        parts = [self._observed_parts(step, members, block, inputs) for members in by_width.values()]
        return max(parts, key=lambda sizes: sum(sizes.values()))

    def _waiting_width(self, width: int) -> int:
        """Return the numbers of a token that waits at an input of this width, without the input of the block."""
        return (
            WAITING * self.hidden + width if width > self.hidden else max(self.attention, NARROW * self.hidden + width)
        )

    def _observed_parts(self, step: LayerPass, names: Sequence[str], block: Block, inputs: int) -> dict[str, int]:
        """`_layer_pass_parts` of linears whose inputs are observed together, or have one width.

        Args:
            inputs: number of inputs of the pass in the block.
        """
        widths, (observed, size) = self._input_widths(names), self._statistics(step, names)
        statistics = f"statistics of {len(observed)} of {inputs} inputs" if len(observed) < inputs else "statistics"
        length = self.lengths[block.stack]
        inside = length * self._waiting_width(max(widths)) + (self._read(block) - length) * CROSS * self.hidden
        stopped = self.sequences * self.itemsize * inside
        reread = max(0, self._states_bytes(block) - self.store_bytes)  # read again from files
        again = self.recomputes and _can_recompute(step)
        times = 0 if again else step.true_sequential + step.requires.reference
        sizes = {name: ProblemSize.of_linear(self.shapes[name], self.itemsize) for name in names}
        solver = max((step.for_layer(name) or step).memory(size) for name, size in sizes.items())
        counted = (0, WIDE - 1) if times else (NARROW, WIDE)  # `stopped` has the others
        forward = self.forward_bytes(self._per_batch(block), *counted)
        waiting = {"activations that wait inside of the block": times * (stopped + reread)} if times else {}
        if again and in_experts(block.module):
            tokens = self.sequences * length
            waiting["inputs of experts"] = sum(
                min(tokens * size, self.store_bytes) for size in (self.hidden * self.itemsize, ROUTING_BYTES)
            )
        return {statistics: size, **waiting, "solution or forward pass": max(solver, forward)}

    def recomputing_steps(self) -> dict[str, int]:
        """Return the labels of the passes that can recompute activations inside of a block, with their most inputs."""
        inputs: dict[str, int] = {}
        for label, step, names in self.steps:
            if _can_recompute(step):
                names_of_blocks = ([n for n in names if self._inside(block, n)] for block in self._kinds())
                inputs[label] = max(len(self._input_widths(names_in_block)) for names_in_block in names_of_blocks)
        return inputs

    def inputs_of_steps(self) -> dict[str, int]:
        """Return the most inputs of a block that each pass may observe in several forward passes, by its label."""
        inputs: dict[str, int] = {}
        for label, step, names in self.steps:
            if step.requires.replays or (isinstance(step, LayerPass) and not step.true_sequential):
                names_of_blocks = ([n for n in names if self._inside(block, n)] for block in self._kinds())
                inputs[label] = max(len(self._input_widths(names_in_block)) for names_in_block in names_of_blocks)
        return inputs

    def _input_widths(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the widths of input tensors; linears of one module with equal widths count as one input."""
        return tuple(sorted(width for _, width in self._inputs(names)))

    def _inputs(self, names: Sequence[str]) -> set[tuple[str, int]]:
        """Return the input tensors as (module, width)."""
        return {(name.rpartition(".")[0], self.shapes[name][1]) for name in names}

    def _observed(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        """Return the widths of the inputs whose statistics are in memory at once, the widest."""
        return widths if self.inputs_at_once is None else widths[-self.inputs_at_once :]

    def _size(self, index: int, names: Sequence[str], block: Block | None = None) -> ProblemSize:
        """Return the problem size of step `index` on these linears, in a block or in the whole model."""
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
        prefixes = () if block is None else tuple(f"{name}." for name in within)
        dense = [
            t for n, t in around.items() if not n.startswith(prefixes) or n.removesuffix(".bias") + "." in prefixes
        ]
        inputs = self._input_widths(names)
        return ProblemSize(
            weights,
            scales,
            sum(t.numel() for t in dense),
            self._passed(within),
            self.vocabulary if block is None else 0,
            self.length if block is None else self._per_batch(block),
            self.itemsize,
            packed,
            inputs,
            self._observed(inputs),
            max(sizes, default=0),
            self.forward_bytes(self.length if block is None else self._per_batch(block)),
            min(self.states_bytes, self.store_bytes) if block is None else self._states_bytes(block),
            len(self.opened.blocks) * self.hidden if block is None else 0,
            hidden=self.hidden,
            sampled=0 if block is None else self._sampled(names, len(inputs)),
            probed=0 if block is None else min(PROBE_TOKENS, self.length) * sum(self._input_widths(list(within))),
            replaced_bytes=0 if block is None else self._block_after(index, self.steps[index][1], block),
        )
