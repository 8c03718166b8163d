from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from lamella_buffers import GlooTransport, LocalTransport, NcclTransport, Payload, Transport, transport_for
from lamella_buffers._exchange import add_up, arrivals_numel, places_for
from lamella_buffers._transport import _is_one_host
from lamella_buffers.testing import check_transport
from lamella_testing import run_ranks


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def test_the_local_transport_conforms() -> None:
    assert isinstance(LocalTransport(), Transport)
    check_transport(LocalTransport())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_gloo_conforms(num_ranks: int) -> None:
    def check() -> str:
        transport = GlooTransport(_world())
        assert isinstance(transport, Transport)
        check_transport(transport)
        return type(transport_for(_world(), "cpu")).__name__

    expected = "LocalTransport" if num_ranks == 1 else "GlooTransport"
    assert run_ranks(check, num_ranks) == [expected] * num_ranks


@pytest.mark.parametrize(
    ("config", "device_type", "expected"),
    [
        ("cuda:nccl", "cuda", "NcclTransport"),
        ("cpu:gloo,cuda:nccl", "cuda", "NcclTransport"),
        ("cpu:gloo,cuda:nccl", "cpu", "GlooTransport"),
    ],
)
def test_a_group_with_torchs_default_backend_uses_nccl_on_gpus_and_gloo_on_cpus(
    config: str, device_type: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`init_process_group()` leaves the choice to torch, which then calls the group's backend "undefined"."""

    def check() -> str:
        monkeypatch.setattr(dist, "get_backend", lambda _: "undefined")
        monkeypatch.setattr(dist, "get_backend_config", lambda _: config)
        return type(transport_for(_world(), device_type)).__name__

    assert run_ranks(check, 2) == [expected] * 2


class _AnsweredByGloo:
    """A process group that takes NCCL's calls, on a CPU, and notes exchanges."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def __getattr__(self, name: str) -> Any:
        call = getattr(_world(), name)
        return call if name in ("rank", "size") else self._waited_for(name, call)

    def _waited_for(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any) -> None:
            self.noted.append(name)
            # NCCL counts elements, where gloo compares shapes.
            call(*([tensor.view(-1) for tensor in arg] if isinstance(arg, list) else arg for arg in args)).wait()

        return answer

    def alltoall(self, arrivals: list[torch.Tensor], pieces: list[torch.Tensor], options: Any) -> None:
        """One piece to each rank; gloo before torch 2.12 exchanges only the parts of one tensor."""
        self.noted.append("alltoall")
        sent = torch.cat([piece.reshape(-1) for piece in pieces]).view(torch.uint8)
        arrived = torch.empty_like(sent)
        _world().alltoall_base(arrived, sent, [], [], options).wait()
        for place, piece in zip(arrivals, arrived.view(pieces[0].dtype).chunk(len(arrivals)), strict=True):
            place.copy_(piece.view_as(place))

    def _start_coalescing(self, device: torch.device) -> None:
        self.noted.append("start")

    def _end_coalescing(self, device: torch.device) -> None:
        self.noted.append("end")


@pytest.mark.parametrize("num_ranks_a_host", [4, 1])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_nccl_conforms_on_one_host_and_on_several_as_far_as_gloo_can_tell(
    num_ranks: int, num_ranks_a_host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        monkeypatch.setenv("LOCAL_RANK", str(dist.get_rank() % num_ranks_a_host))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks_a_host))
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: list(range(num_ranks)))
        group: Any = _AnsweredByGloo()
        check_transport(NcclTransport(group))
        exchanges = ["start", "alltoall", "alltoall", "end", "start", "alltoall", "end"]
        noted = [name for name in group.noted if name in ("start", "alltoall", "end")]
        assert noted == ([] if num_ranks_a_host == 1 else 2 * exchanges)  # sums, and means

    run_ranks(check, num_ranks)


def test_ranks_agree_whether_a_group_lies_on_one_host_for_hosts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [range(4), range(4, 12), range(12, 16)]
    groups = [range(4), range(8), range(4, 8), range(4, 12), range(8, 16), (3, 4), (0, 4, 12), range(12, 14)]

    def answer(group: Sequence[int], host: range, rank: int) -> bool:
        monkeypatch.setenv("LOCAL_RANK", str(rank - host.start))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(host)))
        return _is_one_host(group, rank)

    for group in groups:
        answers = {answer(group, host, rank) for host in hosts for rank in host if rank in group}
        assert answers == {any(set(group) <= set(host) for host in hosts)}, group


def test_a_host_is_taken_to_have_a_rank_for_each_gpu_without_local_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for num_gpus, expected in ((0, False), (1, False), (2, True), (8, True)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda num_gpus=num_gpus: num_gpus)
        assert _is_one_host([0, 1], 0) == _is_one_host([0, 1], 1) == expected


def test_bf16_gradients_summed_in_fp32_travel_as_bf16_in_one_call() -> None:
    def check() -> tuple[int, int]:
        transport = GlooTransport(_world())
        payloads = [Payload(torch.empty(n), torch.ones(2 * n, dtype=torch.bfloat16)) for n in (5, 3)]
        with _Bytes() as sent, CommDebugMode() as comm:  # type: ignore[no-untyped-call]
            transport.reduce_scatter(payloads, dist.ReduceOp.SUM).wait()
        return sum(comm.get_comm_counts().values()), sent.nbytes

    assert run_ranks(check, 2) == [(1, 2 * (5 + 3) * 2)] * 2


class _Bytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of this rank's inputs to collectives."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            assert func._schema.name == "c10d::alltoall_base_"
            self.nbytes += args[1].nbytes
        return func(*args, **(kwargs or {}))


def test_adjacent_shards_are_summed_in_one_kernel_and_distant_shards_in_several() -> None:
    def num_sums(shards: list[torch.Tensor]) -> int:
        payloads = [Payload(shard, torch.ones(2 * shard.numel(), dtype=torch.bfloat16)) for shard in shards]
        places = places_for(payloads, 2, torch.empty(arrivals_numel(payloads, 2), dtype=torch.bfloat16))
        for place in places:
            place.copy_(torch.arange(2 * place.shape[1]).view(2, -1))
        with _Sums() as sums:  # type: ignore[no-untyped-call]
            add_up(places, shards, dist.ReduceOp.AVG)
        for place, shard in zip(places, shards, strict=True):
            assert torch.equal(shard, place.float().mean(0))
        num: int = sums.num
        return num

    memory = torch.empty(1024)
    assert num_sums(list(memory.split(256))) == 1  # type: ignore[no-untyped-call]
    assert num_sums([memory[:256], memory[512:]]) == 2
    assert num_sums([memory[:3], memory[256:512], memory[512:]]) == 2
    assert num_sums([memory[256:512], memory[:256]]) == 2
    assert num_sums([torch.empty(256), torch.empty(256)]) == 2


class _Sums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += "mean" in func._schema.name
        return func(*args, **(kwargs or {}))


def test_the_conformance_test_catches_a_transport_that_adds_up_in_the_wires_dtype() -> None:
    class Narrow(GlooTransport):
        def reduce_scatter(self, payloads, op):  # type: ignore[no-untyped-def]
            narrow = [Payload(shard.to(full.dtype), full) for shard, full in payloads]
            pending = super().reduce_scatter(narrow, op)
            for (shard, _), (reduced, _) in zip(payloads, narrow, strict=True):
                shard.copy_(reduced)
            return pending

    def check() -> None:
        with pytest.raises(AssertionError, match="in torch.float32 gave"):
            check_transport(Narrow(_world()))

    run_ranks(check, 2)


def test_the_conformance_test_catches_a_transport_that_gathers_in_the_wrong_order() -> None:
    class Reversed(LocalTransport):
        num_ranks = 2

        def all_gather(self, payloads):  # type: ignore[no-untyped-def]
            for shard, full in payloads:
                full.view(-1).copy_(shard.view(-1).repeat(2))
            return super().all_gather([])

    with pytest.raises(AssertionError, match="gathered"):
        check_transport(Reversed())


def test_one_rank_gathers_in_place_without_touching_the_payload() -> None:
    full = torch.arange(4.0)
    version = full._version
    LocalTransport().all_gather([Payload(full, full)])
    assert full._version == version
