"""The sensitivity of each layer to each way of compressing it: the divergence of the model that differs in it alone.

A choice is a pass with its options. It is applied to the whole model once; then its layers are put into the original
model one at a time, and the blocks from there on run again. The KL divergence from the original is that of
`compress.evaluation.divergence`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.blockwise.capture import Call, ModelShell
from compress.checkpoint.containers.files import check_writable
from compress.checkpoint.load import load
from compress.checkpoint.sources.files import fingerprint_of
from compress.checkpoint.sources.weight_files import weight_files
from compress.data.ids import model_sample
from compress.data.text_source import as_source
from compress.errors import ModelError, RecipeError, TargetError, did_you_mean, reported_as
from compress.evaluation.divergence import SampledDistribution
from compress.evaluation.store import Results, digest_of
from compress.kernels.dispatch import plain_torch
from compress.layers.linear import CompressedLinear, linears
from compress.models.computation import device_of
from compress.models.kinds.batch import IDS, Batch, Examples
from compress.models.kinds.kinds import described, is_headless
from compress.models.structure.blocks import Block, has_two_stacks
from compress.numerics.quant.grids import GRIDS
from compress.numerics.statistics import mean
from compress.passes import PASSES
from compress.passes.contract.journal import Journal
from compress.passes.contract.passes import Pass
from compress.pipeline.apply import apply
from compress.pipeline.models import model_folder
from compress.pipeline.progress import shown_progress
from compress.pipeline.sources import in_memory
from compress.recipe.schema import read_passes
from compress.recipe.sensitivities import Level, Sensitivities, Sensitivity, allocation
from compress.report.sensitivity import MeasuredSensitivities
from compress.version import __version__

TOP_K = 128  # tokens kept of the original's distributions
CALIBRATION = 32, 256  # sequences and their length, for choices that need data


def read_choice(text: str) -> tuple[str, Pass]:
    """A choice and its name: a grid ('int4'), a sparsity ('0.5', '2:4'), or a pass as a recipe spells it.

    A grid is rounding to nearest in groups of 64, a sparsity is Wanda. Raises RecipeError.
    """
    text = text.strip()
    if text in GRIDS:
        return text, read_passes([{"rtn": {"weights": text}}])[0]
    if text.replace(".", "", 1).isdigit() or (":" in text and " " not in text):
        numbers = {"pattern": text} if ":" in text else {"sparsity": float(text)}
        return text, read_passes([{"wanda": numbers}])[0]
    try:
        spelled = yaml.safe_load(text)
    except yaml.YAMLError:
        spelled = None
    if not ((isinstance(spelled, dict) and len(spelled) == 1) or (isinstance(spelled, str) and spelled in PASSES)):
        near = did_you_mean(text, [*GRIDS, *PASSES])
        raise RecipeError(f"choice {text}: no grid, sparsity or pass{near}; or write 'gptq: {{weights: int3}}'")
    return text, read_passes([spelled])[0]


@plain_torch()
@torch.no_grad()
def sensitivity(
    model: str,
    choices: Sequence[str],
    *,
    level: Level = "layer",
    text: str = "embedded",
    windows: int = 8,
    length: int = 128,
    dtype: str = "auto",
    device: str = "auto",
    work: Path | None = None,
    journal: Journal | None = None,
    progress: bool = False,
) -> MeasuredSensitivities:
    """Measure every choice in every linear of the blocks, or in every block as a whole.

    The model is in memory, and once more compressed.

    Args:
        model: Hub id, local folder or .gguf file.
        choices: Grids such as 'int4', sparsities such as '0.5' or '2:4', or passes as recipes spell them.
        level: Whether one layer or one block is changed at a time.
        text: Name or file of the text of the windows.
        windows: Number of windows.
        length: Tokens of a window.
        dtype: Dtype of computation.
        device: Device of computation.
        work: Folder of stored results, with which a killed measurement continues; None stores nothing.
        journal: Receives notes and progress.
        progress: Whether to show a progress bar.

    Raises:
        RecipeError: for choices that do not exist.
        TargetError: for a pass that changes other tensors than linears.
        ModelError: for a model without next tokens.
        CalibrationError: for a text that cannot be read.
        OutputError: for a `work` that cannot be written.
    """
    journal, torch_device = journal or Journal(), device_of(device)
    read = dict(read_choice(choice) for choice in choices)
    if not read:
        raise RecipeError("choice: write at least one, such as int4")
    if work is not None:
        check_writable(work)
    folder = model_folder(model)
    base, tokenizer = load(folder, dtype, torch_device)
    if is_headless(base) or has_two_stacks(base):
        raise ModelError(f"model: {described(base)}; the sensitivity of layers is measured on next tokens")
    fingerprint = fingerprint_of(folder, weight_files(folder))
    needed = any(step.requires.data for step in read.values())
    source = as_source(text)
    source = source.model_copy(update={"divided": True}) if needed and source.is_file else source
    with reported_as("text", "calibration", "test"):
        examples = model_sample(base, tokenizer, source, "test", windows, length)[0]
        calibration = model_sample(base, tokenizer, source, "calibration", *CALIBRATION)[0] if needed else None
    measured: list[Sensitivity] = []
    with shown_progress(journal) if progress else nullcontext():
        reference = Reference.of(base, examples)
        for name, step in read.items():
            key = digest_of(
                fingerprint,
                __version__,
                step.model_dump(mode="json"),
                type(step).key(),
                dtype,
                examples.sha256(),
                level,
            )
            results = Results(None if work is None else work / key[:16])
            measured += _measure(
                name, step, reference, Source(folder, dtype, torch_device, calibration), level, results, journal
            )
    spelled = {
        name: {type(step).key(): step.model_dump(mode="json", exclude_defaults=True)} for name, step in read.items()
    }
    return MeasuredSensitivities(
        compress=__version__,
        model=model,
        fingerprint=fingerprint,
        text=text,
        windows=len(examples),
        length=examples.length,
        level=level,
        choices=spelled,
        found=measured,
    )


@dataclass(frozen=True)
class Source:
    """Where a further copy of the model comes from, and the examples that passes need."""

    folder: Path
    dtype: str
    device: torch.device
    calibration: Examples | None

    def compressed(self, step: Pass, base: PreTrainedModel) -> dict[str, CompressedLinear]:
        """Return the linears of a copy that the pass changed. Raises TargetError if the pass changes anything else."""
        copy, _ = load(self.folder, self.dtype, self.device)
        apply(copy, step, self.calibration)
        base_tensors = base.state_dict()
        base_linears = linears(base)
        changed_linears = {
            name: module
            for name, module in linears(copy).items()
            if isinstance(module, CompressedLinear) and not _same(module, base_linears[name])
        }
        within = tuple(f"{name}." for name in changed_linears)
        other_tensors = {name: tensor for name, tensor in copy.state_dict().items() if not name.startswith(within)}
        changed = [
            name
            for name, tensor in other_tensors.items()
            if name not in base_tensors or not torch.equal(tensor, base_tensors[name])
        ]
        if changed:
            raise TargetError(
                f"choice {type(step).key()}: changes {changed[0]} too, so a layer cannot be measured alone; use a "
                "pass that changes linears only"
            )
        if not changed_linears:
            raise TargetError(f"choice {type(step).key()}: changes no linear")
        return changed_linears


@dataclass(frozen=True)
class ReferenceWindow:
    """One window of the original model: the input of each block and its arguments, and what is kept of its logits."""

    window: Batch
    inputs: list[Tensor]
    calls: dict[int, Call]
    distribution: SampledDistribution
    loss: float


@dataclass(frozen=True)
class Reference:
    """The original model and its windows."""

    model: PreTrainedModel
    shell: ModelShell
    blocks: list[Block]
    windows: list[ReferenceWindow]

    @classmethod
    def of(cls, model: PreTrainedModel, examples: Examples) -> Reference:
        """Run the model on each window."""
        opened = in_memory(model)
        shell, windows = ModelShell(opened), []
        shell.check()
        for window in examples.to(opened.device):
            captured = shell.capture(window)
            inputs = [captured.hidden]
            for block in opened.blocks:
                inputs.append(captured.calls[block.index].run(block.module, inputs[-1]))
            logits = shell.logits(window, inputs[-1])[0]
            distribution = SampledDistribution.of(logits, TOP_K)
            windows.append(ReferenceWindow(window, inputs[:-1], captured.calls, distribution, loss_of(logits, window)))
        return cls(model, shell, opened.blocks, windows)

    def divergences(self, start: int) -> list[tuple[float, float]]:
        """Return (KL divergence, increase of the loss) per window, of a model that differs from block `start` on."""
        measured = []
        for reference in self.windows:
            hidden = reference.inputs[start]
            for block in self.blocks[start:]:
                hidden = reference.calls[block.index].run(block.module, hidden)
            logits = self.shell.logits(reference.window, hidden)[0]
            kl = reference.distribution.divergence(logits)[0].mean()
            measured.append((float(kl), loss_of(logits, reference.window) - reference.loss))
        return measured


def _same(module: CompressedLinear, original: nn.Module) -> bool:
    return isinstance(original, CompressedLinear) and original.sha256() == module.sha256()


def loss_of(logits: Tensor, window: Batch) -> float:
    """The mean loss of the next tokens in nats."""
    return float(nn.functional.cross_entropy(logits[:-1].float(), window.inputs[IDS][0, 1:]))


@contextmanager
def installed(block: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put modules into a block in place of those with the same names."""

    def put(name: str, module: nn.Module) -> nn.Module:
        parent, _, leaf = name.rpartition(".")
        holder = block.get_submodule(parent)
        replaced = holder.get_submodule(leaf)
        setattr(holder, leaf, module)
        return replaced

    replaced = {name: put(name, module) for name, module in modules.items()}
    try:
        yield
    finally:
        for name, module in replaced.items():
            put(name, module)


def _measure(
    choice: str, step: Pass, reference: Reference, source: Source, level: Level, results: Results, journal: Journal
) -> list[Sensitivity]:
    """Return the sensitivities of a choice, in the order of the model."""
    changed = source.compressed(step, reference.model)
    units: list[tuple[str, int, dict[str, CompressedLinear]]] = []
    for index, block in enumerate(reference.blocks):
        inside = {n.removeprefix(block.name + "."): m for n, m in changed.items() if n.startswith(block.name + ".")}
        if level == "block" and inside:
            units.append((block.name, index, inside))
        elif level == "layer":
            units += [(f"{block.name}.{name}", index, {name: module}) for name, module in inside.items()]

    def compute(missing: list[tuple[str, int, dict[str, CompressedLinear]]]) -> None:
        for count, (name, index, modules) in enumerate(missing, start=1):
            with installed(reference.blocks[index].module, modules):
                results.put([(name, reference.divergences(index))])
            journal.add("progress", "sensitivity", f"sensitivity to {choice}", done=count, of=len(missing))

    values = results.fill(units, lambda unit: unit[0], compute)
    sensitivities = []
    for (name, _, modules), windows in zip(units, values, strict=True):
        sizes = {n: m.shape[0] * m.shape[1] for n, m in modules.items()}
        stored = sum(m.scheme.size_bytes(torch.float16) for m in modules.values())
        kl, loss = (mean([window[i] for window in windows]) for i in (0, 1))
        sensitivities.append(
            Sensitivity(
                name=name,
                choice=choice,
                weights=sum(sizes.values()),
                bits=8 * stored / sum(sizes.values()),
                kl=kl.value,
                kl_stderr=kl.stderr,
                loss=loss.value,
                loss_stderr=loss.stderr,
            )
        )
    gc.collect()  # the copy of the model contains reference cycles
    return sensitivities


def allocate(measured: Sensitivities, bits: float) -> Pass:
    """The pass that gives each layer one of the measured choices, with `bits` stored per weight on average at most.

    Raises RecipeError, as `compress.recipe.sensitivities.allocation` does.
    """
    return read_passes([allocation(measured, bits)])[0]
