"""Section: the resolved recipe, digests and versions, to reproduce the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import yaml

from compress.data.records import TextUse
from compress.report.page.blocks import Code, Details, PageBlock, Prose, TextTable
from compress.report.sections.base import Section, table
from compress.results.result import RunResult


class ReproductionSection(Section):
    """The recipe as YAML, and a table of digests and versions."""

    title: ClassVar[str] = "Reproduction"
    order: ClassVar[int] = 100

    def render(self, result: RunResult) -> str:
        return f"```yaml\n{recipe_of(result)}```\n\n{table(('', ''), rows(result))}"

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        text = (
            f"The recipe is in the folder of this file. With compress {result.compress}, this command makes the same "
            "checkpoint:"
        )
        return [
            Prose(text),
            Code("compress run recipe.yaml"),
            Details("The recipe with all options", [Code(recipe_of(result))]),
            Details("Digests and versions", [TextTable(("", ""), rows(result), frozenset({1}))]),
        ]


def recipe_of(result: RunResult) -> str:
    """Return the resolved recipe as YAML."""
    return yaml.safe_dump(result.reproduce.recipe, sort_keys=False, allow_unicode=True)


def described(text: TextUse) -> str:
    """Describe a text: name, forms of its rows, sizes, chat template, digest."""
    facts = [text.text, *text.forms]
    skipped = f" ({text.skipped} blank rows skipped)" if text.skipped else ""
    if text.share is not None:
        facts.append(f"{text.share.text}{skipped}")
        facts += [f"{text.documents} documents read as a stream"] if text.streamed else []
    elif text.documents is not None:
        facts.append(f"{text.documents} documents{' read as a stream' if text.streamed else ''}{skipped}")
    if text.tokens is not None:
        facts.append(f"{text.tokens} tokens")
    if text.packing is False:
        facts.append("one document per sequence")
    if text.max_tokens_per_document is not None:
        facts.append(f"at most {text.max_tokens_per_document} tokens per document")
    if text.bos:
        facts.append("each sequence begins with the beginning-of-sequence token")
    if text.template is not None:
        facts.append(f"chat template: {text.template}")
    whole = "sha256" if text.share is None else "sha256 of the whole text"
    digest = "sha256 of what was read" if text.streamed else whole
    return ", ".join([*facts, f"{text.sequences} sequences of {text.length} tokens", f"{digest} {text.sha256}"])


def rows(result: RunResult) -> list[tuple[str, str]]:
    """List rows (name, digest or version)."""
    reproduce = result.reproduce
    rows = [
        ("compress", result.compress),
        ("checkpoint sha256", result.checkpoint_sha256),
        ("model fingerprint", result.model.fingerprint),
        *((("model commit", result.model.commit),) if result.model.commit else ()),
        ("calibration sha256", reproduce.calibration_sha256),
        *((f"{text.part} text", described(text)) for text in reproduce.texts),
        ("computed in, stored in", f"{reproduce.compute_dtype}, {reproduce.storage_dtype}"),
        ("device, threads, kernels", f"{reproduce.device}, {reproduce.threads}, {reproduce.kernels}"),
        ("python, platform", f"{reproduce.python}, {reproduce.platform}"),
    ]
    rows += [(f"source of {key}, sha256", digest) for key, digest in reproduce.code.items()]
    return rows + [(name, version) for name, version in reproduce.packages.items() if version]
