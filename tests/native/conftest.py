"""A fixture of the tests of loops over columns."""

import pytest

from compress.native import columns as native


@pytest.fixture
def plain(monkeypatch):
    """plain(compute): its result in plain torch."""

    def computed(compute):
        with monkeypatch.context() as without:
            without.setattr(native, "usable", lambda *_: False)
            return compute()

    return computed
