"""Apply a layer pass to one block: observe and solve stage by stage, and measure the error of each solution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from compress.api.layers import Layer
from compress.api.observers import CrossGram, Nothing, Observer, Sample, without_data
from compress.api.passes import LayerPass
from compress.model.linear import replace_linear
from compress.model.open.experts import ROUTED, in_experts, unroute
from compress.stream.context import BlockContext
from compress.stream.install import LayerResult, install, of_one_input
from compress.stream.lockstep import in_turn, lockstep
from compress.stream.reference import Reference, twin
from compress.stream.store import ActivationStore


class LayerWork:
    """One layer pass on one block.

    allocated: the allocation of the pass's survey, by full name. reference_outputs: the uncompressed model's
    activations after the block; the call sets them if the pass needs a reference.
    """

    def __init__(
        self, context: BlockContext, step: LayerPass, names: Sequence[str], allocated: Mapping[str, Any] | None = None
    ) -> None:
        self.context, self.step = context, step
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
            outputs = lockstep(module, self.stages, forwards, self._arrive, self._solve_stage)
            if keep_outputs:
                for i, output in enumerate(outputs):
                    hidden[i] = self.context.checked(output)
        else:  # all layers are calibrated on the original block
            in_turn(module, self.stages, forwards, self._arrive)
            for stage in range(len(self.stages)):
                self._solve_stage(stage)
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

    def _solve_stage(self, stage: int) -> None:
        members = self.stages[stage]
        if self.step.observer is not Nothing:
            self._check_tokens(members)
        shared_absmax = max(float(self.layers[name].weight.abs().max()) for name in members)
        for name in members:
            self._solve(name, shared_absmax)

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

    def _solve(self, name: str, shared_absmax: float) -> None:
        layer, full = self.layers[name], self.context.full(name)
        facts = Layer(
            full,
            layer.mask,
            self.context.run.scale_dtype,
            self.context.logger(full),
            self.inputs.get(name),
            shared_absmax,
            negative_scales=self.context.run.format.negative_scales,
        )
        unquantized = (self.context.state.unquantized or {}).get(full)
        facts = replace(facts, allocated=self.allocated.get(full), unquantized=unquantized)
        step, seen = self.steps[name], self.seen[name]
        rows = self.samples[name].rows
        self.results.append(install(self.context, name, layer, rows, lambda weight: step.solve(weight, seen, facts)))
