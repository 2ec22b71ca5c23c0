"""Capture how a model calls its blocks: the arguments of every block per batch, and the model around the blocks.

The blocks of a stack are captured together. Those of a later stack get the output of the stack before it, which must be
finished then.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device
from jaxtyping import Float
from torch import Tensor, nn

from compress.blockwise.store import ActivationStore
from compress.checkpoint.opened import OpenModel
from compress.errors import CannotRun, ModelError, NumericError, call_foreign
from compress.models.experts import exercised
from compress.models.kinds.batch import Batch
from compress.models.kinds.contract import SUPPORTED, answer_of, run_on
from compress.models.kinds.kinds import adapter_of, answer_shape
from compress.models.structure.blocks import Block, hidden_argument, hidden_of, stack_of
from compress.numerics.dtypes import is_finite

LEARNED_TOKENS = 4


@dataclass(frozen=True)
class Held:
    """A tensor in an activation store, among the arguments of a call."""

    store: ActivationStore
    index: int


@dataclass(frozen=True)
class Call:
    """One call of a block: all arguments except the hidden states.

    keyword: the name of the hidden-states argument, or None if it is the first positional argument.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keyword: str | None

    def run(self, block: nn.Module, hidden: Float[Tensor, "batch length width"]) -> Tensor:
        """Run the block on `hidden` and return its output hidden states."""
        call = self.changed(read_held)
        if call.keyword is not None:
            return hidden_of(block(*call.args, **{**call.kwargs, call.keyword: hidden}))
        return hidden_of(block(hidden, *call.args, **call.kwargs))

    def changed(self, change: Callable[[Any], Any]) -> Call:
        """The call with another value for each argument."""
        args = tuple(change(value) for value in self.args)
        return Call(args, {name: change(value) for name, value in self.kwargs.items()}, self.keyword)

    def values(self) -> list[Any]:
        """All arguments."""
        return [*self.args, *self.kwargs.values()]


def read_held(value: Any) -> Any:
    """Return the tensor of a stored value; other values do not change."""
    return value.store[value.index] if isinstance(value, Held) else value


def hold(calls: dict[int, Call], store: ActivationStore) -> dict[int, Call]:
    """Move activations [batch, length, width] that all calls of a batch share to a store, as an encoder's output."""
    first_values, *values_of_others = (call.values() for call in calls.values())
    held_by_id: dict[int, Held] = {}
    for value in first_values:
        activation = isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3
        if (
            activation
            and id(value) not in held_by_id
            and all(any(value is candidate for candidate in values) for values in values_of_others)
        ):
            held_by_id[id(value)] = Held(store, len(store))
            store.append(value)
    return {index: call.changed(lambda value: held_by_id.get(id(value), value)) for index, call in calls.items()}


@dataclass
class Captured:
    """The inputs of the blocks of one stack for one batch.

    hidden: the input of the first block. calls: one per block, by the index of the block.
    """

    hidden: Float[Tensor, "batch length width"]
    calls: dict[int, Call]


@contextmanager
def _forwards(blocks: Sequence[Block], forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of every block by forward(block, *args, **kwargs); attributes and hooks stay."""
    for block in blocks:
        block.module.forward = lambda *args, _block=block, **kwargs: forward(_block, *args, **kwargs)
    try:
        yield
    finally:
        for block in blocks:
            del block.module.forward


def _split(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    """Split a block's arguments into the hidden states and the rest."""
    if args and isinstance(args[0], Tensor):
        return args[0], Call(args[1:], kwargs, None)
    if isinstance(kwargs.get("hidden_states"), Tensor):
        options = {key: value for key, value in kwargs.items() if key != "hidden_states"}
        return kwargs["hidden_states"], Call(args, options, "hidden_states")
    raise ModelError(f"model: {block.name} is called without hidden states as its first argument; use another model")


class _Enough(Exception):  # noqa: N818  ends a forward pass early; not an error
    pass


class _Found(_Enough):
    pass


Form = Callable[[Tensor], Any]
"""The output of a block, from its hidden states."""


class ModelShell:
    """The model around its blocks: batch -> first block's input, last block's output -> logits or another answer.

    bring: loads the weights of the first block of a stack, by default as they are stored.
    """

    def __init__(self, opened: OpenModel, bring: Callable[[Block], Any] | None = None) -> None:
        self._opened = opened
        self._bring = bring or opened.weights.bring
        self._forms: dict[int, Form] = {}
        self._shared: dict[int, tuple[Any, ...]] = {}
        self._sketching = False

    @property
    def stacks(self) -> int:
        """The number of stacks of the model."""
        return self._opened.blocks[-1].stack + 1

    def capture(self, batch: Batch, stack: int = 0, stack_input: Tensor | None = None) -> Captured:
        """Run the model on a batch while its blocks return their input, and record the arguments of a stack's blocks.

        Args:
            batch: the batch.
            stack: number of the stack.
            stack_input: output of the last block of the previous stack; None if the model computes it.

        Raises:
            ModelError: when a block does not receive the unchanged output of the block before it.
        """
        forms = [self._form(batch, number) for number in range(stack + 1)]
        mine = stack_of(self._opened.blocks, stack)
        first_index = mine[0].index
        captured_calls: list[tuple[Tensor, Call]] = []

        def pass_on(block: Block, *args: Any, **kwargs: Any) -> Any:
            hidden, call = _split(block, args, kwargs)
            if block.stack != stack:
                return forms[block.stack](
                    stack_input if stack_input is not None and block.index == first_index - 1 else hidden
                )
            if captured_calls and hidden is not captured_calls[-1][0]:
                raise ModelError(
                    f"model: {block.name} does not receive the unchanged output of the block before it, "
                    "so the blocks cannot be processed one after the other; use another model"
                )
            if not captured_calls:
                forms[stack] = self._with_shared(block, args, kwargs, forms[stack])
            captured_calls.append((hidden, call))
            if len(captured_calls) == len(mine):
                raise _Enough  # skip the head: its logits would be the largest tensor
            return forms[stack](hidden)

        try:
            self._run(batch, pass_on)
        except _Enough:
            pass
        else:
            raise ModelError(
                f"model: {len(captured_calls)} of {len(mine)} blocks ran in a forward pass on token ids; "
                "use a model that runs every block once"
            )
        return Captured(
            captured_calls[0][0], {block.index: call for block, (_, call) in zip(mine, captured_calls, strict=True)}
        )

    def _with_shared(self, block: Block, args: Any, kwargs: Any, form: Form) -> Form:
        """Return the form of a stack's outputs with the tensors that its first block makes for the later ones, if any.

        Position biases, for example, depend on the length of the text. Tensors that are equal to those of the last
        capture are replaced by these, so that batches share them.
        """
        sample = form(hidden_argument(args, kwargs))
        if not isinstance(sample, tuple) or not any(isinstance(part, Tensor) for part in sample[1:]):
            return form
        if any(tensor.is_meta for tensor in block.module.parameters()):
            if self._sketching:
                return form
            self._bring(block)
        new_tensors = type(block.module).forward(block.module, *args, **kwargs)[1:]
        old_tensors = self._shared.get(block.stack, ())
        shared = tuple(
            old if _same(old, new) else new for old, new in zip(old_tensors or new_tensors, new_tensors, strict=True)
        )
        self._shared[block.stack] = shared
        return lambda hidden: (hidden, *shared)

    def logits(self, batch: Batch, hidden: Tensor) -> Float[Tensor, "*batch cells"]:
        """Return the model's answer (`answer_of`), such as logits, for the last block's output on a batch.

        Raises ModelError for an output without an answer for every token, or for every sequence where the kind has one.
        """
        forms = [self._form(batch, number) for number in range(self.stacks)]
        last_index, block_indices = self._opened.blocks[-1].index, set[int]()

        def replay(block: Block, *args: Any, **kwargs: Any) -> Any:
            if block.index in block_indices:
                raise ModelError(
                    f"model: {type(self._opened.model).__name__} runs {block.name} several times in a forward pass; "
                    "use a model that runs every block once"
                )
            block_indices.add(block.index)
            return forms[block.stack](hidden if block.index == last_index else _split(block, args, kwargs)[0])

        answer = answer_of(self._run(batch, replay))
        if answer is None or answer.shape[:-1] != answer_shape(self._opened.model, batch):
            returned = "no logits" if answer is None else f"logits of shape {list(answer.shape)} for {batch.shape()}"
            raise ModelError(f"model: {type(self._opened.model).__name__} returns {returned}; {SUPPORTED}")
        return answer

    def inputs_of(self, module: nn.Module, batch: Batch, hidden: Tensor) -> Tensor:
        """The input of a module after the last block, such as the output head. hidden: the last block's output."""

        def stop(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            raise _Found(args[0])

        handle = module.register_forward_pre_hook(stop)
        try:
            self.logits(batch, hidden)
        except _Found as found:
            return found.args[0]
        finally:
            handle.remove()
        raise ModelError(f"model: {type(self._opened.model).__name__} does not run its output head on token ids")

    def _form(self, batch: Batch, stack: int) -> Form:
        """Return how an output of a stack's blocks holds the hidden states, from one real call of its first block."""
        if stack not in self._forms:
            first_block = stack_of(self._opened.blocks, stack)[0]
            self._bring(first_block)
            plain = type(first_block.module).forward
            self._learn(batch, stack, lambda args, kwargs: plain(first_block.module, *args, **kwargs))
        return self._forms[stack]

    def _learn_on_meta(self, batch: Batch, stack: int) -> None:
        """Learn the form of a stack's outputs from a copy of its first block without weights."""
        meta_block = copy.deepcopy(stack_of(self._opened.blocks, stack)[0].module).to("meta")
        plain = type(meta_block).forward

        def without_weights(args: Any, kwargs: Any) -> Any:
            args, kwargs = send_to_device(args, "meta"), send_to_device(kwargs, "meta")
            with exercised(meta_block):  # choosing tokens needs their values
                output = plain(meta_block, *args, **kwargs)
            return output if isinstance(output, Tensor) else tuple(_zeros(part, self._opened.device) for part in output)

        self._learn(batch, stack, without_weights)

    def _learn(self, batch: Batch, stack: int, first_block: Callable[[Any, Any], Any]) -> None:
        """Learn the form of a stack's outputs from a function that runs its first block."""

        def learn(block: Block, *args: Any, **kwargs: Any) -> Any:
            if block.stack != stack:
                return self._forms[block.stack](_split(block, args, kwargs)[0])
            raise _Enough(first_block(args, kwargs))

        try:
            self._run(batch.beginning(LEARNED_TOKENS), learn)
        except _Enough as learned:
            output = learned.args[0]
        else:
            raise ModelError(
                f"model: {type(self._opened.model).__name__} runs none of its {len(self._opened.blocks)} blocks on "
                "token ids; use a model that runs every block once"
            )
        if isinstance(output, (tuple, list)):
            shared = tuple(output[1:])
            self._forms[stack] = lambda hidden: (hidden, *shared)
        else:
            self._forms[stack] = lambda hidden: hidden

    def _run(self, batch: Batch, forward: Callable[..., Any]) -> Any:
        with torch.no_grad(), _forwards(self._opened.blocks, forward):
            return run_on(self._opened.model, batch.to(self._opened.device))

    def sketch(self, batch: Batch, stack: int = 0, stack_input: Tensor | None = None) -> Captured:
        """Capture as `capture` does, on a few tokens, for blocks without weights in memory.

        The weights of a stack's first block are read only if it cannot run without them.
        """
        first_block = stack_of(self._opened.blocks, stack)[0]
        if any(tensor.is_meta for tensor in first_block.module.parameters()):
            with suppress(CannotRun):  # then the block runs with its weights
                call_foreign(self._learn_on_meta, batch, stack)
        self._sketching = True
        try:
            return self.capture(batch, stack, stack_input)
        finally:
            self._sketching = False

    def check(self) -> Batch:
        """Run the model on a sample while its blocks return their input; weights of blocks are not read.

        Returns the sample: a few token ids, or a recording. Raises ModelError unless the model runs on it alone, calls
        every block once and one after the other, returns the answer of its kind, and writes no weight of a block.
        """
        model = self._opened.model
        blocks = self._opened.blocks
        versions = [(f"{b.name}.{name}", p, p._version) for b in blocks for name, p in b.module.named_parameters()]
        *preferred_samples, last_sample = adapter_of(model).samples(model)
        try:
            sample = next((candidate for candidate in preferred_samples if self._runs(candidate) is None), last_sample)
            if sample is last_sample and (error := self._runs(last_sample)) is not None:
                raise ModelError(
                    f"model: {type(model).__name__} does not run on {adapter_of(model).media} alone "
                    f"({type(error).__name__}: {error}); {SUPPORTED}"
                ) from error
        finally:
            self._forms.clear()
        for name, parameter, version in versions:
            if parameter._version != version:
                raise ModelError(
                    f"model: {type(model).__name__} changes {name} in its forward pass, so its weights cannot be "
                    "compressed; use another model"
                )
        return sample

    def _runs(self, batch: Batch) -> Exception | None:
        """Run the model on a sample; returns the error with which it cannot. Raises ModelError for other faults."""
        try:
            call_foreign(self._sketch_all, batch)
        except CannotRun as error:
            return error.cause
        return None

    def _sketch_all(self, batch: Batch) -> None:
        """Run all stacks and the head on a sample."""
        hidden = None
        for stack in range(self.stacks):
            hidden = self.sketch(batch, stack, hidden).hidden
        assert hidden is not None
        self.logits(batch, hidden)


def _same(old: Any, new: Any) -> bool:
    tensors = isinstance(old, Tensor) and isinstance(new, Tensor)
    return torch.equal(old, new) if tensors and old.shape == new.shape else old is new


def _zeros(part: Any, device: torch.device) -> Any:
    return torch.zeros_like(part, device=device) if isinstance(part, Tensor) else part


def check_hidden(hidden: Tensor, block: Block) -> None:
    """Raise NumericError when a block's output holds NaN or infinity."""
    if not is_finite(hidden):
        raise NumericError(f"{block.name}: the block's output holds NaN or infinity on the calibration text")
