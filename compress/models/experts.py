"""Open experts that are stored as 3-D parameters into one linear per expert and matrix: views, no copy.

A module is recognized as a set of experts by its structure: two 3-D parameters [experts, ...] with the same first
dimension, with or without 2-D biases, and no other parameters. The opened form is verified on a small set of random
experts before it replaces the original. Its linears have the names that transformers reads from checkpoints.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from compress.errors import CannotRun, call_foreign
from compress.layers.linear import CompressedLinear

PROOF_TOLERANCE = 1e-5  # relative, float32: another summation order differs by 1e-7
PROOF_UNIT = 8  # the verification replaces the common divisor of the real widths by this
CUBES = 2
"""3-D parameters of a set of experts."""
PROBE_TOKENS = 16  # random tokens with which links inside an expert are found and verified
ROUTED: ContextVar[Tensor | None] = ContextVar("ROUTED", default=None)
"""The indices of the tokens that the current expert computes; forward passes in lockstep each have their own."""


@dataclass(frozen=True)
class ExpertLayout:
    """How the 3-D parameters of experts hold linears.

    Attributes:
        up: name of the parameter of the first matrices.
        down: name of the parameter of the second matrices.
        transposed: whether the parameters are [experts, in, out].
        names: for each parameter, the names of the linears that its rows are split into, evenly.
    """

    up: str
    down: str
    transposed: bool
    names: Mapping[str, Sequence[str]]


class Expert(nn.Module):
    """One expert: the up (and gate) linears, the original module's activation, and the down linear."""

    def __init__(self, shell: nn.Module, linears: Mapping[str, nn.Linear], out: str) -> None:
        super().__init__()
        self.shell = shell  # the original module without parameters; provides the activation
        self.into = tuple(name for name in linears if name != out)
        self.out = out
        for name, linear in linears.items():
            self.add_module(name, linear)

    def forward(self, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        """Return the expert's output for its tokens."""
        hidden = torch.cat([self.get_submodule(name)(x) for name in self.into], dim=-1)
        return self.get_submodule(self.out)(_activation(self.shell)(hidden))

    @staticmethod
    def probe(expert: nn.Module) -> Float[Tensor, "tokens width"]:
        """Return the output of an expert (or of a copy) for a few random tokens, for verification."""
        assert isinstance(expert, Expert)
        layer = CompressedLinear.of(expert.get_submodule(expert.into[0]))
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            return expert(torch.randn(PROBE_TOKENS, layer.shape[1], generator=draw).to(next(_floating(layer))))


class Experts(nn.Module):
    """Opened experts, by number. The arguments are those of the original: tokens, expert numbers, expert weights.

    Attributes:
        named: whether transformers reads the linears under these names.
        all_tokens: whether every expert sees all tokens, with an equal weight in addition to the router's. Probes and
            verifications use this to run every expert and to see every change of the routing.
        unrouted: whether every expert computes all tokens, while the output is that of the routed ones, for statistics
            of all tokens, and for comparisons with a model that routes tokens to other experts.
    """

    def __init__(self, experts: Sequence[Expert], has_stored_names: bool) -> None:
        super().__init__()
        for number, expert in enumerate(experts):
            self.add_module(str(number), expert)
        self.count = len(experts)
        self.named = has_stored_names
        self.all_tokens = False
        self.unrouted = False

    def expert(self, number: int) -> Expert:
        """Return the expert with this number."""
        expert = self.get_submodule(str(number))
        assert isinstance(expert, Expert)
        return expert

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Float[Tensor, "tokens width"]:
        """Return the weighted sum of the chosen experts' outputs; arguments are identified by dtype and shape."""
        x, chosen, weights = roles((*args, *kwargs.values()))
        output = torch.zeros_like(x)
        for number in range(self.count):
            if self.all_tokens:
                weight = torch.where(chosen == number, weights, 0).sum(-1, keepdim=True) + 1 / self.count
                expert_output = self.expert(number)(x.clone())  # a separate tensor, as the chosen tokens are
                output += (expert_output * weight).to(output.dtype)
                continue
            token, place = torch.where(chosen == number)
            if self.unrouted:
                all_outputs = self.expert(number)(x.clone())
                output.index_add_(0, token, (all_outputs[token] * weights[token, place, None]).to(output.dtype))
            elif len(token):
                ROUTED.set(token)
                expert_output = self.expert(number)(x[token]) * weights[token, place, None]
                output.index_add_(0, token, expert_output.to(output.dtype))
        return output


def roles(tensors: Sequence[Tensor]) -> tuple[Tensor, Int[Tensor, "tokens k"], Float[Tensor, "tokens k"]]:
    """Identify (tokens, chosen expert numbers, expert weights) among the arguments of a call."""
    (chosen,) = (t for t in tensors if not t.is_floating_point())
    x, weights = (t for t in tensors if t.is_floating_point())
    return x, chosen, weights


def _activation(shell: Any) -> Callable[[Tensor], Tensor]:
    """Return the function between an expert's two matrices, by transformers' interface of experts."""
    return shell._apply_gate if getattr(shell, "has_gate", True) and hasattr(shell, "_apply_gate") else shell.act_fn


def _floating(module: nn.Module) -> Iterator[Tensor]:
    return (t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point())


@contextmanager
def exercised(module: nn.Module) -> Iterator[None]:
    """Route every token to every expert below a module in the context, so that probes reach all experts."""
    experts = [child for child in module.modules() if isinstance(child, Experts)]
    for child in experts:
        child.all_tokens = True
    try:
        yield
    finally:
        for child in experts:
            child.all_tokens = False


@contextmanager
def computed_by(model: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Replace the forward pass of every opened set of experts in the context.

    Args:
        forward: is called with the set and the tensors of the call (`roles`); returns the output.
    """
    opened = [module for module in model.modules() if isinstance(module, Experts)]
    for experts in opened:
        experts.forward = lambda *args, _experts=experts, **kwargs: forward(_experts, *args, *kwargs.values())
    try:
        yield
    finally:
        for experts in opened:
            del experts.forward


def unroute(block: nn.Module, unrouted: bool = True) -> None:
    """Make every expert below a module compute all tokens, or undo it; the output is that of the routed ones."""
    for child in block.modules():
        if isinstance(child, Experts):
            child.unrouted = unrouted


def in_experts(block: nn.Module) -> dict[str, Expert]:
    """Return every opened expert below a module, by name."""
    return {name: child for name, child in block.named_modules() if isinstance(child, Expert)}


def open_experts(model: nn.Module, names: Mapping[str, Sequence[str]] | None = None) -> list[str]:
    """Replace every set of experts in place by its opened form; weights may be on the meta device.

    Args:
        model: a model, or a part of one.
        names: `stored_names` of the whole model; None: it is the whole model.

    Returns:
        A note for each module with experts that could not be opened; its weights are not compressed.
    """
    notes: list[str] = []
    proved: dict[tuple[object, ...], str | None] = {}
    names = stored_names(model) if names is None else names
    for name, module in list(model.named_modules()):
        if not name or (layouts := _layouts(module, names)) is None:
            continue
        key = (type(module), *(tuple(p.shape) for p in module._parameters.values() if p is not None))
        for layout in layouts:
            if (*key, layout.transposed) not in proved:
                proved[(*key, layout.transposed)] = _refuted(module, layout)
        valid_layouts = [layout for layout in layouts if proved[(*key, layout.transposed)] is None]
        if valid_layouts:
            model.set_submodule(name, _opened(module, valid_layouts[0], has_stored_names=valid_layouts[0].up in names))
        else:
            reason = proved[(*key, layouts[0].transposed)] if layouts else "they are not two matrices for each expert"
            notes.append(f"{name}: its 3-D weights are not compressed: {reason}")
    return notes


def _layouts(module: nn.Module, names: Mapping[str, Sequence[str]]) -> list[ExpertLayout] | None:
    """Return the possible layouts of a module with experts; None when the module does not look like one."""
    parameters = {name: p for name, p in module._parameters.items() if p is not None and p.is_floating_point()}
    cubes = [name for name, p in parameters.items() if p.dim() == 3]
    if len(cubes) != CUBES:
        return None
    up, down = cubes
    (count, a, b), (down_count, c, d) = parameters[up].shape, parameters[down].shape
    if count != down_count or count == 1:
        return None  # one matrix each: position embeddings and the like
    biases = {f"{name}_bias" for name in cubes}
    extra = parameters.keys() - cubes - biases or any(True for child in module.children() for _ in child.parameters())
    flat = [flipped for flipped, fits in ((False, b == c), (True, a == d)) if fits]
    if extra or not flat:
        return []
    split = {name: names.get(name, (name,)) for name in cubes}
    return [ExpertLayout(up, down, transposed, split) for transposed in flat]


def _opened(module: nn.Module, layout: ExpertLayout, has_stored_names: bool) -> Experts:
    """Return the opened form of a module; its linears are views of the module's parameters."""
    shell = copy.copy(module)
    shell.__dict__["_parameters"] = {}
    count = module.get_parameter(layout.up).shape[0]
    linears: list[dict[str, nn.Linear]] = [{} for _ in range(count)]
    for cube in (layout.up, layout.down):
        weight, bias = module.get_parameter(cube).detach(), module._parameters.get(f"{cube}_bias")
        for number in range(count):
            matrix = weight[number].T if layout.transposed else weight[number]
            parts = layout.names[cube]
            shift = [None] * len(parts) if bias is None else bias.detach()[number].chunk(len(parts))
            for name, rows, offset in zip(parts, matrix.chunk(len(parts)), shift, strict=True):
                linears[number][name] = _linear(rows, offset)
    out = layout.names[layout.down][0]
    return Experts([Expert(shell, linears_of_expert, out) for linears_of_expert in linears], has_stored_names)


def _linear(weight: Float[Tensor, "out in"], bias: Tensor | None) -> nn.Linear:
    """Return a linear that shares its tensors with the module they come from."""
    linear = nn.Linear.__new__(nn.Linear)  # its constructor initializes weights, which takes as long as all the rest
    nn.Module.__init__(linear)
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
    return linear


def _refuted(module: nn.Module, layout: ExpertLayout) -> str | None:
    """Return why the opened form computes another function, tested on a small random copy; None if it is the same."""
    small = copy.copy(module)
    small.__dict__.pop("forward", None)  # a forward that was wrapped in place would use the original's weights
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    unit = math.gcd(*(size for p in parameters.values() for size in p.shape[1:]))
    draw = torch.Generator().manual_seed(0)
    small.__dict__["_parameters"] = {
        name: nn.Parameter(
            torch.randn(p.shape[0], *(size // unit * PROOF_UNIT for size in p.shape[1:]), generator=draw) / 4,
            requires_grad=False,
        )
        for name, p in parameters.items()
    }
    count, *sides = small.get_parameter(layout.up).shape
    width = sides[0] if layout.transposed else sides[1]
    x = torch.randn(4 * count, width, generator=draw)
    chosen = torch.stack([torch.randperm(count, generator=draw)[: min(2, count)] for _ in range(len(x))])
    weights = torch.rand(chosen.shape, generator=draw)
    with torch.no_grad():
        try:
            expected = call_foreign(small, x, chosen, weights)
            actual = call_foreign(_opened(small, layout, False), x, chosen, weights)
            error = float((actual - expected).norm() / expected.norm())
        except CannotRun as error:
            return f"the module does not accept tokens, experts and weights ({error})"
    return None if error < PROOF_TOLERANCE else f"the opened form computes other values (relative error {error:.1g})"


def stored_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return 3-D parameter -> names of the linears of one expert that transformers merges into it on loading."""
    names_by_parameter: dict[str, tuple[str, ...]] = {}
    for converter in _conversions(model):
        kinds = {type(operation) for operation in getattr(converter, "operations", ())}
        if not isinstance(converter, WeightConverter) or MergeModulelist not in kinds:
            continue
        if kinds <= {MergeModulelist, Concatenate} and len(converter.target_patterns) == 1:
            leaves = [pattern.removesuffix(".weight").rpartition(".")[2] for pattern in converter.source_patterns]
            if len(set(leaves)) == len(leaves) and all(leaf.isidentifier() for leaf in leaves):
                names_by_parameter.setdefault(converter.target_patterns[0].rpartition(".")[2], tuple(leaves))
    return names_by_parameter


def unstacked(model: nn.Module, names: Iterable[str], stacked: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names of the tensors of single experts, by the name of the tensor that holds those of all experts.

    Args:
        names: of stored tensors.
        stacked: by the end of the name of a tensor, the name of its parts inside of a linear: {"_bias": "bias"}.
    """
    if not stacked:
        return {}
    counts = {name: module.count for name, module in model.named_modules() if isinstance(module, Experts)}
    parts = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        end = next((end for end in stacked if leaf.endswith(end)), None)
        if parent in counts and end is not None:
            linear = leaf.removesuffix(end)
            parts[name] = [f"{parent}.{number}.{linear}.{stacked[end]}" for number in range(counts[parent])]
    return parts


def renamed(model: nn.Module, stored: Sequence[str]) -> dict[str, str]:
    """Return stored tensor name -> name in the model, by transformers' renaming rules."""
    renamings = [rule for rule in _conversions(model) if isinstance(rule, WeightRenaming)]
    new_names = {}
    for name in stored:
        new = name
        for rule in renamings:
            new, _ = rule.rename_source_key(new)
        new_names[name] = new
    return new_names


def _conversions(model: nn.Module) -> list[object]:
    return list(get_model_conversion_mapping(model)) if isinstance(model, PreTrainedModel) else []
