import pytest
import torch
import torch.distributed as dist

from lamella_buffers import GlooTransport, LocalTransport, Payload, Transport, transport_for
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
        return type(transport_for(_world())).__name__

    expected = "LocalTransport" if num_ranks == 1 else "GlooTransport"
    assert run_ranks(check, num_ranks) == [expected] * num_ranks


@pytest.mark.parametrize("config", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_a_group_is_nccls_whoever_chose_the_backend(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`init_process_group()` leaves the choice to torch, which then calls the group's backend "undefined"."""

    def check() -> str:
        monkeypatch.setattr(dist, "get_backend", lambda _: "undefined")
        monkeypatch.setattr(dist, "get_backend_config", lambda _: config)
        return type(transport_for(_world())).__name__

    assert run_ranks(check, 2) == ["NcclTransport"] * 2


def test_the_conformance_test_catches_a_transport_that_gathers_in_the_wrong_order() -> None:
    class Reversed(LocalTransport):
        num_ranks = 2

        def all_gather(self, payloads):  # type: ignore[no-untyped-def]
            for shard, full in payloads:
                full.copy_(shard.repeat(2))
            return super().all_gather([])

    with pytest.raises(AssertionError, match="gathered"):
        check_transport(Reversed())


def test_one_rank_gathers_in_place_without_touching_the_payload() -> None:
    full = torch.arange(4.0)
    version = full._version
    LocalTransport().all_gather([Payload(full, full)])
    assert full._version == version
