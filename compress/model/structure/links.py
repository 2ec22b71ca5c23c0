"""Structure discovery: what a few forward passes of one block say about it. No names of architectures, no tracing.

Groups: linears whose input is the same tensor share it. Links: a scale per channel can move from the module that
writes the channels, a norm or a linear, to the linears that read them. Every link is checked in numbers when it is
found, and every fold proves itself again before it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compress.model.linear import CompressedLinear, linears
from compress.model.open.experts import Expert, exercised, in_experts
from compress.model.structure.channel_probes import Found, all_at_once, by_halves
from compress.model.structure.probes import Change, Forward, Probe, in_float32, norms_of, width_in, width_out
from compress.model.structure.rewrite import divide_norm, remember, rewrite_rows, rewrite_weight
from compress.numerics.metrics import relative_error

FOLD_TOLERANCE = 1e-5  # relative, float32: true folds are exact to 1e-6, wrong ones are off by more than 1e-2

Kind = Literal["norm", "linear"]


@dataclass(frozen=True)
class Group:
    """Linears that read the same tensor, by their names inside the block, in the order of execution.

    norm: the name of the module that wrote the tensor and could take a scale per channel, or None.
    """

    linears: tuple[str, ...]
    norm: str | None


@dataclass(frozen=True, eq=False)
class Link:
    """A scale per channel can move through here.

    source: the module inside the block that writes the channels, a norm or a linear. readers: the modules whose input
    columns are scaled: linears, and routers of experts. channels: for each input column of the readers, the source's
    output channel, in the order that the readers' columns are stored in. kind: which of the two the source is. Links
    are equal when they are the same object.
    """

    source: str
    readers: tuple[str, ...]
    channels: Int[Tensor, " in"]
    kind: Kind

    def equalize(self, scale: Float[Tensor, " in"]) -> Float[Tensor, " in"]:
        """The scale with columns of one source channel made equal: each gets the largest of them."""
        width = int(self.channels.max()) + 1
        index = self.channels.to(scale.device)
        return scale.new_zeros(width).scatter_reduce(0, index, scale, "amax", include_self=False)[index]

    def per_channel(self, scale: Float[Tensor, " in"], width: int) -> Float[Tensor, " out"]:
        """The scale of each of the source's `width` channels; 1 for those that no reader reads here."""
        found = scale.new_ones(width)
        found[self.channels.to(scale.device)] = scale
        return found


def find_groups(block: nn.Module, forward: Forward) -> list[Group]:
    """The groups of a block in the order of execution; a linear that did not run is a group of its own, at the end."""
    inputs: dict[str, Tensor] = {}  # kept alive, so that no storage is used twice
    outputs: dict[str, Tensor] = {}
    names = linears(block)
    handles = [module.register_forward_pre_hook(_reader(inputs, name)) for name, module in names.items()]
    handles += [module.register_forward_hook(_writer(outputs, name)) for name, module in norms_of(block).items()]
    try:
        with exercised(block):
            forward(block)
    finally:
        for handle in handles:
            handle.remove()
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in inputs.items():
        groups.setdefault(_identity(tensor), []).append(name)
    norms = {_identity(tensor): name for name, tensor in outputs.items()}
    found = [Group(tuple(members), norms.get(key)) for key, members in groups.items()]
    return found + [Group((name,), None) for name in names if name not in inputs]


def _reader(inputs: dict[str, Tensor], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.setdefault(name, args[0])

    return hook


def _writer(outputs: dict[str, Tensor], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        if isinstance(output, Tensor):
            outputs[name] = output

    return hook


def _identity(tensor: Tensor) -> tuple[int, ...]:
    """What makes two tensors the same: storage, offset, shape and strides."""
    shape = (int(tensor.storage_offset()), *tensor.shape[-1:], tensor.numel())
    return (tensor.untyped_storage().data_ptr(), *shape)


def find_links(block: nn.Module, forward: Forward, alike: Sequence[Link] = ()) -> list[Link]:
    """All links of a block that hold, norms first, each in the order of definition.

    forward: a pass of a given block on fixed inputs, in the dtype of that block. It takes a few passes per module: two
    to three for each linear, and about thirty for a fused projection of gate and up; one per link of a block of the
    same `make`, if they are given (`alike`) and all hold here. At most one copy of the block, in float32, is made.
    """
    with in_float32(block) as proof:
        probe = Probe(proof, forward)
        experts = in_experts(proof)
        outside = [link for link in alike if not _inside(link.source, experts)]
        if not outside or not all(_checked(probe, link) for link in outside):
            alone = [name for name in probe.linears if not _inside(name, experts)]
            outside = [link for name in probe.norms if (link := _norm_link(probe, name))]
            outside += [link for name in alone if (link := _linear_link(probe, name))]
        return outside + _expert_links(experts)


def block_signature(block: nn.Module) -> Hashable:
    """What blocks that are built alike have in common: the names and shapes of their parameters and buffers."""
    return tuple((name, tuple(tensor.shape)) for name, tensor in block.state_dict().items())


def _inside(name: str, experts: Mapping[str, Expert]) -> bool:
    return any(name.startswith(prefix + ".") for prefix in experts)


def _expert_links(experts: Mapping[str, Expert]) -> list[Link]:
    """The links inside of experts: looked for in the first one of a kind, and checked in each."""
    found: list[Link] = []
    patterns: dict[tuple[object, ...], list[Link]] = {}
    for prefix, expert in experts.items():
        probe = Probe(expert, expert.probe)
        kind = (prefix.rpartition(".")[0], *((name, m.weight.shape) for name, m in probe.linears.items()))
        if kind not in patterns:
            patterns[kind] = [link for name in probe.linears if (link := _linear_link(probe, name))]
        for link in patterns[kind]:
            if _checked(probe, link):
                readers = tuple(f"{prefix}.{name}" for name in link.readers)
                found.append(Link(f"{prefix}.{link.source}", readers, link.channels, link.kind))
    return found


def _norm_link(probe: Probe, source: str) -> Link | None:
    """Readers whose columns scale as the norm's channels do, one after the other, until the output stays as it was."""
    width = width_out(probe.norms[source])
    scale = _random_scale(width)
    readers: dict[str, Tensor] = {}
    while True:
        undone = {name: lambda x: x * (1 / scale).to(x) for name in readers}
        probe.run({source: lambda y: y * scale.to(y) if y.shape[-1] == width else y}, undone)
        more = {n for n, (x, y) in probe.reached().items() if n not in readers and _scaled(x, y, scale)}
        if not more:
            break
        readers |= dict.fromkeys(more, torch.arange(width))
    names = tuple(name for name in probe.readers if name in readers)
    return _proved(probe, source, names, torch.arange(width), "norm") if names else None


def _scaled(before: Tensor, after: Tensor, scale: Tensor) -> bool:
    """Whether every column j is scale[j] times what it was (and not all of them zero)."""
    if before.shape[1] != len(scale) or not bool(before.any()):
        return False
    return relative_error(after, before * scale.to(before)) < 1e-3


def _linear_link(probe: Probe, source: str) -> Link | None:
    """The readers of one linear's channels, by the cheapest probe that finds any."""
    if source not in probe.ran:
        return None
    width = width_out(probe.linears[source])
    for find in (_plain, _fused_attention, by_halves):
        link = _best(probe, source, find(probe, source, width))
        if link is not None:
            return link
    return None


def _plain(probe: Probe, source: str, width: int) -> Found:
    return all_at_once(probe, source, width)


def _fused_attention(probe: Probe, source: str, width: int) -> Found:
    return all_at_once(probe, source, width, alike=True)


def _best(probe: Probe, source: str, found: Found) -> Link | None:
    """The link to all readers that read the same channels, if it holds; readers that differ cannot share a scale."""
    found = {name: channels for name, channels in found.items() if name != source}
    if not found:
        return None
    first = next(iter(found.values()))
    if not all(torch.equal(channels, first) for channels in found.values()):
        return None
    return _proved(probe, source, tuple(n for n in probe.readers if n in found), first, "linear")


def _proved(
    probe: Probe, source: str, readers: tuple[str, ...], channels: Int[Tensor, " in"], kind: Kind
) -> Link | None:
    """The link, if it holds; readers that put these channels in different orders cannot share a scale."""
    stored = [channels if (order := _order(probe.readers[name])) is None else channels[order] for name in readers]
    if not all(torch.equal(other, stored[0]) for other in stored):
        return None
    return _checked(probe, Link(source, readers, stored[0], kind))


def _order(module: nn.Module) -> Int[Tensor, " in"] | None:
    """The order that a reader puts its inputs in; None where they stay."""
    order = module.input_permutation if isinstance(module, CompressedLinear) else None
    return None if order is None else order.cpu()


def _checked(probe: Probe, link: Link) -> Link | None:
    """The link, if dividing what its source writes and multiplying what its readers read changes nothing.

    A linear that never ran might read the same channels, so the link is refused when one has as many inputs.
    """
    silent = [m for name, m in probe.readers.items() if name not in probe.ran]
    if any(width_in(module) == len(link.channels) for module in silent):
        return None
    width = width_out(probe.block.get_submodule(link.source))
    scale = _random_scale(width)[link.channels]
    divisor = link.per_channel(scale, width)
    outputs = {link.source: lambda y: y / divisor.to(y) if y.shape[-1] == width else y}
    inputs: dict[str, Change] = {}
    for name in link.readers:
        order = _order(probe.readers[name])
        before = scale if order is None else scale[order.argsort()]
        inputs[name] = lambda x, s=before: x * s.to(x)
    found = probe.run(outputs, inputs)
    return link if relative_error(found, probe.output) < FOLD_TOLERANCE else None


def _random_scale(width: int) -> Float[Tensor, " channels"]:
    """Positive factors from 1/2 to 2, of which no two are alike."""
    return 2.0 ** (2 * torch.rand(width, generator=torch.Generator().manual_seed(width)) - 1)


@dataclass(frozen=True)
class Fold:
    """The outcome of an attempted fold: whether it is kept, how it was written, and the error that was measured."""

    kept: bool
    form: str
    error: float


def fold(block: nn.Module, link: Link, scale: Float[Tensor, " in"], forward: Forward) -> Fold:
    """Divide what the link's source writes by `scale`, and multiply the input columns of its readers by it.

    scale: positive, one for each input column of the readers, equal where columns share a channel (`link.share`). The
    rewrite is tried on a float32 copy of the block first; for norms plainly, then for those that multiply by
    (1 + weight). The first form that leaves the block's output unchanged (relative error below FOLD_TOLERANCE) is
    applied; when none does, the block is left as it was.
    """
    assert bool((scale > 0).all()), "a scale must be positive"
    assert torch.equal(scale, link.equalize(scale)), "columns of one channel must have one scale; use link.share"
    block, link, forward = _scope(block, link, forward)
    forms = ("weight", "1 + weight") if link.kind == "norm" else ("linear",)
    error = float("inf")
    with in_float32(block) as proof:
        before = forward(proof)
        for form in forms:
            undo = _rewrite(proof, link, scale, form)
            error = relative_error(forward(proof), before)
            if error < FOLD_TOLERANCE:
                if proof is not block:
                    _rewrite(block, link, scale, form)
                return Fold(True, form, error)
            undo()
    return Fold(False, "none", error)


def _scope(block: nn.Module, link: Link, forward: Forward) -> tuple[nn.Module, Link, Forward]:
    """Where a fold is proved: in the block, or in the one expert that it is about."""
    for name, expert in in_experts(block).items():
        if all(place.startswith(name + ".") for place in (link.source, *link.readers)):
            start = len(name) + 1
            inside = Link(link.source[start:], tuple(r[start:] for r in link.readers), link.channels, link.kind)
            return expert, inside, expert.probe
    return block, link, forward


def _rewrite(block: nn.Module, link: Link, scale: Tensor, form: str) -> Callable[[], None]:
    """Write a fold into the weights; returns what takes it back."""
    source = block.get_submodule(link.source)
    readers = [block.get_submodule(name) for name in link.readers]
    undo = remember(source, *readers)
    divisor = link.per_channel(scale, width_out(source))
    if link.kind == "norm":
        divide_norm(source, divisor, form)
    else:
        rewrite_rows(source, lambda rows: rows / (divisor if rows.dim() == 1 else divisor[:, None]).to(rows))
    for module in readers:
        rewrite_weight(module, lambda weight: weight * scale.to(weight))
    return undo
