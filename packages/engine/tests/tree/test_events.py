"""The moments of a step with a call of the tree's listeners, without an optimizer."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from engine_models import Net, fsdp, inputs, no_gradient_sync, rows_of_this_rank, shard
from torch import nn

from lamella_engine.extending import Listener, Tree, Unit
from lamella_engine.testing import fake_streams, named_units, tree_of
from lamella_testing import run_ranks

FINAL, FINISHED = "gradients final", "reductions finished"


class Heard(Listener):
    """Writes down the arguments of its calls, under the names of a model's modules."""

    def __init__(self, model: nn.Module, moments: list[str] | None = None, prefix: str = "") -> None:
        self.moments = [] if moments is None else moments
        self.streams: dict[str, set[torch.Stream]] = {}
        self._tree, self._prefix = tree_of(model), prefix
        self._names = {id(unit): name for name, unit in named_units(model)}
        self._tree.listen(self)

    def gradients_final(self, tree: Tree) -> None:
        self._write(tree, FINAL)

    def gradients_reduced(self, tree: Tree, unit: Unit, streams: Iterable[torch.Stream]) -> None:
        name = self._names[id(unit)]
        self.streams[name] = set(streams)
        self._write(tree, f"{name} reduced")

    def reductions_finished(self, tree: Tree) -> None:
        self._write(tree, FINISHED)

    def _write(self, tree: Tree, moment: str) -> None:
        assert tree is self._tree
        self.moments.append(self._prefix + moment)

    def take(self) -> list[str]:
        moments = firsts(self.moments)
        self.moments.clear()
        return moments


def firsts(moments: list[str]) -> list[str]:
    """The first of each moment: final gradients are announced more than once, a unit's reduction once."""
    assert all(moments.count(moment) == 1 for moment in moments if moment.endswith("reduced"))
    return list(dict.fromkeys(moments))


def _two_units() -> Net:
    return shard(Net(num_layers=1))


def _backward(model: nn.Module) -> None:
    model(rows_of_this_rank(inputs())).square().mean().backward()


OF_A_STEP = ["layers.0 reduced", FINAL, "root reduced", FINISHED]


def test_a_step_of_two_microbatches_is_told_once_its_gradients_are_reduced() -> None:
    def check() -> None:
        model = _two_units()
        heard = Heard(model)
        for _ in range(2):
            with no_gradient_sync(model):
                _backward(model)
            assert heard.take() == [FINISHED]  # there were none: the compute stream is behind all the same
            _backward(model)
            assert heard.take() == OF_A_STEP

    run_ranks(check, 2)


def test_of_microbatches_that_are_reduced_each_the_last_is_waited_for() -> None:
    def check() -> None:
        model = _two_units()
        heard = Heard(model)
        fsdp(model).set_is_last_backward(False)
        _backward(model)
        assert heard.take() == ["layers.0 reduced", "root reduced"]
        fsdp(model).set_is_last_backward(True)
        _backward(model)
        assert heard.take() == OF_A_STEP

    run_ranks(check, 2)


def test_a_units_gradients_are_on_the_streams_that_are_told() -> None:
    def check() -> None:
        model = _two_units()
        fake_streams(model)
        heard, tree = Heard(model), tree_of(model)
        _backward(model)
        assert heard.streams == {name: {tree.streams.reduce_scatter_stream} for name in ("layers.0", "root")}

    run_ranks(check, 2)


def test_a_listener_may_leave_the_wait_to_a_later_moment() -> None:
    class HeardUntilIt(Heard):
        def gradients_final(self, tree: Tree) -> None:
            tree.step_end.defers_wait = True

    def check() -> None:
        model = _two_units()
        heard = HeardUntilIt(model)
        _backward(model)
        assert heard.take() == ["layers.0 reduced", "root reduced"]
        assert tree_of(model).step_end.is_deferred
        fsdp(model).wait_for_gradients()
        assert heard.take() == [FINISHED]

    run_ranks(check, 2)


def test_listeners_are_called_in_their_order_and_each_once() -> None:
    def check() -> None:
        model = _two_units()
        first = Heard(model, prefix="1 ")
        second = Heard(model, first.moments, "2 ")
        tree_of(model).listen(first)
        _backward(model)
        assert firsts(first.moments) == [f"{i} {moment}" for moment in OF_A_STEP for i in (1, 2)]
        assert second.moments is first.moments

    run_ranks(check, 2)


def test_a_listener_that_is_ignored_or_gone_hears_nothing_and_others_go_on() -> None:
    def check() -> None:
        model = _two_units()
        tree = tree_of(model)
        moments: list[str] = []
        listeners = [Heard(model, moments, f"{i} ") for i in range(3)]
        tree.ignore(listeners[0])
        tree.ignore(listeners[0])  # nothing more
        del listeners[2]
        assert tree.listeners == [listeners[1]]
        _backward(model)
        assert firsts(moments) == [f"1 {moment}" for moment in OF_A_STEP]

    gc.disable()  # a listener is forgotten with its last reference
    try:
        run_ranks(check, 2)
    finally:
        gc.enable()


def test_a_listener_does_not_hear_the_step_of_another_model() -> None:
    def check() -> None:
        model, other = _two_units(), _two_units()
        heard = Heard(model)
        _backward(other)
        assert heard.take() == []

    run_ranks(check, 2)
