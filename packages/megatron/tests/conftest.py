"""Tests under mcore/ need a real megatron-core, which the session `megatron(cpu)` installs.

Tests without the marks of GPUs run on CPU ranks.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamella_testing.forked_writers import forked_writers
from lamella_testing.megatron import megatron_on_cpu

MCORE = Path(__file__).parent / "mcore"
GPUS = {"gpu1", "gpu2", "hybrid"}
WARNINGS = (
    "ignore::Warning:megatron",  # about megatron-core's defaults and missing libraries
    "ignore:.torch.distributed:FutureWarning",  # calls of names that torch 2.13 changed
)

collect_ignore = [] if importlib.util.find_spec("megatron") else ["mcore"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore the warnings of megatron-core in its tests."""
    for item in items:
        if MCORE in item.path.parents:
            for warning in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="module", autouse=True)
def on_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run megatron-core on CPU ranks in the modules of its tests, except in modules whose selected tests need GPUs."""
    chosen = [item for item in request.session.items if item.path == request.path]
    if MCORE not in request.path.parents or any(GPUS & set(item.keywords) for item in chosen):
        yield
        return
    with megatron_on_cpu():
        importlib.import_module("lamella_megatron.training")  # once here, and not in each forked rank
        yield


@pytest.fixture(scope="session", autouse=True)
def _forked_writers() -> Iterator[None]:
    """Fork the processes that write checkpoints: lamella-convert's tests start writers for Megatron's files."""
    with forked_writers():
        yield
