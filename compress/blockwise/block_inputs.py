"""The calibration inputs of a block in a sweep; the implementation of `BlockInputs` for block passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compress.blockwise.capture import Call, read_held
from compress.blockwise.context import BlockContext
from compress.blockwise.install import group_by_transforms, install
from compress.blockwise.reference import twin
from compress.blockwise.store import ActivationStore
from compress.errors import TargetError
from compress.layers.linear import CompressedLinear, replace_linear
from compress.models.structure.links import Group, Link, block_signature, find_links
from compress.models.structure.permutations import Permutation, find_permutations
from compress.passes.contract.context import Run
from compress.passes.contract.layers import Layer, LayerResult, Solution
from compress.passes.contract.observers import Observer
from compress.passes.contract.passes import BlockPass
from compress.passes.contract.processes import Processes
from compress.passes.contract.samples import Sample


@dataclass
class SweepInputs:
    """The `BlockInputs` of one block in a sweep.

    Attributes:
        context: context of the pass.
        names: linears of the pass in the block.
        reference_outputs: activations of the uncompressed model after the block; None unless the pass needs them.
        original_outputs: outputs of the block before the sweep; None unless the pass needs them.
        groups: groups of linears with the same input that contain a linear of the pass.
        results: results of the layers that the pass has installed.
    """

    context: BlockContext
    names: list[str]
    reference_outputs: ActivationStore | None = None
    original_outputs: ActivationStore | None = None
    groups: list[Group] = field(init=False)
    results: list[LayerResult] = field(init=False, default_factory=list)
    _samples: dict[str, Sample] = field(init=False, default_factory=dict)
    _links: list[Link] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        module = self.context.block.module
        groups = [
            replace(group, linears=tuple(part))
            for group in self.context.groups()
            for part in group_by_transforms(module, group.linears)
        ]
        self.groups = [group for group in groups if set(group.linears) & set(self.names)]

    @property
    def name(self) -> str:
        return self.context.block.name

    @property
    def label(self) -> str:
        return f"{self.context.label} {self.name}"

    @property
    def storage(self) -> torch.dtype:
        return self.context.run.storage

    @property
    def processes(self) -> Processes:
        return self.context.run.processes

    @property
    def work(self) -> Path | None:
        return self.context.run.at(self.label).folder_of_pass()

    def check(self, step: BlockPass) -> None:
        """Check that the layers that share an input with the layers of the pass may be changed.

        Raises:
            TargetError: for a layer that the pass must not change.
        """
        for name in [name for group in self.groups for name in group.linears if name not in self.names]:
            module = self.context.block.module.get_submodule(name)
            is_packed = isinstance(module, CompressedLinear) and module.quantized
            if is_packed and "quantized" in step.never_after:
                raise TargetError(
                    f"{self.context.label}: {self.context.full(name)} is quantized and reads the same input as a layer "
                    "of this pass; put this pass before the quantization of both"
                )

    @property
    def links(self) -> list[Link]:
        if self._links is None:  # computed on first use: not every pass folds
            block, links_by_signature = self.context.block.module, self.context.state.links
            signature = block_signature(block)
            links = links_by_signature[signature] = find_links(block, self.probe, links_by_signature.get(signature, ()))
            self.context.run.return_memory()  # of the inputs of the probe
            self._links = [link for link in links if set(link.readers) & set(self.names)]
        return self._links

    @property
    def permutations(self) -> list[Permutation]:
        block, permutations_by_signature = self.context.block.module, self.context.state.permutations
        signature = block_signature(block)
        permutations = permutations_by_signature[signature] = find_permutations(
            block, self.probe, permutations_by_signature.get(signature, ())
        )
        return [link for link in permutations if set(link.readers) & set(self.names)]

    def observe(self, observer: type[Observer]) -> dict[Group, Any]:
        with self.watching(observer) as observer_by_group:
            for forward in self.context.forwards(self.context.block.module, self.context.state.hidden):
                forward()
        return observer_by_group

    def replayed(self, observer: type[Observer]) -> Mapping[Group, Any]:
        return ReplayedStatistics(self.context, self.groups, observer)

    @contextmanager
    def watching(self, observer: type[Observer]) -> Iterator[dict[Group, Any]]:
        """Observe the input of each group while the block runs inside the context; processes merge their statistics."""
        samples = {group: Sample() for group in self.groups}
        self._samples |= {name: sample for group, sample in samples.items() for name in group.linears}
        with _watching(self.context.block.module, self.groups, observer, self.context.run, samples) as observers:
            yield observers
        self.context.run.return_memory()  # of activations, between those that are sampled

    def rows(self, name: str) -> Float[Tensor, "rows in"] | None:
        """Return a sample of a linear's inputs after its input transforms; None if no token reached it."""
        sample = self._samples.get(name)
        if sample is None or sample.rows is None:
            return None
        module = self.context.block.module.get_submodule(name)
        return module.transform(sample.rows) if isinstance(module, CompressedLinear) else sample.rows

    def probe(self, block: nn.Module) -> Tensor:
        dtype = next(block.parameters()).dtype
        call = self.context.state.probe_calls[self.context.block.index]
        return _cast(call, dtype).run(block, self.context.state.probe.to(dtype))

    @property
    def batches(self) -> int:
        return len(self.context.state.hidden)

    def forward(self, block: nn.Module, batch: int) -> Tensor:
        state, dtype = self.context.state, next(block.parameters()).dtype
        call, hidden = state.calls[batch][self.context.block.index], state.hidden[batch]
        if hidden.dtype != dtype:  # a block in training is float32 in a model of any dtype
            call, hidden = _cast(call, dtype), hidden.to(dtype)
        return call.run(block, hidden)

    def reference(self, batch: int) -> Tensor:
        assert self.reference_outputs is not None, "the pass does not set needs_reference"
        return self.reference_outputs[batch]

    def original(self, batch: int) -> Tensor:
        assert self.original_outputs is not None, "the pass does not need the block's original outputs"
        return self.original_outputs[batch]

    def layer(self, name: str) -> Layer:
        module = self.context.block.module.get_submodule(name)
        mask = module.mask if isinstance(module, CompressedLinear) else None
        full = self.context.full(name)
        run = self.context.run
        signed = run.format.negative_scales
        return Layer(full, mask, run.scale_dtype, self.context.logger(full), negative_scales=signed, seed=run.seed)

    def put(self, name: str, solution: Solution) -> None:
        layer = replace_linear(self.context.block.module, name)
        sample = self._samples.get(name)
        rows = None if sample is None else sample.rows
        self.results.append(install(self.context, name, layer, rows, lambda weight: solution))


class ReplayedStatistics(Mapping[Group, Any]):
    """Observers of the groups of a block, `Run.inputs_at_once` of them in memory at once.

    Each time that a group is read whose observer is not in memory, all calibration inputs run through the block as it
    was when the mapping was made, so that its statistics are the same each time.
    """

    def __init__(self, context: BlockContext, groups: Sequence[Group], observer: type[Observer]) -> None:
        self._context, self._groups, self._observer = context, groups, observer
        self._count = min(context.run.inputs_at_once or len(groups), len(groups))
        self._block = twin(context.block.module) if self._count < len(groups) else context.block.module
        self._observers: dict[Group, Observer] = {}

    def __getitem__(self, group: Group) -> Any:
        if group not in self._observers:
            self._observers.clear()
            start = self._groups.index(group) // self._count * self._count
            observed = self._groups[start : start + self._count]
            with _watching(self._block, observed, self._observer, self._context.run) as self._observers:
                for forward in self._context.forwards(self._block, self._context.state.hidden):
                    forward()
        return self._observers[group]

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)


@contextmanager
def _watching(
    block: nn.Module,
    groups: Sequence[Group],
    observer: type[Observer],
    run: Run,
    samples: Mapping[Group, Sample] | None = None,
) -> Iterator[dict[Group, Any]]:
    """Observe the input of each group while the block runs inside the context; processes merge their statistics."""
    samples = {} if samples is None else samples
    observers: dict[Group, Observer] = {}
    handles = []
    for group in groups:
        first_linear = block.get_submodule(group.linears[0])
        observers[group] = observer(CompressedLinear.of(first_linear).shape[1], run.device)
        handles.append(first_linear.register_forward_pre_hook(_feeder(observers[group], samples.get(group))))
    try:
        yield observers
    finally:
        for handle in handles:
            handle.remove()
    for group, group_observer in observers.items():
        group_observer.merge(run.processes)
        if group in samples:
            samples[group].merge(run.processes)


def _feeder(observer: Observer, sample: Sample | None) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if sample is not None:
            sample.update(args[0].reshape(-1, args[0].shape[-1]))
        x = module.transform(args[0]) if isinstance(module, CompressedLinear) else args[0]
        observer.update(x.reshape(-1, x.shape[-1]))

    return hook


def _cast(call: Call, dtype: torch.dtype) -> Call:
    """Cast every floating-point tensor of a call, such as position embeddings."""

    def cast_value(value: Any) -> Any:
        value = read_held(value)
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype)
        if isinstance(value, (tuple, list)):
            return type(value)(cast_value(item) for item in value)
        return value

    return call.changed(cast_value)
