"""A run of several segments that is killed (SIGKILL) at three moments continues, with the bytes of an unbroken run."""

import json
import time
from pathlib import Path

import pytest
from launching import finish, fork

from compress.checkpoint.containers.files import file_sha256

pytestmark = pytest.mark.slow
SCRIPT = str(Path(__file__).with_name("launched_runs.py"))
PICO = Path(__file__).parents[1] / "pico" / "model"
RECIPE = f"""
model: {PICO}
calibration: {{source: embedded, sequences: 8, length: 64}}
passes:
  - wanda: {{pattern: "2:4"}}
  - finetune: {{steps: 2, batch: 2}}
  - gptq: {{weights: int4, group_size: 32}}
save: {{format: native, verify: own}}
"""
MOMENTS = {
    "in the first sweep": lambda m: (m["begun"] or {}).get("segment") == 0 and m["begun"]["parts"],
    "after the first segment": lambda m: m["reached"] is not None,
    "in the last sweep": lambda m: m["shards"] and not m["complete"],
}
"""When to kill: a condition on the manifest."""


def manifest_of(folder: Path) -> dict:
    try:
        return json.loads((folder / ".compress" / "manifest.json").read_text())
    except (OSError, ValueError):
        return {"begun": None, "reached": None, "shards": {}, "complete": False}


def sums(folder: Path) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in sorted(folder.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    ((code, _, errors),) = finish(fork([SCRIPT, str(folder), str(recipe)], 1))
    assert code == 0, errors
    return recipe, sums(folder / "recipe")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_of_several_segments_continues(moment, unbroken, tmp_path):
    recipe, wanted = unbroken
    command, out = [SCRIPT, str(tmp_path), str(recipe)], tmp_path / "recipe"
    (process,) = fork(command, 1)
    while not MOMENTS[moment](manifest_of(out)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.kill()
    process.communicate()
    before = manifest_of(out)
    assert not before["complete"]
    kept = (before["begun"] or before["reached"] or {}).get("parts", {}) | before["shards"]
    files = [path for name in {part["file"] for part in kept.values()} for path in out.rglob(name)]
    written = {path: path.stat().st_mtime_ns for path in files}
    assert written
    ((code, _, errors),) = finish(fork(command, 1))
    assert code == 0, errors
    assert sums(out) == wanted
    assert all(path.stat().st_mtime_ns == at for path, at in written.items() if path.exists())  # not made again
