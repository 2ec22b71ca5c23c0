"""Read checkpoints with AutoAWQ's layer in plain torch, in float16. Run in its own environment: JOBS (a JSON file).

AutoAWQ is archived: its layers run in transformers 4.51, which does not know rope_parameters of later ones. On a CPU its
own loading asks for another archived package, so its layers are put into the model here.
"""

import json
import sys
from pathlib import Path

import torch
from awq.modules.linear import gemm
from awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

gemm.TRITON_AVAILABLE = False  # its kernels need a GPU


def read(folder, ids, out):
    """Write the logits, and the dequantized weights as [out, in]."""
    config = AutoConfig.from_pretrained(folder)
    config.rope_theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", config.rope_theta)
    settings = config.quantization_config
    model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float16).eval()
    stored = {name: tensor for path in Path(folder).glob("*.safetensors") for name, tensor in load_file(path).items()}
    layers = {}
    for name, dense in list(model.named_modules()):
        if f"{name}.qweight" in stored:
            layers[name] = gemm.WQLinear_GEMM.from_linear(
                dense, settings["bits"], settings["group_size"], init_only=True
            )
            model.set_submodule(name, layers[name])
    missing, unknown = model.load_state_dict(stored, strict=False)
    if not layers or unknown or set(missing) > {"lm_head.weight"}:
        raise RuntimeError(f"{len(layers)} layers of AutoAWQ, missing {missing}, unknown {unknown}")
    model.tie_weights()
    found = {}
    for name, module in layers.items():
        weight = dequantize_gemm(module.qweight, module.qzeros, module.scales, module.w_bit, module.group_size)
        found[f"{name}.weight"] = weight.T.contiguous()
    with torch.no_grad():
        found["logits"] = model(load_file(ids)["ids"]).logits.float().contiguous()
    save_file(found, out)


for job in json.loads(Path(sys.argv[1]).read_text()):
    try:
        read(job["folder"], job["ids"], job["out"])
    except Exception as error:
        Path(job["out"] + ".error").write_text(f"{type(error).__name__}: {error}")
