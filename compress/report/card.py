"""The model card: README.md of an output folder, with the metadata that the Hugging Face hub reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedModel

from compress.checkpoint.containers.files import write_text
from compress.checkpoint.formats import FORMATS
from compress.checkpoint.sources.hub import split_revision
from compress.models.kinds.causal import CAUSAL
from compress.models.kinds.contract import ModelKind
from compress.models.kinds.kinds import answers_prompts, kind_of
from compress.passes.contract.facts import ANY_LAYER, Fact
from compress.passes.contract.passes import Step
from compress.recipe.tables import ResultTable
from compress.recipe.yaml import plain_values
from compress.report.names import HUB_ID, escaped, formats_in, in_code
from compress.report.sections import formats, size_and_quality
from compress.report.sections.base import table
from compress.report.verdict import overlap_warnings
from compress.results.result import RunResult
from compress.version import __version__

FILE = "README.md"
PROJECT = "compress-llm"
INHERITED = ("license", "license_name", "license_link", "language")
"""Metadata of the base model's card that holds for the compressed model too."""


COMMANDS = {
    "llama.cpp": "llama.cpp runs `FOLDER/{file}` (not tested in this run).",
    "GPTQModel": 'GPTQModel loads it: `GPTQModel.load("FOLDER")` (not tested in this run).',
    "mlx-lm": "mlx-lm runs it: `mlx_lm.generate --model FOLDER --prompt TEXT` (not tested in this run).",
    "vLLM": "vLLM serves it: `vllm serve FOLDER` (not tested in this run; conformance ran it on a CPU, where it has no "
    "kernels for quantized experts).",
    "AutoAWQ": 'AutoAWQ loads it: `AutoAWQForCausalLM.from_quantized("FOLDER")` (not tested in this run).',
}
"""How programs other than transformers load a checkpoint; `file`: of a format with one file."""


LIBRARIES = ("transformers", "mlx")
"""Names of libraries on the Hub: of a program that reads the checkpoint, or of the format that is theirs."""


@dataclass(frozen=True)
class CardFacts:
    """What a card states in addition to the report.

    Attributes:
        facts: Facts of the compressed layers.
        generates: Whether the model generates text from a prompt.
        kind: ModelKind of the model.
        programs: Programs that read such checkpoints in conformance.
        misreadings: What other programs are known to do with it.
    """

    facts: frozenset[Fact]
    generates: bool
    kind: ModelKind
    programs: tuple[str, ...] = ()
    misreadings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        steps: Sequence[Step],
        model: PreTrainedModel,
        programs: Iterable[str] = (),
        misreadings: Iterable[str] = (),
    ) -> CardFacts:
        """Return the facts after all passes; the programs are those of the attributes."""
        facts: frozenset[Fact] = frozenset(fact for _, step, _ in steps for fact in step.effects(ANY_LAYER).facts)
        return cls(facts, answers_prompts(model), kind_of(model) or CAUSAL, tuple(programs), tuple(misreadings))


def write_card(report: RunResult, folder: Path, source: str, facts: CardFacts) -> None:
    """Write README.md atomically; `source` is the base model: a hub id, a folder or a .gguf file."""
    write_text(folder / FILE, card(report, source, facts, base_metadata(source)))


def card(report: RunResult, source: str, facts: CardFacts, inherited: dict[str, Any]) -> str:
    """Render the card; `inherited` is metadata of the base model's card."""
    source, revision = split_revision(source)
    front = yaml.safe_dump(_metadata(report, source, facts, inherited), sort_keys=False, allow_unicode=True)
    name = Path(source).name
    recipe = yaml.safe_dump(report.reproduce.recipe, sort_keys=False, allow_unicode=True)
    base = f"[{source}](https://huggingface.co/{source})" if _on_hub(source) else in_code(name)
    base += "" if revision is None else f" (commit {in_code(revision)})"
    steps = ", ".join(f"`{next(iter(step))}`" for step in report.reproduce.recipe["passes"])
    rows = size_and_quality.rows(report)
    parts = [
        f"---\n{front}---",
        f"# {escaped(name)}, compressed",
        f"{base}, compressed by compress {report.compress} with {steps}. The checkpoint was read back and compared "
        "with the computed model before this card was written; the figures below are those of the stored checkpoint.",
        f"## Size and quality\n\n{table(size_and_quality.HEAD, rows)}",
        *(f"**{text}.**" for text in overlap_warnings(report)),
        f"## Use\n\n{_use(report, facts)}",
        f"## Recipe\n\n{_again(report)} makes this checkpoint again. {_conditions(report)}\n\n```yaml\n{recipe}```",
        f"`report.md` has the errors of all layers, times, memory and versions. Digest of the checkpoint: "
        f"`{report.checkpoint_sha256}`.",
    ]
    return "\n\n".join(parts) + "\n"


def _again(report: RunResult) -> str:
    """What has to be called."""
    uses = report.reproduce.given_data
    if not uses:
        return "`compress run recipe.yaml`"
    data = "; ".join(f"{use.text}, sha256 `{use.sha256}`" for use in uses)
    return (
        f"The recipe does not hold the calibration data ({data}). With the same data, "
        '`compress.run("recipe.yaml", calibration=DATA)`'
    )


def _conditions(report: RunResult) -> str:
    """What has to be equal for equal bytes."""
    reproduce = report.reproduce
    versions = {"compress": report.compress, **reproduce.packages}
    packages = [f"{name} {versions[name]}" for name in ("compress", "torch", "transformers") if versions.get(name)]
    threads, any_number = f"threads ({reproduce.threads}), ", ""
    if reproduce.calibration_runs is None:  # only sums over calibration tokens depend on the number of threads
        threads, any_number = "", ", with any number of threads"
    return (
        f"The bytes are the same with the same packages ({', '.join(packages)}), device (`{reproduce.device}`), "
        f"{threads}kernels ({reproduce.kernels}) and kind of processor{any_number}. Elsewhere, sums are "
        "computed in another order, so single codes may differ."
    )


def _metadata(report: RunResult, source: str, facts: CardFacts, inherited: dict[str, Any]) -> dict[str, Any]:
    """The front matter."""
    recipe = report.reproduce.recipe
    form, *further = formats_in(recipe)
    quantized = "quantized" in facts.facts
    steps = dict.fromkeys(key.replace("_", "-") for step in recipe["passes"] for key in step)
    tags = ["compress", *steps, form, *further]
    tags += [f"{report.size.bits_per_weight:.3g}-bit"] if quantized else []
    tags += ["pruned"] if "masked" in facts.facts else []
    base = {"base_model": source, "base_model_relation": "quantized" if quantized else "finetune"}
    return {
        **(base if _on_hub(source) else {}),
        **inherited,
        "library_name": next((name for name in LIBRARIES if name in (*_readers(report, facts), form)), PROJECT),
        "pipeline_tag": facts.kind.task,
        "tags": tags,
    }


def _readers(report: RunResult, facts: CardFacts) -> list[str]:
    """Other programs that read the checkpoint in this run, or its format and grids in conformance."""
    recipe = report.reproduce.recipe
    if report.verified.transformers is not None:
        return ["transformers", *(name for name in facts.programs if name != "transformers")]
    tried = recipe["save"]["verify"] == "full" and FORMATS[formats_in(recipe)[0]].unverified is None
    return [name for name in facts.programs if not (tried and name == "transformers")]


def _use(report: RunResult, facts: CardFacts) -> str:
    """How to load the checkpoint, for each program that reads it."""
    readers, form = _readers(report, facts), formats_in(report.reproduce.recipe)[0]
    auto = facts.kind.auto
    auto_processor = facts.kind.processor
    name = auto_processor.removeprefix("Auto").lower()
    parts = [
        "With compress (`FOLDER`: a local copy of this repository):\n\n"
        '```python\nimport compress\n\nmodel, tokenizer = compress.load("FOLDER")\n```\n\n'
        f"{_computed_in(report)}"
    ]
    if "transformers" in readers:
        package = " and the package compressed-tensors" if FORMATS[form].quant_method == "compressed-tensors" else ""
        tested = "" if report.verified.transformers is not None else " (not tested in this run)"
        file = FORMATS[form].file
        option = "" if file is None else f', gguf_file="{file}", dtype="{report.reproduce.compute_dtype}"'
        parts.append(
            f"With transformers{package}{tested}:\n\n"
            f"```python\nfrom transformers import {auto}, {auto_processor}\n\n"
            f'model = {auto}.from_pretrained("FOLDER"{option})\n'
            f'{name} = {auto_processor}.from_pretrained("FOLDER")\n```'
        )
    parts += [text.format(file=FORMATS[form].file) for program, text in COMMANDS.items() if program in readers]
    if facts.misreadings:
        parts.append(f"Known to refuse it or to compute something else: {'; '.join(facts.misreadings)}.")
    if not readers:
        parts.append("Other programs were not run on such a checkpoint.")
    if report.formats:
        parts.append(f"The same checkpoint in other formats:\n\n{table(formats.HEAD, formats.rows(report)[1:])}")
    return "\n\n".join(parts)


def _computed_in(report: RunResult) -> str:
    """The dtype of the figures, and how to compute in it where readers choose another one."""
    reproduce = report.reproduce
    text = f"The figures are those of computation in {reproduce.compute_dtype}"
    if reproduce.compute_dtype == reproduce.storage_dtype == "float32":
        return f"{text}."
    return (
        f'{text}, as with `compress.load("FOLDER", dtype="{reproduce.compute_dtype}")`. '
        "Without `dtype`, `compress.load` chooses a wider dtype where that is faster."
    )


def write_export_card(
    folder: Path,
    source: str,
    form: str,
    layers: Sequence[tuple[str, str, str, int, float]],
    programs: Sequence[str],
    origin: str = "",
    use: str = "",
) -> None:
    """Write README.md of a converted checkpoint atomically.

    Args:
        folder: Folder of the checkpoint.
        source: The converted checkpoint, or the base model of a run that converted its own.
        form: Its new format.
        layers: Name, scheme before, scheme after, number and relative weight error of each kind of layers.
        programs: Programs that read such checkpoints in conformance.
        origin: What was converted, if not `source`.
        use: How the folder is used, in Markdown, if `compress.load` does not read it.
    """
    converted = (
        origin or f"Converted from {in_code(Path(source).name)} by compress {__version__}, without calibration. "
    )
    front = {**base_metadata(source), "library_name": PROJECT, "tags": ["compress", form]}
    rows = [
        (name, str(count), scheme_before, scheme_after, f"{error:.3e}" if error else "0 (lossless)")
        for name, scheme_before, scheme_after, count, error in layers
    ]
    part = "The compressed layers" if rows else "All tensors"
    loading = '```python\nimport compress\n\nmodel, tokenizer = compress.load("FOLDER")\n```\n'
    other_readers = f" {', '.join(programs)} read such checkpoints too (not tested here)." if programs else ""
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {escaped(Path(source).name)}, as {form}",
        converted.strip() if use else f"{converted}{part} were read back and compared before this card was written.",
        *([f"## Layers\n\n{table(('layers', 'count', 'before', 'after', 'weight error'), rows)}"] if rows else []),
        f"## Use\n\n{use or loading}{other_readers}",
    ]
    write_text(folder / FILE, "\n\n".join(parts).rstrip() + "\n")


@dataclass(frozen=True)
class ModelFreeFacts:
    """What the card of a folder states whose tensors were quantized without a model.

    Attributes:
        source: Hub id or folder.
        method: The scheme, and how weights were rounded.
        tables: Quantized and copied tensors.
        form: The format.
    """

    source: str
    method: str
    tables: Sequence[ResultTable]
    form: str


def write_model_free_card(folder: Path, facts: ModelFreeFacts) -> None:
    """Write README.md of a folder whose tensors were quantized without a model."""
    source, _ = split_revision(facts.source)
    base = {"base_model": source, "base_model_relation": "quantized"} if _on_hub(source) else {}
    front = {**base, **base_metadata(facts.source), "library_name": PROJECT, "tags": ["compress", facts.form]}
    name = Path(source).name
    tables = [f"## {part.head[0].capitalize()}\n\n{table(part.head, part.rows)}" for part in facts.tables]
    sizes = facts.tables[0].title.rpartition(": ")[2]
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {escaped(name)}, compressed",
        f"{in_code(name)}, quantized by compress {__version__} to {escaped(facts.method)}, tensor by tensor: {sizes}.",
        "**Nothing was verified by running the model.** It was not built, no text was read, and its quality was not "
        "measured. The stored codes were read back and are equal to the computed ones. Programs that know the "
        f"architecture and read format {facts.form} load it; none was run.",
        *tables,
    ]
    write_text(folder / FILE, "\n\n".join(parts) + "\n")


def base_metadata(source: str) -> dict[str, Any]:
    """Read license and language from the card of the base model; empty if there is no card with metadata.

    A model of the hub was fetched for the run; its folder in the cache is used.
    """
    source, revision = split_revision(source)
    path = Path(expanduser(source)) / FILE
    if _on_hub(source):
        from huggingface_hub import try_to_load_from_cache  # slow to import and not needed for local models

        cached = try_to_load_from_cache(source, FILE, revision=revision)
        path = Path(cached) if isinstance(cached, str) else path
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    front = re.match(r"---\n(.*?)^---$", text, re.DOTALL | re.MULTILINE)
    try:
        metadata = plain_values(front[1]) if front else None
    except (yaml.YAMLError, ValueError):
        return {}
    return {key: metadata[key] for key in INHERITED if key in metadata} if isinstance(metadata, dict) else {}


def _on_hub(source: str) -> bool:
    """Whether the source is a hub id, and neither a folder nor a file."""
    return bool(HUB_ID.fullmatch(source)) and not source.endswith(".gguf") and not Path(expanduser(source)).exists()
