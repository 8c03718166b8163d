"""Property tests draw the same examples in every run: a red run is red again."""

import pytest
from hypothesis import settings

from lamella_engine._parameters import flat_packing

settings.register_profile("lamella", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("lamella")


@pytest.fixture
def small_parameters_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the engine's own alignment no parameter of the tests' models would be cut in the flat layout."""
    monkeypatch.setattr(flat_packing, "ALIGNMENT", 2)
