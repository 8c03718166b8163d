"""In the flat layout norms are of all ranks, and state dicts and checkpoints those of the unsharded model."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engine_models import (
    Net,
    assert_gradients_equal,
    assert_shard_equals,
    assert_trains_alike,
    assert_weights_equal,
    mean_square,
    mesh_of,
    sgd,
    shard,
    twins,
    whole,
)
from flat_models import LOSS, NEEDS_FLAT_LAYOUT, X, flat, matrices_only, weight_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lamella_engine import (
    HFSDP,
    HSDP,
    ZERO3,
    RaggedDTensor,
    Rows,
    Whole,
    find_nonfinite,
    parameter_norms,
)
from lamella_testing import run_ranks

pytestmark = NEEDS_FLAT_LAYOUT


# -- gradients' norms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_with_torchs_function_is_the_unsharded_models(norm_type: float, foreach: bool) -> None:
    def check() -> None:
        for keep in (Rows(1), Whole()):
            reference, sharded = twins(Net, flat(keep))
            norms = []
            for model in (reference, sharded):
                LOSS(model).backward()
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type, foreach=foreach))
            torch.testing.assert_close(whole(norms[1]), norms[0])
            assert norms[0] > 0.1
            assert_gradients_equal(reference, sharded)

    run_ranks(check, 3)


def test_clipping_with_torchs_function_takes_both_layouts_at_once() -> None:
    def check() -> None:
        reference, sharded = twins(Net, flat(matrices_only))
        for model in (reference, sharded):
            LOSS(model).backward()
        expected, got = (nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (reference, sharded))
        torch.testing.assert_close(whole(got), expected)
        assert_gradients_equal(reference, sharded)

    run_ranks(check, 3)


@pytest.mark.parametrize("keep", [Rows(1), matrices_only], ids=["flat", "both layouts"])
def test_a_scaler_skips_the_step_on_every_rank_if_one_rows_gradient_is_not_finite(keep: Any) -> None:
    def check() -> None:
        reference, sharded = twins(Net, flat(keep))
        for model in (reference, sharded):
            optimizer = sgd(list(model.parameters()))
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            for is_finite in (True, False, True):
                optimizer.zero_grad()
                scaler.scale(LOSS(model)).backward()  # type: ignore[no-untyped-call]
                weight = model.get_parameter("layers.0.up.weight").grad
                assert weight is not None
                local = weight.to_local() if isinstance(weight, DTensor) else weight
                if not is_finite and len(local) and (model is reference or dist.get_rank() == 2):
                    local[-1, -1] = math.inf
                scaler.step(optimizer)
                scaler.update()
            assert scaler.get_scale() == 4.0
        assert_weights_equal(reference, sharded, rtol=1e-4, atol=1e-6)

    run_ranks(check, 3)


def test_diagnostics_see_all_ranks() -> None:
    def check() -> None:
        reference, sharded = twins(Net, flat(Rows(1)))
        for model in (reference, sharded):
            LOSS(model).backward()
        norms = parameter_norms(sharded)
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            assert norms[name] == pytest.approx(parameter.grad.norm().item(), rel=1e-5)
        local = weight_of(sharded).to_local()
        if len(local):
            local.view(-1)[0] = math.nan
        assert {report.name for report in find_nonfinite(sharded, of="weight")} == {"layers.0.up.weight"}

    run_ranks(check, 3)


# -- state -----------------------------------------------------------------------------------------------------------


def test_state_dicts_are_loaded_copied_saved_and_assigned() -> None:
    def check() -> None:
        reference, source = twins(Net, flat(Rows(1)), seed=1)
        state = source.state_dict()
        assert all(isinstance(value, RaggedDTensor) for value in state.values())
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        for source_state in (state, copy.deepcopy(state), torch.load(file), pickle.loads(pickle.dumps(state))):
            for assign in (False, True):
                _, target = twins(Net, flat(Rows(1)), seed=2)
                target.load_state_dict(copy.deepcopy(source_state), assign=assign)
                assert_weights_equal(reference, target, rtol=0, atol=0)
                assert_trains_alike(copy.deepcopy(reference), target, LOSS, num_steps=1)

    run_ranks(check, 2)


def test_a_state_dict_of_another_layout_is_copied_and_refused_with_assign() -> None:
    def check() -> None:
        applications = [flat(Rows(1)), flat(Whole()), shard]
        for apply_source in applications:
            for apply_target in applications:
                reference, source = twins(Net, apply_source, seed=1)
                _, target = twins(Net, apply_target, seed=2)
                target.load_state_dict(source.state_dict())
                assert_weights_equal(reference, target, rtol=0, atol=0)
                if apply_source is not apply_target:
                    with pytest.raises(TypeError, match="lie as before"):
                        target.load_state_dict(copy.deepcopy(source.state_dict()), assign=True)
        _, target = twins(Net, flat(Rows(1)))
        with pytest.raises(RuntimeError, match="full_tensor"):  # as DTensors refuse it
            target.load_state_dict(Net().state_dict())

    run_ranks(check, 3)


def test_torchs_full_state_dict_is_the_unsharded_models() -> None:
    def check() -> None:
        reference, sharded = twins(Net, flat(Rows(1)))
        full: dict[str, Any] = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
        for name, value in reference.state_dict().items():
            assert torch.equal(full[name], value)

    run_ranks(check, 3)


def test_dtype_and_storage_are_replaced_under_the_same_parameters() -> None:
    def check() -> None:
        reference, sharded = twins(Net, flat(Rows(1)))
        before = list(sharded.parameters())
        for model in (reference, sharded):
            model.double()
        assert all(a is b for a, b in zip(sharded.parameters(), before, strict=True))
        assert all(isinstance(p, RaggedDTensor) and p.dtype is torch.float64 for p in sharded.parameters())
        assert_trains_alike(reference, sharded, mean_square(lambda model: model(X.double())))
        sharded.to_empty(device="cpu")
        sharded.load_state_dict({name: _like(value, reference, name) for name, value in sharded.state_dict().items()})
        assert_weights_equal(reference, sharded, rtol=0, atol=0)

    def _like(ragged: torch.Tensor, reference: nn.Module, name: str) -> torch.Tensor:
        assert isinstance(ragged, RaggedDTensor)
        value = reference.get_parameter(name).detach()
        return distribute_tensor(value, ragged.device_mesh, [Replicate()], src_data_rank=None)

    run_ranks(check, 3)


def test_a_model_built_on_meta_is_initialised_as_one_built_whole() -> None:
    def initialise(model: nn.Module) -> None:
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.normal_(parameter, std=0.2)

    def check() -> None:
        with torch.device("meta"):
            sharded = Net()
        flat(Rows(1))(sharded)
        sharded.to_empty(device="cpu")
        reference = Net()
        for model in (reference, sharded):
            initialise(model)
        assert_weights_equal(reference, sharded, rtol=0, atol=0)
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 3)


def _leave_unsharded(_: nn.Module) -> None:
    """As plain torch has the model."""


def _saved(path: str, apply: Callable[[Any], object]) -> None:
    _, model = twins(Net, apply, seed=4)
    optimizer = sgd(list(model.parameters()))
    LOSS(model).backward()
    optimizer.step()
    moments = {name: optimizer.state[parameter]["momentum_buffer"] for name, parameter in model.named_parameters()}
    dcp.save({"model": model.state_dict(), "moments": moments}, checkpoint_id=path)  # type: ignore[attr-defined]


def _loaded(path: str, apply: Callable[[Any], object]) -> dict[str, torch.Tensor]:
    _, model = twins(Net, apply, seed=6)
    state = {"model": model.state_dict(), "moments": {n: torch.zeros_like(p) for n, p in model.named_parameters()}}
    dcp.load(state, checkpoint_id=path)  # type: ignore[attr-defined]
    return {f"{part}.{name}": value for part, values in state.items() for name, value in values.items()}


def test_dcp_checkpoints_open_in_plain_torch_on_any_number_of_ranks_and_in_any_layout(tmp_path: Path) -> None:
    applications: dict[str, Callable[[Any], object]] = {"rows": flat(Rows(1)), "whole": flat(Whole()), "even": shard}

    def save() -> None:
        for name, apply in applications.items():
            _saved(str(tmp_path / name), apply)

    def load(targets: list[Callable[[Any], object]]) -> None:
        expected = _loaded(str(tmp_path / "even"), _leave_unsharded)
        for source, target in product(applications, targets):
            state = _loaded(str(tmp_path / source), target)
            assert state.keys() == expected.keys()
            for name, value in state.items():
                assert_shard_equals(value, expected[name], f"{name} of {source}", rtol=1e-5, atol=1e-7)

    fewer_targets: list[Callable[[Any], object]] = [_leave_unsharded, applications["rows"]]
    run_ranks(save, 3)
    run_ranks(load, 2, fewer_targets)
    run_ranks(load, 4, list(applications.values()))


def test_dcp_checkpoints_hold_parameters_without_rows(tmp_path: Path) -> None:
    def check() -> None:
        model = Net()
        model.empty = nn.Parameter(torch.ones(0, 4))
        flat(Rows(1))(model)
        dcp.save(model.state_dict(), checkpoint_id=tmp_path)  # type: ignore[attr-defined]
        dcp.load(model.state_dict(), checkpoint_id=tmp_path)  # type: ignore[attr-defined]
        plain = {"empty": torch.zeros(0, 4)}
        dcp.load(plain, checkpoint_id=tmp_path)  # type: ignore[attr-defined]

    run_ranks(check, 2)


def test_dcp_writes_each_row_once_where_shards_have_replicas(tmp_path: Path) -> None:
    def check() -> None:
        mesh = mesh_of((2, 2))
        for placements in ((HSDP, ZERO3), (HFSDP, ZERO3)):
            path = str(tmp_path / repr(len(list(tmp_path.iterdir()))) if dist.get_rank() == 0 else "")
            paths = [path]
            dist.broadcast_object_list(paths)
            _, model = twins(Net, flat(Rows(1), mesh=mesh, placements=placements))
            dcp.save({"model": model.state_dict()}, checkpoint_id=paths[0])  # type: ignore[attr-defined]
            target = Net().state_dict()
            dcp.load({"model": target}, checkpoint_id=paths[0])  # type: ignore[attr-defined]
            for name, parameter in model.named_parameters():
                assert torch.equal(whole(parameter), target[name])

    run_ranks(check, 4)
