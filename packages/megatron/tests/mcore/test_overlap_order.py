"""Events of an overlapped step: their order by the step's options, and their streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from overlap_runs import (
    DATA,
    NUM_MICROBATCHES,
    NUM_ROWS,
    Case,
    by_driver,
    copied_recomputations,
    microbatches,
    model_of,
    overlapped,
    overlapped_batches,
    recomputing,
    share,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lamella_engine import UnitResidence
from lamella_schedule import Event, Flight, Kind, Lane, Lanes, LayerPlan, Slot, run_order
from lamella_testing import run_ranks
from lamella_testing.megatron_parity import Layout, make_model


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The events of a schedule, each from its beginning on."""
    events: list[Any] = []
    monkeypatch.setattr(Flight, "run", _noting(Flight.run, events))
    return events


def _noting(call: Callable[..., None], events: list[Any]) -> Callable[..., None]:
    def noted(owner: object, event: Any, *more: Any) -> None:
        events.append(event)
        call(owner, event, *more)

    return noted


def test_the_options_of_a_step_change_its_order(ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("acquire", "used", "finished"):
        monkeypatch.setattr(UnitResidence, name, _noting(getattr(UnitResidence, name), ran))

    def on_each_rank() -> None:
        from lamella_megatron.training import forward_backward_overlapped, overlapped_peak_nbytes

        model = model_of(Case(kind="*E*E"))
        dense = LayerPlan(frozenset((Slot.PRE, Slot.EXPERTS)), frozenset())
        plans = [dense, LayerPlan(delayed=frozenset())] * 2
        peaks = []
        options: dict[str, Any]
        for options in ({}, {"early_release": True}, {"num_layers_ahead": 0}):
            ran.clear()
            forward_backward_overlapped(model, microbatches(DATA[0]), share, **options)
            assert tuple(ran) == run_order(NUM_MICROBATCHES, plans, **options), options
            peaks.append(overlapped_peak_nbytes(model, NUM_MICROBATCHES, **options))
        assert peaks[2] < peaks[0]

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize("by_megatron_cores_driver", [False, True])
def test_early_release_is_taken_from_the_configuration(ran: list[Any], by_megatron_cores_driver: bool) -> None:
    def on_one_rank() -> None:
        from lamella_megatron.training import ShardedModel
        from lamella_testing.megatron import ddp_config

        module: Any = make_model("moe", Layout(num_ranks=1))
        module.config.overlap_moe_expert_parallel_comm = True
        module.config.ep_overlap_early_attn_memory_release = True
        model = ShardedModel(module.config, ddp_config(), module)
        if by_megatron_cores_driver:
            by_driver(model, DATA[0], num_rows=NUM_ROWS)
        else:
            overlapped_batches(model, microbatches(DATA[0]))
        backward = ran.index(Event(0, 1, Slot.PRE, Kind.BACKWARD))
        assert backward < ran.index(Event(1, 0, Slot.EXPERTS, Kind.FORWARD))

    run_ranks(on_one_rank, 1)


@pytest.mark.parametrize("shares_storages", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_norm_before_experts_is_recomputed_for_their_backward(ran: list[Any], *, shares_storages: bool) -> None:
    def on_one_rank() -> None:
        model: Any = make_model("*E", Layout(num_ranks=1), **recomputing("layernorm"))
        norm, called = model.decoder.layers[1].pre_mlp_layernorm, Counter[Any]()
        forward = norm.forward
        norm.forward = lambda *arguments: (called.update([(ran[-1].slot, ran[-1].kind)]), forward(*arguments))[1]
        overlapped(model, DATA[0], Case(kind="*E", groups="[*E]"))
        when = [(Slot.PRE, Kind.FORWARD), (Slot.EXPERTS, Kind.BACKWARD)]
        assert called == dict.fromkeys(when, NUM_MICROBATCHES)

    with nullcontext() if shares_storages else copied_recomputations():
        run_ranks(on_one_rank, 1)


def test_communication_saves_no_tensor_of_another_stream_unmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    marked, created, unmarked = set[int](), _CreatedTensors(), list[str]()
    monkeypatch.setattr(Lanes, "mark_read", lambda self, values: marked.update(map(_place, _tensors(values))))
    run = Flight.run

    def checked(flight: Flight, event: Any, around: Any) -> None:
        if event.lane is not Lane.COMMUNICATION or event.kind is not Kind.FORWARD:
            return run(flight, event, around)
        marked.clear()
        created.places.clear()
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with created, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run(flight, event, around)
        known_places = marked | created.places
        unmarked.extend(f"{event}: {tuple(tensor.shape)}" for tensor in saved if _place(tensor) not in known_places)
        return None

    monkeypatch.setattr(Flight, "run", checked)

    def on_one_rank() -> list[str]:
        overlapped(make_model("moe", Layout(num_ranks=1)), DATA[0], Case(kind="moe"))
        assert marked
        return unmarked

    assert run_ranks(on_one_rank, 1) == [[]]


class _CreatedTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The memory of tensors made inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: set[int] = set()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        argument_places = set(map(_place, _tensors((args, kwargs))))
        output = call(*args, **(kwargs or {}))
        self.places.update(place for place in map(_place, _tensors(output)) if place not in argument_places)
        return output


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: object) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
