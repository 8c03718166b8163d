"""The result of fully_shard on a module: parameters, class, mesh, and modules built on the meta device."""

import itertools
from collections.abc import Callable
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
    assert_equal_models,
    assert_none_sharded,
    assert_trains_as,
    full_value,
    inputs,
    on_ranks,
    shard,
    twins,
    units,
)  # fmt: skip
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.four_ranks)])
def test_a_sharded_parameter_is_the_dtensor_of_torchs_chunks(api: Api, num_ranks: int) -> None:
    def scenario() -> None:
        expected, model = twins(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1), nn.Conv1d(4, 8, 3)))
        api.fully_shard(model)
        mesh = init_device_mesh(Where.device, (num_ranks,))
        for (name, full), (other, parameter) in zip(expected.named_parameters(), model.named_parameters(), strict=True):
            assert name == other
            assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter)
            assert parameter.placements == (Shard(0),)
            assert parameter.device_mesh == mesh
            assert (parameter.shape, parameter.stride()) == (full.shape, full.stride())
            chunks = full.chunk(num_ranks)
            mine = chunks[dist.get_rank()] if dist.get_rank() < len(chunks) else full[:0]
            assert torch.equal(parameter.to_local(), mine)
            assert parameter.requires_grad and parameter.is_leaf
            assert torch.equal(parameter.full_tensor(), full)

    on_ranks(scenario, num_ranks)


def test_ranks_with_different_weights_keep_the_rows_of_their_own(api: Api) -> None:
    def scenario() -> None:
        model = nn.Linear(3, 4, device=Where.device)
        nn.init.constant_(model.weight, dist.get_rank())
        api.fully_shard(model)
        assert full_value(model.weight)[:, 0].tolist() == [0, 0, 1, 1]

    on_ranks(scenario, 2)


def test_a_unit_has_a_new_class_derived_from_the_modules_class(api: Api) -> None:
    def scenario() -> None:
        model = nn.Sequential(Block(), Block(), Block())
        assert api.fully_shard(model[0]) is model[0]
        assert type(model[0]).__name__ == "FSDPBlock"
        assert isinstance(model[0], Block) and isinstance(model[0], api.FSDPModule)
        assert not any(isinstance(inner, api.FSDPModule) for inner in model[0].children())
        assert type(model[1]) is Block
        api.fully_shard(model)
        assert type(model).__name__ == "FSDPSequential"
        part: object = model[:2]
        assert not isinstance(part, api.FSDPModule)
        assert isinstance(part, nn.Sequential) and len(part) == 2
        assert type(model[0]) is type(api.fully_shard(Block()))

    on_ranks(scenario, 1)


def test_a_unit_owns_the_parameters_of_no_inner_unit(api: Api) -> None:
    def scenario() -> None:
        model: Any = Stack()
        shard(api, model)
        model.unshard()
        assert_none_sharded([*model.stem.parameters(), *model.head.parameters()])
        assert_all_sharded(model.blocks.parameters())
        model.blocks[1].unshard()
        assert_none_sharded(model.blocks[1].parameters())
        assert_all_sharded(model.blocks[0].parameters())
        for module in units(api, model):
            module.reshard()
        assert_all_sharded(model.parameters())

    on_ranks(scenario)


def test_a_module_in_two_places_is_sharded_once(api: Api) -> None:
    def scenario() -> None:
        def make() -> nn.Module:
            model = nn.Sequential(Block(), Block(), Block())
            model[2] = model[0]
            model[1].up = model[0].up
            return model

        expected, model = twins(make)
        api.fully_shard(model)
        assert len(list(model.parameters())) == len(list(expected.parameters())) == 6
        assert model[0].up.weight is model[1].up.weight is model[2].up.weight
        assert_trains_as(expected, model)

    on_ranks(scenario)


def test_a_list_of_modules_becomes_one_unit(api: Api) -> None:
    def scenario() -> None:
        model: Any = Stack()
        group = [model.blocks[0], model.blocks[1]]
        assert api.fully_shard(group) is group
        assert all(isinstance(block, api.FSDPModule) for block in group)
        api.fully_shard(model)
        model.blocks[0].unshard()
        assert_none_sharded([*model.blocks[0].parameters(), *model.blocks[1].parameters()])
        model.blocks[1].reshard()
        assert_all_sharded(model.parameters())

    on_ranks(scenario)


@pytest.mark.four_ranks
def test_a_mesh_is_made_over_all_ranks_unless_one_is_given(api: Api) -> None:
    def scenario() -> None:
        model = api.fully_shard(nn.Linear(8, 8))
        assert model.weight.device_mesh.size() == 4
        pairs = init_device_mesh(Where.device, (2, 2), mesh_dim_names=("outer", "inner"))
        model = api.fully_shard(nn.Linear(8, 8), mesh=pairs["inner"])
        assert model.weight.device_mesh == pairs["inner"]
        assert model.weight.to_local().shape == (4, 8)
        from_group = DeviceMesh.from_group(pairs["outer"].get_group(), Where.device, mesh_dim_names=("dp",))
        expected, model = twins(lambda: nn.Linear(DIM, 4))
        api.fully_shard(model, mesh=from_group)
        assert_trains_as(expected, model, mesh=from_group)

    on_ranks(scenario, 4)


def test_blocks_made_and_sharded_one_after_another_are_told_apart(api: Api) -> None:
    """No record is keyed by an address, since a later parameter can get the address."""

    def scenario() -> None:
        model = nn.Sequential()
        for _ in range(6):
            model.append(api.fully_shard(nn.Linear(DIM, DIM)))
        api.fully_shard(model)
        model(inputs()).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    on_ranks(scenario)


def test_every_unit_has_a_state_and_no_two_share_one(api: Api) -> None:
    def scenario() -> None:
        model = shard(api, Stack())
        states = [api.fully_shard.state(module) for module in units(api, model)]
        assert None not in states
        assert len(set(map(id, states))) == 4
        assert api.fully_shard.state(model.stem) is None
        assert states[0] is model._get_fsdp_state()

    on_ranks(scenario, 1)


def test_a_state_names_its_parameters_from_the_outermost_unit_on(api: Api) -> None:
    """Private names, read by torch's own tests and tools."""

    def scenario() -> None:
        model = shard(api, Stack(num_blocks=2))
        outermost, *inner = (api.fully_shard.state(module) for module in (model, *model.blocks))
        outermost._lazy_init()
        assert outermost._is_root and not any(state._is_root for state in inner)
        assert outermost._state_ctx.all_states == [outermost, *inner]
        assert [state._fsdp_param_group._module_fqn for state in inner] == ["blocks.0", "blocks.1"]
        names = [parameter._param_fqn for state in inner for parameter in state._fsdp_param_group.fsdp_params]
        assert names == [name for name, _ in model.named_parameters() if name.startswith("blocks")]
        root_names = {parameter._param_fqn for parameter in outermost._fsdp_param_group.fsdp_params}
        assert root_names == {"stem.weight", "stem.bias", "head.weight", "head.bias"}

    on_ranks(scenario, 1)


def test_a_state_says_whether_its_parameters_are_unsharded_and_which_modules_are_yet_to_run(api: Api) -> None:
    def scenario() -> None:
        model = Stack(num_blocks=3)
        seen = []
        pair = api.fully_shard([model.blocks[0], model.blocks[1]])
        api.fully_shard(model, reshard_after_forward=True)
        state = api.fully_shard.state(pair[1])
        assert state is pair[0]._get_fsdp_state()
        group = state._fsdp_param_group

        def look(*_: object) -> None:
            seen.append((group.is_unsharded, group.is_sharded, set(state._modules_to_run_forward)))

        for module in (pair[0], pair[1], model.blocks[2]):
            module.register_forward_pre_hook(look)
        look()
        model(inputs())
        assert [is_unsharded for is_unsharded, _, _ in seen] == [False, True, True, False]
        assert [parts for _, parts, _ in seen] == [True, False, False, True]
        assert [pending for _, _, pending in seen] == [set(), {*pair}, {pair[1]}, set()]

    on_ranks(scenario)


# -- meta -------------------------------------------------------------------------------------------------------------


class _Buffered(nn.Linear):
    """A module with a buffer, and a method for initialising both parameter and buffer."""

    offset: torch.Tensor

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)
        self.register_buffer("offset", torch.empty(dim))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "offset"):
            nn.init.zeros_(self.offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.offset.to(x.dtype)


def _linears(dim: int) -> nn.Module:
    return nn.Sequential(_Buffered(dim), nn.Linear(dim, dim, bias=False))


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
def test_a_model_built_on_meta_is_materialised_and_initialised_by_its_own_methods(api: Api) -> None:
    def scenario(dtype: torch.dtype | None, by_parent: bool) -> None:
        policy = api.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)

        def apply(model: Any) -> None:
            for module in (model[0], model):
                api.fully_shard(module, mp_policy=policy)

        for dim in (8, 3, 1):
            with torch.device("meta"):
                model = _linears(dim)
                if by_parent:
                    apply(model)
            if not by_parent:
                apply(model)
            assert all(parameter.is_meta for parameter in model.parameters())
            model.to_empty(device=Where.device)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.detach().fill_(1337)
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.reset_parameters()
            for parameter in model.parameters():
                assert not (full_value(parameter) == 1337).any()
            model(inputs(4, dim)).sum().backward()
            optimizer.step()

    on_ranks(scenario, cases=itertools.product((None, torch.bfloat16), (True, False)))


def test_a_meta_model_takes_the_tensors_of_a_state_dict_that_is_assigned(api: Api) -> None:
    def scenario() -> None:
        expected, _ = twins()
        with torch.device("meta"):
            model = Stack()
        shard(api, model)
        state = expected.state_dict()
        loaded = {
            name: nn.Parameter(distribute_tensor(state[name], meta.device_mesh, meta.placements))
            for name, meta in model.state_dict().items()
        }
        model.load_state_dict(loaded, assign=True)
        assert_all_sharded(model.parameters())
        assert_trains_as(expected, model)

    on_ranks(scenario)


def test_units_may_be_materialised_one_by_one_and_a_parameter_replaced(api: Api) -> None:
    class LinearsAndNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.norm = nn.Parameter(torch.empty(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.two(self.one(x)).sum() + self.norm.sum()
            return out

    def scenario() -> None:
        with torch.device("meta"):
            model = LinearsAndNorm()
        for module in (model.one, model.two, model):
            api.fully_shard(module)
        for module in (model.one, model.two):
            module.to_empty(device=Where.device)
            with torch.no_grad():
                module.weight.fill_(2.0)
        with torch.no_grad():
            model.norm = nn.Parameter(torch.linalg.norm(model.one.weight, dim=1))
        loss = model(torch.ones(1, 3))
        loss.backward()
        assert loss.item() == pytest.approx(3 * 36 + 3 * 12**0.5)
        assert model.norm.grad is not None

    on_ranks(scenario)


def _cast(model: nn.Module) -> None:
    model.to(torch.float64)


def _round_trip(model: nn.Module) -> None:
    model.to(torch.bfloat16)
    model.to(torch.float64)


def test_a_sharded_model_may_be_cast(api: Api) -> None:
    def scenario(change: Callable[[nn.Module], None], swap: bool) -> None:
        torch.__future__.set_swap_module_params_on_conversion(swap)
        expected, model = twins()
        shard(api, model)
        change(model)
        change(expected)
        for parameter in model.parameters():
            assert parameter.dtype == parameter.to_local().dtype == torch.float64
            assert parameter._spec.tensor_meta.dtype == torch.float64
        assert_trains_as(expected, model, make_input=lambda step: inputs(seed=step).double())
        assert_equal_models(expected, model)
        model(inputs().double()).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad.dtype == parameter.grad.to_local().dtype == torch.float64

    on_ranks(scenario, cases=itertools.product((_cast, _round_trip), (False, True)))
