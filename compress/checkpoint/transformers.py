"""Let transformers load format `native`: its quantizer and its quantization config, for transformers' registries.

This module imports little, because it is imported together with transformers (`registration`); the code that builds
and fills layers is imported when a model is loaded.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "compress"
"""The quant_method of format `native`."""


class NativeConfig(QuantizationConfigMixin):
    """The `quantization_config` of format `native`, unchanged."""

    def __init__(self, **values: Any) -> None:
        self.quant_method = values.pop("quant_method", METHOD)
        self.version = values.pop("version", None)
        self.layers = values.pop("layers", {})
        for name, value in values.items():
            setattr(self, name, value)


class NativeQuantizer(HfQuantizer):
    """What `from_pretrained` and `save_pretrained` ask about a model of format `native`."""

    requires_calibration = True

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._filling: Any = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise ModelError for devices between which weights would have to move."""
        import_module("compress.checkpoint.filling").check_devices(device_map)

    def update_attn_implementation(self, config: Any) -> Any:
        """Remove the entry of config.json with which transformers stops where this class is not registered."""
        vars(config).pop(import_module("compress.checkpoint.formats.native").WEIGHTS, None)
        return config

    def preprocess_model(self, model: Any, dtype: Any = None, checkpoint_files: Any = None, **kwargs: Any) -> None:
        """Take the weights of compressed linears out of the model, so that transformers does not load them."""
        filling = import_module("compress.checkpoint.filling")
        files = [Path(path) for path in checkpoint_files or ()]
        self._filling = filling.Filling.of(model, self.quantization_config.to_dict(), files, dtype)
        super().preprocess_model(model, dtype=dtype, checkpoint_files=checkpoint_files, **kwargs)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self._filling.fill(model)
        self._filling = None
        return model

    def is_serializable(self) -> Any:  # transformers annotates none of the three
        """Whether `save_pretrained` may ask for the tensors."""
        return True

    def get_state_dict_and_metadata(self, model: Any) -> Any:
        """The tensors of format `native` for `save_pretrained`. Raises SaveError for layers that it cannot hold."""
        state, layers = import_module("compress.checkpoint.filling").native_state(model)
        model.config.quantization_config = NativeConfig(**{**self.quantization_config.to_dict(), "layers": layers})
        return state, {}

    @property
    def is_trainable(self) -> Any:
        """Whether transformers' trainer may train the model's parameters."""
        return False
