"""Run passes on a GPU and compare them with the CPU; train on it; compress a model of 8B shape block by block.

    python eval/benchmarks/gpu_passes.py [codes] [train] [large] --model FOLDER [--calibration IDS.npy] [--test IDS.npy]
    python eval/benchmarks/gpu_passes.py large --layers 8 --folder FOLDER         # without --model
    python eval/benchmarks/gpu_passes.py --device cpu --model tests/pico/model ... # the same steps without a GPU

One JSON line per result; the first line names the device.

codes: each recipe of --recipes on the CPU and on the device, with the same ids: seconds of the run and of its phases, the
share of equal codes, zeros and weights (mean and least over layers), the loss of both checkpoints on the test ids by
`compress.load`, each on its own device, and of the CPU's checkpoint on the device. With --control also the shares of
equal codes of two runs on the CPU that add in other orders, which the shares of the device can be compared with.
train: distillation on the CPU, on the device, and by `accelerate launch --use_fsdp --fsdp_version 2` in one process.
large: GPTQ (int4, groups of 128) of a Llama of random weights in bfloat16: seconds of each phase, its peak memory on the
device and on the host, bytes of a block, and seconds that the run waited for the next block.

Parts and recipes are skipped when --seconds have passed. One that fails is a line with its error, and the others go on;
the exit code is then 1. Nothing is evaluated by lm-eval.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import random_llama
import torch
from torch import Tensor

import compress
from compress import Recipe
from compress.layers.linear import CompressedLinear, linears

ROOT = Path(__file__).parents[2]
OTHER_SUMS = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}  # without AVX: sums of other orders
PARTS = ("codes", "train", "large")
MB = 10**6
SHARD_BYTES = 500 * MB


def recipes(group: int) -> dict[str, list[dict[str, Any]]]:
    """The passes of `codes` and `train` by name."""
    return {
        "gptq": [{"gptq": {"weights": "int4", "group_size": group}}],
        "awq": [
            {"awq": {"weights": "int4", "group_size": group, "symmetric": False}},
            {"rtn": {"weights": "int4", "group_size": group, "symmetric": False}},
        ],
        "smoothquant": [
            {"smoothquant": {"alpha": 0.5}},
            {"rtn": {"weights": "int8", "group_size": "channel", "activations": "int8"}},
        ],
        "wanda": [{"wanda": {"sparsity": 0.5}}],
        "sparsegpt": [{"sparsegpt": {"pattern": "2:4"}}],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--model", help="folder of the model of codes and train")
    parser.add_argument("--calibration", help="a .npy file of token ids; default: the embedded text")
    parser.add_argument("--test", help="the same, of the test text")
    parser.add_argument("--sequences", type=int, default=32, help="of the calibration of codes and train")
    parser.add_argument("--length", type=int, default=512, help="of a sequence of codes and train")
    parser.add_argument("--windows", type=int, default=16, help="of the test text")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32", help="of the computation of codes and train")
    parser.add_argument("--recipes", nargs="*", default=list(recipes(64)))
    parser.add_argument("--group", type=int, default=64, help="group size of codes and train")
    parser.add_argument("--format", default="native", help="compressed-tensors is also verified by transformers")
    parser.add_argument("--control", action="store_true", help="codes: also compare the CPU with its own other sums")
    parser.add_argument("--steps", type=int, default=20, help="of the training")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which nothing new begins")
    parser.add_argument("--folder", help="for checkpoints and the large model, kept; default: a temporary one")
    parser.add_argument("--layers", type=int, default=32, help="of the large model")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--large-sequences", type=int, default=128)
    parser.add_argument("--large-length", type=int, default=2048)
    parser.add_argument("--large-batch", type=int, default=4)
    parser.add_argument("--large-group", type=int, default=128)
    parser.add_argument("--plain", action="store_true", help="large: GPTQ as in its paper, without searches of scales")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU, and torch finds none; --device cpu shows that it works")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    told("machine", device=name, torch=torch.__version__, threads=torch.get_num_threads())
    begin, work = time.monotonic(), {"codes": codes, "train": train, "large": large}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(arguments.folder or made)
        folder.mkdir(parents=True, exist_ok=True)
        for part in arguments.parts or PARTS:
            work[part](arguments, folder, lambda: time.monotonic() - begin < arguments.seconds)
    sys.exit(bool(FAILED))


FAILED: list[str] = []


def told(result: str, /, **figures: Any) -> None:
    print(json.dumps({"result": result} | figures), flush=True)


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """An error in the context is told, and does not end the benchmark."""
    try:
        yield
    except Exception as error:
        FAILED.append(what)
        told("failed", what=what, error=f"{type(error).__name__}: {error}", where=traceback.format_exc()[-4000:])


def recipe_of(arguments: argparse.Namespace, passes: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """A recipe on the model of the arguments; nothing is evaluated, and the checkpoint is verified."""
    source = arguments.calibration or "embedded"
    return {
        "model": str(arguments.model),
        "device": device,
        "dtype": arguments.dtype,
        "calibration": {"source": source, "sequences": arguments.sequences, "length": arguments.length},
        "passes": passes,
        "save": {"format": arguments.format},
        "eval": None,
    }


def ran(recipe: dict[str, Any], out: Path) -> tuple[dict[str, Any], float]:
    """The report of a run, and its seconds."""
    begin = time.monotonic()
    report = compress.run(Recipe.model_validate(recipe), out, overwrite=True, progress=False).report
    return report, round(time.monotonic() - begin, 2)


def codes(arguments: argparse.Namespace, folder: Path, goes_on: Callable[[], bool]) -> None:
    """Compare the checkpoints of the CPU and of the device."""
    for name in arguments.recipes:
        if not goes_on():
            told("skipped", recipe=name)
            continue
        with going_on(name):
            compare(arguments, folder, name)


def compare(arguments: argparse.Namespace, folder: Path, name: str) -> None:
    """Run one recipe on both, and tell the differences."""
    line: dict[str, Any] = {"recipe": name, "dtype": arguments.dtype}
    places = {"cpu": folder / f"{name}-cpu", "device": folder / f"{name}-device"}
    for where, device in (("device", arguments.device), ("cpu", "cpu")):
        report, seconds = ran(recipe_of(arguments, recipes(arguments.group)[name], device), places[where])
        line |= {f"{where}_seconds": seconds, f"{where}_phases": phases(report)}
    one, other = (compress.load(place, arguments.dtype)[0] for place in places.values())
    line |= compared(one, other)
    del other
    if arguments.control:
        line |= {f"control_{key}": share for key, share in compared(one, control(arguments, folder, name)).items()}
    del one
    ids = test_ids(arguments)
    line |= {"cpu_loss": loss(places["cpu"], ids, "cpu", arguments.dtype)}
    line |= {"device_loss": loss(places["device"], ids, arguments.device, arguments.dtype)}
    line |= {"cpu_checkpoint_on_device_loss": loss(places["cpu"], ids, arguments.device, arguments.dtype)}
    told("codes", **line)


def control(arguments: argparse.Namespace, folder: Path, name: str) -> torch.nn.Module:
    """The result of another process on the CPU that adds in other orders."""
    out = folder / f"{name}-control"
    command = [sys.executable, "-m", "compress"]
    begun(command, recipe_of(arguments, recipes(arguments.group)[name], "cpu"), out, OTHER_SUMS)
    return compress.load(out, arguments.dtype)[0]


def phases(report: dict[str, Any]) -> dict[str, float]:
    """Seconds by phase."""
    return {name: round(cost["seconds"], 2) for name, cost in report["costs"].items()}


def compared(one: torch.nn.Module, other: torch.nn.Module) -> dict[str, float]:
    """The shares of equal codes (of quantized layers), zeros and weights: the mean and the least over layers."""
    found: dict[str, list[float]] = {"codes": [], "zeros": [], "weights": []}
    theirs = linears(other)
    for name, module in linears(one).items():
        pair = [CompressedLinear.of(layer) for layer in (module, theirs[name])]
        weights = [layer.weight for layer in pair]
        held = [layer.codes for layer in pair]
        if held[0] is not None and held[1] is not None:
            found["codes"].append(equal(*(part.codes().codes for part in held if part is not None)))
        found["zeros"].append(equal(*(weight == 0 for weight in weights)))
        found["weights"].append(equal(*weights))
    figures = {}
    for name, shares in found.items():
        if shares:
            figures |= {f"{name}_mean": round(sum(shares) / len(shares), 6), f"{name}_least": round(min(shares), 6)}
    return figures


def equal(one: Tensor, other: Tensor) -> float:
    return float((one == other).double().mean())


def test_ids(arguments: argparse.Namespace) -> Tensor:
    """Token ids [windows, length] of the test text."""
    if arguments.test:
        ids = torch.from_numpy(np.load(arguments.test).astype(np.int64))
    else:
        from transformers import AutoTokenizer

        from compress.data.ids import token_ids

        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        ids = token_ids("embedded", "test", tokenizer, arguments.windows, arguments.length, 0)
    return ids[: arguments.windows, : arguments.length]


@torch.no_grad()
def loss(folder: Path, ids: Tensor, device: str, dtype: str) -> float:
    """The mean loss of the next tokens by a checkpoint."""
    model, _ = compress.load(folder, dtype, device, compile=False)
    total, count = 0.0, 0
    for row in ids:
        logits = model(row[None].to(device)).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, row[1:].to(device), reduction="sum"))
        count += len(row) - 1
    return total / count


def train(arguments: argparse.Namespace, folder: Path, goes_on: Callable[[], bool]) -> None:
    """Compare the losses of distillation on the CPU, on the device, and on it under FSDP."""
    for way in ("cpu", "device", "fsdp"):
        if not goes_on():
            told("skipped", training=way)
            continue
        with going_on(f"train {way}"):
            distill(arguments, folder / f"train-{way}", way)


def distill(arguments: argparse.Namespace, out: Path, way: str) -> None:
    """Train in one way, and tell the losses."""
    passes = [
        {"rtn": {"weights": "int4", "group_size": arguments.group}},
        {"distill": {"train": ["scales", "norms"], "steps": arguments.steps}},
    ]
    device = "cpu" if way == "cpu" else arguments.device
    recipe, begin = recipe_of(arguments, passes, device), time.monotonic()
    report = launch(recipe, out) if way == "fsdp" else ran(recipe, out)[0]
    seconds = round(time.monotonic() - begin, 2)
    (record,) = report["training"].values()
    curve = [point["loss"] for point in record["curve"] if "loss" in point]
    told(
        "train",
        way=way,
        seconds=seconds,
        training_seconds=round(record["seconds"], 2),
        steps=record["steps"],
        first=curve[0],
        last=curve[-1],
        last_quarter=record["last_loss"],
        loss=loss(out, test_ids(arguments), device, arguments.dtype),
        device_mb=max(round(cost["device_bytes"] / MB) for cost in report["costs"].values()),
    )


def launch(recipe: dict[str, Any], out: Path) -> dict[str, Any]:
    """The report of a run that accelerate starts with FSDP in one process."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--use_fsdp", "--fsdp_version", "2"]
    command += ["--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    if recipe["device"] == "cpu":
        command.append(str(ROOT / "tests" / "train" / "fsdp_on_cpu.py"))
    return begun([*command, "-m", "compress"], recipe, out, {})


def begun(command: list[str], recipe: dict[str, Any], out: Path, environment: dict[str, str]) -> dict[str, Any]:
    """The report of a run in another process."""
    path = out.with_suffix(".yaml")
    path.write_text(json.dumps(recipe))  # JSON is YAML
    command = [*command, "run", str(path), "-o", str(out), "--overwrite"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr[-3500:]}")
    return json.loads((out / "report.json").read_text())


def large(arguments: argparse.Namespace, folder: Path, goes_on: Callable[[], bool]) -> None:
    """Compress a Llama of random weights block by block."""
    if not goes_on():
        told("skipped", large=True)
        return
    with going_on("large"):
        compress_large(arguments, folder / "large", folder / "large-gptq")


def compress_large(arguments: argparse.Namespace, model: Path, out: Path) -> None:
    """Write the model if it is not there, compress it, and tell the time and the memory."""
    begin = time.monotonic()
    if not (model / "config.json").exists():
        write_model(arguments, model)
    told("large model", seconds=round(time.monotonic() - begin, 1), mb=round(size_of(model) / MB))
    options = {"weights": "int4", "group_size": arguments.large_group}
    if arguments.plain:
        options |= {"act_order": "none", "scale": "absmax", "refine": 0}
    recipe = {
        "model": str(model),
        "device": arguments.device,
        "dtype": "bfloat16",
        "calibration": {
            "source": str(model / "ids.npy"),
            "sequences": arguments.large_sequences,
            "length": arguments.large_length,
            "batch": arguments.large_batch,
        },
        "passes": [{"gptq": options}],
        "save": {"format": "native"},
        "eval": None,
    }
    report, seconds = ran(recipe, out)
    costs = report["costs"].items()
    weights = 2 * arguments.hidden * (arguments.hidden + arguments.hidden * arguments.kv_heads // arguments.heads)
    weights += 3 * arguments.hidden * arguments.intermediate + 2 * arguments.hidden
    told(
        "large",
        layers=arguments.layers,
        seconds=seconds,
        phases=phases(report),
        block_mb=round(2 * weights / MB),
        activations_mb=round(2 * arguments.large_sequences * arguments.large_length * arguments.hidden / MB),
        planned_mb=round(report["predicted"]["memory_bytes"] / MB),
        device_mb={name: round(cost["device_bytes"] / MB) for name, cost in costs},
        host_mb={name: round(cost["peak_bytes"] / MB) for name, cost in costs},
        waited_seconds=round(report["reading"]["seconds"], 2),
        read_mb=round(report["reading"]["size_bytes"] / MB),
        checkpoint_mb=round(size_of(out) / MB),
        bits_per_weight=round(report["size"]["bits_per_weight"], 3),
        verified=report["verified"],
        fallbacks=report["journal"]["counts"].get("fallback", 0),
    )


def size_of(folder: Path) -> int:
    """Bytes of the weight files of a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def write_model(arguments: argparse.Namespace, folder: Path) -> None:
    """Write a Llama of random weights, a shard for about a block."""
    shape = {
        "vocab_size": arguments.vocabulary,
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.intermediate,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.heads,
        "num_key_value_heads": arguments.kv_heads,
        "max_position_embeddings": max(8192, arguments.large_length),
    }
    ids = arguments.large_sequences, arguments.large_length
    random_llama.write(folder, shape, ids, SHARD_BYTES, arguments.device)


if __name__ == "__main__":
    main()
