"""Checkpoints of any format are listed, compared and checked by one process with no group."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lamella_checkpoint import CheckpointUntrusted, save
from lamella_checkpoint.testing import forget_checksums
from lamella_convert import Format, convert, diff, inspect, save_safetensors, verify
from lamella_convert._tools import diff as _diff
from lamella_convert._tools import inspect as _inspect
from lamella_testing import run_ranks
from lamella_testing.harmed_files import flip
from lamella_testing.hostile_pickles import Runs
from lamella_testing.plain_dcp import change_metadata, dcp_save
from lamella_testing.tiny import Kit


def torch_save(entries: dict[str, Any], path: Path) -> Path:
    torch.save(entries, path)
    return path


@pytest.fixture
def saved_path(kit: Kit, tmp_path: Path) -> Path:
    model, optimizer = kit.build(sharded=False)
    kit.train(model, optimizer)
    save(tmp_path / "own", model=model, optimizer=optimizer, extra={"step": 2})
    return tmp_path / "own"


@pytest.fixture
def everywhere(tmp_path: Path, kit: Kit) -> dict[Format, Path]:
    """One model in each format."""
    model, _ = kit.build(sharded=False)
    state = model.state_dict()
    save(tmp_path / "lamella", model=model)
    dcp_save({"model": state}, tmp_path / "dcp")
    torch_save({"model": state}, tmp_path / "torch.pt")
    save_safetensors(tmp_path / "safetensors", model=model)
    return {
        Format.LAMELLA: tmp_path / "lamella",
        Format.DCP: tmp_path / "dcp",
        Format.TORCH: tmp_path / "torch.pt",
        Format.SAFETENSORS: tmp_path / "safetensors",
    }


# -- inspect ----------------------------------------------------------------------------------------------------------


def test_every_format_is_listed_alike(everywhere: dict[Format, Path]) -> None:
    listed = {kind: inspect(path, native=True) for kind, path in everywhere.items()}
    assert all(listing.format is kind for kind, listing in listed.items())
    tables = [{entry.name: entry[1:3] + entry[4:] for entry in listing.entries} for listing in listed.values()]
    assert tables[0]["model.hidden.weight"] == ((7, 3), "float32", 84)
    assert all(table == tables[0] for table in tables)
    assert len({listing.nbytes for listing in listed.values()}) == 1


def test_the_tree_shows_shapes_bytes_and_chunks(saved_path: Path) -> None:
    text = str(inspect(saved_path))
    lines = [line.strip() for line in text.splitlines()]
    assert "lamella, " in lines[0] and "4 files" in lines[0] and "step = 2" in lines
    assert "weight  float32 [7, 3], 84 B" in lines
    assert any(line.startswith("hidden  2 tensors, ") for line in lines)
    shallow = "\n".join(inspect(saved_path).lines(depth=1))
    assert "model  " in shallow and "hidden" not in shallow


def test_chunks_are_counted(kit: Kit, tmp_path: Path) -> None:
    def save_sharded() -> None:
        save(tmp_path / "a", model=kit.build(sharded=True)[0])

    run_ranks(save_sharded, 3)
    [entry] = [entry for entry in inspect(tmp_path / "a").entries if entry.name == "model.hidden.weight"]
    assert entry.num_chunks == 3
    assert "3 chunks" in str(inspect(tmp_path / "a"))


def test_the_listing_is_json(saved_path: Path, everywhere: dict[Format, Path]) -> None:
    for path in (saved_path, *everywhere.values()):
        content = json.loads(json.dumps(inspect(path).as_json()))
        assert content["nbytes"] == sum(entry["nbytes"] for entry in content["entries"])
        assert sum(content["files"].values()) > content["nbytes"]


# -- diff -------------------------------------------------------------------------------------------------------------


def test_the_same_model_in_two_formats_is_equal(everywhere: dict[Format, Path]) -> None:
    paths = list(everywhere.values())
    for a in paths:
        for b in paths:
            report = diff(a, b)
            assert not report and report.num_equal == len(inspect(a).entries)


def test_differences_are_told_in_order_with_the_first_element(tmp_path: Path) -> None:
    a = {
        "same": torch.ones(2),
        "value": torch.arange(6.0).reshape(2, 3),
        "shape": torch.ones(2),
        "dtype": torch.ones(2),
        "only_a": torch.ones(1),
    }
    b = {
        **a,
        "value": a["value"] + torch.tensor([[0, 0, 0], [0, 0.5, 0.5]]),
        "shape": torch.ones(3),
        "dtype": torch.ones(2, dtype=torch.bfloat16),
        "only_b": torch.ones(1),
    }
    del b["only_a"]
    paths = dcp_save({"model": a}, tmp_path / "a"), torch_save({"model": b}, tmp_path / "b.pt")
    report = diff(*paths)
    assert [difference[:3] for difference in report.differences] == [
        ("model.value", "4.0", "4.5"),
        ("model.shape", "[2]", "[3]"),
        ("model.dtype", "torch.float32", "torch.bfloat16"),
        ("model.only_a", "float32 [1]", None),
        ("model.only_b", None, "float32 [1]"),
    ]
    assert report.differences[0].what == "2 of 6 values, first at [1, 1]" and report.num_equal == 1
    assert "model.only_b: only in b" in str(report) and json.dumps(report.as_json())


def test_values_need_not_be_compared(tmp_path: Path) -> None:
    a = torch_save({"x": torch.ones(2), "step": 1}, tmp_path / "a.pt")
    b = torch_save({"x": torch.zeros(2), "step": 2}, tmp_path / "b.pt")
    assert not diff(a, b, values=False) and len(diff(a, b).differences) == 2


@pytest.mark.parametrize(
    ("dtype", "perturbation", "options", "is_equal"),
    [
        (torch.float32, 1e-6, {}, False),
        (torch.float32, 1e-6, {"atol": 1e-5}, True),
        (torch.float32, 1e-6, {"rtol": 1e-5}, True),
        (torch.float64, 1e-3, {"atol": 1e-5}, False),
        (torch.int64, 1, {}, False),
        (torch.int64, 1, {"atol": 1}, True),
        (torch.float8_e4m3fn, 1, {}, False),
    ],
)
def test_tolerances(
    tmp_path: Path, dtype: torch.dtype, perturbation: float, options: dict[str, Any], is_equal: bool
) -> None:
    values = torch.tensor([1.0, 2.0])
    a = torch_save({"x": values.to(dtype)}, tmp_path / "a.pt")
    b = torch_save({"x": (values.double() + perturbation).to(dtype)}, tmp_path / "b.pt")
    assert bool(diff(a, b, **options)) is not is_equal
    assert not diff(a, a)


def test_dtypes_that_torch_does_not_compare_are_compared_within_a_tolerance(tmp_path: Path) -> None:
    narrow, wide, real = (
        torch_save({"x": torch.ones(2, dtype=dtype)}, tmp_path / f"{dtype}.pt")
        for dtype in (torch.complex64, torch.complex128, torch.float32)
    )
    for other in (wide, real):
        assert [difference.what for difference in diff(narrow, other, rtol=0.1).differences] == ["dtype"]


@pytest.mark.parametrize(
    ("dtype", "number"), [(torch.int64, 2**60), (torch.int64, -(2**60)), (torch.uint64, 2**64 - 2)]
)
def test_integers_beyond_doubles_are_compared_exactly(tmp_path: Path, dtype: torch.dtype, number: int) -> None:
    tensors = [torch.tensor([number + more], dtype=dtype) for more in (0, 1)]
    a, b = (torch_save({"x": tensor}, tmp_path / f"{index}.pt") for index, tensor in enumerate(tensors))
    assert diff(a, b, atol=0.5) and not diff(a, b, atol=1.0)


def test_not_a_number_equals_itself(tmp_path: Path) -> None:
    a = torch_save({"x": torch.tensor([float("nan"), 1.0])}, tmp_path / "a.pt")
    b = torch_save({"x": torch.tensor([1.0, 1.0])}, tmp_path / "b.pt")
    assert not diff(a, a) and not diff(a, a, atol=1.0) and diff(a, b) and diff(a, b, atol=1.0)


def test_objects_are_compared_too(kit: Kit, tmp_path: Path) -> None:
    model, optimizer = kit.build(sharded=False)
    save(tmp_path / "a", model=model, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    save(tmp_path / "b", model=model, optimizer=optimizer)
    report = diff(tmp_path / "a", tmp_path / "b")
    assert report.differences[0] == ("optimizer.param_groups.embed.weight.lr", "0.05", "0.5", "object")


def test_values_beside_model_and_optimizer_that_one_side_lacks_are_no_difference(tmp_path: Path) -> None:
    entries = {"model": {"w": torch.ones(2)}, "step": 3, "scheduler": {"last_epoch": 3}}
    a = torch_save(entries, tmp_path / "a.pt")
    for to in ("dcp", "torch", "hf"):
        convert(a, tmp_path / to, to=to)
        assert not diff(a, tmp_path / to) and not diff(tmp_path / to, a)
    b = torch_save({**entries, "step": 4, "epoch": 1}, tmp_path / "b.pt")
    assert [difference.name for difference in diff(a, b).differences] == ["step"]


def test_diff_reads_tensors_in_pieces_and_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_diff, "_BUFFER_NBYTES", 4096)
    tensor = torch.arange(10_000.0)
    a = dcp_save({"x": tensor}, tmp_path / "a")
    tensor[7777] += 1
    b = dcp_save({"x": tensor}, tmp_path / "b")
    progress: list[tuple[int, int]] = []
    sizes: list[int] = []
    read = _diff._read

    def counting(*args: Any) -> list[torch.Tensor]:
        got = read(*args)
        sizes.append(sum(part.nbytes for part in got))
        return got

    monkeypatch.setattr(_diff, "_read", counting)
    report = diff(a, b, on_progress=lambda done, total: progress.append((done, total)))
    assert report.differences[0].what == "1 of 10000 values, first at [7777]"
    assert max(sizes) <= 4096 and progress[-1] == (40_000, 40_000) and progress == sorted(progress)


# -- verify -----------------------------------------------------------------------------------------------------------


def test_undamaged_checkpoints_of_every_format_are_verified_as_whole(
    saved_path: Path, everywhere: dict[Format, Path]
) -> None:
    def check(path: Path) -> None:
        progress: list[tuple[int, int]] = []
        verification = verify(path, on_progress=lambda *so_far: progress.append(so_far))
        assert verification and verification.problems == () and verification.num_bytes > 0, str(verification)
        assert progress[-1] == (verification.num_bytes, verification.num_bytes) and "whole" in str(verification)

    for path in (saved_path, *everywhere.values()):
        check(path)
    assert verify(saved_path).num_unverified_bytes == 0
    assert verify(everywhere[Format.SAFETENSORS]).num_unverified_bytes > 0


@pytest.mark.parametrize("position", range(0, 2000, 333))
def test_any_flipped_bit_is_found(everywhere: dict[Format, Path], position: int) -> None:
    for kind, name in ((Format.LAMELLA, "__0_0.distcp"), (Format.LAMELLA, ".metadata")):
        file = everywhere[kind] / name
        content = file.read_bytes()
        flip(file, position % len(content))
        assert [os.path.basename(problem.file) for problem in verify(everywhere[kind]).problems][:1] == [name]
        file.write_bytes(content)


def test_a_flipped_bit_in_other_programs_tensors_is_found(tmp_path: Path) -> None:
    tensor = torch.arange(1000.0)
    for path, file in (
        (dcp_save({"model": {"x": tensor}}, tmp_path / "a"), "__0_0.distcp"),
        (torch_save({"x": tensor}, tmp_path / "b.pt"), None),
    ):
        target = path if file is None else path / file
        flip(target, target.read_bytes().find(tensor.numpy().tobytes()) + 5)
        [problem] = verify(path).problems
        assert problem.file == str(target) and "with the checksum" in problem.problem


def test_truncated_files_of_other_formats_are_problems(everywhere: dict[Format, Path]) -> None:
    file = everywhere[Format.TORCH]
    os.truncate(file, file.stat().st_size - 50)
    assert not verify(file)
    file = everywhere[Format.SAFETENSORS] / "model.safetensors"
    os.truncate(file, file.stat().st_size - 50)
    assert not verify(file)


def test_inspect_verify_and_diff_run_no_pickled_code(saved_path: Path) -> None:
    forget_checksums(saved_path)
    change_metadata(saved_path, lambda metadata: metadata.planner_data.update(x=Runs()))
    for look in (inspect, verify, lambda path: diff(path, path)):
        with pytest.raises(CheckpointUntrusted, match="posix.mkdir"):
            look(saved_path)
    assert not os.path.exists("ran")


def test_a_tree_has_a_node_for_each_distinct_part_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[_inspect._Node] = []
    begin = _inspect._Node.__init__

    def counting(node: _inspect._Node) -> None:
        nodes.append(node)
        begin(node)

    monkeypatch.setattr(_inspect._Node, "__init__", counting)
    path = torch_save({f"layers.0.experts.{index}.weight": torch.zeros(1) for index in range(50)}, tmp_path / "a.pt")
    assert len([*inspect(path).lines()]) > 50
    assert len(nodes) == 1 + len(("layers", "0", "experts")) + 50 * 2
