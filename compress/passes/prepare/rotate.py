"""Rotations that spread outliers, and leave the function of the model unchanged (QuaRot, Ashkboos 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field, field_validator
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from typing_extensions import Self

from compress.blockwise.block_inputs import SweepInputs
from compress.blockwise.capture import ModelShell
from compress.blockwise.context import BlockContext, capture_inputs
from compress.checkpoint.opened import OpenModel
from compress.errors import ModelError
from compress.layers.linear import CompressedLinear, linears, replace_linear
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.hadamard import Hadamard, HadamardScheme
from compress.models.forward import logits_of
from compress.models.kinds.batch import IDS, Batch
from compress.models.kinds.contract import ModelKind, text_config
from compress.models.kinds.headless import check_learns
from compress.models.reshape.reconfigure import build, changed, replace_in_place, tensors
from compress.models.reshape.residual import LOGITS_TOLERANCE
from compress.models.reshape.rotation import Refusal, fold_norms, readers_of_norms, rotate, untying, with_own_head
from compress.models.reshape.widths import Width, hidden_width
from compress.models.structure.blocks import linears_of_blocks
from compress.models.structure.patterns import matches, select
from compress.models.structure.rewrite import rotate_inputs
from compress.models.structure.select import ModuleNames
from compress.models.structure.values import head_size, rotate_values
from compress.numerics.hadamard import exists, largest_block, neighbours, randomized
from compress.numerics.metrics import relative_error
from compress.passes.contract.context import Run
from compress.passes.contract.facts import Effects, Requirements
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.options import patterns
from compress.passes.contract.passes import chosen_linears, works_on
from compress.passes.families.learned_rotations import Learnable, Learned, RotationLearning, ValueLink, learn_rotations
from compress.passes.families.reshaping import ReshapingPass

PROBE = 64  # random tokens for the structure search and the proofs; no text is needed
SMALLEST_BLOCK = 16  # of an online transform that does not fit the whole width: a smaller one spreads little
STORE_BYTES = 1 << 30


class Rotate(ReshapingPass):
    """Rotate hidden states, values and inputs, so that they and the weights have fewer outliers; outputs do not change.

    - residual (R1 of SpinQuant): the weights of norms are folded into the linears that read them. All weights that read
      or write hidden states are multiplied by one randomized Hadamard matrix (a random orthogonal matrix for a width
      without a Hadamard matrix). An LM head that is tied to the embedding gets its own weight, because only the head
      reads a norm; this adds the bytes of the embedding.
    - values (R2): the values of every head are rotated, and the columns that read them.
    - online (R4): a Hadamard transform of the inputs of some linears when they run, with its inverse in the weight.
      Only format native can store it if the weight is quantized.

    residual and values give a stock model. R3, of keys, is `hadamard` of kv_cache. All is verified by the logits in
    float32, on random tokens. For models with LayerNorm, norms of what is added to hidden states, or routers,
    `residual` is an error that names the property.

    learn: from the random matrices, Cayley SGD learns one for the hidden states and one for the values of each block,
    on the loss of the model with activation quantization (SpinQuant, Liu 2024, arXiv 2405.16406, section 3.2). Weights
    stay in floating point unless `learn.weights` is set, as in the paper before GPTQ (section 4.3). The learned
    matrices are folded and verified like the random ones.
    """

    use_for: ClassVar[str] = (
        "Activations in 4 bits per token, before a quantizing pass. Without it SmolLM2-135M is useless with them "
        "(eval/LOG.md)."
    )
    not_for: ClassVar[str] = (
        "Weights that are on a grid already, such as dequantized GGUF files, and pruned ones: a rotation undoes both."
        " Small models lose far more with activations in 4 bits than the 70B model of the paper."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2404.00456"

    residual: bool = Field(default=True, description="rotate the hidden states between blocks; needs RMSNorm")
    values: bool = Field(default=True, description="rotate the values of attention, head by head")
    online: tuple[str, ...] = Field(
        default=(),
        description="linears whose inputs are rotated when they run, in the forms of targets, such as down_proj",
    )
    seed: int = Field(default=0, ge=0, description="of the random signs and matrices")
    learn: RotationLearning | None = Field(
        default=None,
        description="learn the rotations of residual and values, from the random ones: a mapping of the options below, "
        "such as {steps: 100}; null: they stay random",
    )

    _online_patterns = field_validator("online", mode="before")(patterns)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if not (self.residual or self.values or self.online):
            raise ValueError("residual, values and online are all off, so nothing is rotated; turn one on")
        if self.learn is not None and not (self.residual or self.values):
            raise ValueError("learn has no effect with residual: false and values: false; turn one on, or leave it out")

    @property
    def requires(self) -> Requirements:
        learns = self.learn is not None
        rehearsal = self.model_copy(update={"learn": None})
        return Requirements(data=learns, objective=learns, training=learns, new_shape=True, rehearsal=rehearsal)

    def adapt_objective(self, lm_objective: ModelKind, label: str) -> ModelKind:
        check_learns(lm_objective, label, "leave learn out, which needs a loss on the text")
        return lm_objective

    def on_model(self, names: ModuleNames, label: str) -> Self:
        step = super().on_model(names, label)
        if not self.online:
            return step
        online = names.full(self.online)
        select(chosen_linears(step, names.candidates(step.targets), label), online, (), f"{label} online")
        return step.model_copy(update={"online": online})

    def for_layer(self, name: str) -> Self:
        """Return the pass with `online` for this layer alone, or for none."""
        return self.model_copy(update={"online": (name,) if self._is_online(name) else ()})

    def _is_online(self, name: str) -> bool:
        return any(matches(name, pattern) for pattern in self.online)

    def effects(self, layer: LayerScheme) -> Effects:
        effects = replace(super().effects(layer), notes=self._notes())
        if not self.online:
            return effects
        width = layer.shape[1]
        block = _block(width)
        if block is not None:
            return replace(effects, scheme=layer.with_transform(HadamardScheme(block)))
        smaller, larger = neighbours(width)
        problem = (
            f"no Hadamard matrix fits its {width} inputs, nor blocks of {SMALLEST_BLOCK} or more that divide them "
            f"(the next widths are {smaller} and {larger}); leave it out of online"
        )
        return replace(effects, problem=problem)

    def _notes(self) -> tuple[str, ...]:
        """Say what is rotated, and which rotations stay in the layers."""
        names = {"hidden states": self.residual, "values": self.values}
        folded = " and ".join(name for name, turned in names.items() if turned)
        learned = "" if self.learn is None else f" by matrices {self.learn.text}"
        notes = [f"{folded} are rotated in the weights{learned}"] if folded else []
        if self.online:
            notes.append(
                f"inputs of {', '.join(self.online)} are rotated when the layers run, which only format native states"
            )
        return ("; ".join(notes),)

    def outcome(self, model: PreTrainedModel, label: str) -> PretrainedConfig:
        """Return the configuration, with an untied head if hidden states are rotated."""
        if not self.residual:
            return model.config
        uniform = "the rotation of the hidden states is uniform: all blocks are rotated, or none; use residual: false"
        self.check_all_taken(linears_of_blocks(model), label, uniform)
        _hidden_width(model, label)
        config = changed(model.config, untying(model))
        return model.config if config is None else config

    def memory(self, size: ProblemSize) -> int:
        """Three copies of the model in float32: before a rotation, after it, and one for the comparison.

        While rotations are learned there are two, and what learning needs.
        """
        copy = 4 * (size.weights + size.outside)
        return max(3 * copy, 0 if self.learn is None else 2 * copy + self.learn.memory(size))

    @torch.no_grad()
    def apply(self, model: nn.Module, run: Run) -> None:
        assert isinstance(model, PreTrainedModel)
        label, dtype = run.label or self.key(), next(model.parameters()).dtype
        batch = _probe(model).to(next(model.parameters()).device)
        refusal = Refusal(label, "use residual: false")
        plain = {name: tensor.float() for name, tensor in tensors(model).items()}
        new = with_own_head(model, refusal) if self.residual else build(model, model.config, plain)
        original_logits = logits_of(new, batch)
        width, norms, links = None, [], []
        if self.residual:
            width = _hidden_width(new, label)
            new, norms = self._rotate_hidden(new, width, batch, run, refusal)
        if self.values:
            links = self._rotate_values(new, batch, run, label)
        if self.learn is not None:
            new = self._rotate_further(
                new, self._learned(new, width, links, run), width, norms, links, batch, run, refusal
            )
        tensor_of = tensors(new)
        online = self._rotate_online(new, run, label)
        error = relative_error(logits_of(new, batch), original_logits)
        if not error < LOGITS_TOLERANCE:
            raise ModelError(
                f"{label}: the rotations change the logits (relative error {error:.2g}); use values: false"
            )
        run.journal.add("note", label, "rotated without a change of the logits", error=error)
        stored = build(new, new.config, {name: tensor.to(dtype) for name, tensor in tensor_of.items()})
        for name in online:
            layer = CompressedLinear.of(new.get_submodule(name))
            replace_linear(stored, name).read(
                [part.in_storage(dtype) for part in layer.all_parts], layer.all_transforms
            )
        replace_in_place(model, stored)

    def _rotate_hidden(
        self, model: PreTrainedModel, width: Width, batch: Batch, run: Run, refusal: Refusal
    ) -> tuple[PreTrainedModel, list[str]]:
        """R1: fold norms and rotate the residual stream. Returns the rotated model, and the names of the norms."""
        size = next(iter(width.axes.values()))[0]
        readers = readers_of_norms(model, width, batch, refusal)
        folded = fold_norms(model, readers, batch, refusal)
        rotation = randomized(size, self.seed).float().to(next(model.parameters()).device)
        turned, error = rotate(folded, width, list(readers), rotation, batch, refusal)
        kind = "Hadamard" if exists(size) else "random orthogonal"
        run.journal.add("note", refusal.label, f"hidden states rotated by a {kind} matrix", width=size, error=error)
        return build(model, model.config, turned), list(readers)

    def _rotate_values(self, model: PreTrainedModel, batch: Batch, run: Run, label: str) -> list[ValueLink]:
        """R2: rotate the values of every attention layer of the targets.

        Raises:
            ModelError: if there is none.
        """
        rotated_links, missing = [], []
        for context in _contexts(model, batch, run, label):
            inside = [name for name in linears(context.block.module) if works_on(self, context.full(name))]
            inputs, block_links = SweepInputs(context, inside), []
            for link in inputs.permutations:
                size = head_size(link)
                if size is None or not {*link.sources, *link.readers} <= set(inside):
                    continue
                rotation = randomized(size, self.seed + 1)
                if rotate_values(context.block.module, link, rotation, inputs.probe).is_kept:
                    block_links.append(ValueLink(context.block.name, link, size))
            missing += [] if block_links else [context.block.name]
            rotated_links += block_links
        if not rotated_links:
            raise ModelError(
                f"{label}: no attention layer was found whose values one linear writes, not fused with queries and "
                "keys, and another one reads, head by head; use values: false"
            )
        if missing:
            run.journal.add("fallback", label, "no values to rotate were found in some blocks", blocks=missing)
        run.journal.add(
            "note",
            label,
            "values rotated",
            layers=len(rotated_links),
            head_sizes=sorted({v.size for v in rotated_links}),
        )
        return rotated_links

    def _learned(self, model: PreTrainedModel, width: Width | None, links: Sequence[ValueLink], run: Run) -> Learned:
        """Learn rotations of hidden states and values, on the rounded inputs of the targets."""
        assert self.learn is not None
        names = [name for name in linears_of_blocks(model) if works_on(self, name)]
        shapes = {name: CompressedLinear.of(model.get_submodule(name)).shape for name in names}

        def online(name: str) -> Hadamard | None:
            return self._online_transform(shapes[name]) if self._is_online(name) else None

        size = None if width is None else next(iter(width.axes.values()))[0]
        readers, writers = (frozenset() if width is None else width.modules(side, model) for side in ("in", "out"))
        learnable = Learnable(names, size, frozenset(readers), frozenset(writers), links, online)
        return learn_rotations(model, learnable, self.learn, run.at(run.label or self.key()))

    def _rotate_further(
        self,
        model: PreTrainedModel,
        learned: Learned,
        width: Width | None,
        norms: Sequence[str],
        links: Sequence[ValueLink],
        batch: Batch,
        run: Run,
        refusal: Refusal,
    ) -> PreTrainedModel:
        """Fold learned rotations into the weights as the random ones.

        Raises:
            ModelError: if the function changes.
        """
        if width is not None and learned.hidden is not None:
            turned, _ = rotate(model, width, norms, learned.hidden.float(), batch, refusal)
            model = build(model, model.config, turned)
        turns = dict(zip(links, learned.values, strict=True))
        for context in _contexts(model, batch, run, refusal.label) if links else ():
            for link in (link for link in links if link.block == context.block.name):
                probe = SweepInputs(context, list(linears(context.block.module))).probe
                is_kept = rotate_values(context.block.module, link.link, turns[link], probe).is_kept
                assert is_kept, "a random rotation of these values was proved"
        return model

    def _rotate_online(self, model: PreTrainedModel, run: Run, label: str) -> list[str]:
        """R4: rotate the inputs of the layers of `online` when they run. Returns their names."""
        names = [name for name in linears_of_blocks(model) if works_on(self, name) and self._is_online(name)]
        for name in names:
            layer = replace_linear(model, name)
            rotate_inputs(layer, self._online_transform(layer.shape).to(layer.weight.device))
        blocks = sorted({_block(CompressedLinear.of(model.get_submodule(name)).shape[1]) or 0 for name in names})
        if names:
            run.journal.add("note", label, "inputs rotated when layers run", layers=len(names), blocks=blocks)
        return names

    def _online_transform(self, shape: tuple[int, int]) -> Hadamard:
        """Return the transform of the inputs of a layer (out, in)."""
        block = _block(shape[1])
        assert block is not None
        return Hadamard.of(block, self.seed + 2, shape)  # readers of one tensor stay alike


def _block(width: int) -> int | None:
    """The block of an online transform: the width, or the largest one that divides it; None if that is too small."""
    block = largest_block(width)
    return block if block == width or block >= SMALLEST_BLOCK else None


def _hidden_width(model: PreTrainedModel, label: str) -> Width:
    """The tensor dimensions of hidden states. Raises ModelError."""
    heads = getattr(text_config(model.config), "num_attention_heads", 1)
    try:
        return hidden_width(model, lambda size: max(size // 2 // heads, 1) * heads)  # some need a multiple of the heads
    except ModelError as error:
        raise ModelError(
            f"{label}: readers and writers of the hidden states look alike ({error}); use residual: false"
        ) from error


def _probe(model: PreTrainedModel) -> Batch:
    """One sequence of random token ids."""
    draw = torch.Generator().manual_seed(0)
    return Batch({IDS: torch.randint(text_config(model.config).vocab_size, (1, PROBE), generator=draw)})


def _contexts(model: PreTrainedModel, batch: Batch, run: Run, label: str) -> Iterator[BlockContext]:
    """Yield every block with its input for the probe; after each, run the block in its new state."""
    opened = OpenModel.in_memory(model)
    state = capture_inputs(ModelShell(opened), batch, [], STORE_BYTES, run.work)
    for block in opened.blocks:
        run.journal.add("progress", label, f"values of {block.name}", done=block.index, of=len(opened.blocks))
        context = BlockContext(block, state, run, opened.dtype, label, STORE_BYTES)
        yield context
        context.propagate_probe()
