"""An event may say when the optimizer was done, in place of all that came before the forward."""

from __future__ import annotations

from typing import Any

import torch
from engine_models import assert_trains_alike, fsdp, inputs, mean_square, twins
from torch import nn

from lamella_engine.testing import streams_of
from lamella_testing import run_ranks

X = inputs()
LOSS = mean_square(lambda model: model(X))


def _waits(model: nn.Module) -> list[object]:
    """What the gather stream will have waited for: events, and whole streams."""
    waits: list[object] = []
    stream: Any = streams_of(model).all_gather_stream
    stream.wait_event = stream.wait_stream = waits.append
    return waits


def test_the_post_optim_event_replaces_the_stream_wait_of_the_next_forward_alone() -> None:
    def check() -> None:
        _, model = twins()
        waits = _waits(model)
        event = torch.Event("cpu")
        fsdp(model.get_submodule("layers.0")).set_post_optim_event(event)  # the whole tree's, whichever unit is told
        model(X)
        assert waits[0] is event
        waits.clear()
        fsdp(model).reset_iter_state()
        waits.clear()
        model(X)
        assert event not in waits
        assert waits[0] == streams_of(model).compute_stream

    run_ranks(check, 1)


def test_shards_replaced_after_the_post_optim_event_are_waited_for() -> None:
    def check() -> None:
        reference, model = twins()
        event = torch.Event("cpu")
        fsdp(model).set_post_optim_event(event)
        replaced = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(replaced, assign=True)  # copied into the flat buffer on the compute stream
        waits = _waits(model)
        model(X)
        assert event not in waits
        fsdp(model).reset_iter_state()
        assert_trains_alike(reference, model, LOSS)

    run_ranks(check, 2)
