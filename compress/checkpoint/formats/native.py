"""The format `native`: the tensors of all parts and transforms of a layer, under the names of their schemes.

    <m>.weight_<name>      the first part: weight_packed, weight_scale, weight_scale_shared, weight_zero_point and
                           weight_g_idx of codes (`layers.parts.codes`); weight_kept with weight_values or the tensors
                           of codes, of packed sparse weights (`layers.parts.sparse`); weight of a dense part
    <m>.<kind>_<name>      further parts, such as low_rank_a; the second one of the same kind is <kind>_2_<name>
    <m>.input_<name>       transforms: input_permutation, input_channel_scale; input_scale, input_outliers,
                           input_zero_point, input_g_idx of rounding
    config.json: quantization_config = {quant_method: compress, version, layers: {name: scheme}}, where a scheme is
                 {shape: [O, I], parts: [{kind, ...}], transforms: [{kind, ...}]}; fields that equal their default, and
                 an empty list of transforms, are omitted

Shapes and dtypes of all tensors follow from the schemes (`weights`, one file per kind). A pruned layer may be
smaller with its zeros in place: positions of kept weights cost more than they save if few weights of few bits were
pruned. Such a layer is stored with its zeros and without its mask, unless the recipe says `sparse: always`.

`compress.load` reads this format, as does transformers after `import compress`; no other program does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from compress.checkpoint.formats import OWN_METHOD
from compress.checkpoint.formats.base import LAYERS_KEYS, Format, layers_config, layers_of
from compress.layers.base import InputTransform, TensorSpec, WeightPart
from compress.layers.scheme import LayerScheme, layer_tensors

WEIGHTS = "transformers_weights"
"""The entry of config.json in which transformers looks for the name of the file of weights.

Without `import compress`, transformers would skip the `quantization_config` and fill the layers with random numbers.
It stops with the text of this entry instead, which is not the name of a file (`_get_resolved_checkpoint_files`).
"""


class Native(Format):
    """The `native` format."""

    name = "native"
    negative_scales = True
    quant_method = OWN_METHOD
    sparse = True
    keys = LAYERS_KEYS

    @property
    def unverified(self) -> str | None:
        return "format native is read by compress.load only"

    def refuses(self, scheme: LayerScheme) -> str | None:
        return None

    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        return scheme.tensors()

    def encode(
        self, scheme: LayerScheme, parts: Sequence[WeightPart], transforms: Sequence[InputTransform]
    ) -> dict[str, Tensor]:
        return layer_tensors(parts, transforms, scheme.prefixes)

    def decode(
        self, tensors: Mapping[str, Tensor], scheme: LayerScheme
    ) -> tuple[Sequence[WeightPart], Sequence[InputTransform]]:
        return scheme.components(tensors)

    def config(self, schemes: Mapping[str, LayerScheme], ignore: list[str], version: str) -> dict[str, Any] | None:
        return layers_config(self.quant_method, schemes, version)

    def entries(self, quantization: Mapping[str, Any] | None, config: PretrainedConfig) -> dict[str, Any]:
        return {} if quantization is None else {WEIGHTS: "it is in format native of compress; write: import compress"}

    def schemes(
        self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]], stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, LayerScheme]:
        return layers_of(config)
