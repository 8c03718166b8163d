from collections.abc import Iterator

import pytest
import torch._dynamo  # noqa: F401  Imported by the first functional collective: here once, not once in every forked rank.

from lamella_testing import forked_writers as writers
from lamella_testing.tiny import Kit


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


@pytest.fixture(scope="session", autouse=True)
def _forked_writers() -> Iterator[None]:
    """Fork the processes that write checkpoints."""
    with writers.forked_writers():
        yield


@pytest.fixture
def started_writers() -> Iterator[None]:
    """Start the processes that write checkpoints as users' ranks do: for tests of these processes."""
    with writers.started_writers():
        yield
