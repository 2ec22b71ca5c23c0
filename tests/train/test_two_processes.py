"""Two processes give what one gives that accumulates twice as much: launched as a user would."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from forks import Forked
from launching import ENVIRONMENT, ROOT, finish, fork
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from compress.errors import RecipeError
from compress.train.loop import check_launcher

SCRIPT = Path(__file__).with_name("two_processes.py")


KINDS = {"copied": ["--multi_gpu"], "split": ["--use_fsdp", "--fsdp_version", "2"]}


def script_of(kind: str) -> list[str]:
    """What runs a script or a module."""
    return [str(SCRIPT.with_name("fsdp_on_cpu.py"))] if kind == "split" else []


def launcher(kind: str) -> list[str]:
    """The start of a command in two processes; `--cpu` would start one (accelerate leaves several to MPI)."""
    launch = ["-m", "accelerate.commands.launch", *KINDS[kind], "--num_processes", "2"]
    return [sys.executable, *launch, *script_of(kind)]


def launched(command: list[str], processes: int, kind: str = "copied") -> list[Forked]:
    """The processes of a command with the variables that accelerate's launcher gives them."""
    if processes == 1:
        return fork(command, 1)
    others = ["--num_machines=1", "--num_processes=2", "--main_process_port=0", "--mixed_precision=no"]
    others += ["--dynamo_backend=no", "script"]
    options = prepare_multi_gpu_env(launch_command_parser().parse_args([*KINDS[kind], *others]))
    chosen = {name: value for name, value in options.items() if name.startswith(("ACCELERATE_", "FSDP_"))}
    return fork([*script_of(kind), *command], processes, **chosen)


def ended(started: list[Forked]) -> tuple[str, str]:
    """The output and the errors of all processes, none of which failed."""
    done = finish(started)
    assert not any(code for code, _, _ in done), "".join(errors for _, _, errors in done)
    return "".join(told for _, told, _ in done), "".join(errors for _, _, errors in done)


def killed_with(state: Path, started: list[Forked]) -> None:
    """Kill processes as soon as a training has written its state."""
    for _ in range(12000):
        if state.exists() or any(process.poll() is not None for process in started):
            break
        time.sleep(0.005)
    assert state.exists()
    for process in started:
        process.terminate()
    for process in started:
        process.wait()


def trained(out: Path, processes: int, accumulate: int, model: str, kind: str = "copied") -> dict[str, torch.Tensor]:
    _, errors = ended(launched([str(SCRIPT), str(out), str(accumulate), model], processes, kind))
    assert errors.count("split: 0.5") == (kind == "split")
    with safe_open(out, framework="pt") as file:
        assert file.metadata() == {"processes": str(processes)}
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict


@pytest.mark.slow
@pytest.mark.parametrize("model", ["causal", "masked", "experts"])
def test_two_processes_are_one_with_twice_the_accumulation(tmp_path, model):
    one, other = trained(tmp_path / "one", 1, 4, model), trained(tmp_path / "other", 1, 2, model)
    assert not all(torch.allclose(one[name].float(), other[name].float(), atol=1e-4) for name in one)
    for kind in KINDS:
        two = trained(tmp_path / kind, 2, 2, model, kind)
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            assert torch.allclose(tensor.float(), two[name].float(), atol=1e-5), (kind, name)
        for name in (n for n in one if n.endswith(".mask")):
            dense = name.removesuffix("mask") + "dense"
            assert bool((two[dense][~two[name]] == 0).all())


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


def command(folder: Path, accumulate: int, text: str = RECIPE) -> list[str]:
    """`compress run` of a recipe; RECIPE trains block by block and as a whole."""
    folder.mkdir()
    recipe = folder / "recipe.yaml"
    recipe.write_text(text.replace("%d", str(accumulate)))
    return ["-m", "compress", "run", str(recipe), "-o", str(folder / "out")]


def agree(tensor: torch.Tensor, other: torch.Tensor, name: str) -> None:
    """Both tensors are alike but for one element in a thousand: sums of another order decide near ties of a mask."""
    if tensor.is_floating_point():
        differ = ~torch.isclose(tensor, other, rtol=1e-3, atol=1e-4)
    else:
        differ = (tensor ^ other)[..., None].bitwise_right_shift(torch.arange(8 * tensor.element_size())).bitwise_and(1)
    assert differ.double().mean() <= 1e-3, name


def results(told: str, out: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """The report and the tensors of a run. told: the output of all its processes."""
    assert told.count("checkpoint sha256") == 1  # one process tells
    tensors = {name: t for file in sorted(out.glob("*.safetensors")) for name, t in load_file(file).items()}
    return json.loads((out / "report.json").read_text()), tensors


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The report and the tensors of RECIPE in one process."""
    folder = tmp_path_factory.mktemp("one") / "one"
    told, _ = ended(launched(command(folder, 2), 1))
    return results(told, folder / "out")


@pytest.mark.few(0, slow=1)
@pytest.mark.parametrize("kind", KINDS)
def test_compress_run_in_two_processes_is_one_run(one, tmp_path, kind):
    folder = tmp_path / "two"
    start = [*launcher(kind), *command(folder, 1)]
    done = subprocess.run(start, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    two, others = results(done.stdout, folder / "out")
    kept, tensors = one
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        agree(tensor, others[name], name)
    loss = kept["perplexity"][0]["compressed"]["loss"]
    assert two["perplexity"][0]["compressed"]["loss"] == pytest.approx(loss, abs=1e-3)
    assert not list((folder / "out" / ".compress").glob("passes"))

    # killed in the training of the whole model, with a state on disk
    folder = tmp_path / "killed"
    again = command(folder, 1)
    started = launched(again, 2, kind)
    state = folder / "out" / ".compress" / "passes" / "passes-2--gmp" / "training.safetensors"
    killed_with(state, started)
    told, _ = ended(launched(again, 2, kind))
    third, resumed = results(told, folder / "out")
    assert "training resumes" in json.dumps(third["journal"])
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in others.items())


@pytest.mark.slow
def test_every_way_to_train_is_the_same_with_weights_split(tmp_path):
    told, _ = ended(launched(command(tmp_path / "one", 2, METHODS), 1))
    one, tensors = results(told, tmp_path / "one" / "out")
    told, _ = ended(launched(command(tmp_path / "two", 1, METHODS), 2, "split"))
    two, others = results(told, tmp_path / "two" / "out")
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
