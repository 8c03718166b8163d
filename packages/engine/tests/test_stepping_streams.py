"""On which streams an optimizer steps inside backward, and what waits for it."""

from __future__ import annotations

import weakref

import pytest
import torch
from engine_models import Net, shard, shard_on, unit
from fake_streams import Work, fake_streams
from optimizer_models import Lion
from optimizer_pairs import LOSS, run_backward
from torch.distributed.tensor import DTensor

from lamella_engine import step_in_backward
from lamella_engine._attached import state_of
from lamella_engine._parameter_group import ParameterGroup, Reduced
from lamella_testing import run_ranks


@pytest.mark.parametrize("num_axes", [1, 2])
def test_updates_come_after_gradients_and_before_whatever_follows_backward(
    num_axes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ParameterGroup.install_gradients

    def check() -> None:
        model = shard_on((2,) * num_axes)(Net())
        streams = fake_streams(model)
        installed: list[Work] = []
        updated: list[Work] = []

        class Noting(Lion):
            def step(self, closure: None = None) -> None:  # type: ignore[override]
                if any(isinstance(p, DTensor) for p in self.param_groups[0]["params"]):  # not as it is tried
                    assert all(work.is_before(streams.current.seen) for work in installed)
                    updated.append(streams.work())
                super().step()

        def install(self: ParameterGroup, reduced: Reduced) -> None:
            installed.append(streams.work())
            real(self, reduced)

        monkeypatch.setattr(ParameterGroup, "install_gradients", install)
        context = state_of(model).context
        optimizer = Noting(model.parameters())
        step_in_backward(optimizer)
        for _ in range(2):
            run_backward(model)
            assert len(updated) == len(installed) == 4
            assert {id(work.stream) for work in updated} == {id(context.update_stream)}
            assert all(work.is_before(streams.compute.seen) for work in updated)
            with torch.no_grad():
                LOSS(model)
            assert all(work.is_before(context.all_gather_stream.seen) for work in updated)  # type: ignore[attr-defined]
            optimizer.step()
            assert len(updated) == 4, "nothing was left to step"
            optimizer.zero_grad()
            installed.clear()
            updated.clear()

    run_ranks(check, 2**num_axes)


@pytest.mark.parametrize("num_axes", [1, 2])
def test_freed_gradients_are_used_again_after_their_update(num_axes: int) -> None:
    """Whatever gets their memory comes on a stream that waited: the one that reduces, or all, at the end."""
    freed: list[bool] = []
    alive: list[int] = []

    def check() -> None:
        model = shard_on((2,) * num_axes)(Net(num_layers=6))
        streams = fake_streams(model)
        context = state_of(model).context

        def note(work: Work) -> None:
            reducing = [context.reduce_scatter_stream, context.all_reduce_stream][:num_axes]
            waiting = [streams.compute.seen, *(stream.seen for stream in reducing)]  # type: ignore[attr-defined]
            freed.append(all(work.is_before(seen) for seen in waiting[1:]) or work.is_before(waiting[0]))

        class Noting(Lion):
            def step(self, closure: None = None) -> None:  # type: ignore[override]
                gradients = [p.grad for p in self.param_groups[0]["params"] if isinstance(p.grad, DTensor)]
                work = streams.work()
                alive.append(len(gradients) and len(freed))
                for gradient in gradients:
                    weakref.finalize(gradient.to_local(), note, work)
                super().step()

        optimizer = Noting(model.parameters())
        step_in_backward(optimizer, free_gradients=True)
        run_backward(model)
        assert len(freed) == len(list(model.parameters()))
        assert all(freed)
        assert alive[-1] >= 4 * (6 - 2), "units' gradients go while backward goes on"

    run_ranks(check, 2**num_axes)


def test_a_gather_of_a_unit_that_was_stepped_comes_after_its_update() -> None:
    def check() -> None:
        model = shard(Net())
        streams = fake_streams(model)
        context = state_of(model).context
        seen: list[bool] = []

        class Noting(Lion):
            def step(self, closure: None = None) -> None:  # type: ignore[override]
                if isinstance(self.param_groups[0]["params"][0], DTensor):
                    work = streams.work()
                    if len(self.param_groups[0]["params"]) == 4 and not seen:
                        last = unit(model.layers[-1])
                        last.unshard(async_op=True)
                        seen.append(work.is_before(context.all_gather_stream.seen))  # type: ignore[attr-defined]
                super().step()

        optimizer = Noting(model.parameters())
        step_in_backward(optimizer)
        run_backward(model)
        assert seen == [True]

    run_ranks(check, 2)
