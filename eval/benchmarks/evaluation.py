"""Tasks through `compress eval` against lm-eval: equal figures, and the time of both in turns in one process.

    python eval/benchmarks/evaluation.py MODEL --data FOLDER [--tasks arc_easy,piqa] [--limit 20] [--batch-size 8]
        [--rounds 2] [--text FILE.txt] [--command]

MODEL: a dense folder. FOLDER: local data of the tasks (`compress eval --data`). One JSON line per task: the seconds of
both (processor and wall time of requests and metrics, without loading; medians of rounds in the order A B B A), their
ratios, the largest difference of a value, and the tokens that reach the model. --text: paragraphs of a text file are a
task, too, whose figures are those of rolling loglikelihoods; its loss is compared with that of `compress eval --text`
on the same tokens. --command: lm-eval's own command line runs all tasks on the same items; every figure that it prints
is compared with ours, digit by digit.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import torch
import yaml
from lm_eval.models.huggingface import HFLM

from compress import Evaluate, load
from compress.evaluation.harness.adapter import harness_model, quiet
from compress.evaluation.harness.tasks import load_tasks, local_changes, local_files, run_task, task_manager
from compress.evaluation.store import Results
from compress.evaluation.windows import WindowTask, measure_window
from compress.models.kinds.batch import Batch

TEXT = "local_text"
ESTIMATED = ("perplexity",)  # metrics whose error lm-eval draws at random (bootstrap)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--tasks", default="arc_easy,piqa,hellaswag,winogrande,lambada_openai,boolq")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--text")
    parser.add_argument("--command", action="store_true")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with TemporaryDirectory() as folder:
        run(arguments, Path(folder))


def run(arguments: argparse.Namespace, folder: Path) -> None:
    names = [name for name in arguments.tasks.split(",") if name]
    files = [task_file(name, arguments.data, folder) for name in names]
    files += [text_file(arguments.text, arguments.limit, folder)] if arguments.text else []
    settings = Evaluate(tasks=tuple(map(str, files)), limit=arguments.limit)
    model, tokenizer = load(arguments.model, arguments.dtype)
    assert tokenizer is not None
    tokens: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: tokens.append((args[0] if args else kwargs["input_ids"]).numel()), with_kwargs=True
    )
    with quiet():
        theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=arguments.batch_size)
    ours, totals = {}, {"lm_eval": [0.0, 0.0], "ours": [0.0, 0.0]}
    turns = [turn(i, files, settings, theirs, (model, tokenizer, tokens)) for i in range(arguments.rounds)]
    for file in files:
        found = [one[file.stem] for one in turns]
        row: dict[str, Any] = {"task": file.stem}
        for side in totals:
            medians = [statistics.median(part) for part in zip(*(one[side]["seconds"] for one in found), strict=True)]
            totals[side] = [total + one for total, one in zip(totals[side], medians, strict=True)]
            row[f"{side}_seconds"], row[f"{side}_wall"] = (round(one, 2) for one in medians)
            row[f"{side}_tokens"] = found[0][side]["tokens"]
        values, other = (found[0][side]["metrics"] for side in ("ours", "lm_eval"))
        ours[file.stem] = values
        row["ratio"] = round(row["ours_seconds"] / row["lm_eval_seconds"], 3)
        row["wall_ratio"] = round(row["ours_wall"] / row["lm_eval_wall"], 3)
        row["values"] = {metric: known["value"] for metric, known in values.items()}
        row["difference"] = max(abs(other[metric]["value"] - values[metric]["value"]) for metric in values)
        print(json.dumps(row), flush=True)
    ratios = [round(one / other, 3) for one, other in zip(totals["ours"], totals["lm_eval"], strict=True)]
    print(json.dumps({"task": "all", "ratio": ratios[0], "wall_ratio": ratios[1]}), flush=True)
    if arguments.text:
        print(json.dumps(windows(model, tokenizer, theirs, folder, ours[TEXT])), flush=True)
    if arguments.command:
        for line in command(arguments, files, ours, folder):
            print(json.dumps(line), flush=True)


def turn(number: int, files: list[Path], settings: Evaluate, theirs: HFLM, loaded: Any) -> dict[str, Any]:
    """Both sides on every task, as one call of `compress eval` runs them; every other turn begins with ours."""
    model, tokenizer, tokens = loaded
    sides = {"lm_eval": theirs, "ours": harness_model(model, tokenizer, Results(None), lambda *_: None, print)}
    rows: dict[str, Any] = {}
    for file in files:
        rows[file.stem] = {}
        for side in sides if number % 2 == 0 else reversed(sides):
            [(part, task)] = load_tasks(str(file), task_manager(settings), settings).items()
            tokens.clear()
            begin = process_time(), perf_counter()
            metrics = run_task(part, task, sides[side], settings)["metrics"]
            seconds = process_time() - begin[0], perf_counter() - begin[1]
            rows[file.stem][side] = {"metrics": metrics, "seconds": seconds, "tokens": sum(tokens)}
    return rows


def task_file(name: str, data: str, folder: Path) -> Path:
    """A task file that includes lm-eval's own and reads local files."""
    stock = task_manager(Evaluate()).task_index[name].yaml_path
    file = folder / f"local_{name}.yaml"
    changes = local_changes(local_files(name, str(Path(data).resolve())))
    file.write_text(yaml.safe_dump({"include": str(stock), "task": file.stem} | changes))
    return file


def text_file(text: str, count: int, folder: Path) -> Path:
    """A task of the first long paragraphs of a text, in the form of lm-eval's wikitext."""
    found = [line.strip() for line in Path(text).read_text("utf-8").split("\n") if len(line) > 400]
    (folder / "text.jsonl").write_text("".join(json.dumps({"page": page}) + "\n" for page in found[:count]))
    file = folder / f"{TEXT}.yaml"
    metrics = [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")]
    file.write_text(
        yaml.safe_dump(
            {
                "task": TEXT,
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(folder / "text.jsonl")}},
                "output_type": "loglikelihood_rolling",
                "test_split": "test",
                "doc_to_text": "",
                "doc_to_target": "{{page}}",
                "metric_list": metrics,
            }
        )
    )
    return file


def windows(model: Any, tokenizer: Any, theirs: HFLM, folder: Path, found: dict[str, Any]) -> dict[str, Any]:
    """The loss of each paragraph as one window of `compress eval --text`, after the token that lm-eval puts first."""
    total, size = 0.0, 0
    for line in (folder / "text.jsonl").read_text().splitlines():
        page = json.loads(line)["page"]
        ids = torch.tensor([theirs.prefix_token_id, *theirs.tok_encode(page)])
        assert len(ids) <= theirs.max_length
        total += measure_window(model, Batch({"input_ids": ids[None]}), 0, WindowTask(tokenizer=tokenizer))["loss"]
        size += len(page.encode())
    bits = total / size / math.log(2)
    theirs_bits = found["bits_per_byte"]["value"]
    return {
        "text": TEXT,
        "windows_bits_per_byte": bits,
        "lm_eval": theirs_bits,
        "printed_equal": f"{bits:.4f}" == f"{theirs_bits:.4f}",
    }


def command(arguments: argparse.Namespace, files: list[Path], ours: dict[str, Any], folder: Path) -> list[Any]:
    """Run lm-eval's command line, and compare every figure that it prints with ours."""
    out = folder / "out"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "lm_eval",
            "run",
            "--model",
            "hf",
            "--model_args",
            f"pretrained={arguments.model},dtype={arguments.dtype}",
            "--tasks",
            ",".join(file.stem for file in files),
            "--include_path",
            str(folder),
            "--limit",
            str(arguments.limit),
            "--batch_size",
            str(arguments.batch_size),
            "--device",
            "cpu",
            "--output_path",
            str(out),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    [path] = out.rglob("results_*.json")
    results, rows = json.loads(path.read_text())["results"], []
    for task, metrics in ours.items():
        row: dict[str, Any] = {"task": task, "equal": True}
        for metric, known in metrics.items():
            pairs = [(known["value"], results[task][f"{metric},none"])]
            error = results[task].get(f"{metric}_stderr,none")
            if isinstance(error, float) and metric not in ESTIMATED and known["stderr"] is not None:
                pairs.append((known["stderr"], error))
            row[metric] = ["{:.4f} {:.4f}".format(*pair) for pair in pairs]
            row["equal"] &= all(f"{one:.4f}" == f"{other:.4f}" for one, other in pairs)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
