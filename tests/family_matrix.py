"""The matrix of passes and families: what becomes of a tiny model of a family under a pass, and the reasons of refusals.

A cell plans its recipe, runs it, saves in format native, loads the checkpoint again and compares the logits.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from encoders import tokenizer
from model_families import ENCODERS, RECORDED, STRUCTURES, VOCAB, tiny_model
from safetensors.torch import save_file
from tolerances import LOGITS
from torch import Tensor
from transformers import PreTrainedModel

import compress
from compress.errors import CompressError
from compress.passes import PASSES
from compress.recipe.schema import read_passes

INT8 = {"weights": "int8", "group_size": "channel"}
ROUNDED_INPUTS = {**INT8, "activations": "int8"}
STEPS = {"steps": 1, "batch": 2}
SPECIAL: dict[str, list[dict]] = {
    "obq": [{"obq": {**INT8, "targets": ["re:.*[.]0[.].*"]}}],
    "owq": [{"owq": {**INT8, "budget": 0.5}}],
    "aqlm": [{"aqlm": {"bits": 2, "length": 2, "rounds": 1}}],
    "squeezellm": [{"squeezellm": {"bits": 2}}],
    "billm": [{"billm": {"block_size": 8, "most_salient": 2}}],
    "spqr": [{"spqr": {"bits": 4}}],
    "quantease": [{"quantease": {**INT8, "iterations": 4}}],
    "bcq": [{"bcq": {"group_size": "channel"}}],
    "quip_sharp": [{"quip_sharp": {"refine": 1}}],
    "qtip": [{"qtip": {"states": 6, "tile_rows": 8, "tile_columns": 8}}],
    "pb_llm": [{"pb_llm": {"group_size": "channel"}}],
    "signround": [{"signround": {**INT8, "iterations": 2}}],
    "block_ap": [{"block_ap": {**INT8, **STEPS}}],
    "omniquant": [{"omniquant": {**ROUNDED_INPUTS, "epochs": 1}}],
    "qat": [{"qat": {**INT8, **STEPS}}],
    "llm_int8": [{"llm_int8": {"threshold": 6.0}}],
    "lorc": [{"rtn": INT8}, {"lorc": {"rank": 1}}],
    "mixed_precision": [{"rtn": ROUNDED_INPUTS}, {"mixed_precision": {"threshold": 20}}],
    "kv_cache": [{"kv_cache": {"keys": "int8", "values": "int8"}}, {"rtn": INT8}],
    "awq": [{"awq": INT8}, {"rtn": INT8}],
    "smoothquant": [{"smoothquant": {}}, {"rtn": ROUNDED_INPUTS}],
    "outlier_suppression": [{"outlier_suppression": {"steps": 2}}, {"rtn": ROUNDED_INPUTS}],
    "fptq": [{"fptq": {"equalize_above": 2}}, {"rtn": INT8}],
    "qllm": [{"qllm": {**ROUNDED_INPUTS, "rank": 1, **STEPS}}, {"rtn": ROUNDED_INPUTS}],
    "rptq": [{"rptq": {"clusters": 4, "activation_scale": "token"}}, {"rtn": INT8}],
    "rotate": [{"rotate": {}}, {"rtn": INT8}],
    "magnitude": [{"magnitude": {"sparsity": 0.3}}],
    "sparsegpt": [{"sparsegpt": {"pattern": "2:4"}}],
    "channel_permutation": [{"channel_permutation": {"pattern": "2:4"}}, {"wanda": {"pattern": "2:4"}}],
    "gmp": [{"gmp": {"sparsity": 0.5, **STEPS}}],
    "sr_ste": [{"sr_ste": {"pattern": "2:4", **STEPS}}],
    "top_kast": [{"top_kast": {"sparsity": 0.5, "backward_sparsity": 0.25, **STEPS}}],
    "iterative_pruning": [{"iterative_pruning": {"sparsity": 0.5, "rounds": 2, **STEPS}}],
    "finetune": [{"finetune": STEPS}],
    "distill": [{"rtn": INT8}, {"distill": {"train": ["scales", "norms"], **STEPS}}],
    "lkd": [{"rtn": INT8}, {"lkd": {"train": ["scales", "norms"], **STEPS}}],
    "drop_blocks": [{"drop_blocks": {"count": 1}}],
    "drop_experts": [{"drop_experts": {"count": 1}}],
    "narrow": [{"narrow": {"ffn": 0.5, "multiple": 2}}],
    "slicegpt": [{"slicegpt": {"sparsity": 0.25, "multiple": 8}}],
}
"""Recipes that models of width 32 need, or other passes beside that of their key."""


def chain_of(key: str) -> list[dict]:
    """The recipe of a pass: a special one, its defaults, or int8 per channel if it rounds to a grid of the recipe."""
    grids = PASSES.kind(key) == "quantize" and "weights" in PASSES[key].model_fields
    return SPECIAL.get(key, [{key: INT8 if grids else {}}])


CHAINS: dict[str, list[dict]] = {key: chain_of(key) for key in PASSES}
"""The passes of the recipe of a pass."""

NEAR = 0.15
"""Of a chain that only rounds to int8, also trained for a step: the logits' largest distance relative to their norm."""
EXACT = {
    "rtn",
    "gptq",
    "hqq",
    "obq",
    "owq",
    "quantease",
    "signround",
    "llm_int8",
    "lorc",
    "mixed_precision",
    "kv_cache",
    "awq",
    "smoothquant",
    "outlier_suppression",
    "fptq",
    "rptq",
    "qllm",
    "rotate",
    "omniquant",
}
"""Passes whose recipe leaves the model's function nearly as it was."""

WORKS, LATE = "+", "*"


@dataclass(frozen=True)
class Outcome:
    """What became of a cell. refused: the message of an error of compress, '' if it works. late: `plan` was content."""

    refused: str = ""
    late: bool = False

    @property
    def code(self) -> str:
        """`WORKS`, or the code of the reason; `LATE` follows it where only the run refuses.

        Raises AssertionError for a message that no reason explains.
        """
        return WORKS if not self.refused else reason_of(self.refused) + (LATE if self.late else "")


REASONS: dict[str, tuple[str, str]] = {
    "weight changes": (
        "changes .* in its forward pass",
        "the model changes a weight in its forward pass, so no linear is what its checkpoint says",
    ),
    "repeated block": ("runs .* several times in a forward pass", "the model runs one block several times"),
    "no experts": (
        "no block of this model has experts of the known form",
        "the model has no experts, or none of two matrices each that its router calls by their numbers",
    ),
    "no cache": ("has no KV cache", "no attention module passes keys and values to a cache"),
    "unreached": (
        "no calibration token reached this layer",
        "the model reads the weight of a linear without calling it, so the linear has no inputs to measure; leave it "
        "out with `ignore`",
    ),
    "hidden width": (
        "cannot express .* hidden channels",
        "the configuration derives other sizes from the hidden width, so no other width is a stock model, and the "
        "tensors that have it cannot be identified",
    ),
    "mixed heads": (
        "would mix heads",
        "queries, keys or values have the hidden width, because the configuration has no head size",
    ),
    "router": ("norm is also read by a router", "a router reads the norm, too, and cannot take its weight"),
    "bias in norm": ("adds a bias .LayerNorm.", "LayerNorm adds a bias, which a rotation does not preserve"),
    "norm on output": (
        "scales the channels of what is added to the hidden states",
        "a norm scales what is added to the hidden states, which a rotation does not preserve",
    ),
    "unread norm": (
        "reads hidden states that are not the output of a norm",
        "a linear reads hidden states that no norm of the hidden width has normed",
    ),
    "other readers": ("other modules read these norms too", "modules other than linears read a norm"),
    "not linear": (
        "a module that reads or writes them is not linear",
        "a module that reads or writes hidden states is not linear",
    ),
    "no values": (
        "no attention layer was found whose values",
        "no linear writes the values of attention alone, head by head",
    ),
    "fused": (
        "input channels cannot be permuted",
        "the feed-forward channels cannot be identified: fused or unequal parts, or a norm across them",
    ),
    "part of a group": (
        "inputs are not a multiple of|group_size .* is larger than its|runs of 8 weights do not divide",
        "a linear has fewer inputs than a group, or part of one; leave it out with `ignore`",
    ),
    "other tiles": (
        "tile_(rows|columns) .* does not divide its",
        "tiles of this size do not divide the outputs or inputs of a linear; choose `tile_rows` and `tile_columns`, or "
        "leave it out with `ignore`",
    ),
    "cannot run": (
        "transformers cannot run the model without the blocks",
        "transformers runs no model without the blocks that were chosen; protect them with `keep`",
    ),
    "no width": (
        "no entry of its configuration sets the width of its feed-forward",
        "no entry of the configuration sets the feed-forward width",
    ),
    "uneven width": (
        "changes other tensors than the coupled channels",
        "the entry of the feed-forward width changes other tensors, too",
    ),
    "kinds of blocks": (
        "no entry of its configuration sets the number of blocks",
        "the configuration has no entry for this number of blocks with the kinds of the blocks that stay",
    ),
    "two stacks": (
        "with one stack of blocks, but",
        "the pass works on the blocks of one stack, and the model has those of an encoder and of a decoder",
    ),
    "position": ("a block depends on its position", "a block computes another function at another position"),
}
"""The code of a reason -> a pattern of the error, and the reason in the document."""


def reason_of(message: str) -> str:
    """The code of a refusal."""
    for code, (pattern, _) in REASONS.items():
        if re.search(pattern, message):
            return code
    raise AssertionError(f"no reason explains: {message}")


class Family:
    """A family's model in a folder, shared by all cells, and its logits. folder: for all files."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        folder.mkdir(parents=True)
        tiny_model(name).save_pretrained(folder / "model")
        if name in ENCODERS:
            tokenizer().save_pretrained(folder / "model")  # training needs a mask token
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(VOCAB, (4, 24), generator=draw)
        self.source, self.ids = folder / "ids.npy", ids[:2]
        if name in RECORDED:
            given = {"input_features": torch.randn(4, 8, 24, generator=draw), "labels": ids[:, :12].contiguous()}
            self.source, self.ids = folder / "recordings.safetensors", {key: each[:2] for key, each in given.items()}
            save_file(given, self.source)
        else:
            np.save(self.source, ids.numpy())

    @cached_property
    def logits(self) -> Tensor:
        """Those of the uncompressed model."""
        return logits_of(tiny_model(self.name), self.ids)

    def cell(self, key: str) -> Outcome:
        """Plan, run and reload the recipe of a pass. Raises AssertionError for a wrong result."""
        recipe = compress.Recipe(
            model=str(self.folder / "model"),
            calibration=compress.Calibration(source=str(self.source), sequences=None, length=None),
            passes=read_passes(CHAINS[key]),
            save=compress.Save(format="native", verify="own"),
            eval=None,
            dtype="float32",
        )
        out = self.folder / "out"
        planned = refusal(lambda: compress.plan(recipe))
        if planned:
            return Outcome(planned)
        shutil.rmtree(out, ignore_errors=True)
        found = []
        if late := refusal(lambda: found.append(compress.run(recipe, out, progress=False))):
            return Outcome(late, late=True)
        own = found[0].report["verified"]["own"]
        assert own <= LOGITS, f"the checkpoint's logits differ by {own} from those that were computed"
        got = logits_of(compress.load(out)[0], self.ids)
        assert got.shape == self.logits.shape and bool(got.isfinite().all())
        error = float((got - self.logits).norm() / self.logits.norm())
        assert error > 0, "nothing changed"
        assert key not in EXACT or error < NEAR, f"the logits moved by {error:.3f}"
        return Outcome()


def refusal(work) -> str:
    """The message of the error of compress with which work ends, or ''."""
    try:
        work()
    except CompressError as error:
        return str(error)
    return ""


def logits_of(model: PreTrainedModel, ids: Tensor | dict[str, Tensor]) -> Tensor:
    """The logits of a model, without a cache; an encoder reads the first half of each row, a decoder the second.

    ids: of a model that hears recordings, the features and labels.
    """
    if isinstance(ids, dict):
        with torch.no_grad():
            return model(**ids).logits.float()
    half = ids.shape[1] // 2
    paired = {"input_ids": ids[:, :half].contiguous(), "labels": ids[:, half:].contiguous()}
    with torch.no_grad():
        return model(**(paired if model.config.is_encoder_decoder else {"input_ids": ids})).logits.float()


# The document

HEAD = """# Which pass works on which family of models

{headline}

## How to read the table

A family is a structure of models. Find yours in the second column; other models of the same structure behave the same.
The last column lists the passes that do not work, each with its reason. [Reasons](#reasons) explains the reasons. All
other passes work.

`plan` refuses such a pass before any work, with an error that says what to write instead. A reason with * depends on the
calibration data, so only `run` refuses it.

Each cell was tried on a tiny random model of the family: plan, run, save in format `native`, load again, and compare with
the logits before saving. A pass that only rounds to 8 bits must also keep the logits close to those of the uncompressed
model. `python eval/benchmarks/families.py --write` tries all cells and writes this page; the slow tests try a sixth of
them. Options of each pass are in `SPECIAL` of `tests/family_matrix.py`.
"""
EVERY = "every pass"
GROUPS = {
    "quantize": PASSES.of_kind("quantize"),
    "prepare, or quantize the cache": [*PASSES.of_kind("prepare"), *PASSES.of_kind("cache")],
    "prune": PASSES.of_kind("prune"),
    "train, or change the shape": [*PASSES.of_kind("train"), *PASSES.of_kind("reshape")],
}
"""The kinds of passes of the document's headline."""


def document(cells: dict[str, dict[str, str]]) -> str:
    """The text of docs/families.md. cells: the code by family and pass."""
    rows = ["| family | structure | does not work |", "| --- | --- | --- |"]
    rows += [f"| {family} | {text} | {refused(cells.get(family, {}))} |" for family, text in STRUCTURES.items()]
    used = {code.removesuffix(LATE) for found in cells.values() for code in found.values()}
    reasons = ["| reason | means |", "| --- | --- |"]
    reasons += [f"| {code} | {text} |" for code, (_, text) in REASONS.items() if code in used]
    parts = [HEAD.format(headline=headline(cells)), "## Families\n", *rows, "\n## Reasons\n", *reasons]
    return "\n".join(parts) + "\n"


def headline(cells: dict[str, dict[str, str]]) -> str:
    """The number of passes of each kind that work on all families, without the families on which no pass works."""
    none = [name for name in STRUCTURES if all(code != WORKS for code in cells.get(name, {}).values())]
    families = [name for name in STRUCTURES if name not in none]
    lines = [f"No pass works on {' and '.join(none)}. On the other {len(families)} of {len(STRUCTURES)} families:\n"]
    lines += ["| passes that | work on all of them | work on some |", "| --- | --- | --- |"]
    for title, keys in GROUPS.items():
        counts = {key: sum(cells.get(name, {}).get(key) == WORKS for name in families) for key in keys}
        some = [f"`{key}` ({count})" for key, count in counts.items() if count < len(families)]
        lines.append(f"| {title} | {len(keys) - len(some)} of {len(keys)} | {', '.join(some)} |")
    return "\n".join(lines)


def refused(codes: dict[str, str]) -> str:
    """The cell of a family: the passes that do not work, by their codes; `read_document` reads it."""
    keys_by_code: dict[str, list[str]] = {}
    for key in CHAINS:
        if codes.get(key, "?") != WORKS:
            keys_by_code.setdefault(codes.get(key, "?"), []).append(f"`{key}`")
    if len(keys_by_code) == 1 and all(len(keys) == len(CHAINS) for keys in keys_by_code.values()):
        return f"{EVERY} ({next(iter(keys_by_code))})"
    return "; ".join(f"{', '.join(keys)} ({code})" for code, keys in keys_by_code.items())


def read_document(text: str) -> dict[str, dict[str, str]]:
    """The cells of the document: the code by family and pass."""
    found: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and cells[0] in STRUCTURES:
            found[cells[0]] = dict.fromkeys(CHAINS, WORKS)
            for keys, code in re.findall(r"([^();]+) \(([^)]+)\)", cells[2]):
                names = CHAINS if keys.strip() == EVERY else re.findall(r"`(\w+)`", keys)
                found[cells[0]] |= dict.fromkeys(names, code)
    return found
