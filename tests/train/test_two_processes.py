"""Two processes give what one gives that accumulates twice as much: launched as a user would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

SCRIPT = Path(__file__).with_name("two_processes.py")
ROOT = SCRIPT.parents[2]


def trained(out: Path, processes: int, accumulate: int, *kind: str) -> dict[str, torch.Tensor]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launch if processes > 1 else []), str(SCRIPT), str(out), str(accumulate), *kind]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
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
