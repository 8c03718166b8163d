"""On GPUs over NCCL: an optimizer that steps inside backward takes the same steps to the bit, hidden behind it."""

from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # As in test_nccl: once here instead of once a rank.
from four_gpus import WAYS, mesh
from late_streams import LLAMA, delay_streams
from torch import nn

from lamella.overlap import Kernel, Kind
from lamella_engine import MixedPrecisionPolicy, fully_shard, step_in_backward
from lamella_engine._attached import state_of
from lamella_integration.backends import BACKENDS, Workload
from lamella_integration.profile import NUM_STEPS, NUM_TOKENS, PROOF, profile_steps
from lamella_integration.repeatable import use_repeatable_kernels
from lamella_integration.tasks import Recipe, Trace, shard, train
from lamella_testing import run_ranks

HERE = [way for way in WAYS if way not in ("HSDP, ZERO2", "HSDP, ZERO3")]
NUM_STRESSED_STEPS = 200
# The last of several microbatches alone is reduced: weights may not move before.
RECIPE = Recipe(num_steps=NUM_STRESSED_STEPS, num_microbatches=2, reduce_every_microbatch=False)


def _sharded(way: str) -> nn.Module:
    model = LLAMA.model(device=torch.device("cuda", torch.cuda.current_device()))
    return shard(model, fully_shard, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), **WAYS[way]())


@pytest.mark.gpu4
@pytest.mark.parametrize("way", HERE)
@pytest.mark.parametrize("frees", [False, True], ids=["gradients_stay", "gradients_go"])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # where tokens go in; it fires all the same
def test_steps_inside_backward_change_no_bit_however_late_a_stream_may_be(way: str, frees: bool) -> None:
    """A missing wait shows as weights, gradients or memory that were read or written too early."""

    def traces() -> tuple[Trace, Trace]:
        use_repeatable_kernels()
        expected = train(LLAMA, _sharded(way), RECIPE)
        late, prepare = _sharded(way), partial(step_in_backward, free_gradients=frees)
        delay_streams(late, state_of(late).context)
        return expected, train(LLAMA, late, RECIPE, prepare=prepare)

    for expected, got in run_ranks(traces, 4, device="cuda"):
        assert got.losses == expected.losses
        torch.testing.assert_close(got.weights, expected.weights, rtol=0.0, atol=0.0)


@pytest.mark.gpu2
@pytest.mark.parametrize("flavour", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=repr)
def test_each_flavour_has_the_same_state_as_without(flavour: dict[str, bool]) -> None:
    def states() -> tuple[Any, Any]:
        use_repeatable_kernels()
        found = []
        for prepare in (lambda optimizer: None, step_in_backward):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(256, 256, device="cuda") for _ in range(6)))
            for layer in (*model, model):
                fully_shard(layer, mesh=mesh(2), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **flavour)
            prepare(optimizer)
            x = torch.randn(64, 256, device="cuda")
            for _ in range(20):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            local = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
            held = [*model.parameters(), *local]
            found.append((sorted(tensor.to_local().double().sum().item() for tensor in held), len(held)))
        return found[0], found[1]

    for without, inside in run_ranks(states, 2, device="cuda"):
        assert inside == without


def _profile() -> list[Kernel]:
    workload = Workload(config=PROOF, device=torch.device("cuda", torch.cuda.current_device()))
    return profile_steps(BACKENDS["lamella"](workload, step_in_backward=True), *workload.batch(NUM_TOKENS))


@pytest.mark.gpu2
def test_updates_have_a_stream_of_their_own_and_run_while_backward_goes_on() -> None:
    for kernels in run_ranks(_profile, 2, device="cuda"):
        of = {kind: [kernel for kernel in kernels if kernel.kind is kind] for kind in Kind}
        update_streams = {kernel.stream for kernel in of[Kind.OPTIMIZER]}
        for kind in (Kind.MATMUL, Kind.COLLECTIVE, Kind.REDUCE_SCATTER):  # gathers are copies to peers
            assert update_streams.isdisjoint(kernel.stream for kernel in of[kind]), kind
        # The ordinary optimizer starts all of the last step's updates when the last matmul is over; here only those of
        # the units whose gradients come last do.
        backward_ends = max(kernel.end_us for kernel in of[Kind.MATMUL])
        num_exposed = sum(kernel.start_us > backward_ends for kernel in of[Kind.OPTIMIZER])
        assert num_exposed < len(of[Kind.OPTIMIZER]) / NUM_STEPS - 1
