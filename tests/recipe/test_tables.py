"""Sizes in tables have three significant digits."""

import pytest

from compress.recipe.tables import megabytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0"),
        (1, "0.000001"),
        (52_400, "0.0524"),
        (9_412_000, "9.41"),
        (91_700_000, "91.7"),
        (112_840_000, "113"),
        (269_060_552, "269"),
        (4_488_200_000, "4488"),
    ],
)
def test_sizes_have_three_significant_digits(size_bytes, text):
    assert megabytes(size_bytes) == text
