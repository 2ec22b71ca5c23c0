"""Register format `native` with transformers, without importing transformers.

`register` either registers at once, if transformers' registries are imported already, or puts a finder first on
`sys.meta_path` that registers as soon as something imports them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

REGISTRIES = "transformers.quantizers.auto"
"""The module with transformers' registries of quantizers."""


def register() -> None:
    """Let `from_pretrained` load format `native`, now or as soon as transformers is imported."""
    if REGISTRIES in sys.modules:
        _enter(sys.modules[REGISTRIES])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # not a subclass of importlib.abc, which takes 15 ms to import


def _enter(registries: ModuleType) -> None:
    """Add quantizer and config to the registries, once; a registry without the functions is left alone."""
    native: Any = import_module("compress.checkpoint.transformers")
    quantizers = getattr(registries, "AUTO_QUANTIZER_MAPPING", None)
    if quantizers is not None and native.METHOD not in quantizers:
        registries.register_quantization_config(native.METHOD)(native.NativeConfig)
        registries.register_quantizer(native.METHOD)(native.NativeQuantizer)


class _Finder:
    """Finds `REGISTRIES` as python does, and wraps its loader."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return the spec of `REGISTRIES`; None for other modules."""
        if fullname != REGISTRIES:
            return None
        spec: ModuleSpec | None = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = _Loader(spec.loader)
            spec.loader = loader
        return spec


class _Loader:
    """Executes a module as its own loader does, and registers then."""

    def __init__(self, loader: Any) -> None:
        self._own = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader."""
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then register."""
        self._own.exec_module(module)
        _enter(module)

    def __getattr__(self, name: str) -> Any:
        """Everything else is asked of the module's own loader, such as its source."""
        return getattr(self._own, name)
