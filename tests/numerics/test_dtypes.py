"""The dtype of computation follows the instructions of the processor."""

import pytest
import torch

from compress.numerics import dtypes
from compress.numerics.dtypes import bytes_of, fast_dtype, has_bfloat16_products, rounded

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("found", "fast"),
    [
        ({"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": False}, True),
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": True}, True),
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}, False),
        ({"architecture": "x86_64", "avx2": True}, False),
        ({"architecture": "aarch64"}, True),  # not known to be slow, so nothing changes
    ],
)
def test_capabilities_decide(monkeypatch, found, fast):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert has_bfloat16_products() is fast


@pytest.mark.parametrize(("avx", "amx"), [(True, False), (False, True), (False, False)])
def test_an_older_torch_is_asked_by_its_own_names(monkeypatch, avx, amx):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr("torch.cpu." + "_is_avx512_bf16_supported", lambda: avx, raising=False)
    monkeypatch.setattr("torch.cpu." + "_is_amx_tile_supported", lambda: amx, raising=False)
    assert has_bfloat16_products() is (avx or amx)


def test_only_slow_bfloat16_is_widened(monkeypatch):
    monkeypatch.setattr(dtypes, "has_bfloat16_products", lambda: False)
    assert fast_dtype(torch.bfloat16, CPU) == torch.float32
    assert fast_dtype(torch.float16, CPU) == torch.float16
    assert fast_dtype(torch.bfloat16, torch.device("cuda")) == torch.bfloat16
    monkeypatch.setattr(dtypes, "has_bfloat16_products", lambda: True)
    assert fast_dtype(torch.bfloat16, CPU) == torch.bfloat16


def test_the_bytes_of_a_tensor_whose_single_element_has_any_stride():
    single = torch.empty_strided((1, 1), (3, 3)).fill_(2.5)
    assert single.is_contiguous() and bytes_of(single).tolist() == bytes_of(torch.tensor([2.5])).tolist()
    rows = torch.arange(6, dtype=torch.int16).view(2, 3).T
    assert bytes_of(rows).view(torch.int16).tolist() == [0, 3, 1, 4, 2, 5]
    assert bytes_of(torch.empty(0)).numel() == 0


@pytest.mark.parametrize("shape", [(), (7,), (40, 5), (3, 4, 50)])
def test_rounding_in_slices_is_that_of_the_whole(shape, monkeypatch):
    monkeypatch.setattr(dtypes, "SLICE", 16)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = tensor.to(torch.bfloat16).float()
    assert torch.equal(rounded(tensor, torch.bfloat16), expected)
    assert rounded(expected, torch.bfloat16) is expected  # nothing changes, so nothing is copied
    assert rounded(tensor, torch.float32) is tensor


def test_a_transposed_matrix_keeps_its_order_in_memory_when_rounded(monkeypatch):
    monkeypatch.setattr(dtypes, "SLICE", 16)
    tensor = torch.randn(6, 20, generator=torch.Generator().manual_seed(0)).T
    actual = rounded(tensor, torch.float16)
    assert torch.equal(actual, tensor.half().float()) and actual.stride() == tensor.stride()


def test_numbers_that_are_not_finite_are_rounded_like_others():
    tensor = torch.tensor([float("nan"), float("inf"), 1e30])
    actual = rounded(tensor, torch.float16)
    assert actual.isnan().tolist() == [True, False, False] and actual.isinf().tolist() == [False, True, True]
