"""Train a small mixture of experts, drop some of its experts by each score and at random, and compare the losses.

    python eval/benchmarks/drop_experts.py [--steps 200] [--experts 8] [--sparsity 0.25] [--seeds 5] [--windows 64]

The mixture has the weights of tests/pico/model with noise in each expert, and is trained on the calibration part of the
embedded text. Prints the loss on its test part before and after, and the difference with its standard error over windows.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from mixtures import PICO, upcycled
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralForCausalLM

import compress
from compress import DropExperts
from compress.data.ids import token_ids
from compress.passes.reshape import drop_experts

LENGTH, BATCH, RATE = 128, 8, 3e-4
TEXT = 860  # sequences of the embedded text
SCORES = ("reap", "frequency", "activation")
BALANCE = 0.02  # weight of the loss that spreads tokens over experts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps of 8 sequences of 128 tokens")
    parser.add_argument("--experts", type=int, default=8, help="experts of each block")
    parser.add_argument("--sparsity", type=float, default=0.25, help="fraction of the experts to drop")
    parser.add_argument("--seeds", type=int, default=5, help="random choices")
    parser.add_argument(
        "--windows", type=int, default=64, help="sequences of the test text, and of the calibration text"
    )
    arguments = parser.parse_args()
    model, text, test = prepared(arguments.experts, arguments.steps, arguments.windows)
    before = losses(model, test)
    print(f"all {arguments.experts} experts: {float(before.mean()):.4f}")
    step = DropExperts(sparsity=arguments.sparsity)
    calibration = text[: arguments.windows]
    for by in SCORES:
        after = losses(dropped(model, step.model_copy(update={"by": by}), calibration), test)
        print(f"by {by}: {report(after, before)}")
    random = [losses(at_random(model, step, calibration, seed), test) for seed in range(arguments.seeds)]
    for seed, after in enumerate(random):
        print(f"at random, seed {seed}: {report(after, before)}")
    print(f"at random, mean: {report(torch.stack(random).mean(0), before)}")


def prepared(experts: int, steps: int, windows: int) -> tuple[MixtralForCausalLM, torch.Tensor, torch.Tensor]:
    """The mixture, its training text, and sequences of the test text, on one thread."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    test = token_ids("embedded", "test", tokenizer, windows, LENGTH, seed=0)
    text = token_ids("embedded", "calibration", tokenizer, TEXT, LENGTH, seed=0)
    return trained(text, experts, steps), text, test


def trained(text: torch.Tensor, experts: int, steps: int) -> MixtralForCausalLM:
    """The mixture after some steps of Adam."""
    model = upcycled(AutoModelForCausalLM.from_pretrained(PICO), experts).train().requires_grad_(True)
    model.config.output_router_logits, model.router_aux_loss_coef = True, BALANCE
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=max(2, steps + 1))
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = text[torch.randint(len(text), (BATCH,), generator=draw)]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.config.output_router_logits = False
    return model.eval().requires_grad_(False)


def dropped(model: MixtralForCausalLM, step: DropExperts, calibration: torch.Tensor) -> MixtralForCausalLM:
    """The model without some experts."""
    return compress.apply(copy.deepcopy(model), [step], calibration)


def at_random(model: MixtralForCausalLM, step: DropExperts, calibration: torch.Tensor, seed: int) -> MixtralForCausalLM:
    """The model without experts that are drawn."""
    draw, scores = torch.Generator().manual_seed(seed), drop_experts.RoutedOutputs.scores
    drop_experts.RoutedOutputs.scores = lambda sums, by: torch.rand(len(sums.tokens), generator=draw).double()
    try:
        return dropped(model, step, calibration)
    finally:
        drop_experts.RoutedOutputs.scores = scores


@torch.no_grad()
def losses(model: MixtralForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """The mean loss of each sequence in nats."""
    logits = torch.cat([model(input_ids=part).logits for part in ids.split(BATCH)])
    return torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def report(after: torch.Tensor, before: torch.Tensor) -> str:
    """The loss, and its difference with the standard error over sequences."""
    difference = after - before
    error = float(difference.std() / len(difference) ** 0.5)
    return f"{float(after.mean()):.4f}, {float(difference.mean()):+.4f} ± {error:.4f}"


if __name__ == "__main__":
    main()
