"""Run recipes in this process of a launcher: launched_runs.py OUT RECIPE.yaml ...; results are in OUT/NAME."""

import sys
from pathlib import Path

import compress

out, *recipes = map(Path, sys.argv[1:])
for recipe in recipes:
    compress.run(recipe, out / recipe.stem, progress=False)
