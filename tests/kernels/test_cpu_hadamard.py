"""Hadamard transforms by a kernel, against the product with the whole matrix in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import SETS, random

from compress.kernels import dispatch
from compress.kernels.cpu.rotations import rotate, steps
from compress.layers.transforms.hadamard import Hadamard
from compress.native.library import library
from compress.numerics.hadamard import exists, hadamard, signs_of

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels were not built")

ORDERS = [n for n in range(1, 300) if exists(n) and steps(n, False) is not None]
DTYPES = [torch.float32, torch.bfloat16]
NEAR = {torch.float32: 2e-6, torch.bfloat16: 8e-3}  # relative to the largest output


def product(x, signs, order, outputs=False, bias=None):
    """In float64, with the matrix of the whole order."""
    matrix, runs = hadamard(order).double() / math.sqrt(order), x.double().unflatten(-1, (-1, order))
    if outputs:
        y = (runs @ matrix.T).flatten(-2) * signs
        return y if bias is None else y + bias.double()
    return ((x.double() * signs).unflatten(-1, (-1, order)) @ matrix).flatten(-2)


def close(actual, expected):
    if not expected.numel():
        return actual.shape == expected.shape
    return float((actual - expected).abs().max()) <= NEAR[actual.dtype] * float(expected.abs().max())


@pytest.mark.parametrize("outputs", [False, True])
def test_every_order(chosen, outputs):
    for order in [*ORDERS, 576, 768, 896, 1536, 2048, 3072]:
        x, signs = random(2, order, seed=order), signs_of(order, 1)
        assert close(rotate(x, signs, order, outputs), product(x, signs, order, outputs)), order


@settings(max_examples=80)
@given(
    st.sampled_from(ORDERS),
    st.integers(1, 3),
    st.integers(0, 6),
    st.booleans(),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.sampled_from([None, *DTYPES]),
    st.integers(0, 99),
)
def test_any_call(order, runs, rows, outputs, biased, dtype, to, seed):
    width = order * runs
    x, signs = random(rows, width, seed=seed).to(dtype), signs_of(width, seed)
    bias = random(width, seed=seed + 1).to(dtype) if biased and outputs else None
    actual = rotate(x, signs, order, outputs, bias, to)
    assert actual.dtype == (to or dtype)
    assert close(actual, product(x, signs, order, outputs, bias))


def test_the_transform_of_a_layer_is_computed_by_the_kernel(monkeypatch):
    transform, x = Hadamard.of(48, 3, (5, 96)), random(4, 96)
    expected = product(x, transform.signs, 48)
    calls = []
    [kernel] = dispatch.TRANSFORMS
    monkeypatch.setattr(kernel, "transformed", lambda t, x: calls.append(1) or type(kernel).transformed(kernel, t, x))
    for inputs in (x, x.bfloat16(), x[:0], random(96, 4).T, random(2, 3, 192)[..., ::2]):
        actual = transform(inputs)
        assert actual.dtype == inputs.dtype and close(actual, product(inputs, transform.signs, 48))
    assert len(calls) == 5
    assert close(transform(x), expected) and close(transform.plain(x), expected)
    with dispatch.plain_torch():
        assert torch.equal(transform(x), transform.plain(x))
    transform(x.half()), transform(x.clone().requires_grad_())
    assert exists(1032) and not kernel.supports(Hadamard.of(1032, 0, (1, 1032)), random(1, 1032))  # a prime plus one
    assert len(calls) == 6


def test_inputs_of_a_gradient_are_transformed_by_torch():
    transform, x = Hadamard.of(16, 3, (5, 16)), random(4, 16).requires_grad_()
    transform(x).sum().backward()
    assert close(x.grad, product(torch.ones(4, 16), torch.ones(16), 16, True) * transform.signs)


def test_nan_reaches_its_run_alone(chosen):
    x = random(3, 96)
    x[1, 50] = torch.nan
    actual = rotate(x, signs_of(96, 0), 48)
    assert actual[1, 48:].isnan().all() and not actual[1, :48].isnan().any() and not actual[[0, 2]].isnan().any()


def test_more_threads_than_rows():
    original, x, signs = torch.get_num_threads(), random(3, 3072), signs_of(3072, 0)
    try:
        torch.set_num_threads(8)
        assert close(rotate(x, signs, 3072), product(x, signs, 3072))
    finally:
        torch.set_num_threads(original)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("order", 0),
        ("order", 48),
        ("order", 1 << 21),
        ("inner", 0),
        ("inner", 24),
        ("levels", -1),
        ("levels", 3),
        ("count", -1),
        ("count", 0),
        ("numbers", 100),
    ],
)
def test_the_library_checks_the_sizes_of_a_matrix(name, value):
    actual, x = steps(12 * 64, False), random(1, 768)
    original = getattr(actual.matrix, name)
    try:
        setattr(actual.matrix, name, value)
        with pytest.raises(RuntimeError, match="do not fit together"):
            rotate(x, signs_of(768, 0), 768)
    finally:
        setattr(actual.matrix, name, original)
    assert close(rotate(x, signs_of(768, 0), 768), product(x, signs_of(768, 0), 768))


def test_the_library_checks_the_sizes_of_inputs():
    address, x = steps(16, False).address, random(2, 24)
    call = (address, x.data_ptr(), x.data_ptr(), signs_of(24, 0).data_ptr(), None)
    for m, width, stride, threads in ((2, 24, 24, 1), (-1, 16, 16, 1), (2, 16, 8, 1), (1, -16, 16, 1), (1, 16, 16, 0)):
        assert library().compress_rotate(*call, m, width, stride, 0, 0, 0, threads) == -1


@pytest.mark.parametrize("signs", [signs_of(32, 0), signs_of(16, 0).float()])
def test_signs_that_do_not_fit_the_inputs_are_refused(signs):
    with pytest.raises(ValueError, match="signs or bias"):
        rotate(random(1, 16), signs, 16)


def test_torch_traces_the_operator():
    transform, x = Hadamard.of(24, 3, (5, 48)), random(4, 48)
    with torch.no_grad():
        expected = transform(x)
        assert torch.equal(torch.compile(transform, backend="aot_eager", fullgraph=True)(x), expected)
        exported = torch.export.export(transform, (x,))
    assert "torch.ops.compress.rotate" in exported.graph_module.code
    torch.testing.assert_close(exported.module()(x), expected)
