"""The low-rank part: the product of its matrices, read back exactly, of the size that its description says."""

import pytest
import torch
from draws import random
from hypothesis import given
from hypothesis import strategies as st

from compress.layers.base import stored_name
from compress.layers.parts.codes import CodesPart
from compress.layers.parts.dense import DensePart
from compress.layers.parts.low_rank import LowRankPart
from compress.layers.scheme import LayerScheme
from compress.numerics.linalg import inverse_factor
from compress.numerics.low_rank import refitted, truncated_svd, weighted_svd
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS


def part(matrix, factors):
    if factors == "float16":
        return DensePart.of(matrix, "float16")
    return CodesPart.of(quantize(matrix, GRIDS[factors], "channel"))


def product(rows=6, width=10, rank=2, factors="int8"):
    return LowRankPart.of(part(random(rank, width), factors), part(random(rows, rank, seed=1), factors))


@given(rows=st.integers(3, 9), width=st.integers(3, 40), factors=st.sampled_from(["float16", "int8", "int3", "nf4"]))
def test_it_is_read_back_as_it_was_and_is_as_large_as_its_scheme_says(rows, width, factors):
    stored = product(rows, width, 2, factors)
    scheme = LayerScheme(stored.shape, (stored.scheme,))
    tensors = {stored_name("weight", name): tensor for name, tensor in stored.tensors().items()}
    assert sum(t.nbytes for t in tensors.values()) == scheme.size_bytes(torch.float32)
    assert LayerScheme.from_json(scheme.to_json()) == scheme
    ((found,), ()) = scheme.read(tensors)
    assert found.sha256() == stored.sha256()
    assert torch.equal(found.dense(torch.float32), stored.dense(torch.float32))


@pytest.mark.parametrize("factors", ["float16", "int8"])
def test_its_product_is_that_of_its_dense_weight(factors):
    stored, x, bias = product(factors=factors), random(4, 10, seed=2), random(6, seed=3)
    wanted = torch.nn.functional.linear(x, stored.dense(torch.float32), bias)
    torch.testing.assert_close(stored.product(x, bias), wanted)


def test_a_missing_and_a_misshapen_tensor_are_errors():
    stored = product()
    scheme = LayerScheme(stored.shape, (stored.scheme,))
    tensors = {stored_name("weight", name): tensor for name, tensor in stored.tensors().items()}
    assert {name.split("_")[1] for name in tensors} == {"a", "b"}
    with pytest.raises(KeyError, match="weight_a_scale"):
        scheme.read({name: t for name, t in tensors.items() if name != "weight_a_scale"})
    with pytest.raises(ValueError, match=r"weight_b_scale is torch.float32 \[5, 1\], but it must be"):
        scheme.read({**tensors, "weight_b_scale": tensors["weight_b_scale"][:5]})


def test_a_rank_that_is_no_reduction_is_refused():
    assert "use a smaller rank" in product(4, 10, 4).scheme.refuses((4, 10))
    assert product(5, 10, 4).scheme.refuses((5, 10)) is None


# The decomposition


def test_the_truncated_svd_is_the_known_one():
    """diag(3, 2, 1): the best of rank 2 drops the 1, and both matrices have the root of each singular value."""
    b, a = truncated_svd(torch.diag(torch.tensor([3.0, 2.0, 1.0])), 2)
    torch.testing.assert_close(b @ a, torch.diag(torch.tensor([3.0, 2.0, 0.0])))
    torch.testing.assert_close(b.norm(dim=0), torch.tensor([3.0, 2.0]).sqrt())


def test_weighed_by_inputs_it_is_the_optimum_of_the_output_error():
    """No B A of the rank is nearer to E X: E X = U S V^T, whose truncation has the error of the singular values left."""
    error, inputs = random(7, 12), random(400, 12, seed=1) @ random(12, 12, seed=2)
    factor, _ = inverse_factor(inputs.T @ inputs, 1e-9)
    b, a = weighted_svd(error, factor, 3)
    singular = torch.linalg.svdvals(error.double() @ inputs.double().T)
    found = ((error - b @ a).double() @ inputs.double().T).norm()
    torch.testing.assert_close(found, singular[3:].norm(), rtol=1e-4, atol=0)
    plain_b, plain_a = truncated_svd(error, 3)
    assert found < 0.9 * ((error - plain_b @ plain_a).double() @ inputs.double().T).norm()


def test_the_refit_is_the_least_squares_solution():
    error, a, inputs = random(5, 8), random(2, 8, seed=1), random(100, 8, seed=2)
    factor, _ = inverse_factor(inputs.T @ inputs, 1e-9)
    b = refitted(error, a, factor)
    wanted = torch.linalg.lstsq((a @ inputs.T).T.double(), (error @ inputs.T).T.double()).solution.T
    torch.testing.assert_close(b.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(refitted(error, a, None), error @ torch.linalg.pinv(a), rtol=1e-4, atol=1e-5)
