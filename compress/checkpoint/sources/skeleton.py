"""Build the model of a folder's configuration without weights."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.initialization import no_init_weights

from compress.checkpoint.sources.limits import limited
from compress.checkpoint.sources.untrusted import check_config, check_folder, read_json
from compress.errors import CannotRun, ModelError, call_foreign, one_line
from compress.models.computation import HALVES, mark_kept, mark_read
from compress.models.kinds.contract import own_classes
from compress.models.quiet import BUILDING
from compress.numerics.dtype_names import dtype_hint

TRUST = "set trust_remote_code: true to run it, if you trust its author"


def read_config(folder: Path, source: str, trust_remote_code: bool) -> PretrainedConfig:
    """Read the configuration of a model folder; source: the user's name of the model. Raises ModelError."""
    check_folder(folder)
    try:
        _check_entries(read_json(folder / "config.json"), source, trust_remote_code)
        return call_foreign(AutoConfig.from_pretrained, folder, trust_remote_code=trust_remote_code)
    except (ValueError, CannotRun) as error:
        raise ModelError(f"model: {source} has no readable config.json ({_reason(error)})") from error


def _check_entries(values: Mapping[str, Any], source: str, trust_remote_code: bool) -> None:
    """Check the entries of config.json, which transformers then reads from the file again.

    Raises:
        ModelError: for a model that needs its own code, which is not trusted.
        ValueError: for entries that `check_config` refuses, and a dtype that torch does not have.
    """
    check_config(values, trust_remote_code)
    nested = [value for value in values.values() if isinstance(value, dict) and "model_type" in value]
    for part in (values, *nested):
        for key in ("dtype", "torch_dtype"):
            name = part.get(key)
            if isinstance(name, str) and name != "auto" and not isinstance(getattr(torch, name, None), torch.dtype):
                raise ValueError(f"its {key} {name!r} is not known{dtype_hint(name)}")
    auto_map = values.get("auto_map")
    if not trust_remote_code and isinstance(auto_map, dict) and values.get("model_type") not in CONFIG_MAPPING:
        raise ModelError(f"model: {source} needs its own code ({auto_map.get('AutoConfig')}); {TRUST}")


def _reason(error: Exception) -> str:
    """Return the reason of an error in one line, without the name of its class."""
    return one_line(error.cause if isinstance(error, CannotRun) else error)


def class_of(folder: Path, config: PretrainedConfig, trust_remote_code: bool) -> Any:
    """Return the class that the configuration names, or a causal language model when it names none.

    Args:
        folder: of the model, with the files of its own code.
        config: configuration of the model.
        trust_remote_code: whether its own code is run, where the configuration names some (`auto_map`).

    Raises:
        ModelError: for a class that is not known, and code that cannot be run.
    """
    stated = getattr(config, "architectures", None)
    names = [name for name in stated if isinstance(name, str)] if isinstance(stated, list) else []
    references = own_classes(config)
    if trust_remote_code and references:
        stated_references = [name for name in references.values() if name.rpartition(".")[2] in names]
        reference = [*stated_references, *references.values()][0]
        try:
            return call_foreign(get_class_from_dynamic_module, reference, folder)
        except CannotRun as error:
            raise ModelError(f"model: its own code {reference} cannot be run ({_reason(error)})") from error
    for name in names:
        model_class = getattr(transformers, name, None)
        if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
            return model_class
    mapping = transformers.AutoModelForCausalLM._model_mapping
    if type(config) in mapping:
        return mapping[type(config)]
    raise ModelError(
        f"model: transformers {transformers.__version__} knows no class for model type {config.model_type!r}"
        + ("" if trust_remote_code else f"; {TRUST}")
    )


def empty_model(folder: Path, config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Build the configuration's model without weights, with the folder's generation config. Raises ModelError."""
    kind = class_of(folder, config, trust_remote_code)
    model = _built(kind, folder, config, dtype, without_data=True)
    if model is None or any(buffer.is_meta for buffer in model.buffers()):  # it computes with such tensors
        model = _built(kind, folder, config, dtype, without_data=False)
    assert model is not None
    model.tie_weights()
    # only in 16 bits do the tensors differ that the class creates in float32; a checkpoint may be stored so
    narrow = None if dtype in HALVES else _built(kind, folder, deepcopy(config), torch.bfloat16, without_data=True)
    mark_kept(model, narrow)
    mark_read(model)
    generation = folder / "generation_config.json"
    try:
        if generation.exists():
            read_json(generation)
            model.generation_config = call_foreign(GenerationConfig.from_pretrained, folder)
    except (ValueError, CannotRun) as error:
        raise ModelError(
            f"model: {generation} cannot be read ({_reason(error)}); correct the file, or fetch it again"
        ) from error
    return model


def _built(
    kind: type[PreTrainedModel], folder: Path, config: PretrainedConfig, dtype: torch.dtype, without_data: bool
) -> PreTrainedModel | None:
    """Build a model with parameters on the meta device; None: it needs the data of `torch.empty`.

    Args:
        without_data: as of `limited`.
    """
    # no_init_weights skips random initialization: 5 ms per linear
    with BUILDING, init_empty_weights(), no_init_weights(), limited(folder, without_data):
        try:
            return call_foreign(kind._from_config, config, dtype=dtype)
        except CannotRun as error:
            if without_data and isinstance(error.cause, RuntimeError):
                return None
            raise ModelError(
                f"model: transformers {transformers.__version__} cannot build {kind.__name__} from "
                f"{folder}/config.json ({type(error.cause).__name__}: {error.cause}); correct the file, or fetch it "
                "again"
            ) from error
