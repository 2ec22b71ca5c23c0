"""The one block loop: several passes over each block in turn, one block's weights in memory.

For each block every pass gets one forward pass of all calibration inputs; the last one's outputs are the inputs of
the next block. Layer passes run in lockstep, so that a layer is calibrated on the output of the already compressed
layers before it in the same block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from compress.context import Run
from compress.contract import BlockPass, Layer, LayerPass, Solution
from compress.errors import NumericError, TargetError
from compress.model.blocks import Block
from compress.model.experts import in_experts
from compress.model.links import Group, Link, find_groups, find_links
from compress.model.open import OpenModel
from compress.model.packed import CompressedLinear, replace_linear
from compress.model.probing import relative_error
from compress.numerics.codes import Codes, vanished
from compress.stream.capture import Call, Captured, Surroundings, check_hidden
from compress.stream.lockstep import lockstep
from compress.stream.observers import CrossGram, Nothing, Observer, Sample
from compress.stream.reference import Reference, twin
from compress.stream.store import ActivationStore

EXPERT_TOKENS = 128  # an expert that saw fewer is named in the journal: its statistics say little
STORE_BYTES = 4 << 30  # activations kept in memory; beyond it they go to files


@dataclass(frozen=True)
class LayerResult:
    """What one pass did to one layer.

    error: ||(W' - W) X|| / ||W X|| on sampled inputs, None where no token came by. sparsity: share of zeros after it.
    """

    layer: str
    by: str
    error: float | None
    sparsity: float


@dataclass
class SweepState:
    """Where the sweep stands between two blocks: the activations of every batch, and those of the probe.

    reference: the activations in the uncompressed model, only where a pass needs them.
    """

    hidden: ActivationStore
    reference: ActivationStore | None
    calls: list[list[Call]]
    probe: Tensor
    probe_calls: list[Call]


BlockDone = Callable[[Block, list[LayerResult]], None]
"""Called with each finished block, its weights still present."""

Restore = Callable[[Block], bool]
"""Put an already finished block's compressed weights in place; False when there are none."""


@dataclass
class Sweep:
    """One sweep of layer and block passes over the blocks of a model.

    steps: (label, pass, full names of its linears) in order. batches: calibration ids [batch, length] each; may be
    empty when no pass needs data. probe: ids [1, length] that go along for proofs and for the final comparison.
    expert_tokens: experts calibrated on fewer are fallbacks in the journal.
    """

    opened: OpenModel
    steps: Sequence[tuple[str, LayerPass | BlockPass, Sequence[str]]]
    batches: Sequence[Tensor]
    probe: Tensor
    run: Run
    store_bytes: int = STORE_BYTES
    expert_tokens: int = EXPERT_TOKENS
    surroundings: Surroundings = field(init=False)

    def __post_init__(self) -> None:
        self.surroundings = Surroundings(self.opened)

    def __call__(self, done: BlockDone, restore: Restore) -> Tensor:
        """Work on all blocks; returns the last block's output for the probe."""
        with torch.no_grad():
            with self.run.phase("capture"):
                state = self._capture()
            for block in self.opened.blocks:
                original = None if state.reference is None else twin(self._bring(block))
                if restore(block):
                    with self.run.phase("restore"):
                        self._progress(block, "restored")
                        self._propagate(block, state)
                        if original is not None:
                            state.reference = self._forward_reference(original, block, state)
                else:
                    self._bring(block)
                    done(block, self._work(block, state))
                state.probe = state.probe_calls[block.index].run(block.module, state.probe)
                check_hidden(state.probe, block)
                self.opened.weights.release(block)
        return state.probe

    def _capture(self) -> SweepState:
        probe = self.surroundings.capture(self.probe)
        compared = any(isinstance(step, LayerPass) and step.needs_reference for _, step, _ in self.steps)
        reference = ActivationStore(self.store_bytes) if compared else None
        state = SweepState(ActivationStore(self.store_bytes), reference, [], probe.hidden, probe.calls)
        for ids in self.batches:
            captured: Captured = self.surroundings.capture(ids)
            state.hidden.append(captured.hidden)
            if state.reference is not None:
                state.reference.append(captured.hidden)
            state.calls.append(captured.calls)
        return state

    def _bring(self, block: Block) -> nn.Module:
        """The block with its weights, as they would be stored."""
        self.opened.weights.bring(block)
        round_to_storage(block.module, self.run)
        return block.module

    def _forward_reference(self, original: nn.Module, block: Block, state: SweepState) -> ActivationStore:
        """The uncompressed model's activations behind a block."""
        behind = ActivationStore(self.store_bytes)
        assert state.reference is not None
        for i, hidden in enumerate(state.reference):
            behind.append(state.calls[i][block.index].run(original, hidden))
        return behind

    def _work(self, block: Block, state: SweepState) -> list[LayerResult]:
        """Every pass on one block; leaves its outputs in the state."""
        results: list[LayerResult] = []
        current = False  # whether state.hidden already holds this block's outputs
        behind: ActivationStore | None = None  # the uncompressed model's activations behind this block
        for label, step, names in self.steps:
            inside = [name.removeprefix(block.name + ".") for name in names if name.startswith(block.name + ".")]
            if not inside:
                continue
            self._progress(block, label)
            compared = isinstance(step, LayerPass) and step.needs_reference
            if state.reference is not None and behind is None and not compared:
                behind = self._forward_reference(block.module, block, state)  # before anything is changed
            with self.run.phase(label):
                is_last = (label, step, names) == self.steps[-1]
                if isinstance(step, BlockPass):
                    inputs = _Inputs(self, block, state, inside)
                    inputs.check(step, label)
                    step.solve_block(block.module, inputs, self._noter(label, block.name))
                    round_to_storage(block.module, self.run)
                else:
                    work = _LayerWork(self, block, state, label, step, inside)
                    results += work(is_last)
                    current = is_last
                    behind = work.behind if behind is None else behind
        current &= not self._absorb(block)
        if state.reference is not None:
            state.reference = self._forward_reference(block.module, block, state) if behind is None else behind
        if not current:
            with self.run.phase("propagate"):
                self._propagate(block, state)
        return results

    def _absorb(self, block: Block) -> bool:
        """Take back scales of the inputs of layers that stayed dense; True when there were any."""
        scaled = [m for m in block.module.modules() if isinstance(m, CompressedLinear) and m.input_scale is not None]
        dense = [layer for layer in scaled if layer.packed is None]
        for layer in dense:
            layer.absorb_input_scale()
            round_to_storage(layer, self.run)
        return bool(dense)

    def _propagate(self, block: Block, state: SweepState) -> None:
        for i, hidden in enumerate(state.hidden):
            output = state.calls[i][block.index].run(block.module, hidden)
            check_hidden(output, block)
            state.hidden[i] = output

    def _progress(self, block: Block, label: str) -> None:
        self.run.journal.add(
            "progress", label, block.name, block=block.index, blocks=len(self.opened.blocks), step=label
        )

    def _noter(self, label: str, name: str) -> Callable[..., None]:
        def note(kind: str, message: str, **figures: Any) -> None:
            self.run.journal.add(kind, f"{label} {name}", message, **figures)

        return note

    def groups(self, block: Block, state: SweepState) -> list[Group]:
        """The block's groups, found on the probe."""
        call = state.probe_calls[block.index]
        return find_groups(block.module, lambda module: call.run(module, state.probe))


@dataclass
class _Inputs:
    """BlockInputs of one block in a sweep."""

    sweep: Sweep
    block: Block
    state: SweepState
    names: list[str]
    groups: list[Group] = field(init=False)
    _links: list[Link] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        found = self.sweep.groups(self.block, self.state)
        found = [
            replace(group, linears=tuple(part))
            for group in found
            for part in of_one_scale(self.block.module, group.linears)
        ]
        self.groups = [group for group in found if set(group.linears) & set(self.names)]

    def check(self, step: BlockPass, label: str) -> None:
        """Raise TargetError when a layer that shares its input with the pass's own may not be touched by it."""
        for name in [name for group in self.groups for name in group.linears if name not in self.names]:
            module = self.block.module.get_submodule(name)
            packed = isinstance(module, CompressedLinear) and module.packed is not None
            if packed and "quantized" in step.never_after:
                raise TargetError(
                    f"{label}: {self.block.name}.{name} is quantized already and reads the same input as a layer that "
                    "this pass works on; work on both before quantizing either"
                )

    @property
    def links(self) -> list[Link]:
        if self._links is None:  # looked for when first asked for: not every pass folds
            found = find_links(self.block.module, self.probe)
            self._links = [link for link in found if set(link.readers) & set(self.names)]
        return self._links

    def observe(self, observer: type[Observer]) -> dict[Group, Any]:
        seen: dict[Group, Observer] = {}
        handles = []
        for group in self.groups:
            first = self.block.module.get_submodule(group.linears[0])
            seen[group] = observer(CompressedLinear.of(first).shape[1], self.sweep.opened.device)
            handles.append(first.register_forward_pre_hook(_feeder(seen[group])))
        try:
            for i, hidden in enumerate(self.state.hidden):
                self.state.calls[i][self.block.index].run(self.block.module, hidden)
        finally:
            for handle in handles:
                handle.remove()
        return seen

    def probe(self, block: nn.Module) -> Tensor:
        dtype = next(block.parameters()).dtype
        call = self.state.probe_calls[self.block.index]
        return _cast(call, dtype).run(block, self.state.probe.to(dtype))


def _feeder(observer: Observer) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = module.transform(args[0]) if isinstance(module, CompressedLinear) else args[0]
        observer.update(x.reshape(-1, x.shape[-1]))

    return hook


def _cast(call: Call, dtype: torch.dtype) -> Call:
    """The same call with every floating tensor in another dtype (position embeddings come in the model's)."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype)
        if isinstance(value, (tuple, list)):
            return type(value)(cast(item) for item in value)
        return value

    return Call(tuple(cast(a) for a in call.args), {k: cast(v) for k, v in call.kwargs.items()}, call.keyword)


class _LayerWork:
    """One layer pass on one block: observe and solve stage by stage, measuring what each solution does."""

    def __init__(
        self, sweep: Sweep, block: Block, state: SweepState, label: str, step: LayerPass, names: Sequence[str]
    ) -> None:
        self.sweep, self.block, self.state, self.label, self.step = sweep, block, state, label, step
        self.layers = {name: replace_linear(block.module, name) for name in names}
        self.steps = {name: step.for_layer(f"{block.name}.{name}") or step for name in names}
        groups = sweep.groups(block, state)
        chosen = [[name for name in group.linears if name in self.layers] for group in groups]
        self.stages = [stage for members in chosen for stage in of_one_scale(block.module, members)]
        self.experts = in_experts(block.module)
        self.seen: dict[str, Observer] = {}
        self.inputs: dict[str, Observer] = {}
        self.samples: dict[str, Sample] = {}
        for members in self.stages:
            width = self.layers[members[0]].shape[1]
            observer, sample = step.observer(width, sweep.opened.device), Sample()
            self.seen |= dict.fromkeys(members, observer)
            self.samples |= dict.fromkeys(members, sample)
            for name in members:
                watch = self.steps[name].watches()
                if watch is not None:
                    self.inputs[name] = watch(width, sweep.opened.device)
        self.results: list[LayerResult] = []
        self.reference: Reference | None = None
        self.behind: ActivationStore | None = None
        if step.needs_reference:
            original = twin(block.module)
            tokens = [ids.numel() for ids in sweep.batches]
            assert state.reference is not None
            self.reference = Reference(original, self.stages, self._forwards(original, state.reference), tokens)

    def _forwards(self, module: nn.Module, inputs: ActivationStore) -> list[Callable[[], Tensor]]:
        calls, index = self.state.calls, self.block.index
        return [lambda i=i: calls[i][index].run(module, inputs[i]) for i in range(len(inputs))]

    def __call__(self, keep_outputs: bool) -> list[LayerResult]:
        """Run; with keep_outputs the state's activations become the compressed block's outputs."""
        module, hidden = self.block.module, self.state.hidden
        sequential = self.step.true_sequential
        forwards = self._forwards(module, hidden)
        if self.reference is not None:
            forwards = [self.reference.beside(i, forward) for i, forward in enumerate(forwards)]
        # Without true_sequential all layers see the block as it was: they form one stage that is solved at the end.
        solve = self._solve_stage if sequential else lambda stage: None
        stages = self.stages if sequential else [[name] for members in self.stages for name in members[:1]]
        outputs = lockstep(module, stages, forwards, self._arrive, solve)
        if not sequential:
            for stage in range(len(self.stages)):
                self._solve_stage(stage)
        if keep_outputs and sequential:
            for i, output in enumerate(outputs):
                check_hidden(output, self.block)
                hidden[i] = output
        elif keep_outputs:
            self.sweep._propagate(self.block, self.state)
        if self.reference is not None:
            self.behind = ActivationStore(self.sweep.store_bytes)
            for i in range(len(hidden)):
                self.behind.append(self.reference.output(i))
        return self.results

    def _arrive(self, stage: int, name: str, rows: Tensor) -> None:
        self.samples[name].update(rows)
        observer, transform = self.seen[name], self.layers[name].transform
        if self.reference is not None and isinstance(observer, CrossGram):
            reference = self.reference.rows(stage, f"{self.block.name}.{name}", rows)
            observer.compare(transform(rows), transform(reference))
        else:
            observer.update(transform(rows))
        rows = transform(rows)
        for member in self.stages[stage]:
            if member in self.inputs:
                self.inputs[member].update(rows)

    def _solve_stage(self, stage: int) -> None:
        members = self.stages[stage]
        if self.step.observes is not Nothing:
            self._check_tokens(members)
        peak = max(float(self.layers[name].weight.abs().max()) for name in members)
        for name in members:
            self._solve(name, peak)

    def _check_tokens(self, members: Sequence[str]) -> None:
        """Journal layers that saw no token, and experts that saw few; the former are solved as without data.

        Where no token came by, the inputs are taken to be alike and uncorrelated (one token along each axis), so that
        every pass does what it does without data: rounds to nearest, prunes by magnitude.
        """
        seen = self.seen[members[0]]
        tokens, width = seen.tokens, seen.width
        few = tokens < self.sweep.expert_tokens and any(members[0].startswith(name + ".") for name in self.experts)
        if tokens == 0:
            message = "no calibration token reached this layer; it is solved as if all its inputs were alike"
            seen.update(torch.eye(width, device=seen.device))
        elif few:
            message = "this expert saw few calibration tokens; more or longer sequences would show it more"
        else:
            return
        for name in members:
            note = self.sweep._noter(self.label, f"{self.block.name}.{name}")
            note("fallback", message, tokens=tokens, wanted=self.sweep.expert_tokens)

    def _solve(self, name: str, peak: float) -> None:
        layer = self.layers[name]
        full = f"{self.block.name}.{name}"
        rows = self.samples[name].rows
        before = None if rows is None else layer(rows)
        note = self.sweep._noter(self.label, full)
        weight = layer.weight.float()
        facts = Layer(full, layer.mask, self.sweep.run.storage, note, self.inputs.get(name), peak)
        try:
            solution = self.steps[name].solve(weight, self.seen[name], facts)
        except NumericError as error:
            raise NumericError(f"{self.label} {full}: {str(error).removeprefix(full + ': ')}") from error
        if isinstance(solution.weight, Codes) and (gone := vanished(weight, solution.weight)):
            note("fallback", "groups of weights became zero: the scales they need are too small to store", groups=gone)
        self._put(layer, solution, full)
        round_to_storage(layer, self.sweep.run)
        weight = layer.weight
        error = None if before is None else relative_error(layer(rows), before)
        sparsity = float((weight == 0).float().mean())
        self.results.append(LayerResult(full, self.label, error, sparsity))

    def _put(self, layer: CompressedLinear, solution: Solution, full: str) -> None:
        """The solution in place, in the form that it will be stored in."""
        run, solved = self.sweep.run, solution.weight
        if solution.activations is not None:
            layer.round_inputs(solution.activations)
        layer.put(solved.to(self.sweep.opened.dtype) if isinstance(solved, Tensor) else solved, solution.mask)
        packed, scheme = layer.packed, layer.scheme
        if packed is None or scheme is None:
            return
        packed = packed.in_storage(run.storage)
        adapted = run.format.adapt(packed)
        if adapted is None:
            layer.put(layer.weight_as(self.sweep.opened.dtype))
            layer.absorb_input_scale()
            return
        reason = run.format.refuses(scheme, layer.shape)
        if reason is not None:
            raise TargetError(f"{self.label}: {full}: {reason}")
        layer.put(adapted)


def of_one_scale(block: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """Linears that read the same tensor, apart where they divide it by different scales."""
    parts: list[tuple[Tensor | None, list[str]]] = []
    for name in names:
        module = block.get_submodule(name)
        scale = module.input_scale if isinstance(module, CompressedLinear) else None
        for other, members in parts:
            if scale is other or (scale is not None and other is not None and torch.equal(scale, other)):
                members.append(name)
                break
        else:
            parts.append((scale, [name]))
    return [members for _, members in parts]


def round_to_storage(module: nn.Module, run: Run) -> None:
    """Round dense floating tensors to the dtype they will be stored in; scales are born in it."""
    for tensor in (
        *module.parameters(),
        *(b for n, b in module.named_buffers() if n.rpartition(".")[2] == "dense"),
    ):
        if tensor.is_floating_point() and torch.finfo(run.storage).bits < torch.finfo(tensor.dtype).bits:
            tensor.data = tensor.data.to(run.storage).to(tensor.dtype)


def needs_data(step: Any) -> bool:
    """Whether a pass looks at calibration inputs."""
    return step.needs_data if isinstance(step, LayerPass) else True
