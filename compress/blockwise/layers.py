"""Apply a layer pass to one block: observe and solve stage by stage, and measure the error of each solution.

Statistics are in memory from the first observed input of a stage until its layers are solved. In lockstep
(`true_sequential`) those of one stage are in memory at a time; if `Run.recomputes`, no batch waits inside of the block,
and each stage is computed again (`recomputed`). Otherwise all stages are observed on the original block,
`Run.inputs_at_once` of them in each forward pass. The statistics of a layer are added in the process that solves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from compress.blockwise.context import BlockContext
from compress.blockwise.install import group_by_transforms, install, keep_worst_histograms, put
from compress.blockwise.lockstep import lockstep, run_in_turn
from compress.blockwise.recomputed import recompute
from compress.blockwise.reference import ReferenceBlock, twin
from compress.blockwise.store import ActivationStore
from compress.layers.linear import replace_linear
from compress.models.experts import ROUTED, in_experts, unroute
from compress.passes.contract.journal import JournalEntry
from compress.passes.contract.layers import Layer, LayerResult, Solution
from compress.passes.contract.memory import return_freed_memory
from compress.passes.contract.observers import CrossGram, Gram, Nothing, Observer, without_data
from compress.passes.contract.passes import LayerPass
from compress.passes.contract.processes import divided
from compress.passes.contract.samples import Sample


class LayerWork:
    """One layer pass on one block.

    Attributes:
        allocated: allocation of the pass's survey by full name.
        results: results of the solved layers.
        reference_outputs: activations of the uncompressed model after the block; set by the call if the pass needs a
            reference.
    """

    def __init__(
        self, context: BlockContext, step: LayerPass, names: Sequence[str], allocated: Mapping[str, Any] | None = None
    ) -> None:
        self.context, self.step, self.processes = context, step, context.run.processes
        module = context.block.module
        self.layers = {name: replace_linear(module, name) for name in names}
        self.steps = {name: step.for_layer(context.full(name)) or step for name in names}
        targeted_groups = [[name for name in group.linears if name in self.layers] for group in context.groups()]
        self.stages = [stage for members in targeted_groups for stage in group_by_transforms(module, members)]
        self.experts = in_experts(module)
        self.observers: dict[str, Observer] = {}
        self.input_observers: dict[str, Observer] = {}
        self.samples: dict[str, Sample] = {}
        self.allocated = allocated or {}
        self.results: list[LayerResult] = []
        stages = len(self.stages)
        self.observed_at_once = stages if step.true_sequential else self._observed_at_once()
        self.original = twin(module) if self.observed_at_once < stages else module
        self.reference: ReferenceBlock | None = None
        self.reference_outputs: ActivationStore | None = None
        self.paging = context.paging()

    def __call__(self, keep_outputs: bool) -> list[LayerResult]:
        """Run the pass.

        Args:
            keep_outputs: whether the outputs of the compressed block replace the activations of the state.
        """
        module, hidden = self.context.block.module, self.context.state.hidden
        if self.step.true_sequential and self.context.run.recomputes and not self.step.requires.reference:
            new_store = lambda: ActivationStore(self.context.store_bytes, self.context.run.work)  # noqa: E731
            solve_stage = lambda stage: self._solve_stages([stage])  # noqa: E731
            recompute(module, self.stages, self._forwards(), self._arrive, solve_stage, new_store)
            if keep_outputs:
                self.context.propagate()
        elif self.step.true_sequential:
            forwards = self._forwards()
            solve = lambda stage: self._solve_stages([stage])  # noqa: E731
            agree_on_stage = self._first_stage if self.experts else lambda stage: stage
            outputs = lockstep(module, self.stages, forwards, self._arrive, solve, agree_on_stage)
            if keep_outputs:
                for i, output in enumerate(outputs):
                    hidden[i] = self.context.checked(output)
        else:  # all layers are calibrated on the original block
            for start in range(0, len(self.stages), self.observed_at_once):
                observed = range(len(self.stages))[start : start + self.observed_at_once]
                arrive = lambda stage, name, rows: self._arrive(start + stage, name, rows)  # noqa: B023, E731
                run_in_turn(self.original, [self.stages[stage] for stage in observed], self._forwards(), arrive)
                self._solve_stages(observed)
            if keep_outputs:
                self.context.propagate()
        self.paging.finish()
        if self.reference is not None:
            self.reference_outputs = ActivationStore(self.context.store_bytes, self.context.run.work)
            for i in range(len(hidden)):
                self.reference_outputs.append(self.reference.output(i))
        return self.results

    def _observed_at_once(self) -> int:
        """Return the number of stages of the original block whose statistics are in memory at once.

        A Hessian takes as much memory for a part of the sequences as for all of them. So N processes observe one N-th
        of the stages at a time if there are experts, which have most of the Hessians. Each forward pass is one over one
        N-th of the sequences.
        """
        stages = len(self.stages)
        is_divided = bool(self.experts) and issubclass(self.step.observer, Gram)
        share = -(-stages // self.processes.size) if is_divided else stages
        return min(self.context.run.inputs_at_once or stages, share)

    def _forwards(self) -> list[Callable[[], Tensor]]:
        """Return one forward pass per batch, with one of the uncompressed model for each if the pass compares them."""
        state = self.context.state
        forwards = self.context.forwards(self.original, state.hidden)
        if not self.step.requires.reference:
            return forwards
        assert state.reference is not None
        uncompressed = twin(self.original)
        unroute(uncompressed)
        reference_forwards = self.context.forwards(uncompressed, state.reference)
        reference = self.reference = ReferenceBlock(uncompressed, self.stages, reference_forwards, state.tokens)
        return [reference.paired(i, forward) for i, forward in enumerate(forwards)]

    def _observer(self, stage: int) -> Observer:
        """Return the observer of the inputs of a stage; create it and the others of the stage if there are none."""
        members, device = self.stages[stage], self.context.run.device
        if members[0] not in self.observers:
            width = self.layers[members[0]].shape[1]
            self.observers |= dict.fromkeys(members, self.step.observer(width, device))
            self.samples |= dict.fromkeys(members, Sample())
            for name in members:
                watch = self.steps[name].requires.layer_observer
                if watch is not None:
                    self.input_observers[name] = watch(width, device)
        return self.observers[members[0]]

    def _arrive(self, stage: int, name: str, rows: Tensor) -> None:
        observer, transform = self._observer(stage), self.layers[name].transform
        self.samples[name].update(rows)
        if self.reference is not None and isinstance(observer, CrossGram):
            routed = ROUTED.get() if self._in_expert(name) and not self.context.run.all_experts else None
            reference = self.reference.rows(stage, self.context.full(name), rows, routed)
            observer.compare(transform(rows), transform(reference))
        else:
            observer.update(transform(rows))
        for member in self.stages[stage]:
            if member in self.input_observers:
                self.input_observers[member].update(transform(rows))

    def _solve_stages(self, stages: Iterable[int]) -> None:
        """Solve the layers of some stages, divided over the processes, and free their statistics."""
        chosen = list(stages)
        for stage in chosen:
            self._observer(stage)  # no batch of this process may have reached the stage
        members = [name for stage in chosen for name in self.stages[stage]]
        owners = self._owners(members)
        absmax_by_layer: dict[str, float] = {}
        for stage in chosen:
            names = self.stages[stage]
            self._merge(names, owners)
            if self.step.observer is not Nothing:
                self._check_tokens(names)
            absmax_by_layer |= dict.fromkeys(names, max(float(self.layers[n].weight.abs().max()) for n in names))
            if self.processes.size == 1:
                self.results += [self._solve(name, absmax_by_layer[name])[0] for name in names]
                self.results = keep_worst_histograms(self.results)
                self._free(names)
                for name in names:
                    self.paging.add(self.layers[name])
            else:
                self._free(name for name in names if owners is not None and owners[name] != self.processes.rank)
        if self.processes.size > 1 and owners is None:
            for name in members:
                self._solve_rows(name, absmax_by_layer[name])
            self._free(members)
            self.context.hold_in_file([self.layers[name] for name in members])
        elif owners is not None:
            self._solve_shared(absmax_by_layer, owners)

    def _owners(self, members: Sequence[str]) -> Mapping[str, int] | None:
        """Return the process that solves each layer; None if all of them solve some rows of each, or there is one."""
        size = self.processes.size
        is_divisible = all(self.steps[n].requires.by_rows and self.layers[n].shape[0] >= size for n in members)
        if size == 1 or (len(members) < size and is_divisible):
            return None
        return dict(zip(members, divided([self._cost(name) for name in members], size), strict=True))

    def _free(self, names: Iterable[str]) -> None:
        """Free the statistics of solved layers, and of those that another process solves."""
        for name in names:
            for statistics in (self.observers, self.samples, self.input_observers):
                statistics.pop(name, None)
        return_freed_memory()

    def _merge(self, members: Sequence[str], owners: Mapping[str, int] | None) -> None:
        """Merge the statistics of a stage with those of the other processes, in the owners of its layers.

        Layers that are divided by rows need the statistics in every process. Rank 0 measures their errors on a sample.
        """
        everywhere = range(self.processes.size)
        ranks = everywhere if owners is None else {owners[name] for name in members}
        self.observers[members[0]].merge(self.processes.to(ranks))  # shared by the linears of a stage
        self.samples[members[0]].merge(self.processes.to([0] if owners is None else ranks))
        for name in members:
            if name in self.input_observers:
                self.input_observers[name].merge(self.processes.to(everywhere if owners is None else [owners[name]]))

    def _first_stage(self, stage: int | None) -> int | None:
        """Return the first stage at which a batch of any process waits; an expert may get tokens in few of them."""
        return min((candidate for candidate in self.processes.gather(stage) if candidate is not None), default=None)

    def _solve_shared(self, absmax_by_layer: Mapping[str, float], owners: Mapping[str, int]) -> None:
        """Solve each layer in its process, and install all solutions in every process.

        Statistics are freed layer by layer. Solutions are exchanged a few at a time, and held in files.
        """
        journal, rank = self.context.run.journal, self.processes.rank
        solved: dict[int, tuple[LayerResult, Solution, list[JournalEntry]]] = {}
        for number, (name, absmax) in enumerate(absmax_by_layer.items()):
            if owners[name] == rank:
                with journal.apart() as entries:
                    solved[number] = *self._solve(name, absmax), entries
                self._free([name])
        names = list(absmax_by_layer)
        sizes = [4 * math.prod(self.layers[name].shape) for name in names]
        for portion in self.processes.exchange(solved, sizes):
            for number, (result, solution, entries) in sorted(portion.items()):
                name = names[number]
                if owners[name] != rank:
                    with journal.apart():
                        put(self.context, name, layer := self.layers[name], solution, layer.weight.float())
                journal.replay(entries)
                self.results.append(result)
            self.context.hold_in_file([self.layers[names[number]] for number in portion])
            self.results = keep_worst_histograms(self.results)

    def _cost(self, name: str) -> float:
        """Estimate the relative time of a layer's solution: products with a Hessian are quadratic in the columns."""
        rows, columns = self.layers[name].shape
        return rows * columns * (columns if isinstance(self.observers[name], Gram) else 1)

    def _check_tokens(self, members: Sequence[str]) -> None:
        """Record layers without calibration tokens and experts with few in the journal.

        Layers without tokens get substitute statistics: the inputs are assumed to be uncorrelated and of equal size
        (one token along each axis). Every pass then behaves as without data: it rounds to nearest, or prunes by
        magnitude.
        """
        observer, expert_tokens = self.observers[members[0]], self.context.run.expert_tokens
        tokens = observer.tokens
        has_few_tokens = tokens < expert_tokens and self._in_expert(members[0])
        if tokens == 0:
            message = "compressed without calibration data, because no calibration token arrived"
            without_data(observer)
        elif has_few_tokens:
            message = "experts saw few calibration tokens; use more or longer sequences"
        else:
            return
        for name in members:
            self.context.logger(self.context.full(name))("fallback", message, tokens=tokens, wanted=expert_tokens)

    def _in_expert(self, name: str) -> bool:
        return any(name.startswith(expert + ".") for expert in self.experts)

    def _solve(self, name: str, shared_absmax: float) -> tuple[LayerResult, Solution]:
        """Solve a layer and install the solution."""
        facts, step, observer = self._facts(name, shared_absmax), self.steps[name], self.observers[name]
        solutions: list[Solution] = []

        def solve(weight: Tensor) -> Solution:
            solutions.append(step.solve(weight, observer, facts))
            return solutions[0]

        return install(self.context, name, self.layers[name], self.samples[name].rows, solve), solutions[0]

    def _solve_rows(self, name: str, shared_absmax: float) -> None:
        """Solve some rows of a layer in each process, and install the complete solution in every process."""
        layer, facts, processes = self.layers[name], self._facts(name, shared_absmax), self.processes
        start, stop = (layer.shape[0] * rank // processes.size for rank in (processes.rank, processes.rank + 1))
        rows = slice(start, stop)

        def solve(weight: Tensor) -> Solution:
            part = self.steps[name].solve(weight[rows], self.observers[name], facts.of_rows(rows))
            return Solution.of_rows(processes.gather(part))

        if processes.first:
            self.results.append(install(self.context, name, layer, self.samples[name].rows, solve))
            return
        with self.context.run.journal.apart():
            weight = layer.weight.float()
            put(self.context, name, layer, solve(weight), weight)

    def _facts(self, name: str, shared_absmax: float) -> Layer:
        """Collect the information for the solver of a layer."""
        layer, full = self.layers[name], self.context.full(name)
        return Layer(
            full,
            layer.mask,
            self.context.run.scale_dtype,
            self.context.logger(full),
            self.input_observers.get(name),
            shared_absmax,
            self.allocated.get(full),
            (self.context.state.unquantized or {}).get(full),
            self.context.run.format.negative_scales,
            self.context.run.seed,
            partial(self.context.run.source_codes, full),
            partial(self.context.run.importance, full),
        )
