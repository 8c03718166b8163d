"""The contract of megatron-core's data-parallel wrapper, method by method, on CPU ranks."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import DDP, HFSDP, HSDP, ZERO1, ZERO2, ZERO3, ShardingOptions
from lamella_megatron._model import configuration as tables
from lamella_megatron._model.configuration import placements_of, policy_of
from lamella_testing import run_ranks
from lamella_testing.megatron import (
    LENGTH,
    VOCAB_SIZE,
    ddp_config,
    seed_random_states,
    tiny_config,
    tiny_gpt,
    token_losses,
)

BATCH = torch.randint(VOCAB_SIZE, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def _wrapped(*, half: bool = False, ddp: dict[str, Any] | None = None, seed: int = 0, **changes: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer.module import Float16Module

    from lamella_megatron.training import ShardedModel

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    seed_random_states(seed)
    config = tiny_config(**({"bf16": True, "params_dtype": torch.bfloat16} if half else {}), **changes)
    module = tiny_gpt(config)
    return ShardedModel(config, ddp_config(**(ddp or {})), Float16Module(config, module) if half else module)


def _whole(tensor: Any) -> torch.Tensor:
    full_tensor: torch.Tensor = tensor.full_tensor()
    return full_tensor


def _backward(model: Any) -> torch.Tensor:
    loss = token_losses(model, BATCH.chunk(dist.get_world_size())[dist.get_rank()]).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


# -- nesting -----------------------------------------------------------------------------------------------------------


def test_megatron_core_finds_its_attributes_below_the_wrapper() -> None:
    def on_each_rank() -> None:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.utils import get_attr_wrapped_model, get_model_config

        model = _wrapped(half=True)
        assert get_model_config(model) is model.config
        assert get_attr_wrapped_model(model, "pre_process") is True
        assert isinstance(get_attr_wrapped_model(model, "decoder", return_model_obj=True), GPTModel)
        assert copy.deepcopy(model.config).no_sync_func is model.config.no_sync_func, "layers copy configurations"

    run_ranks(on_each_rank, 2)


def test_a_bf16_model_computes_in_bf16_and_has_fp32_main_weights_and_gradients() -> None:
    def on_each_rank() -> set[torch.dtype]:
        model = _wrapped(half=True)
        seen: set[torch.dtype] = set()
        layer = model.module.module.decoder.layers[0]
        layer.mlp.register_forward_pre_hook(lambda mlp, _: seen.add(mlp.linear_fc1.weight.dtype))
        _backward(model)
        model.finish_grad_sync()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        return seen

    assert run_ranks(on_each_rank, 2) == [{torch.bfloat16}] * 2


def test_parameters_that_the_model_keeps_in_fp32_compute_in_fp32() -> None:
    def on_each_rank() -> set[torch.dtype]:
        from megatron.core import parallel_state

        from lamella_megatron.training import ShardedModel

        parallel_state.initialize_model_parallel()
        seed_random_states(0)
        config = tiny_config(params_dtype=torch.bfloat16, bf16=True)
        module: Any = tiny_gpt(config).bfloat16()
        norm = module.decoder.final_layernorm
        norm.float()
        seen: set[torch.dtype] = set()
        norm.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        norm.register_forward_pre_hook(lambda module, _: seen.add(module.weight.dtype))
        norm.register_forward_hook(lambda module, args, out: out.bfloat16())
        _backward(ShardedModel(config, ddp_config(), module))
        return seen

    assert run_ranks(on_each_rank, 2) == [{torch.float32}] * 2


def test_no_sync_func_stops_the_sync_of_all_chunks_of_a_configuration() -> None:
    def on_each_rank() -> None:
        from lamella_megatron.training import ShardedModel

        first = _wrapped()
        second = ShardedModel(first.config, first.ddp_config, tiny_gpt(first.config))
        events: list[tuple[object, bool]] = []
        for chunk in (first, second):
            chunk.module.set_is_last_backward = lambda is_last, chunk=chunk: events.append((chunk, is_last))
        with first.config.no_sync_func():
            assert {(first, False), (second, False)} == set(events)
        assert {(first, True), (second, True)} == set(events[2:])
        mine = tiny_config()
        mine.no_sync_func = own_function = object()
        ShardedModel(mine, first.ddp_config, tiny_gpt(mine))
        assert mine.no_sync_func is own_function, "the caller's stays"

    run_ranks(on_each_rank, 1)


def test_modules_are_told_of_the_first_microbatch() -> None:
    def on_each_rank() -> None:
        model = _wrapped()
        fused: Any = model.module.output_layer
        fused.is_first_microbatch = False
        model.config.fp8 = "hybrid"  # Only then weights are cast once a step.
        model.set_is_first_microbatch()
        assert fused.is_first_microbatch

    run_ranks(on_each_rank, 1)


def test_the_fsdp_param_mark_is_on_sharded_and_not_on_unsharded_parameters() -> None:
    """By the mark megatron-core's linear writes over `main_grad`, and its norms take the local shard."""

    def on_each_rank() -> None:
        model = _wrapped()
        linear, seen = model.module.decoder.layers[0].mlp.linear_fc1, []
        linear.register_forward_pre_hook(lambda module, _: seen.append(hasattr(module.weight, "__fsdp_param__")))
        _backward(model)
        assert seen == [False]
        assert all(getattr(p, "__fsdp_param__", False) for p in model.parameters())

    run_ranks(on_each_rank, 2)


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "is_reduced"), [("no_shard", False), ("optim", False), ("optim_grads", True)])
def test_the_strategy_says_whether_a_microbatch_that_is_not_the_last_reduces(strategy: str, is_reduced: bool) -> None:
    def on_each_rank() -> None:
        model = _wrapped(ddp={"data_parallel_sharding_strategy": strategy})
        with model.no_sync():
            _backward(model)
        assert {p.grad is not None for p in model.parameters()} == {is_reduced}
        _backward(model)
        model.start_grad_sync()
        model.finish_grad_sync()
        accumulated = [p.grad.full_tensor() for p in model.parameters()]
        model.zero_grad_buffer()
        _backward(model)
        for once, twice in zip(model.parameters(), accumulated, strict=True):
            torch.testing.assert_close(twice, 2 * once.grad.full_tensor())

    run_ranks(on_each_rank, 2)


def test_gradients_are_scaled_by_a_number_and_by_a_tensor() -> None:
    def on_each_rank() -> None:
        model = _wrapped()
        _backward(model)
        model.finish_grad_sync()
        before = [p.grad.full_tensor() for p in model.parameters()]
        model.scale_gradients(0.5)
        model.scale_gradients(torch.tensor([4.0]))
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), 2 * gradient)
        model.zero_grad_buffer()
        assert all(p.grad is None for p in model.parameters())
        model.scale_gradients(2.0)

    run_ranks(on_each_rank, 2)


def test_a_rank_with_nan_gradients_stops_all_ranks_and_names_the_parameters() -> None:
    def on_each_rank() -> str:
        model = _wrapped(ddp={"check_for_nan_in_grad": True})
        _backward(model)
        model.finish_grad_sync()
        weight = model.module.decoder.layers[1].mlp.linear_fc1.weight
        if dist.get_rank() == 1:
            weight.grad.to_local()[0, 0] = torch.nan
        with pytest.raises(RuntimeError, match="Expected finite gradients") as error:
            model.finish_grad_sync()
        return str(error.value)

    other, own_message = run_ranks(on_each_rank, 2)
    assert "parameters of other ranks" in other
    assert "'decoder.layers.1.mlp.linear_fc1.weight'" in own_message


def test_a_parameter_that_no_rank_used_has_a_gradient_of_zeros() -> None:
    """Else ranks come to the all-reduces over gradients with different numbers of elements."""

    def on_each_rank() -> None:
        from megatron.core import parallel_state

        from lamella_megatron.training import ShardedModel

        parallel_state.initialize_model_parallel()
        seed_random_states(0)
        config = tiny_config()
        module = tiny_gpt(config)
        module.decoder.layers[0].unused = nn.Linear(3, 5)  # type: ignore[union-attr, index]
        model = ShardedModel(config, ddp_config(), module)
        _backward(model)
        gradients = {name: p.grad for name, p in module.named_parameters() if "unused" in name}
        assert len(gradients) == 2
        assert all(gradient is not None and not _whole(gradient).any() for gradient in gradients.values())

    run_ranks(on_each_rank, 2)


def test_a_rank_without_gradients_comes_to_the_check_too() -> None:
    def on_each_rank() -> None:
        model = _wrapped(ddp={"check_for_nan_in_grad": True})
        _backward(model)
        if dist.get_rank() == 1:  # as a stage that is frozen
            for parameter in model.parameters():
                parameter.grad = None
        model.finish_grad_sync()

    run_ranks(on_each_rank, 2)


def test_whole_gradients_of_shards_are_refused() -> None:
    def on_each_rank() -> None:
        model = _wrapped()
        with pytest.raises(ValueError, match="`force_all_reduce` with data_parallel_sharding_strategy='no_shard'"):
            model.finish_grad_sync(force_all_reduce=True)

    run_ranks(on_each_rank, 1)


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_whole_weights_and_shards_are_loaded(strategy: str) -> None:
    def on_each_rank() -> None:
        model = _wrapped(half=True, ddp={"data_parallel_sharding_strategy": strategy})
        before = _backward(model)
        model.zero_grad_buffer()
        shards = {name: value.clone() for name, value in model.state_dict().items() if value is not None}
        full_tensors = {name: shard.full_tensor() for name, shard in shards.items()}
        for state in (full_tensors, shards, model.state_dict_for_save_checkpoint()):
            other = _wrapped(half=True, seed=1, ddp={"data_parallel_sharding_strategy": strategy})
            assert not torch.equal(_backward(other), before)
            other.zero_grad_buffer()
            other.load_state_dict(state)
            assert torch.equal(_backward(other), before)
        with pytest.raises(RuntimeError, match="Missing key"):
            other.load_state_dict({})

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_a_model_of_a_seed_a_rank_is_the_first_ranks(strategy: str) -> None:
    """As with `--data-parallel-random-init` of Megatron-LM, which calls `broadcast_params` after the wrapper."""

    def on_each_rank() -> None:
        ddp = {"data_parallel_sharding_strategy": strategy}
        model, expected = (_wrapped(half=True, ddp=ddp, seed=seed) for seed in (7 + dist.get_rank(), 7))
        model.broadcast_params()
        for parameter, first in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(_whole(parameter), _whole(first))
        assert torch.equal(_backward(model), _backward(expected))

    run_ranks(on_each_rank, 2)


def test_replicas_that_went_apart_take_the_weights_of_their_first_rank() -> None:
    def on_each_rank() -> torch.Tensor:
        model = _wrapped(ddp={"data_parallel_sharding_strategy": "no_shard"})
        weight: torch.Tensor = model.module.output_layer.weight.to_local().detach()
        weight.fill_(dist.get_rank())
        model.broadcast_params()
        return weight.clone()

    first, second = run_ranks(on_each_rank, 2)
    assert torch.equal(first, second)


def test_a_model_sharded_during_construction_trains_in_megatrons_wrapper() -> None:
    def on_each_rank() -> None:
        from lamella_megatron import build_sharded_model
        from lamella_megatron.training import ShardedModel

        sharded_afterwards = _wrapped()
        config = tiny_config()
        options = ShardingOptions(placements=ZERO2)
        seed_random_states(0)
        module = build_sharded_model(lambda: tiny_gpt(config), options=options)
        with pytest.raises(ValueError, match=r"stage that `ddp_config` names, .* got "):
            ShardedModel(config, ddp_config(), module)
        strategy = ddp_config(data_parallel_sharding_strategy="optim_grads")
        with pytest.raises(ValueError, match=r"no arguments for units .* got \['mp_policy'\]"):
            ShardedModel(config, strategy, module, mp_policy=None)
        assert torch.equal(_backward(ShardedModel(config, strategy, module)), _backward(sharded_afterwards))
        module.bfloat16()  # as Float16Module does
        with pytest.raises(ValueError, match=r"main weights in torch.float32, .* got '.*' in another dtype"):
            ShardedModel(config, strategy, module)

    run_ranks(on_each_rank, 2)


def test_a_model_without_values_is_refused() -> None:
    def on_each_rank() -> None:
        from lamella_megatron.training import ShardedModel

        _wrapped()
        with torch.device("meta"):
            module = tiny_gpt(tiny_config(use_cpu_initialization=False, perform_initialization=False))
        with pytest.raises(ValueError, match=r"with values, got '.*' on the meta device. .*build_sharded_model"):
            ShardedModel(tiny_config(), ddp_config(), module)

    run_ranks(on_each_rank, 1)


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "placements"),
    [
        ({"data_parallel_sharding_strategy": "no_shard"}, DDP),
        ({"data_parallel_sharding_strategy": "optim"}, ZERO1),
        ({"data_parallel_sharding_strategy": "optim_grads"}, ZERO2),
        ({"data_parallel_sharding_strategy": "optim_grads_params"}, ZERO3),
        ({"data_parallel_sharding_strategy": "optim", "num_distributed_optimizer_instances": 2}, (HSDP, ZERO1)),
        ({"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"}, (HFSDP, ZERO3)),
        (
            {
                "use_megatron_fsdp": False,
                "use_distributed_optimizer": True,
                "data_parallel_sharding_strategy": "no_shard",
            },
            ZERO1,
        ),
    ],
)
def test_a_strategy_is_a_stage(fields: dict[str, Any], placements: Any) -> None:
    assert placements_of(ddp_config(**fields)) == placements


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"data_parallel_sharding_strategy": "zero3"}, r"one of \['no_shard', .*\], got 'zero3'"),
        (
            {
                "data_parallel_sharding_strategy": "optim",
                "num_distributed_optimizer_instances": 2,
                "outer_dp_sharding_strategy": "optim",
            },
            "got 'optim' with 'optim'",
        ),
        (
            {"data_parallel_sharding_strategy": "no_shard", "num_distributed_optimizer_instances": 2},
            "got 'no_shard' with 'no_shard'",
        ),
        ({"nccl_ub": True}, "`ddp_config.nccl_ub` to be left at False, got True"),
        ({"fp8_param_gather": True}, "whether the model has float8 weights, got True and no such weight"),
    ],
)
def test_an_option_without_an_equal_is_refused(fields: dict[str, Any], words: str) -> None:
    def on_each_rank() -> None:
        with pytest.raises(ValueError, match=words):
            _wrapped(ddp=fields)

    run_ranks(on_each_rank, 1)


@pytest.mark.parametrize(("wanted", "found"), [(1, 2), (2, 1)])
def test_groups_of_other_instances_than_the_option_says_are_refused(wanted: int, found: int) -> None:
    def on_each_rank() -> None:
        from megatron.core import parallel_state

        from lamella_megatron.training import ShardedModel

        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=found)
        module = tiny_gpt(tiny_config())
        words = f"groups of {wanted} instances .* got groups of {found}. Call"
        with pytest.raises(ValueError, match=words):
            ShardedModel(module.config, ddp_config(num_distributed_optimizer_instances=wanted), module)

    run_ranks(on_each_rank, 2)


def test_every_option_of_megatron_core_is_used_without_effect_or_refused() -> None:
    listed_options = tables._USED | tables._NO_EFFECT | tables._REFUSED.keys()
    assert {field.name for field in dataclasses.fields(ddp_config())} == listed_options
    assert len(listed_options) == len(tables._USED) + len(tables._NO_EFFECT) + len(tables._REFUSED)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"grad_reduce_in_fp32": True}, torch.float32),
        ({"grad_reduce_in_fp32": False, "megatron_fsdp_grad_comm_dtype": torch.float16}, torch.float16),
        ({"grad_reduce_in_fp32": False}, torch.bfloat16),
    ],
)
def test_sums_are_in_the_dtype_of_the_options(fields: dict[str, Any], dtype: torch.dtype) -> None:
    policy = policy_of(ddp_config(**fields), nn.Linear(2, 2).bfloat16())
    assert (policy.reduce_dtype, policy.param_dtype, policy.main_dtype) == (dtype, torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cuda_graph_impl", "local"),
        ("defer_embedding_wgrad_compute", True),
        ("overlap_dispatch_backward_with_experts_wgrad", True),
        ("delay_wgrad_compute", True),
    ],
)
def test_an_option_of_the_model_that_goes_past_units_is_refused(field: str, value: object) -> None:
    def on_each_rank() -> None:
        from megatron.core import parallel_state

        from lamella_megatron.training import ShardedModel

        parallel_state.initialize_model_parallel()
        config = tiny_config()
        module = tiny_gpt(config)
        setattr(config, field, value)
        with pytest.raises(ValueError, match=f"`config.{field}` to be .*, got {value!r}"):
            ShardedModel(config, ddp_config(), module)
        assert not any(isinstance(p, DTensor) for p in module.parameters()), "nothing has changed"

    run_ranks(on_each_rank, 1)


def test_gathers_ahead_weigh_as_many_elements_as_are_suggested() -> None:
    def on_each_rank() -> int | None:
        model = _wrapped(half=True, ddp={"suggested_communication_unit_size": 1000})
        budget: int | None = model.module.module.sharding_options.prefetch_budget
        return budget

    assert run_ranks(on_each_rank, 1) == [2000]
