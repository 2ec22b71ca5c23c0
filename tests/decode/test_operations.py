"""Each operation of a traced step against torch: values, shapes, dtypes, strides, and the tensors that it changes."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from compress.decode.layout import UntraceableError
from compress.decode.step import TracedStep
from compress.native.library import available

pytestmark = pytest.mark.skipif(not available(), reason="no C++ library")
aten = torch.ops.aten


def drawn(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    numbers = torch.randn(sizes, generator=torch.Generator().manual_seed(seed))
    return (numbers * 4).to(dtype) if not dtype.is_floating_point else numbers.to(dtype)


def compared(function, *inputs, others=None, state=(), called=()):
    """Trace a function for some inputs, run it for others, and compare with torch; state is what it was before."""
    others = inputs if others is None else others
    before = [tensor.clone() for tensor in state]
    step = TracedStep(function, inputs, state)
    for tensor, old in zip(state, before, strict=True):
        tensor.copy_(old)
    found = step(*others)
    changed = [tensor.clone() for tensor in state]
    for tensor, old in zip(state, before, strict=True):
        tensor.copy_(old)
    wanted = function(*others)
    for mine, theirs in zip([*found, *changed], [*wanted, *state], strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        tolerance = 1e-2 if mine.dtype is torch.bfloat16 else 2e-6
        assert torch.allclose(mine.double(), theirs.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    assert step.called == list(called)
    return step


ONE = {
    "neg": torch.neg,
    "abs": torch.abs,
    "square": lambda x: x.pow(2),
    "exp": torch.exp,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "reciprocal": lambda x: (x + 9).reciprocal(),
    "sqrt": lambda x: x.abs().sqrt(),
    "rsqrt": lambda x: (x.abs() + 0.1).rsqrt(),
    "log": lambda x: (x.abs() + 1).log(),
    "cube": lambda x: x.pow(3),
    "clamp": lambda x: x.clamp(-0.5, 0.25),
    "least": lambda x: x.clamp(min=0.1),
    "not": lambda x: ~(x > 0),
    "logical_not": lambda x: (x > 0).logical_not(),
}
TWO = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (y + 9),
    "scaled": lambda x, y: torch.add(x, 3, alpha=2) - y,
    "rsub": lambda x, y: 1 - x * y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == x * y,
    "ne": lambda x, y: x != x * y,
    "and": lambda x, y: (x > 0) & (y > 0),
    "or": lambda x, y: (x > 0) | (y > 0),
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x, 0.5),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, -1.0),
}


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_of_one_number(name, dtype):
    compared(lambda x: [ONE[name](x)], drawn(2, 3, 300, dtype=dtype), others=[drawn(2, 3, 300, seed=1, dtype=dtype)])


@pytest.mark.parametrize("name", TWO)
def test_operations_of_two_numbers(name):
    compared(lambda x, y: [TWO[name](x, y)], drawn(3, 40), drawn(40, seed=1), others=[drawn(3, 40, seed=2), drawn(40)])


@pytest.mark.parametrize("name", ["add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "minimum"])
def test_whole_numbers_are_computed_as_whole_numbers(name):
    large = torch.tensor([2**40 + 1, -(2**40), 3, 0, -7])  # floats would lose the last bits
    compared(lambda x, y: [TWO[name](x, y)], large, large.flip(0))


@pytest.mark.parametrize("x", [float("nan"), float("inf"), -float("inf"), 200.0, -200.0, 0.0, 88.5, -86.0])
@pytest.mark.parametrize("name", ["exp", "sigmoid", "silu", "tanh", "relu", "clamp", "neg", "sqrt"])
def test_numbers_at_the_ends(name, x):
    compared(lambda t: [ONE[name](t)], torch.full((19,), x))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_any_strides_and_repeated_dimensions(sizes, random):
    order = random.sample(range(len(sizes)), len(sizes))
    narrow = [1 if random.random() < 0.3 else size for size in sizes]
    x = drawn(*[sizes[i] for i in order]).permute([order.index(i) for i in range(len(sizes))])
    y = drawn(*narrow, seed=1)
    compared(lambda x, y: [x * y + 1, (x + y).transpose(0, -1).contiguous()], x, y)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_sums_over_dimensions(sizes, data):
    over = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=len(sizes), unique=True))
    keep = data.draw(st.booleans())
    x = drawn(*sizes)
    step = TracedStep(lambda x: [x.mean(over, keep), x.sum(over, keep), x.amax(over, keep)], [x])
    for mine, theirs in zip(step(x), step.first_outputs, strict=True):
        assert mine.shape == theirs.shape
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 300, 1000])
def test_rows(width):
    weight, bias = drawn(width, seed=1), drawn(width, seed=2)
    x = drawn(3, width)
    norm = lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight  # noqa: E731
    compared(lambda x: [norm(x), F.layer_norm(x, (width,), weight, bias, 1e-3), F.layer_norm(x, (width,))], x)
    compared(lambda x: [x.softmax(-1), x.softmax(0), x.cumsum(-1)], x, called=["aten.cumsum.default"])


def test_softmax_of_masked_rows():
    x, mask = drawn(3, 20), torch.ones(1, 2, 1, 5, dtype=torch.bool)
    x[1] = -float("inf")
    compared(lambda x: [x.softmax(-1)], x)
    mask[:, 1] = False
    q, k, v = drawn(1, 2, 1, 4), drawn(1, 2, 5, 4), drawn(1, 2, 5, 3)  # torch computes values of another width in parts
    attend = lambda q, k, v: [F.scaled_dot_product_attention(q, k, v, attn_mask=mask)]  # noqa: E731
    compared(attend, q, k, v, called=["aten.bmm.default"] * 2)


def test_places_of_tables():
    table, ids = drawn(11, 3, 5), torch.tensor([[1, 10, 0], [3, 3, -2]])
    compared(lambda i: [table[i], table[:, i[0].clamp(min=0, max=2)], table.index_select(1, i[0].clamp(0, 2))], ids)
    flat = drawn(11, 7, dtype=torch.bfloat16)
    compared(lambda i: [F.embedding(i, flat)], ids[:1])


def test_an_index_out_of_range_is_an_error():
    table = drawn(4, 2)
    step = TracedStep(lambda i: [F.embedding(i, table)], [torch.tensor([1])])
    with pytest.raises(IndexError, match="out of range"):
        step(torch.tensor([4]))


def test_parts_and_pieces():
    x = drawn(2, 4, 6)
    half = lambda x: torch.cat([-x[..., 3:], x[..., :3]], -1)  # noqa: E731
    compared(lambda x: [half(x), torch.stack([x, x + 1], 1), *x.split(2, 1), x.flatten(1), *x.unbind(0)], x)
    compared(
        lambda x: [x.transpose(1, 2).reshape(2, 24), x[:, 1::2], x.view(torch.int32).view(torch.uint8) & 3],
        x,
        called=["aten.bitwise_and.Scalar"],
    )


def test_a_cache_is_changed_in_place():
    keys, seen, new = torch.zeros(2, 3, 8, 4), torch.tensor(3), drawn(2, 3, 1, 4)

    def step(x):
        place = torch.arange(1) + seen
        seen.add_(1)
        keys.index_copy_(2, place, x)
        keys[:, :, place + 1] = 2 * x
        return [keys * 1]

    traced = compared(step, new, others=[drawn(2, 3, 1, 4, seed=1)], state=[keys, seen])
    other, count = torch.ones(2, 3, 8, 4), torch.tensor(5)
    traced.bind([other, count])
    before = keys.clone()
    traced(new)
    assert int(count) == 6
    assert torch.equal(keys, before), "the first cache is left alone"
    assert torch.equal(other[:, :, 5:6], new)


@given(
    st.sampled_from([(1, 4, 1), (2, 6, 3), (3, 2, 2)]),
    st.integers(1, 40),
    st.sampled_from([4, 16, 20, 64]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_attention(heads, keys, width, masked, dtype):
    batch, count, repeats = heads
    shared = count // repeats
    q, k, v = (
        drawn(batch, h, s, width, seed=i, dtype=dtype)
        for i, (h, s) in enumerate(((count, 1), (shared, keys), (shared, keys)))
    )
    mask = torch.rand(batch, 1, 1, keys, generator=torch.Generator().manual_seed(keys)) > 0.4
    mask[..., keys // 2] = True

    def attend(q, k, v, mask):
        wide = [x[:, :, None].expand(-1, -1, repeats, -1, -1).reshape(batch, count, keys, width) for x in (k, v)]
        y = F.scaled_dot_product_attention(q, *wide, attn_mask=mask if masked else None)
        return [y.transpose(1, 2).reshape(batch, 1, -1)]

    if dtype is torch.bfloat16 and not masked:
        return  # torch takes another way there
    compared(attend, q, k, v, mask)


def test_several_queries_and_shared_keys_without_repeats():
    q, k, v = drawn(2, 6, 1, 8), drawn(2, 2, 5, 8, seed=1), drawn(2, 2, 5, 8, seed=2)
    attend = F.scaled_dot_product_attention
    compared(lambda q, k, v: [attend(q, k, v, enable_gqa=True), attend(q.view(2, 2, 3, 8), k, v)], q, k, v)


@pytest.mark.parametrize("keys", [3, 700])
def test_attention_reads_keys_and_values_as_they_are_stored(keys):
    q, new = drawn(2, 6, 1, 16), drawn(2, 2, 1, 16, seed=3)
    k, v = (drawn(2, 2, keys, 16, seed=i, dtype=torch.bfloat16) for i in (1, 2))

    def step(q, new):
        k.index_copy_(2, torch.tensor([1]), new.to(k.dtype))
        wide = [x.float()[:, :, None].expand(-1, -1, 3, -1, -1).reshape(2, 6, keys, 16) for x in (k, v)]
        return [F.scaled_dot_product_attention(q, *wide)]

    traced = compared(step, q, new, state=[k, v])
    assert traced.steps.slots[0].numel() < k.nbytes or keys < 700, "no copies"


def test_attention_of_many_keys_is_joined_from_parts():
    q, k, v = drawn(1, 4, 1, 8), drawn(1, 2, 700, 8, seed=1), drawn(1, 2, 700, 8, seed=2)
    bias = torch.zeros(1, 1, 1, 700)
    attend = lambda q, k, v: [F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)]  # noqa: E731
    compared(attend, q, k, v)
    bias[..., 256:512] = -torch.inf  # the second part
    compared(attend, q, k, v)
    bias[..., :256] = -200.0  # the first one is too far from the last
    compared(attend, q, k, v)
    k[:, 1, 600] = torch.nan
    compared(attend, q, k, v)


def test_dense_products():
    x, weight, bias = drawn(3, 1, 40), drawn(24, 40, seed=1), drawn(24, seed=2)
    step = compared(lambda x: [F.linear(x, weight, bias), F.linear(x, weight)], x)
    assert step.steps.count == 2
    compared(lambda x: [x.flatten(1) @ weight.T.contiguous()], x, called=["aten.mm.default"])
    compared(lambda x: [F.linear(x, weight, bias)], drawn(30, 1, 40), called=["aten.addmm.default"])


def test_constants_are_computed_once():
    scale, x = drawn(16), drawn(3, 16)
    step = compared(lambda x: [x * (1 + scale) * torch.arange(16).float()], x)
    assert step.steps.count == 2


def test_a_constant_that_is_changed_is_new_in_each_step():
    def step(x):
        marks = torch.zeros(3, 5)
        marks.scatter_(1, x.long(), 1.0)
        return [marks]

    x = torch.tensor([[0.0], [2.0], [4.0]])
    traced = compared(step, x, others=[x.flip(0)], called=["aten.scatter_.value"])
    assert torch.equal(traced(x)[0], step(x)[0]), "ones of the call before are gone"


def test_memory_is_shared_by_values_of_different_times():
    x = drawn(4, 64)

    def step(x):
        for i in range(50):
            x = F.silu(x) * 0.5 + i
        return [x]

    traced = compared(step, x)
    assert traced.steps.slots[0].numel() < 8 * x.nbytes


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x * float(x.sum())],
        lambda x: [x if x.sum() > 0 else -x],
        lambda x: [x[x > 0]],
        lambda x: [torch.rand_like(x)],
    ],
    ids=["a Python number", "a condition", "a shape", "chance"],
)
def test_what_depends_on_numbers_is_refused(function):
    with pytest.raises(UntraceableError):
        TracedStep(function, [drawn(5)])
