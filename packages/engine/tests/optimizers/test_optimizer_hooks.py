"""The engine's part in every optimizer's step: refusals, waits, and replaceable entries."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine_models import (
    Net,
    assert_weights_equal,
    inputs,
    mean_square,
    rows_of_this_rank,
    shard,
    twins,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

import lamella_engine
from lamella_engine import _optimizer_hooks as hooks
from lamella_engine import fully_shard
from lamella_engine.extending import Listener, Tree, local_of, note_step, replace_step_hook
from lamella_engine.testing import tree_of
from lamella_testing import load_compiler, run_ranks

LOSS = mean_square(lambda model: model(rows_of_this_rank(inputs())))
# As the engine has them: another package's tests in the same process may have put theirs in place.
OWN = {
    "originals": hooks.refuse_originals,
    "kernels": hooks.refuse_kernels_on_dtensors,
    "gradients": hooks.finish_reductions,
    "view": hooks.step_on_dtensors,
}


@pytest.fixture(autouse=True)
def engine_alone() -> Iterator[None]:
    hooks.register_step_hooks()
    with patch.dict(hooks.BEFORE_STEP, OWN), patch.dict(hooks.AFTER_STEP, {"staleness": note_step}):
        yield


def test_one_hook_of_the_engine_is_called_before_a_step_and_one_after() -> None:
    for registered, ours in (
        (torch_optimizer._global_optimizer_pre_hooks, hooks.before_step),
        (torch_optimizer._global_optimizer_post_hooks, hooks.after_step),
    ):
        engine_hooks = [hook for hook in registered.values() if hook.__module__.startswith("lamella_engine.")]
        assert engine_hooks == [ours]


def _num_hooks() -> tuple[int, int]:
    return len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks)


def test_an_import_registers_no_hook_and_the_first_fully_shard_registers_both() -> None:
    def check() -> None:
        before = _num_hooks()
        for name in [name for name in sys.modules if name.partition(".")[0] == "lamella_engine"]:
            del sys.modules[name]  # of this rank: the import below runs every module again
        engine = importlib.import_module("lamella_engine")
        importlib.import_module("lamella_engine.extending")
        assert engine is not lamella_engine
        assert _num_hooks() == before
        for _ in range(2):
            engine.fully_shard(nn.Linear(2, 2))
            assert _num_hooks() == (before[0] + 1, before[1] + 1)

    run_ranks(check, 1)


def test_a_function_that_replaces_another_is_called_in_its_place() -> None:
    called: list[str] = []

    def recorder(name: str) -> Any:
        return lambda *_: called.append(name)

    written = [*hooks.BEFORE_STEP]
    replaced = ["view", "gradients", "originals", "kernels"]
    for name in replaced:
        replace_step_hook(name, recorder(name))
    replace_step_hook("staleness", recorder("staleness"))
    assert [*hooks.BEFORE_STEP] == written

    torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
    assert called == [*sorted(replaced, key=written.index), "staleness"]


def test_an_optimizer_step_gets_the_arguments_that_step_hooks_returned() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer, other = torch.optim.SGD([parameter], lr=1.0), torch.optim.SGD([parameter], lr=0.25)
    replace_step_hook("kernels", lambda optimizer, args, kwargs: ([other], kwargs))
    seen = []
    replace_step_hook("view", lambda optimizer, args, kwargs: seen.append(args))
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert seen == [[other]]
    assert parameter.item() == 0.75


@pytest.mark.parametrize("name", ["views", "finalization"])
def test_a_name_that_is_unknown_or_the_engines_own_is_not_replaced(name: str) -> None:
    before = dict(hooks.BEFORE_STEP)
    with pytest.raises(ValueError, match=f"'originals', 'kernels', .*got '{name}'"):
        replace_step_hook(name, hooks.step_on_dtensors)
    assert before == hooks.BEFORE_STEP


def _built_before(kind: Callable[..., Optimizer] = torch.optim.AdamW) -> tuple[Net, Optimizer]:
    model = Net()
    optimizer = kind(model.parameters())
    return shard(model), optimizer


def test_an_optimizer_from_before_sharding_is_refused_with_both_ways_out() -> None:
    def check() -> None:
        model, optimizer = _built_before()
        LOSS(model).backward()
        message = (
            r"Expected AdamW to hold sharded parameters, got 16 from before fully_shard, 'stem.weight' among them\. "
            r"Build the optimizer after fully_shard; or install lamella-optim and call lamella_optim\.install\(\)"
        )
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        torch.optim.AdamW(model.parameters()).step()

    run_ranks(check, 2)


def test_an_optimizer_of_unsharded_parameters_is_refused_at_its_first_step() -> None:
    def check() -> None:
        model = shard(Net())
        model(inputs())  # the outermost unit stays, as backward is likely next
        optimizer = torch.optim.SGD(model.parameters())
        model(inputs()).sum().backward()
        with pytest.raises(RuntimeError, match=r"got 4 that were listed while their unit was unsharded, 'stem.weight'"):
            optimizer.step()

    run_ranks(check, 2)


def test_an_optimizer_of_a_model_that_is_gone_is_let_be() -> None:
    def check() -> None:
        model, optimizer = _built_before()
        del model
        optimizer.step()

    run_ranks(check, 1)


@pytest.mark.parametrize("library", ["transformer_engine.pytorch.optimizers", "apex.optimizers"])
def test_kernels_that_know_no_dtensors_are_refused(library: str) -> None:
    kind = type("FusedAdam", (torch.optim.AdamW,), {"__module__": library})

    def check() -> None:
        model = shard(Net())
        optimizer = kind(model.parameters())
        LOSS(model).backward()
        with pytest.raises(TypeError, match=r"got DTensors.*lamella_optim\.step_on_local_shards\(optimizer\) once"):
            optimizer.step()
        mesh = init_device_mesh("cpu", (2,))
        kind([nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))]).step()  # another engine's affair

    run_ranks(check, 2)
    kind([nn.Parameter(torch.ones(1))]).step()  # of plain tensors they may be


class _Leaves(Listener):
    """Leaves a backward's last reductions to the step."""

    def gradients_final(self, tree: Tree) -> None:
        tree.step_end.defers_wait = True


def test_a_step_waits_for_reductions_that_a_listener_has_left() -> None:
    def check() -> None:
        model = shard(Net())
        tree, leaves = tree_of(model), _Leaves()
        tree.listen(leaves)
        LOSS(model).backward()
        assert tree.step_end.is_deferred
        torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()  # of any optimizer
        assert not tree.step_end.is_deferred

    run_ranks(check, 2)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_step_on_dtensors_trains_as_unsharded(name: str) -> None:
    def check() -> None:
        reference, sharded = twins()
        optimizers = [getattr(torch.optim, name)(model.parameters(), lr=1e-2) for model in (reference, sharded)]
        for _ in range(3):
            for model, optimizer in zip((reference, sharded), optimizers, strict=True):
                mean_square(lambda model: model(inputs()))(model).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_weights_equal(reference, sharded)

    run_ranks(check, 2)


def test_steps_that_would_update_copies_of_complex_shards_are_refused() -> None:
    def check() -> None:
        model = nn.Linear(4, 3, dtype=torch.complex64)
        weight, bias = fully_shard(model).parameters()
        before = local_of(bias).clone()
        weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        assert torch.equal(local_of(bias), before - 0.5)
        before = local_of(weight).clone()
        torch.optim.Adam([weight], lr=0.5).step()  # rows that are cut unevenly, of whole last dims
        torch.testing.assert_close(local_of(weight), before - 0.5)
        before = local_of(bias).clone()
        with pytest.raises(NotImplementedError, match=r"^Expected complex parameters .* for Adam, got shape \(3,\)"):
            torch.optim.Adam(model.parameters(), lr=0.5).step()
        assert torch.equal(local_of(bias), before)
        step: Any = torch.optim.Adam.step
        step.__wrapped__(torch.optim.Adam([bias], lr=0.5, foreach=True))
        assert torch.equal(local_of(bias), before), "torch's step updates the shard: refuse no longer"

    run_ranks(check, 2)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch's own, of what Dynamo imports
def test_a_step_may_be_compiled() -> None:
    def check() -> None:
        reference, sharded = twins(apply=fully_shard)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.2)
        step = torch.compile(optimizer.step, backend="eager")
        for _ in range(2):
            for model in (reference, sharded):
                model.zero_grad()
                mean_square(lambda model: model(inputs()))(model).backward()
            step()
            with torch.no_grad():
                for parameter in reference.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=0.2)
        assert_weights_equal(reference, sharded)

    load_compiler()
    run_ranks(check, 1)
