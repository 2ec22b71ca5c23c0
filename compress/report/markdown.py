"""report.json, report.md and, where something was trained, its curves on disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from compress.evaluate.kv_cache import who_rounds
from compress.formats.containers.files import write_json, write_text
from compress.model.objective import NEXT_TOKENS
from compress.numerics.dtypes import DTYPES
from compress.report.curves import picture, sparks

CURVES = "training.svg"
MB = 1e6
WORST = 10  # layers listed in report.md; all are in report.json


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write report.json, report.md and training.svg atomically."""
    write_json(folder / "report.json", report)
    if report["training"]:
        write_text(folder / CURVES, picture(report["training"]))
    write_text(folder / "report.md", markdown(report))


def markdown(report: dict[str, Any]) -> str:
    """The report for people: what it cost, what it saved, where, and how to do it again."""
    sections = [
        f"# {report['model']['source']}, compressed",
        "## Size and quality\n\n" + table(("", "before", "after", "ratio"), evidence(report)),
        "## Time and memory\n\n" + table(("phase", "seconds", "peak memory, MB"), costs(report)),
        "## Checks\n\n" + "\n".join(f"- {line}" for line in checks(report)),
        "## Relative output error of layers\n\n"
        + table(("pass", "layers", "mean", "largest", "sparsity"), by_pass(report)),
        f"The {WORST} largest:\n\n" + table(("layer", "pass", "error"), worst(report)),
        *sparsity(report),
        *kv_cache(report),
        *training(report),
        *reconstruction(report),
        "## Journal\n\n" + ("\n".join(journal(report)) or "Nothing was done another way than asked."),
        "## To do it again\n\n```yaml\n" + yaml.safe_dump(report["reproduce"]["recipe"], sort_keys=False) + "```",
        table(("", ""), reproduction(report)),
    ]
    return "\n\n".join(sections) + "\n"


def evidence(report: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Rows (what, before, after, ratio): bytes, bits per weight, perplexity per text."""
    size = report["size"]
    dense = size["dense_bytes"]
    bits = 8 * DTYPES[report["reproduce"]["storage_dtype"]].itemsize
    rows = [
        (
            "checkpoint, MB",
            f"{dense / MB:.1f}",
            f"{size['checkpoint_bytes'] / MB:.1f}",
            f"{dense / size['checkpoint_bytes']:.2f}x smaller",
        ),
        (
            f"bits per weight, {size['compressed_layers']} layers",
            f"{bits:.2f}",
            f"{size['bits_per_weight']:.3f}",
            f"{bits / size['bits_per_weight']:.2f}x smaller",
        ),
    ]
    if report["kv_cache"] is not None:
        before, after = (report["kv_cache"]["bytes_per_token"][key] for key in ("before", "after"))
        rows.append(("KV cache, bytes per token", f"{before:g}", f"{after:g}", f"{before / after:.2f}x smaller"))
    for text in report["quality"]:
        before, after = text["base"]["perplexity"], text["compressed"]["perplexity"]
        of = text["base"]["of"]
        kind = "perplexity" if of == NEXT_TOKENS.of else f"perplexity of {of}"
        name = f"{kind}, {text['text']} ({text['windows']} x {text['length']} tokens)"
        rows.append((name, f"{before:.2f}", f"{after:.2f}", f"{after / before:.3f}x"))
    return rows


def costs(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Rows (phase, seconds, MB)."""
    return [(n, f"{c['seconds']:.1f}", f"{c['peak_bytes'] / MB:.0f}") for n, c in report["costs"].items()]


def checks(report: dict[str, Any]) -> list[str]:
    """What was verified, in words."""
    found, size, predicted = report["verified"], report["size"], report["predicted"]["tensor_bytes"]
    as_planned = "as predicted by the plan"
    if predicted != size["tensor_bytes"]:
        as_planned = f"as layers ended; {predicted} were predicted before calibration decided on some"
    lines = [
        f"tensor bytes: {size['tensor_bytes']}, {as_planned}",
        f"codes of {found['layers']} layers read back bit for bit",
        f"reloaded by compress.load: logits differ by at most {found['own']:.3g}",
    ]
    if found["transformers"] is None:
        lines.append(f"not reloaded by transformers: {found['skipped']}")
    else:
        lines.append(f"reloaded by transformers: logits differ by at most {found['transformers']:.3g}, weights equal")
    return lines


def by_pass(report: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Rows (pass, layers, mean and largest relative error of layer outputs, share of zeros)."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in report["layers"]:
        groups[result["by"]].append(result)
    rows = []
    for name, results in groups.items():
        errors = [r["error"] for r in results if r["error"] is not None] or [float("nan")]
        zeros = sum(r["sparsity"] for r in results) / len(results)
        rows.append(
            (
                name,
                str(len(results)),
                f"{sum(errors) / len(errors):.4f}",
                f"{max(errors):.4f}",
                f"{zeros:.3f}",
            )
        )
    return rows


def sparsity(report: dict[str, Any]) -> list[str]:
    """What was asked and what is in the checkpoint, over all pruned layers and where it is least and most."""
    found = report["sparsity"]
    if found is None:
        return []
    layers = sorted(found["layers"].items(), key=lambda item: item[1]["achieved"])
    shown = {"all, by weight": found, f"least: {layers[0][0]}": layers[0][1], f"most: {layers[-1][0]}": layers[-1][1]}
    rows = [(name, *(f"{one[key]:.4f}" for key in ("asked", "due", "achieved"))) for name, one in shown.items()]
    record = "due: in whole units of the pattern, its dense tail apart; achieved: zeros counted in the checkpoint."
    return [
        f"## Sparsity\n\nOf {len(layers)} layers; {record}\n\n" + table(("layers", "asked", "due", "achieved"), rows)
    ]


def kv_cache(report: dict[str, Any]) -> list[str]:
    """How keys and values are rounded, what that does to them, and who knows of it; nothing where none are."""
    found = report["kv_cache"]
    if found is None:
        return []
    rows = [
        (kind, str(row["attentions"]), f"{row['mean_error']:.4f}", f"{row['largest_error']:.4f}")
        for kind, row in found["of"].items()
    ]
    return [f"## KV cache\n\n{who_rounds(found)}\n\n" + table(("rounded", "attentions", "mean error", "largest"), rows)]


def training(report: dict[str, Any]) -> list[str]:
    """A section on the passes that trained; none where there were none."""
    rows = []
    for label, record in report["training"].items():
        best = record["best"]
        held = "none" if best is None else f"{best['held_out']:.4g} (step {best['step']})"
        losses = f"{record['first_loss']:.4g}", f"{record['last_loss']:.4g}"
        rows.append((label, str(record["steps"]), *losses, held, f"{record['seconds']:.1f}"))
    head = ("pass", "steps", "loss, first quarter", "last quarter", "best held out", "seconds")
    curves = f"```\n{sparks(report['training'])}\n```\n\n![training]({CURVES})"
    return [f"## Training\n\n{table(head, rows)}\n\n{curves}"] if rows else []


def reconstruction(report: dict[str, Any]) -> list[str]:
    """A section on the passes that learned block by block: the error of each block before and after, in the order of
    the model; none where there were none.
    """
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for entry in report["journal"]["entries"]:
        figures = entry["figures"]
        if {"start", "learned"} <= figures.keys():
            label, _, block = entry["where"].rpartition(" ")
            found[label][block] = {"before": figures["start"], "after": min(figures["start"], figures["learned"])}
    curves = {
        f"{label}: {len(blocks)} blocks": {"curve": [{"step": i, **record} for i, record in enumerate(blocks.values())]}
        for label, blocks in found.items()
    }
    text = "The error of each block's output, from the first to the last, before and after learning."
    return [f"## Learned block by block\n\n{text}\n\n```\n{sparks(curves)}\n```"] if curves else []


def worst(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The layers whose output a pass changed most."""
    known = [r for r in report["layers"] if r["error"] is not None]
    known.sort(key=lambda r: -r["error"])
    return [(r["layer"], r["by"], f"{r['error']:.4f}") for r in known[:WORST]]


def journal(report: dict[str, Any]) -> list[str]:
    """Every entry once, with how often it came."""
    counts: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in report["journal"]["entries"]:
        counts[entry["kind"], entry["message"]].append(entry["where"])
    return [
        f"- {kind}: {message} ({places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''})"
        for (kind, message), places in counts.items()
    ]


def reproduction(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of hashes and versions."""
    again = report["reproduce"]
    rows = [
        ("compress", report["compress"]),
        ("checkpoint sha256", report["checkpoint_sha256"]),
        ("model fingerprint", report["model"]["fingerprint"]),
        ("calibration sha256", again["calibration_sha256"]),
        ("computed in, stored in", f"{again['compute_dtype']}, {again['storage_dtype']}"),
        ("device, threads", f"{again['device']}, {again['threads']}"),
        ("python, platform", f"{again['python']}, {again['platform']}"),
    ]
    return rows + [(name, version) for name, version in again["packages"].items() if version]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
