"""The process beside each rank for writing checkpoints while the rank trains on.

Note [A checkpoint without a collective]
    Each rank's process writes files into the staged directory, whose name all ranks know from the start, and then
    `part-<rank>`, the table of written items. Rank 0's process waits for the parts of all ranks, writes the
    metadata and renames the directory. No main thread and no process group is involved, so a checkpoint completes while
    training computes, and also after training has ended.

    A failing process leaves `failed-<rank>` in the directory, with the reason; for a killed process, the rank writes
    the marker. Rank 0's process then gives up, and writes `failed-0`. When the rank is gone too, rank 0's process gives
    up after a minute without progress. Ranks learn the outcome elsewhere: Note [One outcome].

Note [A process outlives its rank]
    The process completes the save in hand after its rank was killed, perhaps minutes later, beside the processes of the
    next run. Two acts therefore belong to the rank, which has ended before the next run begins. The rank
    creates the staged directory: were the process to create it, a run that has removed the directory could not be sure
    that the save has ended, and the save could replace a newer checkpoint. The rank lists the leftovers for the process
    to clear: in a list of the process's own, the next run's staged directory would be a leftover, and its
    removal would leave that run waiting for the parts in it.

Note [Training comes first]
    The process has the highest nice value, and training's session. Linux weighs nice values only among the processes of
    one session (`sched_autogroup_enabled`, on by default): in a separate session the process would get as much of a
    core as training, whatever its nice value. A separate process group protects the process from keyboard interrupts,
    and from launchers killing a rank's group.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from lamella_checkpoint._formats.checksums import ByteSpan
from lamella_checkpoint._formats.dcp_write import Form, write_items
from lamella_checkpoint._formats.placed import Placed
from lamella_checkpoint._state.shares import Item, differing
from lamella_checkpoint._training.outcomes import Failures
from lamella_checkpoint._training.retention import Retention, leftovers_of_steps
from lamella_checkpoint._training.staging import Memory, MemorySlot
from lamella_files import (
    Leftover,
    check_replaceable,
    check_staged,
    is_of_save,
    leftovers,
    naming_target,
    publish,
    save_id_of,
    short,
)
from lamella_layout import Chunk

_PATIENCE_S: Final = 60.0
_PAUSES_S: Final = (0.01, 0.5)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One save, as sent from a rank to its process.

    Attributes:
        target: The checkpoint's directory.
        staged: The directory written first, with a name of this save's own.
        rank: The rank of this process.
        num_ranks: Number of parts in the checkpoint.
        memory_nbytes: How much of the memory to map.
        items: The items to write, tensors as slots of the memory.
        digests: The digests of this rank's shared lists, by the key of the sharing ranks.
        form: Rank 0's counts.
        retention: Removes old checkpoints after publication; None removes nothing.
        is_first: Whether this is the session's first save.
        leftovers: The leftovers that rank 0's process clears.
    """

    target: Path
    staged: Path
    rank: int
    num_ranks: int
    memory_nbytes: int
    items: Sequence[Item]
    digests: Mapping[str, str]
    form: Form
    retention: Retention | None
    is_first: bool
    leftovers: Sequence[Leftover] = ()

    def begun(self) -> "Job":
        """The job to send: Note [A process outlives its rank].

        Raises:
            OSError: The file system refused.

        Effects: creates the staged directory and its parents; rank 0 lists the target's folder.
        """
        self.staged.mkdir(parents=True, exist_ok=True)
        return replace(self, leftovers=[other for other in self._leftovers() if other.path != self.staged])

    def _leftovers(self) -> list[Leftover]:
        """The leftovers of saves to this target, or to any step under the root; on rank 0 alone."""
        if self.rank != 0:
            return []
        if self.retention is not None:
            return leftovers_of_steps(self.retention.root)
        return [leftover for leftover in leftovers(self.target.parent) if leftover.target == self.target.name]


class WriterAnswer(NamedTuple):
    """The end of a process's work on a save; the process no longer reads the rank's memory.

    Attributes:
        staged: The save's staged directory: Note [Answers name their save].
        failures: On rank 0 the save's outcome; elsewhere this rank's failure, or nothing once its part is written.
    """

    staged: Path
    failures: Failures


def serve(connection: Connection, memory: Memory) -> None:
    """Run jobs one after another, and answer each; end when the rank is gone."""
    while True:
        try:
            job: Job = connection.recv()
        except (EOFError, OSError):  # The rank has ended, or was killed.
            return
        # A readable connection during a job means end of file: the rank sends the next job only after the answer.
        failures = run(job, memory, is_orphan=connection.poll)
        try:
            connection.send(WriterAnswer(job.staged, failures))
        except OSError:
            return


def run(job: Job, memory: Memory, is_orphan: Callable[[], bool]) -> Failures:
    """Write this rank's part; on rank 0, complete and publish the checkpoint."""
    try:
        with naming_target(job.staged, job.target):
            _write_part(job, memory)
            if job.rank == 0:
                _publish_when_whole(job, _Waiting(is_orphan))
    except _Failed as failed:
        _give_up(job, "another rank failed")
        return failed.failures
    except Exception as error:  # noqa: BLE001  Any error must reach every rank, or the other ranks wait.
        if job.staged.exists() or not is_orphan():  # Else a later run has cleaned up; a marker would be a leftover.
            _give_up(job, describe(error))
        return {job.rank: describe(error)}
    return {}


def _give_up(job: Job, reason: str) -> None:
    discard_files(job)  # First: a full disk then has room for the marker's text.
    mark_failed(job.staged, job.rank, reason)


def is_settled(target: Path, staged: Path) -> bool:
    """Whether rank 0 has decided the outcome of a save.

    A replaced checkpoint is removed under the staged directory's name, so a staged directory may remain after success.
    """
    return not staged.exists() or (staged / "failed-0").exists() or is_published(target, staged)


def is_published(target: Path, staged: Path) -> bool:
    """Whether the staged directory has become the target: after an exchange, the path may hold the old target."""
    return is_of_save(target, save_id_of(staged))


def outcome_on_disk(target: Path, staged: Path) -> Failures:
    """The failures of a settled save; empty after success."""
    if is_published(target, staged):
        return {}
    return _marked(staged) or {0: "the staged directory was removed, and its checkpoint is not there"}


def part_name(rank: int) -> str:
    """The file in the staged directory with the table of a rank's written items."""
    return f"part-{rank}"


def mark_failed(staged: Path, rank: int, reason: str) -> None:
    """Tell all ranks' processes of this rank's failure; best effort where the file system refuses."""
    temporary, marker = staged / f"failing-{rank}", staged / f"failed-{rank}"
    with suppress(OSError):
        staged.mkdir(parents=True, exist_ok=True)
        temporary.touch()  # An empty file needs no data block, so a full disk still holds the marker.
        temporary.write_text(reason, encoding="utf-8")
    with suppress(OSError):
        temporary.rename(marker)


def describe(error: BaseException) -> str:
    """An error as text, to send to another process."""
    return f"{type(error).__name__}: {error}"


class _Failed(Exception):
    """Other ranks' parts will not come."""

    def __init__(self, failures: Failures) -> None:
        super().__init__(failures)
        self.failures = failures


class _Waiting:
    """Polls for other processes' files with growing pauses; gives up only after the rank itself is gone.

    A rank that lives ends the process after the saver's time limit.
    """

    def __init__(self, is_orphan: Callable[[], bool]) -> None:
        self._is_orphan = is_orphan

    def until(self, total: int, count: Callable[[], int]) -> None:
        """Return when the count has reached the total.

        Raises:
            TimeoutError: The rank is gone, and a minute has passed without progress.
        """
        pause, last, since = _PAUSES_S[0], count(), time.monotonic()
        while last < total:
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])
            progress = count()
            if progress != last or not self._is_orphan():
                last, since = progress, time.monotonic()
            elif time.monotonic() - since > _PATIENCE_S:
                raise TimeoutError(
                    f"Expected the other ranks' parts within {_PATIENCE_S:g} s, got {progress} of {total}."
                )


def _write_part(job: Job, memory: Memory) -> None:
    if job.rank == 0:
        check_replaceable(job.target)
        if job.is_first:  # A later cleaning would delete the last save's markers before other ranks have read them.
            _clear_leftovers(job)
    memory.map(job.memory_nbytes)
    items = [_over(memory, item) for item in job.items]
    placed = write_items(job.staged, job.rank, items, archive_checksums=job.form.archive_checksums)
    content = {"placed": [_as_json(written) for written in placed], "digests": dict(job.digests)}
    temporary = job.staged / f"writing-{job.rank}"
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.rename(job.staged / part_name(job.rank))


def _over(memory: Memory, item: Item) -> Item:
    return replace(item, value=memory.tensor(item.value)) if isinstance(item.value, MemorySlot) else item


def _publish_when_whole(job: Job, waiting: _Waiting) -> None:
    files = [job.staged / part_name(rank) for rank in range(job.num_ranks)]

    def num_parts() -> int:
        check_staged(job.staged, job.target)  # Parts in a removed directory would be awaited for ever.
        # One list a look: a question a part would be thousands for the file system, twice a second.
        names = os.listdir(job.staged)
        if any(name.startswith("failed-") for name in names) and (failures := _marked(job.staged)):
            raise _Failed(failures)
        return sum(name.startswith("part-") for name in names)

    waiting.until(job.num_ranks, num_parts)
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    _check_alike([content["digests"] for content in contents])
    parts = [[_from_json(fields) for fields in content["placed"]] for content in contents]
    job.form.complete(job.staged, parts, save_id_of(job.staged))
    _clear_leftovers(job)
    publish(job.staged, job.target)
    with suppress(OSError):  # The checkpoint is published; the next save removes any file that remains.
        # After publication only: if a rank's process was killed, the parts show that rank a complete part.
        for file in files:
            (job.target / file.name).unlink()
        if job.retention is not None:
            job.retention.apply(job.target)


def _check_alike(digests: Sequence[Mapping[str, str]]) -> None:
    if apart := differing(digests):
        key = min(apart)
        ranks = [rank for rank, rank_digests in enumerate(digests) if key in rank_digests]
        raise ValueError(
            f"Expected ranks that share values to hold the same names and shapes, got different ones on ranks "
            f"{short(ranks)}. They may differ in `save`, or from the first save in the background on."
        )


def _clear_leftovers(job: Job) -> None:
    for leftover in job.leftovers:
        leftover.clear()


def discard_files(job: Job) -> None:
    """Free disk space: remove this rank's files of a failed save."""
    for file in job.staged.glob(f"__{job.rank}_*"):
        file.unlink(missing_ok=True)


def _marked(staged: Path) -> dict[int, str]:
    """The marked failures. Rank 0 marks every failed save, so rank 0's marker counts only when alone."""
    failures = {}
    for marker in staged.glob("failed-*"):
        failures[int(marker.name.removeprefix("failed-"))] = marker.read_text(encoding="utf-8")
    return {rank: text for rank, text in failures.items() if rank or len(failures) == 1}


def _as_json(placed: Placed) -> list[object]:
    dtype = placed.dtype and str(placed.dtype).removeprefix("torch.")
    return [placed.names, placed.shape, placed.chunk, dtype, placed.file, placed.span, placed.checksum]


def _from_json(content: list[Any]) -> Placed:
    names, shape, chunk, dtype, file, span, checksum = content
    return Placed(
        names=tuple(names),
        shape=None if shape is None else tuple(shape),
        chunk=None if chunk is None else Chunk(*map(tuple, chunk)),
        dtype=None if dtype is None else getattr(torch, dtype),
        file=file,
        span=ByteSpan(*span),
        checksum=checksum,
    )


def main() -> None:
    """Serve the rank that started this process and passed two descriptors: a connection and a memory."""
    connection, memory = (int(argument) for argument in sys.argv[1:])
    serve(Connection(connection), Memory(memory))
