"""The model among the safetensors files of a directory: one arrangement, or a refusal with the file's name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lamella_checkpoint import CheckpointDamaged, FormatUnknown
from lamella_checkpoint.testing import read_tensor
from lamella_convert import convert, inspect, open_checkpoint, verify
from lamella_convert._formats.rank_parts import RankPart
from lamella_convert._formats.safetensors import SafetensorsSource
from lamella_files import Wanted, box_of, whole_box
from lamella_layout import Chunk
from lamella_testing import run_ranks

TENSORS = {"a": torch.arange(6.0), "b": torch.arange(4.0).view(2, 2), "c": torch.ones(3)}
PARTS = {"model-00001-of-00002.safetensors": ("a",), "model-00002-of-00002.safetensors": ("b", "c")}
NBYTES = sum(tensor.nbytes for tensor in TENSORS.values())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model in two files with an index."""
    (tmp_path / "model").mkdir()
    for file, names in PARTS.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / "model" / file)
    homes = {name: file for file, names in PARTS.items() for name in names}
    write_index(tmp_path / "model", {"metadata": {"total_size": NBYTES}, "weight_map": homes})
    return tmp_path / "model"


def write_index(path: Path, content: object) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps(content))


def refused(path: Path, file: str, match: str) -> None:
    """Every tool refuses the directory, by a file."""
    for tool in (inspect, lambda path: convert(path, path.parent / "out", to="torch")):
        with pytest.raises(CheckpointDamaged, match=match) as info:
            tool(path)
        assert info.value.file == str(path / file)
    [problem] = verify(path).problems
    assert problem.file == str(path / file)
    assert not (path.parent / "out").exists()


def test_a_model_file_that_the_index_does_not_name_is_refused(path: Path) -> None:
    save_file({name: tensor + 1 for name, tensor in TENSORS.items()}, path / "model.safetensors")
    refused(path, "model.safetensors", "not in the index beside it")
    assert verify(path / "model.safetensors")


def test_a_single_file_beside_an_index_of_absent_files_is_refused(path: Path) -> None:
    save_file(TENSORS, path / "model.safetensors")
    for file in PARTS:
        (path / file).unlink()
    refused(path, "model-00001-of-00002.safetensors", "absent, and the index has 'a' in it")


def test_an_index_may_name_the_single_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    write_index(tmp_path, {"weight_map": dict.fromkeys(TENSORS, "model.safetensors")})
    assert set(inspect(tmp_path).as_json()["files"]) == {"model.safetensors", "model.safetensors.index.json"}
    assert verify(tmp_path) and not verify(tmp_path).notes


def test_verify_reports_index_entries_missing_from_a_single_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    write_index(tmp_path, {"weight_map": dict.fromkeys([*TENSORS, "d"], "model.safetensors")})
    [problem] = verify(tmp_path).problems
    assert "'d' is in its index and not in the file" in problem.problem


def test_parts_beside_a_single_file_without_an_index_are_refused(path: Path) -> None:
    (path / "model.safetensors.index.json").unlink()
    save_file(TENSORS, path / "model.safetensors")
    refused(path, "model.safetensors", "'model-00001-of-00002.safetensors' lies beside it")


def test_parts_without_an_index_are_refused(path: Path) -> None:
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(FormatUnknown, match="2 parts of a model, 'model-00001-of-00002.safetensors' the first, and no"):
        verify(path)


@pytest.mark.parametrize("stray", ["model-00003-of-00003.safetensors", "consolidated.safetensors", "A.SAFETENSORS"])
def test_files_that_no_index_names_are_not_read_and_listed(path: Path, stray: str) -> None:
    save_file({"a": TENSORS["a"] + 1}, path / stray)
    assert torch.equal(read_tensor(open_checkpoint(path), "model.a"), TENSORS["a"])
    verification = verify(path)
    assert verification and verification.unneeded == (stray,)


def test_a_wrong_total_of_the_index_is_told(path: Path) -> None:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    write_index(path, index | {"metadata": {"total_size": 5}})
    verification = verify(path)
    assert verification and verification.notes == (
        f"model.safetensors.index.json: total_size is 5, and the tensors have {NBYTES} bytes",
    )


# -- torch's files by rank --------------------------------------------------------------------------------------------

SHARDED = {"rows": torch.arange(15.0).view(5, 3), "few": torch.arange(2.0).view(1, 2), "plain": torch.arange(3)}


def written_by(num_ranks: int, path: Path, dim: int = 0, parts: dict[str, int] | None = None) -> Path:
    def write() -> None:
        mesh = init_device_mesh("cpu", (num_ranks,))
        state = {
            name: tensor if name == "plain" else distribute_tensor(tensor, mesh, [Shard(dim)])
            for name, tensor in SHARDED.items()
        }
        writer = HuggingFaceStorageWriter(str(path), fqn_to_index_mapping=parts, save_distributed=True)
        save(state, storage_writer=writer)

    run_ranks(write, num_ranks)
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("num_ranks", "dim", "parts"),
    [(1, 0, None), (2, 0, None), (3, 1, None), (4, 0, None), (2, 0, {"rows": 1, "few": 2, "plain": 2})],
)
def test_files_by_rank_are_one_model(tmp_path: Path, num_ranks: int, dim: int, parts: dict[str, int] | None) -> None:
    path = written_by(num_ranks, tmp_path / "a", dim, parts)
    source = open_checkpoint(path)
    for name, tensor in SHARDED.items():
        assert torch.equal(read_tensor(source, f"model.{name}"), tensor)
    verification = verify(path)
    assert verification and f"of {num_ranks} ranks" in verification.notes[0]


@pytest.mark.filterwarnings("ignore")
def test_inference_tensors_are_filled(tmp_path: Path) -> None:
    source = SafetensorsSource(written_by(2, tmp_path / "a"))
    with torch.inference_mode():
        targets = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in SHARDED.items()}
        source.read([Wanted(name, whole_box(tuple(into.shape)), into) for name, into in targets.items()])
    assert all(torch.equal(targets[name], tensor.double()) for name, tensor in SHARDED.items())


@pytest.mark.filterwarnings("ignore")
def test_any_box_is_read_across_the_files(tmp_path: Path) -> None:
    source = SafetensorsSource(written_by(3, tmp_path / "a"))

    @settings(max_examples=30, deadline=None)
    @given(st.tuples(*(st.tuples(st.integers(0, size - 1), st.integers(1, size)) for size in (5, 3))))
    def check(bounds: tuple[tuple[int, int], ...]) -> None:
        sizes = tuple(min(length, size - start) for (start, length), size in zip(bounds, (5, 3), strict=True))
        chunk = Chunk(tuple(start for start, _ in bounds), sizes)
        assert torch.equal(read_tensor(source, "rows", chunk), box_of(SHARDED["rows"], chunk))

    check()


@pytest.mark.filterwarnings("ignore")
def test_a_single_ranks_safetensors_file_is_refused_without_its_directory(tmp_path: Path) -> None:
    path = written_by(2, tmp_path / "a")
    for file in path.iterdir():
        with pytest.raises(RankPart, match="one rank's part of .*Open the directory"):
            inspect(file)
    renamed = path / "shard-00002-model-00001-of-00001.safetensors"
    renamed = renamed.rename(tmp_path / "model.safetensors")
    with pytest.raises(RankPart):
        inspect(renamed)


def rank_file(path: Path, rank: int, num_parts: int = 1) -> Path:
    return path / f"shard-{rank:05}-model-00001-of-{num_parts:05}.safetensors"


def lose_the_first(path: Path) -> None:
    rank_file(path, 1).unlink()


def count_two_parts(path: Path) -> None:
    for rank in (1, 2):
        rank_file(path, rank).rename(rank_file(path, rank, num_parts=2))


def mix_two_saves(path: Path) -> None:
    rank_file(path, 2).rename(rank_file(path, 2, num_parts=2))


def repeat_the_second(path: Path) -> None:
    rank_file(path, 3).write_bytes(rank_file(path, 2).read_bytes())


def with_offsets(text: str | None) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        metadata = {} if text is None else {"DCP_SHARDING_INFO": text}
        save_file({"rows": torch.zeros(2, 3)}, rank_file(path, 2), metadata=metadata)

    return rewrite


HARM: list[tuple[Callable[[Path], None], str]] = [
    (lose_the_first, "of ranks hold 0 of the 2 elements of 'few'"),
    (count_two_parts, "no file of part 2 of 2"),
    (mix_two_saves, "files of several saves"),
    (repeat_the_second, "overlap"),
    (with_offsets(None), "no offsets of a rank's parts"),
    (with_offsets("{}"), "expected the offsets"),
    (with_offsets('{"rows": {"saved_offsets": [3]}}'), "expected 2 offsets"),
    (with_offsets('{"rows": {"saved_offsets": [1e99, 0]}}'), "expected 2 offsets"),
    (with_offsets('{"rows": {"saved_offsets": [1000000000, 0]}}'), "elements of 'rows'"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("harm", "words"), HARM)
def test_files_by_rank_that_are_no_whole_model_are_refused(
    tmp_path: Path, harm: Callable[[Path], None], words: str
) -> None:
    path = written_by(2, tmp_path / "a")
    harm(path)
    with pytest.raises(CheckpointDamaged, match=words):
        inspect(path)
    assert not verify(path)


@pytest.mark.filterwarnings("ignore")
def test_a_file_that_torch_writes_from_one_process_is_whole(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(str(tmp_path / "a"), fqn_to_index_mapping=dict.fromkeys(SHARDED, 1))
    save(dict(SHARDED), storage_writer=writer, no_dist=True)
    source = open_checkpoint(tmp_path / "a")
    assert all(torch.equal(read_tensor(source, f"model.{name}"), tensor) for name, tensor in SHARDED.items())
