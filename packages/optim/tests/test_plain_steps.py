"""torch's elementwise optimizers step below DTensor's dispatch, with no difference but the time."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine_models import Net, assert_weights_equal, case, inputs, shard, twins
from optimizer_models import OPTIMIZERS, Short, flavours_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lamella_engine import Rows, ShardingOptions, fully_shard
from lamella_engine.extending import local_of
from lamella_optim import overlap_optimizer, step_on_local_shards
from lamella_optim._plain import _ELEMENTWISE
from lamella_testing import run_ranks

X = inputs()
NAMES = sorted(kind.__name__ for kind in _ELEMENTWISE)
DTENSORS_CANNOT = "Rprop"  # Rprop writes through boolean indices

Change = Callable[[Optimizer], object]


@contextmanager
def _on_dtensors() -> Iterator[None]:
    with patch("lamella_optim._plain.has_other_hooks", return_value=True):
        yield


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_dtensors: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        self.num_dtensors += sum(isinstance(leaf, DTensor) for leaf in leaves)
        return func(*args, **(kwargs or {}))


def _sharded(module: nn.Module, **options: Any) -> nn.Module:
    for child in module.children():
        fully_shard(child, **options)
    return fully_shard(module, **options)


def _pair(name: str = "AdamW", *, keep: bool = False, **options: Any) -> list[tuple[nn.Module, Optimizer]]:
    """The same model and optimizer twice: with steps on DTensors, and without."""
    how = {"options": ShardingOptions(keep_together=lambda parameter: Rows(1))} if keep else {}
    models = [twins(Short, lambda module: _sharded(module, **how))[1] for _ in range(2)]
    return [(model, OPTIMIZERS[name](model.parameters(), **{"lr": 1e-2, **options})) for model in models]


def _train(model: nn.Module, optimizer: Optimizer, num_steps: int = 2, *, before_step: Change = lambda _: None) -> int:
    """Train.

    Returns:
        How many DTensors the operators of the last step were given.
    """
    num = 0
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        before_step(optimizer)
        with _Seen() as seen:
            optimizer.step()
        num = seen.num_dtensors
    return num


def _assert_equal(pair: list[tuple[nn.Module, Optimizer]]) -> None:
    """Equal to the bit: weights, and state with the weights' placements."""
    found = []
    for model, optimizer in pair:
        parameters = [p for p in model.parameters() if isinstance(p, DTensor)]
        states = [optimizer.state[p] for p in parameters]
        assert list(optimizer.state) == parameters == [p for g in optimizer.param_groups for p in g["params"]]
        found.append((parameters, states, optimizer.state_dict()))
    leaves, other_leaves = (pytree.tree_flatten(state) for state in found)
    assert leaves[1] == other_leaves[1]
    for one, other in zip(leaves[0], other_leaves[0], strict=True):
        assert type(one) is type(other)
        if isinstance(one, DTensor):
            assert one.placements == other.placements
            assert one.shape == other.shape
            one, other = one.to_local(), other.to_local()
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def _check_alike(pair: list[tuple[nn.Module, Optimizer]], before_step: Change = lambda _: None) -> tuple[int, int]:
    """Train the first on DTensors and the second on plain tensors, and compare.

    Returns:
        The number of DTensors among the operands of a step, for both.
    """
    (model, optimizer), other = pair
    with _on_dtensors():
        num = _train(model, optimizer, before_step=before_step)
    nums = num, _train(*other, before_step=before_step)
    _assert_equal(pair)
    return nums


@pytest.mark.parametrize("name", [name for name in NAMES if name != DTENSORS_CANNOT])
def test_plain_steps_of_every_elementwise_optimizer_equal_steps_on_dtensors(name: str) -> None:
    def check() -> None:
        for flavour in flavours_of(name):
            with case(f"{name} {flavour}"):
                on_dtensors, below = _check_alike(_pair(name, **flavour))
                assert on_dtensors > 0
                assert below == 0

    run_ranks(check, 4)


@pytest.mark.parametrize(
    ("name", "options"), [(DTENSORS_CANNOT, {}), ("SGD", {"fused": True}), ("Adagrad", {"fused": True})]
)
def test_optimizers_and_kernels_without_dtensor_support_take_plain_steps(name: str, options: dict[str, Any]) -> None:
    def check() -> None:
        reference, sharded = twins(Short, _sharded)
        for model in (reference, sharded):
            assert _train(model, OPTIMIZERS[name](model.parameters(), lr=1e-2, **options)) == 0
        assert_weights_equal(reference, sharded, rtol=1e-4, atol=1e-6)

    run_ranks(check, 2)


def test_flat_layout_parameters_step_alike_and_plain_kernels_see_no_empty_shards() -> None:
    def check() -> tuple[bool, bool]:
        pair = _pair(keep=True, foreach=True)
        shards = [p.to_local() for p in pair[0][0].parameters() if isinstance(p, DTensor)]
        return all(shard.numel() > 0 for shard in shards), _check_alike(pair)[1] == 0

    outcomes = [*run_ranks(check, 1), *run_ranks(check, 2)]
    assert all(has_rows == is_below for has_rows, is_below in outcomes)
    assert {has_rows for has_rows, _ in outcomes} == {True, False}


def test_gradients_replaced_by_a_step_pre_hook_are_used_by_the_step() -> None:
    def exchange(optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad * -2.0

    def check() -> None:
        pair = _pair("SGD")
        for _, optimizer in pair:
            optimizer.register_step_pre_hook(exchange)
        assert _check_alike(pair)[1] > 0
        pair = _pair("SGD")
        handle = register_optimizer_step_pre_hook(exchange)
        try:
            assert _check_alike(pair)[1] > 0
        finally:
            handle.remove()

    run_ranks(check, 2)


def test_hooks_that_only_wait_are_called_and_change_nothing() -> None:
    num_calls = 0

    def wait(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1

    setattr(wait, "only_waits", True)  # noqa: B010

    def check() -> None:
        pair = _pair("SGD")
        pair[0][1].register_step_pre_hook(wait)
        handle = register_optimizer_step_pre_hook(wait)
        try:
            assert _check_alike(pair)[1] == 0
        finally:
            handle.remove()
        assert num_calls > 0

    run_ranks(check, 2)


@pytest.mark.parametrize("name", ["Adam", "RMSprop"])
@pytest.mark.parametrize(
    "prepare", [nn.Identity(), overlap_optimizer, step_on_local_shards], ids=["plain", "overlapped", "local"]
)
def test_complex_parameters_step_as_unsharded(name: str, prepare: Callable[[Optimizer], object]) -> None:
    """Of uneven shards torch's steps on DTensors would update copies."""

    def check() -> None:
        torch.manual_seed(0)
        gradient = torch.randn(7, dtype=torch.complex64)
        model = nn.Linear(1, 7, dtype=torch.complex64)
        plain = nn.Parameter(model.bias.detach().clone())
        _, sharded = fully_shard(model).parameters()
        assert isinstance(sharded, DTensor)
        plain.grad, sharded.grad = gradient, distribute_tensor(gradient, sharded.device_mesh, sharded.placements)
        optimizers = [getattr(torch.optim, name)([parameter], lr=0.1) for parameter in (plain, sharded)]
        prepare(optimizers[1])
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(sharded.full_tensor(), plain)

    run_ranks(check, 2)


@pytest.mark.parametrize("name", ["Adagrad", "AdamW", "RMSprop"])
def test_complex_parameters_in_the_flat_layout_step_as_unsharded(name: str) -> None:
    """A rank without rows steps on DTensors, and has the state that other ranks have."""

    def check() -> tuple[int, list[list[str]]]:
        torch.manual_seed(0)
        reference = nn.Linear(3, 1, dtype=torch.complex64)
        sharded = copy.deepcopy(reference)
        fully_shard(sharded, options=ShardingOptions(keep_together=lambda parameter: Rows(1)))
        optimizers = [OPTIMIZERS[name](model.parameters(), lr=0.1) for model in (reference, sharded)]
        for model, optimizer in zip((reference, sharded), optimizers, strict=True):
            for _ in range(2):
                optimizer.zero_grad()
                model(X[:, :3].to(torch.complex64)).abs().square().mean().backward()
                optimizer.step()
        for expected, parameter in zip(reference.parameters(), sharded.parameters(), strict=True):
            assert isinstance(parameter, DTensor)
            torch.testing.assert_close(parameter.full_tensor(), expected, rtol=1e-5, atol=1e-6)
        return local_of(sharded.weight).numel(), [sorted(optimizers[1].state[p]) for p in sharded.parameters()]

    (rows, states), (rows_of_other, states_of_other) = run_ranks(check, 2)
    assert {rows, rows_of_other} == {0, 3}
    assert states == states_of_other


def test_complex_parameters_with_uneven_shards_are_refused_to_steps_on_dtensors() -> None:
    class Mine(torch.optim.Adam):
        pass

    def check() -> None:
        model = nn.Linear(1, 7, dtype=torch.complex64)
        _, bias = fully_shard(model).parameters()
        bias.grad = torch.ones_like(bias)
        with pytest.raises(NotImplementedError, match=r"^Expected complex parameters .* for Adam, got shape \(7,\)"):
            torch.optim.Adam([bias]).step(lambda: 0.0)
        with pytest.raises(NotImplementedError, match="for Mine, .*step_on_local_shards"):
            Mine([bias]).step()
        step_on_local_shards(Mine([bias])).step()

    run_ranks(check, 2)


def test_closures_and_subclasses_step_on_dtensors() -> None:
    class Mine(torch.optim.AdamW):
        pass

    def check() -> None:
        model, _ = _pair()[0]
        assert _train(model, Mine(model.parameters())) > 0
        optimizer = torch.optim.AdamW(model.parameters())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(X).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        with _Seen() as seen:
            optimizer.step(closure)
        assert seen.num_dtensors > 0

    run_ranks(check, 2)


def test_state_replaced_between_plain_steps_is_used_by_the_next_step() -> None:
    def exchange(optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"] * 3.0

    def reload(optimizer: Optimizer) -> None:
        optimizer.load_state_dict(optimizer.state_dict())

    def start_again(optimizer: Optimizer) -> None:
        optimizer.state.clear()

    def move(optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            state["exp_avg"]._local_tensor = state["exp_avg"]._local_tensor * 0.5

    def check() -> None:
        for change in (exchange, reload, start_again, move):
            with case(change.__name__):
                assert _check_alike(_pair(), change)[1] == 0

    run_ranks(check, 3)


def test_options_and_groups_may_change_between_steps() -> None:
    def halve(optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["lr"] /= 2

    def check() -> None:
        assert _check_alike(_pair(), halve)[1] == 0
        pair = _pair()
        for model, optimizer in pair:
            first, *other_parameters = model.parameters()
            optimizer.param_groups[0]["params"] = [first]
            optimizer.add_param_group({"params": other_parameters, "lr": 3e-2})
        assert _check_alike(pair)[1] == 0

    run_ranks(check, 2)


def _drop(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"][1].grad = None


def test_a_parameter_without_a_gradient_stays_and_has_no_state() -> None:
    def check() -> None:
        for model, optimizer in _pair():
            assert _train(model, optimizer, before_step=_drop) == 0
            assert optimizer.param_groups[0]["params"][1] not in optimizer.state

    run_ranks(check, 2)


def test_a_gradient_that_lies_otherwise_is_left_to_dtensors() -> None:
    """Refused, or redistributed."""

    def check() -> None:
        model, optimizer = _pair("SGD", foreach=False)[0]
        model(X).square().mean().backward()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = parameter.grad.redistribute(placements=[Replicate()])
        with _Seen() as seen, suppress(RuntimeError):
            optimizer.step()
        assert seen.num_dtensors > 0

    run_ranks(check, 2)


def test_parameters_beside_units_are_stepped_too() -> None:
    def check() -> None:
        for _ in range(2):
            pair = _pair(foreach=False)
            unsharded = [nn.Parameter(torch.ones(3)) for _ in pair]
            for (_, optimizer), parameter in zip(pair, unsharded, strict=True):
                optimizer.add_param_group({"params": [parameter]})
            for (model, optimizer), parameter in zip(pair, unsharded, strict=True):

                def step(optimizer: Optimizer, parameter: nn.Parameter = parameter) -> None:
                    parameter.grad = torch.full((3,), 0.5)

                with patch("lamella_optim._plain.has_other_hooks", return_value=parameter is unsharded[0]):
                    num = _train(model, optimizer, before_step=step)
                assert (num > 0) == (parameter is unsharded[0])
            assert torch.equal(*unsharded)
            assert torch.equal(*(o.state[p]["exp_avg"] for (_, o), p in zip(pair, unsharded, strict=True)))

    run_ranks(check, 2)


def test_a_failed_plain_step_has_the_effects_of_a_failed_step_on_dtensors() -> None:
    def check() -> None:
        pair = _pair(foreach=False)
        for i, (model, optimizer) in enumerate(pair):
            with patch("lamella_optim._plain.has_other_hooks", return_value=i == 0):
                optimizer.param_groups[0]["weight_decay"] = None
                with pytest.raises(TypeError):
                    _train(model, optimizer, 1)
                optimizer.param_groups[0]["weight_decay"] = 0.1
        _check_alike(pair, _drop)  # a parameter without a gradient now had a gradient in the failed step

    run_ranks(check, 2)


def test_a_step_keeps_neither_gradients_nor_an_optimizer_nor_weights() -> None:
    def check() -> None:
        model, optimizer = _pair()[0]
        assert _train(model, optimizer) == 0
        first = optimizer.param_groups[0]["params"][0]
        gradient, shard = (weakref.ref(tensor._local_tensor) for tensor in (first.grad, first))
        optimizer.zero_grad()
        assert gradient() is None
        optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]
        optimizer.state.pop(first)
        _train(model, optimizer, 1)  # from here on the second optimizer knows nothing of the first
        dead = weakref.ref(optimizer)
        del optimizer
        assert dead() is None
        del model, first
        assert shard() is None

    run_ranks(check, 2)


def test_a_deleted_optimizer_in_a_reference_cycle_is_freed_after_plain_steps() -> None:
    def check() -> bool:
        model, optimizer = _pair()[0]
        optimizer.scheduler = [optimizer]  # type: ignore[attr-defined]
        assert _train(model, optimizer) == 0
        dead = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        return dead() is None

    assert all(run_ranks(check, 1))


def test_attributes_set_during_a_plain_step_are_set_on_the_users_optimizer() -> None:
    def check() -> None:
        model, optimizer = _pair()[0]
        noted: list[Any] = []
        class_function = torch.optim.AdamW._init_group

        def init_group(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.was_stepped = True
            return class_function(self, *args, **kwargs)  # type: ignore[no-untyped-call]

        optimizer.register_step_post_hook(lambda optimizer, *_: setattr(optimizer, "note", len(noted)))
        with patch.object(torch.optim.Adam, "_init_group", init_group):
            for _ in range(2):
                noted.append(None)
                assert _train(model, optimizer, 1) == 0
                assert vars(optimizer)["was_stepped"]
                assert vars(optimizer)["note"] == len(noted)

    run_ranks(check, 1)


def test_hooks_after_a_step_are_given_the_optimizer_that_they_were_registered_on() -> None:
    def check() -> None:
        for make in (lambda _: None, overlap_optimizer):
            model = shard(Net())
            scale = nn.Parameter(torch.ones(()))  # in no unit: the step has work left after any earlier step
            optimizer = torch.optim.NAdam([*model.parameters(), scale])
            seen: list[list[object]] = []

            def note(stepped: Optimizer, args: Any, kwargs: Any, seen: Any = seen) -> None:
                seen.append([stepped, *args, *kwargs.values()])

            optimizer.register_step_post_hook(note)
            make(optimizer)
            optimizer.register_step_post_hook(note)
            handle = register_optimizer_step_post_hook(note)
            for _ in range(3):
                (model(X).square().mean() * scale).backward()
                optimizer.step()
                assert [[argument is optimizer for argument in arguments] for arguments in seen] == [[True, True]] * 3
                seen.clear()
            handle.remove()

    run_ranks(check, 2)


def test_state_cleared_between_plain_steps_is_freed() -> None:
    """A common way to make room for further work."""

    def check() -> None:
        model, optimizer = _pair()[0]
        assert _train(model, optimizer) == 0
        optimizer.zero_grad()
        state = [weakref.ref(local_of(s["exp_avg"])) for s in optimizer.state.values()]
        optimizer.state.clear()
        assert [average() for average in state] == [None] * len(state)

    run_ranks(check, 2)


def test_autograd_sees_that_weights_were_updated() -> None:
    def check() -> None:
        for i, (model, optimizer) in enumerate(_pair()):
            with patch("lamella_optim._plain.has_other_hooks", return_value=i == 0):
                _train(model, optimizer, 1)
                model(X).square().mean().backward()
                penalty: Any = sum(p.square().sum() for p in model.parameters())
                versions = [p._version for p in model.parameters()]
                optimizer.step()
                assert all(p._version > before for p, before in zip(model.parameters(), versions, strict=True))
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    penalty.backward()

    run_ranks(check, 2)


def test_gradients_of_a_step_that_failed_are_not_used_by_the_next() -> None:
    def check() -> None:
        model, optimizer = _pair(foreach=False)[0]
        optimizer.param_groups[0]["weight_decay"] = None
        with pytest.raises(TypeError):
            _train(model, optimizer, 1)
        optimizer.param_groups[0]["weight_decay"] = 0.1
        optimizer.zero_grad()
        before = [local_of(parameter).clone() for parameter in model.parameters()]
        optimizer.step()
        for parameter, was in zip(model.parameters(), before, strict=True):
            assert torch.equal(local_of(parameter), was)

    run_ranks(check, 2)


def test_state_that_a_step_updates_in_place_stays_the_same_dtensor() -> None:
    def check() -> None:
        model, optimizer = _pair("SGD", momentum=0.9)[0]
        assert _train(model, optimizer) == 0
        before = [state["momentum_buffer"] for state in optimizer.state.values()]
        assert _train(model, optimizer) == 0
        for state, buffer in zip(optimizer.state.values(), before, strict=True):
            assert state["momentum_buffer"] is buffer

    run_ranks(check, 2)


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_unsharded_tensors_in_loaded_state_are_refused_as_on_dtensors(options: dict[str, Any]) -> None:
    """As in a whole, unsharded state dict: kernels would take each rank's rows for the first."""

    def check() -> None:
        for model, optimizer in _pair(**options):
            _train(model, optimizer, 1)
            state = optimizer.state_dict()
            for each in state["state"].values():
                each.update({key: value.full_tensor() for key, value in each.items() if isinstance(value, DTensor)})
            optimizer.load_state_dict(state)
            with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                _train(model, optimizer, 1)

    run_ranks(check, 2)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch's own
def test_a_compiled_step_is_one_on_dtensors() -> None:
    def check() -> None:
        (model, optimizer), (reference, eager) = _pair("SGD", momentum=0.9)

        @torch.compile(backend="eager")
        def step() -> None:
            optimizer.step()

        with patch("lamella_optim._plain.plain_view_of", side_effect=AssertionError):
            for _ in range(2):
                optimizer.zero_grad()
                model(X).square().mean().backward()
                step()
        _train(reference, eager, 2)
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(local_of(one), local_of(other))

    run_ranks(check, 1)
