import pytest
import torch._dynamo  # noqa: F401  Imported by the first functional collective: here once, not once in every forked rank.

from lamella_testing.tiny import Kit


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()
