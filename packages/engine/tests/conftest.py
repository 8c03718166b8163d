"""Property tests draw the same examples in every run: a red run is red again."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
from engine_models import step_on_shards
from hypothesis import settings

from lamella_engine._optimizer_hooks import BEFORE_STEP
from lamella_engine.testing import flat_alignment

settings.register_profile("lamella", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("lamella")


@pytest.fixture
def small_parameters_are_cut() -> Iterator[None]:
    """At the engine's own alignment no parameter of the tests' models would be cut in the flat layout."""
    with flat_alignment(2):
        yield


@pytest.fixture
def steps_on_shards() -> Iterator[None]:
    """Optimizers step on local tensors: for tests of what training does besides, and not of steps on DTensors."""
    with patch.dict(BEFORE_STEP, view=step_on_shards):
        yield
