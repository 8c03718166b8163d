"""What tests of several files set up."""

from collections.abc import Iterator

import pytest

from lamella_engine.testing import flat_alignment
from lamella_optim import install

install()


@pytest.fixture
def small_parameters_are_cut() -> Iterator[None]:
    """At the engine's own alignment no parameter of the tests' models would be cut in the flat layout."""
    with flat_alignment(2):
        yield
