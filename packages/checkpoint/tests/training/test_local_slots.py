"""Optimizer state kept as plain tensors of each rank's elements is placed by the parameter."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lamella_checkpoint import AsyncSaver, CheckpointFailed, load, save
from lamella_checkpoint._formats.dcp_read import StoredCheckpoint
from lamella_testing import run_ranks
from lamella_testing.local_slots import OnShards, assert_holds_what_one_rank_has, make, numbered, over_all, trained

MakeSharded = Callable[[torch.Tensor], torch.Tensor]


def over_any(values: torch.Tensor) -> torch.Tensor:
    """Also for a single rank, as in `fully_shard`."""
    return distribute_tensor(values, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def over_two_axes(values: torch.Tensor) -> torch.Tensor:
    """Tensor parallelism cuts first, as in Megatron-FSDP's meshes, with two replicas."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replica", "dp", "tp"))
    mesh._shard_order = [0, 2, 1]  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    _, dp, tp = coordinate
    part = values.tensor_split(_bounds(len(values), 2))[tp]
    mine = part.tensor_split(_bounds(len(part), 2))[dp]
    placements = [Replicate(), Shard(0), Shard(0)]
    shape, stride = values.shape, values.stride()
    return DTensor.from_local(mine.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)


def _bounds(size: int, num: int) -> list[int]:
    share = -(-size // num)
    return [min(share * index, size) for index in range(1, num)]


def uneven(values: torch.Tensor) -> nn.Parameter:
    """As Megatron's: cut beside the placements, with functions on the local tensor for the place."""
    num, rank = dist.get_world_size(), dist.get_rank()
    bounds = [0, *(min(1 + index * 3, len(values)) for index in range(num - 1)), len(values)]
    start, stop = bounds[rank], bounds[rank + 1]
    chunk = ChunkStorageMetadata(
        torch.Size((start, *[0] * (values.ndim - 1))), torch.Size((stop - start, *values.shape[1:]))
    )

    def create_write_items(fqn: str, _: object) -> list[WriteItem]:
        data = TensorWriteData(chunk, TensorProperties(dtype=values.dtype), values.shape)
        item = WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
        return [item] if stop > start else []

    mesh = init_device_mesh("cpu", (num,))
    shape, stride = values.shape, values.stride()
    mine = values[start:stop].clone()
    parameter = nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride))
    parameter._local_tensor.__create_write_items__ = create_write_items  # type: ignore[attr-defined]
    parameter._local_tensor.__create_chunk_list__ = lambda: [chunk]  # type: ignore[attr-defined]
    return parameter


CASES = [(over_all, 4, False), (over_all, 3, True), (over_any, 1, False), (over_two_axes, 8, True), (uneven, 3, False)]
FURTHER_CASES = [(make_sharded, num_ranks, not flat) for make_sharded, num_ranks, flat in CASES]


@pytest.mark.parametrize(
    ("make_sharded", "num_ranks", "flat"),
    [*CASES, *(pytest.param(*further, marks=pytest.mark.slow) for further in FURTHER_CASES)],
)
def test_training_on_shards_resumes_on_other_ranks(
    tmp_path: Path, make_sharded: MakeSharded, num_ranks: int, flat: bool
) -> None:
    def train_and_save() -> None:
        model, optimizer = trained(make_sharded, 2, flat=flat)
        save(tmp_path / "two", model=model, optimizer=optimizer)

    def resume(is_stepped: bool) -> None:
        model, optimizer = trained(over_all, int(is_stepped), flat=flat and is_stepped)
        slots = [state.get("square") for state in optimizer.state.values()]
        load(tmp_path / "two", model=model, optimizer=optimizer)
        assert all(value is state["square"] for value, state in zip(slots, optimizer.state.values(), strict=False))
        assert not any(isinstance(value, DTensor) for state in optimizer.state.values() for value in state.values())
        optimizer.step()
        save(tmp_path / f"three{is_stepped}", model=model, optimizer=optimizer)

    run_ranks(train_and_save, num_ranks)
    assert_holds_what_one_rank_has(partial(load, tmp_path / "two"), 2)
    for is_stepped in [False, True]:
        run_ranks(resume, 5, is_stepped)
        assert_holds_what_one_rank_has(partial(load, tmp_path / f"three{is_stepped}"), 3)


def test_a_background_save_places_plain_optimizer_slots_by_their_parameters(tmp_path: Path) -> None:
    def train_and_save() -> None:
        model, optimizer = trained(over_all, 2)
        with AsyncSaver() as saver:
            saver.save(tmp_path / "two", model=model, optimizer=optimizer)

    run_ranks(train_and_save, 3)
    assert_holds_what_one_rank_has(partial(load, tmp_path / "two"), 2)


def tensor_parallel_part(param: DTensor) -> DTensor:
    """A slot unaware of tensor parallelism: the shape is a tensor-parallel rank's part."""
    mesh, part = param.device_mesh, (param.shape[0] // 2, *param.shape[1:])
    stride = numbered(part).stride()
    values = torch.zeros_like(param._local_tensor)
    return DTensor.from_local(values, mesh["dp"], [Shard(0)], run_check=False, shape=torch.Size(part), stride=stride)


def test_a_tensor_parallel_ranks_part_is_placed_by_its_parameter(tmp_path: Path) -> None:
    """By the slot's coordinates all tensor-parallel ranks would write one box, unseen with equal values."""

    def make_one() -> tuple[nn.ParameterDict, torch.optim.SGD]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh._shard_order = [1, 0]  # type: ignore[attr-defined]
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        dp, tp = coordinate
        mine = numbered((8, 2)).chunk(2)[tp].chunk(2)[dp].clone()
        model = nn.ParameterDict({"a": DTensor.from_local(mine, mesh, [Shard(0), Shard(0)], run_check=False)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer.state[model["a"]] = {slot: tensor_parallel_part(model["a"]) for slot in ("moment", "zero")}
        return model, optimizer

    def save_and_load() -> tuple[bool, torch.Size]:
        model, optimizer = make_one()
        with torch.no_grad():
            optimizer.state[model["a"]]["moment"]._local_tensor.copy_(model["a"]._local_tensor + 100)
        save(tmp_path / "a", model=model, optimizer=optimizer)
        model, optimizer = make_one()
        load(tmp_path / "a", model=model, optimizer=optimizer)
        state = optimizer.state[model["a"]]
        return torch.equal(state["moment"]._local_tensor, model["a"]._local_tensor + 100), state["moment"].shape

    assert run_ranks(save_and_load, 4) == [(True, torch.Size((4, 2)))] * 4
    stored = StoredCheckpoint(tmp_path / "a").tensors
    assert {stored[f"optimizer.state.a.{slot}"].shape for slot in ("moment", "zero")} == {(8, 2)}
    fresh = nn.ParameterDict({"a": torch.zeros(8, 2)})
    optimizer = torch.optim.SGD(fresh.parameters())
    load(tmp_path / "a", model=fresh, optimizer=optimizer)
    assert torch.equal(optimizer.state[fresh["a"]]["moment"], numbered((8, 2)) + 100)


@pytest.mark.parametrize("num_elements", [4, 5, 12, 24])
@pytest.mark.parametrize("step", ["save", "load"])
def test_a_slot_of_another_size_is_refused_by_name(tmp_path: Path, num_elements: int, step: str) -> None:
    def run() -> str:
        model, optimizer = make(over_all)
        if step == "load":
            save(tmp_path / "a", model=model, optimizer=trained_like(model))
        optimizer.state[model["hidden"]]["momentum"] = torch.zeros(num_elements)
        with pytest.raises((ValueError, CheckpointFailed)) as info:
            (save if step == "save" else load)(tmp_path / "a", model=model, optimizer=optimizer)
        return str(info.value)

    messages = run_ranks(run, 2)
    size_messages = [text for text in messages if "Expected 'optimizer.state.hidden.momentum' to have the" in text]
    assert size_messages and all(f"got {num_elements} of shape" in text for text in size_messages)
    if step == "save":
        assert list(tmp_path.iterdir()) == []


def trained_like(model: nn.Module) -> OnShards:
    optimizer = OnShards(model.parameters())
    optimizer.step()
    return optimizer


def test_a_slot_that_only_some_ranks_could_hold_is_refused(tmp_path: Path) -> None:
    """Three elements are the second rank's part, and impossible for the first rank."""

    def save_one() -> type[BaseException]:
        model, optimizer = make(over_all)
        optimizer.state[model["hidden"]]["momentum"] = torch.zeros(9)
        with pytest.raises((ValueError, CheckpointFailed)) as info:
            save(tmp_path / "a", model=model, optimizer=optimizer)
        return type(info.value)

    assert run_ranks(save_one, 2) == [ValueError, CheckpointFailed]
