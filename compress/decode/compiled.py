"""Fast generation with a static cache: recorded steps on the CPU, torch.compile elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch._inductor import cpp_builder, exc
from transformers import CompileConfig, PreTrainedModel

from compress.decode.generation import HOOKS, RecordedGeneration
from compress.decode.prepared import prepare
from compress.errors import ModelError
from compress.models.kinds.kinds import described
from compress.native.library import available

SERIAL = 16384
"""Numbers that one thread computes in a compiled function before torch wakes another: one token has fewer than that."""


@dataclass(frozen=True)
class Compiled:
    """A model's forward pass by torch.compile, which compiles when it is first called."""

    model: PreTrainedModel
    config: CompileConfig

    def __call__(self, **inputs: Any) -> Any:
        return type(self.model).get_compiled_call(self.model, self.config)(**inputs)


def record_generation(model: PreTrainedModel) -> None:
    """Let `model.generate` decode by recorded steps where this is possible; otherwise nothing changes.

    Call this again after weights were changed.
    """
    supported = getattr(model, "_can_compile_fullgraph", False) and model.can_generate()
    if supported and available() and next(model.parameters()).device.type == "cpu":
        RecordedGeneration(model).install()


def compile_generation(model: PreTrainedModel) -> None:
    """Let `model.generate` decode by recorded steps, or by torch.compile with a static cache.

    On a CPU with the C++ kernels, the first step of `generate` is recorded, and later ones run without Python. A step
    that cannot be recorded is compiled by torch.compile if there is a C++ compiler. On other devices and without the
    kernels all steps are; the first call then takes minutes. Call this again after weights were changed.

    Raises ModelError for a model that generates no text, and on a CPU with neither the kernels nor a C++ compiler.
    """
    if not model.can_generate():
        raise ModelError(f"compile=True: {described(model)} and generates no text; load it without")
    for name in (*HOOKS, "generate"):
        vars(model).pop(name, None)  # of an earlier call
    on_cpu = next(model.parameters()).device.type == "cpu"
    prepare(model)
    options = {"cpp.min_chunk_size": SERIAL} if on_cpu else None
    mode: Any = None if options else "default"  # torch takes one of them
    config: Any = CompileConfig(mode=mode, options=options)
    if on_cpu and available():
        compiled = Compiled(model, config) if has_compiler() else None
        if RecordedGeneration(model, compiled).install():
            return
    if on_cpu:
        check_compiler()
    config._compile_all_devices = True  # without it, transformers compiles on accelerators alone
    kind: Any = type(model)  # the flag is not in its generation config, whose copies lose it
    vars(model)["generate"] = partial(kind.generate, model, cache_implementation="static", compile_config=config)


def has_compiler() -> bool:
    """Whether torch finds a C++ compiler."""
    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return False
    return True


def check_compiler() -> None:
    """Raise ModelError if torch finds no C++ compiler."""
    if not has_compiler():
        raise ModelError(
            "compile=True: torch.compile needs a C++ compiler, and found none; install g++ or clang, set CXX to its "
            "path, or load the model without compile=True"
        )
