"""Every rank computes its share of a save alone: each box once, divided over its holders, without communication."""

import json
import pickle
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader  # type: ignore[attr-defined]
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from lamella_checkpoint import AsyncSaver, CheckpointFailed, load, save
from lamella_checkpoint._state.contents import Ranks
from lamella_checkpoint._state.shares import differing
from lamella_checkpoint._training.save import SavePart
from lamella_layout import RaggedShard
from lamella_testing import run_ranks
from lamella_testing.tiny import Kit


class Bag(nn.Module):
    """A model of given parameters."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(float(prod(shape))).reshape(shape)


def loaded(path: Path, name: str, *shape: int) -> torch.Tensor:
    bag = Bag(**{name: torch.full(shape, -1.0)})
    load(path, model=bag, strict=False)
    return bag.get_parameter(name).detach()


def bytes_by_rank(path: Path) -> dict[int, int]:
    files = json.loads((path / "lamella_checksums.json").read_text())["files"]
    by_rank: dict[int, int] = {}
    for file, items in files.items():
        if file.startswith("__"):
            rank = int(file.strip("_").split("_")[0])
            by_rank[rank] = by_rank.get(rank, 0) + sum(length for _, length, _ in items)
    return by_rank


PLACEMENTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...]]] = {
    "even": ((4,), (Shard(0),), (8, 3)),
    "uneven": ((4,), (Shard(0),), (9, 3)),
    "with empty parts": ((4,), (Shard(0),), (2, 3)),
    "another dim": ((4,), (Shard(1),), (3, 7)),
    "replicated": ((4,), (Replicate(),), (5, 3)),
    "HSDP": ((2, 2), (Replicate(), Shard(0)), (5, 3)),
    "two dims": ((2, 2), (Shard(1), Shard(0)), (5, 3)),
    "one dim twice": ((2, 2), (Shard(0), Shard(0)), (7, 3)),
    "no elements": ((4,), (Shard(0),), (0, 3)),
    "no elements, another dim": ((4,), (Shard(1),), (0, 4)),
    "a number": ((4,), (Replicate(),), ()),
}


def test_every_box_of_every_placement_is_stored_once_and_the_whole_comes_back(tmp_path: Path) -> None:
    def save_all() -> None:
        bags = {}
        for name, (mesh_shape, placements, shape) in PLACEMENTS.items():
            mesh = init_device_mesh("cpu", mesh_shape)
            bags[name] = distribute_tensor(numbered(*shape), mesh, placements)
        save(tmp_path / "a", model=nn.ParameterDict(bags))

    run_ranks(save_all, 4)
    metadata = FileSystemReader(tmp_path / "a").read_metadata()
    for name, (_, _, shape) in PLACEMENTS.items():
        table = metadata.state_dict_metadata[f"model.{name}"]
        assert isinstance(table, TensorStorageMetadata)
        assert sum(prod(chunk.sizes) for chunk in table.chunks) == prod(shape)
        fresh = nn.ParameterDict({name: torch.full(shape, -1.0)})
        load(tmp_path / "a", model=fresh, strict=False)
        assert torch.equal(fresh[name], numbered(*shape)), name


def test_parts_cut_at_bounds_are_stored_at_their_places_in_the_whole(tmp_path: Path) -> None:
    """Matrices kept whole on data-parallel ranks, of tensor-parallel parts; and rows cut anywhere."""

    class InPlace(nn.ParameterDict):
        """A plain DTensor with ragged placements runs no operator, not even a copy."""

        def load_state_dict(self, *_: Any, **__: Any) -> Any:
            return None

    cases: dict[str, tuple[Placement, Placement]] = {
        "rows": (RaggedShard((0, 0, 3)), Shard(0)),
        "columns": (RaggedShard((0, 6, 6)), Shard(1)),
        "columns, cut": (RaggedShard((0, 1, 6)), Shard(1)),
        "the same parts": (RaggedShard((0, 4, 6)), Replicate()),
    }

    def bag() -> nn.ParameterDict:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        mesh._shard_order = [1, 0]  # type: ignore[attr-defined]  # The tensor axis cuts first.
        data, tensor = mesh.get_local_rank("data"), mesh.get_local_rank("tensor")
        tensors = {}
        for name, (ragged, other) in cases.items():
            part = numbered(6, 4)
            if isinstance(other, Shard):
                part = part.chunk(2, other.dim)[tensor]
            assert isinstance(ragged, RaggedShard)
            local = part[slice(*ragged.rows(data))].clone()
            placements = [ragged, other]
            tensors[name] = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=torch.Size((6, 4)), stride=(4, 1)
            )
            tensors[name]._is_param = True  # nn.Parameter would detach the tensor
        return InPlace(tensors)

    def save_and_load() -> bool:
        model = bag()
        save(tmp_path / "a", model=model)
        expected = {name: value._local_tensor.clone() for name, value in model.items()}
        for value in model.values():
            value._local_tensor.fill_(-1)
        load(tmp_path / "a", model=model)
        return all(torch.equal(value._local_tensor, expected[name]) for name, value in model.items())

    assert run_ranks(save_and_load, 4) == [True] * 4
    for name in cases:
        assert torch.equal(loaded(tmp_path / "a", name, 6, 4), numbered(6, 4)), name


def test_replicated_tensors_are_divided_between_their_ranks_by_bytes(tmp_path: Path) -> None:
    def save_three() -> None:
        rows = [100, 1, 50, 30, 20, 90, 10]
        hsdp, all_ranks = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
        plain = {f"p{n}": torch.zeros(num_rows, 100) for n, num_rows in enumerate(rows)}
        mixed = {name: distribute_tensor(value, hsdp, [Replicate(), Shard(0)]) for name, value in plain.items()}
        copies = {name: distribute_tensor(value, all_ranks, [Replicate()]) for name, value in plain.items()}
        save(tmp_path / "hsdp", model=Bag(**mixed))
        save(tmp_path / "copies", model=Bag(**copies))
        save(tmp_path / "ddp", model=DistributedDataParallel(Bag(**plain)))

    run_ranks(save_three, 4)
    for name in ("hsdp", "copies", "ddp"):
        nbytes = bytes_by_rank(tmp_path / name)
        assert [*sorted(nbytes)] == [0, 1, 2, 3]
        assert sum(nbytes.values()) < 301 * 400 + 28 * 2000  # Nothing twice.
        assert max(nbytes.values()) < 45_000


def test_a_save_asks_no_rank_for_its_tensors(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two exchanges: digests, and places. Digests do not grow with the model."""
    sent = []
    gather_object = dist.gather_object

    def record(obj: Any, *args: Any, **kwargs: Any) -> None:
        sent.append(len(repr(obj.value)))
        gather_object(obj, *args, **kwargs)

    def save_and_count() -> list[int]:
        monkeypatch.setattr(dist, "gather_object", record)
        for num_layers in (1, 40):
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
            kit.fully_shard(model)
            save(tmp_path / str(num_layers), model=model)
        return sent

    for small_first, small_second, large_first, large_second in run_ranks(save_and_count, 2):
        assert small_first == large_first < 200
        assert large_second > 10 * small_second


def test_messages_to_rank_zero_do_not_grow_with_the_ranks() -> None:
    def digests(num_ranks: int) -> dict[str, str]:
        dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=num_ranks)
        try:
            mesh = init_device_mesh("cpu", (num_ranks,))
            sharded = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
            model = Bag(
                sharded=sharded, replicated=DTensor.from_local(torch.ones(4), mesh, [Replicate()], run_check=False)
            )
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            for parameter in model.parameters():
                optimizer.state[parameter] = {"step": torch.tensor(1.0)}
            return SavePart.of(model, optimizer, None, ()).share.digests
        finally:
            dist.destroy_process_group()

    few, many = digests(8), digests(16384)
    assert [*map(Ranks.num_in, few)] == [8] * len(few)
    assert [*map(Ranks.num_in, many)] == [16384] * len(many)
    assert len(pickle.dumps(many)) < len(pickle.dumps(few)) + 10 * len(few)


def test_ranks_with_other_lists_or_none_are_told_apart() -> None:
    pair, all_three = Ranks((0, 2)).key, Ranks((0, 1, 2)).key
    alike = [{pair: "a", all_three: "b"}, {all_three: "b"}, {pair: "a", all_three: "b"}]
    assert differing(alike) == frozenset()
    assert differing([*alike[:2], {pair: "c", all_three: "b"}]) == {pair}
    assert differing([*alike[:2], {all_three: "b"}]) == {pair}
    assert Ranks((0, 2)).key != Ranks((2, 0)).key


def test_names_that_only_some_ranks_hold_are_stored(tmp_path: Path) -> None:
    def save_stages() -> None:
        stage = dist.get_rank() // 2
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
        model = nn.ModuleDict({str(stage): nn.BatchNorm1d(6)})
        for name in ("weight", "bias"):
            sharded = nn.Parameter(distribute_tensor(numbered(6) + stage, mesh, [Shard(0)]))
            model[str(stage)].register_parameter(name, sharded)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + stage))
        save(tmp_path / "stages", model=model, optimizer=optimizer)
        shared = nn.Linear(2, 2)
        nn.init.ones_(shared.weight)
        nn.init.zeros_(shared.bias)
        plain = nn.ModuleDict({str(dist.get_rank()): nn.Linear(2, 2), "shared": shared})
        save(tmp_path / "plain", model=plain)

    run_ranks(save_stages, 4)
    names = FileSystemReader(tmp_path / "stages").read_metadata().state_dict_metadata
    for stage in range(2):
        assert {f"model.{stage}.weight", f"model.{stage}.bias", f"model.{stage}.running_var"} <= set(names)
        assert {f"optimizer.param_groups.{stage}.{name}.lr" for name in ("weight", "bias")} <= set(names)
    stages = nn.ModuleDict({str(stage): nn.BatchNorm1d(6) for stage in range(2)})
    groups = [{"params": norm.parameters()} for norm in stages.values()]
    optimizer = torch.optim.SGD(groups, lr=9.0)
    load(tmp_path / "stages", model=stages, optimizer=optimizer)
    assert torch.equal(stages.get_parameter("1.weight"), numbered(6) + 1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    plain = nn.ModuleDict({str(n): nn.Linear(2, 2) for n in (0, 1, 2, 3, "shared")})
    load(tmp_path / "plain", model=plain)
    assert plain.get_parameter("shared.weight").eq(1).all()


@pytest.mark.parametrize("in_background", [False, True])
def test_options_of_parameters_that_only_some_ranks_name_are_stored(tmp_path: Path, in_background: bool) -> None:
    """Experts: each rank's group has separate names beside the names of all ranks."""

    def save_experts() -> None:
        rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
        model = nn.ParameterDict({"shared": distribute_tensor(numbered(4), mesh, [Shard(0)])})
        model[f"expert{rank}"] = numbered(2) + rank
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
        for param in model.values():
            optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
        if in_background:
            with AsyncSaver() as saver:
                saver.save(tmp_path / "a", model=model, optimizer=optimizer)
        else:
            save(tmp_path / "a", model=model, optimizer=optimizer)

    run_ranks(save_experts, 2)
    sizes = {"shared": 4, "expert0": 2, "expert1": 2}
    model = nn.ParameterDict({name: torch.zeros(size) for name, size in sizes.items()})
    optimizer = torch.optim.SGD([{"params": [param]} for param in model.values()], lr=9.0)
    assert not load(tmp_path / "a", model=model, optimizer=optimizer, strict=False).kept
    assert [group["lr"] for group in optimizer.param_groups] == [0.25] * 3


Refusal = tuple[type[BaseException], str]


def refusals(make: Callable[[], dict[str, Any]]) -> Callable[[Path], Refusal]:
    """Each rank's answer to a save of the model from `make`."""

    def save_and_listen(path: Path) -> Refusal:
        with pytest.raises((ValueError, NotImplementedError, CheckpointFailed)) as info:
            save(path, **make())
        return type(info.value), str(info.value)

    return save_and_listen


def assert_refused_everywhere(results: list[Refusal], kind: type[Exception], text: str) -> None:
    assert kind in [error for error, _ in results]
    assert all(text in message for _, message in results), results


def test_a_partial_tensor_is_refused(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2,))
        return {"model": Bag(a=DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False))}

    assert_refused_everywhere(
        run_ranks(refusals(make), 2, tmp_path / "a"), ValueError, "'model.a' to be sharded or replicated"
    )
    assert list(tmp_path.iterdir()) == []


def test_saving_a_local_tensor_whose_shape_contradicts_its_placements_is_refused(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        local = torch.ones(1 + 2 * dist.get_rank(), 2)
        mesh = init_device_mesh("cpu", (2,))
        ragged = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((4, 2)), stride=(2, 1))
        return {"model": Bag(a=ragged)}

    assert_refused_everywhere(
        run_ranks(refusals(make), 2, tmp_path / "a"), ValueError, "part of 'model.a' to be of shape (2, 2)"
    )


def test_two_ranks_with_different_data_for_one_box_are_refused(tmp_path: Path) -> None:
    """Tensor-parallel parts on separate meshes: one part would be lost."""

    def make() -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
        part = numbered(8, 2).chunk(2)[mesh.get_local_rank("tp")]
        return {"model": Bag(a=distribute_tensor(part, mesh["dp"], [Shard(0)]))}

    assert_refused_everywhere(
        run_ranks(refusals(make), 4, tmp_path / "a"), ValueError, "the same data at [0, 0] of 'model.a'"
    )
    assert list(tmp_path.iterdir()) == []


def test_saving_optimizer_state_with_missing_elements_is_refused(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        model = Bag(a=distribute_tensor(numbered(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)]))
        optimizer = torch.optim.SGD(model.parameters())
        if dist.get_rank() == 0:
            param = model.get_parameter("a")
            optimizer.state[param]["moment"] = torch.zeros_like(param)
        return {"model": model, "optimizer": optimizer}

    text = "the 8 elements of 'optimizer.state.a.moment', got 4"
    assert_refused_everywhere(run_ranks(refusals(make), 2, tmp_path / "a"), ValueError, text)


def test_a_tensor_that_names_its_own_boxes_is_asked(tmp_path: Path) -> None:
    """As Megatron's uneven tensors: rows cut beside the placements, placed by functions on the local tensor."""

    def uneven(start: int, num_rows: int) -> DTensor:
        def create_write_items(fqn: str, _: object) -> list[WriteItem]:
            chunk = ChunkStorageMetadata(torch.Size((start, 0)), torch.Size((num_rows, 2)))
            data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size((4, 2)))
            return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

        local = numbered(4, 2)[start:][:num_rows]
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((4, 2)), stride=(2, 1))
        tensor._local_tensor.__create_write_items__ = create_write_items  # type: ignore[attr-defined]
        return tensor

    def save_uneven() -> None:
        model = nn.Module()
        model.register_buffer("a", uneven(*[(0, 3), (3, 1)][dist.get_rank()]))
        save(tmp_path / "a", model=model)

    run_ranks(save_uneven, 2)
    assert torch.equal(loaded(tmp_path / "a", "a", 4, 2), numbered(4, 2))


def test_tensor_parallel_parts_that_are_sharded_again_come_back(kit: Kit, tmp_path: Path) -> None:
    def save_two() -> str:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = Bag(
            rows=distribute_tensor(numbered(8, 3), mesh["tp"], [Shard(0)]),
            columns=distribute_tensor(numbered(5, 8), mesh["tp"], [Shard(1)]),
            alike=distribute_tensor(numbered(6), mesh["tp"], [Replicate()]),
        )
        fully_shard(model, mesh=mesh["dp"])
        save(tmp_path / "a", model=model)
        rows = model.get_parameter("rows")
        assert isinstance(rows, DTensor)
        return type(rows.placements[0]).__name__

    assert run_ranks(save_two, 4)[0] == "_StridedShard"
    for name, shape in {"rows": (8, 3), "columns": (5, 8), "alike": (6,)}.items():
        assert torch.equal(loaded(tmp_path / "a", name, *shape), numbered(*shape))


def test_a_part_of_a_larger_buffer_takes_its_own_bytes_alone(tmp_path: Path) -> None:
    buffer = torch.zeros(100_000)
    save(tmp_path / "a", model=Bag(a=buffer[1000:1010], b=buffer[2000:2012].view(3, 4).t(), c=buffer[:0]))
    assert sum(bytes_by_rank(tmp_path / "a").values()) < 5000


def test_large_shares_are_written_as_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lamella_checkpoint._formats import dcp_write as _dcp_write

    monkeypatch.setattr(_dcp_write, "_SPLIT_NBYTES", 3000)
    bag = Bag(**{f"p{n}": numbered(50, n) for n in range(8)})
    save(tmp_path / "a", model=bag)
    assert {path.name for path in (tmp_path / "a").glob("*.distcp")} == {f"__0_{n}.distcp" for n in range(4)}
    fresh = Bag(**{f"p{n}": torch.zeros(50, n) for n in range(8)})
    load(tmp_path / "a", model=fresh)
    assert all(torch.equal(param, fresh.get_parameter(name)) for name, param in bag.named_parameters())


class Tagged(torch.Tensor):
    """A separate class, element by element."""


class Packed(torch.Tensor):
    """Quantised: fp32 to callers, and one byte an element."""

    def __new__(cls, codes: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: Any = (), kwargs: object = None) -> Self:  # type: ignore[override]
        return cls(args[0].codes)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(2).as_subclass(Tagged), "got Tagged for 'model.value'. Pass the class to"),
        (Packed(torch.ones(4, dtype=torch.int8)), "16 bytes .* 'model.value' in torch.float32, got 4 in its Packed"),
        (torch.eye(2).to_sparse(), "got torch.sparse_coo for 'model.value'"),
    ],
    ids=["class", "quantised", "sparse"],
)
def test_tensors_that_no_load_could_read_are_not_saved(tmp_path: Path, value: torch.Tensor, words: str) -> None:
    model = nn.Module()
    model.register_buffer("value", value)
    with torch.serialization.safe_globals([Packed]), pytest.raises(NotImplementedError, match=words):
        save(tmp_path / "a", model=model)
    assert not list(tmp_path.iterdir())


def test_a_class_known_to_torchs_loads_is_saved_and_loaded(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("value", torch.ones(2).as_subclass(Tagged))
    with torch.serialization.safe_globals([Tagged]):
        save(tmp_path / "a", model=model)
        model.get_buffer("value").zero_()
        load(tmp_path / "a", model=model)
    assert isinstance(model.value, Tagged) and model.value.tolist() == [1.0, 1.0]
