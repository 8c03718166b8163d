"""Communication and live memory of a ZeRO-3 step, counted: calls, bytes, unsharded units, gradients."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo  # `full_tensor` and optimizers import torch._dynamo: imported once here, instead of once a rank.
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lamella_engine import MixedPrecisionPolicy, fully_shard
from lamella_integration.collectives import CollectiveCounter
from lamella_integration.llama import SIZES, Llama
from lamella_integration.reference import ReferenceModel
from lamella_integration.tasks import TASKS, Task, shard
from lamella_testing import run_ranks

MANY_RANKS = pytest.mark.parametrize("num_ranks", [2, 4])


def _sharded(task: Task, reduce_dtype: torch.dtype = torch.bfloat16) -> ReferenceModel:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    return shard(task.model(), fully_shard, mp_policy=policy)


def _pass(task: Task, model: nn.Module) -> None:
    inputs, labels = task.batch(0)
    task.loss(model(inputs).float(), labels).backward()  # type: ignore[no-untyped-call]
    model.zero_grad()


def _padded_numel(parameters: Iterable[nn.Parameter], num_ranks: int) -> int:
    """Elements of the unsharded side: torch's chunks, each padded to the largest."""
    return sum(num_ranks * math.ceil(p.shape[0] / num_ranks) * math.prod(p.shape[1:]) for p in parameters)


@MANY_RANKS
@pytest.mark.parametrize("name", ["llama", "odd"])
@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32], ids=["reduce_bf16", "reduce_fp32"])
def test_a_step_gathers_each_unit_twice_the_root_once_and_reduces_each_once(
    name: str, num_ranks: int, reduce_dtype: torch.dtype
) -> None:
    task = TASKS[name]
    # bf16 gradients with sums in fp32 are exchanged in bf16: in as many calls and bytes.
    reduction = "all_to_all" if reduce_dtype is torch.float32 else "reduce_scatter"

    def counted() -> list[tuple[dict[str, int], int, int]]:
        model = _sharded(task, reduce_dtype)
        steps = []
        for _ in range(3):  # The first step records the order, later steps replay the order: no step may cost more.
            with CollectiveCounter() as counter:
                _pass(task, model)
            steps.append((counter.counts(), counter.nbytes("all_gather"), counter.nbytes(reduction)))
        return steps

    reference = task.model()
    units = _padded_numel((p for unit in reference.units() for p in unit.parameters()), num_ranks)
    everything = _padded_numel(reference.parameters(), num_ranks)
    num_units = len(reference.units())
    expected = (
        {"all_gather": 2 * num_units + 1, reduction: num_units + 1},
        torch.bfloat16.itemsize * (units + everything),
        torch.bfloat16.itemsize * everything,
    )
    for steps in run_ranks(counted, num_ranks):
        assert steps == [expected] * 3


def test_a_single_rank_issues_no_collectives() -> None:
    def counts() -> dict[str, int]:
        model = _sharded(TASKS["llama"])
        with CollectiveCounter() as counter:
            _pass(TASKS["llama"], model)
        return counter.counts()

    assert run_ranks(counts, 1) == [{}]


class _Lifetimes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operation how many units have unsharded parameters, and how many have gradients."""

    def __init__(self, units: list[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: list[list[torch.UntypedStorage]] = [[] for _ in units]
        self.gradients: list[list[StorageWeakRef]] = [[] for _ in units]
        self.peak_unsharded = self.peak_gradients = 0
        for index, unit in enumerate(units):
            # The hook runs after the unit's hook: the unit's parameters are plain tensors by then.
            unit.register_forward_pre_hook(lambda module, _, index=index: self._observe(module, index))

    def _observe(self, unit: nn.Module, index: int) -> None:
        if self.storages[index]:
            return
        parameters = [parameter for parameter in unit.parameters() if not isinstance(parameter, DTensor)]
        self.storages[index] = [parameter.untyped_storage() for parameter in parameters]
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda p: self.gradients[index].append(StorageWeakRef(p.grad.untyped_storage()))  # type: ignore[no-untyped-call]
            )

    def num_unsharded(self) -> int:
        return sum(any(storage.nbytes() > 0 for storage in storages) for storages in self.storages)

    def num_with_gradients(self) -> int:
        return sum(any(not gradient.expired() for gradient in gradients) for gradients in self.gradients)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.peak_unsharded = max(self.peak_unsharded, self.num_unsharded())
        self.peak_gradients = max(self.peak_gradients, self.num_with_gradients())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_blocks", [4, 8])
def test_two_units_at_most_are_unsharded_and_two_hold_gradients_at_any_depth(num_blocks: int) -> None:
    task = replace(TASKS["llama"], build=lambda: Llama(replace(SIZES["tiny"], num_layers=num_blocks)))

    def peaks() -> tuple[int, int, int, int]:
        model = _sharded(task)
        blocks, root = _Lifetimes(model.units()), _Lifetimes([model])
        _pass(task, model)  # Learns the order.
        with blocks, root:
            _pass(task, model)
        at_rest = blocks.num_unsharded() + root.num_unsharded()
        return blocks.peak_unsharded, blocks.peak_gradients, root.peak_unsharded, at_rest

    for unsharded, with_gradients, unsharded_roots, unsharded_at_rest in run_ranks(peaks, 2):
        assert unsharded == 2
        assert with_gradients == 2
        assert unsharded_roots == 1
        assert unsharded_at_rest == 0
