"""`load` takes the path of a DCP checkpoint, an open checkpoint of any format, or a function to open a checkpoint."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lamella_checkpoint import (
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointMismatch,
    FormatUnknown,
    PartialLoad,
    Source,
    check,
    load,
    save,
    verify,
)
from lamella_checkpoint.extending import LiveNames, Opened, open_dcp
from lamella_checkpoint.testing import MemorySource
from lamella_testing import run_ranks
from lamella_testing.plain_dcp import dcp_save
from lamella_testing.tiny import Kit, Tiny

Trained = tuple[Tiny, torch.optim.Optimizer]
WAY_OUT = r"Expected a checkpoint of torch DCP in .*pass lamella_convert.open_checkpoint\(path\) in place of the path"


@pytest.fixture
def trained(kit: Kit) -> Trained:
    model, optimizer = kit.build(sharded=False)
    kit.train(model, optimizer)
    return model, optimizer


def assert_loads(kit: Kit, path: Path, trained: Trained) -> PartialLoad:
    expected = kit.state(*trained)
    model, optimizer = kit.build(sharded=False, seed=1)
    result = load(path, model=model, optimizer=optimizer, strict=False)
    got = kit.state(model, optimizer)
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)
    return result


@pytest.mark.parametrize("outer", [(), ("state_dict",), ("a", "b")])
def test_plain_torch_states_load_past_outer_keys_prefixes_and_numbered_parameters(
    kit: Kit, tmp_path: Path, trained: Trained, outer: tuple[str, ...]
) -> None:
    model, optimizer = trained
    entries: dict[str, Any] = {
        "model": {f"module.{name}": value for name, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
    }
    for key in reversed(outer):
        entries = {key: entries}
    loaded = assert_loads(kit, dcp_save(entries, tmp_path / "a"), trained)
    assert loaded.stripped == (*outer, "module")


@pytest.mark.parametrize("name", ["model.safetensors", "a.pt", "folder", "folder_of_weights"])
@pytest.mark.parametrize("act", [lambda path: load(path, model=nn.Linear(1, 1)), verify], ids=["load", "verify"])
def test_load_and_verify_refuse_other_formats_and_name_open_checkpoint(
    tmp_path: Path, name: str, act: Callable[[Path], object]
) -> None:
    path = tmp_path / name
    if path.suffix:
        path.touch()
    else:
        path.mkdir()
    if name == "folder_of_weights":
        (path / "model.safetensors").touch()
    with pytest.raises(FormatUnknown, match=WAY_OUT) as info:
        act(path)
    assert info.value.file == str(path)


def test_an_absent_checkpoint_path_raises_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "absent", model=nn.Linear(1, 1))


def source_of(model: nn.Module) -> MemorySource:
    return MemorySource({f"model.{name}": tensor for name, tensor in model.state_dict().items()})


def test_any_source_is_loaded() -> None:
    saved, live = nn.Linear(2, 3), nn.Linear(2, 3)
    assert check(source_of(saved), model=live) == {}
    assert load(source_of(saved), model=live) == {}
    assert torch.equal(live.weight, saved.weight) and torch.equal(live.bias, saved.bias)


def test_for_live_receives_the_live_names_and_gives_extra_and_stripped_keys() -> None:
    saved, live = nn.Linear(2, 3), nn.Linear(2, 3)
    optimizer = torch.optim.SGD(live.parameters(), lr=9.0)
    live_names: list[LiveNames] = []

    class Foreign(MemorySource):
        def for_live(self, names: LiveNames) -> Opened:
            live_names.append(names)
            options = {f"optimizer.param_groups.{name}.lr": 0.5 for name in names.model}
            source = MemorySource(source_of(saved).full_tensors, options)
            return Opened(source=source, extra={"epoch": 3}, stripped=("outer",))

    loaded = load(Foreign({}), model=live, optimizer=optimizer, strict=False)
    assert [set(names.model) for names in live_names] == [{"weight", "bias"}]
    assert loaded.extra == {"epoch": 3} and loaded.stripped == ("outer",)
    assert optimizer.param_groups[0]["lr"] == 0.5 and torch.equal(live.weight, saved.weight)


@pytest.mark.parametrize("sizes", [2, [1, -1], [None], "12"])
def test_sizes_of_groups_that_are_no_sizes_are_damage(sizes: object) -> None:
    live = nn.Linear(2, 3)
    source = MemorySource(source_of(live).full_tensors, {"optimizer.group_sizes": sizes})
    with pytest.raises(CheckpointDamaged, match="expected the sizes of an optimizer's groups, got"):
        load(source, model=live, optimizer=torch.optim.SGD(live.parameters()))


@pytest.mark.parametrize("options", [{"trust": True}, {"verify": False}])
def test_an_open_checkpoint_takes_no_options_of_opening(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Expected `trust` and `verify` with a path only, got .* Pass them where"):
        load(source_of(nn.Linear(1, 1)), model=nn.Linear(1, 1), **options)


def test_every_rank_raises_where_one_cannot_open() -> None:
    def load_mine() -> bool:
        rank = torch.distributed.get_rank()

        def open_mine() -> Source:
            if rank == 1:
                raise OSError("no such disk")
            return source_of(nn.Linear(1, 1))

        with pytest.raises((OSError, CheckpointFailed), match="no such disk"):
            load(open_mine, model=nn.Linear(1, 1))
        return True

    assert run_ranks(load_mine, 2) == [True, True]


def test_a_folder_with_its_list_absent_is_damaged_and_not_another_format(tmp_path: Path) -> None:
    save(tmp_path / "a", model=nn.Linear(1, 1))
    (tmp_path / "a" / ".metadata").unlink()
    with pytest.raises(ValueError, match="damaged file .*.metadata"):
        load(tmp_path / "a", model=nn.Linear(1, 1))


def test_names_of_another_program_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = dcp_save({"model": {"decoder.weight": torch.ones(1, 1)}}, tmp_path / "a")
    with pytest.raises(CheckpointMismatch, match="Megatron's names: pass lamella_convert.open_checkpoint") as info:
        load(path, model=nn.Linear(1, 1))
    assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)
    with pytest.raises(CheckpointMismatch) as info:
        load(save(tmp_path / "own", model=nn.Linear(2, 2)), model=nn.Linear(1, 1))
    assert "open_checkpoint" not in str(info.value)


def test_ranks_that_open_a_checkpoint_together_ask_for_each_file_once(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "saved", model=trained[0])
    asked: list[str] = []

    def file_size(directory: Path, file: str) -> int:
        asked.append(file)
        return (directory / file).stat().st_size

    monkeypatch.setattr("lamella_checkpoint._formats.dcp_read.file_size", file_size)
    for rank in range(3):
        open_dcp(tmp_path / "saved", compared_files=slice(rank, None, 3))
    assert sum(file.endswith(".distcp") for file in asked) == len([*(tmp_path / "saved").glob("*.distcp")]) == 1


def test_a_file_that_one_rank_misses_is_the_same_error_on_every_rank(kit: Kit, tmp_path: Path) -> None:
    def save_sharded() -> None:
        model, _ = kit.build(sharded=True)
        save(tmp_path / "saved", model=model)

    def load_damaged() -> str:
        model, _ = kit.build(sharded=True)
        with pytest.raises(CheckpointDamaged, match="__1_0.distcp") as refusal:
            load(tmp_path / "saved", model=model)
        return str(refusal.value)

    run_ranks(save_sharded, 2)
    (tmp_path / "saved" / "__1_0.distcp").unlink()
    assert len(set(run_ranks(load_damaged, 2))) == 1
