"""Structure discovery from a few forward passes of one block: no architecture names, no tracing.

Groups: linears that read the same tensor share their input. Links: a scale per channel can move from the module that
writes the channels, a norm or a linear, to the linears that read them. Every link is verified numerically when it is
found, and every fold is verified again before it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from compress.layers.linear import CompressedLinear, linears
from compress.models.experts import Expert, exercised, in_experts
from compress.models.structure.channel_probes import ChannelMap, all_at_once, by_halves
from compress.models.structure.probes import Change, Forward, Probe, in_float32, norms_of, width_in, width_out
from compress.models.structure.rewrite import divide_norm, remember, rewrite_rows, rewrite_weight
from compress.numerics.metrics import relative_error

FOLD_TOLERANCE = 1e-5  # relative, float32: true folds are exact to 1e-6, wrong ones are off by more than 1e-2

Kind = Literal["norm", "linear"]
Identity = tuple[int, ...]
"""The identity of a tensor: storage, offset, last dimension and number of elements."""


@dataclass(frozen=True)
class Group:
    """Linears that read the same tensor, by their names inside the block, in the order of execution.

    Attributes:
        linears: names of the linears.
        norm: name of the module that writes the tensor and can absorb a scale per channel, or None.
    """

    linears: tuple[str, ...]
    norm: str | None


@dataclass(frozen=True, eq=False)
class Link:
    """A path along which a scale per channel can move from one module to others; compared by identity.

    Attributes:
        source: module inside the block that writes the channels, a norm or a linear.
        readers: modules whose input columns are scaled: linears, and routers of experts.
        channels: for each stored input column of the readers, the output channel of the source.
        kind: whether the source is a norm or a linear.
    """

    source: str
    readers: tuple[str, ...]
    channels: Int[Tensor, " in"]
    kind: Kind

    def equalize(self, scale: Float[Tensor, " in"]) -> Float[Tensor, " in"]:
        """Give columns of the same source channel the same scale: the largest of theirs."""
        width = int(self.channels.max()) + 1
        index = self.channels.to(scale.device)
        return scale.new_zeros(width).scatter_reduce(0, index, scale, "amax", include_self=False)[index]

    def per_channel(self, scale: Float[Tensor, " in"], width: int) -> Float[Tensor, " out"]:
        """Return the scale of each of the source's `width` channels; 1 for channels that no reader reads."""
        factors = scale.new_ones(width)
        factors[self.channels.to(scale.device)] = scale
        return factors


def find_groups(block: nn.Module, forward: Forward) -> list[Group]:
    """Find the groups of a block, in the order of execution.

    A linear that did not run is a group by itself, at the end. No input outlives its use in the block.
    """
    inputs: dict[str, Identity] = {}
    outputs: dict[str, Identity] = {}
    storages: list[StorageWeakRef] = []  # the identity of a storage is not reused while a weak reference exists

    def identity(tensor: Tensor) -> Identity:
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        return storages[-1].cdata, int(tensor.storage_offset()), *tensor.shape[-1:], tensor.numel()

    def reader(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if name not in inputs:
                inputs[name] = identity(args[0])

        return hook

    def writer(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
            if isinstance(output, Tensor):
                outputs[name] = identity(output)

        return hook

    names = linears(block)
    handles = [module.register_forward_pre_hook(reader(name)) for name, module in names.items()]
    handles += [module.register_forward_hook(writer(name)) for name, module in norms_of(block).items()]
    try:
        with exercised(block):
            forward(block)
    finally:
        for handle in handles:
            handle.remove()
    groups: dict[Identity, list[str]] = {}
    for name, key in inputs.items():
        groups.setdefault(key, []).append(name)
    norms = {key: name for name, key in outputs.items()}
    groups_that_ran = [Group(tuple(members), norms.get(key)) for key, members in groups.items()]
    return groups_that_ran + [Group((name,), None) for name in names if name not in inputs]


def find_links(block: nn.Module, forward: Forward, similar: Sequence[Link] = ()) -> list[Link]:
    """Find all links of a block that hold: norms first, each kind in the order of definition.

    The search takes two to three passes per linear, and about thirty for a fused gate and up projection. At most one
    float32 copy of the block is made.

    Args:
        block: block of a model.
        forward: forward pass of the block on fixed inputs, in the dtype of the block.
        similar: links of a block of the same `block_signature`; if they all hold here, one pass per link suffices.
    """
    with in_float32(block) as proof:
        probe = Probe(proof, forward)
        experts = in_experts(proof)
        outside = [link for link in similar if not _inside(link.source, experts)]
        if not outside or not all(_checked(probe, link) for link in outside):
            alone = [name for name in probe.linears if not _inside(name, experts)]
            outside = [link for name in probe.norms if (link := _norm_link(probe, name))]
            outside += [link for name in alone if (link := _linear_link(probe, name))]
        return outside + _expert_links(experts)


def block_signature(block: nn.Module) -> Hashable:
    """Return the signature of a block's structure: the names and shapes of its parameters and buffers."""
    return tuple((name, tuple(tensor.shape)) for name, tensor in block.state_dict().items())


def _inside(name: str, experts: Mapping[str, Expert]) -> bool:
    return any(name.startswith(prefix + ".") for prefix in experts)


def _expert_links(experts: Mapping[str, Expert]) -> list[Link]:
    """Find the links inside experts in the first expert of a kind, and verify them in each of them."""
    links: list[Link] = []
    patterns: dict[tuple[object, ...], list[Link]] = {}
    for prefix, expert in experts.items():
        probe = Probe(expert, expert.probe)
        kind = (prefix.rpartition(".")[0], *((name, m.weight.shape) for name, m in probe.linears.items()))
        if kind not in patterns:
            patterns[kind] = [link for name in probe.linears if (link := _linear_link(probe, name))]
        for link in patterns[kind]:
            if _checked(probe, link):
                readers = tuple(f"{prefix}.{name}" for name in link.readers)
                links.append(Link(f"{prefix}.{link.source}", readers, link.channels, link.kind))
    return links


def _norm_link(probe: Probe, source: str) -> Link | None:
    """Find the readers whose columns scale with the norm's channels, round by round, until no more are found."""
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


def _scaled(plain: Tensor, probed: Tensor, scale: Tensor) -> bool:
    """Return whether each column j is scaled by scale[j], and the input is not all zeros."""
    if plain.shape[1] != len(scale) or not bool(plain.any()):
        return False
    return relative_error(probed, plain * scale.to(plain)) < 1e-3


def _linear_link(probe: Probe, source: str) -> Link | None:
    """Return the link from one linear to its readers, found by the cheapest probe that finds any."""
    if source not in probe.ran:
        return None
    width = width_out(probe.linears[source])
    for find in (all_at_once, partial(all_at_once, equal_tokens=True), by_halves):
        link = _best(probe, source, find(probe, source, width))
        if link is not None:
            return link
    return None


def _best(probe: Probe, source: str, channel_map: ChannelMap) -> Link | None:
    """Return the link to all readers of the same channels, if it holds.

    Readers of different channels cannot share a scale.
    """
    channels_by_reader = {name: channels for name, channels in channel_map.items() if name != source}
    if not channels_by_reader:
        return None
    channels, *remaining_channels = channels_by_reader.values()
    if not all(torch.equal(reader_channels, channels) for reader_channels in remaining_channels):
        return None
    return _proved(probe, source, tuple(n for n in probe.readers if n in channels_by_reader), channels, "linear")


def _proved(
    probe: Probe, source: str, readers: tuple[str, ...], channels: Int[Tensor, " in"], kind: Kind
) -> Link | None:
    """Return the link, if it holds; readers that permute these channels differently cannot share a scale."""
    stored = [channels if (order := _order(probe.readers[name])) is None else channels[order] for name in readers]
    if not all(torch.equal(order_of_reader, stored[0]) for order_of_reader in stored):
        return None
    return _checked(probe, Link(source, readers, stored[0], kind))


def _mixes(module: nn.Module) -> bool:
    """Return whether every column of a reader mixes several channels."""
    return isinstance(module, CompressedLinear) and module.scheme.mixes


def _order(module: nn.Module) -> Int[Tensor, " in"] | None:
    """Return the input permutation of a reader, or None."""
    order = module.input_permutation if isinstance(module, CompressedLinear) else None
    return None if order is None else order.cpu()


def _checked(probe: Probe, link: Link) -> Link | None:
    """Return the link if scaling the source's output down and the readers' inputs up leaves the output unchanged.

    A linear that never ran could read the same channels; a link is refused if such a linear has as many inputs.
    """
    silent = [m for name, m in probe.readers.items() if name not in probe.ran]
    if any(width_in(module) == len(link.channels) for module in silent):
        return None
    if any(_mixes(probe.readers[name]) for name in link.readers):
        return None
    width = width_out(probe.block.get_submodule(link.source))
    scale = _random_scale(width)[link.channels]
    divisor = link.per_channel(scale, width)
    outputs = {link.source: lambda y: y / divisor.to(y) if y.shape[-1] == width else y}
    inputs: dict[str, Change] = {}
    for name in link.readers:
        order = _order(probe.readers[name])
        reader_scale = scale if order is None else scale[order.argsort()]
        inputs[name] = lambda x, s=reader_scale: x * s.to(x)
    actual = probe.run(outputs, inputs)
    return link if relative_error(actual, probe.output) < FOLD_TOLERANCE else None


def _random_scale(width: int) -> Float[Tensor, " channels"]:
    """Return distinct positive factors from 1/2 to 2."""
    return 2.0 ** (2 * torch.rand(width, generator=torch.Generator().manual_seed(width)) - 1)


@dataclass(frozen=True)
class Fold:
    """The outcome of an attempted fold.

    Attributes:
        is_kept: whether the rewrite leaves the output unchanged and is kept.
        form: form of the rewrite.
        error: relative error of the output.
    """

    is_kept: bool
    form: str
    error: float


Rewrite = Callable[[nn.Module], Callable[[], None]]
"""Rewrites the weights of a block, and returns a function that undoes it."""


def apply_verified(block: nn.Module, forward: Forward, rewrites: Mapping[str, Rewrite]) -> Fold:
    """Apply the first rewrite that leaves the block's output unchanged; otherwise none.

    Rewrites are tried in float32, on a copy of the block unless it is in float32. Unchanged means a relative error
    below FOLD_TOLERANCE.

    Args:
        block: block of a model.
        forward: forward pass of the block on fixed inputs.
        rewrites: rewrites by their form, in the order in which they are tried.
    """
    error = float("inf")
    with in_float32(block) as proof:
        expected = forward(proof)
        for form, rewrite in rewrites.items():
            undo = rewrite(proof)
            error = relative_error(forward(proof), expected)
            if error < FOLD_TOLERANCE:
                if proof is not block:
                    rewrite(block)
                return Fold(True, form, error)
            undo()
    return Fold(False, "none", error)


def fold(block: nn.Module, link: Link, scale: Float[Tensor, " in"], forward: Forward) -> Fold:
    """Divide the output of the link's source by `scale` and multiply the input columns of its readers by it.

    The rewrite is verified numerically (`apply_verified`), for norms in the form `weight`, then in `1 + weight`.

    Args:
        block: block of a model.
        link: link along which the scale moves.
        scale: positive, one per input column of the readers, equal where columns share a channel (`Link.equalize`).
        forward: forward pass of the block on fixed inputs.
    """
    assert bool((scale > 0).all()), "a scale must be positive"
    assert torch.equal(scale, link.equalize(scale)), "columns of one channel must have one scale; use link.equalize"
    block, link, forward = scope_of(block, link, forward)
    forms = ("weight", "1 + weight") if link.kind == "norm" else ("linear",)
    rewrites = {form: partial(_rewrite, link=link, scale=scale, form=form) for form in forms}
    return apply_verified(block, forward, rewrites)


def scope_of(block: nn.Module, link: Link, forward: Forward) -> tuple[nn.Module, Link, Forward]:
    """Return the module in which a fold is verified, with the link and the forward pass inside of it.

    It is the expert that holds all modules of the link, otherwise the block.
    """
    for name, expert in in_experts(block).items():
        if all(place.startswith(name + ".") for place in (link.source, *link.readers)):
            start = len(name) + 1
            inside = Link(link.source[start:], tuple(r[start:] for r in link.readers), link.channels, link.kind)
            return expert, inside, expert.probe
    return block, link, forward


def _rewrite(block: nn.Module, link: Link, scale: Tensor, form: str) -> Callable[[], None]:
    """Write a fold into the weights; return a function that undoes it."""
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
