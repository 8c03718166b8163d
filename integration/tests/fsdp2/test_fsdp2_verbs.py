"""Verbs of a unit: gather now, prefetch, forget a step, reduce in another way."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp2_models import (
    DIM,
    Api,
    Block,
    Stack,
    Where,
    assert_all_sharded,
    assert_close,
    assert_equal_models,
    assert_none_sharded,
    assert_trains_as,
    average,
    count,
    inputs,
    on_ranks,
    shard,
    twins,
    units,
)  # fmt: skip
from torch import nn

from lamella_integration.collectives import CollectiveCounter

# -- unshard ----------------------------------------------------------------------------------------------------------


def test_unshard_gathers_one_unit_and_gives_its_parameters_whole(api: Api) -> None:
    def scenario(dtype: torch.dtype | None) -> None:
        expected, model = twins()
        shard(api, model, mp_policy=api.MixedPrecisionPolicy(param_dtype=dtype))
        counts, handle = count(model.unshard)  # before any forward
        assert counts == {"all_gather": 1} and handle is None
        root_parameters = [*model.stem.parameters(), *model.head.parameters()]
        assert_none_sharded(root_parameters)
        assert_all_sharded(model.blocks.parameters())
        for a, b in zip([*expected.stem.parameters(), *expected.head.parameters()], root_parameters, strict=True):
            assert torch.equal(b, a.to(dtype or torch.float32))
        counts, _ = count(model.unshard)
        assert counts == {}
        model.reshard()
        model.reshard()
        assert_all_sharded(model.parameters())

    on_ranks(scenario, cases=(None, torch.bfloat16))


def test_a_handle_of_no_unit_waits_for_nothing(api: Api) -> None:
    assert api.UnshardHandle().wait() is None


def test_an_unshard_without_waiting_gives_a_handle(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model)
        block = model.blocks[1]
        handle = block.unshard(async_op=True)
        assert isinstance(handle, api.UnshardHandle)
        handle.wait()
        handle.wait()
        assert_none_sharded(block.parameters())
        counts, _ = count(lambda: model(inputs()))
        assert counts == {"all_gather": 3}  # the block is unsharded already
        block.reshard()
        model.blocks[0].unshard(async_op=True)  # forward waits for it
        assert_close(model(inputs()), expected(inputs()))
        model.reshard()
        assert_trains_as(expected, model)

    on_ranks(scenario)


def test_weights_may_be_read_and_written_at_rest_and_are_used_next(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model)
        model(inputs())
        model.reshard()
        with torch.no_grad():
            model.stem.weight.mul_(2)
            expected.stem.weight.mul_(2)
        assert_close(model(inputs()), expected(inputs()))

    on_ranks(scenario)


def test_gathers_may_be_asynchronous(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model)
        model._set_unshard_async_op(True)
        assert_trains_as(expected, model)

    on_ranks(scenario)


# -- gathering ahead --------------------------------------------------------------------------------------------------


def _gathers_seen_by(model: Stack, x: torch.Tensor) -> tuple[list[int], list[int]]:
    """How many gathers had been issued when each block computed, forward and backward."""
    forward: list[int] = []
    backward: list[int] = []
    with CollectiveCounter() as counter:
        handles = []
        for block in model.blocks:
            note = lambda *_: forward.append(counter.counts()["all_gather"])  # noqa: E731
            handles.append(block.get_submodule("up").register_forward_pre_hook(note))
            note_backward = lambda *_: backward.append(counter.counts()["all_gather"])  # noqa: E731
            handles.append(block.get_submodule("down").register_full_backward_hook(note_backward))
        model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return forward, backward


def test_units_are_prefetched_as_requested(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins(lambda: Stack(5))
        shard(api, model, reshard_after_forward=True)
        blocks = list(model.blocks)
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
            block.set_modules_to_backward_prefetch(blocks[max(index - 2, 0) : index][::-1])
        for _ in range(2):
            forward, backward = _gathers_seen_by(model, inputs().requires_grad_())
            # The root, the block itself and two more blocks, as far as blocks remain.
            assert forward == [4, 5, 6, 6, 6]
            assert backward == [6 + gathers for gathers in forward]
            model.zero_grad()
        assert_trains_as(expected, model)

    on_ranks(scenario)


def test_a_wrong_list_costs_a_gather_and_no_more(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model)
        model.blocks[0].set_modules_to_backward_prefetch([model.blocks[2]])
        model.blocks[2].set_modules_to_forward_prefetch([model.blocks[0]])
        assert_trains_as(expected, model)
        model.zero_grad()
        assert_all_sharded(model.blocks[1].parameters())

    on_ranks(scenario)


def test_an_empty_list_takes_the_lists_back(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model)
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
        model.blocks[0].set_modules_to_forward_prefetch([])
        assert_trains_as(expected, model)

    on_ranks(scenario)


def test_a_unit_without_unshard_in_backward_is_not_gathered_in_backward(api: Api) -> None:
    class EmbeddedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.block = nn.Embedding(5, DIM), Block()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.block(self.embedding(tokens))
            return out

    def scenario() -> None:
        expected, model = twins(EmbeddedBlock)
        for module in (model.embedding, model.block, model):
            api.fully_shard(module)
        model.embedding.set_unshard_in_backward(False)
        tokens = torch.tensor([0, 1, 4])
        for _ in range(2):
            loss = model(tokens).square().sum()
            counts, _ = count(loss.backward)
            assert counts == {"all_gather": 1, "reduce_scatter": 2}
            model.zero_grad()
        assert_trains_as(expected, model, make_input=lambda step: tokens)

    on_ranks(scenario)


# -- after an exception -----------------------------------------------------------------------------------------------


class _Failing(Block):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("boom")
        return super().forward(x)


def _fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("boom")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_the_next_step_is_as_any_other(api: Api, where: str) -> None:
    class FailingStack(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1] = _Failing()

    def scenario() -> None:
        expected, model = twins(FailingStack)
        shard(api, model)
        if where == "forward":
            model.blocks[1].fails = True
        handle = model.blocks[1].register_forward_hook(
            lambda module, args, out: out.register_hook(_fail) and None if where == "backward" else None
        )
        with pytest.raises(RuntimeError, match="boom"):
            model(inputs()).sum().backward()
        handle.remove()
        model.blocks[1].fails = False
        model.reset_iter_state()
        assert_all_sharded(model.parameters())
        model(inputs()).sum().backward()  # After a failed backward FSDP2 adds to the failed backward's gradients.
        model.zero_grad()
        assert_trains_as(expected, model)

    on_ranks(scenario)


# -- forward methods and shared streams -------------------------------------------------------------------------------


class _Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(DIM, DIM)

    def features(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Features, scaled."""
        out: torch.Tensor = self.projection(x) * scale
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x).sum(1)


class _UsesFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.head = _Vision(), nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.vision.features(x, scale=2.0))
        return out


def test_a_registered_forward_method_runs_on_unsharded_weights(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins(_UsesFeatures)
        for module in (model.vision, model.head, model):
            api.fully_shard(module)
        api.register_fsdp_forward_method(model.vision, "features")
        assert model.vision.features.__doc__ == "Features, scaled."
        assert_trains_as(expected, model)
        assert_close(model.vision(inputs()), expected.vision(inputs()))

    on_ranks(scenario)


def test_on_a_plain_module_a_forward_method_is_left_alone(api: Api) -> None:
    module = _Vision()
    before = module.features
    api.register_fsdp_forward_method(module, "features")
    assert module.features == before


def test_models_that_share_streams_train_by_themselves(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins(lambda: nn.Sequential(*(Block() for _ in range(3))))
        for block in model:
            api.fully_shard(block)
        api.share_comm_ctx(list(model))
        api.share_comm_ctx([])
        assert_trains_as(expected, model)

    on_ranks(scenario)


# -- reductions -------------------------------------------------------------------------------------------------------


def test_gradients_may_be_divided_by_another_factor(api: Api) -> None:
    def scenario(factor: float, dtype: torch.dtype | None) -> None:
        expected, model = twins()
        shard(api, model, mp_policy=api.MixedPrecisionPolicy(reduce_dtype=dtype))
        model.set_force_sum_reduction_for_comms(True)  # gloo has no other
        model.set_gradient_divide_factor(factor)
        for network in (expected, model):
            network(inputs()).square().sum().backward()
        average(expected)
        for parameter in (*expected.stem.parameters(), *expected.head.parameters()):
            parameter.grad *= 2 / factor  # the blocks are units of their own, and were told nothing
        assert_equal_models(expected, model, **({} if dtype is None else {"rtol": 2e-2, "atol": 2e-2}))

    on_ranks(scenario, cases=((4.0, None), (1.0, None), (2.0, None), (4.0, torch.bfloat16)))


def test_the_old_name_of_the_divide_factor_still_works(api: Api) -> None:
    def scenario() -> None:
        model = api.fully_shard(Block())
        with pytest.warns((DeprecationWarning, FutureWarning), match="set_gradient_divide_factor"):
            model.set_reduce_scatter_divide_factor(4.0)

    on_ranks(scenario, 1)


def test_a_single_rank_divides_only_by_an_explicit_factor(api: Api) -> None:
    def scenario(factor: float | None) -> None:
        model: Any = nn.Linear(3, 2, bias=False)
        api.fully_shard(model)
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        model(torch.ones(4, 3)).sum().backward()
        assert torch.equal(model.weight.grad.to_local(), torch.full((2, 3), 4 / (factor or 1)))

    on_ranks(scenario, 1, cases=(None, 1.0, 2.0))


def test_a_hook_sees_reduced_gradients_and_may_change_gradients(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model)
        model.blocks[0].set_all_reduce_hook(lambda output: output.mul_(10))
        for network in (expected, model):
            network(inputs()).square().sum().backward()
        average(expected)
        for parameter in expected.blocks[0].parameters():
            parameter.grad *= 10
        assert_equal_models(expected, model, rtol=1e-4, atol=1e-4)

    on_ranks(scenario)


def test_settings_of_speed_change_no_result(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model)
        model.set_reduce_scatter_max_input_buffers(2)
        model.set_separate_reduce_scatter_group(True)
        model.set_separate_reduce_scatter_group(False)
        for unit in units(api, model):
            unit.set_force_sum_reduction_for_comms(True)
        assert_trains_as(expected, model)

    on_ranks(scenario)


def test_a_trainer_of_any_device_may_hand_over_its_optimizers_event(api: Api) -> None:
    """On the CPU alone, `record_event` of the device's own stream returns None."""

    def scenario() -> None:
        expected, model = twins()
        shard(api, model)
        for _ in range(2):
            assert_trains_as(expected, model, num_steps=1)
            model.set_post_optim_event(torch.get_device_module(Where.device).current_stream().record_event())

    on_ranks(scenario)


# -- collectives of the user's own ------------------------------------------------------------------------------------


class _Comm:
    def __init__(self) -> None:
        self.num_calls = 0
        self.num_allocations = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.num_allocations += 1
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Comm):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.num_calls += 1
        work: dist.Work | None = dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=group, async_op=async_op
        )
        return work


class _ReduceScatter(_Comm):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.num_calls += 1
        work: dist.Work | None = dist.reduce_scatter_tensor(
            output_tensor, input_tensor, group=group, op=op, async_op=async_op
        )
        return work


@pytest.mark.filterwarnings("ignore:.*(all_gather_into_tensor|reduce_scatter_tensor)")
def test_a_unit_may_be_given_collectives_of_the_users_own(api: Api) -> None:
    def scenario(dtype: torch.dtype | None) -> None:
        expected, model = twins()
        shard(api, model, mp_policy=api.MixedPrecisionPolicy(param_dtype=dtype))
        gather, reduce = _AllGather(), _ReduceScatter()
        model.blocks[0].set_custom_all_gather(gather)
        model.blocks[0].set_custom_reduce_scatter(reduce)
        for network in (expected, model):
            network(inputs()).float().mean().backward()
        average(expected)
        assert_equal_models(expected, model, **({} if dtype is None else {"rtol": 0.1, "atol": 0.05}))
        assert (gather.num_calls, reduce.num_calls) == (2, 1)
        assert gather.num_allocations and reduce.num_allocations

    on_ranks(scenario, cases=(None, torch.bfloat16))


def test_collectives_of_the_users_own_exclude_memory_of_the_groups(api: Api) -> None:
    def scenario() -> None:
        model = api.fully_shard(Block())
        model.set_allocate_memory_from_process_group_for_comm(True)
        model.set_custom_all_gather(_AllGather())
        for method, words in (
            (model.set_allocate_memory_from_process_group_for_comm, "set_allocate_memory_from_process_group"),
            (model.set_symm_mem_for_comm, "set_symm_mem"),
        ):
            with pytest.raises(AssertionError, match=rf"cannot call {words}\(\) when all gather comm is custom: _All"):
                method(True)

    on_ranks(scenario)
