"""Render a result: report.md and report.html consist of the sections in their order."""

from __future__ import annotations

from compress.report.names import escaped, formats_in, short_name
from compress.report.page.render import PageSection, page
from compress.report.sections import SECTIONS
from compress.results.result import RunResult


def markdown(result: RunResult) -> str:
    """Render a result as Markdown; every figure comes from report.json."""
    parts = [f"# {escaped(result.model.source)}, compressed"]
    for section in sorted(SECTIONS.values(), key=lambda kind: kind.order):
        body = section().render(result)
        if body is not None:
            parts.append(f"## {section.title}\n\n{body}")
    return "\n\n".join(parts) + "\n"


def html(result: RunResult) -> str:
    """Render a result as one HTML page; every figure comes from report.json. The first section has no heading."""
    ordered = sorted(SECTIONS.items(), key=lambda item: item[1].order)
    contents = [(key, kind.title, kind().blocks(result)) for key, kind in ordered]
    (key, _, blocks), *remaining = [content for content in contents if content[2]]
    title = f"{short_name(result.model.source)}, compressed"
    return page(
        title, _subtitle(result), [PageSection(key, "", blocks), *(PageSection(*content) for content in remaining)]
    )


def _subtitle(result: RunResult) -> str:
    """The source of the model, the passes and the format."""
    recipe, source = result.reproduce.recipe, result.model.source
    steps = [key for step in recipe.get("passes", ()) for key in step]
    chain = " → ".join([*steps, *filter(None, [", ".join(formats_in(recipe))])])
    return chain if short_name(source) == source else f"{source}: {chain}"
