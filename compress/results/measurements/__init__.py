"""What evaluators measured, one file each; the file's name is the key in report.json. Nothing is registered by hand.

Reports read these values without the evaluators, which import torch.
"""

from __future__ import annotations

from compress.passes.contract.discovery import classes_by_file
from compress.results.measurements.base import Measurement

MEASUREMENTS: dict[str, type[Measurement]] = classes_by_file(__name__, __path__, Measurement, suffix="Measurement")
"""The class of every measurement by its key."""
