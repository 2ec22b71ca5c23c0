"""Apply a layer pass to one block: observe and solve stage by stage, and measure the error of each solution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from compress.layers.linear import replace_linear
from compress.models.experts import ROUTED, in_experts, unroute
from compress.passes.contract.journal import Entry
from compress.passes.contract.layers import Layer, Solution
from compress.passes.contract.observers import CrossGram, Gram, Nothing, Observer, without_data
from compress.passes.contract.passes import LayerPass
from compress.passes.contract.processes import divided
from compress.passes.contract.samples import Sample
from compress.sweep.context import BlockContext
from compress.sweep.install import LayerResult, install, of_one_input, put
from compress.sweep.lockstep import in_turn, lockstep
from compress.sweep.reference import Reference, twin
from compress.sweep.store import ActivationStore


class LayerWork:
    """One layer pass on one block.

    allocated: the allocation of the pass's survey, by full name. reference_outputs: the uncompressed model's
    activations after the block; the call sets them if the pass needs a reference.
    """

    def __init__(
        self, context: BlockContext, step: LayerPass, names: Sequence[str], allocated: Mapping[str, Any] | None = None
    ) -> None:
        self.context, self.step, self.processes = context, step, context.run.processes
        module = context.block.module
        self.layers = {name: replace_linear(module, name) for name in names}
        self.steps = {name: step.for_layer(context.full(name)) or step for name in names}
        chosen = [[name for name in group.linears if name in self.layers] for group in context.groups()]
        self.stages = [stage for members in chosen for stage in of_one_input(module, members)]
        self.experts = in_experts(module)
        self.seen: dict[str, Observer] = {}
        self.inputs: dict[str, Observer] = {}
        self.samples: dict[str, Sample] = {}
        for members in self.stages:
            width = self.layers[members[0]].shape[1]
            self.seen |= dict.fromkeys(members, step.observer(width, context.run.device))
            self.samples |= dict.fromkeys(members, Sample())
            for name in members:
                watch = self.steps[name].watches()
                if watch is not None:
                    self.inputs[name] = watch(width, context.run.device)
        self.allocated = allocated or {}
        self.results: list[LayerResult] = []
        self.reference: Reference | None = None
        self.reference_outputs: ActivationStore | None = None
        if step.requires.reference:
            original = twin(module)
            unroute(original)
            assert context.state.reference is not None
            forwards = context.forwards(original, context.state.reference)
            self.reference = Reference(original, self.stages, forwards, context.state.tokens)

    def __call__(self, keep_outputs: bool) -> list[LayerResult]:
        """Run the pass; with keep_outputs, the compressed block's outputs replace the state's activations."""
        module, hidden = self.context.block.module, self.context.state.hidden
        forwards = self.context.forwards(module, hidden)
        if self.reference is not None:
            forwards = [self.reference.paired(i, forward) for i, forward in enumerate(forwards)]
        if self.step.true_sequential:
            solve = lambda stage: self._solve_stages([stage])  # noqa: E731
            agreed = self._first_stage if self.experts else lambda stage: stage
            outputs = lockstep(module, self.stages, forwards, self._arrive, solve, agreed)
            if keep_outputs:
                for i, output in enumerate(outputs):
                    hidden[i] = self.context.checked(output)
        else:  # all layers are calibrated on the original block
            in_turn(module, self.stages, forwards, self._arrive)
            self._solve_stages(range(len(self.stages)))
            if keep_outputs:
                self.context.propagate()
        if self.reference is not None:
            self.reference_outputs = ActivationStore(self.context.store_bytes, self.context.run.work)
            for i in range(len(hidden)):
                self.reference_outputs.append(self.reference.output(i))
        return self.results

    def _arrive(self, stage: int, name: str, rows: Tensor) -> None:
        self.samples[name].update(rows)
        observer, transform = self.seen[name], self.layers[name].transform
        if self.reference is not None and isinstance(observer, CrossGram):
            routed = ROUTED.get() if self._in_expert(name) else None
            reference = self.reference.rows(stage, self.context.full(name), rows, routed)
            observer.compare(transform(rows), transform(reference))
        else:
            observer.update(transform(rows))
        for member in self.stages[stage]:
            if member in self.inputs:
                self.inputs[member].update(transform(rows))

    def _solve_stages(self, stages: Iterable[int]) -> None:
        """Solve the layers of some stages; processes divide them."""
        shared: dict[str, float] = {}
        for members in (self.stages[stage] for stage in stages):
            self._merge(members)
            if self.step.observer is not Nothing:
                self._check_tokens(members)
            absmax = max(float(self.layers[name].weight.abs().max()) for name in members)
            if self.processes.size == 1:
                self.results += [self._solve(name, absmax)[0] for name in members]
            else:
                shared |= dict.fromkeys(members, absmax)
        if shared:
            self._solve_shared(shared)

    def _merge(self, members: Sequence[str]) -> None:
        """Combine the statistics of a stage with those of the other processes."""
        for kept in (self.seen, self.samples):  # the linears of a stage share them
            kept[members[0]].merge(self.processes)
        for name in members:
            if name in self.inputs:
                self.inputs[name].merge(self.processes)

    def _first_stage(self, stage: int | None) -> int | None:
        """The first stage that a batch of any process waits at: experts may get no token in some of them."""
        return min((found for found in self.processes.gather(stage) if found is not None), default=None)

    def _solve_shared(self, shared_absmax: Mapping[str, float]) -> None:
        """Solve each layer in one process, or some rows of it in each, and install all solutions in every process.

        Of layers that are divided by rows, rank 0 alone gets the results.
        """
        members, journal, size = list(shared_absmax), self.context.run.journal, self.processes.size
        if len(members) < size and all(self.steps[n].by_rows and self.layers[n].shape[0] >= size for n in members):
            for name in members:
                self._solve_rows(name, shared_absmax[name])
            return

        def solve(name: str) -> tuple[LayerResult, Solution, list[Entry]]:
            with journal.apart() as entries:
                return *self._solve(name, shared_absmax[name]), entries

        costs = [self._cost(name) for name in members]
        owners = divided(costs, size)
        found = self.processes.spread(members, solve, costs)
        for name, owner, (result, solution, entries) in zip(members, owners, found, strict=True):
            if owner != self.processes.rank:
                with journal.apart():
                    put(self.context, name, layer := self.layers[name], solution, layer.weight.float())
            journal.replay(entries)
            self.results.append(result)

    def _cost(self, name: str) -> float:
        """The relative time of a layer's solution: products with a Hessian take the square of its columns."""
        rows, columns = self.layers[name].shape
        return rows * columns * (columns if isinstance(self.seen[name], Gram) else 1)

    def _check_tokens(self, members: Sequence[str]) -> None:
        """Journal layers without calibration tokens and experts with few; the former get substitute statistics.

        Without tokens, the inputs are assumed to be uncorrelated and of equal size (one token along each axis). Every
        pass then behaves as without data: it rounds to nearest, or prunes by magnitude.
        """
        seen, wanted = self.seen[members[0]], self.context.expert_tokens
        tokens = seen.tokens
        few = tokens < wanted and self._in_expert(members[0])
        if tokens == 0:
            message = "no calibration token reached this layer; it is compressed without calibration data"
            without_data(seen)
        elif few:
            message = "this expert saw few calibration tokens; use more or longer sequences"
        else:
            return
        for name in members:
            self.context.logger(self.context.full(name))("fallback", message, tokens=tokens, wanted=wanted)

    def _in_expert(self, name: str) -> bool:
        return any(name.startswith(expert + ".") for expert in self.experts)

    def _solve(self, name: str, shared_absmax: float) -> tuple[LayerResult, Solution]:
        """Solve a layer and install the solution."""
        facts, step, seen = self._facts(name, shared_absmax), self.steps[name], self.seen[name]
        found: list[Solution] = []

        def solve(weight: Tensor) -> Solution:
            found.append(step.solve(weight, seen, facts))
            return found[0]

        return install(self.context, name, self.layers[name], self.samples[name].rows, solve), found[0]

    def _solve_rows(self, name: str, shared_absmax: float) -> None:
        """Solve some rows of a layer in each process, and install the whole solution in every one."""
        layer, facts, processes = self.layers[name], self._facts(name, shared_absmax), self.processes
        first, after = (layer.shape[0] * rank // processes.size for rank in (processes.rank, processes.rank + 1))
        rows = slice(first, after)

        def solve(weight: Tensor) -> Solution:
            part = self.steps[name].solve(weight[rows], self.seen[name], facts.of_rows(rows))
            return Solution.of_rows(processes.gather(part))

        if processes.first:
            self.results.append(install(self.context, name, layer, self.samples[name].rows, solve))
            return
        with self.context.run.journal.apart():
            weight = layer.weight.float()
            put(self.context, name, layer, solve(weight), weight)

    def _facts(self, name: str, shared_absmax: float) -> Layer:
        """The information for the solver of a layer."""
        layer, full = self.layers[name], self.context.full(name)
        return Layer(
            full,
            layer.mask,
            self.context.run.scale_dtype,
            self.context.logger(full),
            self.inputs.get(name),
            shared_absmax,
            self.allocated.get(full),
            (self.context.state.unquantized or {}).get(full),
            self.context.run.format.negative_scales,
        )
