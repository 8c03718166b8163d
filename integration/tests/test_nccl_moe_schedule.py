"""The schedule on real streams: random sleeps on every stream change no bit of plain training.

`gpu1` needs one GPU: the all-to-all goes over one rank, and sleeps make the communication stream late. `gpu2` sends
tokens over NCCL. The parent never touches a GPU, so that ranks can be forked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch
import torch._dynamo  # as in test_nccl: once here instead of once a rank
import torch.distributed as dist
from moe_training import layers_of, plain_step, scheduled_step, sharded, train

from lamella_engine.testing import streams_of
from lamella_integration.moe import MoE
from lamella_integration.repeatable import use_repeatable_kernels
from lamella_schedule import Event
from lamella_testing import run_ranks

# torch's warning if a thread of autograd multiplies first; torch then sets the context up and goes on.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
]

WIDTH, NUM_TOKENS = 128, 256
LONGEST_SLEEP = 1_000_000  # cycles: 0.5 ms, longer than any of the model's kernels


class _Sleeps:
    """Lets the event's stream, or a stream of the engine, sleep at random, differently on each rank."""

    def __init__(self, model: MoE) -> None:
        self._choose = Random(dist.get_rank())
        self._streams = streams_of(model)

    @contextmanager
    def __call__(self, event: Event) -> Iterator[None]:
        self._maybe_sleep()
        yield
        self._maybe_sleep()

    def _maybe_sleep(self) -> None:
        if self._choose.random() > 0.3:
            return
        streams = self._streams
        late = [streams.compute_stream, streams.all_gather_stream, streams.reduce_scatter_stream]
        with streams.on(self._choose.choice(late)):  # the compute stream of the engine is the lane's here
            torch.cuda._sleep(self._choose.randrange(LONGEST_SLEEP))  # type: ignore[no-untyped-call]


def _model(stage: str, *, ep: int, is_delayed: bool) -> MoE:
    return sharded(ep, stage, has_shared=True, is_delayed=is_delayed, device="cuda", width=WIDTH)


def _assert_late_streams_change_no_bit(stage: str, num_ranks: int, num_steps: int, *, is_delayed: bool) -> None:
    def on_each_rank() -> tuple[list[bool], int]:
        use_repeatable_kernels()
        size = {"num_steps": num_steps, "num_tokens": NUM_TOKENS}
        plain = train(_model(stage, ep=num_ranks, is_delayed=is_delayed), plain_step, **size)
        equal = []
        for early_release in (False, True):
            model = _model(stage, ep=num_ranks, is_delayed=is_delayed)
            trace = train(model, scheduled_step, early_release=early_release, around=_Sleeps(model), **size)
            equal.append(all(torch.equal(a, b) for a, b in zip(plain, trace, strict=True)))
        return equal, len(layers_of(model))

    for equal, num_layers in run_ranks(on_each_rank, num_ranks, device="cuda", timeout_s=600):
        assert equal == [True, True]
        assert num_layers > 1, "a single layer pairs with itself alone"


@pytest.mark.gpu1
@pytest.mark.parametrize("stage", ["ZERO1", "ZERO3"])
@pytest.mark.parametrize("is_delayed", [False, True], ids=["at once", "delayed"])
def test_late_streams_change_no_bit_of_plain_training(stage: str, is_delayed: bool) -> None:
    _assert_late_streams_change_no_bit(stage, 1, 20, is_delayed=is_delayed)


@pytest.mark.gpu2
@pytest.mark.parametrize("stage", ["ZERO1", "ZERO3"])
def test_late_streams_change_no_bit_over_two_hundred_steps_of_two_gpus(stage: str) -> None:
    _assert_late_streams_change_no_bit(stage, 2, 200, is_delayed=True)
