"""Names inside of FSDP2 with readers in other programs: docs/reference/fsdp2.md lists the readers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp2_models import Api, Block, Stack, Where, assert_all_sharded, inputs, on_ranks, shard
from test_fsdp2_extensions import Rounded
from torch import nn
from torch.distributed import _composable_state
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPModState, _FSDPRefType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state


def test_torchs_own_function_finds_the_state_of_a_unit_and_none_elsewhere(api: Api) -> None:
    def scenario() -> None:
        model = shard(api, Stack())
        assert _get_module_fsdp_state(model) is api.fully_shard.state(model)
        assert _get_module_fsdp_state(model.blocks[0]) is model.blocks[0]._get_fsdp_state()
        assert _get_module_fsdp_state(model.stem) is None

    on_ranks(scenario, 1)


def test_transformer_engines_search_finds_the_closest_unit_around_a_module(api: Api) -> None:
    def scenario() -> None:
        model = shard(api, Stack())
        around = [unit for unit in _composable_state._module_state_mapping if model.blocks[1].up in unit.modules()]
        closest: Any = min(around, key=lambda unit: len(list(unit.modules())))
        assert closest is model.blocks[1]
        assert closest._get_fsdp_state() is api.fully_shard.state(model.blocks[1])

    on_ranks(scenario, 1)


def test_a_deleted_model_leaves_no_state_behind(api: Api) -> None:
    def scenario() -> None:
        before = len(_composable_state._module_state_mapping)
        model = shard(api, Stack())
        assert len(_composable_state._module_state_mapping) == before + 4
        del model
        if api.__name__ == "lamella_engine":  # FSDP2's wait for the cyclic collector
            assert len(_composable_state._module_state_mapping) == before

    on_ranks(scenario, 1)


def test_dtypes_and_both_forms_of_a_parameter_can_be_read(api: Api) -> None:
    def scenario() -> None:
        policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = shard(api, Stack(), mp_policy=policy)
        model(inputs())
        state = api.fully_shard.state(model)
        assert state._mp_policy.param_dtype is torch.bfloat16 and state._mp_policy.output_dtype is None
        parameters = {parameter._param_fqn: parameter for parameter in state._fsdp_param_group.fsdp_params}
        assert parameters["stem.weight"].unsharded_param is model.stem.weight
        for parameter in parameters.values():
            assert (parameter.orig_dtype, parameter.param_dtype, parameter.reduce_dtype) == (
                torch.float32, torch.bfloat16, torch.float32,
            )  # fmt: skip
            assert parameter.unsharded_param.dtype is torch.bfloat16
            assert parameter.sharded_param.dtype is torch.float32
        model = shard(api, Stack())
        model(inputs())
        plain = api.fully_shard.state(model)._fsdp_param_group.fsdp_params
        assert {(parameter.param_dtype, parameter.reduce_dtype) for parameter in plain} == {(None, None)}

    on_ranks(scenario)


def test_a_training_state_says_whether_forward_or_backward_is_under_way(api: Api) -> None:
    def scenario() -> None:
        model = shard(api, Stack())
        state = api.fully_shard.state(model.blocks[1])
        seen = []

        def look(*_: object) -> None:
            seen.append((state._training_state, state._fsdp_param_group._training_state))

        def look_in_both_passes(_module: nn.Module, _args: object, out: torch.Tensor) -> None:
            look()
            out.register_hook(look)  # type: ignore[no-untyped-call]

        model.blocks[1].up.register_forward_hook(look_in_both_passes)
        for step in range(2):
            look()
            loss = model(inputs(seed=step)).sum()
            look()
            loss.backward()
        look()
        idle, forward, backward = TrainingState.IDLE, TrainingState.FORWARD, TrainingState.PRE_BACKWARD
        assert [state_phase for state_phase, _ in seen] == [idle, forward, idle, backward] * 2 + [idle]
        assert [group_phase for _, group_phase in seen] == [state_phase for state_phase, _ in seen]

    on_ranks(scenario)


class Watching(Rounded):
    """Reads, as Transformer Engine's tensors do, the unit's training state: a gather for forward or for backward."""

    states: list[tuple[bool, bool]] = []  # noqa: RUF012  shared by a process: ranks are processes

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        (unit,) = [
            unit
            for unit in _composable_state._module_state_mapping
            if isinstance(unit, Block) and module in unit.modules()
        ]
        received_unit: Any = unit
        group = received_unit._get_fsdp_state()._fsdp_param_group
        is_backward = group._training_state is TrainingState.PRE_BACKWARD
        Watching.states.append((group._reshard_after_forward, is_backward))
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():  # writes to a leaf with gradients
            return super().fsdp_post_all_gather(*args, **kwargs)


def test_a_tensor_that_is_gathered_can_tell_forward_from_backward(api: Api) -> None:
    def scenario(reshard: bool | None) -> None:
        Watching.states.clear()
        model = Stack(num_blocks=2, hidden=8)
        for block in model.blocks:
            up = block.get_submodule("up")
            up.weight = nn.Parameter(Watching(up.get_parameter("weight").detach()))
        shard(api, model, reshard_after_forward=reshard)
        for _ in range(2):
            model(inputs()).sum().backward()
        forward, backward = (reshard is None, False), (True, True)
        a_step = [forward, forward, backward, backward] if reshard is None else [forward, forward]
        assert Watching.states == a_step * 2

    on_ranks(scenario, cases=(None, False))


def test_a_model_moved_to_the_cpu_and_back_in_verls_way_keeps_its_outputs(api: Api) -> None:
    def scenario() -> None:
        model = shard(api, Stack())
        with torch.no_grad():
            expected = model(inputs())
        for module in model.modules():
            if (state := _get_module_fsdp_state(module)) is not None and state._fsdp_param_group is not None:
                state._fsdp_param_group._training_state = TrainingState.IDLE
        model.reshard()
        model.cpu()
        assert_all_sharded(model.parameters())
        model.to(Where.device)
        with torch.no_grad():
            assert torch.equal(model(inputs()), expected)

    on_ranks(scenario)


def _nbytes(parameters: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def test_torchs_memory_tracker_tells_shards_unsharded_parameters_and_gradients_apart(api: Api) -> None:
    def scenario() -> None:
        model = Stack(dim=64, hidden=128)
        block, root_nbytes = (
            _nbytes(model.blocks[0].parameters()),
            _nbytes([*model.stem.parameters(), *model.head.parameters()]),
        )
        total_nbytes = _nbytes(model.parameters())
        shard(api, model)
        optimizer = torch.optim.AdamW(model.parameters())
        x = inputs(4, 64)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((x,))
        with tracker:
            model(x).sum().backward()
            gradients = tracker.get_tracker_snapshot()
            optimizer.step()
            stepped = tracker.get_tracker_snapshot()
            optimizer.zero_grad()
        device, ranks = torch.device(Where.device), dist.get_world_size()

        def of(snapshots: Any, kind: _FSDPRefType) -> float:
            kinds_of_device = [kinds for where, kinds in snapshots.items() if where.type == device.type]
            return sum(float(nbytes) for kinds in kinds_of_device for key, nbytes in kinds.items() if key == kind)

        def at(module: nn.Module, moment: _FSDPModState) -> Any:
            return tracker.memory_tracking[module].snapshots[moment][0]

        approx = pytest.approx
        assert of(gradients, _FSDPRefType.SHARDED_PARAM) == approx(total_nbytes / ranks, rel=0.1)
        assert of(gradients, _FSDPRefType.SHARDED_GRAD) == approx(total_nbytes / ranks, rel=0.1)
        assert of(gradients, _FSDPRefType.UNSHARDED_PARAM) == 0
        assert of(stepped, _FSDPRefType.OPT) == approx(2 * total_nbytes / ranks, rel=0.1)
        first = model.blocks[0]
        before, running = at(first, _FSDPModState.BEF_PRE_FW), at(first, _FSDPModState.AFT_PRE_FW)
        unsharded = _FSDPRefType.UNSHARDED_PARAM
        assert of(before, unsharded) == approx(root_nbytes, rel=0.1)
        assert of(running, unsharded) == approx(root_nbytes + block, rel=0.1)
        assert of(at(first, _FSDPModState.AFT_POST_FW), unsharded) == approx(root_nbytes, rel=0.1)
        assert of(at(first, _FSDPModState.BEF_POST_BW), _FSDPRefType.UNSHARDED_GRAD) >= 0.9 * block
        model(x).sum().backward()  # and the hooks are unchanged

    on_ranks(scenario)
