"""Steps that succeed on every rank or raise on every rank.

Note [One verdict]
    An error raised on one rank only is a hang on the peers, at their next collective. Every step of a save or a load
    therefore runs inside `exchange`, whose two collectives carry the errors too: a failed rank still takes
    part, and then all ranks raise. torch's own wrapper does the same but pickles the exception objects with their
    tracebacks (an unpicklable exception fails, and hangs) and raises a `BaseException`, missed by
    `except Exception`; `exchange` sends text and raises an `Exception`.

Note [One error for a checkpoint]
    A file read by a single rank is damaged for every rank: the checkpoint's own errors, made of text alone, are sent
    unchanged, and every rank raises the error of the lowest rank with one. A program that falls back on an earlier
    checkpoint after `CheckpointDamaged` would otherwise fall back on one rank, and end on the peers.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from lamella_files import CheckpointDamaged, CheckpointFailed, CheckpointMismatch

_CHECKPOINTS_ERRORS = (CheckpointDamaged, CheckpointMismatch)
Mine = TypeVar("Mine")
Reply = TypeVar("Reply")


class _Report(NamedTuple):
    """A rank's report to rank 0: the result, or the reason of a failure, with the checkpoint's own error if raised."""

    value: object
    failure: str | None
    checkpoints_error: Exception | None


class _RankAnswer(NamedTuple):
    """Rank 0's answer: the reply, or the failures by rank, and the checkpoint's error, raised on every rank."""

    value: object
    failures: Mapping[int, str]
    checkpoints_error: Exception | None = None


def rank() -> int:
    """This process's rank in the default group; 0 without a group."""
    return dist.get_rank() if _is_distributed() else 0


def num_ranks() -> int:
    """The size of the default group; 1 without a group."""
    return dist.get_world_size() if _is_distributed() else 1


def on_device_of(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
    """Make the tensors' accelerator the current device inside the block.

    Object collectives of a group with NCCL alone send their bytes from the *current* device, and two ranks
    with the same current device (the first, by default) are an error.
    """
    indices = (tensor.device.index for tensor in tensors if tensor.device.type not in ("cpu", "meta"))
    return next((torch.accelerator.device_index(index) for index in indices), nullcontext())


def exchange(step: str, work: Callable[[], Mine], at_zero: Callable[[list[Mine]], list[Reply]]) -> Reply:
    """Run `work` on every rank, hand all results to rank 0, and give each rank a reply.

    Args:
        step: The ranks' common task, as a verb phrase for the error message.
        work: Runs on every rank; the result must pickle.
        at_zero: Runs on rank 0 with the results by rank; returns the replies by rank.

    Returns:
        This rank's reply.

    Raises:
        CheckpointDamaged, CheckpointMismatch: Raised by a rank's work: by Note [One error for a checkpoint], every rank
            raises the same error, but ranks with an error of another kind.
        CheckpointFailed: Another rank failed in another way. A failed rank raises its own error.

    Effects: collective on the default group: gathers an object to rank 0 and scatters an object back; nothing without a
        group.
    """
    value, error = _attempt(work)
    answers: list[_RankAnswer] | None = None
    checkpoints_error = error if isinstance(error, _CHECKPOINTS_ERRORS) else None
    reports = _gather_to_zero(_Report(value, _describe(error), checkpoints_error))
    if reports is not None:
        answers, error_at_zero = _answers(reports, at_zero)
        error = error or error_at_zero
    answer = _scatter_from_zero(answers)
    if error is not None and (checkpoints_error is None or str(checkpoints_error) == str(answer.checkpoints_error)):
        raise error  # with this rank's traceback
    if answer.checkpoints_error is not None:
        raise answer.checkpoints_error
    if answer.failures:
        raise CheckpointFailed(step, answer.failures)
    return cast(Reply, answer.value)


def everywhere(step: str, work: Callable[[], Mine]) -> Mine:
    """The result of `work` on this rank, if `work` succeeded on every rank.

    Effects: collective on the default group (one `exchange`).
    """
    results: list[Mine] = []
    exchange(step, lambda: results.append(work()), lambda _: [None] * num_ranks())
    return results[0]


def on_rank_zero(step: str, work: Callable[[], Reply]) -> Reply:
    """The result of `work`, run on rank 0 alone and sent to every rank.

    Effects: collective on the default group (one `exchange`).
    """
    return exchange(step, lambda: None, lambda _: [work()] * num_ranks())


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _attempt(work: Callable[[], Mine]) -> tuple[Mine | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:  # noqa: BLE001  Note [One verdict]: even an interrupt must reach all ranks.
        return None, error


def _describe(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


def _answers(
    reports: list[_Report], at_zero: Callable[[list[Mine]], list[Reply]]
) -> tuple[list[_RankAnswer], BaseException | None]:
    """The replies of rank 0, all failures if any rank failed; and rank 0's own error, if `at_zero` failed."""
    error = None
    failures = {index: report.failure for index, report in enumerate(reports) if report.failure is not None}
    if not failures:
        replies, error = _attempt(lambda: at_zero([cast(Mine, report.value) for report in reports]))
        if replies is not None:
            return [_RankAnswer(reply, {}) for reply in replies], None
        failures = {0: str(_describe(error))}
    checkpoints_error = next((report.checkpoints_error for report in reports if report.checkpoints_error), None)
    return [_RankAnswer(None, failures, checkpoints_error) for _ in reports], error


def _gather_to_zero(report: _Report) -> list[_Report] | None:
    if not _is_distributed():
        return [report]
    reports = [report] * num_ranks() if rank() == 0 else None
    dist.gather_object(report, reports, dst=0)
    return reports


def _scatter_from_zero(answers: list[_RankAnswer] | None) -> _RankAnswer:
    if not _is_distributed():
        assert answers is not None
        return answers[0]
    received: list[_RankAnswer] = [_RankAnswer(None, {})]
    dist.scatter_object_list(received, answers, src=0)
    return received[0]
