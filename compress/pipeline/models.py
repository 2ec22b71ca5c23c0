"""The models that an evaluation measures: folders, hub ids and files, which it loads, and models in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import TypeIs

from compress.checkpoint.load import dtype_to_compare, load
from compress.checkpoint.sources.files import answers_digest_of, fingerprint_of, pooling_in, read_sentence_files
from compress.checkpoint.sources.gguf_codes import checkpoint_of
from compress.checkpoint.sources.untrusted import check_complete, check_no_adapter
from compress.checkpoint.sources.weight_files import weight_files
from compress.errors import ModelError, RecipeError, reported_as
from compress.layers.linear import CompressedLinear
from compress.models.caches.attentions import cache_digests
from compress.models.terms import Pooling
from compress.numerics.dtypes import bytes_of

LoadedModel: TypeAlias = tuple[PreTrainedModel, PreTrainedTokenizerBase | None]
"""A model in memory with its tokenizer, as `compress.load` returns them."""

Model: TypeAlias = str | Path | LoadedModel
"""A checkpoint folder, a hub id, a .gguf file, or a model in memory with its tokenizer."""


@dataclass(frozen=True)
class StoredModel:
    """A model of a folder, the hub or a .gguf file.

    Attributes:
        name: Its name in results and messages.
        folder: The local folder of its files.
    """

    name: str
    folder: Path

    @classmethod
    def of(cls, source: str) -> StoredModel:
        """Find the files of a model.

        Raises:
            ModelError: for a folder without a model, and that of an unfinished run.
        """
        return cls(source, model_folder(source))

    @property
    def answers_digest(self) -> str:
        """A digest of all that its answers depend on."""
        paths = weight_files(self.folder)
        return answers_digest_of(self.folder, fingerprint_of(self.folder, paths), paths)

    @property
    def size_bytes(self) -> int:
        """The bytes of its weights."""
        return sum(path.stat().st_size for path in weight_files(self.folder))

    @property
    def pooling(self) -> Pooling:
        """How it makes embeddings."""
        return pooling_in(read_sentence_files(self.folder)[0])

    @contextmanager
    def opened(self, dtype: str, device: torch.device) -> Iterator[LoadedModel]:
        """Load the model with its tokenizer.

        Raises:
            ModelError: if it cannot be loaded.
        """
        yield load(self.folder, dtype_to_compare(self.folder, dtype, device), device)


@dataclass(frozen=True, eq=False)
class ModelInMemory:
    """A model in memory with its tokenizer; it is measured as it is, in its own dtype and on its own device.

    Attributes:
        name: Its name in results and messages.
        folder: A model in memory has none.
    """

    folder: ClassVar[None] = None

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def answers_digest(self) -> str:
        """A digest of its configuration, weights and tokenizer."""
        digest = hashlib.sha256(self.model.config.to_json_string(use_diff=False).encode())
        for name, layer in self._compressed().items():
            digest.update(f"{name} {layer.sha256()}".encode())
        for name, tensor in self._dense().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(bytes_of(tensor.cpu()).numpy().data)
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        words = None if tokenizer is None else tokenizer.get_vocab() if backend is None else backend.to_str()
        template = None if tokenizer is None else tokenizer.chat_template
        generation = None if self.model.generation_config is None else self.model.generation_config.to_json_string()
        digest.update(repr((cache_digests(self.model), words, template, generation)).encode())
        return digest.hexdigest()

    @property
    def size_bytes(self) -> int:
        """The bytes of its weights."""
        storage = self.model.dtype
        packed = sum(layer.scheme.size_bytes(storage) for layer in self._compressed().values())
        return packed + sum(tensor.nbytes for tensor in self._dense().values())

    @property
    def pooling(self) -> Pooling:
        """How it makes embeddings."""
        return pooling_in({})

    @contextmanager
    def opened(self, dtype: str, device: torch.device) -> Iterator[LoadedModel]:
        """Provide the model with its tokenizer in evaluation mode; `dtype` and `device` are those of loaded models."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            yield self.model, self.tokenizer
        finally:
            for module in training:
                module.training = True

    def _compressed(self) -> dict[str, CompressedLinear]:
        """Return the compressed layers; a layer with several names has the first of them."""
        return {name: module for name, module in self.model.named_modules() if isinstance(module, CompressedLinear)}

    def _dense(self) -> dict[str, Tensor]:
        """Return all other tensors; a tied one has the first of its names."""
        inside = tuple(f"{name}." for name in self._compressed())
        name_by_tensor: dict[int, str] = {}
        tensors = self.model.state_dict(keep_vars=True)
        for name, tensor in tensors.items():
            if not name.startswith(inside):
                name_by_tensor.setdefault(id(tensor), name)
        return {name: tensors[name] for name in name_by_tensor.values()}


EvaluatedModel: TypeAlias = StoredModel | ModelInMemory


def evaluated_models(models: Sequence[Model], base: Model | None) -> list[EvaluatedModel]:
    """Return the models to measure, each once: the base, if there is one, and then the others in their order.

    Raises:
        ModelError: for a folder without a model, and a model in memory that is not a pair with its tokenizer.
    """
    sources: dict[str | int, EvaluatedModel] = {}
    for model in (*(() if base is None else (base,)), *models):
        with reported_as("model" if model in models else "base", "model"):
            if (key := key_of(model)) not in sources:
                count = sum(isinstance(source, ModelInMemory) for source in sources.values())
                sources[key] = evaluated(model, f" {count + 1}" if count else "")
    return list(sources.values())


def evaluated(model: Model, suffix: str = "") -> EvaluatedModel:
    """Return one model to measure.

    Args:
        model: Folder, hub id or file, or a model in memory with its tokenizer.
        suffix: End of the name of a model in memory.

    Raises:
        ModelError: for a folder without a model, and values of other classes.
    """
    if is_loaded(model):
        return ModelInMemory(f"{model[0].name_or_path or type(model[0]).__name__} in memory{suffix}", *model)
    if isinstance(model, str | Path):
        return StoredModel.of(str(model))
    raise _other_class(model)


def _other_class(value: object) -> ModelError:
    return ModelError(
        f"model: is of class {type(value).__name__}; write a folder, a hub id, a .gguf file, or the pair "
        "(model, tokenizer) that compress.load returns"
    )


def models_in(models: Model | Sequence[Model]) -> Sequence[Model]:
    """Return one model or several as a sequence.

    Raises:
        RecipeError: if there is none.
        ModelError: for a value of another class, such as a model without its tokenizer.
    """
    if isinstance(models, str | Path) or is_loaded(models):
        return [models]
    if not isinstance(models, Sequence):
        raise _other_class(models)
    if not models:
        raise RecipeError("models: name at least one: a checkpoint folder, a hub id or a .gguf file")
    return models


def key_of(model: Model) -> str | int:
    """Return a value that is equal for equal sources."""
    return id(model[0]) if is_loaded(model) else str(model)


def is_loaded(model: object) -> TypeIs[LoadedModel]:
    """Return whether a value is a model in memory with its tokenizer."""
    return isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], PreTrainedModel)


def model_folder(source: str) -> Path:
    """Return the local folder of a model.

    Raises:
        ModelError: for a folder without a model, and that of an unfinished run.
    """
    folder = checkpoint_of(source)
    check_complete(folder)
    check_no_adapter(folder)
    if not (folder / "config.json").is_file():
        raise ModelError(f"model: {source} holds no config.json; write the folder of a model, a hub id or a .gguf file")
    return folder
