"""What tests of several files set up."""

import pytest

from lamella_engine._parameters import flat_packing
from lamella_optim import install

install()


@pytest.fixture
def small_parameters_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the engine's own alignment no parameter of the tests' models would be cut in the flat layout."""
    monkeypatch.setattr(flat_packing, "ALIGNMENT", 2)
