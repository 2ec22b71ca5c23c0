"""Two processes give what one gives that accumulates twice as much: launched as a user would."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from compress.errors import RecipeError
from compress.train.loop import check_launcher

SCRIPT = Path(__file__).with_name("two_processes.py")
ROOT = SCRIPT.parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


KINDS = {"copied": ["--multi_gpu"], "split": ["--use_fsdp", "--fsdp_version", "2"]}


def launcher(processes: int, kind: str = "copied") -> list[str]:
    """The start of a command in some processes; `--cpu` would start one (accelerate leaves several to MPI)."""
    launch = ["-m", "accelerate.commands.launch", *KINDS[kind], "--num_processes", str(processes)]
    if kind == "split":
        launch.append(str(SCRIPT.with_name("fsdp_on_cpu.py")))
    return [sys.executable, *(launch if processes > 1 else [])]


def trained(out: Path, processes: int, accumulate: int, model: str, kind: str = "copied") -> dict[str, torch.Tensor]:
    command = [*launcher(processes, kind), str(SCRIPT), str(out), str(accumulate), model]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("split: 0.5") == (kind == "split")
    with safe_open(out, framework="pt") as file:
        assert file.metadata() == {"processes": str(processes)}
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict


@pytest.mark.slow
@pytest.mark.parametrize("model", ["causal", "masked", "experts"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_are_one_with_twice_the_accumulation(tmp_path, kind, model):
    one, two = trained(tmp_path / "one", 1, 4, model), trained(tmp_path / "two", 2, 2, model, kind)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.allclose(tensor.float(), two[name].float(), atol=1e-5), name
    for name in (n for n in one if n.endswith(".mask")):
        dense = name.removesuffix("mask") + "dense"
        assert bool((two[dense][~two[name]] == 0).all())
    other = trained(tmp_path / "other", 1, 2, model)
    assert not all(torch.allclose(one[name].float(), other[name].float(), atol=1e-4) for name in one)


RECIPE = f"""
model: {ROOT / "tests" / "pico" / "model"}
calibration: {{source: embedded, sequences: 8, length: 64}}
passes:
  - rtn: {{weights: int4, group_size: 32, targets: "*.self_attn.*"}}
  - lkd: {{targets: "*.self_attn.*", epochs: 1}}
  - gmp: {{pattern: "2:4", targets: "*.mlp.*", ce_weight: 0.5, top_k: 64, steps: 6, accumulate: %d, checkpoint_every: 2}}
save: {{format: native, verify: own}}
eval: {{perplexity: [embedded], windows: 2, length: 64}}
"""


METHODS = f"""
model: {ROOT / "tests" / "pico" / "model"}
calibration: {{source: embedded, sequences: 8, length: 64}}
passes:
  - sr_ste: {{targets: "*.down_proj", optimizer: lion, hold_out: 0.25, evaluate_every: 1, steps: 4, accumulate: %d}}
  - top_kast: {{targets: "*.up_proj", steps: 4, accumulate: %d}}
  - iterative_pruning: {{targets: "*.gate_proj", retrain: weight_rewind, rewind_to: 0.5, rounds: 2, steps: 4,
      accumulate: %d}}
  - finetune: {{targets: "*.q_proj", lora_rank: 4, steps: 4, accumulate: %d}}
  - qat: {{targets: "*.o_proj", weights: int4, symmetric: false, group_size: 32, ce_weight: 0.5, top_k: 64, precision: bf16,
      steps: 4, accumulate: %d}}
  - rtn: {{targets: "*.v_proj", group_size: 32}}
  - distill: {{train: [scales, norms], top_k: null, hidden: 0.1, steps: 4, accumulate: %d}}
save: {{format: native, verify: own}}
eval: {{perplexity: [embedded], windows: 2, length: 64}}
"""


def command(
    folder: Path, processes: int, accumulate: int, kind: str = "copied", text: str = RECIPE, name: str = "out"
) -> list[str]:
    """`compress run` of a recipe, in some processes; RECIPE trains block by block and as a whole."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(text.replace("%d", str(accumulate)))
    own = ["-m", "compress", "run", str(recipe), "-o", str(folder / name)]
    return [*launcher(processes, kind), *own]


def agree(tensor: torch.Tensor, other: torch.Tensor, name: str) -> None:
    """Both tensors are alike but for one element in a thousand: sums of another order decide near ties of a mask."""
    if tensor.is_floating_point():
        differ = ~torch.isclose(tensor, other, rtol=1e-3, atol=1e-4)
    else:
        differ = (tensor ^ other)[..., None].bitwise_right_shift(torch.arange(8 * tensor.element_size())).bitwise_and(1)
    assert differ.double().mean() <= 1e-3, name


def finish(command: list[str], out: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """The report and the tensors of a run."""
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("checkpoint sha256") == 1  # one process tells
    tensors = {name: t for file in sorted(out.glob("*.safetensors")) for name, t in load_file(file).items()}
    return json.loads((out / "report.json").read_text()), tensors


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compress_run_in_two_processes_is_one_run(tmp_path, kind):
    folders = {name: tmp_path / name for name in ("one", "two", "killed")}
    for folder in folders.values():
        folder.mkdir()
    one, tensors = finish(command(folders["one"], 1, 2), folders["one"] / "out")
    two, others = finish(command(folders["two"], 2, 1, kind), folders["two"] / "out")
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        agree(tensor, others[name], name)
    kept = one["perplexity"][0]["compressed"]["loss"]
    assert two["perplexity"][0]["compressed"]["loss"] == pytest.approx(kept, abs=1e-3)
    assert not list((folders["two"] / "out" / ".compress").glob("passes"))

    # killed in the training of the whole model, with a state on disk
    again = command(folders["killed"], 2, 1, kind)
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
    assert "training resumes" in json.dumps(third["journal"])
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in others.items())


@pytest.mark.slow
def test_every_way_to_train_is_the_same_with_weights_split(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, tensors = finish(command(tmp_path / "one", 1, 2, text=METHODS), tmp_path / "one" / "out")
    two, others = finish(command(tmp_path / "two", 2, 1, "split", METHODS), tmp_path / "two" / "out")
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(others[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    for label, record in one["training"].items():
        losses = [
            [point["loss"] for point in run["curve"] if "loss" in point] for run in (record, two["training"][label])
        ]
        assert losses[0] == pytest.approx(losses[1], abs=1e-4), label


def test_launchers_that_hide_weights_are_refused(monkeypatch):
    where, fsdp = "passes[0]: distill", DistributedType.FSDP
    for kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        with pytest.raises(RecipeError, match="owns the weights, .* launch with --use_fsdp --fsdp_version 2"):
            check_launcher(kind, None, where, 2)
    refused = {
        "version 1 of FSDP, which flattens weights": {"fsdp_version": 1},
        "launch without --fsdp_offload_params": {"fsdp_version": 2, "cpu_offload": True},
        "without --fsdp_activation_checkpointing": {"fsdp_version": 2, "activation_checkpointing": True},
    }
    for record, options in refused.items():
        with pytest.raises(RecipeError, match=record):
            check_launcher(fsdp, FullyShardedDataParallelPlugin(**options), where, 2)
    check_launcher(fsdp, FullyShardedDataParallelPlugin(fsdp_version=2), where, 2)
    check_launcher(DistributedType.MULTI_GPU, None, where, 2)
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    with pytest.raises(RecipeError, match="install torch 2.13 or later"):
        check_launcher(fsdp, FullyShardedDataParallelPlugin(fsdp_version=2), where, 2)
    check_launcher(fsdp, FullyShardedDataParallelPlugin(fsdp_version=2), where, 1)
