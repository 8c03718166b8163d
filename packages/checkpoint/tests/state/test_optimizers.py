"""Any optimizer's state and options come back by the parameters' names, without a step."""

import json
import math
from collections.abc import Callable, Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lamella_checkpoint import CheckpointMismatch, Source, load, save
from lamella_files import rename
from lamella_testing import run_ranks
from lamella_testing.local_slots import local
from lamella_testing.tiny import Kit, MakeOptimizer

State = dict[str, torch.Tensor]

EVERY_OPTIMIZER: dict[str, MakeOptimizer] = {
    "Adadelta": lambda params: torch.optim.Adadelta(params),
    "Adafactor": lambda params: torch.optim.Adafactor(params),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.05, betas=(0.8, 0.95)),
    "Adam, amsgrad": lambda params: torch.optim.Adam(params, lr=0.05, amsgrad=True),
    "Adamax": lambda params: torch.optim.Adamax(params),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.05),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.05),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.05),
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "Rprop": lambda params: torch.optim.Rprop(params),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05),
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
}
# One of each form of state. (torch's own Adafactor and Rprop cannot step DTensors.)
SHARDED_OPTIMIZERS = ["Adagrad", "Adam, amsgrad", "ASGD", "NAdam", "RMSprop", "SGD", "SGD, momentum"]


class MixedState(torch.optim.Optimizer):
    """Keeps what torch.optim does not keep of DTensors: sums over rows, a Python number, a bfloat16 moment."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "names": ("a", "b")})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["num_steps"] = 0
                    if param.ndim > 1:
                        state["columns"] = param.grad.new_zeros(param.shape[1:])
                    state["moment"] = torch.zeros_like(param, dtype=torch.bfloat16)
                state["num_steps"] += 1
                update = param.grad
                if param.ndim > 1:
                    state["columns"].add_(param.grad.square().sum(0))
                    update = update / (state["columns"] + 1).sqrt()
                state["moment"].add_(update)
                param.sub_(state["moment"].float(), alpha=group["lr"])


def assert_resumes(kit: Kit, path: Path, make: MakeOptimizer, *, sharded: bool) -> None:
    """Save after two steps, load into a fresh pair whose optimizer must not step, and train both on."""
    model, optimizer = kit.build(sharded=sharded, optimizer=make)
    kit.train(model, optimizer)
    save(path, model=model, optimizer=optimizer)
    resumed, resumed_optimizer = kit.build(sharded=sharded, seed=1, optimizer=make)
    before_step = resumed_optimizer.register_step_pre_hook(lambda *_: pytest.fail("a step while loading"))
    load(path, model=resumed, optimizer=resumed_optimizer)
    before_step.remove()
    assert kit.train(model, optimizer) == kit.train(resumed, resumed_optimizer)
    expected, got = kit.state(model, optimizer), kit.state(resumed, resumed_optimizer)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    for param, other in zip(model.parameters(), resumed.parameters(), strict=True):
        slots, resumed_slots = optimizer.state.get(param, {}), resumed_optimizer.state.get(other, {})
        assert {k: type(v) for k, v in slots.items()} == {k: type(v) for k, v in resumed_slots.items()}
        tensors = [k for k, v in slots.items() if isinstance(v, torch.Tensor)]
        assert [slots[k].dtype for k in tensors] == [resumed_slots[k].dtype for k in tensors]
    assert resumed_optimizer.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("name", [*EVERY_OPTIMIZER, "MixedState"])
def test_training_resumes_bit_equal_with_every_torch_optimizer(kit: Kit, tmp_path: Path, name: str) -> None:
    make = EVERY_OPTIMIZER.get(name, MixedState)
    assert_resumes(kit, tmp_path / "checkpoint", make, sharded=False)


def test_training_resumes_bit_equal_with_torch_optimizers_on_sharded_parameters(kit: Kit, tmp_path: Path) -> None:
    def resume_all() -> None:
        for name in SHARDED_OPTIMIZERS:
            assert_resumes(kit, tmp_path / name, EVERY_OPTIMIZER[name], sharded=True)

    run_ranks(resume_all, 2)


def test_factored_state_is_resharded(kit: Kit, tmp_path: Path) -> None:
    def train_and_save() -> State:
        model, optimizer = kit.build(sharded=True, optimizer=MixedState)
        kit.train(model, optimizer)
        save(tmp_path / "checkpoint", model=model, optimizer=optimizer)
        return kit.state(model, optimizer)

    def load_and_train() -> State:
        model, optimizer = kit.build(sharded=True, seed=1, optimizer=MixedState)
        load(tmp_path / "checkpoint", model=model, optimizer=optimizer)
        state = kit.state(model, optimizer)
        kit.train(model, optimizer)
        return state

    expected, got = run_ranks(train_and_save, 3)[0], run_ranks(load_and_train, 2)[0]
    assert expected["hidden.weight/columns"].shape == (3,)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_ranks_may_lack_optimizer_state_of_parameters_without_local_elements(kit: Kit, tmp_path: Path) -> None:
    def train_forget_save_load() -> tuple[int, bool]:
        model, optimizer = kit.build(sharded=True)
        kit.train(model, optimizer)
        state = kit.state(model, optimizer)
        owns_nothing = [param for param in model.parameters() if local(param).numel() == 0]
        for param in owns_nothing:
            optimizer.state.pop(param, None)
        save(tmp_path / "a", model=model, optimizer=optimizer)
        load(tmp_path / "a", model=model, optimizer=optimizer)
        loaded = kit.state(model, optimizer)
        return len(owns_nothing), all(torch.equal(state[name], loaded[name]) for name in state)

    results = run_ranks(train_forget_save_load, 4)
    assert [num_forgotten > 0 for num_forgotten, _ in results] == [False, True, True, True]
    assert all(equal for _, equal in results)


def test_state_that_is_replicated_along_one_axis_is_written_once(kit: Kit, tmp_path: Path) -> None:
    def train_and_save() -> State:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model, _ = kit.build(sharded=False)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters())
        kit.train(model, optimizer)
        save(tmp_path / "a", model=model, optimizer=optimizer)
        return kit.state(model, optimizer)

    expected = run_ranks(train_and_save, 4)[0]
    model, optimizer = kit.build(sharded=False, seed=1, optimizer=torch.optim.Adam)
    load(tmp_path / "a", model=model, optimizer=optimizer)
    got = kit.state(model, optimizer)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_muon_state_comes_back(tmp_path: Path) -> None:
    model = nn.Linear(5, 3, bias=False)
    optimizer = torch.optim.Muon(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()  # type: ignore[no-untyped-call]
    save(tmp_path / "checkpoint", model=model, optimizer=optimizer)
    fresh = nn.Linear(5, 3, bias=False)
    fresh_optimizer = torch.optim.Muon(fresh.parameters())
    load(tmp_path / "checkpoint", model=fresh, optimizer=fresh_optimizer)
    expected = optimizer.state[model.weight]["momentum_buffer"]
    assert torch.equal(fresh_optimizer.state[fresh.weight]["momentum_buffer"], expected)


def test_lbfgs_is_refused_by_the_name_of_its_slot(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(3, 2)).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    optimizer.step(closure)  # type: ignore[no-untyped-call]
    with pytest.raises(NotImplementedError, match="got list for slot '.*' of 'weight'"):
        save(tmp_path / "checkpoint", model=model, optimizer=optimizer)
    assert list(tmp_path.iterdir()) == []


def test_state_of_no_parameter_is_refused_by_its_key(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    state: dict[Any, Any] = optimizer.state
    assert not state["counters"]  # A look at a defaultdict leaves an entry, and nothing to lose.
    save(tmp_path / "a", model=model, optimizer=optimizer)
    state["counters"]["num_steps"] = 3
    with pytest.raises(NotImplementedError, match="got 'counters' in the state of SGD"):
        save(tmp_path / "a", model=model, optimizer=optimizer)


def test_a_parameter_that_was_never_stepped_has_no_state_after_loading(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad = torch.ones(2, 2)
    optimizer.step()
    save(tmp_path / "checkpoint", model=model, optimizer=optimizer)
    model.bias.grad = torch.ones(2)
    optimizer.step()
    assert model.bias in optimizer.state
    load(tmp_path / "checkpoint", model=model, optimizer=optimizer)
    assert model.bias not in optimizer.state
    assert optimizer.state[model.weight]["step"] == 1


def test_an_optimizer_saved_before_its_first_step_makes_a_stepped_one_fresh(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    save(tmp_path / "checkpoint", model=model, optimizer=optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    load(tmp_path / "checkpoint", model=model, optimizer=optimizer)
    assert not optimizer.state


def two_groups(first: Iterable[torch.Tensor], second: Iterable[torch.Tensor]) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": first, "lr": 0.1}, {"params": second, "lr": 0.2}])


def test_options_follow_parameters_into_other_groups_and_another_order(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    save(tmp_path / "a", model=model, optimizer=two_groups([*model[0].parameters()], [*model[1].parameters()]))
    groups = [{"params": [model[1].bias]}, {"params": [model[0].bias, model[0].weight]}, {"params": [model[1].weight]}]
    regrouped = torch.optim.SGD(groups, lr=9.0)
    load(tmp_path / "a", model=model, optimizer=regrouped)
    assert [group["lr"] for group in regrouped.param_groups] == [0.2, 0.1, 0.2]


def test_options_that_conflict_in_one_live_group_are_refused_naming_both_parameters(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path / "a", model=model, optimizer=two_groups([model.weight], [model.bias]))
    one_group = torch.optim.SGD(model.parameters(), lr=9.0, momentum=0.5)
    with pytest.raises(
        CheckpointMismatch, match="lr: 0.1 for weight and 0.2 for bias .*, both in parameter group 0"
    ) as info:
        load(tmp_path / "a", model=model, optimizer=one_group)
    [conflict] = info.value.differences.conflicts
    assert (conflict.option, conflict.group, conflict.first, conflict.second) == ("lr", 0, "weight", "bias")
    assert one_group.param_groups[0]["lr"] == 9.0
    differences = load(tmp_path / "a", model=model, optimizer=one_group, strict=False).left
    assert differences.conflicts == (conflict,)
    assert (one_group.param_groups[0]["lr"], one_group.param_groups[0]["momentum"]) == (9.0, 0)


def test_an_option_that_only_some_parameters_of_a_live_group_have_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    saved_groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "lr_scale": 0.1}]
    save(tmp_path / "a", model=model, optimizer=torch.optim.SGD(saved_groups, lr=0.5))
    one_group = torch.optim.SGD(model.parameters(), lr=9.0)
    with pytest.raises(CheckpointMismatch, match="lr_scale: no value for weight and 0.1 for bias in the checkpoint"):
        load(tmp_path / "a", model=model, optimizer=one_group)
    assert one_group.param_groups[0]["lr"] == 9.0
    load(tmp_path / "a", model=model, optimizer=one_group, strict=False)
    assert one_group.param_groups[0]["lr"] == 0.5 and "lr_scale" not in one_group.param_groups[0]
    two_groups = torch.optim.SGD([{"params": [param]} for param in (model.bias, model.weight)], lr=9.0)
    load(tmp_path / "a", model=model, optimizer=two_groups)
    assert [group.get("lr_scale") for group in two_groups.param_groups] == [0.1, None]


def test_a_group_that_joined_after_the_scheduler_loads_into_one_group_with_the_others(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.5)
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    optimizer.add_param_group({"params": [model.bias], "name": "late"})
    save(tmp_path / "a", model=model, optimizer=optimizer)
    one_group = torch.optim.SGD(model.parameters(), lr=9.0)
    load(tmp_path / "a", model=model, optimizer=one_group)
    assert (one_group.param_groups[0]["lr"], one_group.param_groups[0]["initial_lr"]) == (0.5, 0.5)


@pytest.mark.parametrize("parts", [None, 4, ["a part"]])
def test_an_attribute_that_is_no_list_of_optimizers_tells_no_slots(tmp_path: Path, parts: object) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.parts = parts  # type: ignore[attr-defined]
    save(tmp_path / "a", model=model, optimizer=optimizer)
    load(tmp_path / "a", model=model, optimizer=optimizer)


def test_modules_named_by_numbers_in_a_checkpoint_are_no_counted_parameters(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    save(tmp_path / "a", model=saved, optimizer=torch.optim.SGD(saved.parameters(), lr=0.5))
    live = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("a", "b")})
    optimizer = torch.optim.SGD(live.parameters(), lr=9.0)
    differences = load(tmp_path / "a", model=live, optimizer=optimizer, strict=False).left
    names = {difference.name for difference in differences.names if difference.name.startswith("optimizer")}
    assert names >= {"optimizer.param_groups.a.weight", "optimizer.param_groups.0.weight"}
    assert optimizer.param_groups[0]["lr"] == 9.0


def test_an_option_that_is_nan_conflicts_with_no_parameters(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.param_groups[0]["best_loss"] = float("nan")
    save(tmp_path / "a", model=model, optimizer=optimizer)
    live = torch.optim.SGD(model.parameters(), lr=9.0)
    load(tmp_path / "a", model=model, optimizer=live)
    assert live.param_groups[0]["lr"] == 0.5 and math.isnan(live.param_groups[0]["best_loss"])


def test_names_that_an_optimizer_was_given_are_this_runs(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path / "a", model=model, optimizer=torch.optim.SGD(model.named_parameters(), lr=0.5))
    named_groups = [[("bias", model.bias)], [("weight", model.weight)]]
    live = torch.optim.SGD([{"params": named} for named in named_groups], lr=9.0)
    load(tmp_path / "a", model=model, optimizer=live)
    assert [(group["param_names"], group["lr"]) for group in live.param_groups] == [(["bias"], 0.5), (["weight"], 0.5)]


def test_new_state_has_its_parameters_memory_format(tmp_path: Path) -> None:
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2, 4, 4)).sum().backward()
    optimizer.step()
    save(tmp_path / "a", model=model, optimizer=optimizer)
    fresh = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    load(tmp_path / "a", model=model, optimizer=fresh)
    assert fresh.state[model.weight]["momentum_buffer"].stride() == model.weight.stride()
    assert model.weight.stride() != torch.empty(model.weight.shape).stride()


def test_how_a_step_is_computed_stays_this_runs_choice(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path / "a", model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.5, foreach=True))
    live = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    load(tmp_path / "a", model=model, optimizer=live)
    [group] = live.param_groups
    assert (group["lr"], group["foreach"], group["fused"]) == (0.5, None, True)


def test_a_tensor_learning_rate_loads_as_a_float_or_into_the_same_tensor(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    rate = torch.tensor(0.25)
    with_tensor = torch.optim.SGD(model.parameters(), lr=rate)
    save(tmp_path / "a", model=model, optimizer=with_tensor)
    with_number = torch.optim.SGD(model.parameters(), lr=0.1)
    load(tmp_path / "a", model=model, optimizer=with_number)
    assert with_number.param_groups[0]["lr"] == 0.25 and type(with_number.param_groups[0]["lr"]) is float
    rate.fill_(0.75)
    load(tmp_path / "a", model=model, optimizer=with_tensor)
    assert with_tensor.param_groups[0]["lr"] is rate and rate.item() == 0.25


def test_groups_that_share_a_tensor_learning_rate_get_their_own_where_the_checkpoint_has_two(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}]
    save(tmp_path / "a", model=model, optimizer=torch.optim.SGD(groups, lr=1.0))
    alike: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    live = torch.optim.SGD(alike, lr=torch.tensor(1.0))
    shared = live.param_groups[0]["lr"]
    assert live.param_groups[1]["lr"] is shared
    save(tmp_path / "shared", model=model, optimizer=live)
    load(tmp_path / "shared", model=model, optimizer=live)
    assert all(group["lr"] is shared for group in live.param_groups)
    load(tmp_path / "a", model=model, optimizer=live)
    assert [group["lr"].item() for group in live.param_groups] == [0.5, 0.25]


@pytest.mark.parametrize("make", [np.float64, np.float32])
def test_an_option_of_numpy_is_a_number(tmp_path: Path, make: Callable[[float], Any]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.param_groups[0]["lr"] = make(0.25)
    save(tmp_path / "a", model=model, optimizer=optimizer)
    load(tmp_path / "a", model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25 and type(optimizer.param_groups[0]["lr"]) is float


def test_a_scheduler_resumes_over_loaded_options(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    save(tmp_path / "a", model=model, optimizer=optimizer, extra={"scheduler": scheduler.state_dict()})
    fresh = torch.optim.SGD(model.parameters(), lr=7.0)
    extra = load(tmp_path / "a", model=model, optimizer=fresh)
    assert fresh.param_groups[0]["initial_lr"] == 1.0
    resumed = torch.optim.lr_scheduler.StepLR(fresh, 1, gamma=0.5)
    resumed.load_state_dict(extra["scheduler"])
    fresh.step()
    resumed.step()
    assert fresh.param_groups[0]["lr"] == 0.25


def test_state_that_fits_is_read_in_place(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=3.0)
    save(tmp_path / "a", model=model, optimizer=optimizer)
    memory = optimizer.state[model.weight]["sum"].data_ptr()
    optimizer.state[model.weight]["sum"].zero_()
    load(tmp_path / "a", model=model, optimizer=optimizer)
    assert optimizer.state[model.weight]["sum"].data_ptr() == memory
    assert optimizer.state[model.weight]["sum"].eq(3.0).all()


def _stepped(
    kit: Kit, dtype: torch.dtype, make: MakeOptimizer, *, sharded: bool, num_steps: int = 1
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(5, 4).to(dtype)
    if sharded:
        kit.fully_shard(model)
    optimizer = make(model.parameters())
    for _ in range(num_steps):
        _step(model, optimizer)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.linspace(-1, 1, 20).reshape(4, 5).to(dtype)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _assert_cast_as_by_torch(kit: Kit, path: Path, make: MakeOptimizer, *, sharded: bool, num_steps: int) -> None:
    """Save from fp32, load into bf16 after some steps, compare with `load_state_dict`, and step."""
    model, optimizer = _stepped(kit, torch.float32, make, sharded=sharded)
    save(path, model=model, optimizer=optimizer)
    loaded, loaded_optimizer = _stepped(kit, torch.bfloat16, make, sharded=sharded, num_steps=num_steps)
    load(path, model=loaded, optimizer=loaded_optimizer)
    expected, expected_optimizer = _stepped(kit, torch.bfloat16, make, sharded=sharded)
    expected_optimizer.load_state_dict(optimizer.state_dict())
    for param, other in zip(expected.parameters(), loaded.parameters(), strict=True):
        slots, loaded_slots = expected_optimizer.state[param], loaded_optimizer.state[other]
        assert slots.keys() == loaded_slots.keys()
        for slot, value in slots.items():
            torch.testing.assert_close(local(loaded_slots[slot]), local(value), rtol=0, atol=0)  # and of one dtype
    _step(loaded, loaded_optimizer)


ALIKE = ["Adagrad", "Adam, amsgrad", "AdamW", "RMSprop", "SGD, momentum"]


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("name", ALIKE)
def test_state_is_cast_to_the_dtype_of_the_model_as_by_torch(
    kit: Kit, tmp_path: Path, name: str, num_steps: int
) -> None:
    _assert_cast_as_by_torch(kit, tmp_path / "a", EVERY_OPTIMIZER[name], sharded=False, num_steps=num_steps)


def test_state_is_cast_to_the_dtype_of_a_sharded_model_as_by_torch(kit: Kit, tmp_path: Path) -> None:
    def cast_all() -> None:
        for i, name in enumerate(ALIKE):
            for num_steps in (0, 1):
                path = tmp_path / f"{i}.{num_steps}"
                _assert_cast_as_by_torch(kit, path, EVERY_OPTIMIZER[name], sharded=True, num_steps=num_steps)

    run_ranks(cast_all, 2)


def test_a_factor_beside_weights_keeps_its_dtype_in_a_model_of_another(kit: Kit, tmp_path: Path) -> None:
    make = EVERY_OPTIMIZER["NAdam"]
    model, optimizer = _stepped(kit, torch.float32, make, sharded=False)
    save(tmp_path / "a", model=model, optimizer=optimizer)
    live, live_optimizer = _stepped(kit, torch.bfloat16, make, sharded=False, num_steps=0)
    load(tmp_path / "a", model=live, optimizer=live_optimizer)
    saved, slots = (next(iter(state.values())) for state in (optimizer.state, live_optimizer.state))
    assert slots["exp_avg"].dtype == torch.bfloat16
    for slot in ("step", "mu_product"):
        assert torch.equal(slots[slot], saved[slot]) and slots[slot].dtype == saved[slot].dtype
    _step(live, live_optimizer)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_state_of_a_dtype_of_its_own_stays_in_it_in_a_model_of_another(
    kit: Kit, tmp_path: Path, num_steps: int
) -> None:
    model, optimizer = _stepped(kit, torch.float32, MixedState, sharded=False)
    save(tmp_path / "a", model=model, optimizer=optimizer)
    live, live_optimizer = _stepped(kit, torch.float64, MixedState, sharded=False, num_steps=num_steps)
    load(tmp_path / "a", model=live, optimizer=live_optimizer)
    slots = live_optimizer.state[next(live.parameters())]
    dtypes = {slot: value.dtype for slot, value in slots.items() if slot != "num_steps"}
    assert dtypes == {"columns": torch.float64, "moment": torch.bfloat16}


def test_a_slot_that_the_live_optimizer_has_and_the_checkpoint_lacks_is_listed(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, bias=False)
    plain, amsgrad = (torch.optim.Adam(model.parameters(), amsgrad=amsgrad) for amsgrad in (False, True))
    for optimizer in (plain, amsgrad):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    save(tmp_path / "a", model=model, optimizer=plain)
    with pytest.raises(CheckpointMismatch) as info:
        load(tmp_path / "a", model=model, optimizer=amsgrad)
    assert info.value.missing == ("optimizer.state.weight.max_exp_avg_sq",)


def test_state_of_another_optimizer_class_is_refused_or_skipped_without_strict(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path / "a", model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.5))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        CheckpointMismatch, match="a torch.optim.adam.Adam in the checkpoint, a torch.optim.sgd.SGD here"
    ):
        load(tmp_path / "a", model=model, optimizer=sgd)
    load(tmp_path / "a", model=model, optimizer=sgd, strict=False)
    assert sgd.param_groups[0]["lr"] == 0.1 and "betas" not in sgd.param_groups[0]


@pytest.mark.parametrize(
    "name", [name for name in EVERY_OPTIMIZER if name not in ("SGD", "Adafactor", "Adagrad")], ids=str
)
def test_state_without_one_of_its_slots_is_refused_before_anything_is_touched(tmp_path: Path, name: str) -> None:
    """The slots of each class are known without a step: the optimizer to load into has none."""
    model = nn.Linear(2, 1)
    stepped, fresh = (EVERY_OPTIMIZER[name](model.parameters()) for _ in range(2))
    model(torch.ones(1, 2)).sum().backward()
    stepped.step()
    save(tmp_path / "a", model=model, optimizer=stepped)
    optional = ("max_exp_avg_sq", "momentum_buffer" if "SGD" not in name else "", "momentum_buffer", "grad_avg")
    for slot in stepped.state[model.weight].keys() - {*optional}:
        suffix = f".weight.{slot}"

        def without_slot(source: Source, suffix: str = suffix) -> Source:
            return rename(source, lambda name: None if name.endswith(suffix) else name)

        before = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.add_(1)
        with pytest.raises(CheckpointMismatch) as info:
            load(tmp_path / "a", model=model, optimizer=fresh, translate=without_slot)
        assert info.value.missing == (f"optimizer.state.weight.{slot}",)
        assert torch.equal(model.weight, before + 1) and not fresh.state.get(model.weight)
        left = load(tmp_path / "a", model=model, optimizer=fresh, translate=without_slot, strict=False).left
        assert left.missing == (f"optimizer.state.weight.{slot}",)
        assert torch.equal(model.weight, before) and not fresh.state.get(model.weight)
        fresh.state.clear()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(("saved", "live"), [("SGD, momentum", "AdamW"), ("AdamW", "SGD"), ("RMSprop", "Adagrad")])
def test_state_of_another_optimizer_class_without_a_manifest_is_refused_by_its_slots(
    tmp_path: Path, saved: str, live: str
) -> None:
    model = nn.Linear(2, 2)
    stepped = EVERY_OPTIMIZER[saved](model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    stepped.step()
    model_state, optimizer_state = get_state_dict(model, stepped)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "a", no_dist=True)  # type: ignore[attr-defined]
    slots = [f"optimizer.state.{name}.{slot}" for name in ("weight", "bias") for slot in stepped.state[model.weight]]
    optimizer = EVERY_OPTIMIZER[live](model.parameters())
    state = {name: dict(optimizer.state.get(param, {})) for name, param in model.named_parameters()}
    with pytest.raises(CheckpointMismatch, match="a slot in the checkpoint, unknown here") as info:
        load(tmp_path / "a", model=model, optimizer=optimizer)
    foreign_slots = [slot for slot in slots if not (live == "Adagrad" and slot.endswith(".step"))]
    assert sorted(info.value.unexpected) == sorted(foreign_slots)
    load(tmp_path / "a", model=model, optimizer=optimizer, strict=False)
    assert {name: dict(optimizer.state.get(param, {})) for name, param in model.named_parameters()} == state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_slot_beyond_the_class_is_left_without_strict_and_the_rest_loaded(tmp_path: Path) -> None:
    """Without a manifest: a hook's slot, and the step of a group that counts for a parameter that was never stepped."""
    model = nn.Linear(2, 2)
    stepped, optimizer = (torch.optim.AdamW(model.parameters(), lr=lr) for lr in (0.5, 0.1))
    model(torch.ones(1, 2)).sum().backward()
    stepped.step()
    stepped.state[model.weight]["average"] = torch.ones(2, 2)
    model_state, optimizer_state = get_state_dict(model, stepped)
    slots_of_bias: Any = optimizer_state["state"]["bias"]  # type: ignore[call-overload]
    del slots_of_bias["exp_avg"], slots_of_bias["exp_avg_sq"]
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "a", no_dist=True)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointMismatch) as info:
        load(tmp_path / "a", model=model, optimizer=optimizer)
    assert info.value.unexpected == ("optimizer.state.weight.average",) and not info.value.missing
    loaded = load(tmp_path / "a", model=model, optimizer=optimizer, strict=False)
    assert loaded.left.unexpected == info.value.unexpected
    assert optimizer.state[model.weight].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], stepped.state[model.weight]["exp_avg"])
    assert model.bias not in optimizer.state and optimizer.param_groups[0]["lr"] == 0.5


class OwnMuon(torch.optim.Muon):
    state_slots = ("momentum_buffer",)


class InParts(torch.optim.Optimizer):
    """Muon for some parameters and AdamW for the others, as one optimizer."""

    def __init__(self, by_muon: list[torch.Tensor], by_adamw: list[torch.Tensor]) -> None:
        self.parts = [OwnMuon(by_muon), torch.optim.AdamW(by_adamw)]
        super().__init__([*by_muon, *by_adamw], {"muon": True})
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        for part in self.parts:
            part.state = self.state

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


@pytest.mark.parametrize(
    ("num_saved", "num_live", "slots"), [(2, 1, ("step", "exp_avg", "exp_avg_sq")), (1, 2, ("momentum_buffer",))]
)
def test_state_of_another_part_of_the_optimizer_is_refused_by_its_slots(
    tmp_path: Path, num_saved: int, num_live: int, slots: tuple[str, ...]
) -> None:
    """The parameter `1` is stepped by Muon in one optimizer, and by AdamW in the other."""
    model = nn.ParameterList(torch.eye(2) for _ in range(3))
    params: list[torch.Tensor] = [*model]
    optimizer, live = (InParts(params[:num_by_muon], params[num_by_muon:]) for num_by_muon in (num_saved, num_live))
    for param in params:
        param.grad = torch.ones(2, 2)
    optimizer.step()
    save(tmp_path / "a", model=model, optimizer=optimizer)
    with pytest.raises(CheckpointMismatch) as info:
        load(tmp_path / "a", model=model, optimizer=live)
    assert info.value.missing == tuple(f"optimizer.state.1.{slot}" for slot in slots)
    assert not live.state
    load(tmp_path / "a", model=model, optimizer=live, strict=False)
    assert set(live.state) == {params[0], params[2]}
    live.step()
    load(tmp_path / "a", model=model, optimizer=optimizer)


def test_adam_state_resumes_in_adamw(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path / "a", model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.5))
    adamw = torch.optim.AdamW(model.parameters())
    load(tmp_path / "a", model=model, optimizer=adamw)
    assert adamw.param_groups[0]["lr"] == 0.5


def test_parameters_that_only_one_optimizer_has_are_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path / "a", model=model, optimizer=torch.optim.SGD([model.weight], lr=0.1))
    with pytest.raises(CheckpointMismatch) as info:
        load(tmp_path / "a", model=model, optimizer=torch.optim.SGD([model.bias], lr=0.1))
    assert info.value.missing == ("optimizer.param_groups.bias",)
    assert info.value.unexpected == ("optimizer.param_groups.weight",)


def test_a_checkpoint_without_an_optimizer_says_so_and_loads_without_one(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path / "a", model=model)
    with pytest.raises(CheckpointMismatch) as info:
        load(tmp_path / "a", model=model, optimizer=torch.optim.SGD(model.parameters()))
    assert info.value.missing == ("optimizer.param_groups.weight", "optimizer.param_groups.bias")
    assert load(tmp_path / "a", model=model) == {}


def test_an_optimizer_over_another_model_is_refused(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"a stranger of shape \(3, 3\) at position 0 of parameter group 0"):
        save(tmp_path / "a", model=model, optimizer=torch.optim.SGD(other.parameters()))


@pytest.mark.parametrize("value", [nn.Linear(2, 2), HTTPStatus.OK])
def test_an_option_that_no_reader_takes_for_plain_data_is_refused_by_name(tmp_path: Path, value: object) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": model.parameters(), "owner": value}])
    with pytest.raises(TypeError, match="for 'owner'"):
        save(tmp_path / "a", model=model, optimizer=optimizer)


def test_an_option_that_a_group_shares_is_stored_once(tmp_path: Path) -> None:
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(50))
    save(tmp_path / "one", model=model, optimizer=torch.optim.SGD(model.parameters()))
    groups = [{"params": [param]} for param in model.parameters()]
    save(tmp_path / "each", model=model, optimizer=torch.optim.SGD(groups))
    shared_nbytes, separate_nbytes = ((tmp_path / name / "__0_0.distcp").stat().st_size for name in ("one", "each"))
    assert separate_nbytes > 4 * shared_nbytes


def test_the_manifest_names_the_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path / "a", model=model, optimizer=torch.optim.SGD(model.parameters()))
    assert json.loads((tmp_path / "a" / "lamella.json").read_text())["optimizer"]["class"] == "torch.optim.sgd.SGD"


@pytest.mark.parametrize("flag", ["capturable", "fused"])
def test_a_step_count_lies_where_the_step_runs(tmp_path: Path, flag: str) -> None:
    model = nn.Linear(2, 2)
    plain = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    plain.step()
    plain.state[model.weight]["step"] = plain.state[model.weight]["step"].double()
    save(tmp_path / "a", model=model, optimizer=plain)
    options: dict[str, Any] = {flag: True}
    live = torch.optim.Adam(model.parameters(), **options)
    load(tmp_path / "a", model=model, optimizer=live)
    assert live.state[model.weight]["step"].dtype == torch.float32
    unflagged = torch.optim.Adam(model.parameters())
    load(tmp_path / "a", model=model, optimizer=unflagged)
    assert unflagged.state[model.weight]["step"].dtype == torch.float64
