"""Capture how a model calls its blocks: the arguments of every block per batch, and the model around the blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device
from jaxtyping import Float, Int
from torch import Tensor, nn

from compress.errors import ModelError, NumericError
from compress.model.kinds import SUPPORTED, answer_of, kind_of
from compress.model.objective import without_cache
from compress.model.open.experts import exercised
from compress.model.open.opening import OpenModel, is_finite
from compress.model.structure.blocks import Block, hidden_of
from compress.model.structure.ends import vocabulary_size

CHECKED_TOKENS = 4
UNRUNNABLE = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)
"""The exceptions of a model's forward pass that lacks an argument, such as an image."""


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
        if self.keyword is not None:
            return hidden_of(block(*self.args, **{**self.kwargs, self.keyword: hidden}))
        return hidden_of(block(hidden, *self.args, **self.kwargs))


@dataclass
class Captured:
    """The inputs of the blocks for one batch of token ids.

    hidden: the input of the first block. calls: one per block.
    """

    hidden: Float[Tensor, "batch length width"]
    calls: list[Call]


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
        rest = {key: value for key, value in kwargs.items() if key != "hidden_states"}
        return kwargs["hidden_states"], Call(args, rest, "hidden_states")
    raise ModelError(f"model: {block.name} is called without hidden states as its first argument; use another model")


class _Enough(Exception):  # noqa: N818  ends a forward pass early; not an error
    pass


class _Found(_Enough):
    pass


class ModelShell:
    """The model around its blocks: ids -> first block's input, last block's output -> logits or another answer."""

    def __init__(self, opened: OpenModel) -> None:
        self._opened = opened
        self._form: Callable[[Tensor], Any] | None = None

    def capture(self, ids: Int[Tensor, "batch length"]) -> Captured:
        """Run the model on token ids while its blocks return their input, and record the blocks' arguments.

        Raises ModelError when a block does not receive the unchanged output of the block before it.
        """
        form = self._form or self._learn_form(ids)
        seen: list[tuple[Tensor, Call]] = []

        def pass_on(block: Block, *args: Any, **kwargs: Any) -> Any:
            hidden, call = _split(block, args, kwargs)
            if seen and hidden is not seen[-1][0]:
                raise ModelError(
                    f"model: {block.name} does not receive the unchanged output of the block before it, "
                    "so the blocks cannot be processed one after the other; use another model"
                )
            seen.append((hidden, call))
            if len(seen) == len(self._opened.blocks):
                raise _Enough  # skip the head: its logits would be the largest tensor
            return form(hidden)

        try:
            self._run(ids, pass_on)
        except _Enough:
            pass
        else:
            raise ModelError(
                f"model: {len(seen)} of {len(self._opened.blocks)} blocks ran in a forward pass on token ids; "
                "use a model that runs every block once"
            )
        return Captured(seen[0][0], [call for _, call in seen])

    def logits(self, ids: Int[Tensor, "batch length"], hidden: Tensor) -> Float[Tensor, "*batch cells"]:
        """The model's answer (`answer_of`) for the last block's output hidden states on these ids, such as its logits.

        Raises ModelError for an output without an answer for every token, or for every sequence where the kind has one.
        """
        form = self._form or self._learn_form(ids)
        last, seen = self._opened.blocks[-1].index, set[int]()

        def replay(block: Block, *args: Any, **kwargs: Any) -> Any:
            if block.index in seen:
                raise ModelError(
                    f"model: {type(self._opened.model).__name__} runs {block.name} several times in a forward pass; "
                    "use a model that runs every block once"
                )
            seen.add(block.index)
            return form(hidden if block.index == last else _split(block, args, kwargs)[0])

        answer, kind = answer_of(self._run(ids, replay)), kind_of(self._opened.model)
        rows = ids.shape if kind is None or kind.each else ids.shape[:1]
        if answer is None or answer.shape[:-1] != rows:
            found = "no logits" if answer is None else f"logits of shape {list(answer.shape)} for ids {list(ids.shape)}"
            raise ModelError(f"model: {type(self._opened.model).__name__} returns {found}; {SUPPORTED}")
        return answer

    def inputs_of(self, module: nn.Module, ids: Int[Tensor, "batch length"], hidden: Tensor) -> Tensor:
        """The input of a module after the last block, such as the output head. hidden: the last block's output."""

        def stop(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            raise _Found(args[0])

        handle = module.register_forward_pre_hook(stop)
        try:
            self.logits(ids, hidden)
        except _Found as found:
            return found.args[0]
        finally:
            handle.remove()
        raise ModelError(f"model: {type(self._opened.model).__name__} does not run its output head on token ids")

    def _learn_form(self, ids: Tensor) -> Callable[[Tensor], Any]:
        """Learn how a block's output holds the hidden states, from one real call of the first block."""
        first = self._opened.blocks[0]
        self._opened.weights.bring(first)
        plain = type(first.module).forward
        return self._learn(ids, lambda args, kwargs: plain(first.module, *args, **kwargs))

    def _learn_form_on_meta(self, ids: Tensor) -> Callable[[Tensor], Any]:
        """Learn the same from a copy of the first block without weights."""
        first = copy.deepcopy(self._opened.blocks[0].module).to("meta")
        plain = type(first).forward

        def without_weights(args: Any, kwargs: Any) -> Any:
            args, kwargs = send_to_device(args, "meta"), send_to_device(kwargs, "meta")
            with exercised(first):  # choosing tokens needs their values
                output = plain(first, *args, **kwargs)
            return output if isinstance(output, Tensor) else tuple(_zeros(part, self._opened.device) for part in output)

        return self._learn(ids, without_weights)

    def _learn(self, ids: Tensor, first_block: Callable[[Any, Any], Any]) -> Callable[[Tensor], Any]:
        """Learn the form of a block's output from a function that runs the first block."""

        def learn(block: Block, *args: Any, **kwargs: Any) -> Any:
            raise _Enough(first_block(args, kwargs))

        try:
            self._run(ids[:1, :4], learn)
        except _Enough as learned:
            output = learned.args[0]
        else:
            raise ModelError(
                f"model: {type(self._opened.model).__name__} runs none of its {len(self._opened.blocks)} blocks on "
                "token ids; use a model that runs every block once"
            )
        if isinstance(output, (tuple, list)):
            rest = tuple(output[1:])
            self._form = lambda hidden: (hidden, *rest)
        else:
            self._form = lambda hidden: hidden
        return self._form

    def _run(self, ids: Tensor, forward: Callable[..., Any]) -> Any:
        model = self._opened.model
        ids = ids.to(self._opened.device)
        with torch.no_grad(), _forwards(self._opened.blocks, forward):
            return model(input_ids=ids, **without_cache(model))

    def sketch(self, ids: Int[Tensor, "batch length"]) -> Captured:
        """As `capture`, on a few tokens, for blocks without weights in memory.

        The first block's weights are read only if it cannot run without them.
        """
        if any(tensor.is_meta for tensor in self._opened.blocks[0].module.parameters()):
            with suppress(*UNRUNNABLE):
                self._learn_form_on_meta(ids)
        return self.capture(ids)

    def check(self) -> None:
        """Run the model on a few token ids while its blocks return their input; weights of blocks are not read.

        Raises ModelError unless the model runs on token ids alone, calls every block once and one after the other,
        returns the answer of its kind, and writes no weight of a block.
        """
        model = self._opened.model
        size = vocabulary_size(model)
        blocks = self._opened.blocks
        before = [(f"{b.name}.{name}", p, p._version) for b in blocks for name, p in b.module.named_parameters()]
        ids = torch.arange(CHECKED_TOKENS)[None] % size
        try:
            self.logits(ids, self.sketch(ids).hidden)
        except torch.OutOfMemoryError:
            raise
        except UNRUNNABLE as error:
            raise ModelError(
                f"model: {type(model).__name__} does not run on token ids alone ({type(error).__name__}: {error}); "
                f"{SUPPORTED}"
            ) from error
        finally:
            self._form = None
        for name, parameter, version in before:
            if parameter._version != version:
                raise ModelError(
                    f"model: {type(model).__name__} changes {name} in its forward pass, so its weights cannot be "
                    "compressed; use another model"
                )


def _zeros(part: Any, device: torch.device) -> Any:
    return torch.zeros_like(part, device=device) if isinstance(part, Tensor) else part


def check_hidden(hidden: Tensor, block: Block) -> None:
    """Raise NumericError when a block's output holds NaN or infinity."""
    if not is_finite(hidden):
        raise NumericError(f"{block.name}: the block's output holds NaN or infinity on the calibration text")
