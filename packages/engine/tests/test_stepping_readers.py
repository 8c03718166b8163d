"""An optimizer that steps inside backward leaves a unit alone while somebody is yet to read its weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import Net, Residual, local, rows_of_this_rank, unit
from optimizer_pairs import ADAMW, LOSS, SteppedInBackward, X, run_backward
from pipeline_models import rows_of, shard_stage, stage_loss, stages_of
from recomputing_models import KINDS, Around, Inside, Several, of_kind
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

from lamella_engine import step_in_backward
from lamella_testing import run_ranks


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
        pair = SteppedInBackward(make)
        assert pair.train() == pair.all_names()

    run_ranks(check, 2)


@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("make", [Around, Inside, Several])
def test_recomputed_units_are_stepped_inside_too(make: type[Net], reentrant: bool) -> None:
    def check() -> None:
        pair = SteppedInBackward(of_kind(make, reentrant))
        assert pair.train() == pair.all_names()

    run_ranks(check, 2)


@pytest.mark.parametrize("reentrant", KINDS)
def test_a_model_that_is_recomputed_as_a_whole_is_stepped_all_the_same(reentrant: bool) -> None:
    def check() -> None:
        def backward(model: nn.Module) -> None:
            x = rows_of_this_rank(X).requires_grad_()
            checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()

        pair = SteppedInBackward(backward=backward)
        assert pair.train() == (set() if reentrant else pair.all_names())

    run_ranks(check, 2)


def test_forwards_before_their_backwards_are_stepped_after_the_last() -> None:
    stepped: list[int] = []

    def check() -> None:
        def backward(model: nn.Module) -> None:
            losses = [LOSS(model), LOSS(model) * 2]
            for loss in losses:
                loss.backward()
                if model is pair.model:
                    stepped.append(len(pair.handle.stepped(pair.model.parameters())))

        pair = SteppedInBackward()
        pair._backward = backward
        pair.train(2)
        assert stepped == [0, len(pair.all_names())] * 2

    run_ranks(check, 2)


def test_a_forward_without_a_backward_only_defers_the_next_step() -> None:
    def check() -> None:
        pair = SteppedInBackward()
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
        pair = SteppedInBackward()
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
            run_backward(model)
            notes[model]()

        pair = SteppedInBackward(backward=backward)
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

        pair = SteppedInBackward(backward=backward)
        assert pair.train() == set()

    run_ranks(check, 2)


def test_pipeline_schedules_divide_gradients_before_they_are_stepped() -> None:
    """torch's schedules reduce when all backwards are over, and then divide by the number of microbatches."""

    def check() -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "data"))
        place = mesh["pipeline"].get_local_rank()
        stages, optimizers = [], []
        for _ in range(2):
            stages.append(shard_stage(stages_of(2)[place], mesh["data"], None))
            optimizers.append(ADAMW(stages[-1]))
        handle = step_in_backward(optimizers[1])
        for step in range(2):
            for stage, optimizer in zip(stages, optimizers, strict=True):
                group = mesh["pipeline"].get_group()
                schedule = ScheduleGPipe(
                    PipelineStage(stage, place, 2, torch.device("cpu"), group=group), 4, loss_fn=stage_loss
                )
                schedule.step(*([rows_of(step)] if place == 0 else []), target=rows_of(step + 1))
                assert not handle.stepped(stage.parameters())
                optimizer.step()
                optimizer.zero_grad()
        for expected, got in zip(*(stage.parameters() for stage in stages), strict=True):
            assert torch.equal(local(got), local(expected))

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
        pair = SteppedInBackward(_LateNet)
        run_backward(pair.models[0])
        with pytest.raises(RuntimeError, match=r"another part of the gradients of 'layers\.2'"):
            run_backward(pair.model)

    run_ranks(check, 2)
