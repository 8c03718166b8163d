"""Run a function on every rank of a fresh process group, in forked children.

Note [Why fork]
    Importing torch takes seconds; a forked child inherits the import. Four gloo ranks and an `all_reduce` take 0.1 s
    with fork and 7-9 s with spawn or forkserver. Import slow modules (`torch.distributed.fsdp`, DTensor) at the top of
    the test module: once in the parent instead of once per rank. On CUDA the parent must not have used
    a GPU.

Note [Ranks that share a GPU]
    NCCL refuses two ranks of a host on one GPU. With `LAMELLA_RANKS_PER_GPU=2` in the environment each rank names a
    host of its own (`NCCL_HOSTID`), so that NCCL sends between them through sockets: streams, kernels and their order
    are NCCL's, and only the wire is slow. Results count as those of two ranks, speeds do not. Transports that write
    into a peer's GPU memory need a GPU a rank.

Note [Ranks end together]
    A finished or failed rank stays alive until the parent releases it. Its closing sockets would otherwise raise errors
    in its peers, and a peer's error could reach the parent before the cause.

Note [Inherited objects are frozen]
    A collection of garbage visits every object of the process, and a first visit copies the page that the fork shares:
    0.3 s for the objects of a parent with torch and torch's compiler. `gc.freeze` leaves the inherited objects out, so
    that a test's `gc.collect()` visits only the test's objects. An inherited cycle is not collected in a rank: a test
    of freed objects makes the objects in the rank.

Note [Ranks do not preempt]
    A message wakes the thread in which a rank's gloo looks at sockets. Under Linux's usual policy the woken thread
    takes the core from the sending thread, often inside a lock, and then asks for the lock over and over.
    With SCHED_BATCH a woken thread waits for its turn: on two cores an `all_reduce` of four ranks takes 1.8 ms of CPU
    instead of 8 ms. All threads of a rank have the same share of time as before.
"""

import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Literal, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist

from lamella_testing import _huge_pages

Result = TypeVar("Result")
Args = TypeVarTuple("Args")
Device = Literal["cpu", "cuda"]

_FORK = multiprocessing.get_context("fork")
_LEAVE_TIMEOUT_S = 10.0
_FORKS_BEFORE_HUGE_PAGES = 30  # at this number of forks, huge pages have saved their cost
_forks = itertools.count()
RANKS_PER_GPU = "LAMELLA_RANKS_PER_GPU"
"""The environment variable with the number of ranks on a GPU; see Note [Ranks that share a GPU]."""


class RankFailure(RuntimeError):
    """A rank raised, or died without an exception. All other ranks have been killed."""

    def __init__(self, rank: int, rank_traceback: str) -> None:
        super().__init__(f"Rank {rank} failed:\n{rank_traceback}")
        self.rank = rank
        self.rank_traceback = rank_traceback


class RankTimeout(TimeoutError):
    """Some ranks did not finish in time. All ranks have been killed."""

    def __init__(self, ranks: list[int], timeout_s: float, stacks: str) -> None:
        super().__init__(
            f"Expected every rank to finish within {timeout_s:g} s, got ranks {ranks} still running:\n{stacks}"
        )
        self.ranks = ranks


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """The parent's handles of a child process."""

    rank: int
    process: ForkProcess
    connection: Connection
    stack_file: Path


def run_ranks(
    fn: Callable[[*Args], Result],
    num_ranks: int,
    *args: *Args,
    device: Device = "cpu",
    backend: str | None = None,
    timeout_s: float = 120.0,
) -> list[Result]:
    """Run `fn(*args)` on every rank of a fresh default process group; return the results by rank.

    Each rank is a forked process, and `torch.distributed` is initialised. On "cuda", rank r has GPU r as its current
    device, or shares a GPU by Note [Ranks that share a GPU].

    Args:
        fn: May be a closure. The result must pickle, with tensors on the CPU.
        num_ranks: At least 1. A single rank gets a process group too.
        args: Arguments of `fn`.
        device: "cpu" for gloo, "cuda" for NCCL.
        backend: Backend of the process group, in torch's spelling ("cpu:gloo,cuda:nccl" for both). None: gloo or NCCL.
        timeout_s: Limit in seconds for all ranks together, start included.

    Raises:
        RankFailure: A rank raised or died. Carries the rank and its traceback.
        RankTimeout: Ranks were still running at the limit. Carries the ranks; the message shows their stacks.
        RuntimeError: Fewer GPUs than ranks are visible; or the calling process has used CUDA, or run backward with
            GPUs visible.
        ValueError: `num_ranks` is below 1.

    Effects: forks `num_ranks` children and waits for them; no child outlives the call.
    """
    if num_ranks < 1:
        raise ValueError(f"Expected `num_ranks` of at least 1, got {num_ranks}.")
    check_parent(num_ranks, device)
    with tempfile.TemporaryDirectory(prefix="lamella-ranks-") as directory:
        ranks: list[RankProcess] = []

        def serve(rank: int, connection: Connection) -> None:
            def call() -> Result:
                join_group(rank, num_ranks, Path(directory), device, backend)
                return fn(*args)

            _serve(connection, call)

        try:
            # No comprehension: if a later start fails, `kill` must find the earlier ranks in the list.
            for rank in range(num_ranks):
                ranks.append(start(rank, Path(directory), serve))  # noqa: PERF401
            payloads = collect(ranks, timeout_s)
            _let_go(ranks)
        finally:
            kill(ranks)
    return [pickle.loads(payload) for payload in payloads]


def check_parent(num_ranks: int, device: Device) -> None:
    """Refuse to fork from a process whose children could not run autograd, or could not use GPUs."""
    if any(name.startswith("pt_autograd") for name in _thread_names()):
        raise RuntimeError(
            "Expected a parent process whose autograd has no threads, got a process that ran backward with visible "
            "GPUs, or with FakeTensorMode's: forked ranks cannot run backward. Move the backward into "
            "`run_ranks(..., num_ranks=1)`; for tests without GPUs, CUDA_VISIBLE_DEVICES='' hides the GPUs."
        )
    if device == "cuda":
        _check_gpus(num_ranks)


def start_autograd() -> None:
    """Start autograd in this process, where no GPU is visible: without threads, so that later forks can run backward.

    The first backward of a process starts a thread for each device, and since torch 2.15 FakeTensorMode feigns eight.
    """
    if not num_visible_gpus():
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]


def _thread_names() -> Iterator[str]:
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # The thread has ended meanwhile.
            yield (thread / "comm").read_text()


def _check_gpus(num_ranks: int) -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "Expected a parent process that has not used CUDA, got a process that has: forked ranks cannot use CUDA. "
            "Move the GPU work of the parent into `run_ranks(..., num_ranks=1, device='cuda')`. The import of "
            "torchao or flash-linear-attention is such work, and transformers imports them where they are installed."
        )
    num_gpus, shared = num_visible_gpus(), ranks_per_gpu()
    if num_gpus * shared < num_ranks:
        raise RuntimeError(
            f"Expected at least {-(-num_ranks // shared)} visible GPUs for {num_ranks} ranks with "
            f"{shared} a GPU, got {num_gpus}. Run the test on a host with enough GPUs, deselect the test by its "
            f"marker, or set {RANKS_PER_GPU} for ranks that share GPUs."
        )


def ranks_per_gpu() -> int:
    """Return how many ranks of a test share a GPU; see Note [Ranks that share a GPU]."""
    return int(os.environ.get(RANKS_PER_GPU, "1"))


def num_visible_gpus() -> int:
    # Counted in a child: without NVML, counting initialises the CUDA driver, and later forks could not use the GPUs.
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _fork(lambda: sender.send(torch.cuda.device_count()))
    sender.close()
    try:
        return int(receiver.recv())
    except EOFError:
        return 0
    finally:
        receiver.close()
        process.join()


def _fork(target: Callable[[], None]) -> ForkProcess:
    process = _FORK.Process(target=target)
    with quiet_fork():
        process.start()
    return process


@contextmanager
def quiet_fork() -> Iterator[None]:
    """Fork in the block: the child prints no text of its parent's, and Python does not warn of the parent's threads."""
    sys.stdout.flush()  # A child inherits unflushed buffers and would print the parent's text again.
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns when a process with threads forks. The threads here are torch's idle pools and those of
        # process groups; the children, limited to one compute thread, never enter the pools.
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded.*fork.*")
        yield


def start(rank: int, directory: Path, serve: Callable[[int, Connection], None]) -> RankProcess:
    """Fork a rank; the child runs `serve(rank, connection)` and then ends its process.

    Effects: a process that forks many ranks moves its heap to huge pages, once.
    """
    if next(_forks) == _FORKS_BEFORE_HUGE_PAGES:
        _huge_pages.collapse()
    parent_end, child_end = _FORK.Pipe(duplex=True)
    stack_file = directory / f"stack-{rank}"

    def main() -> None:
        gc.freeze()  # Note [Inherited objects are frozen]
        parent_end.close()
        stacks = stack_file.open("w")
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        faulthandler.enable(stacks)  # for signals that end the process
        try:
            serve(rank, child_end)
        except (EOFError, OSError):
            pass  # The parent has ended, or closed the connection: end too.
        finally:
            # Threads of the process group may want the interpreter lock during the interpreter's shutdown, and abort
            # the process (pytorch PR 179291).
            os._exit(0)

    process = _fork(main)
    child_end.close()  # With the child as the only holder, the child's death is an end of file on `parent_end`.
    return RankProcess(rank=rank, process=process, connection=parent_end, stack_file=stack_file)


def join_group(rank: int, num_ranks: int, directory: Path, device: Device, backend: str | None = None) -> None:
    """Initialise the default process group and this process's device. Effects: collective over all ranks."""
    if device == "cpu":
        with suppress(OSError):  # Some containers forbid the call: ranks are slower there.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # Note [Ranks do not preempt]
    torch.set_num_threads(1)  # OpenMP's worker threads do not survive a fork: with more threads the child would hang.
    gpu = take_gpu(rank) if device == "cuda" else None
    dist.init_process_group(
        backend or ("nccl" if device == "cuda" else "gloo"),
        init_method=f"file://{directory / 'store'}",
        rank=rank,
        world_size=num_ranks,
        device_id=gpu,
    )


def take_gpu(rank: int) -> torch.device:
    """Make a rank's GPU this process's device, before its process group; see Note [Ranks that share a GPU].

    Args:
        rank: Among the ranks of this host.
    """
    shared = ranks_per_gpu()
    device = torch.device("cuda", rank // shared)
    torch.cuda.set_device(device)
    if shared > 1:
        os.environ.update(host_variables(rank))
    return device


def host_variables(rank: int) -> dict[str, str]:
    """Return NCCL's variables of a rank that is a host of its own; see Note [Ranks that share a GPU]."""
    return {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def outcome_of(call: Callable[[], object]) -> bytes:
    """Run a call and encode its result (`+` and a pickle) or its traceback (`-` and text), for `collect`."""
    try:
        # Not `connection.send`: torch's reducer sends tensors as file descriptors of this process, which ends soon.
        message = b"+" + pickle.dumps(call())
    except BaseException:  # noqa: BLE001  pytest's outcomes and SystemExit must be reported too.
        message = b"-" + traceback.format_exc().encode()
    sys.stdout.flush()
    sys.stderr.flush()
    return message


def _serve(connection: Connection, call: Callable[[], object]) -> None:
    """Send the outcome, and wait for the parent's release; see Note [Ranks end together]."""
    connection.send_bytes(outcome_of(call))
    connection.recv_bytes()
    if dist.is_initialized():
        dist.destroy_process_group()


def collect(ranks: list[RankProcess], timeout_s: float) -> list[bytes]:
    """Return every rank's pickled result, or raise the first failure."""
    deadline = time.monotonic() + timeout_s
    by_connection = {rank.connection: rank for rank in ranks}
    payloads: dict[int, bytes] = {}
    while len(payloads) < len(ranks):
        waiting = [rank.connection for rank in ranks if rank.rank not in payloads]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            running = [rank for rank in ranks if rank.rank not in payloads]
            raise RankTimeout([rank.rank for rank in running], timeout_s, _stacks(running))
        arrived = [by_connection[connection] for connection in ready if isinstance(connection, Connection)]
        payloads.update((rank.rank, payload) for rank, payload in _receive(arrived, ranks))
    return [payloads[rank.rank] for rank in ranks]


def _receive(arrived: list[RankProcess], ranks: list[RankProcess]) -> list[tuple[RankProcess, bytes]]:
    results, failures = [], []
    for rank in arrived:
        try:
            message = rank.connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            # Raised at once: failures of the dead rank's peers are consequences.
            raise RankFailure(rank.rank, _describe_death(rank)) from None
        if message[:1] == b"+":
            results.append((rank, message[1:]))
        else:
            failures.append(RankFailure(rank.rank, message[1:].decode()))
    if failures:
        if "by peer" in str(failures[0]):  # a dying rank's sockets are closed before the pipe
            _raise_death([rank for rank in ranks if rank not in arrived])
        raise failures[0]
    return results


def _raise_death(ranks: list[RankProcess]) -> None:
    """Raise the failure of a rank that is dead, or dies within a few seconds."""
    dying = wait([rank.process.sentinel for rank in ranks], timeout=_LEAVE_TIMEOUT_S)
    for rank in ranks:
        if rank.process.sentinel in dying:
            rank.process.join(_LEAVE_TIMEOUT_S)  # The sentinel is closed before the exit code can be asked for.
            if rank.process.exitcode != 0:
                raise RankFailure(rank.rank, _describe_death(rank))


def _describe_death(rank: RankProcess) -> str:
    rank.process.join(_LEAVE_TIMEOUT_S)
    code = rank.process.exitcode
    if code is not None and code < 0:
        return f"Expected a result, got death by {signal.Signals(-code).name}.\n{rank.stack_file.read_text()}".rstrip()
    return f"Expected a result, got exit code {code}."


def _stacks(ranks: list[RankProcess]) -> str:
    for rank in ranks:
        if rank.process.pid is not None and rank.process.is_alive():
            os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(0.2)  # faulthandler writes from the signal handler, without any sign of completion to wait for.
    return "\n".join(f"Rank {rank.rank}: {rank.stack_file.read_text()}" for rank in ranks)


def _let_go(ranks: list[RankProcess]) -> None:
    for rank in ranks:
        rank.connection.send_bytes(b"")
    deadline = time.monotonic() + _LEAVE_TIMEOUT_S
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))


def kill(ranks: list[RankProcess]) -> None:
    """Kill the ranks, reap their processes and close the connections."""
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.process.close()
        rank.connection.close()
