"""A backward may end before its last reductions: the optimizer's step waits, and earlier readers wait too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import BF16, Net, fsdp, shard, shard_on
from optimizer_models import Lion
from optimizer_pairs import ADAMW, Overlapped, X, named, run_backward
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from lamella_engine import CPUOffloadPolicy, find_nonfinite
from lamella_engine.testing import FakeWork, fake_streams, gradient_installs_watched, require_unit, tree_of
from lamella_optim import clip_grad_norm_, overlap_optimizer
from lamella_testing import run_ranks


class _Late:
    """A model on fake streams, and an optimizer whose step waits for gradients by itself."""

    def __init__(self, num_axes: int = 1, **options: Any) -> None:
        self.installed: dict[int, FakeWork] = {}
        self.model = Net()
        shard_on((2,) * num_axes, **options)(self.model)
        self.streams = fake_streams(self.model)
        self.optimizer = _Noting(self.model.parameters())
        self.optimizer.late = self
        self.handle = overlap_optimizer(self.optimizer, late_gradients=True)

    def backward(self) -> set[str]:
        """The parameters whose gradients the compute stream has not waited for."""
        self.installed.clear()
        with gradient_installs_watched(self._note_install):
            run_backward(self.model)
        return self.missing()

    def _note_install(self, group: Any) -> None:
        work = self.streams.work()
        self.installed.update((id(parameter.sharded), work) for parameter in group.parameters)

    def missing(self) -> set[str]:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        seen = self.streams.current.seen
        return {names.get(key, "") for key, work in self.installed.items() if not work.is_before(seen)}


class _Noting(Lion):
    """Asserts a wait before the use of each gradient."""

    late: Any = None
    num_seen = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.late is not None:
            late_parameters = [
                p for group in self.param_groups for p in group["params"] if id(p) in self.late.installed
            ]
            assert all(self.late.installed[id(p)].is_before(self.late.streams.current.seen) for p in late_parameters)
            self.late.optimizer.num_seen += len(late_parameters)
        super().step()


OUTER = {"stem.weight", "stem.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize(("num_axes", "options"), [(1, {}), (1, {"mp_policy": BF16}), (2, {})], ids=str)
def test_each_part_of_a_step_waits_for_its_own_gradients(num_axes: int, options: dict[str, Any]) -> None:
    def check() -> None:
        late = _Late(num_axes, **options)
        for step in range(3):
            assert late.backward() >= OUTER
            late.optimizer.step()
            assert late.optimizer.num_seen == (step + 1) * len(late.installed)
            assert late.missing() == set()
            late.optimizer.zero_grad()

    run_ranks(check, 2**num_axes)


def test_gradients_of_the_last_of_several_microbatches_are_late_too() -> None:
    def check() -> None:
        late = _Late()
        for _ in range(2):
            for _ in range(2):
                assert late.backward() >= OUTER
            late.optimizer.step()
            assert late.missing() == set()
            late.optimizer.zero_grad()

    run_ranks(check, 2)


def _clip(late: _Late) -> None:
    clip_grad_norm_(late.model.parameters(), 1.0)


def _find(late: _Late) -> None:
    find_nonfinite(late.model)


def _wait(late: _Late) -> None:
    fsdp(late.model).wait_for_gradients()


def _zero(late: _Late) -> None:
    fsdp(late.model).zero_grad(set_to_none=False)


def _forward(late: _Late) -> None:
    late.model(X)


def _move(late: _Late) -> None:
    late.model.to(torch.float32)


def _remove(late: _Late) -> None:
    late.handle.remove()


def _step_another(late: _Late) -> None:
    torch.optim.SGD(late.model.layers[1].parameters(), lr=0.0).step()


def _step_with_a_closure(late: _Late) -> None:
    late.optimizer.step(lambda: 0.0)  # type: ignore[arg-type]


def _step_after_a_hook(late: _Late) -> None:
    def look(*_: object) -> None:
        assert late.missing() == set()

    late.optimizer.register_step_pre_hook(look)
    for _ in range(2):  # at first behind our hook, then before our hook
        late.optimizer.step()
        late.backward()
    late.optimizer.step()


def _give_up(late: _Late) -> None:
    fsdp(late.model).reset_iter_state()


@pytest.mark.parametrize(
    "look",
    [
        _clip,
        _find,
        _wait,
        _zero,
        _forward,
        _move,
        _remove,
        _step_another,
        _step_with_a_closure,
        _step_after_a_hook,
        _give_up,
    ],
    ids=lambda look: look.__name__.strip("_"),
)
def test_every_reader_of_late_gradients_waits_for_all_late_gradients(look: Callable[[_Late], None]) -> None:
    def check() -> None:
        late = _Late()
        for _ in range(2):
            late.backward()
            late.optimizer.step()
        assert late.backward() >= OUTER
        look(late)
        assert not [work for work in late.installed.values() if not work.is_before(late.streams.current.seen)]

    run_ranks(check, 2)


def test_backward_waits_for_gradients_of_a_tree_that_no_step_is_to_wait_for() -> None:
    def check() -> None:
        late = ADAMW(shard(Net()))
        overlap_optimizer(late, late_gradients=True)
        other = shard(Net())
        fake_streams(other)
        run_backward(other)
        assert not tree_of(other).step_end.is_deferred

    run_ranks(check, 2)


def test_gradients_that_go_to_the_cpu_are_not_late() -> None:
    def check() -> None:
        apply = shard_on((2,), mp_policy=BF16, offload_policy=CPUOffloadPolicy())
        pair = Overlapped(partial(Net, dim=8), apply, late_gradients=True)
        pair.backward()
        assert not tree_of(pair.model).step_end.is_deferred
        pair.train()

    run_ranks(check, 2)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Rprop"])
def test_steps_that_wait_for_gradients_are_the_same(name: str) -> None:
    def check() -> None:
        assert Overlapped(optimizer=named(name, lr=1e-2), late_gradients=True).train() == ["root", "layers.0"]

    run_ranks(check, 3)


def test_states_lie_in_the_order_of_the_groups_also_after_a_wait_on_one_rank() -> None:
    """torch's full state dict of an optimizer is a collective for each state, in the order of the states."""

    def check() -> None:
        model = shard(Net())
        optimizer = ADAMW(model)
        states = optimizer.state
        overlap_optimizer(optimizer, late_gradients=True)
        run_backward(model)
        if dist.get_rank() == 0:
            fsdp(model).wait_for_gradients()
        optimizer.step()
        assert optimizer.state is states
        assert all(a is b for a, b in zip(states, model.parameters(), strict=True))
        moments = {name: states[p]["exp_avg"].full_tensor() for name, p in model.named_parameters()}
        options = StateDictOptions(full_state_dict=True)
        gathered: Any = get_optimizer_state_dict(model, optimizer, options=options)["state"]
        for name, moment in moments.items():
            assert torch.equal(gathered[name]["exp_avg"], moment)

    run_ranks(check, 2)


def test_units_that_are_reduced_in_two_microbatches_on_two_streams_are_waited_for_on_both() -> None:
    """As with two groups, one cast: the last microbatch may use the uncast group alone."""

    def check() -> None:
        model = shard(Net())
        unit, tree = require_unit(model), tree_of(model)
        overlap = overlap_optimizer(torch.optim.AdamW(model.parameters()), late_gradients=True)
        streams, works = fake_streams(model), []
        for stream in (tree.streams.all_reduce_stream, tree.streams.reduce_scatter_stream):
            with tree.streams.on(stream):
                works.append(streams.work())
            overlap.gradients_reduced(tree, unit, {stream})
        overlap._wait_for_gradients_of(tree, [unit])
        assert all(work.is_before(streams.current.seen) for work in works)

    run_ranks(check, 1)
