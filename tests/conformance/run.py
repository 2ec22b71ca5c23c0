"""Owners read what compress writes, and compress reads what they write: a table of results (`make conformance`).

Each owner has a virtual environment of its own in the cache folder (`owners.py`). Checkpoints (`cases.py`) are made of
the pico model of the tests, or of the models given by --model. A checkpoint is read by its owner and by `compress.load`.
The result of each row: the greatest difference of dequantized weights, 0 for bit-equal ones, and of logits relative to
the largest logit, which must be below the tolerance of the row. A server answers with log-probabilities and greedy
tokens instead: the row compares those, and the negative log-likelihood (NLL) of the token ids.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import yaml
from cases import Case, cases, tiny_model
from gguf_families import ENCODERS, TEXT, gguf_model, word_pieces
from owners import HERE, OWNERS, answered
from safetensors.torch import load_file, save_file
from table import READERS, TABLE, Row, line_of, merged, programs_of, rows_of, with_programs

import compress
from compress.checkpoint.formats import FORMATS
from compress.errors import CompressError
from compress.layers.linear import CompressedLinear
from compress.numerics.dtypes import DTYPES

PICO = HERE.parent / "pico" / "model"
TOKENS, SEQUENCES = 48, 8
ALL_EXPERTS = {"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
"""Inputs of 8 bits change which experts a token takes, and so its logits."""


@dataclass(frozen=True)
class Place:
    """Where things lie. source: the dense model. name: of it. cache: environments. work: checkpoints and answers."""

    source: Path
    name: str
    cache: Path
    work: Path

    @property
    def ids(self) -> Path:
        """The token ids of calibration and comparison."""
        return self.work / f"{self.name}.ids"

    def job(self, case: Case) -> dict[str, str]:
        """The paths of a case, for scripts."""
        label = "".join(c if c.isalnum() else "-" for c in case.label)
        stem = self.work / f"{self.name}-{case.writer}-{case.format}-{case.reader.name}-{label}"
        return {
            "source": str(self.source),
            "folder": str(stem),
            "ids": str(self.ids),
            "out": f"{stem}.safetensors",
            "kind": case.label,
            "text": TEXT,
            "dtype": case.dtype or case.reader.dtype,
        }


def write(place: Place, case: Case) -> None:
    """Compress the model and save it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from compress.recipe.schema import read_passes

    if case.family is None:
        model = AutoModelForCausalLM.from_pretrained(place.source, dtype=torch.float32)
    else:
        gguf = case.format == "gguf"
        model = gguf_model(case.family, **ALL_EXPERTS) if gguf else tiny_model(case.family, case.reader.server)
    ids = load_file(place.ids)["ids"].repeat(SEQUENCES, 1)
    rolled = torch.stack([row.roll(i) for i, row in enumerate(ids)])
    compress.apply(model, read_passes(list(case.passes)), calibration=rolled)
    tokenizer = word_pieces() if case.family in ENCODERS else AutoTokenizer.from_pretrained(place.source)
    compress.save(model, place.job(case)["folder"], case.format, tokenizer)


def write_all(place: Place, chosen: Sequence[Case]) -> dict[Case, str]:
    """Write all checkpoints; returns the errors."""
    errors = {}
    for case in chosen:
        try:
            if case.writer == "compress":
                write(place, case)
        except CompressError as error:
            errors[case] = str(error)
    for name in {case.writer for case in chosen} - {"compress"}:
        mine = [case for case in chosen if case.writer == name]
        try:
            OWNERS[name].run(f"writers/with_{name}.py", [place.job(case) for case in mine], place.cache, place.work)
        except RuntimeError as error:
            errors |= dict.fromkeys(mine, str(error))
    for case in chosen:
        failed = Path(place.job(case)["out"] + ".error")
        if failed.exists():
            errors[case] = f"not written: {failed.read_text()}"
    return errors


def read_all(place: Place, chosen: Sequence[Case]) -> dict[Case, str]:
    """Read all checkpoints with their readers; returns the errors."""
    errors = {}
    for owner in dict.fromkeys(case.reader for case in chosen):
        mine = [case for case in chosen if case.reader is owner]
        try:
            jobs = [place.job(case) for case in mine]
            owner.run(f"readers/with_{owner.reader}.py", jobs, place.cache, place.work)
        except RuntimeError as error:
            errors |= dict.fromkeys(mine, str(error))
    return errors


def compare(place: Place, case: Case) -> tuple[str, str, bool]:
    """(weights, logits, agreement) of the reader and `compress.load`."""
    job, dtype, form = place.job(case), case.reader.dtype, FORMATS[case.format]
    found = answered(job["out"])
    model, tokenizer = compress.load(job["folder"], dtype)
    with torch.no_grad():
        if case.family in ENCODERS:  # the embedding of a text is the mean of its hidden states
            logits = model(input_ids=torch.tensor([tokenizer(TEXT).input_ids])).last_hidden_state.mean(1)
        else:
            logits = model(input_ids=load_file(place.ids)["ids"]).logits.float()
    modules = {name.removesuffix(".table"): module for name, module in model.named_modules()}  # of embeddings
    layers = {name: module for name, module in modules.items() if isinstance(module, CompressedLinear)}
    worst, counted = 0.0, 0
    for name, layer in layers.items():
        if f"{name}.weight" not in found:
            continue
        theirs, counted = found[f"{name}.weight"].float(), counted + 1
        stored = layer.all_parts[0].dtype
        kinds = dict.fromkeys([DTYPES[dtype], form.reads_in(layer.scheme, DTYPES[dtype], stored), stored])
        gaps = [(theirs - layer.weight_as(kind).float()).abs().max() / theirs.abs().max() for kind in kinds]
        worst = max(worst, float(min(gaps)))
    difference = float((found["logits"] - logits).abs().max() / logits.abs().max())
    exact = 1e-6 if case.format == "bitsandbytes" and case.label.startswith("int8") else 0.0  # reads 1/127, not /127
    weights = "not exposed" if not counted else "bit-equal" if worst == 0 else f"{worst:.1e}"
    agrees = bool(layers) and worst <= exact and difference <= case.limit and counted in (0, len(layers))
    return f"{weights} ({counted} of {len(layers)})", f"{difference:.1e} of {case.limit:.0e}", agrees


def compare_server(place: Place, case: Case) -> tuple[str, str, bool]:
    """(greedy tokens, NLL and log-probabilities, agreement) of a server and `compress.load`.

    A greedy token agrees if no other token is more likely by more than the tolerance, after the same tokens.
    """
    job, ids = place.job(case), load_file(place.ids)["ids"]
    answers = answered(job["out"])
    model, _ = compress.load(job["folder"], "float32")
    theirs, greedy = answers["log_probabilities"].float(), answers["greedy"].long()
    with torch.no_grad():
        ours = model(input_ids=torch.cat([ids, greedy[None]], 1)).logits[0].float().log_softmax(-1)
    prompt, continued = ours[: len(theirs)], ours[len(theirs) : -1]
    largest = float(prompt.abs().max())
    difference = float((theirs - prompt).abs().max()) / largest
    behind = continued.max(-1).values - continued.gather(1, greedy[:, None])[:, 0]
    same = int((behind <= case.limit * largest).sum())
    nll, our_nll = (-float(values.gather(1, ids[0, 1:, None]).mean()) for values in (theirs, prompt))
    text = f"NLL {nll:.4f}, ours {our_nll:.4f}; {difference:.1e} of {case.limit:.0e}"
    return f"{same} of {len(greedy)} greedy tokens", text, difference <= case.limit and same == len(greedy)


def rows(place: Place, chosen: Sequence[Case]) -> Iterator[tuple[str, ...]]:
    """The rows of the table."""
    errors = write_all(place, chosen)
    written = [case for case in chosen if case not in errors]
    errors |= read_all(place, written)
    for case in chosen:
        head = "tiny" if case.family else place.name, case.format, case.label, case.writer, case.reader.name
        try:
            if case in errors:
                raise RuntimeError(errors[case])
            weights, logits, agrees = (compare_server if case.reader.server else compare)(place, case)
            if case.refused is not None:
                raise RuntimeError(f"it is no longer refused, but reads {weights}, {logits}")
            yield (*head, weights, logits, "agrees" if agrees else "DIFFERS")
        except (RuntimeError, CompressError) as error:
            if case.refused is not None and case not in errors and case.refused in str(error):
                yield (*head, "", "", f"refused: {case.refused}")
                continue
            yield (*head, "", "", " ".join(f"FAILED: {error}".split())[:300])


def main() -> int:
    """Print the table; 1 if an owner and compress differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "compress-conformance")
    parser.add_argument("--work", type=Path, required=True, help="an empty folder for checkpoints")
    parser.add_argument("--model", type=Path, action="append", help="a folder with a dense model; repeatable")
    parser.add_argument("--owner", action="append", choices=list(OWNERS), help="only this reader or writer; repeatable")
    parser.add_argument("--only", action="append", help="only checkpoints with this word in their label; repeatable")
    parser.add_argument("--write", action="store_true", help="put the rows into TABLE.md, and readers.yaml after it")
    parser.add_argument("--all", action="store_true", help="make every checkpoint of every model, not of pico alone")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    owners, bad = set(asked.owner or OWNERS), 0
    heads = "model", "format", "checkpoint", "written by", "read by", "weights", "logits", "result"
    print(f"{line_of(heads)}\n|{' --- |' * len(heads)}", flush=True)
    printed: list[Row] = []
    for source in asked.model or [PICO]:
        place = Place(
            source.resolve(), "pico" if source == PICO else source.name, asked.cache.resolve(), asked.work.resolve()
        )
        generator = torch.Generator().manual_seed(0)
        save_file({"ids": torch.randint(0, 1000, (1, TOKENS), generator=generator)}, place.ids)
        chosen = [
            case
            for case in cases()
            if (case.reader.name in owners if case.writer == "compress" else case.writer in owners)
            and (case.everywhere or source == PICO or asked.all)
            and (not asked.only or any(word in case.label for word in asked.only))
        ]
        for row in rows(place, chosen):
            bad += row[-1] != "agrees" and not row[-1].startswith("refused: ")
            printed.append(row)
            print(line_of(row), flush=True)
    if asked.write:
        update(printed)
    return int(bad > 0)


def update(printed: Sequence[Row]) -> None:
    """Put rows into TABLE.md, and the programs that follow from it into readers.yaml."""
    TABLE.write_text(merged(TABLE.read_text(encoding="utf-8"), printed), encoding="utf-8")
    programs = programs_of(rows_of(TABLE.read_text(encoding="utf-8")))
    text = READERS.read_text(encoding="utf-8")
    READERS.write_text(with_programs(text, programs, yaml.safe_load(text)["run"]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
