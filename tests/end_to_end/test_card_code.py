"""The code of a model card loads the computation that the run has verified and measured."""

import re

import pytest
import torch
from tolerances import near_rounded, same_logits

import compress
from compress.layers.linear import CompressedLinear
from compress.recipe.schema import read_passes

IDS = torch.arange(40, 72)[None]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
FORMATS = {
    "native": {"rtn": {"weights": "int4", "group_size": 32}},
    "compressed-tensors": {"rtn": {"weights": "int4", "group_size": 32}},
    "gptq": {"rtn": {"weights": "int4", "group_size": 32}},
    "awq": {"rtn": {"weights": "int4", "group_size": 32, "symmetric": False}},
    "bitsandbytes": {"rtn": {"weights": "nf4", "group_size": 32}},
    "gguf": {"scheme": "Q4_0"},
    "mlx": {"rtn": {"weights": "int4", "group_size": 32, "symmetric": False}},
    "modelopt": {"scheme": "FP8"},
    "dense": {"wanda": {"sparsity": 0.5}},
}
DTYPES = ("float32", "bfloat16")


def loaded(code, folder):
    names = {}
    exec(code.replace('"FOLDER"', repr(str(folder))), names)
    return names["model"].eval()


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


@pytest.mark.few(5)
@pytest.mark.parametrize(("form", "dtype"), [(form, dtype) for form in FORMATS for dtype in DTYPES])
def test_every_block_loads_the_verified_model(form, dtype, recipe, tmp_path):
    asked = recipe(*read_passes([FORMATS[form]]), save={"format": form}, dtype=dtype, eval=None)
    report = compress.run(asked, tmp_path, progress=False).report
    card = (tmp_path / "README.md").read_text()
    ours, *others = BLOCK.findall(card)
    measured = compress.load(tmp_path, dtype=report["reproduce"]["compute_dtype"])[0]
    wanted, model = logits(measured), loaded(ours, tmp_path)
    layers = {n: m for n, m in measured.named_modules() if isinstance(m, CompressedLinear)}
    assert all(model.get_submodule(name).sha256() == layer.sha256() for name, layer in layers.items())
    assert near_rounded(logits(model).float(), wanted.float())
    if dtype == "float32":
        assert model.dtype == measured.dtype and "chooses a wider dtype" not in card
    else:
        assert f'compress.load("FOLDER", dtype="{dtype}")' in card
    verified = report["verified"]["transformers"] is not None
    assert others or not verified
    assert verified or not others or "(not tested in this run)" in card
    for code in others if verified else ():
        theirs = loaded(code, tmp_path)
        assert next(theirs.parameters()).dtype == measured.dtype, code
        near = same_logits if dtype == "float32" and all(m.rounding is None for m in layers.values()) else near_rounded
        assert near(logits(theirs), wanted)
