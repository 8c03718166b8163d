from collections.abc import Iterator

import pytest
import torch._dynamo  # noqa: F401  Imported by the first functional collective: here once, not once in every forked rank.

from lamella_testing.forked_writers import forked_writers
from lamella_testing.tiny import Kit


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


@pytest.fixture(scope="session", autouse=True)
def _forked_writers() -> Iterator[None]:
    """Fork the processes that write checkpoints: how such a process starts is tested beside AsyncSaver."""
    with forked_writers():
        yield
