"""Read checkpoints with transformers, and the package of their owner, in float32. Run in an own environment: JOBS.

Weights are written where the package dequantizes them: bitsandbytes and compressed-tensors.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig


def weight_of_bitsandbytes(module):
    """The dequantized weight [out, in] of a layer of bitsandbytes; None for other modules."""
    kind = type(module).__name__
    if kind == "Linear4bit":
        from bitsandbytes.functional import dequantize_4bit

        weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
        return weight.reshape(module.out_features, module.in_features)
    if kind == "Linear8bitLt":
        from bitsandbytes.functional import int8_vectorwise_dequant

        scb = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
        codes = module.weight.data if module.weight.data.dtype == torch.int8 else module.state.CB
        return int8_vectorwise_dequant(codes, scb)
    return None


def weight_of_compressed_tensors(module):
    """The weight of a linear after the first forward pass, which dequantizes it; None for other modules."""
    weight = module.weight.detach() if isinstance(module, torch.nn.Linear) and hasattr(module, "weight") else None
    return weight if weight is not None and weight.dtype in (torch.float32, torch.bfloat16) else None


def read(folder, ids, out):
    """Write the logits, and the dequantized weights as [out, in]."""
    config = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
    method = config["quant_method"]
    inputs = [group.get("input_activations") for group in config.get("config_groups", {}).values()]
    try:
        found = tensors_of(folder, ids, method, {})
    except RuntimeError:
        if method != "compressed-tensors":
            raise
        # transformers 5.23 loads zero points, and block floats in float32, only if it dequantizes; inputs it then leaves
        # as they are, so a model that quantizes them is cast
        options = {} if any(inputs) else {"quantization_config": CompressedTensorsConfig(run_compressed=False)}
        found = tensors_of(folder, ids, method, options, cast=any(inputs))
    save_file(found, out)


def tensors_of(folder, ids, method, options, cast=False):
    """The logits and the weights. cast: after the first forward pass, which dequantizes weights in bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map={"": "cpu"}, **options).eval()
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # the kernel of bitsandbytes for such CPUs rounds inputs and the scales of blocks to bfloat16, whatever the
            # dtype: 2e-2 of the largest logit in the 30 layers of SmolLM2; its other CPU code computes in float32
            module.support_avx512bf16_for_cpu = False
    if cast:
        with contextlib.suppress(RuntimeError), torch.no_grad():
            model(load_file(ids)["ids"])
        torch.nn.Module.float(model)  # transformers refuses its own method for quantized models
    found = {}

    def keep(weight_of):
        for name, module in model.named_modules():
            weight = weight_of(module)
            if weight is not None:
                found[f"{name}.weight"] = weight.clone().contiguous()

    with torch.no_grad():
        keep(weight_of_bitsandbytes)  # first: some CPUs repack its codes when they run
        found["logits"] = model(load_file(ids)["ids"]).logits.float().contiguous()
        if method == "compressed-tensors":
            keep(weight_of_compressed_tensors)
    return found


for job in json.loads(Path(sys.argv[1]).read_text()):
    try:
        read(job["folder"], job["ids"], job["out"])
    except Exception as error:
        Path(job["out"] + ".error").write_text(f"{type(error).__name__}: {error}")
