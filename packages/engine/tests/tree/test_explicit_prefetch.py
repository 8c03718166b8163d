"""Lists of units to gather ahead replace the learned order for units with a list."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from engine_models import Net, assert_trains_alike, fsdp, inputs, mean_square, shard, twins
from torch import nn
from torch.utils.checkpoint import checkpoint

from lamella_engine import fully_shard
from lamella_engine.testing import assert_at_rest, record
from lamella_testing import run_ranks

X = inputs()
LOSS = mean_square(lambda model: model(X))


def _ahead_in_forward(model: Any, depth: int = 2) -> None:
    chain = [model, *model.layers]
    for i, module in enumerate(chain):
        fsdp(module).set_modules_to_forward_prefetch(chain[i + 1 : i + 1 + depth])


def _ahead_in_backward(model: Any, depth: int = 2) -> None:
    chain = [model, *reversed(model.layers)]
    for i, module in enumerate(chain):
        fsdp(module).set_modules_to_backward_prefetch(chain[i + 1 : i + 1 + depth])


def test_a_forward_prefetch_list_gathers_all_its_units_ahead_from_the_first_step() -> None:
    def check() -> None:
        reference, model = twins()
        _ahead_in_forward(model)
        log = record(model)
        for _ in range(2):
            log.clear()
            with torch.no_grad():
                torch.testing.assert_close(model(X), reference(X))
            assert log.order == [
                *("gather root", "gather layers.0", "gather layers.1", "compute root"),
                *("gather layers.2", "compute layers.0"),
                *("compute layers.1", "compute layers.2"),
            ]
        assert_trains_alike(reference, model, LOSS)

    run_ranks(check, 2)


def test_a_backward_prefetch_list_gathers_all_its_units_ahead() -> None:
    def check() -> None:
        reference, model = twins()
        _ahead_in_backward(model)
        loss = LOSS(model)
        log = record(model)
        loss.backward()
        assert log.order == [
            *("gather layers.2", "gather layers.1"),  # at the root's beginning, whose own parameters are still there
            *("gather layers.0", "reduce layers.2"),
            *("reduce layers.1", "reduce layers.0", "reduce root"),
        ]
        model.zero_grad()
        assert_trains_alike(reference, model, LOSS)

    run_ranks(check, 2)


def test_an_empty_list_restores_the_learned_order() -> None:
    def check() -> None:
        model = shard(Net())
        log = record(model)
        LOSS(model).backward()
        log.clear()
        LOSS(model).backward()
        learned = log.order
        _ahead_in_forward(model)
        _ahead_in_backward(model)
        LOSS(model).backward()
        for module in (model, *model.layers):
            fsdp(module).set_modules_to_forward_prefetch([])
            fsdp(module).set_modules_to_backward_prefetch([])
        LOSS(model).backward()
        log.clear()
        LOSS(model).backward()
        assert log.order == learned

    run_ranks(check, 2)


def test_a_unit_that_was_gathered_for_nothing_is_freed() -> None:
    def check() -> None:
        reference, model = twins()
        first, last = (fsdp(model.get_submodule(f"layers.{i}")) for i in (0, 2))
        last.set_modules_to_forward_prefetch([first])
        first.set_modules_to_backward_prefetch([last])
        assert_trains_alike(reference, model, LOSS)

    run_ranks(check, 2)


def test_a_unit_of_another_model_may_be_gathered_ahead() -> None:
    def check() -> None:
        first, second = shard(Net()), shard(Net())
        fsdp(first).set_modules_to_forward_prefetch([fsdp(second)])
        log = record(second)
        first(X)
        assert log.order == ["gather root"]
        second(X)
        assert log.order.count("gather root") == 1

    run_ranks(check, 2)


def test_lists_keep_no_deleted_model_alive() -> None:
    def check() -> None:
        model = shard(Net())
        _ahead_in_forward(model)
        _ahead_in_backward(model)
        ref = weakref.ref(model.layers[1])
        gc.disable()
        del model
        assert ref() is None

    run_ranks(check, 1)


class _Embedded(Net):
    """Starts with an embedding, whose backward does not look at its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Embedding(11, 7)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.arange(12).view(3, 4) % 11)


def _embedding_alone(model: Any) -> None:
    fully_shard(model.stem)
    shard(model)
    fsdp(model.stem).set_unshard_in_backward(False)


def test_a_unit_that_backward_does_not_need_is_not_gathered_for_it() -> None:
    def check() -> None:
        reference, model = twins(_Embedded, _embedding_alone)
        assert_trains_alike(reference, model, LOSS)
        log = record(model)
        assert_trains_alike(reference, model, LOSS)
        assert log.units_of("gather").count("stem") == 2, "two steps, two forwards"
        assert log.units_of("reduce").count("stem") == 2

    run_ranks(check, 2)


def test_a_recomputed_forward_gathers_units_that_backward_does_not_need() -> None:
    class RecomputedEmbedding(_Embedded):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ids = torch.arange(12).view(3, 4) % 11
            x = checkpoint(lambda: self.layers[0](self.stem(ids)), use_reentrant=False)
            head: torch.Tensor = self.head(x)
            return head

    def check() -> None:
        reference, model = twins(RecomputedEmbedding, _embedding_alone)
        assert_trains_alike(reference, model, LOSS)
        assert_at_rest(model)

    run_ranks(check, 2)
