"""Generation with torch.compile and a static cache."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch._inductor import cpp_builder, exc
from transformers import CompileConfig, PreTrainedModel

from compress.errors import ModelError
from compress.kernels import dispatch
from compress.model.kinds import described
from compress.model.linear import CompressedLinear

SERIAL = 16384
"""Numbers that one thread computes in a compiled function before torch wakes another: one token has fewer than that."""


def compile_generation(model: PreTrainedModel) -> None:
    """Let `model.generate` decode with torch.compile and a static cache. The first call compiles, which takes minutes.

    Raises ModelError for a model that generates no text, and on a CPU without a C++ compiler.
    """
    if not model.can_generate():
        raise ModelError(f"compile=True: {described(model)} and generates no text; load it without")
    device = next(model.parameters()).device
    if device.type == "cpu":
        check_compiler()
    prepare(model)
    options = {"cpp.min_chunk_size": SERIAL} if device.type == "cpu" else None
    mode: Any = None if options else "default"  # torch takes one of them
    config: Any = CompileConfig(mode=mode, options=options)
    config._compile_all_devices = True  # without it, transformers compiles on accelerators alone
    run: Any = model.generate  # not in its generation config, whose copies lose the flag
    vars(model)["generate"] = partial(run, cache_implementation="static", compile_config=config)


def check_compiler() -> None:
    """Raise ModelError if torch finds no C++ compiler."""
    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise ModelError(
            "compile=True: torch.compile needs a C++ compiler, and found none; install g++ or clang, set CXX to its "
            "path, or load the model without compile=True"
        ) from error


def prepare(model: PreTrainedModel) -> None:
    """Convert weights to the layouts of their kernels now; the compiler does not trace the conversion."""
    like = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    for layer in model.modules():
        if isinstance(layer, CompressedLinear):
            x = like.new_zeros(1, layer.shape[1])
            for part in layer.all_parts:
                dispatch.prepare(part, x, layer.rounding)
            if layer.joint_call is not None:
                layer.traced = dispatch.traced(layer.all_parts[0], x, layer.rounding)
