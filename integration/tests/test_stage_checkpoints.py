"""Checkpoints of every ZeRO stage and both layouts: each box stored once, and plain torch reads the whole."""

import json
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader  # type: ignore[attr-defined]
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lamella_checkpoint import load, save
from lamella_engine import DDP, HFSDP, HSDP, ZERO1, ZERO2, ZERO3, Rows, ShardingOptions, fully_shard
from lamella_engine.testing import flat_alignment
from lamella_testing import run_ranks


def _mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


STAGES: dict[str, Any] = {
    "DDP": lambda: {"mesh": _mesh(4), "placements": DDP},
    "ZeRO-1": lambda: {"mesh": _mesh(4), "placements": ZERO1},
    "ZeRO-2": lambda: {"mesh": _mesh(4), "placements": ZERO2},
    "ZeRO-3": lambda: {"mesh": _mesh(4), "placements": ZERO3},
    "HSDP": lambda: {"mesh": _mesh(2, 2), "placements": (HSDP, ZERO3)},
    "HFSDP": lambda: {"mesh": _mesh(2, 2), "placements": (HFSDP, ZERO3)},
}
LAYOUTS = {"even": None, "flat": Rows(1)}
WAYS = [(stage, layout) for stage in STAGES for layout in LAYOUTS]


@pytest.fixture(autouse=True)
def _small_parameters_are_cut() -> Iterator[None]:
    """At the engine's own alignment no parameter of the tests' models would be cut in the flat layout."""
    with flat_alignment(1):
        yield


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 13), nn.Tanh(), nn.Linear(13, 1), nn.BatchNorm1d(1))


def _training(stage: str, layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    asked = STAGES[stage]()
    options = ShardingOptions(placements=asked["placements"], keep_together=LAYOUTS[layout])
    model = fully_shard(_model(seed), mesh=asked["mesh"], options=options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.linspace(-1, 1, 36).reshape(12, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _full_value(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    weights = {f"model.{name}": _full_value(tensor) for name, tensor in model.state_dict().items()}
    return weights | {
        f"optimizer.state.{name}.{slot}": _full_value(value)
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state[parameter].items()
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_stage_and_layout_is_stored_once_and_read_by_plain_torch_and_by_another_stage(tmp_path: Path) -> None:
    def train_and_save() -> dict[tuple[str, str], dict[str, torch.Tensor]]:
        states = {}
        for stage, layout in WAYS:
            training = _training(stage, layout, seed=1)
            _step(*training)
            save(tmp_path / f"{stage} {layout}", model=training[0], optimizer=training[1])
            states[stage, layout] = _state(*training)
        return states

    def load_in_the_next() -> list[bool]:
        equal = []
        for source, target in zip(WAYS, [*WAYS[1:], WAYS[0]], strict=True):
            training = _training(*target, seed=2)
            load(tmp_path / " ".join(source), model=training[0], optimizer=training[1])
            expected, got = states[source], _state(*training)
            equal.append(all(torch.equal(got[name], expected[name]) for name in expected))
        return equal

    states = run_ranks(train_and_save, 4)[0]
    assert len(next(iter(states.values()))) == 6 + 3 + 3 * 6
    for way, expected in states.items():
        path = tmp_path / " ".join(way)
        got = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
        dcp.load(got, checkpoint_id=path)  # type: ignore[attr-defined]
        assert all(torch.equal(got[name], expected[name]) for name in expected), way
        _assert_stored_once(path)
    assert all(run_ranks(load_in_the_next, 4)[0])


def _tensor_parallel(shape: tuple[int, ...], placements: Any, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner", "model"))
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4))
    parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["outer", "inner"], options=ShardingOptions(placements=placements))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_tensor_parallel_main_weights_on_two_data_axes_are_stored_once_and_read_on_other_meshes(tmp_path: Path) -> None:
    def train_and_save() -> dict[str, torch.Tensor]:
        training = _tensor_parallel((2, 2, 2), (HFSDP, ZERO3), seed=1)
        weight = training[0].get_parameter("0.weight")
        assert isinstance(weight, DTensor) and 8 * weight.to_local().numel() == weight.numel()
        _step(*training)
        save(tmp_path / "saved", model=training[0], optimizer=training[1])
        return _state(*training)

    def load_on(shape: tuple[int, ...], placements: Any) -> dict[str, torch.Tensor]:
        training = _tensor_parallel(shape, placements, seed=2)
        load(tmp_path / "saved", model=training[0], optimizer=training[1])
        return _state(*training)

    expected = run_ranks(train_and_save, 8)[0]
    _assert_stored_once(tmp_path / "saved")
    for shape, placements in [((2, 1, 2), (HFSDP, ZERO3)), ((1, 2, 1), (HFSDP, ZERO3)), ((2, 1, 1), (HSDP, ZERO3))]:
        state = run_ranks(load_on, prod(shape), shape, placements)[0]
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def _assert_stored_once(path: Path) -> None:
    metadata = FileSystemReader(path).read_metadata()
    for table in metadata.state_dict_metadata.values():
        if isinstance(table, TensorStorageMetadata):
            assert sum(prod(chunk.sizes) for chunk in table.chunks) == prod(table.size)
    placed = {(info.relative_path, info.offset) for info in metadata.storage_data.values()}
    files = json.loads((path / "lamella_checksums.json").read_text())["files"]
    written = {(file, offset) for file, items in files.items() for offset, _, _ in items if file.startswith("__")}
    assert written == placed


def _are_equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


class _Sparse(torch.optim.Optimizer):
    """Lion's moment, None and numbers for some parameters; no state for the remaining parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and parameter.shape[0] > 1:
                state = self.state[parameter]
                state.setdefault("buffer", None)
                state.setdefault("moment", torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad)
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
                state["count"] = state.get("count", 0) + 1
                parameter.sub_(torch.sign(state["moment"]), alpha=0.1)


_OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "sparse": _Sparse,
}


def test_optimizer_state_in_the_flat_layout_is_resharded_again_and_again(tmp_path: Path) -> None:
    def pass_on(previous: int | None, num_ranks: int) -> dict[str, dict[str, Any]]:
        states = {}
        for name, make in _OPTIMIZERS.items():
            model = _model(num_ranks)
            if num_ranks > 1:
                fully_shard(model, options=ShardingOptions(keep_together=Rows(1)))
            optimizer = make(model.parameters())
            if previous is None:
                _step(model, optimizer)
            else:
                load(tmp_path / f"{name} {previous}", model=model, optimizer=optimizer)
            states[name] = {key: _full_value(value) for key, value in model.state_dict().items()} | {
                f"{key}/{slot}": _full_value(value) if isinstance(value, torch.Tensor) else value
                for key, parameter in model.named_parameters()
                for slot, value in optimizer.state.get(parameter, {}).items()
            }
            save(tmp_path / f"{name} {num_ranks}", model=model, optimizer=optimizer)
        return states

    expected = run_ranks(pass_on, 4, None, 4)[0]
    assert expected["sparse"]["0.weight/count"] == 1 and "2.weight/count" not in expected["sparse"]
    for previous, num_ranks in pairwise([4, 2, 1, 3]):
        for states in run_ranks(pass_on, num_ranks, previous, num_ranks):
            for name, state in states.items():
                assert state.keys() == expected[name].keys()
                for key, value in state.items():
                    assert _are_equal(value, expected[name][key]), (name, key)
