"""Runs torch's pipeline schedules over stages that record calls and send nothing, one rank at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining import schedules

from lamella_schedule import PassPair, Pipeline

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SINGLE = ("GPipe", "1F1B")


class RecordingStage:
    """A stage for torch's schedules that appends the name of each pass to a list, and computes nothing."""

    def __init__(self, stage: int, num_stages: int, rank: int, num_ranks: int, record: Callable[[str], None]) -> None:
        self.stage_index, self.num_stages = stage, num_stages
        self.group_rank, self.group_size = rank, num_ranks
        self.submod, self.device = torch.nn.Identity(), torch.device("cpu")
        self.has_backward = True
        self._record = record

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self._record(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, *, full_backward: bool = True, **_: Any) -> None:
        self._record(f"{self.stage_index}{'B' if full_backward else 'I'}{microbatch}")

    def backward_weight_one_chunk(self, microbatch: int, **_: Any) -> None:
        self._record(f"{self.stage_index}W{microbatch}")

    def _nothing(self, *_: Any, **__: Any) -> Any:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing
    set_local_fwd_input = set_local_bwd_input = get_local_bwd_output = perform_reduce_grad = _nothing
    release_fwd_send_outputs = _nothing  # torch 2.15
    _prepare_forward_infra = _prepare_backward_infra = _create_grad_recv_info = _nothing


def passes_of_torch(schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int, rank: int) -> list[str]:
    """The passes that torch's schedule runs on a rank.

    Raises:
        ValueError: torch refuses the numbers.
    """
    passes: list[str] = []
    num_stages = num_ranks * stages_per_rank
    in_loop, in_v = range(rank, num_stages, num_ranks), (rank, num_stages - 1 - rank)
    indices = in_v if schedule in V_SHAPED else in_loop
    stages = [RecordingStage(i, num_stages, rank, num_ranks, passes.append) for i in indices]
    schedule_class: Any = schedules.get_schedule_class(schedule)
    run = schedule_class(stages[0] if schedule in SINGLE else stages, num_microbatches)
    # The stages have nothing to initialise: no buffers, no process group.
    run._initialize_stage = run._initialize_stages = lambda *_, **__: None
    run._has_backward = True
    run._step_microbatches([()] * num_microbatches, [{}] * num_microbatches)
    return passes


def events_of_torch(pipeline: Pipeline) -> list[list[str]]:
    """The passes and messages of each rank, by torch's own lowering of the pipeline's passes."""
    actions = {rank: [_action(item) for item in order] for rank, order in enumerate(pipeline.orders)}
    with_messages = schedules._add_send_recv(actions, lambda stage: pipeline.stage_ranks[stage], pipeline.num_stages)
    return [
        [str(action) for item in with_messages[rank] for action in (item.sub_actions or (item,))]
        for rank in range(pipeline.num_ranks)
    ]


def _action(item: Any) -> Any:
    if isinstance(item, PassPair):
        parts = (_action(item.forward), _action(item.backward))
        return schedules._Action(-1, schedules.OVERLAP_F_B, None, parts)
    return schedules._Action.from_str(str(item))
