"""Speed: tokens per second of decoding and prefill, the bytes that a token reads, and their share of the bandwidth.

Several models are measured in turns in one run, so that another load of the machine meets all of them; the figures are
medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any, ClassVar

import psutil
import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from compress.checkpoint.sources.gguf_codes import checkpoint_of
from compress.checkpoint.sources.load import load
from compress.errors import ModelError
from compress.evaluate.base import EvaluationContext, Evaluator, Record, SummaryRow
from compress.kernels import dispatch
from compress.layers.linear import CompressedLinear
from compress.models.kinds.kinds import answers_prompts, described
from compress.models.kinds.objective import text_config
from compress.native.library import instruction_set

BATCHES = 1, 8  # sequences decoded together: one user, and a small server
PROMPT, TOKENS, PREFILL = 16, 24, 512  # tokens of a prompt, decoded after it, and of the prompt whose time is measured
WARM_UP = 3  # first tokens that are not counted: kernels prepare weights, caches grow
ROUNDS = 3  # each model is measured so often, in turns with the others
READ_BYTES = 1 << 28  # of the tensor whose sum measures the bandwidth: larger than caches


class ModelSpeed(Record):
    """The speed of one model.

    load_seconds: None if it was loaded before. resident_bytes: growth of the resident memory by loading it and decoding
    a few tokens, None if it was loaded before. decode: tokens per second by number of sequences. prefill: tokens per
    second of a prompt of 512 tokens. token_bytes: weights that a decoded token reads (of experts, all).
    bandwidth_share: token_bytes times tokens per second of one sequence, relative to the measured read bandwidth.
    kernels: number of linears by the kernel that computes them, 'torch' without one. dtype: of the computation.
    """

    load_seconds: float | None
    resident_bytes: int | None
    decode: dict[int, float]
    prefill: float
    token_bytes: int
    bandwidth_share: float
    kernels: dict[str, int]
    dtype: str


class SpeedResult(Record):
    """The speed of each model by name, and the machine: instruction set of the kernels, threads, bytes per second."""

    models: dict[str, ModelSpeed]
    instruction_set: str
    threads: int
    read_bandwidth: float


class Clock(StoppingCriteria):
    """Records when each token is ready; it stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        self.times.append(perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def generate(model: PreTrainedModel, batch: int, prompt: int, tokens: int) -> list[float]:
    """Generate exactly `tokens` tokens for a batch of prompts; the seconds of each. The first includes the prompt."""
    ids = prompts(model, batch, prompt)
    clock, run = Clock(), getattr(model, "generate")  # noqa: B009  not every class of models declares it
    with endless(model):
        begin = perf_counter()
        run(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    return [after - before for before, after in zip([begin, *clock.times], clock.times, strict=False)]


@contextmanager
def endless(model: PreTrainedModel) -> Iterator[None]:
    """No token ends a text. `min_new_tokens` would search the vocabulary for the end in each step."""
    config = model.generation_config
    assert config is not None  # of a model that generates
    ends, config.eos_token_id = config.eos_token_id, None
    try:
        yield
    finally:
        config.eos_token_id = ends


def prompts(model: PreTrainedModel, batch: int, length: int) -> Int[Tensor, "batch length"]:
    """Random token ids; equal for models of one vocabulary."""
    size = text_config(model.config).vocab_size
    drawn = torch.randint(size, (batch, length), generator=torch.Generator().manual_seed(0))
    return drawn.to(next(model.parameters()).device)


def read_bandwidth() -> float:
    """Bytes per second that torch's threads read: the best time of the sum of a tensor larger than the caches."""
    data = torch.ones(READ_BYTES // 4)
    times = []
    for _ in range(8):
        begin = perf_counter()
        data.sum()
        times.append(perf_counter() - begin)
    return READ_BYTES / min(times)


def token_bytes(model: nn.Module) -> int:
    """Bytes of the weights that every decoded token reads: all tensors except tables of embeddings.

    A table that is also the head is read as a whole. Of experts, all are counted.
    """
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    heads = {id(p) for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters(recurse=False)}
    found = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.nbytes for key, tensor in found.items() if key not in tables - heads)


def kernels_of(model: nn.Module) -> dict[str, int]:
    """The number of linears, compressed or dense, by the kernels that compute one token; 'torch' without a kernel."""
    found: dict[str, int] = {}
    like = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    for module in model.modules():
        if isinstance(module, CompressedLinear):
            x = like.new_zeros(1, module.shape[1])
            names = [dispatch.kernel_name(part, x, module.rounding) for part in module.all_parts]
            name = " + ".join(dict.fromkeys(names))
        elif isinstance(module, nn.Linear):
            name = dispatch.TORCH
        else:
            continue
        found[name] = found.get(name, 0) + 1
    return found


def longest(model: PreTrainedModel) -> int:
    """The prompt of the prefill: 512 tokens, or fewer if the model has fewer positions."""
    return min(PREFILL, (getattr(text_config(model.config), "max_position_embeddings", None) or PREFILL + 1) - 1)


def check_generates(model: PreTrainedModel) -> None:
    """Raise ModelError for a model that decodes no tokens."""
    if not answers_prompts(model):
        raise ModelError(f"model: {described(model)} and decodes no prompt; bench a model that generates text")


@torch.no_grad()
def measure(models: Mapping[str, PreTrainedModel], loaded: Mapping[str, tuple[float, int]]) -> SpeedResult:
    """The speed of models by name, measured in turns. loaded: seconds and bytes of loading, if they were measured."""
    timed: dict[str, Callable[[PreTrainedModel], float]] = {
        f"{batch}": lambda model, batch=batch: batch / decode_seconds(model, batch) for batch in BATCHES
    }
    timed["prefill"] = lambda model: longest(model) / generate(model, 1, longest(model), 1)[0]
    found: dict[str, dict[str, list[float]]] = {name: {key: [] for key in timed} for name in models}
    for key, rate in timed.items():
        for turn in range(ROUNDS + 1):
            for name, model in models.items():
                value = rate(model)
                if turn > 0:  # the first warms up, and compiles
                    found[name][key].append(value)
    bandwidth, result = read_bandwidth(), {}
    for name, model in models.items():
        rates = {key: statistics.median(values) for key, values in found[name].items()}
        size, (seconds, resident) = token_bytes(model), loaded.get(name, (None, None))
        result[name] = ModelSpeed(
            load_seconds=seconds,
            resident_bytes=resident,
            decode={batch: rates[f"{batch}"] for batch in BATCHES},
            prefill=rates["prefill"],
            token_bytes=size,
            bandwidth_share=size * rates[f"{BATCHES[0]}"] / bandwidth,
            kernels=kernels_of(model),
            dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        )
    return SpeedResult(
        models=result, instruction_set=instruction_set(), threads=torch.get_num_threads(), read_bandwidth=bandwidth
    )


def decode_seconds(model: PreTrainedModel, batch: int) -> float:
    """Median seconds of one decoding step."""
    return statistics.median(generate(model, batch, PROMPT, TOKENS)[WARM_UP:])


def bench(
    source: str, against: str | None = None, dtype: str = "auto", compiled: bool = False, activations: str | None = None
) -> SpeedResult:
    """Load models, by checkpoint folder, hub id or .gguf file, and measure them in turns. The base is named first.

    activations: as in `load`, for `source` alone. Raises ModelError.
    """
    models: dict[str, PreTrainedModel] = {}
    loaded: dict[str, tuple[float, int]] = {}
    for name in dict.fromkeys(filter(None, (against, source))):
        begin, before = perf_counter(), psutil.Process().memory_info().rss
        models[name], _ = load(
            checkpoint_of(name), dtype, compile=compiled or None, activations=activations if name == source else None
        )
        seconds = perf_counter() - begin
        check_generates(models[name])
        generate(models[name], 1, PROMPT, 2)
        loaded[name] = seconds, psutil.Process().memory_info().rss - before
    return measure(models, loaded)


class Speed(Evaluator):
    """The speed of the checkpoint and of the base model, if the recipe asks for it (`eval: {speed: true}`)."""

    timed: ClassVar[bool] = True
    result_type: ClassVar[Any] = SpeedResult

    def measure(self, model: PreTrainedModel, context: EvaluationContext) -> dict[str, Any] | None:
        """The base is loaded whole, next to the checkpoint. None for a model that decodes no prompts."""
        if not context.settings.speed or not answers_prompts(model):
            return None
        models = {"compressed": model}
        if context.base is not None:
            base, _ = load(checkpoint_of(context.base), device=context.run.device)
            models = {"base": base, **models}
        return measure(models, {}).model_dump(mode="json")

    def summary(self, result: SpeedResult) -> list[SummaryRow]:
        return comparison(result)


def comparison(result: SpeedResult) -> list[SummaryRow]:
    """A row for each figure: its name, the value of the first model, that of the last, and their ratio."""
    first, *_, last = [*result.models.values()] * 2
    rates = [(f"decode tokens/s, batch {batch}", one, last.decode[batch]) for batch, one in first.decode.items()]
    rates.append(("prefill tokens/s", first.prefill, last.prefill))
    rows = [(name, f"{one:.1f}", f"{other:.1f}", f"{other / one:.2f}x") for name, one, other in rates]
    read = first.token_bytes / 1e6, last.token_bytes / 1e6
    rows.append(("MB read per token", f"{read[0]:.1f}", f"{read[1]:.1f}", f"{read[0] / read[1]:.2f}x smaller"))
    return rows


def table(result: SpeedResult) -> list[tuple[str, ...]]:
    """A row for each figure, with a column for each model."""
    models = list(result.models.values())
    loaded = [
        ("-", "-")
        if m.load_seconds is None or m.resident_bytes is None
        else (f"{m.load_seconds:.2f}", f"{m.resident_bytes / 1e6:.0f}")
        for m in models
    ]
    rows = [("load, seconds", *(seconds for seconds, _ in loaded)), ("resident MB", *(size for _, size in loaded))]
    rows += [
        (f"decode tokens/s, batch {batch}", *(f"{m.decode[batch]:.1f}" for m in models)) for batch in models[0].decode
    ]
    rows.append(("prefill tokens/s", *(f"{m.prefill:.0f}" for m in models)))
    rows.append(("MB read per token", *(f"{m.token_bytes / 1e6:.1f}" for m in models)))
    rows.append(("share of the bandwidth", *(f"{m.bandwidth_share:.0%}" for m in models)))
    kernels = [", ".join(f"{count} {name}" for name, count in m.kernels.items()) for m in models]
    return [*rows, ("linears by kernel", *kernels), ("computed in", *(m.dtype for m in models))]
