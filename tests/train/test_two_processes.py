"""Two processes give what one gives that accumulates twice as much: launched as a user would."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors import safe_open
from safetensors.torch import load_file

from compress.errors import RecipeError
from compress.train.loop import check_whole

SCRIPT = Path(__file__).with_name("two_processes.py")
ROOT = SCRIPT.parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def launcher(processes: int) -> list[str]:
    """The start of a command in some processes; `--cpu` would start one (accelerate leaves several to MPI)."""
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes)]
    return [sys.executable, *(launch if processes > 1 else [])]


def trained(out: Path, processes: int, accumulate: int, *kind: str) -> dict[str, torch.Tensor]:
    command = [*launcher(processes), str(SCRIPT), str(out), str(accumulate), *kind]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    with safe_open(out, framework="pt") as file:
        assert file.metadata() == {"processes": str(processes)}
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict


@pytest.mark.slow
@pytest.mark.parametrize("kind", [(), ("masked",)])
def test_two_processes_are_one_with_twice_the_accumulation(tmp_path, kind):
    one, two = trained(tmp_path / "one", 1, 4, *kind), trained(tmp_path / "two", 2, 2, *kind)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.allclose(tensor.float(), two[name].float(), atol=1e-5), name
    for name in (n for n in one if n.endswith(".mask")):
        dense = name.removesuffix("mask") + "dense"
        assert bool((two[dense][~two[name]] == 0).all())
    other = trained(tmp_path / "other", 1, 2, *kind)
    assert not all(torch.allclose(one[name].float(), other[name].float(), atol=1e-4) for name in one)


RECIPE = f"""
model: {ROOT / "tests" / "pico" / "model"}
calibration: {{source: embedded, sequences: 8, length: 64}}
passes:
  - gptq: {{weights: int4, group_size: 32, targets: "*.self_attn.*"}}
  - lkd: {{targets: "*.self_attn.*", epochs: 1, accumulate: %d}}
  - gmp: {{pattern: "2:4", targets: "*.mlp.*", hard: 0.5, top_k: 64, steps: 6, accumulate: %d, checkpoint_every: 2}}
save: {{format: native, verify: own}}
eval: {{perplexity: [embedded], windows: 2, length: 64}}
"""


def command(folder: Path, processes: int, accumulate: int, name: str = "out") -> list[str]:
    """`compress run` of a recipe that trains block by block and as a whole, in some processes."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE % (accumulate, accumulate))
    own = ["-m", "compress", "run", str(recipe), "-o", str(folder / name)]
    return [*launcher(processes), *own]


def finish(command: list[str], out: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """The report and the tensors of a run."""
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("checkpoint sha256") == 1  # one process tells
    tensors = {name: t for file in sorted(out.glob("*.safetensors")) for name, t in load_file(file).items()}
    return json.loads((out / "report.json").read_text()), tensors


@pytest.mark.slow
def test_compress_run_in_two_processes_is_one_run(tmp_path):
    folders = {name: tmp_path / name for name in ("one", "two", "killed")}
    for folder in folders.values():
        folder.mkdir()
    one, tensors = finish(command(folders["one"], 1, 2), folders["one"] / "out")
    two, others = finish(command(folders["two"], 2, 1), folders["two"] / "out")
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, others[name], rtol=1e-3, atol=1e-4, msg=name)
        else:
            assert torch.equal(tensor, others[name]), name
    kept = one["quality"][0]["compressed"]["loss"]
    assert two["quality"][0]["compressed"]["loss"] == pytest.approx(kept, abs=1e-3)
    assert not list((folders["two"] / "out" / ".compress").glob("passes"))

    # killed in the training of the whole model, with a state on disk
    again = command(folders["killed"], 2, 1)
    process = subprocess.Popen(again, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    state = folders["killed"] / "out" / ".compress" / "passes" / "passes-2--gmp" / "training.safetensors"
    for _ in range(1200):
        if state.exists() or process.poll() is not None:
            break
        time.sleep(0.05)
    assert state.exists()
    process.terminate()  # the launcher takes its workers with it
    process.wait()
    third, resumed = finish(again, folders["killed"] / "out")
    assert "training goes on" in json.dumps(third["journal"])
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in others.items())


def test_launchers_that_split_weights_are_refused():
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        with pytest.raises(RecipeError, match="made of whole ones; launch with --multi_gpu"):
            check_whole(kind, "passes[0]: distill")
    check_whole(DistributedType.MULTI_GPU, "passes[0]: distill")
