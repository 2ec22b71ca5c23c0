"""2:4 on a GPU by torch's sparse tensor cores; without a GPU, only which calls it takes can be tested."""

import pytest
import torch
from draws import random
from masks import random_mask, regular_mask

from compress.kernels import dispatch, semi_structured
from compress.kernels.semi_structured import KERNEL
from compress.layers.parts.codes import CodesPart
from compress.layers.parts.dense import DensePart
from compress.layers.parts.sparse import SparsePart
from compress.layers.transforms.rounding import InputRounding
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.sparse.positions import PackedMask


def kept(rows=32, width=64, n=2, m=4, dtype=torch.float16):
    mask = regular_mask(rows, width, n, m)
    return SparsePart.of(DensePart.of((random(rows, width) * mask).to(dtype)), PackedMask.of(mask, (n, m)))


@pytest.fixture
def everywhere(monkeypatch):
    """The kernel takes the calls of a CPU, too, whatever kernels the tests run with."""
    monkeypatch.delenv("COMPRESS_KERNELS", raising=False)
    monkeypatch.setattr(KERNEL, "device", "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_which_calls_it_takes(everywhere, dtype):
    x = random(3, 64).to(dtype)
    assert KERNEL.supports(kept(dtype=dtype), x, None)
    assert not KERNEL.supports(kept(dtype=dtype), x.float(), None)
    assert not KERNEL.supports(kept(dtype=dtype), x[:0], None)
    assert not KERNEL.supports(kept(dtype=dtype), x, InputRounding.of(GRIDS["int8"]))
    assert not KERNEL.supports(kept(dtype=dtype), x.clone().requires_grad_(), None)


def test_which_weights_it_takes(everywhere):
    x = random(3, 64).half()
    for alternative in (kept(rows=24), kept(n=1), kept(n=4, m=8), kept(dtype=torch.float32)):
        assert not KERNEL.supports(alternative, x, None)
    assert not KERNEL.supports(kept(width=40), random(3, 40).half(), None)
    mask = random_mask(32, 64, 0.5)
    assert not KERNEL.supports(
        SparsePart.of(DensePart.of((random(32, 64) * mask).half()), PackedMask.of(mask)), x, None
    )
    mask = regular_mask(32, 64, 2, 4)
    codes = SparsePart.of(
        CodesPart.of(quantize(random(32, 64) * mask, GRIDS["int8"], mask=mask)), PackedMask.of(mask, (2, 4))
    )
    assert not KERNEL.supports(codes, x, None)


def test_it_is_for_gpus_alone(monkeypatch):
    assert type(KERNEL).device == "cuda" and KERNEL in dispatch.find_kernels()[0]
    assert not KERNEL.supports(kept(), random(3, 64).half(), None)
    monkeypatch.setattr(KERNEL, "device", "cpu")
    monkeypatch.setenv("COMPRESS_KERNELS", "none")
    assert not KERNEL.supports(kept(), random(3, 64).half(), None)


@pytest.mark.skipif(
    not (torch.cuda.is_available() and semi_structured.available(torch.device("cuda"))),
    reason="needs a GPU with sparse tensor cores and torch with cuSPARSELt",
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_on_a_gpu(dtype):
    part, bias = kept(64, 128, dtype=dtype).cuda(), random(64).to("cuda", dtype)
    for shape in ((1, 128), (3, 128), (2, 5, 128), (128,)):
        x = random(*shape).to("cuda", dtype)
        assert dispatch.kernel_for(part, x, None) is KERNEL
        torch.testing.assert_close(dispatch.linear(x, [part], None, bias), part.product(x, bias), rtol=2e-2, atol=2e-2)
