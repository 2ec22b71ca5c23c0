"""Products of codes, and how near a kernel must be to them, for tests."""

from dataclasses import replace

import torch

from compress.kernels import dispatch
from compress.layers.parts.codes import CodesPart
from compress.native.library import library
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS

SETS = [] if library() is None else library().compress_instruction_sets().decode().split(",")
"""The instruction sets of the kernels on this machine."""
INT8 = GRIDS["int8"]
NEAR = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}  # relative to the largest output; bfloat16 has 8 bits


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(found, wanted, dtype, terms=1e-6):
    """Equal up to rounding. terms: a size of the terms of the sums, for outputs that may all be near zero."""
    assert found.dtype == dtype and found.shape == wanted.shape
    largest = float(wanted.float().abs().max()) if wanted.numel() else 0.0
    return float((found.float() - wanted.float()).abs().max() if wanted.numel() else 0) <= NEAR[dtype] * max(
        largest, terms
    )


def size_of_terms(part, x):
    """The root of the sum of the squares of the terms of the largest output."""
    return float((x.float().square() @ part.dense(torch.float32).square().T).sqrt().max()) if x.numel() else 0.0


def part_of(rows, width, bits, group, symmetric, indexed=False, dtype=torch.float32, seed=0):
    codes = quantize(random(rows, width, seed=seed), GRIDS[f"int{bits}"], group, symmetric, dtype=dtype)
    part = CodesPart.of(codes)
    if not indexed:
        return part
    groups = codes.scale.shape[1]
    index = torch.randint(groups, (width,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    return CodesPart.of(replace(codes, group_index=index))


def exact(part, x, rounding, bias):
    """The product in float64, of the weights and inputs that the reference uses."""
    x = x if rounding is None else rounding(x)
    y = x.double() @ part.dense(torch.float32).double().T
    return (y if bias is None else y + bias.double()).to(x.dtype)


def check(part, x, bias=None):
    """The kernel's product with inputs as they are is near the exact one."""
    terms = float(part.dense(torch.float32).abs().max()) * part.shape[1] ** 0.5
    assert near(dispatch.linear(x, [part], None, bias), exact(part, x, None, bias), x.dtype, terms)


def not_contiguous():
    """Inputs of 64 columns with strides of every kind."""
    return random(64, 5).T, random(5, 128)[:, ::2], random(3, 2, 128)[..., :64], random(2, 3, 64).transpose(0, 1)


def check_nan(part):
    """A NaN among the inputs reaches all outputs of its row, and no others."""
    for batch in (1, 8, 30):
        x = random(batch, part.shape[1])
        x[0, -2] = torch.nan
        found = dispatch.linear(x, [part], None, None)
        assert bool(found[0].isnan().all()) and not bool(found[1:].isnan().any())


@torch.no_grad()
def check_compiled(layer, x, rotated):
    """torch.compile and torch.export call the operators. rotated: whether outputs are."""
    wanted = layer(x)  # packs the weight first, which would be traced otherwise
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), wanted)
    graph = torch.export.export(layer, (x,)).graph_module.code
    assert "torch.ops.compress.codes_linear" in graph and ("torch.ops.compress.rotate" in graph) == rotated
