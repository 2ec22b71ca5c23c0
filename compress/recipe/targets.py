"""Recipes to start from: `compress init MODEL --target "4 bits, CPU"`. Imports nothing slow.

`targets/` holds them as data: `_words.yaml` lists the words, and each other file is a start: the words that it answers,
and the commented lines of the recipe. The first start, by file name, that answers all words of a target is taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from shlex import quote
from typing import Any

import yaml

from compress.errors import RecipeError, did_you_mean

WORDS = "_words.yaml"
SEQUENCES, LENGTH = 64, 512
"""Of calibration: minutes for a small model on a CPU."""

EMBEDDED = "embedded"
SELF = "self"
"""Text that the model writes itself, which calibrates but measures nothing."""
BETTER = "comes with Python; better: wikitext, c4, ultrachat, or a .txt or .jsonl file of yours"
CALIBRATION = """\
calibration:                  # text that shows the model's usual inputs; errors on it are kept small
  source: {source:<19} # {about}
{share}  sequences: {sequences:<16} # more lose a little less and take longer
  length: {length:<19} # tokens of a sequence
"""
SELF_SHARE = """\
  self_share: auto            # half of the sequences are sampled from the model itself; 0: none
"""
EVALUATION = """\
eval:                         # of the written checkpoint and of the model as it was; null: none
  {measure:<27} # or wikitext, or a file
  windows: 16                 # pieces of the text; more: smaller errors
  length: {length:<19} # tokens of a window
  # tasks: [arc_easy, piqa]   # zero-shot tasks, after pip install lm-eval
  # generation: true          # compares answers to fixed prompts
"""


@dataclass(frozen=True)
class Start:
    """A recipe to start from.

    Attributes:
        answers: kind -> values of `words` for which the recipe is suitable.
        body: lines of passes and save.
        next: changes to try.
        sequences: number of calibration sequences; None for a chain that needs no text.
    """

    name: str
    summary: str
    answers: Mapping[str, Sequence[str]]
    body: str
    next: Sequence[str]
    sequences: int | None = SEQUENCES

    def answers_to(self, requests: Sequence[tuple[str, str]]) -> bool:
        """Return whether the recipe is suitable for all (kind, value)."""
        return all(value in self.answers.get(kind, ()) for kind, value in requests)


@cache
def words() -> dict[str, dict[str, list[str]]]:
    """Return kind -> value -> the phrases that users write for it, normalized."""
    kinds = yaml.safe_load(_text(WORDS))["kinds"]
    return {
        kind: {value: [_plain(phrase) for phrase in (value, *synonyms)] for value, synonyms in values.items()}
        for kind, values in kinds.items()
    }


@cache
def starts() -> dict[str, Start]:
    """Return all starts by name, in order of preference."""
    start_by_name = {}
    for file in sorted(file.name for file in files("compress.recipe").joinpath("targets").iterdir()):
        if file.endswith(".yaml") and file != WORDS:
            head, _, body = _text(file).partition("---\n")
            values = yaml.safe_load(head)
            data = values.pop("calibration", {})
            sequences = None if data is False else data.get("sequences", SEQUENCES)
            name = file.removesuffix(".yaml").partition("-")[2]
            start_by_name[name] = Start(name, body=body, sequences=sequences, **values)
    return start_by_name


def read_target(target: str) -> list[tuple[str, str]]:
    """Return the (kind, value) of each phrase of a target, such as '4 bits on a CPU'.

    Raises:
        RecipeError: if a word is unknown.
    """
    phrases = {tuple(p.split()): (kind, value) for kind, value, p in _phrases()}
    longest = max(map(len, phrases))
    skipped = set(yaml.safe_load(_text(WORDS))["skipped"])
    requests: list[tuple[str, str]] = []
    for piece in re.split(r"[,;+&]", target):
        tokens = _plain(piece).split()
        while tokens:
            size = next((n for n in range(min(longest, len(tokens)), 0, -1) if tuple(tokens[:n]) in phrases), None)
            if size is None and tokens[0] not in skipped:
                raise RecipeError(f"target {piece.strip()!r}: {tokens[0]!r} is not known{_hint(_plain(piece))}")
            requests += [] if size is None else [phrases[tuple(tokens[:size])]]
            tokens = tokens[size or 1 :]
    if not requests:
        raise RecipeError(f"target {target!r}: says nothing; known: {listed()}")
    return list(dict.fromkeys(requests))


def choose(requests: Sequence[tuple[str, str]]) -> Start:
    """Return the first start that is suitable for all (kind, value).

    Raises:
        RecipeError: if there is none.
    """
    best_start = next((start for start in starts().values() if start.answers_to(requests)), None)
    if best_start is not None:
        return best_start
    hints = []
    for dropped in requests:
        other_requests = [request for request in requests if request != dropped]
        alternatives = [value for value in words()[dropped[0]] if _answered([*other_requests, (dropped[0], value)])]
        if alternatives:
            hints.append(f"with {' and '.join(value for _, value in other_requests)}: {', '.join(alternatives)}")
    spelled = ", ".join(value for _, value in requests)
    raise RecipeError(f"target {spelled!r}: there is no recipe to start from; {'; '.join(hints) or listed()}")


def listed() -> str:
    """Return all values by kind in one line."""
    return "; ".join(f"{kind}: {', '.join(values)}" for kind, values in words().items())


def recipe_text(
    start: Start,
    model: str,
    target: str,
    path: str,
    group_size: int | None = None,
    length: int = LENGTH,
    measure: str = "perplexity",
    source: str = EMBEDDED,
) -> str:
    """Return the commented recipe.

    Args:
        start: recipe to start from.
        model: hub id, local folder or .gguf file.
        target: the words that the recipe answers.
        path: file that the recipe is written to.
        group_size: replaces the group size of the start; None: keep it.
        length: tokens per calibration sequence and evaluation window.
        measure: `perplexity` or `agreement`.
        source: text of the calibration and the evaluation; text sampled from the model is evaluated on the embedded
            text.
    """
    name = path.removesuffix(".yaml").removesuffix(".yml").rpartition("/")[2]
    head = [f"{start.summary[:1].upper()}{start.summary[1:]}.", f"Written by `compress init` for: {_line(target)}."]
    head += ["", f"compress plan {quote(path)}", "    shows the effect on each module, the bytes and the memory"]
    head += [
        f"compress run {quote(path)} -o {quote(f'out/{name}')}",
        "    compresses, verifies and measures; a killed run continues",
    ]
    head += ["", "To change next (`compress passes NAME` lists the options of a pass):"]
    head += [f"- {line}" for line in start.next]
    lines = [f"# {line}".rstrip() for line in head] + [f"model: {_scalar(model)}  # hub id, local folder or .gguf file"]
    body = start.body
    if group_size is not None:
        body = re.sub(r"(group_size: )\d+ *", lambda match: f"{match[1]}{group_size}".ljust(len(match[0])), body)
    if start.sequences is not None:
        about = {"source": _scalar(source), "about": BETTER if source == EMBEDDED else "or another one"}
        about["share"] = "" if source == SELF else SELF_SHARE
        lines.append(CALIBRATION.format(sequences=start.sequences, length=length, **about).rstrip())
    measured = f"{measure}: [{_scalar(EMBEDDED if source == SELF else source)}]"
    return "\n".join([*lines, body.rstrip(), EVALUATION.format(length=length, measure=measured)])


def group_sizes(start: Start) -> list[int]:
    """Return the numeric group sizes of a start."""
    return [int(size) for size in re.findall(r"group_size: (\d+)", start.body)]


def _answered(requests: Sequence[tuple[str, str]]) -> bool:
    return any(start.answers_to(requests) for start in starts().values())


def _phrases() -> Iterator[tuple[str, str, str]]:
    for kind, values in words().items():
        for value, phrases in values.items():
            for phrase in phrases:
                yield kind, value, phrase


def _hint(piece: str) -> str:
    """Return a similar phrase, if there is one, and all values."""
    near = did_you_mean(piece, {phrase for _, _, phrase in _phrases()})
    return f"{near if near.startswith('; did') else ''}; known: {listed()}"


def _plain(phrase: str) -> str:
    return " ".join(re.sub(r"[-\s]+", " ", phrase.lower()).split()).strip(".")


def _line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _scalar(text: str) -> str:
    """Format a text as a YAML scalar: plain if it has only ordinary characters, otherwise quoted."""
    ordinary = re.fullmatch(r"[\w./~+-]+", text) and yaml.safe_load(text) == text
    return text if ordinary else json.dumps(text)


def _text(file: str) -> str:
    return files("compress.recipe").joinpath("targets", file).read_text(encoding="utf-8")


def describe() -> list[tuple[str, Any]]:
    """Return (kind, values) for the help of the command."""
    return [(kind, ", ".join(values)) for kind, values in words().items()]
