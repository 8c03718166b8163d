"""An optimizer that steps each unit inside backward trains, to the bit, as one that steps when backward is over."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from engine_models import (
    Net,
    Residual,
    assert_at_rest,
    case,
    inputs,
    mean_square,
    rows_of_this_rank,
    shard,
    unit,
)
from fake_streams import Work, fake_streams
from test_activation_checkpointing import KINDS, _Around, _Inside, _RecomputedResidual, _Several
from test_every_optimizer import OPTIMIZERS, WHOLE_TENSORS_ONLY, _flavours
from test_pipelining import _loss, _rows, _sharded, _stages
from test_zero_stages import EVERY_STAGE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from lamella_engine import (
    HFSDP,
    ZERO3,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    Rows,
    clip_grad_norm_,
    fully_shard,
    step_in_backward,
    step_on_local_shards,
)
from lamella_engine import _updates as updates
from lamella_engine._attached import state_of
from lamella_engine._parameter_group import ParameterGroup, Reduced
from lamella_engine._ragged import torch_asks_subclasses
from lamella_testing import run_ranks

X = inputs(24)
LOSS = mean_square(lambda model: model(rows_of_this_rank(X)).float())
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

Make = Callable[[nn.Module], Optimizer]
Backward = Callable[[nn.Module], None]


def _adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _of(name: str, **options: Any) -> Make:
    return lambda model: OPTIMIZERS[name](model.parameters(), **options)


def _backward(model: nn.Module) -> None:
    LOSS(model).backward()


class Pair:
    """A model trained in the ordinary way, and its twin whose optimizer steps inside backward."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = Net,
        apply: Callable[..., object] = shard,
        optimizer: Make = _adamw,
        backward: Backward = _backward,
        **options: bool,
    ) -> None:
        self.models, self.optimizers = [], []
        for _ in range(2):
            torch.manual_seed(0)
            self.models.append(model := make())
            apply(model)
            self.optimizers.append(optimizer(model))
        self.handle = step_in_backward(self.optimizers[1], **options)
        self.names = {id(parameter): name for name, parameter in self.models[1].named_parameters()}
        self._backward = backward

    @property
    def parameters(self) -> list[list[nn.Parameter]]:
        return [list(model.parameters()) for model in self.models]

    def backward(self) -> set[str]:
        """The names of the parameters that were stepped inside."""
        for model in self.models:
            self._backward(model)
        held = [p for group in self.optimizers[1].param_groups for p in group["params"]]
        return {self.names[id(parameter)] for parameter in self.handle.stepped(held)}

    def step(self, *, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.assert_equal()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def train(self, num_steps: int = 3, *, set_to_none: bool = True) -> set[str]:
        """The names of the parameters that were stepped inside the last backward."""
        for _ in range(num_steps):
            stepped = self.backward()
            self.step(set_to_none=set_to_none)
        if all(isinstance(parameter, DTensor) for parameter in self.parameters[1]):
            assert_at_rest(self.models[1])
        return stepped

    def assert_equal(self) -> None:
        """Weights, gradients and state dicts are the same to the bit."""
        for (name, expected), got in zip(self.models[0].named_parameters(), self.parameters[1], strict=True):
            assert torch.equal(_local(got), _local(expected)), name
            assert (got.grad is None) == (expected.grad is None), name
            if got.grad is not None and expected.grad is not None:
                assert torch.equal(_local(got.grad), _local(expected.grad)), name
        assert_same(*(optimizer.state_dict() for optimizer in self.optimizers))

    def all_names(self) -> set[str]:
        return set(self.names.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_same(expected: dict[str, Any], got: dict[str, Any]) -> None:
    """Two state dicts say the same, in the same structure, to the bit."""
    assert got["param_groups"] == expected["param_groups"]
    assert got["state"].keys() == expected["state"].keys()
    for key, state in expected["state"].items():
        assert list(got["state"][key]) == list(state)
        for a, b in zip(pytree.tree_leaves(state), pytree.tree_leaves(got["state"][key]), strict=True):
            assert type(a) is type(b)
            assert torch.equal(_local(a), _local(b)) if isinstance(a, torch.Tensor) else a == b


def _apart(mesh_shape: tuple[int, ...] = (2,), **options: Any) -> Callable[[Net], None]:
    def apply(model: Net) -> None:
        names = ("outer", "inner")[-len(mesh_shape) :]
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh, **options)

    return apply


# -- every optimizer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - WHOLE_TENSORS_ONLY.keys()))
def test_every_optimizer_and_flavour_of_it_takes_the_same_steps(name: str) -> None:
    def check() -> None:
        for flavour in _flavours(name):
            with case(flavour):
                pair = Pair(optimizer=_of(name, lr=1e-2, **flavour))
                assert pair.train() == pair.all_names()

    run_ranks(check, 3)


@pytest.mark.skipif(not torch_asks_subclasses(), reason="torch before 2.12 does not ask subclasses of DTensor")
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Rprop"])
def test_parameters_in_the_flat_layout_take_the_same_steps(name: str) -> None:
    def check() -> None:
        for shape, options in (((4,), {}), ((2, 2), {"placements": (HFSDP, ZERO3)})):
            with case(options):
                apply = _apart(shape, keep=Rows(1), **options)
                pair = Pair(apply=apply, optimizer=_of(name, lr=1e-2))
                assert pair.train() == pair.all_names()

    run_ranks(check, 4)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"lr": 1e-2, "amsgrad": True, "maximize": True, "weight_decay": 0.1}, "Adam"),
        ({"lr": torch.tensor(1e-2)}, "AdamW"),
        ({"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, "SGD"),
        ({"lr": 1e-2, "momentum": 0.9, "centered": True}, "RMSprop"),
    ],
)
def test_options_count(options: dict[str, Any], name: str) -> None:
    def check() -> None:
        pair = Pair(optimizer=_of(name, **options))
        assert pair.train() == pair.all_names()

    run_ranks(check, 2)


class _Lion(Optimizer):
    """As many write their own: no hooks, no flavours, state by hand."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.lerp_(p.grad, 1 - group["beta"])
                    p.add_(average.sign(), alpha=-group["lr"])


class _CountsInItsGroups(_Lion):
    """Corrects for a number of steps that each group counts."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
        super().step()


class _CountsItself(_Lion):
    """Slows down with a number of steps that it counts itself."""

    num_steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad, alpha=0.1 / self.num_steps)


class _NormsOverAll(_Lion):
    """Looks at all gradients before it updates any."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p in parameters)
        for p in parameters:
            p.sub_(p.grad / norm)


def test_one_that_somebody_wrote_takes_the_same_steps() -> None:
    def check() -> None:
        pair = Pair(optimizer=lambda model: _Lion(model.parameters()))
        assert pair.train() == pair.all_names()

    run_ranks(check, 2)


def _run_hooks_among_local_shards(optimizer: Optimizer) -> None:
    """Change an optimizer's class to one that hands shards as plain tensors to hooks, too."""
    kind: Any = type(optimizer)

    def step(self: Any, closure: None = None) -> None:
        whole = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [_local_with_gradient(p) for p in group["params"] if p.grad is not None]
        try:
            kind.step(self)
        finally:
            for group, params in zip(self.param_groups, whole, strict=True):
                group["params"] = params

    optimizer.__class__ = type(f"Local{kind.__name__}", (kind,), {"step": step})


def _local_with_gradient(parameter: torch.Tensor) -> torch.Tensor:
    local = _local(parameter).detach()
    assert parameter.grad is not None
    local.grad = _local(parameter.grad)
    return local


def _locally(make: Make) -> Make:
    return lambda model: step_on_local_shards(make(model))


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_one_that_steps_local_shards_takes_the_same_steps(name: str) -> None:
    def check() -> None:
        for flavour in ({"fused": True}, {"foreach": True}):
            make = _of(name, lr=1e-2, **flavour)
            pair = Pair(optimizer=_locally(make))
            assert pair.train() == pair.all_names()

    run_ranks(check, 2)


def test_parameters_that_are_not_the_ones_that_were_stepped_are_not_stepped_again() -> None:
    def check() -> None:
        pair = Pair(optimizer=_of("SGD", lr=1e-2))
        _run_hooks_among_local_shards(pair.optimizers[1])
        assert pair.backward() == pair.all_names()
        with pytest.raises(RuntimeError, match="got others in its param groups"):
            pair.optimizers[1].step()

    run_ranks(check, 2)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (_CountsInItsGroups, "stepped apart differ"),
        (_CountsItself, "stepped apart differ"),
        (_NormsOverAll, "stepped apart differ"),
        (torch.optim.LBFGS, "closure"),
        (torch.optim.SparseAdam, "dense"),
    ],
)
def test_one_that_cannot_step_a_parameter_at_a_time_is_refused_and_left_as_it_was(kind: type, why: str) -> None:
    def check() -> None:
        model = shard(Net())
        optimizer = kind(model.parameters())
        before = deepcopy(optimizer.state_dict()), dict(vars(optimizer))
        with pytest.raises(ValueError, match=why):
            step_in_backward(optimizer)
        assert (optimizer.state_dict(), vars(optimizer)) == before
        assert not optimizer._optimizer_step_pre_hooks

    run_ranks(check, 1)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="Linear"):
        step_in_backward(nn.Linear(2, 2))  # type: ignore[arg-type]


# -- every way to shard ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", EVERY_STAGE)
@pytest.mark.parametrize("reduces_each", [True, False], ids=["reduce_each", "reduce_last"])
def test_every_stage_takes_the_same_steps_with_several_microbatches(stage: str, reduces_each: bool) -> None:
    shape, placements = EVERY_STAGE[stage]

    def backward(model: nn.Module) -> None:
        for microbatch in range(2):
            is_last = microbatch == 1
            unit(model).set_is_last_backward(is_last)
            unit(model).set_requires_gradient_sync(is_last or reduces_each)
            (LOSS(model) * (microbatch + 1)).backward()

    def check() -> None:
        for policy in (MixedPrecisionPolicy(), BF16):
            for set_to_none in (True, False):
                with case((policy, set_to_none)):
                    apply = _apart(shape, placements=placements, mp_policy=policy)
                    pair = Pair(partial(Net, dim=8), apply, backward=backward)
                    # In fp32, DDP's autograd reads the main weights themselves.
                    reads_main = stage == "DDP" and policy.param_dtype is None
                    expected = set() if reads_main else pair.all_names()
                    assert pair.train(set_to_none=set_to_none) == expected

    run_ranks(check, torch.Size(shape).numel())


class _Skips(Net):
    """Leaves its first layer out when it is told to."""

    skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers[1:] if self.skips else self.layers:
            x = layer(x)
        head: torch.Tensor = self.head(x)
        return head


@pytest.mark.parametrize("stage", ["ZERO1", "ZERO3", "HSDP, ZERO3", "HFSDP, ZERO3"])
def test_a_unit_that_the_last_microbatch_leaves_out_is_stepped_with_what_it_has(stage: str) -> None:
    shape, placements = EVERY_STAGE[stage]

    def backward(model: nn.Module) -> None:
        assert isinstance(model, _Skips)
        for model.skips in (False, True):
            unit(model).set_is_last_backward(model.skips)
            LOSS(model).backward()

    def check() -> None:
        pair = Pair(partial(_Skips, dim=8), _apart(shape, placements=placements), backward=backward)
        left_out = {name for name in pair.all_names() if name.startswith("layers.0.")}
        # With ZeRO-3 on one axis its gradients are there since the first backward, when nothing may be stepped.
        assert pair.train() == pair.all_names() - (left_out if stage == "ZERO3" else set())

    run_ranks(check, torch.Size(shape).numel())


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize(
    "options",
    [{"reshard_after_forward": False}, {"reshard_after_forward": 2}, {"offload_policy": CPUOffloadPolicy()}],
    ids=str,
)
def test_other_ways_to_rest_take_the_same_steps(options: dict[str, Any], num_ranks: int) -> None:
    def check() -> None:
        if num_ranks == 1 and options == {"reshard_after_forward": 2}:
            return
        apply = _apart((num_ranks,), mp_policy=BF16, **options)
        pair = Pair(partial(Net, dim=8), apply)
        assert pair.train() == (set() if "offload_policy" in options else pair.all_names())

    run_ranks(check, num_ranks)


def test_weights_that_stay_after_backward_are_gathered_anew_after_the_step() -> None:
    def check() -> None:
        def apply(model: nn.Module) -> None:
            shard(model)  # type: ignore[arg-type]
            unit(model).set_reshard_after_backward(False)

        pair = Pair(apply=apply)
        for _ in range(3):
            stepped = pair.backward()
            for optimizer in pair.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert stepped
        for model in pair.models:
            unit(model).reset_iter_state()
        pair.assert_equal()

    run_ranks(check, 2)


# -- every loop ------------------------------------------------------------------------------------------------------


class _Odd(Net):
    """A layer that is not used, one that is frozen, and a scale that no unit has."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(5))
        self.layers[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x) * self.scale
        return out


def _shard_odd(model: nn.Module) -> None:
    assert isinstance(model, _Odd)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, ignored_params={model.scale})


def test_frozen_unused_and_unsharded_parameters_are_stepped_as_they_would_be() -> None:
    def check() -> None:
        pair = Pair(_Odd, _shard_odd)
        for set_to_none in (True, False):
            stepped = pair.train(set_to_none=set_to_none)
            others = {"scale", "unused.weight", "unused.bias"}
            frozen = {name for name in pair.all_names() if name.startswith("layers.0.")}
            assert stepped == pair.all_names() - others - frozen

    run_ranks(check, 2)


def _by_decay(model: nn.Module) -> Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 3e-2}]
    return torch.optim.AdamW(groups, lr=1e-2)


@pytest.mark.parametrize("is_built_first", [True, False])
def test_schedulers_see_one_step_for_each(is_built_first: bool) -> None:
    def check() -> None:
        pair = Pair(optimizer=_by_decay)
        if is_built_first:
            pair.handle.remove()
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in pair.optimizers]
        if is_built_first:
            pair.handle = step_in_backward(pair.optimizers[1])
        for i in range(3):
            assert pair.backward() == pair.all_names()
            pair.step()
            for scheduler in schedulers:
                scheduler.step()
            rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in pair.optimizers]
            assert rates[0] == rates[1] == [1e-2 * 0.5 ** (i + 1), 3e-2 * 0.5 ** (i + 1)]

    run_ranks(check, 2)


def test_step_hooks_run_once_and_see_the_whole_optimizer() -> None:
    def check() -> None:
        pair = Pair(optimizer=_by_decay)
        seen: list[tuple[str, list[int]]] = []

        def note(when: str) -> Callable[..., None]:
            def hook(optimizer: Optimizer, *_: object) -> None:
                assert optimizer is pair.optimizers[1]
                seen.append((when, [len(group["params"]) for group in optimizer.param_groups]))

            return hook

        pair.optimizers[1].register_step_pre_hook(note("before"))
        pair.optimizers[1].register_step_post_hook(note("after"))
        sizes = [len(group["params"]) for group in pair.optimizers[1].param_groups]
        count = updates.count
        pair.backward()
        assert not seen
        assert updates.count == count
        pair.optimizers[1].step()
        assert seen == [("before", sizes), ("after", sizes)]
        assert updates.count == count + 1

    run_ranks(check, 2)


def test_hooks_that_only_wait_are_called_before_each_update_of_weights() -> None:
    def check() -> None:
        pair = Pair(optimizer=_by_decay)
        weights = list(pair.models[1].parameters())
        before = [weight.detach().clone() for weight in weights]
        are_first: list[bool] = []

        def wait(*_: object) -> None:
            if not are_first:
                are_first.append(all(map(torch.equal, (weight.detach() for weight in weights), before)))
            seen.append(None)

        seen: list[None] = []
        setattr(wait, "only_waits", True)  # noqa: B010
        pair.optimizers[1].register_step_pre_hook(wait)
        pair.backward()
        assert are_first == [True]
        num_updates = len(seen)
        assert num_updates > 1
        pair.optimizers[1].step()
        assert len(seen) == num_updates + 1

    run_ranks(check, 2)


def test_groups_may_be_added_and_state_dicts_loaded() -> None:
    def check() -> None:
        def some(model: nn.Module) -> Optimizer:
            return torch.optim.AdamW(model.get_submodule("layers").parameters(), lr=1e-2)

        pair = Pair(optimizer=some)
        pair.train()
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
            optimizer.add_param_group({"params": list(model.get_submodule("stem").parameters()), "lr": 1e-3})
            for parameter in model.parameters():
                parameter.grad = None
        stepped = pair.backward()
        assert {"stem.weight", "stem.bias"} < stepped
        pair.step()
        saved = deepcopy(pair.optimizers[0].state_dict())
        for optimizer in pair.optimizers:
            optimizer.load_state_dict(deepcopy(saved))
        assert pair.train() == stepped

    run_ranks(check, 2)


def test_a_state_dict_resumes_training_with_and_without() -> None:
    def check() -> None:
        pair = Pair()
        pair.train()
        saved = [deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers]
        again = Pair(apply=shard)
        for i, (model, optimizer) in enumerate(zip(again.models, again.optimizers, strict=True)):
            model.load_state_dict(pair.models[i].state_dict())
            optimizer.load_state_dict(saved[1 - i])  # each with what the other saved
        for one in (pair, again):
            assert one.train() == one.all_names()
        for a, b in zip(pair.parameters[1], again.parameters[1], strict=True):
            assert torch.equal(_local(a), _local(b))

    run_ranks(check, 2)


def test_two_optimizers_on_one_model() -> None:
    def check() -> None:
        def blocks(model: nn.Module) -> Optimizer:
            return torch.optim.AdamW(model.layers.parameters(), lr=1e-2)  # type: ignore[union-attr]

        def rest(model: nn.Module) -> Optimizer:
            ours = {id(p) for p in model.layers.parameters()}  # type: ignore[union-attr]
            return torch.optim.SGD([p for p in model.parameters() if id(p) not in ours], lr=0.1, momentum=0.9)

        pair = Pair(optimizer=blocks)
        others = [rest(model) for model in pair.models]
        handle = step_in_backward(others[1])
        for _ in range(3):
            blocks_stepped = pair.backward()
            assert blocks_stepped == {name for name in pair.all_names() if name.startswith("layers.")}
            assert len(handle.stepped(pair.parameters[1])) == len(pair.all_names()) - len(blocks_stepped)
            for optimizer in others:
                optimizer.step()
            pair.step()
            assert_same(*(optimizer.state_dict() for optimizer in others))
            for optimizer in others:
                optimizer.zero_grad()

    run_ranks(check, 2)


def test_one_optimizer_over_two_models() -> None:
    def check() -> None:
        def both(model: nn.Module) -> Optimizer:
            return torch.optim.AdamW(model.parameters(), lr=1e-2)

        def apply(model: nn.Module) -> None:
            for each in model:  # type: ignore[attr-defined]
                shard(each)

        def backward(model: nn.Module) -> None:
            x = rows_of_this_rank(X)
            for each in model:  # type: ignore[attr-defined]
                each(x).square().mean().backward()

        pair = Pair(lambda: nn.ModuleList([Net(), Net(1)]), apply, both, backward)
        assert pair.train() == pair.all_names()

    run_ranks(check, 2)


def test_an_optimizer_that_was_built_before_sharding() -> None:
    def check() -> None:
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(Net())
        optimizers = [_adamw(model) for model in models]
        for model in models:
            shard(model)
        handle = step_in_backward(optimizers[1])
        for _ in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                _backward(model)
                if optimizer is optimizers[1]:
                    assert len(handle.stepped(model.parameters())) == len(list(model.parameters()))
                optimizer.step()
                optimizer.zero_grad()
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(_local(a), _local(b))

    run_ranks(check, 2)


def test_removed_it_steps_when_it_is_called_again() -> None:
    def check() -> None:
        pair = Pair()
        pair.train()
        pair.backward()
        with pytest.raises(RuntimeError, match=r"AdamW\.step\(\)"):
            pair.handle.remove()
        pair.step()
        pair.handle.remove()
        assert pair.train() == set()
        pair.handle = step_in_backward(pair.optimizers[1])
        assert pair.train() == pair.all_names()

    run_ranks(check, 2)


def test_the_handle_need_not_be_kept_and_keeps_nothing() -> None:
    def check() -> None:
        pair = Pair()
        handle = weakref.ref(pair.handle)
        del pair.handle
        assert handle() is not None
        gc.disable()
        try:
            kept = weakref.ref(pair.optimizers.pop())
            assert kept() is None
            assert handle() is None
        finally:
            gc.enable()
        _backward(pair.models[1])

    run_ranks(check, 1)


@pytest.mark.parametrize("stage", ["ZERO2", "ZERO3", "HSDP, ZERO3", "HFSDP, ZERO3"])
def test_gradients_may_go_when_they_were_used(stage: str) -> None:
    shape, placements = EVERY_STAGE[stage]

    def check() -> None:
        for policy in (MixedPrecisionPolicy(), BF16):
            pair = Pair(
                partial(Net, dim=8), _apart(shape, placements=placements, mp_policy=policy), free_gradients=True
            )
            for _ in range(3):
                assert pair.backward() == pair.all_names()
                assert all(parameter.grad is None for parameter in pair.parameters[1])
                for optimizer in pair.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                pair.assert_equal()

    run_ranks(check, torch.Size(shape).numel())


# -- who still reads the weights -------------------------------------------------------------------------------------


class _Twice(Net):
    """Each block runs twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        head: torch.Tensor = self.head(x)
        return head


class _TwiceInCheckpoints(Net):
    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for _ in range(2):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        head: torch.Tensor = self.head(x)
        return head


class _TwiceInOtherCheckpoints(_TwiceInCheckpoints):
    reentrant = False


@pytest.mark.parametrize("make", [_Twice, _TwiceInCheckpoints, _TwiceInOtherCheckpoints])
def test_a_unit_that_runs_twice_is_stepped_after_its_last_backward(make: type[Net]) -> None:
    def check() -> None:
        pair = Pair(make)
        assert pair.train() == pair.all_names()

    run_ranks(check, 2)


@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("make", [_Around, _Inside, _Several])
def test_recomputed_units_are_stepped_inside_too(make: type[Net], reentrant: bool, monkeypatch: Any) -> None:
    def check() -> None:
        pair = Pair(make)
        assert pair.train() == pair.all_names()

    for kind in (make, _RecomputedResidual):
        monkeypatch.setattr(kind, "reentrant", reentrant, raising=False)
    run_ranks(check, 2)


@pytest.mark.parametrize("reentrant", KINDS)
def test_a_model_that_is_recomputed_as_a_whole_is_stepped_all_the_same(reentrant: bool) -> None:
    def check() -> None:
        def backward(model: nn.Module) -> None:
            x = rows_of_this_rank(X).requires_grad_()
            checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()

        pair = Pair(backward=backward)
        assert pair.train() == (set() if reentrant else pair.all_names())

    run_ranks(check, 2)


def test_forwards_before_their_backwards_are_stepped_after_the_last() -> None:
    stepped: list[int] = []

    def check() -> None:
        def backward(model: nn.Module) -> None:
            losses = [LOSS(model), LOSS(model) * 2]
            for loss in losses:
                loss.backward()
                if model is pair.models[1]:
                    stepped.append(len(pair.handle.stepped(pair.parameters[1])))

        pair = Pair()
        pair._backward = backward
        pair.train(2)
        assert stepped == [0, len(pair.all_names())] * 2

    run_ranks(check, 2)


def test_a_forward_without_a_backward_only_defers_the_next_step() -> None:
    def check() -> None:
        pair = Pair()
        pair.train()
        for model in pair.models:
            LOSS(model)
        assert pair.backward() == set()
        pair.step()
        assert pair.train() == pair.all_names()
        for model in pair.models:
            with torch.no_grad():
                LOSS(model)
        assert pair.train(1) == pair.all_names()

    run_ranks(check, 2)


def test_a_unit_that_somebody_holds_is_stepped_in_step() -> None:
    def check() -> None:
        pair = Pair()
        holds = [unit(model.get_submodule("layers.1")).hold() for model in pair.models]
        stepped = pair.backward()
        assert stepped == {name for name in pair.all_names() if not name.startswith("layers.1.")}
        for hold in holds:
            hold.release()
        pair.step()
        assert pair.train() == pair.all_names()

    run_ranks(check, 2)


def test_a_unit_with_a_delayed_gradient_is_stepped_in_step() -> None:
    def check() -> None:
        def backward(model: nn.Module) -> None:
            _backward(model)
            notes[model]()

        pair = Pair(backward=backward)
        layers = {model: model.get_submodule("layers.1") for model in pair.models}
        notes = {model: unit(layer).delay_gradient(layer.get_parameter("gain")) for model, layer in layers.items()}
        assert pair.train() == {name for name in pair.all_names() if not name.startswith("layers.1.")}

    run_ranks(check, 2)


def test_a_schedule_by_hand_is_stepped_in_step() -> None:
    def check() -> None:
        def backward(model: nn.Module) -> None:
            assert isinstance(model, Net)
            root = unit(model)
            root.unshard()
            x: Any = rows_of_this_rank(X)
            for layer in (model.stem, model.head):
                x = nn.functional.linear(x, layer.weight, layer.bias)
            x.square().mean().backward()
            root.reduce_gradients()
            root.wait_for_gradients()

        pair = Pair(backward=backward)
        assert pair.train() == set()

    run_ranks(check, 2)


def test_pipeline_schedules_divide_gradients_before_they_are_stepped() -> None:
    """torch's schedules reduce when all backwards are over, and then divide by the number of microbatches."""

    def check() -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "data"))
        place = mesh["pipeline"].get_local_rank()
        stages, optimizers = [], []
        for _ in range(2):
            stages.append(_sharded(_stages(2)[place], mesh["data"], None))
            optimizers.append(_adamw(stages[-1]))
        handle = step_in_backward(optimizers[1])
        for step in range(2):
            for stage, optimizer in zip(stages, optimizers, strict=True):
                group = mesh["pipeline"].get_group()
                schedule = ScheduleGPipe(
                    PipelineStage(stage, place, 2, torch.device("cpu"), group=group), 4, loss_fn=_loss
                )
                schedule.step(*([_rows(step)] if place == 0 else []), target=_rows(step + 1))
                assert not handle.stepped(stage.parameters())
                optimizer.step()
                optimizer.zero_grad()
        for expected, got in zip(*(stage.parameters() for stage in stages), strict=True):
            assert torch.equal(_local(got), _local(expected))

    run_ranks(check, 2)


class _Late(Residual):
    """Its gain's gradient is made in two parts, one of them when all inputs' gradients are made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        _LATE.append(self.gain)
        return out


_LATE: list[torch.Tensor] = []


class _LateNet(Net):
    def make_layer(self, dim: int) -> nn.Module:
        return _Late(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _LATE.clear()
        x = x.clone().requires_grad_()
        out = super().forward(x)
        gain = _LATE[-1]
        x.register_hook(lambda _: setattr(gain, "grad", torch.ones_like(gain)))  # type: ignore[no-untyped-call]
        return out


def test_a_part_of_a_gradient_that_comes_after_the_step_is_an_error() -> None:
    def check() -> None:
        pair = Pair(_LateNet)
        _backward(pair.models[0])
        with pytest.raises(RuntimeError, match=r"another part of the gradients of 'layers\.2'"):
            _backward(pair.models[1])

    run_ranks(check, 2)


# -- what cannot be had ----------------------------------------------------------------------------------------------


def test_a_forward_or_backward_before_the_step_is_an_error_and_the_step_goes_on() -> None:
    def check() -> None:
        pair = Pair()
        pair.backward()
        with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) after the backward .*got another forward"):
            LOSS(pair.models[1])
        with torch.no_grad():
            LOSS(pair.models[1])
        pair.step()
        pair.train()

    run_ranks(check, 2)


def test_a_second_backward_of_the_same_graph_is_an_error() -> None:
    def check() -> None:
        pair = Pair()
        loss = LOSS(pair.models[1])
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="got another backward"):
            loss.backward()
        unit(pair.models[1]).reset_iter_state()
        assert_at_rest(pair.models[1])

    run_ranks(check, 2)


def test_closures_and_gradient_scalers_are_refused() -> None:
    def check() -> None:
        pair = Pair(optimizer=_of("AdamW", fused=True))
        optimizer = pair.optimizers[1]

        def closure() -> float:
            raise AssertionError("must not run")

        with pytest.raises(RuntimeError, match="without a closure"):
            optimizer.step(closure)
        pair.backward()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(RuntimeError, match="gradient scaler"):
            scaler.step(optimizer)
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        pair.step()

    run_ranks(check, 2)


def test_clipping_after_the_weights_moved_is_refused() -> None:
    def check() -> None:
        pair = Pair()
        pair.backward()
        with pytest.raises(RuntimeError, match="clip_grad_norm_ comes too late"):
            clip_grad_norm_(pair.models[1].parameters(), 1.0)
        clip_grad_norm_(pair.models[0].parameters(), 1e9)
        pair.step()
        clip_grad_norm_(pair.models[1].parameters(), 1.0)  # of gradients that nobody will use

    run_ranks(check, 2)


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    def check() -> None:
        pair = Pair()
        for other in (pair.optimizers[1], torch.optim.SGD(list(pair.models[1].parameters())[-1:])):
            with pytest.raises(ValueError, match="that AdamW does"):
                step_in_backward(other)
        pair.handle.remove()
        step_in_backward(torch.optim.SGD(pair.models[1].parameters()))

    run_ranks(check, 1)


# -- exceptions ------------------------------------------------------------------------------------------------------


def test_after_an_exception_in_backward_the_next_step_is_whole() -> None:
    class Boom(Exception):
        pass

    def boom(_: torch.Tensor) -> None:
        raise Boom

    def check() -> None:
        pair = Pair()
        pair.train()
        model = pair.models[1]
        handle = model.get_submodule("layers.0").register_forward_hook(
            lambda _module, _args, out: out.register_hook(boom) and None
        )
        with pytest.raises(Boom):
            _backward(model)
        handle.remove()
        unit(model).reset_iter_state()
        assert not pair.handle.stepped(model.parameters())
        for optimizer in pair.optimizers:
            optimizer.zero_grad()
        # Some units were stepped and some were not, which nobody can take back: go on from the same weights.
        model.load_state_dict(pair.models[0].state_dict())
        pair.optimizers[1].load_state_dict(deepcopy(pair.optimizers[0].state_dict()))
        assert pair.train() == pair.all_names()

    run_ranks(check, 2)


def test_a_step_that_raises_may_be_called_again() -> None:
    def check() -> None:
        pair = Pair(_Odd, _shard_odd)
        scale = pair.models[1].get_parameter("scale")
        pair.backward()
        good = scale.grad
        assert good is not None
        scale.grad = good.to_sparse()
        with pytest.raises(RuntimeError, match="sparse"):
            pair.optimizers[1].step()
        scale.grad = good
        pair.step()

    run_ranks(check, 2)


# -- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_axes", [1, 2])
def test_updates_come_after_gradients_and_before_whatever_follows_backward(
    num_axes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ParameterGroup.install_gradients

    def check() -> None:
        mesh = init_device_mesh("cpu", (2,) * num_axes, mesh_dim_names=("outer", "inner")[-num_axes:])
        model = Net()
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh)
        streams = fake_streams(model)
        installed: list[Work] = []
        updated: list[Work] = []

        class Noting(_Lion):
            def step(self, closure: None = None) -> None:  # type: ignore[override]
                if any(isinstance(p, DTensor) for p in self.param_groups[0]["params"]):  # not as it is tried
                    assert all(work.is_before(streams.current.seen) for work in installed)
                    updated.append(streams.work())
                super().step()

        def install(self: ParameterGroup, reduced: Reduced) -> None:
            installed.append(streams.work())
            real(self, reduced)

        monkeypatch.setattr(ParameterGroup, "install_gradients", install)
        context = state_of(model).context
        optimizer = Noting(model.parameters())
        step_in_backward(optimizer)
        for _ in range(2):
            _backward(model)
            assert len(updated) == len(installed) == 4
            assert {id(work.stream) for work in updated} == {id(context.update_stream)}
            assert all(work.is_before(streams.compute.seen) for work in updated)
            with torch.no_grad():
                LOSS(model)
            assert all(work.is_before(context.all_gather_stream.seen) for work in updated)  # type: ignore[attr-defined]
            optimizer.step()
            assert len(updated) == 4, "nothing was left to step"
            optimizer.zero_grad()
            installed.clear()
            updated.clear()

    run_ranks(check, 2**num_axes)


@pytest.mark.parametrize("num_axes", [1, 2])
def test_freed_gradients_are_used_again_after_their_update(num_axes: int) -> None:
    """Whatever gets their memory comes on a stream that waited: the one that reduces, or all, at the end."""
    freed: list[bool] = []
    alive: list[int] = []

    def check() -> None:
        mesh = init_device_mesh("cpu", (2,) * num_axes, mesh_dim_names=("outer", "inner")[-num_axes:])
        model = Net(num_layers=6)
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh)
        streams = fake_streams(model)
        context = state_of(model).context

        def note(work: Work) -> None:
            reducing = [context.reduce_scatter_stream, context.all_reduce_stream][:num_axes]
            waiting = [streams.compute.seen, *(stream.seen for stream in reducing)]  # type: ignore[attr-defined]
            freed.append(all(work.is_before(seen) for seen in waiting[1:]) or work.is_before(waiting[0]))

        class Noting(_Lion):
            def step(self, closure: None = None) -> None:  # type: ignore[override]
                gradients = [p.grad for p in self.param_groups[0]["params"] if isinstance(p.grad, DTensor)]
                work = streams.work()
                alive.append(len(gradients) and len(freed))
                for gradient in gradients:
                    weakref.finalize(gradient.to_local(), note, work)
                super().step()

        optimizer = Noting(model.parameters())
        step_in_backward(optimizer, free_gradients=True)
        _backward(model)
        assert len(freed) == len(list(model.parameters()))
        assert all(freed)
        assert alive[-1] >= 4 * (6 - 2), "units' gradients go while backward goes on"

    run_ranks(check, 2**num_axes)


def test_a_gather_of_a_unit_that_was_stepped_comes_after_its_update() -> None:
    def check() -> None:
        model = shard(Net())
        streams = fake_streams(model)
        context = state_of(model).context
        seen: list[bool] = []

        class Noting(_Lion):
            def step(self, closure: None = None) -> None:  # type: ignore[override]
                if isinstance(self.param_groups[0]["params"][0], DTensor):
                    work = streams.work()
                    if len(self.param_groups[0]["params"]) == 4 and not seen:
                        last = unit(model.layers[-1])
                        last.unshard(async_op=True)
                        seen.append(work.is_before(context.all_gather_stream.seen))  # type: ignore[attr-defined]
                super().step()

        optimizer = Noting(model.parameters())
        step_in_backward(optimizer)
        _backward(model)
        assert seen == [True]

    run_ranks(check, 2)
