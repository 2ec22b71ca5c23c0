"""Count the work of a run: operations, numbers and bytes of each pass, block by block, before it runs.

One block of each kind is counted, and stands for all equal ones. Tokens are spread evenly over experts. What several
processes divide is counted for the process that does most.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from compress.checkpoint.opened import OpenModel
from compress.errors import ModelError
from compress.layers.linear import linears
from compress.models.structure.blocks import Block, has_two_stacks
from compress.passes.contract.counted_work import CountedWork
from compress.passes.contract.observers import Nothing
from compress.passes.contract.passes import LayerPass, Pass
from compress.pipeline.footprint import Footprint
from compress.pipeline.resolve import own_options
from compress.pipeline.timing import window_of, windows_of
from compress.roofline.trace import Product, trace
from compress.roofline.work import Work

CAPTURE, PROPAGATE, FILES = "capture", "propagate", "files"
"""Phases besides the passes: the inputs of the first block; further forward passes; reading and writing tensors."""


@dataclass(frozen=True)
class ReadTensor:
    """The linears of a block that read one tensor: of one module, with equal widths and no attention between them.

    width: channels. share: of the tokens that reach them; below 1 in an expert. shapes: (out, in) of each by name.
    """

    width: int
    share: float
    shapes: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class BlockWork:
    """A block and its forward pass.

    count: equal blocks that it stands for. sequence: the work of one sequence. shares: of the tokens that reach each
    linear, by full name. stages: the attentions before each linear.
    """

    block: Block
    count: int
    sequence: Work
    shares: Mapping[str, float]
    stages: Mapping[str, int]


@dataclass(frozen=True)
class Division:
    """How the work is divided. processes: equal ones. inputs_at_once: as of `Footprint`."""

    processes: int = 1
    inputs_at_once: int | None = None


@dataclass(frozen=True)
class Workload:
    """The work of one process, by phase. unknown: what takes time and is not counted, in words."""

    phases: Mapping[str, Work]
    unknown: tuple[str, ...] = ()


def block_works(opened: OpenModel, counts: Sequence[int], length: int, all_experts: bool = False) -> list[BlockWork]:
    """Count the forward pass of each block for one sequence.

    Args:
        opened: the model; no weights are read.
        counts: how many blocks each block stands for.
        length: tokens of the sequence.
        all_experts: whether every expert computes all tokens.

    Raises:
        ModelError: if the model does not run without data, or has two stacks of blocks.
    """
    if has_two_stacks(opened.model):
        raise ModelError("the model has two stacks of blocks")
    products = trace(_on_meta(opened.model), 1, length)[0].products
    works = []
    for block, count in zip(opened.blocks, counts, strict=True):
        inside = [product for product in products if product.module.startswith(f"{block.name}.")]
        sequence = Work(
            products=sum(product.operations for product in inside), elements=sum(product.moved for product in inside)
        )
        shares = dict.fromkeys((f"{block.name}.{inner}" for inner in linears(block.module)), 0.0)
        stages, attentions = dict.fromkeys(shares, 0), 0
        for product in inside:
            if product.module in shares:
                shares[product.module] += _tokens(product) / length
                stages[product.module] = attentions
            attentions += product.kind == "attention"
        if all_experts:
            further = sum(
                product.operations * (1 / shares[product.module] - 1)
                for product in inside
                if 0 < shares.get(product.module, 1) < 1
            )
            sequence += Work(products=further)
            shares = {name: 1.0 if share else 0.0 for name, share in shares.items()}
        works.append(BlockWork(block, count, sequence, shares, stages))
    return works


def _on_meta(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model without data."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in model.parameters()}
    copied = copy.deepcopy(model, empty)
    nn.Module.to(copied, "meta")  # its buffers, in place
    return copied


def _tokens(product: Product) -> float:
    """Return the tokens of the product of a linear."""
    return product.operations / (2 * product.rows * product.width) if product.rows else 0.0


def workload(
    footprint: Footprint, blocks: Sequence[BlockWork], stored_bytes: int, division: Division = Division()
) -> Workload:
    """Count the work of each pass of a recipe.

    Args:
        footprint: of the recipe, with all calibration sequences.
        blocks: of `block_works`.
        stored_bytes: tensors of the model and the checkpoint.
        division: of the work.
    """
    sequences = math.ceil(footprint.sequences / division.processes)
    phases: dict[str, Work] = {CAPTURE: Work(elements=2 * sequences * footprint.length * footprint.hidden, runs=1)}
    unknown: list[str] = []
    for label, step, names in footprint.steps:
        phases[label] = Work()
        if step.survey() is not None:
            unknown.append(f"the survey of {label}")
        if not isinstance(step, LayerPass) or any(_uncounted(step, name, footprint) for name in names):
            unknown.append(label)
            continue
        for block in blocks:
            inputs = list(inputs_of(block, names, footprint.shapes))
            if inputs:
                phases[label] += layer_work(step, inputs, block, sequences, footprint, division) * block.count
    last_step = footprint.steps[-1][1]
    if not (isinstance(last_step, LayerPass) and last_step.true_sequential):
        phases[PROPAGATE] = sum((block.sequence * (sequences * block.count) for block in blocks), Work())
    phases[FILES] = Work(stored=stored_bytes)
    return Workload(phases, tuple(dict.fromkeys(unknown)))


def _uncounted(step: LayerPass, name: str, footprint: Footprint) -> bool:
    """Return whether the work of a layer is not counted."""
    mine = own_options(step, name)
    return not isinstance(mine, CountedWork) or mine.work(footprint.shapes[name]) is None


def inputs_of(block: BlockWork, names: Sequence[str], shapes: Mapping[str, tuple[int, int]]) -> Iterator[ReadTensor]:
    """Yield the inputs of those linears of a block that a pass works on."""
    groups: dict[tuple[str, int, int], list[str]] = {}
    for name in names:
        if name in block.shares:
            key = name.rpartition(".")[0], shapes[name][1], block.stages[name]
            groups.setdefault(key, []).append(name)
    for (_, width, _), members in groups.items():
        yield ReadTensor(width, max(block.shares[name] for name in members), {name: shapes[name] for name in members})


def layer_work(
    step: LayerPass,
    inputs: Sequence[ReadTensor],
    block: BlockWork,
    sequences: int,
    footprint: Footprint,
    division: Division,
) -> Work:
    """Count the work of a layer pass in a block: its forward passes, its statistics and its solutions.

    Every process forms the factors of a Hessian. It solves its rows of a layer if the pass divides them, otherwise
    whole layers: of one input at a time, or of all inputs if they are calibrated on the original block.
    """
    tokens, groups = sequences * footprint.length, 1
    if not step.true_sequential and division.inputs_at_once is not None:
        groups = math.ceil(len(inputs) / division.inputs_at_once)
    work = block.sequence * (sequences * (groups + step.requires.reference))
    for item in inputs:
        work += step.observer.work(item.width, tokens * item.share)
        if step.observer is not Nothing and isinstance(step, CountedWork):
            work += step.shared_work(item.width)
    stages = [[item] for item in inputs] if step.true_sequential else [list(inputs)]
    for stage in stages:
        solved = [layer_solution(step, name, shape) for item in stage for name, shape in item.shapes.items()]
        work += _largest_part(solved, step.requires.by_rows, division.processes)
    return work


def layer_solution(step: Pass, name: str, shape: tuple[int, int]) -> Work:
    """Count the solution of one layer, and its installation."""
    mine = own_options(step, name)
    work = mine.work(shape) if isinstance(mine, CountedWork) else None
    assert work is not None, "uncounted passes are listed before"
    return work + Work(installs=shape[0] * shape[1], layers=1)


def _largest_part(solved: Sequence[Work], by_rows: bool, processes: int) -> Work:
    """Return the work of the process that does most: an equal part of all solutions, or the largest whole layer."""
    total = sum(solved, Work())
    if by_rows:
        return total * (1 / processes)
    weights = [work.installs for work in solved]
    return total * max(1 / processes, max(weights) / sum(weights))


def evaluation_work(
    footprint: Footprint, blocks: Sequence[BlockWork], division: Division
) -> tuple[Work | None, tuple[str, ...]]:
    """Count the forward passes of the original and the compressed model over all texts.

    Returns:
        (the work, None without texts; what is not counted, in words).
    """
    unknown: list[str] = []
    windows = math.ceil(windows_of(footprint.resolved, unknown) / division.processes)
    settings = footprint.recipe.eval
    if settings is not None and settings.tasks:
        unknown.append("the tasks of lm-eval")
    if not windows:
        return None, tuple(unknown)
    length = window_of(footprint.resolved)
    body = sum((block.sequence * (block.count * length / footprint.length) for block in blocks), Work())
    head = Work(
        products=2 * length * footprint.hidden * footprint.vocabulary, elements=4 * length * footprint.vocabulary
    )
    return (body + head) * (2 * windows), tuple(unknown)
