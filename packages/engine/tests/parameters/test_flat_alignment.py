"""The flat layout at the engine's own alignment, which other tests lower for small models."""

from __future__ import annotations

from engine_models import Net, assert_trains_alike, twins
from flat_models import LOSS, flat, layouts_of

from lamella_engine import Rows
from lamella_testing import run_ranks


def test_shards_of_flat_layouts_are_multiples_of_the_engines_alignment() -> None:
    def check() -> None:
        reference, sharded = twins(lambda: Net(num_layers=2, dim=32), flat(Rows(1)))
        assert_trains_alike(reference, sharded, LOSS)
        for layout in layouts_of(sharded):
            assert layout.alignment == 256
            assert layout.shard_numel % 256 == 0

    run_ranks(check, 2)
