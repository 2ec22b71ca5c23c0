"""Section: the resolved recipe, digests and versions, to reproduce the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import yaml

from compress.data.ids import TextUse
from compress.report.page.blocks import Block, Code, Details, Prose, Table
from compress.report.schema import Report
from compress.report.sections.base import Section, table


class Reproduction(Section):
    """The recipe as YAML, and a table of digests and versions."""

    title: ClassVar[str] = "Reproduction"
    order: ClassVar[int] = 100

    def render(self, report: Report) -> str:
        return f"```yaml\n{recipe_of(report)}```\n\n{table(('', ''), rows(report))}"

    def blocks(self, report: Report) -> Sequence[Block]:
        text = f"The recipe stands next to this file. With compress {report.compress}, this makes the same checkpoint:"
        return [
            Prose(text),
            Code("compress run recipe.yaml"),
            Details("The recipe with all options", [Code(recipe_of(report))]),
            Details("Digests and versions", [Table(("", ""), rows(report), frozenset({1}))]),
        ]


def recipe_of(report: Report) -> str:
    """The resolved recipe as YAML."""
    return yaml.safe_dump(report.reproduce.recipe, sort_keys=False, allow_unicode=True)


def described(text: TextUse) -> str:
    """A text in words: name, forms of its rows, sizes, chat template, digest."""
    facts = [text.text, *text.forms]
    if text.documents is not None:
        facts.append(f"{text.documents} documents" + (f" ({text.skipped} blank rows skipped)" if text.skipped else ""))
        facts.append(f"{text.tokens} tokens" + ("" if text.packing else ", one document per sequence"))
    if text.max_tokens_per_document is not None:
        facts.append(f"at most {text.max_tokens_per_document} tokens per document")
    if text.bos:
        facts.append("each sequence begins with the beginning-of-sequence token")
    if text.template is not None:
        facts.append(f"chat template: {text.template}")
    return ", ".join([*facts, f"{text.sequences} sequences of {text.length} tokens", f"sha256 {text.sha256}"])


def rows(report: Report) -> list[tuple[str, str]]:
    """Rows (name, digest or version)."""
    again = report.reproduce
    found = [
        ("compress", report.compress),
        ("checkpoint sha256", report.checkpoint_sha256),
        ("model fingerprint", report.model.fingerprint),
        *((("model commit", report.model.commit),) if report.model.commit else ()),
        ("calibration sha256", again.calibration_sha256),
        *((f"{text.part} text", described(text)) for text in again.texts),
        ("computed in, stored in", f"{again.compute_dtype}, {again.storage_dtype}"),
        ("device, threads", f"{again.device}, {again.threads}"),
        ("python, platform", f"{again.python}, {again.platform}"),
    ]
    found += [(f"source of {key}, sha256", digest) for key, digest in again.code.items()]
    return found + [(name, version) for name, version in again.packages.items() if version]
