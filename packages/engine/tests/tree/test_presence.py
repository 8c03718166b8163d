"""The layers present under the events of a schedule: by sizes and budgets alone."""

from __future__ import annotations

from dataclasses import dataclass

from lamella_engine import peak_unsharded_nbytes
from lamella_engine._api.presence import Presence

SIZES = {None: 100, 0: 10, 1: 20, 2: 30}


def test_a_layer_without_room_ahead_is_gathered_in_its_turn() -> None:
    presence = Presence(SIZES, prefetch_budget=30)
    assert presence.acquire((0, None, "forward"))
    assert presence.acquire((0, 2, "forward"))  # the first ahead, at any weight
    assert not presence.acquire((1, 0, "backward"))
    assert presence.total == 130
    assert presence.use((1, 0, "backward"))
    assert not presence.use((0, 2, "forward"))  # no room is taken up any more
    assert presence.acquire((1, 0, "forward"))  # present for another pass
    assert presence.acquire((0, 1, "forward"))
    assert presence.finish((1, 0, "backward"))
    assert presence.total == 160
    assert presence.finish((1, 0, "forward"))
    assert presence.total == 150


def test_a_keep_budget_keeps_the_layers_that_backward_uses_first() -> None:
    presence = Presence(SIZES, keep_budget=40)  # no room for the middle one beside the last
    for layer, lets_go in ((0, False), (1, True), (2, False)):
        forward, backward = (0, layer, "forward"), (0, layer, "backward")
        assert presence.acquire(forward)
        assert not presence.use(forward)
        assert presence.finish(forward) == lets_go
        assert presence.acquire(backward) == lets_go
        assert not presence.use(backward)
        assert presence.finish(backward)
    assert presence.total == 0


def test_copies_that_stay_count_until_the_end() -> None:
    presence = Presence(SIZES, staying=[0, 1, 2, None])
    for layer in (1, 2):
        presence.acquire((0, layer, "forward"))
        assert presence.finish((0, layer, "forward"))
    assert presence.total == 50


@dataclass(frozen=True)
class _Step:
    layer: int | None
    action: str
    microbatch: int = 0
    phase: str = "forward"


def test_a_peak_is_computed_from_sizes() -> None:
    steps = [_Step(layer, action) for action in ("acquire", "used", "finished") for layer in (None, 1, 2)]
    assert peak_unsharded_nbytes([*steps, "an event of work"], [10, 20, 30], around=100) == 150
    assert peak_unsharded_nbytes(steps[:3], [10, 20, 30], around=100, prefetch_budget=40) == 120
    assert peak_unsharded_nbytes(steps, [10, 20, 30], around=100, prefetch_budget=40) == 150
