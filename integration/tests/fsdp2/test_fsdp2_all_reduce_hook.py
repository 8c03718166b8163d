"""A hook on reduced gradients is shown this rank's shards alone: the hook may take norms or quantise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp2_models import (
    Api,
    Block,
    Stack,
    assert_close,
    assert_equal_models,
    average,
    gradient_of,
    grid,
    inputs,
    local,
    on_ranks,
    shard,
    twins,
)  # fmt: skip
from torch import nn

Shown = dict[nn.Module, list[torch.Tensor]]


def _watch(model: Stack) -> Shown:
    """A copy of the buffer shown to the hook of each unit."""
    shown: Shown = {}
    for module in (*model.blocks, model):
        seen = shown.setdefault(module, [])
        module.set_all_reduce_hook(lambda reduced, seen=seen: seen.append(reduced.clone()))
    return shown


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    owners = [module] if isinstance(module, Block) else [module.get_submodule(name) for name in ("stem", "head")]
    return [parameter for owner in owners for parameter in owner.parameters()]


def _slots(parameters: list[nn.Parameter], gradients: list[torch.Tensor], num_ranks: int) -> torch.Tensor:
    """Shards one after another, each as long as rank 0's: missing rows are zeros."""
    slots = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        rows = -(-parameter.shape[0] // num_ranks)
        missing = gradient.new_zeros(rows - len(gradient), *gradient.shape[1:])
        slots.append(torch.cat([gradient, missing]).flatten())
    return torch.cat(slots)


def _assert_shown_what_is_installed(shown: Shown, num_ranks: int, dtype: torch.dtype = torch.float32) -> None:
    for module, seen in shown.items():
        parameters = _own_parameters(module)
        (reduced,) = seen
        assert reduced.dtype == dtype
        installed = _slots(parameters, [local(gradient_of(parameter)) for parameter in parameters], num_ranks)
        assert torch.equal(reduced, installed.to(dtype))
        numels = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(numels, torch.tensor(reduced.numel()))
        assert len({int(numel) for numel in numels}) == 1


def test_a_hook_is_shown_this_ranks_shards_and_nothing_else(api: Api) -> None:
    def scenario(hidden: int, num_microbatches: int, wide: bool) -> None:
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if wide else {}
        expected, model = twins(lambda: Stack(hidden=hidden))
        shown = _watch(shard(api, model, mp_policy=api.MixedPrecisionPolicy(**dtypes)))
        for i in range(num_microbatches):
            model.set_requires_gradient_sync(i == num_microbatches - 1)
            for network in (expected, model):
                network(inputs(seed=i)).float().square().mean().backward()
        _assert_shown_what_is_installed(shown, 2)
        if not wide:
            average(expected)
            assert_equal_models(expected, model)

    on_ranks(scenario, cases=((8, 1, False), (9, 1, False), (9, 2, False), (9, 1, True), (9, 2, True)))


def test_a_hook_is_shown_a_narrow_reduction_in_its_dtype(api: Api) -> None:
    def scenario() -> None:
        _, model = twins()
        policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        shown = _watch(shard(api, model, mp_policy=policy))
        model(inputs()).float().square().mean().backward()
        _assert_shown_what_is_installed(shown, 2, torch.bfloat16)

    on_ranks(scenario)


@pytest.mark.four_ranks
def test_over_replicas_a_hook_is_shown_the_reduction_of_all_replicas(api: Api) -> None:
    def scenario(hidden: int, num_microbatches: int) -> None:
        expected, model = twins(lambda: Stack(hidden=hidden))
        shown = _watch(shard(api, model, mesh=grid("outer", "inner")))
        for i in range(num_microbatches):
            model.set_requires_all_reduce(i == num_microbatches - 1)
            for network in (expected, model):
                network(inputs(seed=i)).square().mean().backward()
        _assert_shown_what_is_installed(shown, 2)
        average(expected)
        assert_equal_models(expected, model)

    on_ranks(scenario, 4, cases=((8, 1), (9, 1), (9, 2)))


@pytest.mark.four_ranks
def test_in_place_changes_of_a_hook_are_installed(api: Api) -> None:
    """Clipping by the unit's own norm, as FSDP2's users do in the hook."""

    def scenario(options: dict[str, Any]) -> None:
        expected, model = twins()
        mesh = options.get("mesh")
        shard(api, model, **options)
        group = None if mesh is None else mesh.get_group("inner")

        def clip(reduced: torch.Tensor) -> None:
            square = reduced.square().sum()
            dist.all_reduce(square, group=group)
            reduced.div_(square.sqrt())

        for module in (*model.blocks, model):
            module.set_all_reduce_hook(clip)
        for network in (expected, model):
            (100 * network(inputs()).square().mean()).backward()
        average(expected)
        for a, b in zip((*expected.blocks, expected), (*model.blocks, model), strict=True):
            gradients = [gradient_of(parameter) for parameter in _own_parameters(a)]
            norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
            for gradient, parameter in zip(gradients, _own_parameters(b), strict=True):
                assert_close(gradient_of(parameter), gradient / norm)

    on_ranks(lambda: scenario({}))
    on_ranks(lambda: scenario({"mesh": grid("outer", "inner")}), 4)
