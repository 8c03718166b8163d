"""State dicts: sharded, under the names of the unsharded model, and tied to the memory that trains."""

import copy
from typing import Any

import torch
from fsdp2_models import (
    Api,
    Stack,
    assert_all_sharded,
    assert_close,
    assert_equal_models,
    assert_trains_as,
    inputs,
    local,
    on_ranks,
    shard,
    twins,
    units,
)  # fmt: skip
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)  # fmt: skip
from torch.distributed.tensor import DTensor

RESHARD = (True, False)


def test_a_state_dict_is_sharded_and_shares_the_parameters_memory(api: Api) -> None:
    def scenario(reshard: bool) -> None:
        expected, model = twins()
        shard(api, model, reshard_after_forward=reshard)
        pointers = {name: local(parameter).data_ptr() for name, parameter in model.named_parameters()}
        for ran in (False, True):
            if ran:
                model(inputs())  # leaves units unsharded, if they do not reshard
            state = model.state_dict()
            assert list(state) == list(expected.state_dict())
            assert_all_sharded(state.values())
            assert {name: local(tensor).data_ptr() for name, tensor in state.items()} == pointers
            for name, tensor in expected.state_dict().items():
                assert_close(state[name], tensor, name)
            assert_all_sharded(model.parameters())

    on_ranks(scenario, cases=RESHARD)


def test_a_submodules_state_dict_is_sharded_too(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model, reshard_after_forward=False)
        model(inputs())
        assert_all_sharded(model.blocks[0].state_dict().values())
        assert_all_sharded(model.stem.state_dict().values())
        assert_all_sharded(model.blocks.state_dict().values())
        assert list(model.blocks[0].state_dict()) == list(expected.blocks[0].state_dict())

    on_ranks(scenario)


def test_loading_writes_the_parameters_in_place(api: Api) -> None:
    def scenario(reshard: bool) -> None:
        expected, model = twins()
        shard(api, model, reshard_after_forward=reshard)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(inputs())
        pointers = {name: local(tensor).data_ptr() for name, tensor in model.state_dict().items()}
        objects = dict(model.named_parameters())
        loaded = {name: tensor.detach().clone().mul_(2) for name, tensor in model.state_dict().items()}
        model.load_state_dict(loaded)
        assert dict(model.named_parameters()).keys() == objects.keys()
        assert all(parameter is objects[name] for name, parameter in model.named_parameters())
        assert {name: local(parameter).data_ptr() for name, parameter in model.named_parameters()} == pointers
        expected.load_state_dict({name: 2 * tensor for name, tensor in expected.state_dict().items()})
        assert_trains_as(expected, model)
        model(inputs()).square().sum().backward()
        before = local(model.stem.weight).clone()
        optimizer.step()
        assert not torch.equal(before, local(model.stem.weight))

    on_ranks(scenario, cases=RESHARD)


def test_a_state_dict_taken_once_follows_training(api: Api) -> None:
    """Checkpointing in the background keeps the dict: its tensors are the weights, not a copy."""

    def scenario() -> None:
        model = api.fully_shard(nn.Linear(5, 5, bias=False), reshard_after_forward=True)
        state = model.state_dict()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            model(inputs(4, 5, seed=step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert (
                local(state["weight"]).untyped_storage().data_ptr() == local(model.weight).untyped_storage().data_ptr()
            )
            assert torch.equal(local(state["weight"]), local(model.weight))

    on_ranks(scenario)


def test_hooks_of_the_users_see_sharded_tensors(api: Api) -> None:
    def scenario() -> None:
        model = shard(api, Stack(), reshard_after_forward=False)
        seen: list[torch.Tensor] = []
        model.register_state_dict_post_hook(lambda module, state, prefix, metadata: seen.extend(state.values()))
        model(inputs())
        model.state_dict()
        assert_all_sharded(seen)

    on_ranks(scenario)


def test_a_full_state_dict_is_gathered_and_loaded_back_on_rank_0(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        state = expected.state_dict()
        rank = torch.distributed.get_rank()
        assert list(full) == (list(state) if rank == 0 else [])
        for name, tensor in full.items():
            assert isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor)
            assert torch.equal(tensor, state[name].cpu())
        again = shard(api, Stack())
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(again, copy.deepcopy(full), options=options)
        assert_equal_models(expected, again)

    on_ranks(scenario)


def test_an_optimizers_state_is_sharded_and_travels_by_name(api: Api) -> None:
    def scenario() -> None:
        def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
            _, model = twins()
            shard(api, model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model(inputs()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return model, optimizer

        model, optimizer = trained()
        state: Any = get_optimizer_state_dict(model, optimizer)
        assert_all_sharded(entry["exp_avg"] for entry in state["state"].values())
        assert set(state["state"]) == set(dict(model.named_parameters()))
        other, fresh = trained()
        set_model_state_dict(other, get_model_state_dict(model))
        set_optimizer_state_dict(other, fresh, copy.deepcopy(state))  # torch would alias it
        for network, stepping in ((model, optimizer), (other, fresh)):
            network(inputs(seed=1)).square().sum().backward()
            stepping.step()
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(local(a), local(b))
        assert len(units(api, other)) == 4

    on_ranks(scenario)
