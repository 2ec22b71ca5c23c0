"""Tasks through `compress eval` against lm-eval's own backend, in turns in one process: equal figures, processor time.

    python tests/benchmarks/evaluation.py MODEL --data FOLDER [--tasks arc_easy,piqa] [--limit 20] [--batch-size 8]

MODEL: a dense folder. FOLDER: local data of the tasks (`compress eval --data`). One JSON line per task: the seconds of
processor time of both (requests and metrics, without loading), their ratio, the largest difference of a value, and the
tokens that reach the model.
"""

from __future__ import annotations

import argparse
import json
from time import process_time
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from compress import Evaluate, load
from compress.evaluate.harness.adapter import harness_model, quiet
from compress.evaluate.harness.tasks import load_tasks, run_task, task_manager
from compress.evaluate.store import Results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--tasks", default="arc_easy,piqa,hellaswag,winogrande,lambada_openai,boolq")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = tuple(arguments.tasks.split(","))
    settings = Evaluate(tasks=names, data=arguments.data, limit=arguments.limit)
    model, tokenizer = load(arguments.model, arguments.dtype)
    assert tokenizer is not None
    tokens: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: tokens.append((args[0] if args else kwargs["input_ids"]).numel()), with_kwargs=True
    )
    with quiet():
        theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=arguments.batch_size)
    ours = harness_model(model, tokenizer, Results(None), lambda *_: None, print)
    manager, totals = task_manager(settings), [0.0, 0.0]
    for name in names:
        row: dict[str, Any] = {"task": name}
        values = []
        for side, lm in (("lm_eval", theirs), ("ours", ours)):
            [(part, task)] = load_tasks(name, manager, settings).items()
            tokens.clear()
            begin = process_time()
            found = run_task(part, task, lm, settings)
            row[f"{side}_seconds"], row[f"{side}_tokens"] = round(process_time() - begin, 2), sum(tokens)
            values.append({metric: known["value"] for metric, known in found["metrics"].items()})
        totals = [totals[0] + row["lm_eval_seconds"], totals[1] + row["ours_seconds"]]
        row |= {"ratio": round(row["ours_seconds"] / row["lm_eval_seconds"], 3), "values": values[1]}
        row["difference"] = max(abs(values[0][metric] - values[1][metric]) for metric in values[0])
        print(json.dumps(row), flush=True)
    print(json.dumps({"task": "all", "ratio": round(totals[1] / totals[0], 3)}))


if __name__ == "__main__":
    main()
