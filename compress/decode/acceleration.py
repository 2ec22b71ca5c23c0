"""Fast generation with a static cache: traced steps on the CPU, torch.compile elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch._inductor import cpp_builder, exc
from transformers import CompileConfig, PreTrainedModel

from compress.decode import prompts
from compress.decode.generation import HOOKS, TracedGeneration
from compress.decode.prepared import prepare
from compress.errors import ModelError
from compress.models.kinds.kinds import described
from compress.native.library import available

MIN_CHUNK_SIZE = 16384
"""Elements per thread of a compiled function. One token has fewer, so torch computes it on one thread."""


@dataclass(frozen=True)
class CompiledForward:
    """The forward pass of a model by torch.compile, which compiles at the first call.

    Attributes:
        model: the model.
        config: options of torch.compile.
    """

    model: PreTrainedModel
    config: CompileConfig

    def __call__(self, **inputs: Any) -> Any:
        return type(self.model).get_compiled_call(self.model, self.config)(**inputs)


def accelerate_generation(
    model: PreTrainedModel, compile: bool | None = None, has_packed_weights: bool = False
) -> None:
    """Accelerate the forward passes of `model.generate`, and of prompts of a packed model.

    Call this again after a change of weights.

    Args:
        model: a model that was loaded.
        compile: None for traced steps on the CPU if the model supports them; True for traced steps, or else
            torch.compile with a static cache; False for the decoding of transformers.
        has_packed_weights: whether the C++ library computes the attention of prompts; not combined with compile=True.

    Raises:
        ModelError: if `compile` is True for a model that generates no text, and on a CPU with neither the kernels nor a
            C++ compiler.
    """
    if has_packed_weights and not compile:
        prompts.install(model)
    if compile:
        compile_generation(model)
    elif compile is None:
        trace_generation(model)


def trace_generation(model: PreTrainedModel) -> None:
    """Make `model.generate` decode by traced steps if the model supports them; otherwise do nothing.

    Call this again after a change of weights.
    """
    supported = getattr(model, "_can_compile_fullgraph", False) and model.can_generate()
    if supported and available() and next(model.parameters()).device.type == "cpu":
        TracedGeneration(model).install()


def compile_generation(model: PreTrainedModel) -> None:
    """Make `model.generate` decode by traced steps, or by torch.compile with a static cache.

    On a CPU with the C++ kernels, the first step of `generate` is traced, and later steps run without Python. A step
    that cannot be traced is compiled by torch.compile if there is a C++ compiler. On other devices and without the
    kernels all steps are compiled; the first call then takes minutes. Call this again after a change of weights.

    Raises:
        ModelError: for a model that generates no text, and on a CPU with neither the kernels nor a C++ compiler.
    """
    if not model.can_generate():
        raise ModelError(f"compile=True: {described(model)} and generates no text; load it without")
    for name in (*HOOKS, "generate"):
        vars(model).pop(name, None)  # hooks of an earlier call
    on_cpu = next(model.parameters()).device.type == "cpu"
    prepare(model)
    options = {"cpp.min_chunk_size": MIN_CHUNK_SIZE} if on_cpu else None
    mode: Any = None if options else "default"  # torch accepts either a mode or options
    config: Any = CompileConfig(mode=mode, options=options)
    if on_cpu and available():
        compiled = CompiledForward(model, config) if has_compiler() else None
        if TracedGeneration(model, compiled).install():
            return
    if on_cpu:
        check_compiler()
    config._compile_all_devices = True  # otherwise transformers compiles on accelerators only
    model_class: Any = type(model)  # copies of the generation config would lose the flag
    vars(model)["generate"] = partial(model_class.generate, model, cache_implementation="static", compile_config=config)


def has_compiler() -> bool:
    """Return whether torch finds a C++ compiler."""
    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return False
    return True


def check_compiler() -> None:
    """Check that torch finds a C++ compiler.

    Raises:
        ModelError: if it finds none.
    """
    if not has_compiler():
        raise ModelError(
            "compile=True: torch.compile needs a C++ compiler, and found none; install g++ or clang, set CXX to its "
            "path, or load the model without compile=True"
        )
