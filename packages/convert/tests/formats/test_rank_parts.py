"""A file with one rank's part of sharded tensors is never taken for the tensors."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from lamella_checkpoint.testing import read_tensor
from lamella_convert import convert, inspect, open_checkpoint, verify
from lamella_convert._formats.rank_parts import RankPart
from lamella_files import FormatUnknown
from lamella_testing import run_ranks


def written_by_two(tmp_path: Path, placement: Placement, *, is_archive: bool = True, nests: bool = False) -> Path:
    """The file of rank 1 of two."""

    def write() -> None:
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.arange(4.0).view(2, 2), mesh, [placement], run_check=False)
        value: Any = {"model": {"weight": nn.Parameter(tensor), "bias": torch.ones(2)}}
        if nests:
            value = {"model": {"bias": torch.ones(2)}, "optimizer": {("a", 1): [tensor]}}
        file = tmp_path / f"rank_{dist.get_rank()}.pt"
        torch.save(value, file, _use_new_zipfile_serialization=is_archive)

    run_ranks(write, 2)
    return tmp_path / "rank_1.pt"


def assert_every_tool_refuses(file: Path, *, message: str, way_out: str, out: Path) -> None:
    """Refused with a message that matches and a way out; a conversion to `out` writes nothing."""
    [problem] = verify(file).problems
    assert problem.problem.startswith("one rank's part of")
    for refuses in (inspect, open_checkpoint, lambda file: convert(file, out, to="hf")):
        with pytest.raises(RankPart, match=message) as info:
            refuses(file)
        assert way_out in str(info.value)
    assert not out.exists()


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Partial()], ids=str)
@pytest.mark.parametrize("nests", [False, True], ids=["named", "inside a value"])
def test_a_ranks_part_is_refused_by_every_tool(tmp_path: Path, placement: Placement, nests: bool) -> None:
    file = written_by_two(tmp_path, placement, nests=nests)
    message = r"Expected whole tensors in '.*rank_1.pt', got one rank's part of"
    assert_every_tool_refuses(file, message=message, way_out="full_tensor()", out=tmp_path / "out")


def test_all_parts_are_counted(tmp_path: Path) -> None:
    def write() -> None:
        mesh = init_device_mesh("cpu", (2,))
        tensors = {name: DTensor.from_local(torch.ones(1), mesh, [Shard(0)]) for name in "abc"}
        if dist.get_rank() == 0:  # Two ranks with one file damage the file.
            torch.save(tensors, tmp_path / "a.pt")

    run_ranks(write, 2)
    with pytest.raises(RankPart, match="part of 'a' and 2 more"):
        inspect(tmp_path / "a.pt")


def test_replicas_are_whole(tmp_path: Path) -> None:
    file = written_by_two(tmp_path, Replicate())
    assert torch.equal(read_tensor(open_checkpoint(file), "model.weight"), torch.arange(4.0).view(2, 2))
    assert verify(file)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_tensor_sharded_over_one_rank_is_whole(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    values = torch.arange(6.0).view(3, 2)
    torch.save({"weight": DTensor.from_local(values, mesh, [Shard(0)])}, tmp_path / "a.pt")
    assert torch.equal(read_tensor(open_checkpoint(tmp_path / "a.pt"), "model.weight"), values)


def written_by_megatron(tmp_path: Path, args: object, *, is_archive: bool = True) -> Path:
    """A rank's file in Megatron's legacy format `torch`."""
    file = tmp_path / "iter_0000010" / "mp_rank_01" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    contents = {"args": args, "checkpoint_version": 3.0, "iteration": 10, "model": {"weight": torch.ones(4, 4)}}
    torch.save(contents, file, _use_new_zipfile_serialization=is_archive)
    return file


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "expert"])
def test_a_file_of_megatron_with_one_ranks_part_of_the_model_is_refused_by_every_tool(
    tmp_path: Path, kind: str
) -> None:
    file = written_by_megatron(tmp_path, Namespace(**{f"{kind}_model_parallel_size": 2}))
    message = f"part of 'model.weight'.*args have {kind}_model_parallel_size=2"
    assert_every_tool_refuses(file, message=message, way_out="--ckpt-format torch_dist", out=tmp_path / "out")


@pytest.mark.parametrize("args", [{"tensor_model_parallel_size": 2}, Namespace(tensor_model_parallel_size=2)], ids=type)
def test_a_file_of_megatron_from_before_torch_1_6_is_refused_too(tmp_path: Path, args: object) -> None:
    file = written_by_megatron(tmp_path, args, is_archive=False)
    with pytest.raises(RankPart, match="tensor_model_parallel_size=2"):
        open_checkpoint(file, trust=True)


@pytest.mark.parametrize("args", [Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1), None, [2]])
def test_a_model_of_one_rank_and_args_of_other_programs_are_read(tmp_path: Path, args: object) -> None:
    file = written_by_megatron(tmp_path, args)
    assert torch.equal(read_tensor(open_checkpoint(file), "model.weight"), torch.ones(4, 4))


def test_a_folder_of_megatrons_ranks_is_refused_with_the_formats_name(tmp_path: Path) -> None:
    folder = written_by_megatron(tmp_path, Namespace()).parents[1]
    with pytest.raises(FormatUnknown, match=r"folders of ranks from 'mp_rank_01' to.*`torch`.*--ckpt-format"):
        open_checkpoint(folder)
