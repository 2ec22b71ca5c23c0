"""Commands that compute no tensor answer without torch and transformers, whose import takes seconds."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file
from sample_report import sample

from compress.recipe.shipped import shipped

CODE = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from compress.cli import main
found = {}
for words in json.loads(sys.argv[1]):
    out = StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        try:
            main(words)
        except SystemExit as end:
            code = end.code
    slow = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "datasets"})
    found[" ".join(words)] = [code, slow, out.getvalue()[:200]]
print(json.dumps(found))
"""


def made_folders(folder: Path, model: Path) -> None:
    """Make the folder of a run with its report, a model, an AWQ model, and a GGUF file."""
    (folder / "run").mkdir()
    (folder / "run" / "report.json").write_text(json.dumps(sample()))
    shutil.copytree(model, folder / "model")
    (folder / "awq").mkdir()
    (folder / "awq" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq", "bits": 4}}))
    words, scales = np.zeros((128, 8), np.int32), np.ones((2, 64), np.float16)
    tensors = {"layer.qweight": words, "layer.qzeros": words[:2], "layer.scales": scales}
    save_file(tensors, folder / "awq" / "model.safetensors")
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_no_command_without_tensors_imports_torch(tmp_path, pico):
    recipes = {
        "key": "model: m\npases: []\n",
        "pass": "model: m\npasses: [gtpq]\n",
        "option": "model: m\npasses: [{gptq: {wieghts: int4}}]\n",
        "syntax": "model: [m\n",
    }
    for name, text in recipes.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    made_folders(tmp_path, Path(pico))
    right = [["passes"], ["passes", "--json"], ["passes", "gptq"], ["passes", "gptq", "--json"], ["schemes"]]
    right += [["recipes"], ["recipes", "rtn"], ["report", "--help"], ["init", "--help"], ["quantize", "--help"]]
    right += [["report", "run", "--no-open"], ["report", "run", "--json"], ["report", "--schema"]]
    right += [["compare", "run", "run"], ["compare", "run", "run", "-o", "compare.html"]]
    right += [["inspect", path] for path in ("model", "model/model.safetensors", "awq", "model.gguf")]
    right += [["inspect", "model", "--json"], ["inspect", "awq", "--all"]]
    wrong = [[command, f"{name}.yaml"] for name in recipes for command in ("run", "plan", "roofline")]
    wrong += [["run", "best-int5"], ["plan", "none.yaml"], ["passes", "gtpq"], ["recipes", "rtm"]]
    wrong += [["plan", "rtn", "--set", "passes.0.rtn.grups=3"], ["prune", "m", "--method", "wnada"]]
    wrong += [["quantize", "m", "--scheme", "W4A17"]]
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(right + wrong)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {words: slow for words, (_, slow, _) in found.items() if slow} == {}
    codes = {words: (code, said) for words, (code, _, said) in found.items()}
    assert [codes[" ".join(words)] for words in right if codes[" ".join(words)][0] != 0] == []
    assert [codes[" ".join(words)] for words in wrong if codes[" ".join(words)][0] != 2] == []
    assert "rtn" in shipped() and "did you mean 'gptq'" in codes["run pass.yaml"][1]
