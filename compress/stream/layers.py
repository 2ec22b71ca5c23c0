"""A layer pass at work on one block: observe and solve stage by stage, measuring what each solution does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from compress.contract import Layer, LayerPass
from compress.model.experts import in_experts
from compress.model.packed import replace_linear
from compress.stream.lockstep import in_turn, lockstep
from compress.stream.observers import CrossGram, Nothing, Observer, Sample, without_data
from compress.stream.place import LayerResult, of_one_input, settle
from compress.stream.reference import Reference, twin
from compress.stream.state import Site
from compress.stream.store import ActivationStore


class LayerWork:
    """One layer pass on one block.

    decided: what the pass's survey decided, by full name.
    behind: afterwards, the uncompressed model's activations behind the block, where the pass compares with them.
    """

    def __init__(
        self, site: Site, step: LayerPass, names: Sequence[str], decided: Mapping[str, Any] | None = None
    ) -> None:
        self.site, self.step = site, step
        module = site.block.module
        self.layers = {name: replace_linear(module, name) for name in names}
        self.steps = {name: step.for_layer(site.full(name)) or step for name in names}
        chosen = [[name for name in group.linears if name in self.layers] for group in site.groups()]
        self.stages = [stage for members in chosen for stage in of_one_input(module, members)]
        self.experts = in_experts(module)
        self.seen: dict[str, Observer] = {}
        self.inputs: dict[str, Observer] = {}
        self.samples: dict[str, Sample] = {}
        for members in self.stages:
            width = self.layers[members[0]].shape[1]
            self.seen |= dict.fromkeys(members, step.observer(width, site.run.device))
            self.samples |= dict.fromkeys(members, Sample())
            for name in members:
                watch = self.steps[name].watches()
                if watch is not None:
                    self.inputs[name] = watch(width, site.run.device)
        self.decided = decided or {}
        self.results: list[LayerResult] = []
        self.reference: Reference | None = None
        self.behind: ActivationStore | None = None
        if step.needs_reference:
            original = twin(module)
            assert site.state.reference is not None
            forwards = site.forwards(original, site.state.reference)
            self.reference = Reference(original, self.stages, forwards, site.state.tokens)

    def __call__(self, keep_outputs: bool) -> list[LayerResult]:
        """Run; with keep_outputs the state's activations become the compressed block's outputs."""
        module, hidden = self.site.block.module, self.site.state.hidden
        forwards = self.site.forwards(module, hidden)
        if self.reference is not None:
            forwards = [self.reference.beside(i, forward) for i, forward in enumerate(forwards)]
        if self.step.true_sequential:
            outputs = lockstep(module, self.stages, forwards, self._arrive, self._solve_stage)
            if keep_outputs:
                for i, output in enumerate(outputs):
                    hidden[i] = self.site.checked(output)
        else:  # all layers see the block as it was
            in_turn(module, self.stages, forwards, self._arrive)
            for stage in range(len(self.stages)):
                self._solve_stage(stage)
            if keep_outputs:
                self.site.propagate()
        if self.reference is not None:
            self.behind = ActivationStore(self.site.store_bytes, self.site.run.work)
            for i in range(len(hidden)):
                self.behind.append(self.reference.output(i))
        return self.results

    def _arrive(self, stage: int, name: str, rows: Tensor) -> None:
        self.samples[name].update(rows)
        observer, transform = self.seen[name], self.layers[name].transform
        if self.reference is not None and isinstance(observer, CrossGram):
            reference = self.reference.rows(stage, self.site.full(name), rows)
            observer.compare(transform(rows), transform(reference))
        else:
            observer.update(transform(rows))
        for member in self.stages[stage]:
            if member in self.inputs:
                self.inputs[member].update(transform(rows))

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
        seen, wanted = self.seen[members[0]], self.site.expert_tokens
        tokens = seen.tokens
        few = tokens < wanted and any(members[0].startswith(name + ".") for name in self.experts)
        if tokens == 0:
            message = "no calibration token reached this layer; it is solved as if all its inputs were alike"
            without_data(seen)
        elif few:
            message = "this expert saw few calibration tokens; more or longer sequences would show it more"
        else:
            return
        for name in members:
            self.site.noter(self.site.full(name))("fallback", message, tokens=tokens, wanted=wanted)

    def _solve(self, name: str, peak: float) -> None:
        layer, full = self.layers[name], self.site.full(name)
        facts = Layer(full, layer.mask, self.site.run.storage, self.site.noter(full), self.inputs.get(name), peak)
        facts = replace(facts, decided=self.decided.get(full))
        step, seen = self.steps[name], self.seen[name]
        rows = self.samples[name].rows
        self.results.append(settle(self.site, name, layer, rows, lambda weight: step.solve(weight, seen, facts)))
