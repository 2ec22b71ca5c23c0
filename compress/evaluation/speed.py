"""Speed: tokens per second of decoding and prefill, the bytes that a token reads, and their share of the bandwidth.

Several models are measured in turns in one run, so that another load of the machine meets all of them; the figures are
medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from time import perf_counter
from typing import Any, ClassVar

import psutil
import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from compress.checkpoint.load import load
from compress.checkpoint.sources.gguf_codes import checkpoint_of
from compress.errors import ModelError, reported_as
from compress.evaluation.base import EvaluationContext, Evaluator
from compress.kernels import dispatch
from compress.layers.linear import CompressedLinear
from compress.models.forward import device_of_model
from compress.models.kinds.contract import text_config
from compress.models.kinds.kinds import answers_prompts, described
from compress.native.library import instruction_set
from compress.results.measurements.speed import ModelSpeed, SpeedResult

BATCHES = 1, 8  # sequences decoded together: one user, and a small server
PROMPT, TOKENS, PREFILL = 16, 24, 512  # tokens of a prompt, decoded after it, and of the prompt whose time is measured
WARM_UP = 3  # first tokens that are not counted: kernels prepare weights, caches grow
ROUNDS = 3  # each model is measured so often, in turns with the others
READ_BYTES = 1 << 28  # of the tensor whose sum measures the bandwidth: larger than caches


class Clock(StoppingCriteria):
    """Records when each token is ready; it stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: tuple[Tensor] | None, **kwargs: Any) -> Any:
        self.times.append(perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def generate(model: PreTrainedModel, batch: int, prompt: int, tokens: int) -> list[float]:
    """Generate tokens for a batch of prompts, and measure the time of each.

    Args:
        model: Model to measure.
        batch: Number of prompts.
        prompt: Tokens of a prompt.
        tokens: Number of generated tokens.

    Returns:
        Seconds of each token; the first includes the prompt.
    """
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
    return [end - begin_of_token for begin_of_token, end in zip([begin, *clock.times], clock.times, strict=False)]


@contextmanager
def endless(model: PreTrainedModel) -> Iterator[None]:
    """Prevent that a token ends a text. `min_new_tokens` would search the vocabulary for the end in each step."""
    config = model.generation_config
    assert config is not None  # of a model that generates
    ends, config.eos_token_id = config.eos_token_id, None
    try:
        yield
    finally:
        config.eos_token_id = ends


def prompts(model: PreTrainedModel, batch: int, length: int) -> Int[Tensor, "batch length"]:
    """Draw random token ids, which are equal for models of one vocabulary."""
    size = text_config(model.config).vocab_size
    drawn = torch.randint(size, (batch, length), generator=torch.Generator().manual_seed(0))
    return drawn.to(device_of_model(model))


def read_bandwidth() -> float:
    """Measure the bytes per second that torch's threads read, by sums of a tensor larger than the caches."""
    data = torch.ones(READ_BYTES // 4)
    times = []
    for _ in range(8):
        begin = perf_counter()
        data.sum()
        times.append(perf_counter() - begin)
    return READ_BYTES / min(times)


def token_bytes(model: nn.Module) -> int:
    """Count the bytes of the weights that every decoded token reads: all tensors except embeddings.

    An embedding that is also the LM head is read as a whole. Of experts, all are counted.
    """
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    heads = {id(p) for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters(recurse=False)}
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.nbytes for key, tensor in tensors.items() if key not in tables - heads)


def kernels_of(model: nn.Module) -> dict[str, int]:
    """Count linears, compressed or dense, by the kernels that compute one token; 'torch' without a kernel."""
    counts: dict[str, int] = {}
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
        counts[name] = counts.get(name, 0) + 1
    return counts


def longest(model: PreTrainedModel) -> int:
    """Return the length of the prefill's prompt: 512 tokens, or fewer if the model has fewer positions."""
    return min(PREFILL, (getattr(text_config(model.config), "max_position_embeddings", None) or PREFILL + 1) - 1)


def check_generates(model: PreTrainedModel) -> None:
    """Check that a model decodes tokens.

    Raises:
        ModelError: if it does not.
    """
    if not answers_prompts(model):
        raise ModelError(f"model: {described(model)} and decodes no prompt; bench a model that generates text")


@torch.no_grad()
def measure(
    models: Mapping[str, PreTrainedModel],
    loaded: Mapping[str, tuple[float, int]],
    progress: Callable[[int, int], None] | None = None,
) -> SpeedResult:
    """Measure the speed of models in turns.

    Args:
        models: Models by name.
        loaded: Seconds and bytes of loading by name, if they were measured.
        progress: Is called with (number of finished measurements, number of measurements) after every one.
    """
    timed: dict[str, Callable[[PreTrainedModel], float]] = {
        f"{batch}": lambda model, batch=batch: batch / decode_seconds(model, batch) for batch in BATCHES
    }
    timed["prefill"] = lambda model: longest(model) / generate(model, 1, longest(model), 1)[0]
    rates_by_model: dict[str, dict[str, list[float]]] = {name: {key: [] for key in timed} for name in models}
    turns = list(product(timed.items(), range(ROUNDS + 1), models.items()))
    for count, ((key, rate), turn, (name, model)) in enumerate(turns, 1):
        value = rate(model)
        if turn > 0:  # the first warms up, and compiles
            rates_by_model[name][key].append(value)
        if progress is not None:
            progress(count, len(turns))
    bandwidth, result = read_bandwidth(), {}
    for name, model in models.items():
        rates = {key: statistics.median(values) for key, values in rates_by_model[name].items()}
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
    """Measure the median seconds of one decode step."""
    return statistics.median(generate(model, batch, PROMPT, TOKENS)[WARM_UP:])


def bench(
    source: str,
    against: str | None = None,
    dtype: str = "auto",
    compiled: bool = False,
    activations: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SpeedResult:
    """Load models and measure them in turns.

    Args:
        source: Checkpoint folder, hub id or .gguf file.
        against: Another model, which is the first of the result.
        dtype: Dtype of computation.
        compiled: Whether torch compiles the models.
        activations: As in `load`, for `source` alone.
        progress: As in `measure`.

    Raises:
        ModelError: for a model that decodes no tokens.
    """
    models: dict[str, PreTrainedModel] = {}
    loaded: dict[str, tuple[float, int]] = {}
    for name in dict.fromkeys(filter(None, (against, source))):
        begin, memory_before = perf_counter(), psutil.Process().memory_info().rss
        with reported_as("model" if name == source else "against", "model"):
            models[name], _ = load(
                checkpoint_of(name),
                dtype,
                compile=compiled or None,
                activations=activations if name == source else None,
            )
        seconds = perf_counter() - begin
        check_generates(models[name])
        generate(models[name], 1, PROMPT, 2)
        loaded[name] = seconds, psutil.Process().memory_info().rss - memory_before
    return measure(models, loaded, progress)


class Speed(Evaluator):
    """The speed of the checkpoint and of the base model, if the recipe requests it (`eval: {speed: true}`)."""

    timed: ClassVar[bool] = True

    def measure(self, model: PreTrainedModel, context: EvaluationContext) -> dict[str, Any] | None:
        """Load the base model next to the checkpoint, and measure both. None for a model that decodes no prompts."""
        if not context.settings.speed or not answers_prompts(model):
            return None
        models = {"compressed": model}
        if context.base is not None:
            base, _ = load(checkpoint_of(context.base), device=context.run.device)
            models = {"base": base, **models}
        progress = context.progress(f"speed of {context.model}")
        return measure(models, {}, progress).model_dump(mode="json")
