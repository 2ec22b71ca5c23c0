"""A report in which every section of the page has content, made without a model."""

from __future__ import annotations

import math
from typing import Any

BLOCKS = 12
KINDS = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"
HOSTILE = "<script>alert(1)</script>"


def sample(name: str = "org/model") -> dict[str, Any]:
    """The values of a report.json. name: of the model, a prompt, a task, and others that come from outside."""
    return {
        "compress": "1.2.3",
        "model": {"source": name, "class": "Model", "fingerprint": "f1" * 32},
        "size": {
            "dense_bytes": 538_100_000,
            "tensor_bytes": 172_000_000,
            "checkpoint_bytes": 172_400_000,
            "compressed_layers": BLOCKS * len(KINDS),
            "compressed_weights": 4_000_000,
            "compressed_bytes": 2_200_000,
            "bits_per_weight": 4.4,
        },
        "layers": layers(),
        "costs": {
            "calibration text": {"seconds": 1.26, "peak_bytes": 470_000_000},
            "passes[0] sparsegpt": {"seconds": 263.0, "peak_bytes": 1_120_000_000},
            "passes[1] gptq": {"seconds": 4200.0, "peak_bytes": 1_260_000_000},
            "save": {"seconds": 0.032, "peak_bytes": 980_000_000},
        },
        "training": {"passes[2] distill": training()},
        "predicted": {"tensor_bytes": 172_000_000, "memory_bytes": 1_300_000_000},
        "formats": {
            "gguf": {
                "folder": "gguf",
                "tensor_bytes": 171_000_000,
                "checkpoint_bytes": 171_500_000,
                "layers": [
                    {"name": name, "before": "int4 (groups of 64)", "after": "Q4_0", "count": 30, "error": 0.01},
                ],
                "verified": {"layers": 3, "own": 0.0, "transformers": 1e-5, "skipped": None},
                "files": {"model.gguf": "g1" * 32},
                "checkpoint_sha256": "g2" * 32,
            }
        },
        "verified": {"layers": 3, "own": 0.0, "transformers": 1e-5, "skipped": None},
        "journal": journal(name),
        "reproduce": {
            "recipe": {
                "model": name,
                "passes": [
                    {"sparsegpt": {"targets": ["*.mlp.*"], "pattern": "2:4", "damping": 0.01}},
                    {"gptq": {"targets": ["*"], "weights": "int4", "group_size": 64, "symmetric": False}},
                    {"distill": {"steps": 40}},
                ],
                "save": {"format": "native"},
            },
            "fingerprint": "r1" * 32,
            "code": {"gptq": "s2" * 32},
            "calibration_sha256": "c1" * 32,
            "compute_dtype": "float32",
            "storage_dtype": "bfloat16",
            "device": "cpu",
            "threads": 2,
            "kernels": "generic",
            "python": "3.11.2",
            "platform": "Linux",
            "packages": {"torch": "2.0", "gguf": None},
        },
        "files": {"config.json": "h1"},
        "checkpoint_sha256": "e3" * 32,
        "kv_cache": {
            "bytes_per_token": {"before": 7680.0, "after": 4080.0},
            "simulated": True,
            "stated": True,
            "attentions": {},
            "summaries": ["Keys and values are quantized as they enter the cache."],
            "of": {"keys, int8 per attention": {"attentions": 12, "mean_error": 0.01, "largest_error": 0.02}},
        },
        "sparsity": {"asked": 0.5, "due": 0.5, "achieved": 0.5, "layers": sparsity()},
        "perplexity": [text("embedded", 0.0812, 0.0041), text("wikitext", 0.0013, 0.0021)],
        "agreement": [agreement(name)],
        "tasks": tasks(name),
        "generation": generation(name),
        "sensitivity": sensitivity(name),
        "speed": {
            "models": {"base": speed(21.4, 9e8, "torch"), "compressed": speed(48.9, 3e8, "int4")},
            "instruction_set": "avx2",
            "threads": 2,
            "read_bandwidth": 2.1e10,
        },
    }


def layers() -> list[dict[str, Any]]:
    """Two passes; the errors rise with the depth, and two layers have histograms."""
    found: list[dict[str, Any]] = []
    for by, scale in (("passes[0] sparsegpt", 0.2), ("passes[1] gptq", 0.05)):
        for block in range(BLOCKS):
            for i, kind in enumerate(KINDS):
                error = scale * (1 + 0.1 * i) * (1 + 0.06 * block + 0.15 * math.sin(block * (i + 1)))
                found.append({"layer": f"model.layers.{block}.{kind}", "by": by, "error": error, "sparsity": 0.5})
    bell = [round(4000 * math.exp(-((i - 24) ** 2) / 40)) for i in range(49)]
    after = [0 if i % 3 else sum(bell[max(i - 1, 0) : i + 2]) for i in range(49)]
    for row in found[-2:]:
        weights = {"limit": 0.742, "before": bell, "after": after}
        inputs = {"limit": 11.6, "before": bell, "after": bell}
        row["histograms"] = {"weights": weights, "inputs": inputs}
    return found


def sensitivity(name: str) -> dict[str, Any]:
    """Two grids; the first and the last blocks are sensitive."""
    found = [
        {
            "name": f"model.layers.{block}.{kind}",
            "choice": choice,
            "weights": 4096,
            "bits": bits,
            "kl": scale * (1 + i) * math.exp(abs(block - BLOCKS / 2) / 2),
            "kl_stderr": scale / 3,
            "loss": scale,
            "loss_stderr": None,
        }
        for choice, bits, scale in (("int3", 3.5, 1e-3), ("int4", 4.5, 1e-4))
        for block in range(BLOCKS)
        for i, kind in enumerate(KINDS)
    ]
    return {
        "compress": "1.2.3",
        "model": name,
        "fingerprint": "f1" * 32,
        "text": "embedded",
        "windows": 8,
        "length": 128,
        "level": "layer",
        "choices": {grid: {"rtn": {"weights": grid}} for grid in ("int3", "int4")},
        "found": found,
    }


def sparsity() -> dict[str, dict[str, float]]:
    """The least zeros in the first block."""
    return {
        f"model.layers.{block}.{kind}": {"asked": 0.5, "due": 0.5, "achieved": 0.4 + 0.2 * block / BLOCKS}
        for block in range(BLOCKS)
        for kind in KINDS[4:]
    }


def training() -> dict[str, Any]:
    """Forty steps with held-out losses."""
    curve: list[dict[str, float]] = []
    for step in range(1, 41):
        curve.append({"step": step, "loss": 0.3 + math.exp(-step / 10) + 0.05 * math.sin(7.0 * step), "rate": 1e-4})
        if step % 10 == 0:
            curve.append({"step": step, "held_out": 0.36 + math.exp(-step / 10)})
    return {
        "first_loss": 1.02,
        "last_loss": 0.33,
        "steps": 40,
        "of": 40,
        "trained": {"weights": 4},
        "seconds": 71.0,
        "held_out": [0],
        "best": {"step": 40, "held_out": 0.378},
        "curve": curve,
    }


def text(name: str, loss: float, error: float) -> dict[str, Any]:
    """A text with its divergence."""
    score = {
        "tokens": 8176,
        "seconds": 1.0,
        "of": "next tokens",
        "stderr": 0.11,
        "bits_per_byte": 0.94,
        "bits_stderr": 0.04,
    }
    positions = [
        {"first": 1 << i, "last": (1 << (i + 1)) - 1, "kl": 0.05 + 0.01 * i, "agreement": 0.9} for i in range(9)
    ]
    return {
        "text": name,
        "windows": 16,
        "length": 512,
        "sha256": "t1" * 32,
        "base": {**score, "loss": 2.709, "perplexity": 15.02},
        "compressed": {**score, "loss": 2.709 + loss, "perplexity": 15.02 * math.exp(loss)},
        "difference": {"loss": loss, "stderr": error},
        "divergence": {
            "mean": 0.0812,
            "stderr": 0.0031,
            "median": 0.0321,
            "p99": 0.71,
            "agreement": 0.884,
            "agreement_stderr": 0.004,
            "top_k": 128,
            "by_position": positions,
        },
    }


def agreement(name: str) -> dict[str, Any]:
    measures = {"cosine": {"value": 0.987, "stderr": 0.0003}, "rank": {"value": 0.99, "stderr": None}}
    facts = {"windows": 64, "length": 128, "sha256": "a3" * 32}
    return {"text": name, **facts, "compared": "embeddings", "measures": measures}


def tasks(name: str) -> dict[str, Any]:
    """A task that got worse, one that did not, one whose items have no values, and one that failed."""

    def score(task: str, change: float, low: float, high: float, flips: tuple[int, int], p: float) -> dict[str, Any]:
        paired = {
            "difference": change,
            "stderr": 0.01,
            "low": low,
            "high": high,
            "gained": flips[0],
            "lost": flips[1],
            "p": p,
        }
        return {
            "task": task,
            "metric": "acc",
            "items": 400,
            "of": 2000,
            "fewshot": 0,
            "higher_is_better": True,
            "base": 0.61,
            "base_stderr": 0.024,
            "compressed": 0.61 + change,
            "compressed_stderr": 0.024,
            "paired": paired,
        }

    scores = [
        score("arc_easy", -0.0425, -0.071, -0.014, (8, 25), 0.0046),
        score(name, 0.005, -0.018, 0.028, (12, 10), 0.83),
        {**score("lambada_openai", 1.2, 0, 0, (0, 0), 1), "metric": "perplexity", "paired": None},
    ]
    return {
        "scores": scores,
        "failed": {"boolq": f"no data in {name}"},
        "chat_template": False,
        "limit": 400,
        "seed": 1,
        "lm_eval": "0.4.9",
    }


def generation(name: str) -> dict[str, Any]:
    """An answer that changed and one that did not."""

    def answer(prompt: str, text: str) -> dict[str, Any]:
        return {"prompt": prompt, "text": text, "tokens": 9, "ended": True, "repetition": 0.02}

    base = [answer("What is the capital of France?", "The capital of France is Paris."), answer(name, f"One.\n{name}")]
    changed = [base[0], answer(name, "Two.\nTwo.\nTwo.")]
    return {
        "prompts": 2,
        "longest": 96,
        "agreement": 41.5,
        "agreement_stderr": 9.0,
        "same": 0.5,
        "ended": (1.0, 0.5),
        "repetition": (0.02, 0.31),
        "base": base,
        "compressed": changed,
    }


def speed(decode: float, read: float, kernel: str) -> dict[str, Any]:
    """The speed of one model."""
    return {
        "load_seconds": None,
        "resident_bytes": None,
        "decode": {"1": decode, "8": 3 * decode},
        "prefill": 310.0,
        "token_bytes": int(read),
        "bandwidth_share": 0.7,
        "kernels": {kernel: 72},
        "dtype": "float32",
    }


def journal(name: str) -> dict[str, Any]:
    """A fallback at many places, a note, and blocks that were reconstructed."""
    few = "experts saw few calibration tokens; use more or longer sequences"
    entries = [
        {"kind": "note", "where": name, "message": f"one fold was dropped in {name}", "figures": {}},
        *(
            {"kind": "fallback", "where": f"passes[1] gptq model.layers.{i}", "message": few, "figures": {"tokens": i}}
            for i in range(BLOCKS)
        ),
        *(
            {
                "kind": "note",
                "where": f"passes[3] signround model.layers.{i}",
                "message": "block error",
                "figures": {"start": 0.04 + 0.01 * i, "learned": 0.03 + 0.008 * i},
            }
            for i in range(BLOCKS)
        ),
    ]
    return {"counts": {"note": 1 + BLOCKS, "fallback": BLOCKS}, "entries": entries}
