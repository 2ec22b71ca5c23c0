"""What every recipe of recipes/ gives on the pico model, for eval/baselines/pico.json.

    python eval/benchmarks/baselines.py [RECIPE...] [--write]

RECIPE: names, such as gptq; all of them if none is given. Without --write it prints the stored and the new figures side
by side. One thread, so that sums come in one order.
"""

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from on_pico import PICO, RECIPES, ROOT, on_pico

import compress

STORED = ROOT / "eval" / "baselines" / "pico.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE")
    parser.add_argument("--write", action="store_true", help="replace the stored figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(STORED.read_text()) if STORED.exists() else {}
    stored = known.get("recipes", {})
    unknown = set(arguments.recipes) - {path.stem for path in RECIPES}
    if unknown:
        parser.error(f"no recipe is called {', '.join(sorted(unknown))}")
    found, text = {}, known.get("evaluation", {})
    for path in RECIPES:
        if arguments.recipes and path.stem not in arguments.recipes:
            continue
        recipe = on_pico(compress.Recipe.from_yaml(path))
        with tempfile.TemporaryDirectory() as folder:
            report = compress.run(recipe, folder).report
        found[path.stem] = figures(report)
        quality = report["perplexity"][0]
        if recipe.model == str(PICO):  # passes that need experts have another model
            text = {key: quality[key] for key in ("text", "windows", "length", "sha256")}
            text["base_perplexity"] = round(quality["base"]["perplexity"], 4)
        print(f"{path.stem}: {stored.get(path.stem)} -> {found[path.stem]}", flush=True)
    if arguments.write:
        found = dict(sorted({**stored, **found}.items())) if arguments.recipes else found
        made = {"model": "tests/pico/model", "python": platform.python_version(), "evaluation": text, "recipes": found}
        STORED.write_text(json.dumps(made, indent=2) + "\n")


def figures(report: dict) -> dict[str, float]:
    """The figures of a report that are kept."""
    quality, size = report["perplexity"][0], report["size"]
    return {
        "perplexity": round(quality["compressed"]["perplexity"], 4),
        "bits_per_weight": round(size["bits_per_weight"], 4),
        "checkpoint_bytes": size["checkpoint_bytes"],
    }


if __name__ == "__main__":
    main()
