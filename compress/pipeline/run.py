"""run(recipe, out): compress block by block, save, reload and compare, evaluate, report. Used by the command line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from compress.checkpoint.containers.files import told_of_writing, user_path
from compress.models.computation import device_of
from compress.passes.contract.journal import Journal
from compress.passes.contract.limits import size_of
from compress.passes.contract.passes import ERROR_TOKENS, calibrates
from compress.passes.contract.processes import Processes
from compress.pipeline.checkpoint import Shards
from compress.pipeline.divide import own_batches
from compress.pipeline.engine import engine
from compress.pipeline.finish import Result, assist, finish
from compress.pipeline.fitting import separate_large_tensors
from compress.pipeline.given_data import with_data
from compress.pipeline.lock import locked
from compress.pipeline.prepare import Job, prepare
from compress.pipeline.progress import shown_progress
from compress.pipeline.texts import PROBE_TOKENS
from compress.recipe.schema import Recipe
from compress.recipe.starts import folder_of


def run(
    recipe: Recipe | str | Path,
    out: str | Path | None = None,
    overwrite: bool = False,
    journal: Journal | None = None,
    progress: bool = True,
    memory: str | int | None = None,
    on_failure: Callable[[dict[str, Any]], None] | None = None,
    calibration: Any = None,
    evaluation: Any = None,
) -> Result:
    """Compress the recipe's model into the folder `out`, check it, evaluate it, and write its report (json, md, html).

    recipe: or the path of its YAML file. out: by default a folder of `out/`, with the name of the file, or of the model
    and the passes (`default_folder`). overwrite: replace another run in the folder. progress: show a progress bar on
    standard error; where that is no terminal, a line for every tenth. memory: the limit of memory of the process, such
    as '8GB' or a number of bytes: activations beyond it go to files, then calibration batches become smaller; a run
    that does not fit all the same is an error before any work. on_failure: receives the report of a run with a complete
    checkpoint and a failed evaluator, which it names (`failed`); the error of the evaluator is then raised.
    calibration, evaluation: data in place of the texts of the recipe: a list of texts, a Dataset or a DataLoader of
    texts or token ids, a tensor of token ids, a `Calibration`, or the name of a text. The recipe states how much of it
    is read; data that it cannot state are recorded by their digest, and the recipe alone does not repeat the run.

    The same call resumes a run that was killed; a complete run is only checked and evaluated again. With several
    processes, started by `accelerate launch` or torchrun, they divide the calibration sequences, the solving of layers,
    the steps of training and the evaluation, and rank 0 writes.

    Raises the errors of `compress.errors`; OutputError while another run works in the folder.
    """
    memory_bytes = None if memory is None else size_of(memory)
    if memory is not None:
        separate_large_tensors()
    folder = user_path(out) if out is not None else default_folder(recipe)
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.from_yaml(recipe)
    recipe = with_data(recipe, calibration, evaluation)
    processes = Processes.launched(cpu=device_of(recipe.device).type == "cpu")
    is_first = processes.first
    journal = (journal or Journal()) if is_first else Journal()
    shown = shown_progress(journal) if progress and is_first else nullcontext()
    lock = locked(folder, journal) if is_first else nullcontext()
    with processes.together(), told_of_writing(folder), lock, shown:
        job = prepare(recipe, folder, overwrite, journal, processes, memory_bytes)
        if not job.manifest.complete:
            compress(job)
        processes.wait()  # until the checkpoint is complete
        result = finish(job, on_failure) if is_first else assist(job)
        processes.wait()
    return result


def default_folder(recipe: Recipe | str | Path) -> Path:
    """The output folder of a run without `out`: out/ and the name of the file, or of the model and the passes."""
    if not isinstance(recipe, Recipe):
        return Path("out") / Path(recipe).stem
    return folder_of(recipe.model, *(step.key() for step in recipe.passes))


def compress(job: Job) -> None:
    """Apply all passes and write the shards and the other files of the checkpoint."""
    examples, batch = job.examples, job.recipe.calibration.batch
    resolved, run = job.resolved, job.run
    probe, batches = examples.beginning(PROBE_TOKENS), own_batches(examples, batch, run.processes)
    if not calibrates(resolved.steps):
        batches = [examples.beginning(ERROR_TOKENS)]
    loads_in = job.opened.loads_in if job.recipe.save.dtype == "auto" else run.storage
    about = job.stated, loads_in, job.accept
    sink = Shards(job.opened, run, resolved.steps, job.manifest, probe, *about)
    engine(resolved, batches, probe, run, sink)
