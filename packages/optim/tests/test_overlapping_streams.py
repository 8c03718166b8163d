"""Streams of the work in a step that hides gathers, and the step in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import Net, fsdp, shard
from optimizer_models import Lion
from optimizer_pairs import Overlapped, X, named, run_backward

from lamella_engine.testing import Streams, fake_streams, gather_preparations_watched, streams_of, tree_of
from lamella_optim import overlap_optimizer
from lamella_testing import run_ranks


def test_gathers_wait_for_the_update_of_their_shards_and_not_for_later_updates() -> None:
    def check() -> None:
        model = shard(Net())
        streams = fake_streams(model)
        seen: list[dict[Any, int]] = []
        optimizer: Any = _TracedOnStreams(model.parameters())
        optimizer.streams, optimizer.work = streams, {}
        overlap_optimizer(optimizer)
        for step in range(3):
            run_backward(model)
            if step == 2:  # from an earlier step, without meaning for this one
                streams_of(model).post_optim_event = streams.compute.record_event()  # type: ignore[assignment]
            optimizer.work.clear()
            seen.clear()
            with gather_preparations_watched(lambda: seen.append(dict(streams.current.seen))):
                optimizer.step()
            optimizer.zero_grad()
        assert len(seen) == 2
        for name, parameter in model.named_parameters():
            is_late = name.startswith(("layers.1", "layers.2"))
            for event in seen:
                assert optimizer.work[id(parameter)].is_before(event) != is_late, name

    run_ranks(check, 2)


class _TracedOnStreams(Lion):
    """Puts something on the current stream for each parameter."""

    streams: Any = None
    work: Any = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.streams is not None:
            for p in (p for group in self.param_groups for p in group["params"]):
                self.work[id(p)] = self.streams.work()
        super().step()


def test_captured_steps_gather_no_units_and_captured_forwards_refuse_gathered_units(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check() -> None:
        pair = Overlapped()
        pair.train()
        monkeypatch.setattr(Streams, "is_captured", True)
        with pytest.raises(RuntimeError, match=r"remove\(\) what overlap_optimizer returned before the capture"):
            pair.model(X)
        for model in pair.models:
            fsdp(model).reset_iter_state()
        pair.backward()
        assert pair.step() == []

    run_ranks(check, 2)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch's own, of what Dynamo imports
def test_a_step_that_is_compiled_is_compiled_once_and_made_as_without() -> None:
    def check() -> None:
        pair = Overlapped(optimizer=named("SGD", lr=1e-2, momentum=0.9), late_gradients=True)
        gathered: list[str] = []
        graphs_of = pair.compile_steps()
        for _ in range(4):
            pair.backward()
            gathered += pair.step()
            assert not tree_of(pair.model).step_end.is_deferred
        assert gathered == []
        assert len(graphs_of[0]) == len(graphs_of[1]) > 0
        pair.assert_looks_alike()

    run_ranks(check, 2)
