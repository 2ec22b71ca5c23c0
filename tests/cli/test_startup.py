"""Commands that need no model answer without torch and transformers, whose import takes seconds."""

import json
import subprocess
import sys

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
    slow = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "scipy", "datasets"})
    found[" ".join(words)] = [code, slow, out.getvalue()[:200]]
print(json.dumps(found))
"""


def test_no_command_without_a_model_imports_torch(tmp_path):
    recipes = {
        "key": "model: m\npases: []\n",
        "pass": "model: m\npasses: [gtpq]\n",
        "option": "model: m\npasses: [{gptq: {wieghts: int4}}]\n",
        "syntax": "model: [m\n",
    }
    for name, text in recipes.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    right = [["passes"], ["passes", "--json"], ["passes", "gptq"], ["passes", "gptq", "--json"], ["schemes"]]
    right += [["recipes"], ["recipes", "rtn"], ["report", "--help"], ["init", "--help"], ["quantize", "--help"]]
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
