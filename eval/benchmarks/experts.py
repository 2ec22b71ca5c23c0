"""Train a small mixture of experts; quantize its experts with the tokens of the router and with all, and merge experts.

    python eval/benchmarks/experts.py [--steps 200] [--experts 8] [--sparsity 0.25 0.5] [--windows 64] [--sequences 16 64]

The mixture is that of `drop_experts.py`. Two tables, whose differences are paired over the sequences of the test text, with
their standard error:

- `gptq` of the experts in 3 and 4 bits, with `calibration: {experts: routed}` and `all`: KL divergence from the mixture.
- Merging instead of dropping: experts are clustered by their mean outputs on all tokens of the calibration text (average
  linkage, HC-SMoE, arXiv 2410.08589, section 3.2) and replaced by the mean of their cluster's weights, each with its number
  of tokens (M-SMoE, arXiv 2310.01334, section 3.2). With the rows of the router, a merged expert has the weights of all its
  members, but the model has as many experts as before. A stock model has the row of the member with the most tokens alone.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from drop_experts import BATCH, LENGTH, dropped, losses, prepared, report
from mixtures import PICO
from torch import Tensor, nn
from transformers import AutoTokenizer, MixtralForCausalLM

import compress
from compress import GPTQ, DropExperts
from compress.recipe.calibration import Calibration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps of 8 sequences of 128 tokens")
    parser.add_argument("--experts", type=int, default=8, help="experts of each block")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.25, 0.5], help="fractions to remove")
    parser.add_argument("--windows", type=int, default=64, help="sequences of the test text, and to merge and drop")
    parser.add_argument(
        "--sequences", type=int, nargs="*", default=[16, 64], help="calibration sequences of gptq; none: no gptq"
    )
    arguments = parser.parse_args()
    model, text, test = prepared(arguments.experts, arguments.steps, arguments.windows)
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    for count in arguments.sequences:
        for weights in ("int3", "int4"):
            of_experts = {}
            for experts in ("routed", "all"):
                calibration = Calibration(source="embedded", sequences=count, length=LENGTH, experts=experts)
                step = GPTQ(weights=weights, group_size=32, targets=["*.experts.*"])
                quantized = compress.apply(copy.deepcopy(model), [step], calibration, tokenizer=tokenizer)
                of_experts[experts] = divergences(model, quantized, test)
            routed, unrouted = of_experts["routed"], of_experts["all"]
            print(
                f"gptq {weights}, {count} sequences: KL routed {float(routed.mean()):.5f}, all {report(unrouted, routed)}"
            )
    before, calibration = losses(model, test), text[: arguments.windows]
    print(f"all {arguments.experts} experts: {float(before.mean()):.4f}")
    for sparsity in arguments.sparsity:
        kept = arguments.experts - round(sparsity * arguments.experts)
        reap = losses(dropped(model, DropExperts(sparsity=sparsity), calibration), test)
        print(f"{kept} left, dropped by reap: {report(reap, before)}")
        names = "rows of the router kept", "stock model"
        for name, variant in zip(names, merged(model, calibration, kept), strict=True):
            loss = losses(variant, test)
            print(f"{kept} left, merged, {name}: {report(loss, before)}; less dropped {report(loss, reap)}")


@torch.no_grad()
def divergences(model: nn.Module, variant: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean KL divergence of each sequence in nats."""
    values = []
    for part in ids.split(BATCH):
        expected, actual = (m(input_ids=part).logits.float().log_softmax(-1) for m in (model, variant))
        values.append((expected.exp() * (expected - actual)).sum(-1).mean(1))
    return torch.cat(values)


@torch.no_grad()
def merged(model: MixtralForCausalLM, ids: Tensor, kept: int) -> tuple[MixtralForCausalLM, MixtralForCausalLM]:
    """Return the model with so many different experts in each block, and the same as a stock model of so many experts."""
    model, config = copy.deepcopy(model), copy.deepcopy(model.config)
    config.num_local_experts = kept
    numbers = []
    for experts, means, counts in _measured(model, ids):
        groups = clusters(means, kept)
        for group in groups:
            weight = counts[group].clamp(min=1) / counts[group].clamp(min=1).sum()
            for parameter in (experts.gate_up_proj, experts.down_proj):
                parameter[group] = torch.einsum("e,eab->ab", weight, parameter[group])
        numbers.append(sorted(max(group, key=lambda number: float(counts[number])) for group in groups))
    stock = MixtralForCausalLM(config).eval().requires_grad_(False)
    for name, tensor in stock.state_dict().items():
        whole = model.state_dict()[name]
        tensor.copy_(whole if whole.shape == tensor.shape else whole[numbers[int(name.split(".")[2])]])
    return model, stock


def _measured(model: MixtralForCausalLM, ids: Tensor) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Yield the experts of each block, the mean output of each one on all tokens, and the tokens that are routed to it."""
    for layer in model.model.layers:
        experts, seen = layer.mlp.experts, []
        hook = experts.register_forward_pre_hook(lambda module, args, seen=seen: seen.append((args[0], args[1])))
        for part in ids.split(BATCH):
            model(input_ids=part)
        hook.remove()
        tokens, chosen = (torch.cat([call[place] for call in seen]) for place in (0, 1))
        every, whole = torch.arange(experts.gate_up_proj.shape[0]), torch.ones(len(tokens), 1)
        outputs = [experts(tokens, torch.full((len(tokens), 1), int(n)), whole).mean(0) for n in every]
        yield experts, torch.stack(outputs), (chosen.flatten()[:, None] == every).sum(0).float()


def clusters(points: Tensor, number: int) -> list[list[int]]:
    """Return so many clusters of points by average linkage: the two whose points are the nearest on average are one."""
    distances, groups = torch.cdist(points, points), [[i] for i in range(len(points))]
    while len(groups) > number:
        pairs = [(i, j) for i in range(len(groups)) for j in range(i)]
        i, j = min(pairs, key=lambda pair: _linkage(distances, groups[pair[0]], groups[pair[1]]))
        groups[j] += groups.pop(i)
    return groups


def _linkage(distances: Tensor, group: Sequence[int], neighbour: Sequence[int]) -> float:
    return float(distances[group][:, neighbour].mean())


if __name__ == "__main__":
    main()
