"""On GPUs over NCCL: finalized backwards, persistent unsharded bytes, parameters with a constant dtype."""

from typing import Any

import pytest
import torch
import torch._dynamo  # As in test_nccl: once here instead of once a rank.
import torch.distributed as dist
from four_gpus import Options, mesh
from late_streams import LONGEST_SLEEP
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import ZERO1, FSDPModule, MixedPrecisionPolicy, Rows, ShardingOptions, fully_shard
from lamella_engine.extending import Unit
from lamella_engine.testing import tree_of
from lamella_integration.collectives import CollectiveCounter
from lamella_integration.llama import Llama, LlamaConfig, next_token_loss
from lamella_integration.reference import init_weights
from lamella_integration.repeatable import use_repeatable_kernels
from lamella_integration.tasks import shard, unsharded
from lamella_testing import run_ranks

pytestmark = pytest.mark.gpu2

SMALL = LlamaConfig(dim=256, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=512, vocab_size=512)
NUM_MICROBATCHES = 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
WAYS: dict[str, Options] = {
    "even": lambda: {"mesh": mesh(2)},
    "flat": lambda: {"mesh": mesh(2), "options": ShardingOptions(keep_together=Rows(1))},
    "ZERO1": lambda: {"mesh": mesh(2), "options": ShardingOptions(placements=ZERO1)},
    "replicas": lambda: {"mesh": mesh(2, 1)},
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def _cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _sharded(way: str, **options: Any) -> FSDPModule:
    with _cuda():
        model = Llama(SMALL)
    init_weights(model, 0)
    shard(model, fully_shard, **{"mp_policy": BF16, **WAYS[way](), **options})
    assert isinstance(model, FSDPModule)
    return model


def _units(model: FSDPModule) -> list[Unit]:
    assert isinstance(model, nn.Module)
    return tree_of(model).units


def _backward(model: Any, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * seed + dist.get_rank())
    tokens = torch.randint(SMALL.vocab_size, (1, 65), generator=generator).to(_cuda())
    loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:].contiguous())
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _gradients(model: Any) -> list[torch.Tensor]:
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


def _descend(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()


# -- backwards ended by a call ---------------------------------------------------------------------------------------


@EVERY_WAY
def test_a_finalized_step_is_one_whose_last_microbatch_is_reduced(way: str) -> None:
    """To the bit: the same sums of microbatches travel."""

    def steps(model: Any, *, by_hand: bool) -> tuple[list[torch.Tensor], list[int]]:
        gradients, nums_reductions = [], []
        model.set_manual_backward_finalization(by_hand)
        for step in range(3):
            with CollectiveCounter() as counter:
                for microbatch in range(NUM_MICROBATCHES):
                    model.set_requires_gradient_sync(microbatch == NUM_MICROBATCHES - 1 and not by_hand)
                    _backward(model, NUM_MICROBATCHES * step + microbatch)
                if by_hand:
                    assert not counter.reductions
                    model.set_requires_gradient_sync(True)
                    tree = tree_of(model)
                    streams = tree.streams
                    with streams.on(streams.reduce_scatter_stream):
                        torch.cuda._sleep(50 * LONGEST_SLEEP)  # type: ignore[no-untyped-call]
                    async_op = step % 2 == 1
                    handle = model.finalize_backward(async_op=async_op)
                    assert (handle is not None) == async_op == tree.step_end.is_deferred
                    if handle is not None:
                        handle.wait()
            nums_reductions.append(len(counter.reductions))
            gradients += _gradients(model)
            _descend(model)
            model.mark_updated()
        return gradients, nums_reductions

    def check() -> None:
        use_repeatable_kernels()
        expected, nums = steps(_sharded(way), by_hand=False)
        got, nums_by_hand = steps(_sharded(way), by_hand=True)
        assert nums == nums_by_hand
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)

    run_ranks(check, 2, device="cuda")


# -- persistent bytes ------------------------------------------------------------------------------------------------


@EVERY_WAY
def test_kept_storage_has_one_address_and_the_size_of_its_parameters(way: str) -> None:
    def check() -> None:
        use_repeatable_kernels()
        results: list[tuple[list[torch.Tensor], list[tuple[str, int]], int]] = []
        for keeps in (False, True):
            before = _allocated()
            model = _sharded(way)
            model.set_keep_unsharded_storage(keeps)
            addresses = []
            for step in range(3):
                with CollectiveCounter() as counter:
                    _backward(model, step)
                addresses.append(
                    [group.unsharded_weight.flat.data_ptr() for u in _units(model) for group in u.parameters.groups]
                )
                gradients = _gradients(model)
                _descend(model)
            if keeps:
                assert addresses[0] == addresses[1] == addresses[2]
                assert 0 not in addresses[0]
            calls = [(call.kind, call.nbytes) for call in counter.calls]
            held_nbytes = _allocated() - before
            model.set_keep_unsharded_storage(False)
            freed = held_nbytes - (_allocated() - before)
            if keeps:
                unsharded_nbytes = sum(
                    group.unsharded_weight.flat.nbytes for u in _units(model) for group in u.parameters.groups
                )
                if way != "ZERO1":  # ZeRO-1 copies stay in either case
                    assert unsharded_nbytes <= freed <= unsharded_nbytes + 512 * len(_units(model))
            else:
                assert freed == 0
            results.append((gradients, calls, held_nbytes))
            del model
        (expected, calls, _), (got, calls_of_kept, _) = results
        assert calls_of_kept == calls, "kept bytes are stale: units are gathered as often"
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)

    run_ranks(check, 2, device="cuda")


def _allocated() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


# -- dtypes of parameters' own ---------------------------------------------------------------------------------------


def _keep_vectors(parameter: nn.Parameter) -> torch.dtype | None:
    return torch.float32 if parameter.ndim == 1 else None


@pytest.mark.parametrize("way", ["even", "flat", "replicas"])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # norms compute in fp32 on bf16 inputs
def test_parameters_with_a_constant_dtype_are_gathered_in_that_dtype(way: str) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, param_dtype_override_fn=_keep_vectors
    )

    def check() -> None:
        use_repeatable_kernels()
        model = _sharded(way, mp_policy=policy)
        full_parameters = {name: unsharded(parameter.detach()) for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]
        for unit in _units(model):
            unit.weights.unshard()
            unit.weights.wait_for_unshard()
        dtypes = set()
        for name, parameter in model.named_parameters():  # type: ignore[attr-defined]
            dtype = torch.float32 if parameter.ndim == 1 else torch.bfloat16
            assert parameter.dtype == dtype
            assert not isinstance(parameter, DTensor)
            assert torch.equal(parameter, full_parameters[name].to(dtype)), name
            dtypes.add(dtype)
        assert len(dtypes) == 2
        for unit in _units(model):
            unit.weights.reshard()

        everything_in_bf16 = _sharded(way, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        for step in range(2):
            with CollectiveCounter() as counter:
                loss = _backward(model, step)
            with CollectiveCounter() as counter_of_bf16:
                expected = _backward(everything_in_bf16, step)
            torch.testing.assert_close(loss, expected, rtol=2**-7, atol=0.0)
            _descend(model)
            _descend(everything_in_bf16)
        assert counter.counts().get("all_gather") == counter_of_bf16.counts().get("all_gather")

    run_ranks(check, 2, device="cuda")
