"""An optimizer built, or stepped, before the sharding of its parameters goes on with the training."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from engine_models import (
    EVERY_STAGE,
    SOME_STAGES,
    Net,
    adamw,
    assert_weights_equal,
    case,
    fsdp,
    inputs,
    mean_square,
    rows_of_this_rank,
    shard,
    shard_on,
    twins,
    whole,
)
from flat_models import flat
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils import _pytree as pytree

from lamella_engine import CPUOffloadPolicy, MixedPrecisionPolicy, RaggedDTensor, Rows, ShardingOptions, fully_shard
from lamella_engine.testing import assert_at_rest
from lamella_optim import shard_optimizer
from lamella_testing import run_ranks

Optimize = Callable[..., torch.optim.Optimizer]

X = inputs()
LOSS = mean_square(lambda model: model(X))
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        LOSS(model).backward()
        optimizer.step()


def _pair(
    optimize: Optimize = ADAMW,
    apply: Callable[..., object] = shard,
    *,
    make: Callable[[], nn.Module] = Net,
    before: int = 2,
    after: Callable[[torch.optim.Optimizer], object] = lambda _: None,
) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """A never sharded model, and a model sharded after some steps; both stepped on for three more."""
    models = []
    for prepare in (lambda _: None, apply):
        torch.manual_seed(0)
        model = make()
        optimizer = optimize(model.parameters())
        _steps(model, optimizer, before)
        prepare(model)
        after(optimizer)
        _steps(model, optimizer, 3)
        models.append(model)
    reference, sharded = models
    return reference, sharded, optimizer


def _assert_holds_shards(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(parameter) for parameter in parameters] == [id(parameter) for parameter in model.parameters()]
    assert set(optimizer.state) <= set(parameters)
    for parameter in parameters:
        state = [t for t in pytree.tree_leaves(optimizer.state.get(parameter, {})) if isinstance(t, torch.Tensor)]
        for tensor in state:
            assert tensor.ndim == 0 or (tensor.shape, tensor.placements) == (parameter.shape, parameter.placements)  # type: ignore[attr-defined]


OPTIMIZERS: dict[str, Optimize] = {
    "SGD": partial(torch.optim.SGD, lr=0.2),
    "SGD, momentum": partial(torch.optim.SGD, lr=0.2, momentum=0.9, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=1e-2),
    "Adam, amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "AdamW, one by one": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
}


def test_an_optimizer_built_or_stepped_before_sharding_takes_the_unsharded_steps() -> None:
    def check() -> None:
        for name, optimize in OPTIMIZERS.items():
            for before in (0, 2):
                with case((name, before)):
                    reference, sharded, optimizer = _pair(optimize, before=before)
                    assert_weights_equal(reference, sharded, rtol=1e-4, atol=1e-6)
                    assert_at_rest(sharded)
                    _assert_holds_shards(optimizer, sharded)

    run_ranks(check, 2)


def test_an_optimizer_of_parameters_that_are_unsharded_just_then_trains_the_shards() -> None:
    def keep(model: Net) -> None:
        for module in (*model.layers, model):
            fully_shard(module, reshard_after_forward=False)

    def check() -> None:
        for name, apply, unshard in (
            ("a forward whose backward has not come", shard, LOSS),
            ("unshard()", shard, lambda model: fsdp(model).unshard()),
            ("units that stay", keep, LOSS),
        ):
            for optimize in (ADAMW, OPTIMIZERS["Adagrad"]):
                with case(name):
                    reference, sharded = twins(Net, apply)
                    unshard(sharded)
                    assert any(not isinstance(parameter, DTensor) for parameter in sharded.parameters())
                    optimizer = optimize(sharded.parameters())
                    _steps(reference, optimize(reference.parameters()), 3)
                    _steps(sharded, optimizer, 3)
                    assert_weights_equal(reference, sharded, rtol=1e-4, atol=1e-6)
                    _assert_holds_shards(optimizer, sharded)

    run_ranks(check, 2)


def test_ranks_that_own_no_row_of_a_parameter_hold_no_state_of_it() -> None:
    def check() -> None:
        reference, sharded, optimizer = _pair()
        assert_weights_equal(reference, sharded)
        gain = sharded.get_parameter("layers.0.gain")
        assert optimizer.state[gain]["exp_avg"].to_local().numel() == (1 if dist.get_rank() == 0 else 0)

    run_ranks(check, 3)


def test_an_optimizer_may_be_sharded_by_hand_before_its_first_step() -> None:
    def check() -> None:
        def look(optimizer: torch.optim.Optimizer) -> None:
            assert shard_optimizer(optimizer) is optimizer
            if dist.get_world_size() > 1 and isinstance(optimizer.param_groups[0]["params"][0], DTensor):
                state = next(iter(optimizer.state.values()))
                assert isinstance(state["exp_avg"], DTensor)
                assert state["step"].ndim == 0

        reference, sharded, optimizer = _pair(after=look)
        assert_weights_equal(reference, sharded)
        _assert_holds_shards(optimizer, sharded)
        before = [dict(group) for group in optimizer.param_groups]
        shard_optimizer(optimizer)
        assert [dict(group) for group in optimizer.param_groups] == before, "a second call changes nothing"

    run_ranks(check, 2)


def test_groups_keep_their_order_their_options_and_parameters_that_no_unit_took() -> None:
    def check() -> None:
        model, outside = Net(), nn.Parameter(torch.ones(3))
        ignored = model.head.bias
        first = [model.stem.weight, outside, ignored]
        other_parameters = [p for p in model.parameters() if p is not model.stem.weight and p is not ignored]
        optimizer = torch.optim.SGD(
            [{"params": first, "lr": 0.5}, {"params": other_parameters, "weight_decay": 0.1}], lr=0.1
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model, ignored_params={ignored})
        optimizer.step()
        scheduler.step()
        assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.25, 0), (0.05, 0.1)]
        one, two = (group["params"] for group in optimizer.param_groups)
        assert one[0] is model.stem.weight
        assert one[1] is outside
        assert one[2] is ignored is model.head.bias
        assert [id(p) for p in two] == [id(p) for p in model.parameters() if p is not one[0] and p is not ignored]

    run_ranks(check, 2)


def test_names_in_param_groups_stay_beside_their_parameters() -> None:
    def check() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
        shard(model)
        shard_optimizer(optimizer)
        (group,) = optimizer.param_groups
        named = dict(model.named_parameters())
        assert all(named[name] is p for name, p in zip(group["param_names"], group["params"], strict=True))

    run_ranks(check, 2)


def test_tied_and_frozen_parameters_go_on_too() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            first, last = self.layers[0].get_submodule("up"), self.layers[2].get_submodule("up")
            last.weight = first.weight
            self.stem.weight.requires_grad_(False)

    def apply(model: Tied) -> None:
        fully_shard(model.layers[1])
        fully_shard(model)

    def check() -> None:
        reference, sharded, optimizer = _pair(apply=apply, make=Tied)
        assert_weights_equal(reference, sharded)
        _assert_holds_shards(optimizer, sharded)

    run_ranks(check, 2)


@SOME_STAGES
def test_state_lies_as_the_main_weights_do_at_every_stage(stage: str) -> None:
    shape, placements = EVERY_STAGE[stage]

    def check() -> None:
        apply = shard_on(shape, options=ShardingOptions(placements=placements))
        reference, sharded, optimizer = _pair(apply=apply, make=partial(Net, dim=8))
        for expected, got in zip(reference.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(whole(got), expected.detach(), rtol=1e-5, atol=1e-6)
        _assert_holds_shards(optimizer, sharded)

    run_ranks(check, torch.Size(shape).numel())


def test_state_is_cut_along_the_dim_of_its_parameter() -> None:
    def apply(model: Net) -> None:
        fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % 2 == 0 else None)

    def check() -> None:
        reference, sharded, optimizer = _pair(apply=apply, make=partial(Net, dim=8))
        assert_weights_equal(reference, sharded)
        _assert_holds_shards(optimizer, sharded)

    run_ranks(check, 2)


def test_tensor_parallel_parameters_keep_their_part_of_the_state() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(3, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down(torch.tanh(self.up(x)))
            return out

    def check() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        models = []
        for is_sharded in (False, True):
            torch.manual_seed(0)
            model = Mlp()
            parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            optimizer = ADAMW(model.parameters())
            _steps(model, optimizer, 2)
            if is_sharded:
                fully_shard(model, mesh=mesh["data"])
            _steps(model, optimizer, 2)
            models.append(model)
        for expected, got in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(whole(got), whole(expected), rtol=1e-5, atol=1e-6)
        _assert_holds_shards(optimizer, models[1])

    run_ranks(check, 4)


def test_state_follows_the_main_weights_into_their_dtype() -> None:
    def check() -> None:
        model = Net().to(torch.bfloat16)
        optimizer = ADAMW(model.parameters())
        mean_square(lambda model: model(X.bfloat16()))(model).backward()
        optimizer.step()
        before = [state["exp_avg"] for state in optimizer.state.values()]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, main_dtype=torch.float32)
        fully_shard(model, mp_policy=policy)
        shard_optimizer(optimizer)
        for old, state in zip(before, optimizer.state.values(), strict=True):
            assert torch.equal(whole(state["exp_avg"]), old.float())
        LOSS(model).backward()
        optimizer.step()
        assert all(parameter.dtype == torch.float32 for parameter in optimizer.state)

    run_ranks(check, 2)


def test_shards_may_rest_on_the_cpu() -> None:
    def check() -> None:
        policy = CPUOffloadPolicy(pin_memory=False)
        reference, sharded, optimizer = _pair(apply=partial(fully_shard, offload_policy=policy))
        assert_weights_equal(reference, sharded)
        _assert_holds_shards(optimizer, sharded)

    run_ranks(check, 2)


def test_an_optimizer_over_meta_parameters_trains_the_materialised_shards() -> None:
    def check() -> None:
        with torch.device("meta"):
            model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shard(model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        before = whole(model.head.weight).clone()
        _steps(model, optimizer, 1)
        assert not torch.equal(whole(model.head.weight), before)

    run_ranks(check, 2)


def test_state_that_was_loaded_whole_after_sharding_is_cut_too() -> None:
    def check() -> None:
        def load(optimizer: torch.optim.Optimizer) -> None:
            optimizer.load_state_dict(optimizer.state_dict())

        reference, sharded, _ = _pair(after=load)
        assert_weights_equal(reference, sharded)

    run_ranks(check, 2)


def test_ranks_with_different_rows_step_as_one() -> None:
    def check() -> None:
        models = []
        for rows, apply in ((X, lambda _: None), (rows_of_this_rank(X), shard)):
            torch.manual_seed(0)
            model = Net()
            optimizer = ADAMW(model.parameters())
            apply(model)
            for _ in range(2):
                model(rows).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            models.append(model)
        assert_weights_equal(*models)

    run_ranks(check, 2)


def test_unsharded_parameters_and_state_are_held_until_the_first_step_and_no_longer() -> None:
    def check() -> None:
        model = Net()
        optimizer = ADAMW(model.parameters())
        _steps(model, optimizer, 1)
        references = [weakref.ref(t) for p, state in optimizer.state.items() for t in (p, state["exp_avg"])]
        shard(model)
        gc.collect()
        assert all(ref() is not None for ref in references)
        _steps(model, optimizer, 1)
        assert all(ref() is None for ref in references), "without the cyclic collector"
        assert all(t.untyped_storage().nbytes() < 4 * p.numel() for p, t in _local_states(optimizer) if p.shape[0] > 1)

    run_ranks(check, 2)


def _local_states(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(p, state["exp_avg"].to_local()) for p, state in optimizer.state.items()]


def test_sharding_an_optimizer_communicates_nothing() -> None:
    def check() -> None:
        model = Net()
        optimizer = ADAMW(model.parameters())
        _steps(model, optimizer, 1)
        shard(model)
        if dist.get_rank() == 0:
            shard_optimizer(optimizer)  # the other rank would have to take part
        dist.barrier()
        _steps(model, optimizer, 1)

    run_ranks(check, 2)


def test_state_that_cannot_be_cut_is_refused_by_name_and_nothing_changes() -> None:
    def check() -> None:
        model = Net()
        optimizer = torch.optim.Adafactor(model.parameters())
        _steps(model, optimizer, 1)
        shard(model)
        before = [id(parameter) for parameter in optimizer.param_groups[0]["params"]]
        keys = list(optimizer.state)
        LOSS(model).backward()
        for attempt in (optimizer.step, partial(shard_optimizer, optimizer)):
            with pytest.raises(ValueError, match=r"for 'stem.weight'.*'row_var' of shape \(7, 1\).*after fully_shard"):
                attempt()
        assert [id(parameter) for parameter in optimizer.param_groups[0]["params"]] == before
        assert list(map(id, optimizer.state)) == list(map(id, keys))

    run_ranks(check, 2)


def test_a_parameter_unsharded_and_sharded_in_an_optimizer_is_refused_by_name() -> None:
    def check() -> None:
        model = Net()
        optimizer = ADAMW(model.parameters())
        shard(model)
        optimizer.add_param_group({"params": list(model.parameters())})
        with pytest.raises(ValueError, match=r"'stem.weight' once in AdamW, got it both unsharded.* and sharded"):
            optimizer.step()

    run_ranks(check, 2)


def test_an_optimizer_of_a_model_that_is_gone_is_left_alone() -> None:
    def check() -> None:
        model = Net()
        optimizer = ADAMW(model.parameters())
        shard(model)
        del model
        optimizer.step()
        assert not any(isinstance(parameter, DTensor) for parameter in optimizer.param_groups[0]["params"])

    run_ranks(check, 2)


def test_an_optimizer_that_was_built_after_sharding_is_left_alone() -> None:
    def check() -> None:
        model = shard(Net())
        optimizer = ADAMW(model.parameters())
        _steps(model, optimizer, 1)
        before = [(id(p), *map(id, state.values())) for p, state in optimizer.state.items()]
        assert shard_optimizer(optimizer) is optimizer
        assert [(id(p), *map(id, state.values())) for p, state in optimizer.state.items()] == before

    run_ranks(check, 2)


@pytest.mark.usefixtures("small_parameters_are_cut")
def test_state_in_the_flat_layout_takes_the_unsharded_steps() -> None:
    def check() -> None:
        torch.manual_seed(0)
        reference = Net()
        sharded = copy.deepcopy(reference)
        optimizers = [adamw(list(model.parameters())) for model in (reference, sharded)]
        for step in range(3):
            for model, optimizer in zip((reference, sharded), optimizers, strict=True):
                LOSS(model).backward()
                optimizer.step()
                optimizer.zero_grad()
            if step == 0:
                flat(Rows(1))(sharded)
        assert_weights_equal(reference, sharded, rtol=1e-4, atol=1e-6)
        assert all(isinstance(state["exp_avg"], RaggedDTensor) for state in optimizers[1].state.values())

    run_ranks(check, 3)
