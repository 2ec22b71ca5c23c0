"""What formats of plain integer groups (GPTQ, AutoAWQ) share: which codes they hold, and their stored form."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from compress.checkpoint.formats.accepted import (
    INTEGER,
    NULL,
    OBJECT,
    TEXT,
    UNUSED,
    Accepted,
    only,
    without_effect,
)
from compress.checkpoint.formats.base import refuses_all_but_codes, unstated_rounding
from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.codes import GroupSize, groups_in
from compress.numerics.quant.grids import GRIDS, IntGrid

KEYS: dict[str, Accepted] = {
    "quant_method": TEXT,
    "group_size": INTEGER,
    "pack_dtype": only("int32", None),
    "dynamic": OBJECT | UNUSED,
    "adapter": UNUSED,
    "rotation": UNUSED,
    "mock_quantization": UNUSED,
    "is_marlin_format": UNUSED,
    # of AutoRound
    "data_type": only("int", None),
    "act_bits": only(16, 32, None),
    "super_bits": NULL,
    "super_group_size": NULL,
    "extra_config": UNUSED,
    **without_effect(
        # which layers are quantized: the tensors say so
        *("lm_head", "modules_to_not_convert", "modules_in_block_to_quantize", "block_name_to_quantize"),
        *("module_name_preceding_first_block", "quant_block_list", "to_quant_block_names", "quant_lm_head"),
        # how scales and codes were computed
        *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "act_group_aware", "mse"),
        *("dataset", "tokenizer", "model_seqlen", "max_input_length", "pad_token_id", "batch_size", "v2", "v2_alpha"),
        *("gptaq", "gptaq_alpha", "foem", "failsafe", "fallback", "quantizer", "duo_scaling", "hyb_act"),
        *("n_parallel_calib_samples", "cache_block_outputs", "offload_to_disk", "offload_to_disk_path"),
        *("iters", "lr", "minmax_lr", "nsamples", "seqlen", "train_bs", "amp", "low_gpu_mem_usage"),
        *("enable_quanted_input", "enable_minmax_tuning", "enable_norm_bias_tuning", "gradient_accumulate_steps"),
        *("scale_dtype", "act_data_type", "act_dynamic", "act_group_size", "act_sym", "autoround_version"),
        # how programs run the checkpoint
        *("use_exllama", "disable_exllama", "exllama_config", "use_cuda_fp16", "do_fuse", "fuse_max_seq_len"),
        *("modules_to_fuse", "pack_impl", "parallel_packing"),
        # names
        *("meta", "model_name_or_path", "model_file_base_name", "provider"),
    ),
}
"""The keys of AutoGPTQ, GPTQModel, AutoAWQ, AutoRound and transformers that both formats have."""


def refuses_codes(scheme: LayerScheme, name: str, bits: Collection[int], sizes: Collection[int]) -> str | None:
    """Return why a format of integers cannot store a layer, and how to change the recipe; None if it can.

    Args:
        scheme: scheme of the layer.
        name: name of the format.
        bits: bits of its codes.
        sizes: its group sizes.
    """
    format_name = f"format {name}"
    reason = refuses_all_but_codes(scheme, format_name)
    if reason is not None or scheme.codes is None:
        return reason
    codes, width = scheme.codes, scheme.shape[1]
    if not isinstance(codes.grid, IntGrid) or not codes.grid.plain or codes.grid.bits not in bits:
        supported = ", ".join(f"int{number}" for number in bits)
        return f"{format_name} holds weights {supported}, not {codes.grid.name}; use one of them, or format: native"
    if scheme.rounding is not None:
        return unstated_rounding(scheme.rounding, format_name, "compressed-tensors")
    if codes.float_zeros:
        return f"zero points of {format_name} are integers; use zero_point: integer, or format: native"
    size = codes.group_size
    if isinstance(size, int) and (size not in sizes or width % size):
        supported = ", ".join([*(str(s) for s in sizes if width % s == 0), "channel"])
        return f"{format_name} has no groups of {size} columns for {width} inputs; use {supported}, or format: native"
    return None


def adapted_codes(codes: CodesScheme) -> CodesScheme:
    """The stored form of codes: one scale per row and group, also where rows share it."""
    size: GroupSize = "channel" if codes.group_size == "tensor" else codes.group_size
    return replace(codes, group_size=size, rows=1)


def adapted_part(part: CodesPart) -> CodesPart:
    """The same weight in the stored form of `adapted_codes`."""
    scheme, rows = adapted_codes(part.scheme), part.shape[0]
    if scheme == part.scheme:
        return part
    zero = None if part.zero is None else part.zero.expand(rows, -1).contiguous()
    return part.changed(scheme, scale=part.scale.expand(rows, -1).contiguous(), zero=zero)


def unsigned_zeros(part: CodesPart) -> Int[Tensor, "out groups"]:
    """The zero points as unsigned codes; the middle of the grid where the part has none."""
    if part.zero is None:
        return torch.full(part.scale.shape, -part.grid.lowest_stored, dtype=torch.int16, device=part.scale.device)
    return part.zero.to(torch.int16) - part.grid.lowest_stored


def signed_zeros(unsigned: Int[Tensor, "out groups"], codes: CodesScheme) -> Int[Tensor, "out groups"]:
    """The inverse of `unsigned_zeros`."""
    return (unsigned.to(torch.int16) + codes.grid.lowest_stored).to(torch.int8).contiguous()


def int_grid(bits: int) -> IntGrid:
    """Return the grid of signed integers of so many bits. Raises ValueError."""
    grid = GRIDS.get(f"int{bits}")
    if not isinstance(grid, IntGrid):
        raise ValueError(f"codes of {bits} bits")
    return grid


def read_group_size(width: int, stated: int, groups: int, name: str) -> GroupSize:
    """The group size of a stored layer. stated: by the config, -1: a whole row. groups: of its scales.

    Raises ValueError for another number of groups than the group size gives.
    """
    size: GroupSize = "channel" if stated == -1 or stated > width else stated
    if stated != -1 and stated < 1:
        raise ValueError(f"group_size = {stated} is not read; accepted: -1, a positive integer")
    if groups_in(width, size) != groups:
        raise ValueError(f"{name} has {groups} groups of scales for {width} inputs, but group_size is {stated}")
    return size


def in_block(name: str) -> str | None:
    """Return the name of a linear inside of its block; None for one outside of numbered blocks."""
    matched = re.search(r"\.\d+\.(.*)", name)
    return None if matched is None else matched[1]


def skipped(names: Collection[str]) -> dict[str, dict[str, str]]:
    """The entries of `dynamic` by which readers leave modules dense."""
    ends = {name: r"(\.|$)" if name.endswith(".") else "$" for name in names}
    return {f"-:^{re.escape(name.rstrip('.'))}{end}": {} for name, end in ends.items()}
