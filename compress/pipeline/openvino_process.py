"""What runs in the processes of an OpenVINO export: optimum-intel, and the runtime of OpenVINO."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.pipeline.runtime_files import CODES, SOURCE

FILE = "openvino_model.xml"
OPERATIONS = "openvino.opset13"
LOW = 15
"""The bits of the low half of a byte."""


def build(place: Path, out: Path) -> None:
    """Convert a dense model, and put codes in the place of weights.

    Args:
        place: Folder of the dequantized model, `SOURCE`, and of `CODES`.
        out: Folder of the result.

    Raises:
        LookupError: For a layer that the converted model does not have.
    """
    ov: Any = import_module("openvino")  # optional dependencies, all of them
    exporter: Any = import_module("optimum.exporters.openvino")
    intel: Any = import_module("optimum.intel")
    with safe_open(place / CODES, "pt") as file:
        is_half = file.metadata()["dtype"] == "float16"
    exporter.main_export(
        model_name_or_path=str(place / SOURCE),
        output=out,
        task="text-generation-with-past",
        local_files_only=True,
        ov_config=intel.OVConfig(dtype="fp32"),
    )
    model = ov.Core().read_model(out / FILE)
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(place / CODES).items():
        layer, _, kind = name.rpartition(".")
        layers.setdefault(layer, {})[kind] = tensor
    packed = _put(model, layers)
    part = out / "part.xml"
    ov.save_model(model, part, compress_to_fp16=is_half)
    del model, packed
    for suffix in (".xml", ".bin"):
        part.with_suffix(suffix).replace((out / FILE).with_suffix(suffix))


def _put(model: Any, layers: dict[str, dict[str, Tensor]]) -> list[Any]:
    """Put codes in the place of the weights of layers; returns arrays that constants refer to."""
    weights = {
        node.get_friendly_name().removeprefix("self.").removesuffix(".weight"): node
        for node in model.get_ops()
        if node.get_type_name() == "Constant" and node.get_friendly_name().endswith(".weight")
    }
    missing = sorted(set(layers) - set(weights))
    if missing:
        raise LookupError(f"the converted model has no weight of {missing[0]}, whose codes were to be put there")
    packed: list[Any] = []
    for name, tensors in layers.items():
        node = weights[name]
        new = _dequantized(tensors, list(node.get_output_shape(0)), packed)
        new.set_friendly_name(node.get_friendly_name())
        for target in list(node.output(0).get_target_inputs()):
            target.replace_source_output(new.output(0))
    model.validate_nodes_and_infer_types()
    return packed


def _dequantized(tensors: dict[str, Tensor], shape: list[int], packed: list[Any]) -> Any:
    """Return the nodes (codes - zeros) * scales of a weight, in the order that the CPU plugin recognizes."""
    ops: Any = import_module(OPERATIONS)
    bits, is_signed = int(tensors["bits"]), "signed" in tensors
    kind = f"{'i' if is_signed else 'u'}{bits}"
    values = ops.convert(_constant(tensors["signed" if is_signed else "unsigned"], kind, packed), "f16")
    if not is_signed:
        values = ops.subtract(values, ops.convert(_constant(tensors["zero"], kind, packed), "f16"))
    scaled = ops.multiply(values, ops.constant(tensors["scale"].numpy()))
    return ops.convert(ops.reshape(scaled, np.array(shape, dtype=np.int64), False), "f32")


def packed_codes(values: Tensor, bits: int) -> Any:
    """Return integers of 4 or 8 bits as the bytes of a constant; two of 4 bits share a byte, the first in its low half.

    Args:
        values: int8 or uint8, of any shape.
        bits: Of each.
    """
    flat = values.numpy().reshape(-1).view(np.uint8)
    if bits != 4:
        return flat
    flat = np.append(flat, np.zeros(len(flat) % 2, dtype=np.uint8)) & LOW
    return flat[0::2] | (flat[1::2] << 4)


def _constant(tensor: Tensor, kind: str, packed: list[Any]) -> Any:
    """Return a constant of integers, which refers to an array that is added to a list."""
    ov: Any = import_module("openvino")
    ops: Any = import_module(OPERATIONS)
    packed.append(packed_codes(tensor, int(kind[1:])))
    return ops.constant(ov.Tensor(packed[-1], ov.Shape(list(tensor.shape)), getattr(ov.Type, kind)))


def answer(folder: Path, asked: Path, answered: Path) -> None:
    """Write the logits of a model in OpenVINO on the CPU, in float32 and without quantized inputs.

    Args:
        folder: Its folder.
        asked: File of the token ids.
        answered: File to write.
    """
    ov: Any = import_module("openvino")
    ids = load_file(asked)["ids"][None].numpy()
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    model = ov.Core().compile_model(folder / FILE, "CPU", exact)
    inputs = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(ids.shape[1])[None],
        "beam_idx": np.zeros(1, dtype=np.int32),
    }
    names = {name for value in model.inputs for name in value.get_names()}
    output = model.create_infer_request().infer({name: value for name, value in inputs.items() if name in names})
    save_file({"logits": torch.tensor(output["logits"])[0].float().contiguous()}, answered)
