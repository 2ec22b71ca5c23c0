"""The rows of the tables of docs/results-all.md and eval/LOG.md: many passes and grids, each as a recipe for quality.py.

    python eval/benchmarks/rows.py [ROW...] --model PATH --test IDS.npy --calibration IDS.npy [--also TEXT] [--threads 1]

Without names all rows are run, one after the other; --list prints them. One JSON line per row, as quality.py prints it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import yaml
from quality import forwarded, run

from compress.passes import PASSES

GROUPS = {"group_size": 64}
ZEROS = {"group_size": 64, "symmetric": False}
BEST = {"act_order": "static", "scale": "mse"}
PAPER_SWEEP = {"act_order": "none", "scale": "absmax", "refine": 0, "normalize_tokens": False, "shrinkage": 0}
PAPER = {**GROUPS, **PAPER_SWEEP}
PLAIN = {**GROUPS, **BEST, "normalize_tokens": False, "refine": 0, "shrinkage": 0}
"""GPTQ without what its defaults add to the sweep; the rows say what they add."""
ROTATED = {"online": "down_proj"}
ALL_ROTATED = {"online": ["down_proj", "o_proj"]}
LEARN = {"train": ["scales", "norms"]}
STEPS = {"steps": 48, "ce_weight": 0, "weight_rate": 0.1}
"""Of passes that train from a teacher: ten minutes of one core at SmolLM2-135M, with 48 sequences of 512 tokens."""

CLIPPED = {"epochs": 5, "learning_rate": 0.02}
"""Of omniquant: a quarter of the paper's epochs at four times its rate."""
INPUTS4 = {"activations": "int4", "activation_clip": 0.9}
NVFP4 = {"weights": "nvfp4", "activations": "nvfp4", "activation_scale": "static"}

CHOICES = [
    {"weights": "int3"},
    {"weights": "int4"},
    {"weights": "int4", "group_size": 32},
    {"weights": "int5"},
    {"weights": "int6"},
    {"weights": "int8"},
]
"""Of layers that share 4.5 bits per weight."""

LEARNED = {"distill": {"train": ["scales", "norms"], "epochs": 4, "learning_rate": 0.003}}

ROWS: dict[str, list[dict]] = {
    "rtn-int8": [{"rtn": {"weights": "int8", "group_size": "channel"}}],
    "rtn-int4": [{"rtn": {"weights": "int4", **GROUPS}}],
    "rtn-int4-zeros": [{"rtn": {"weights": "int4", **ZEROS}}],
    "rtn-int4-g128": [{"rtn": {"weights": "int4", "group_size": 128}}],
    "rtn-int3": [{"rtn": {"weights": "int3", **GROUPS}}],
    "rtn-int3-zeros": [{"rtn": {"weights": "int3", **ZEROS}}],
    "rtn-int2": [{"rtn": {"weights": "int2", **GROUPS}}],
    "rtn-int2-zeros": [{"rtn": {"weights": "int2", **ZEROS}}],
    "rtn-nf4": [{"rtn": {"weights": "nf4", **GROUPS}}],
    "rtn-fp8": [{"rtn": {"weights": "fp8_e4m3", "group_size": "channel"}}],
    "rtn-fp4": [{"rtn": {"weights": "fp4_e2m1", "group_size": 32}}],
    "rtn-mxfp4": [{"rtn": {"weights": "mxfp4"}}],
    "rtn-nvfp4": [{"rtn": {"weights": "nvfp4"}}],
    "llm_int8": [{"llm_int8": {}}],
    "llm_int8-small": [{"llm_int8": {"threshold": 3.0}}],
    "llm_int8-calibrated": [{"llm_int8": {"outliers": "calibrated"}}],
    "llm_int8-float-columns": [{"llm_int8": {"outliers": "calibrated", "float_columns": 8}}],
    "w8a8": [
        {"smoothquant": {"alpha": 0.8}},
        {"gptq": {"weights": "int8", "group_size": "channel", "activations": "int8"}},
    ],
    "w8a8-rotated": [
        {"rotate": ROTATED},
        {"gptq": {"weights": "int8", "group_size": "channel", "activations": "int8"}},
    ],
    "w8a8-rotated-int8-embedding": [
        {"rotate": ROTATED},
        {"gptq": {"weights": "int8", "group_size": "channel", "activations": "int8"}},
        {"rtn": {"weights": "int8", "group_size": "channel", "targets": ["lm_head", "embed_tokens"]}},
    ],
    "w8a8-plain": [{"gptq": {"weights": "int8", "group_size": "channel", "activations": "int8"}}],
    "outlier_suppression-w8a8": [
        {"outlier_suppression": {"steps": 8}},
        {"gptq": {"weights": "int8", "group_size": "channel", "activations": "int8"}},
    ],
    "outlier_suppression-w4a8": [
        {"outlier_suppression": {"weights": "int4", "group_size": 64, "steps": 8}},
        {"gptq": {"weights": "int4", "activations": "int8"}},
    ],
    "fptq-w8a8": [{"fptq": {}}, {"gptq": {"weights": "int8", "group_size": "channel"}}],
    "fptq-w4a8": [{"fptq": {}}, {"gptq": {"weights": "int4"}}],
    "hqq-zeros": [{"hqq": {"weights": "int4", "group_size": 64}}],
    "hqq-float-zeros": [{"hqq": {"weights": "int4", "group_size": 64, "zero_point": "float", "optimize": "zero"}}],
    "awq-zeros": [{"awq": {"weights": "int4", **ZEROS}}, {"rtn": {"weights": "int4", **ZEROS}}],
    "awq-g128": [
        {"awq": {"weights": "int4", "group_size": 128}},
        {"rtn": {"weights": "int4", "group_size": 128}},
    ],
    "awq-gptq-zeros": [
        {"awq": {"weights": "int4", **ZEROS}},
        {"gptq": {"weights": "int4", **ZEROS, "act_order": "static"}},
    ],
    "gptq": [{"gptq": {"weights": "int4"}}],
    "gptq-paper": [{"gptq": {"weights": "int4", **PAPER}}],
    "gptq-absmax": [{"gptq": {"weights": "int4", **PLAIN, "scale": "absmax"}}],
    "gptq-positive": [{"gptq": {"weights": "int4", **PLAIN, "signed_scales": False}}],
    "gptq-mse": [{"gptq": {"weights": "int4", **PLAIN}}],
    "gptq-importance": [{"gptq": {"weights": "int4", **PLAIN, "scale": "importance"}}],
    "gptq-g32": [{"gptq": {"weights": "int4", "group_size": 32}}],
    "gptq-int4-allocated": [{"gptq": {"group_size": 64, "allocate": {"bits": 4.5, "choices": CHOICES}}}],
    "gptq-g128": [{"gptq": {"weights": "int4", "group_size": 128}}],
    "gptq-mse-normalized": [{"gptq": {"weights": "int4", **PLAIN, "normalize_tokens": True}}],
    "gptaq-mse": [{"gptq": {"weights": "int4", **PLAIN, "error": "asymmetric", "alpha": 1.0}}],
    "gptq-int3": [{"gptq": {"weights": "int3"}}],
    "gptq-int3-paper": [{"gptq": {"weights": "int3", **PAPER}}],
    "gptq-int3-positive": [{"gptq": {"weights": "int3", **PLAIN, "signed_scales": False}}],
    "gptq-int3-mse": [{"gptq": {"weights": "int3", **PLAIN}}],
    "gptq-int3-importance": [{"gptq": {"weights": "int3", **PLAIN, "scale": "importance"}}],
    "gptq-int2-g32": [{"gptq": {"weights": "int2", "group_size": 32}}],
    "gptq-int2-zeros": [{"gptq": {"weights": "int2", **PLAIN, "symmetric": False}}],
    "gptq-int2-zeros-normalized": [{"gptq": {"weights": "int2", **ZEROS}}],
    "gptq-int2-zeros-refined": [{"gptq": {"weights": "int2", **PLAIN, "symmetric": False, "refine": 2}}],
    "gptq-int3-g48": [{"gptq": {"weights": "int3", "group_size": 48, **BEST}}],
    "gptq-int3-g32": [{"gptq": {"weights": "int3", "group_size": 32, **BEST}}],
    "lorc-int3-rank5": [{"gptq": {"weights": "int3", **GROUPS, **BEST}}, {"lorc": {"rank": 5}}],
    "lorc-int3-rank19": [{"gptq": {"weights": "int3", **GROUPS, **BEST}}, {"lorc": {"rank": 19}}],
    "lorc-int3-rank19-weight": [
        {"gptq": {"weights": "int3", **GROUPS, **BEST}},
        {"lorc": {"rank": 19, "error": "weight"}},
    ],
    "owq-int3-0.167": [{"owq": {"weights": "int3", **GROUPS, "budget": 0.167}}],
    "owq-int3-0.5": [{"owq": {"weights": "int3", **GROUPS, "budget": 0.5}}],
    "spqr": [{"spqr": {}}],
    "spqr-4": [{"spqr": {"bits": 4}}],
    "gptq-uint3-tile": [{"gptq": {"weights": "uint3_tile", "normalize_tokens": True}}],
    "quantease": [{"quantease": {"weights": "int3", **GROUPS, "outliers": 0.01}}],
    "quip_sharp-3": [{"quip_sharp": {"bits": 3}}],
    "quip_sharp-3-learned": [
        {"quip_sharp": {"bits": 3}},
        {"distill": {**LEARN, "epochs": 3, "learning_rate": 0.002}},
    ],
    "quip_sharp-4": [{"quip_sharp": {"bits": 4}}],
    "quip_sharp": [{"quip_sharp": {}}],
    "quip_sharp-learned": [{"quip_sharp": {}}, {"distill": {**LEARNED["distill"], "epochs": 3}}],
    "qtip": [{"qtip": {}}],
    "qtip-learned": [{"qtip": {}}, {"distill": {**LEARNED["distill"], "epochs": 3}}],
    "qtip-2.5-learned": [{"qtip": {"bits": 2.5, "code": "hyb"}}, {"distill": {**LEARNED["distill"], "epochs": 3}}],
    "qtip-3": [{"qtip": {"bits": 3}}],
    "qtip-3-learned": [{"qtip": {"bits": 3}}, {"distill": {**LEARN, "epochs": 2, "learning_rate": 0.002}}],
    "qtip-4": [{"qtip": {"bits": 4}}],
    "qtip-4-refined": [{"qtip": {"bits": 4, "refine": 1}}],
    "qtip-4-learned": [{"qtip": {"bits": 4}}, {"distill": {**LEARN, "epochs": 2}}],
    "qtip-1-learned": [{"qtip": {"bits": 1}}, {"distill": {**LEARNED["distill"], "epochs": 3}}],
    "qtip-1.5-learned": [{"qtip": {"bits": 1.5, "code": "hyb"}}, {"distill": {**LEARNED["distill"], "epochs": 3}}],
    "qtip-mixed-learned": [
        {"qtip": {"bits": 1, "ignore": ["re:.*down_proj", "re:.*self_attn.*"]}},
        {"qtip": {"bits": 2, "ignore": ["re:.*gate_proj", "re:.*up_proj"]}},
        {"distill": {**LEARNED["distill"], "epochs": 3}},
    ],
    "gptq-ternary-learned": [{"gptq": {"weights": "ternary", "group_size": 64}}, LEARNED],
    "aqlm-learned": [{"aqlm": {"bits": 8, "length": 4}}, {"distill": {**LEARNED["distill"], "epochs": 3}}],
    "aqlm-6-learned": [{"aqlm": {"bits": 8, "length": 6}}, {"distill": {**LEARNED["distill"], "epochs": 3}}],
    "qtip-refined": [{"qtip": {"refine": 1}}],
    "qtip-32x8": [{"qtip": {"tile_rows": 32, "tile_columns": 8}}],
    "qtip-hyb": [{"qtip": {"code": "hyb"}}],
    "bcq-2": [{"bcq": {"bits": 2}}],
    "bcq-2-learned": [{"bcq": {"bits": 2}}, LEARNED],
    "bcq-3-learned": [{"bcq": {"bits": 3}}, LEARNED],
    "billm": [{"billm": {}}],
    "billm-learned": [{"billm": {}}, LEARNED],
    "pb_llm": [{"pb_llm": {}}],
    "pb_llm-learned": [{"pb_llm": {}}, LEARNED],
    "olive": [{"olive": {}}],
    "gobo": [{"gobo": {"bits": 4}}],
    "squeezellm": [{"squeezellm": {"bits": 4}}],
    "olive-compensated": [{"olive": {"compensate": True}}],
    "signround": [{"signround": {"weights": "int4", **GROUPS}}],
    "signround-int3": [{"signround": {"weights": "int3", **GROUPS}}],
    "signround-int2-zeros": [{"signround": {"weights": "int2", **ZEROS}}],
    "block_ap": [{"block_ap": {"weights": "int4", **GROUPS}}],
    "block_ap-int3": [{"block_ap": {"weights": "int3", **GROUPS}}],
    "block_ap-int2-zeros": [{"block_ap": {"weights": "int2", **ZEROS}}],
    "omniquant": [{"omniquant": {"weights": "int4", **GROUPS, **CLIPPED}}],
    "omniquant-gptq": [{"omniquant": {"weights": "int4", **GROUPS, **CLIPPED, "finish": "gptq"}}],
    "omniquant-int3": [{"omniquant": {"weights": "int3", **GROUPS, **CLIPPED}}],
    "omniquant-int3-absmax": [{"omniquant": {"weights": "int3", **GROUPS, "scale": "absmax"}}],
    "omniquant-int3-gptq": [{"omniquant": {"weights": "int3", **GROUPS, **CLIPPED, "finish": "gptq"}}],
    "omniquant-int3-transform": [{"omniquant": {"weights": "int3", **GROUPS, **CLIPPED, "transform": True}}],
    "omniquant-int2-zeros": [{"omniquant": {"weights": "int2", **ZEROS, **CLIPPED}}],
    "omniquant-int2-zeros-gptq": [{"omniquant": {"weights": "int2", **ZEROS, **CLIPPED, "finish": "gptq"}}],
    "omniquant-w4a8": [{"omniquant": {"weights": "int4", **GROUPS, **CLIPPED, "activations": "int8"}}],
    "omniquant-w4a4": [{"omniquant": {"weights": "int4", **GROUPS, **CLIPPED, **INPUTS4}}],
    "omniquant-w4a4-rotated": [
        {"rotate": ALL_ROTATED},
        {"omniquant": {"weights": "int4", **GROUPS, **CLIPPED, **INPUTS4}},
    ],
    "kv-int8": [{"kv_cache": {"keys": "int8", "values": "int8"}}],
    "kv-fp8-static": [{"kv_cache": {"keys": "fp8_e4m3", "values": "fp8_e4m3", "scale": "static"}}],
    "kv-int8-int4-zeros": [{"kv_cache": {"keys": "int8", "values": "int4", "symmetric": False}}],
    "kv-int4-zeros": [{"kv_cache": {"keys": "int4", "values": "int4", "symmetric": False}}],
    "kv-int4-zeros-token": [
        {"kv_cache": {"keys": "int4", "values": "int4", "symmetric": False, "key_group": None}},
    ],
    "kv-int4-zeros-token-transformed": [
        {"kv_cache": {"keys": "int4", "values": "int4", "symmetric": False, "key_group": None, "hadamard": "both"}},
    ],
    "kv-int4-zeros-transformed": [
        {"kv_cache": {"keys": "int4", "values": "int4", "symmetric": False, "hadamard": "both"}},
    ],
    "kv-int3-zeros": [{"kv_cache": {"keys": "int3", "values": "int3", "symmetric": False}}],
    "kv-int3-zeros-transformed": [
        {"kv_cache": {"keys": "int3", "values": "int3", "symmetric": False, "hadamard": "both"}},
    ],
    "kv-int4-keys": [{"kv_cache": {"keys": "int4", "values": "none"}}],
    "kv-int4-keys-token": [{"kv_cache": {"keys": "int4", "values": "none", "key_group": None}}],
    "kv-int3-keys": [{"kv_cache": {"keys": "int3", "values": "none"}}],
    "kv-int3-keys-token": [{"kv_cache": {"keys": "int3", "values": "none", "key_group": None}}],
    "kv-int3-keys-token-transformed": [
        {"kv_cache": {"keys": "int3", "values": "none", "key_group": None, "hadamard": "keys"}},
    ],
    "kv-int3-keys-transformed": [{"kv_cache": {"keys": "int3", "values": "none", "hadamard": "keys"}}],
    "kv-int3-values": [{"kv_cache": {"keys": "none", "values": "int3"}}],
    "kv-int3-values-transformed": [{"kv_cache": {"keys": "none", "values": "int3", "hadamard": "values"}}],
    "kv-kivi-2": [
        {"kv_cache": {"keys": "int2", "values": "int2", "symmetric": False, "key_group": 32, "residual": 128}},
    ],
    "rotate-gptq": [{"rotate": ROTATED}, {"gptq": {"weights": "int4"}}],
    "rotate-gptq-int3": [{"rotate": ROTATED}, {"gptq": {"weights": "int3"}}],
    "w4a4": [{"rotate": ROTATED}, {"gptq": {"weights": "int4", "activations": "int4", "activation_clip": 0.9}}],
    "w4a4-all": [{"rotate": ALL_ROTATED}, {"gptq": {"weights": "int4", "activations": "int4", "activation_clip": 0.9}}],
    "spinquant": [
        {"rotate": {**ALL_ROTATED, "learn": {"steps": 100, "activation_clip": 0.9, "ce_weight": 0.0}}},
        {"gptq": {"weights": "int4", "activations": "int4", "activation_clip": 0.9}},
    ],
    "spinquant-ce": [
        {"rotate": {**ALL_ROTATED, "learn": {"steps": 100, "activation_clip": 0.9}}},
        {"gptq": {"weights": "int4", "activations": "int4", "activation_clip": 0.9}},
    ],
    "w4a4-plain": [{"gptq": {"weights": "int4", "activations": "int4", "activation_clip": 0.9}}],
    "nvfp4": [{"gptq": NVFP4}],
    "nvfp4-token": [{"gptq": {**NVFP4, "activation_scale": "token"}}],
    "nvfp4-learned": [{"gptq": NVFP4}, {"distill": {**LEARN, "epochs": 2}}],
    "mxfp4": [{"gptq": {"weights": "mxfp4", "activations": "mxfp4"}}],
    "mxfp8": [{"rtn": {"weights": "mxfp8", "activations": "mxfp8"}}],
    "w4afp8": [{"gptq": {"weights": "int4", "group_size": 128, "activations": "fp8_e4m3"}}],
    "w4a8": [{"rotate": ROTATED}, {"gptq": {"weights": "int4", "activations": "int8"}}],
    "w8a8-static": [
        {"rtn": {"weights": "int8", "group_size": "channel", "activations": "int8", "activation_scale": "static"}}
    ],
    "w8a8-rptq": [{"rptq": {"activations": "int8"}}, {"gptq": {"weights": "int8", "group_size": "channel"}}],
    "w4a8-rptq": [{"rptq": {"activations": "int8"}}, {"gptq": {"weights": "int4"}}],
    "w8a8-rptq-rtn": [{"rptq": {}}, {"rtn": {"weights": "int8", "group_size": "channel"}}],
    "w8a8-peg": [
        {"rptq": {"grouping": "equal", "clusters": 6}},
        {"rtn": {"weights": "int8", "group_size": "channel"}},
    ],
    "w8a8-peg-token": [
        {"rptq": {"grouping": "equal", "clusters": 6, "activation_scale": "token"}},
        {"rtn": {"weights": "int8", "group_size": "channel"}},
    ],
    "w4a8-peg-token": [
        {"rptq": {"grouping": "equal", "clusters": 6, "activation_scale": "token"}},
        {"gptq": {"weights": "int4"}},
    ],
    "w4a4-rtn-g32": [{"rtn": {"weights": "int4", "group_size": 32, "activations": "int4"}}],
    "w4a4-split": [
        {"qllm": {"weights": "int4", "group_size": 32, "activations": "int4", "rank": 0}},
        {"rtn": {"weights": "int4", "group_size": 32, "activations": "int4"}},
    ],
    "w4a4-qllm": [
        {"qllm": {"weights": "int4", "group_size": 32, "activations": "int4", "epochs": 10}},
        {"rtn": {"weights": "int4", "group_size": 32, "activations": "int4"}},
    ],
    "w4a8-qllm": [
        {"qllm": {"weights": "int4", "group_size": 64, "activations": "int8", "epochs": 10}},
        {"rtn": {"weights": "int4", "group_size": 64, "activations": "int8"}},
    ],
    "w8a8-qllm": [
        {"qllm": {"weights": "int8", "group_size": "channel", "activations": "int8", "epochs": 10}},
        {"rtn": {"weights": "int8", "group_size": "channel", "activations": "int8"}},
    ],
    "w4a4-rotated-rtn": [
        {"rotate": ALL_ROTATED},
        {"rtn": {"weights": "int4", "group_size": 32, "activations": "int4"}},
    ],
    "w4a8-learned": [
        {"gptq": {"weights": "int4", "group_size": 32, "activations": "int8"}},
        {"distill": {**LEARN, "epochs": 2}},
    ],
    "w4a4-learned-shorter": [
        {"rotate": ALL_ROTATED},
        {"gptq": {"weights": "int4", "group_size": 32, "activations": "int4", "activation_clip": 0.9}},
        {"distill": {**LEARN, "epochs": 2}},
    ],
    "w4a4-learned": [
        {"rotate": ALL_ROTATED},
        {"gptq": {"weights": "int4", "group_size": 32, "activations": "int4", "activation_clip": 0.9}},
        {"distill": {**LEARN, "epochs": 4}},
    ],
    "w4a8-plain": [{"gptq": {"weights": "int4", "activations": "int8"}}],
    "best-int4-g192": [{"gptq": {"weights": "int4", "group_size": 192}}, {"distill": {**LEARN, "epochs": 2}}],
    "best-int3-g192": [
        {"gptq": {"weights": "int3", "group_size": 192}},
        {"distill": {**LEARN, "epochs": 3, "learning_rate": 0.002}},
    ],
    "gptq-int8": [{"gptq": {"weights": "int8", "group_size": "channel", **BEST}}],
    "magnitude-20": [{"magnitude": {"sparsity": 0.2, "pattern": "layer"}}],
    "magnitude-30": [{"magnitude": {"sparsity": 0.3, "pattern": "layer"}}],
    "magnitude-40": [{"magnitude": {"sparsity": 0.4, "pattern": "layer"}}],
    "magnitude-50": [{"magnitude": {"sparsity": 0.5, "pattern": "layer"}}],
    "magnitude-60": [{"magnitude": {"sparsity": 0.6, "pattern": "layer"}}],
    "magnitude-2:4": [{"magnitude": {"pattern": "2:4"}}],
    "wanda": [{"wanda": {"sparsity": 0.5}}],
    "wanda-paper": [{"wanda": {"sparsity": 0.5, "repair": 0}}],
    "wanda-2:4-paper": [{"wanda": {"pattern": "2:4", "repair": 0}}],
    "wanda-2:4": [{"wanda": {"pattern": "2:4"}}],
    "wanda-2:4-sequential": [{"wanda": {"pattern": "2:4", "true_sequential": True}}],
    "wanda-60": [{"wanda": {"sparsity": 0.6}}],
    "wanda-60-owl": [{"wanda": {"sparsity": 0.6, "allocate": "owl"}}],
    "wanda-60-sensitivity": [{"wanda": {"sparsity": 0.6, "allocate": "sensitivity"}}],
    "ria": [{"ria": {"sparsity": 0.5}}],
    "ria-2:4": [{"ria": {"pattern": "2:4"}}],
    "alps": [{"alps": {"sparsity": 0.5}}],
    "alps-2:4": [{"alps": {"pattern": "2:4"}}],
    "alps-70": [{"alps": {"sparsity": 0.7}}],
    "sparsegpt": [{"sparsegpt": {"sparsity": 0.5, "pattern": "row"}}],
    "sparsegpt-70": [{"sparsegpt": {"sparsity": 0.7}}],
    "sparsegpt-paper": [{"sparsegpt": {"sparsity": 0.5, "pattern": "row", "repair": 0, "shrinkage": 0}}],
    "sparsegpt-repaired": [{"sparsegpt": {"sparsity": 0.5, "pattern": "row", "repair": 16}}],
    "sparsegpt-owl": [{"sparsegpt": {"sparsity": 0.5, "pattern": "row", "allocate": "owl"}}],
    "sparsegpt-2:4": [{"sparsegpt": {"pattern": "2:4"}}],
    "sparsegpt-2:4-paper": [{"sparsegpt": {"pattern": "2:4", "repair": 0, "shrinkage": 0}}],
    "sparsegpt-2:4-int4": [{"sparsegpt": {"pattern": "2:4", "weights": "int4", "group_size": 64}}],
    "permuted-magnitude-2:4": [
        {"channel_permutation": {"pattern": "2:4", "score": "magnitude"}},
        {"magnitude": {"pattern": "2:4"}},
    ],
    "permuted-wanda-2:4": [
        {"channel_permutation": {"pattern": "2:4", "score": "wanda"}},
        {"wanda": {"pattern": "2:4"}},
    ],
    "permuted-sparsegpt-2:4": [
        {"channel_permutation": {"pattern": "2:4", "score": "wanda"}},
        {"sparsegpt": {"pattern": "2:4"}},
    ],
    "drop-3-blocks": [{"drop_blocks": {"count": 3}}],
    "drop-3-blocks-by-loss": [{"drop_blocks": {"count": 3, "by": "loss", "sequences": 4}}],
    "drop-6-blocks": [{"drop_blocks": {"count": 6}}],
    "narrow-ffn-10": [{"narrow": {"ffn": 0.1, "multiple": 32}}],
    "narrow-ffn-20": [{"narrow": {"ffn": 0.2, "multiple": 32}}],
    "narrow-hidden-10": [{"narrow": {"hidden": 0.1, "multiple": 9}}],
    "slicegpt-10": [{"slicegpt": {"sparsity": 0.1, "multiple": 9}}],
    "slicegpt-20": [{"slicegpt": {"sparsity": 0.2, "multiple": 9}}],
    "gmp-2:4": [{"gmp": {"pattern": "2:4", "end": 0.5, **STEPS}}],
    "sr_ste-2:4": [{"sr_ste": {"pattern": "2:4", **STEPS}}],
    "sparsegpt-sr_ste-2:4": [
        {"sparsegpt": {"pattern": "2:4"}},
        {"sr_ste": {"pattern": "2:4", "regrow": True, **STEPS}},
    ],
    "sparsegpt-distill-2:4": [{"sparsegpt": {"pattern": "2:4"}}, {"distill": STEPS}],
    "qat-int3": [{"qat": {"weights": "int3", **GROUPS, "scale": "mse", **STEPS}}],
    "qat-int2-zeros": [{"qat": {"weights": "int2", **ZEROS, "scale": "mse", **STEPS}}],
    "lkd-int3": [{"gptq": {"weights": "int3", **GROUPS, **BEST}}, {"lkd": {"train": ["scales", "norms"]}}],
    "lkd-int2-zeros": [{"gptq": {"weights": "int2", **ZEROS, **BEST}}, {"lkd": {"train": ["scales", "norms"]}}],
}


UNSHRUNK = (
    "gptq-int3",
    "gptq-int3-unnormalized",
    "quip_sharp",
    "sparsegpt",
    "gptq-int8-unnormalized",
    "w8a8-rotated",
    "outlier_suppression-w8a8",
    "w8a8-unnormalized",
    "w4a8-learned",
    "fptq-w8a8",
    "w8a8-rptq",
    "quip_sharp-4",
    "gptq",
    "best-int4-g192",
    "w4a8",
    "gptq-g128",
    "awq-gptq-zeros-unnormalized",
    "outlier_suppression-w4a8",
    "gptq-unnormalized",
    "w4a8-rptq",
    "fptq-w4a8",
    "w4a4-learned-shorter",
    "olive-compensated",
    "w4a4-all",
    "quip_sharp-3-learned",
    "quantease",
    "best-int3-g192",
    "pb_llm-learned",
    "quip_sharp-learned",
    "permuted-sparsegpt-2:4",
    "sparsegpt-2:4",
    "sparsegpt-2:4-int4",
)
"""Rows that were measured without shrinkage, too."""
ASYMMETRIC = (
    "gptq",
    "gptq-int3",
    "gptq-int2-g32",
    "sparsegpt-repaired",
    "sparsegpt-2:4",
    "permuted-sparsegpt-2:4",
)
"""Rows that were measured with the outputs of the uncompressed model as the target, too."""
UNNORMALIZED = ("gptq", "gptq-int3", "gptq-int8", "w8a8", "awq-gptq-zeros")
EARLIER = (
    "gptq-mse-normalized",
    "gptaq-mse",
    "lorc-int3-rank19",
    "lorc-int3-rank19-weight",
    "lorc-int3-rank5",
    "gptq-int3-g32",
    "owq-int3-0.167",
    "owq-int3-0.5",
    "lkd-int3",
    "gptq-int3-g48",
    "qat-int3",
    "lkd-int2-zeros",
    "kv-int8",
    "kv-int8-int4-zeros",
    "ria",
    "permuted-sparsegpt-2:4",
    "permuted-wanda-2:4",
    "wanda-60-owl",
    "wanda-60",
    "ria-2:4",
    "sparsegpt-distill-2:4",
    "sparsegpt-sr_ste-2:4",
)


def shrinks(key: str, options: dict) -> bool:
    """Whether the pass has an option `shrinkage`, and it has an effect beside the other options."""
    kind = PASSES[key]
    return "shrinkage" in kind.model_fields and "shrinkage" not in kind(**options).without_effect()


def unshrunk(steps: list[dict]) -> list[dict]:
    """The passes with the correlations of inputs as they are."""
    return [
        {key: {**options, "shrinkage": 0} if shrinks(key, options) else options}
        for ((key, options),) in (step.items() for step in steps)
    ]


def earlier(steps: list[dict]) -> list[dict]:
    """The passes with the defaults that they had when docs/results-all.md got its rows of this name."""
    found = []
    for step in steps:
        ((key, given),) = step.items()
        options = dict(given)
        even = options.get("symmetric", True) and "activations" not in options
        if key == "gptq":
            options = {**PAPER_SWEEP, **options}
        if key in ("gptq", "qat") and options.get("scale") == "mse" and even:
            options["signed_scales"] = False
        if key in ("wanda", "ria", "sparsegpt") and "weights" not in options:
            options["repair"] = 0
        if key == "owq":
            options = {**options, "scale": "mse", "normalize_tokens": False, "refine": 0}
        if key == "kv_cache" and options.get("scale") != "static":
            options["key_group"] = None
        found.append({key: options})
    return unshrunk(found)


def unnormalized(steps: list[dict]) -> list[dict]:
    """The passes with each token's input at its own length in the Hessian of gptq."""
    return [
        {key: {**options, "normalize_tokens": False} if key == "gptq" else options}
        for ((key, options),) in (step.items() for step in steps)
    ]


def asymmetric(steps: list[dict]) -> list[dict]:
    """The passes with outputs of the uncompressed model as the target of those that fit layers."""
    return [
        {key: {**options, "error": "asymmetric"} if "error" in PASSES[key].model_fields else options}
        for ((key, options),) in (step.items() for step in steps)
    ]


ROWS |= {f"{name}-unnormalized": unnormalized(ROWS[name]) for name in UNNORMALIZED}
ROWS |= {f"{name}-earlier": earlier(ROWS[name]) for name in EARLIER}
ROWS |= {f"{name}-unshrunk": unshrunk(ROWS[name]) for name in UNSHRUNK}
ROWS |= {f"{name}-asymmetric": asymmetric(ROWS[name]) for name in ASYMMETRIC}
BATCH_OF_ONE = (
    "outlier_suppression",
    "lkd",
)
"""Passes whose examples are the batches of the calibration text, or that search on the first of them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--list", action="store_true", help="print the names of all rows")
    for name in ("model", "test", "calibration"):
        parser.add_argument(f"--{name}", required="--list" not in sys.argv)
    parser.add_argument("--also", metavar="TEXT", help="a second text: embedded, a file, ...")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", help="keep the checkpoints, with reports and curves of training, in this folder")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(ROWS))
        return
    unknown = set(arguments.rows) - set(ROWS)
    if unknown:
        parser.error(f"no row is called {', '.join(sorted(unknown))}; --list prints them")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.rows or ROWS:
            path = Path(folder) / f"{name}.yaml"
            recipe = {"model": "m", "passes": ROWS[name], "save": {"format": "native", "verify": "own"}}
            alone = any(key in step for step in ROWS[name] for key in BATCH_OF_ONE)
            recipe["calibration"] = {"source": "embedded", "batch": 1 if alone else 4}
            path.write_text(yaml.safe_dump(recipe, sort_keys=False))
            failed |= not run(str(path), forwarded(arguments))
    sys.exit(failed)


if __name__ == "__main__":
    main()
