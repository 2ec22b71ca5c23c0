"""The outliers part: columns or single positions, read back exactly, of the size that its description says."""

import pytest
import torch
from draws import random
from fuzz_changes import climbing
from hypothesis import given
from hypothesis import strategies as st

from compress.layers.parts.outliers import OutliersPart
from compress.layers.scheme import LayerScheme


def stored(part):
    return {f"weight_{name}": tensor for name, tensor in part.tensors().items()}


@given(data=st.data(), rows=st.integers(1, 6), width=st.integers(2, 30), dtype=st.sampled_from([None, "float16"]))
def test_positions_are_read_back_as_they_were(data, rows, width, dtype):
    chosen = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width)))
    chosen = chosen.view(rows, width)
    chosen[0, 0], chosen[-1, -1] = True, False
    weight = random(rows, width)
    part = OutliersPart.of_positions(weight, chosen, dtype)
    scheme = LayerScheme(part.shape, (part.scheme,))
    assert sum(t.nbytes for t in part.tensors().values()) == scheme.size_bytes(torch.float32)
    ((found,), ()) = LayerScheme.from_json(scheme.to_json()).read(stored(part))
    assert found.sha256() == part.sha256()
    wanted = weight.to(torch.float16).float() if dtype else weight
    assert torch.equal(found.dense(torch.float32), wanted * chosen)


@given(data=st.data(), rows=st.integers(1, 6), width=st.integers(2, 30))
def test_columns_are_read_back_as_they_were(data, rows, width):
    some = data.draw(st.sets(st.integers(0, width - 1), min_size=1, max_size=width - 1))
    columns, weight = torch.tensor(sorted(some)), random(rows, width)
    part = OutliersPart.of_columns(columns, weight[:, columns], width)
    scheme = LayerScheme(part.shape, (part.scheme,))
    assert sum(t.nbytes for t in part.tensors().values()) == scheme.size_bytes(torch.float32)
    ((found,), ()) = scheme.read(stored(part))
    wanted = torch.zeros(rows, width)
    wanted[:, columns] = weight[:, columns]
    assert torch.equal(found.dense(torch.float32), wanted)
    x, bias = random(3, width, seed=1), random(rows, seed=2)
    torch.testing.assert_close(found.product(x, bias), torch.nn.functional.linear(x, wanted, bias))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_columns": torch.tensor([4, 9, 0], dtype=torch.int32)}, "a column outside of the 6"),
        ({"weight_columns": torch.tensor([4, 1, 0], dtype=torch.int32)}, "weight_columns is not ascending"),
        ({"weight_rows": torch.tensor([0, 2, 4], dtype=torch.int32)}, "weight_rows does not rise from 0 to 3"),
        ({"weight_rows": torch.tensor([0, 2], dtype=torch.int32)}, r"weight_rows is torch.int32 \[2\], but it must be"),
        ({"weight_values": torch.zeros(3, dtype=torch.int32)}, "weight_values holds torch.int32, not floats"),
    ],
)
def test_tensors_that_cannot_be_right_are_errors(change, message):
    chosen = torch.tensor([[0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0]]).bool()
    part = OutliersPart.of_positions(random(2, 6), chosen)
    with pytest.raises(ValueError, match=message):
        LayerScheme(part.shape, (part.scheme,)).read({**stored(part), **change})


@pytest.mark.parametrize("rows", [3, 8, 100])
def test_row_starts_that_wrap_are_errors(rows):
    """They climb by 2^32 in all, so that no difference of int32 is negative, and end at the number of weights."""
    chosen = torch.zeros(rows, 6, dtype=torch.bool)
    chosen[0, :3] = True  # so that all columns ascend wherever rows begin
    part = OutliersPart.of_positions(random(rows, 6), chosen)
    starts = climbing(part.rows, 2**32)
    assert starts[0] == 0 and starts[-1] == 3 and (starts.diff() > 0).all()
    with pytest.raises(ValueError, match="weight_rows does not rise from 0 to 3"):
        LayerScheme(part.shape, (part.scheme,)).read({**stored(part), "weight_rows": starts})


def test_none_and_all_columns_are_refused():
    part = OutliersPart.of_columns(torch.tensor([1]), random(3, 1), 4)
    assert part.scheme.refuses((3, 4)) is None
    assert "outlier columns of 1 cannot be kept" in part.scheme.refuses((3, 1))
