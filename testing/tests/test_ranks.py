"""`run_ranks`: results by rank, failures at once, hangs named."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lamella_testing import RankFailure, RankTimeout, Team, load_compiler, run_ranks
from lamella_testing._ranks import check_parent


def _sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def test_results_come_back_by_rank() -> None:
    assert run_ranks(lambda: dist.get_rank() * 10, 4) == [0, 10, 20, 30]


def test_ranks_share_one_process_group() -> None:
    assert run_ranks(_sum_of_ranks, 4) == [6.0] * 4


def test_run_ranks_gives_a_single_rank_a_process_group() -> None:
    assert run_ranks(dist.get_world_size, 1) == [1]


def test_arguments_and_closures_reach_every_rank() -> None:
    offset = 5
    assert run_ranks(lambda a, b: a + b + offset, 2, 1, 2) == [8, 8]


def test_tensors_come_back_by_value() -> None:
    results = run_ranks(lambda: {"weight": torch.full((300, 300), float(dist.get_rank()))}, 2)
    assert [result["weight"].mean().item() for result in results] == [0.0, 1.0]


def test_a_failing_rank_is_reported_with_traceback_and_other_ranks_are_killed() -> None:
    def fail_on_rank_one() -> None:
        if dist.get_rank() == 1:
            raise ValueError("the cause")
        _sum_of_ranks()  # Would hang: rank 1 never joins.

    start = time.monotonic()
    with pytest.raises(
        RankFailure,
        match=r"Rank 1 failed(?s:.*)fail_on_rank_one(?s:.*)ValueError: the cause",
    ) as info:
        run_ranks(fail_on_rank_one, 3)
    assert info.value.rank == 1
    assert time.monotonic() - start < 5


def test_a_rank_that_dies_is_named_with_its_signal() -> None:
    def die_on_rank_one() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        _sum_of_ranks()

    with pytest.raises(RankFailure, match="Rank 1 failed(?s:.*)SIGKILL"):
        run_ranks(die_on_rank_one, 2)


def test_a_dead_rank_is_named_though_a_peer_first_reports_a_lost_connection() -> None:
    def on_each_rank() -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("Connection reset by peer")
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailure, match="Rank 0 failed(?s:.*)SIGKILL"):
        run_ranks(on_each_rank, 2)


def test_a_crashed_rank_shows_its_stack() -> None:
    with pytest.raises(RankFailure, match="Rank 0 failed(?s:.*)SIGSEGV(?s:.*)in _crash"):
        run_ranks(_crash, 1)


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_rank_that_exits_is_a_failure_and_not_a_result() -> None:
    with pytest.raises(RankFailure, match="SystemExit"):
        run_ranks(lambda: sys.exit(0), 1)
    with pytest.raises(RankFailure, match="got exit code 3"):
        run_ranks(lambda: os._exit(3), 1)


def test_a_failing_pytest_assertion_helper_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="Failed: by pytest"):
        run_ranks(lambda: pytest.fail("by pytest"), 1)


def test_a_result_that_does_not_pickle_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="(?i)pickle"):
        run_ranks(lambda: lambda: None, 1)


def test_a_hang_times_out_and_shows_the_ranks_with_their_stacks() -> None:
    def sleep_forever() -> None:
        if dist.get_rank() > 0:
            time.sleep(100)

    with pytest.raises(RankTimeout, match=r"got ranks \[1, 2\] still running(?s:.*)sleep_forever") as info:
        run_ranks(sleep_forever, 3, timeout_s=1)
    assert info.value.ranks == [1, 2]


def test_no_child_outlives_the_call() -> None:
    def hang_after_telling(path: str) -> None:
        with open(path, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(100)

    path = f"/tmp/lamella-testing-{os.getpid()}"
    with pytest.raises(RankTimeout):
        run_ranks(hang_after_telling, 1, path, timeout_s=1)
    with open(path) as file:
        pid = int(file.read())
    os.unlink(path)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_parent_keeps_no_process_group() -> None:
    run_ranks(_sum_of_ranks, 2)
    assert not dist.is_initialized()


def test_ranks_can_run_autograd_after_the_parent_has() -> None:
    torch.ones(64, 64, requires_grad=True).matmul(torch.ones(64, 64)).sum().backward()  # type: ignore[no-untyped-call]

    def gradient() -> float:
        weight = torch.ones(64, 64, requires_grad=True)
        weight.matmul(torch.ones(64, 64)).sum().backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        return weight.grad[0, 0].item()

    assert run_ranks(gradient, 2) == [64.0, 64.0]


THREADS_OF_AUTOGRAD = r"Expected a parent process whose autograd has no threads.*`run_ranks\(..., num_ranks=1\)`"


def test_a_parent_whose_autograd_has_threads_is_refused() -> None:
    named, leave = threading.Event(), threading.Event()

    def pose() -> None:
        name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        name.write_text("pt_autograd_0")
        named.set()
        leave.wait()
        name.write_text("python")  # The kernel lists a thread a moment longer than the thread runs.

    thread = threading.Thread(target=pose)
    thread.start()
    assert named.wait(timeout=10)
    try:
        with pytest.raises(RuntimeError, match=THREADS_OF_AUTOGRAD):
            run_ranks(_sum_of_ranks, 1)
        with pytest.raises(RuntimeError, match=THREADS_OF_AUTOGRAD):
            Team(1).run(_sum_of_ranks)
    finally:
        leave.set()
        thread.join()
    assert run_ranks(_sum_of_ranks, 1) == [0.0]


PASS_BACKWARD_AND_FORK = """
import torch
from torch._subclasses import FakeTensorMode
from lamella_testing import run_ranks

with FakeTensorMode():
    pass
torch.ones((), requires_grad=True).backward()
run_ranks(lambda: None, 1)
"""


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="a torch for CPUs gives autograd no threads")  # type: ignore[no-untyped-call]
def test_autograd_has_threads_on_machines_with_real_or_fake_gpus() -> None:
    process = subprocess.run(
        [sys.executable, "-c", PASS_BACKWARD_AND_FORK], capture_output=True, text=True, check=False
    )
    assert re.search(THREADS_OF_AUTOGRAD, process.stderr), process.stderr


def test_garbage_collections_of_a_rank_visit_the_ranks_objects_alone() -> None:
    class Inherited:
        """Tracked by the collector, as every instance is."""

    inherited = Inherited()

    def visited() -> tuple[bool, bool]:
        created = Inherited()
        tracked = gc.get_objects()
        return any(tracked_object is inherited for tracked_object in tracked), any(
            tracked_object is created for tracked_object in tracked
        )

    assert run_ranks(visited, 1) == [(False, True)]


def test_ranks_that_compile_import_nothing_once_the_compiler_is_loaded() -> None:
    load_compiler()

    def imported() -> set[str]:
        before = set(sys.modules)
        torch.compile(torch.nn.Linear(2, 2), backend="aot_eager")(torch.ones(1, 2))
        return {name for name in set(sys.modules) - before if name.startswith("torch._inductor")}

    assert run_ranks(imported, 2) == [set(), set()]


def test_no_rank_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        run_ranks(_sum_of_ranks, 0)


def test_a_missing_gpu_is_an_error_and_never_a_skip() -> None:
    with pytest.raises(
        RuntimeError,
        match=r"Expected at least 1000 visible GPUs for 1000 ranks with 1 a GPU, got \d+\.",
    ):
        run_ranks(_sum_of_ranks, 1000, device="cuda")


def test_ranks_share_gpus_only_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamella_testing._ranks.num_visible_gpus", lambda: 1)
    with pytest.raises(RuntimeError, match="at least 2 visible GPUs for 2 ranks with 1 a GPU, got 1"):
        check_parent(2, "cuda")
    monkeypatch.setenv("LAMELLA_RANKS_PER_GPU", "2")
    check_parent(2, "cuda")
    with pytest.raises(RuntimeError, match="at least 2 visible GPUs for 3 ranks with 2 a GPU, got 1"):
        check_parent(3, "cuda")


def test_four_ranks_take_a_fraction_of_a_second() -> None:
    durations = []
    for _ in range(5):
        start = time.monotonic()
        run_ranks(_sum_of_ranks, 4)
        durations.append(time.monotonic() - start)
    assert min(durations) < 1.0, durations
