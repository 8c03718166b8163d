"""A save appears whole or not at all, after a failure or a kill of any process at any moment."""

import errno
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lamella_checkpoint import CheckpointDamaged, CheckpointFailed, load, save
from lamella_checkpoint._base import manifest as _manifest
from lamella_checkpoint._formats import dcp_read as _dcp_read
from lamella_checkpoint._formats import dcp_write as _dcp_write
from lamella_checkpoint._state.contents import StateContents
from lamella_checkpoint._training import save as _save
from lamella_files import read_tensors, recover
from lamella_files._base import directories as _directories
from lamella_testing import RankFailure, run_ranks
from lamella_testing.tiny import Kit


def filled(value: float, num_features: int = 4) -> nn.Linear:
    model = nn.Linear(num_features, num_features)
    nn.init.constant_(model.weight, value)
    return model


def value_at(path: Path) -> float:
    model = filled(-1.0)
    load(path, model=model)
    return model.weight[0, 0].item()


def killed_at(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, *, after: bool = False) -> None:
    """Kill this process at its call of `owner.name`, before or after the call."""
    original = getattr(owner, name)

    def die(*args: object, **kwargs: object) -> None:
        if after:
            original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(owner, name, die)


def in_child(fn: Callable[[], object]) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=fn)
    process.start()
    process.join(120)  # A longer process hangs, on a busy machine too.
    return process.exitcode


MOMENTS = {
    "before the data": (_save, "write_items", False),
    "after the data": (_save, "write_items", True),
    "after the metadata": (_dcp_write, "write_metadata", True),
    "after the manifest": (_manifest.Manifest, "write", True),
    "after the checksums": (_dcp_write, "complete", True),
    "before publishing": (_save, "publish", False),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_save_leaves_the_last_checkpoint_and_the_next_save_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "a"
    save(path, model=filled(1.0))
    owner, name, after = MOMENTS[moment]
    with monkeypatch.context() as patch:
        killed_at(patch, owner, name, after=after)
        assert in_child(lambda: save(path, model=filled(2.0))) == -signal.SIGKILL
    assert value_at(path) == 1.0
    assert len(list(tmp_path.iterdir())) == 2
    save(path, model=filled(3.0))
    assert value_at(path) == 3.0
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_save_whose_files_another_save_removed_names_the_path_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    owner, name, is_after = MOMENTS[moment]
    save(tmp_path / "a", model=filled(1.0))
    original = getattr(owner, name)

    def lose_files(*args: object, **kwargs: object) -> object:
        if not is_after:
            recover(tmp_path / "a")
        result = original(*args, **kwargs)
        if is_after:
            recover(tmp_path / "a")
        return result

    monkeypatch.setattr(owner, name, lose_files)
    with pytest.raises(FileNotFoundError, match=f"Expected one save at a time to a path, .*: '{tmp_path / 'a'}'"):
        save(tmp_path / "a", model=filled(2.0))
    assert value_at(tmp_path / "a") == 1.0 and [*tmp_path.iterdir()] == [tmp_path / "a"]


def test_a_first_save_that_is_killed_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_at(monkeypatch, _save, "publish")
    assert in_child(lambda: save(tmp_path / "a", model=filled(2.0))) == -signal.SIGKILL
    [unfinished] = tmp_path.iterdir()
    with pytest.raises(FileNotFoundError, match=f"got an unfinished save of it \\('{unfinished.name}'\\).*/a'"):
        load(tmp_path / "a", model=filled(0.0))
    with pytest.raises(CheckpointDamaged, match=f"{unfinished.name}'.* unfinished: .*interrupted. Open 'a'"):
        load(unfinished, model=filled(0.0))


def test_a_save_killed_from_outside_while_it_writes_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save(path, model=filled(1.0))

    def save_for_ever() -> None:
        while True:
            save(path, model=filled(1.0, num_features=2000))

    process = multiprocessing.get_context("fork").Process(target=save_for_ever)
    process.start()
    deadline = time.monotonic() + 120
    while not any(file.stat().st_size > 1e6 for file in tmp_path.glob("a.saving-*/*.distcp")):
        assert time.monotonic() < deadline
    process.kill()
    process.join()
    model = filled(-1.0, num_features=2000 if (path / "__0_0.distcp").stat().st_size > 1e6 else 4)
    load(path, model=model)
    assert model.weight[0, 0] == 1.0


def test_a_killed_rank_leaves_the_last_checkpoint(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_and_die() -> None:
        model, optimizer = kit.build(sharded=True)
        save(tmp_path / "a", model=model, optimizer=optimizer, extra={"step": 1})
        kit.train(model, optimizer)
        if dist.get_rank() == 1:
            killed_at(monkeypatch, _save, "write_items")
        save(tmp_path / "a", model=model, optimizer=optimizer, extra={"step": 2})

    with pytest.raises(RankFailure, match="SIGKILL"):
        run_ranks(save_and_die, 3)
    model, optimizer = kit.build(sharded=False)
    assert load(tmp_path / "a", model=model, optimizer=optimizer) == {"step": 1}


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_rank_that_cannot_write_makes_every_rank_raise_and_the_last_checkpoint_stays(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_rank: int
) -> None:
    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def save_and_fail() -> tuple[type[Exception], str]:
        model, optimizer = kit.build(sharded=True)
        save(tmp_path / "a", model=model, optimizer=optimizer)
        if dist.get_rank() == failing_rank:
            monkeypatch.setattr(_save, "write_items", no_space)
        try:
            save(tmp_path / "a", model=filled(2.0))
        except (OSError, CheckpointFailed) as error:
            return type(error), str(error)
        pytest.fail("saved")

    results = run_ranks(save_and_fail, 2)
    assert results[failing_rank][0] is OSError
    kind, text = results[1 - failing_rank]
    assert kind is CheckpointFailed
    assert f"rank {failing_rank}: OSError: [Errno 28] No space left on device" in text
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    load(tmp_path / "a", model=kit.build(sharded=False)[0])


@pytest.mark.parametrize(
    ("owner", "name"), [(_save, "publish"), (_save, "stage"), (_manifest.Manifest, "write"), (StateContents, "of")]
)
def test_a_failure_on_rank_zero_alone_reaches_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    def save_and_fail() -> type[BaseException]:
        if dist.get_rank() == 0:
            monkeypatch.setattr(owner, name, fail)
        with pytest.raises((PermissionError, CheckpointFailed), match="Permission denied") as info:
            save(tmp_path / "a", model=filled(2.0))
        return info.type

    assert run_ranks(save_and_fail, 2) == [PermissionError, CheckpointFailed]
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_on_one_rank_reaches_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def save_and_interrupt() -> type[BaseException]:
        if dist.get_rank() == 1:
            monkeypatch.setattr(_save, "write_items", interrupt)
        with pytest.raises((KeyboardInterrupt, CheckpointFailed)) as info:
            save(tmp_path / "a", model=filled(2.0))
        return info.type

    assert run_ranks(save_and_interrupt, 2) == [CheckpointFailed, KeyboardInterrupt]


class TestWithoutExchange:
    """On file systems without an exchange of two directories the old checkpoint steps aside first."""

    @pytest.fixture(autouse=True)
    def _no_exchange(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_directories, "swap", lambda *_: False)

    def test_an_existing_checkpoint_is_replaced(self, tmp_path: Path) -> None:
        for value in (1.0, 2.0):
            save(tmp_path / "a", model=filled(value))
        assert value_at(tmp_path / "a") == 2.0
        assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def test_a_save_killed_between_its_two_renames_is_read_around_and_repaired(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "a"
        save(path, model=filled(1.0))
        with monkeypatch.context() as patch:
            rename = Path.rename

            def rename_and_die(self: Path, target: Path) -> None:
                rename(self, target)
                os.kill(os.getpid(), signal.SIGKILL)

            patch.setattr(Path, "rename", rename_and_die)
            # Not the writer's rename of its metadata file.
            patch.setattr(_dcp_write, "complete", lambda *_: None)
            assert in_child(lambda: save(path, model=filled(2.0))) == -signal.SIGKILL
        assert not path.exists()
        assert value_at(path) == 1.0
        with monkeypatch.context() as patch:
            patch.setattr(_save, "publish", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                save(path, model=filled(3.0))
        assert value_at(path) == 1.0
        assert list(tmp_path.iterdir()) == [path]

    def test_a_second_rename_that_fails_puts_the_old_checkpoint_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "a"
        save(path, model=filled(1.0))
        rename = Path.rename

        def rename_and_fail(self: Path, target: Path) -> Path:
            if ".saving-" in self.name:
                raise OSError(5, "Input/output error")
            return rename(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", rename_and_fail)
            with pytest.raises(OSError, match="Input/output"):
                save(path, model=filled(2.0))
        assert value_at(path) == 1.0
        assert list(tmp_path.iterdir()) == [path]


def test_directories_are_exchanged_in_one_step_where_the_system_can(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not _directories.swap(tmp_path / "one", tmp_path / "other"):
        assert (tmp_path / "one" / "one").exists()  # The call is refused without a change.
    else:
        assert (tmp_path / "one" / "other").exists() and (tmp_path / "other" / "one").exists()
    with pytest.raises(FileNotFoundError):
        assert _directories.swap(tmp_path / "one", tmp_path / "absent") or _raise_not_found()


def _raise_not_found() -> NoReturn:
    raise FileNotFoundError  # A system without the exchange refuses before any look at the arguments.


def test_a_checkpoint_replaced_during_a_load_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    save(path, model=filled(1.0))

    def replace_and_read(*args: Any) -> None:
        save(path, model=filled(2.0))
        read_tensors(*args)

    monkeypatch.setattr(_dcp_read, "read_tensors", replace_and_read)
    with pytest.raises(FileNotFoundError, match="to stay while it is read, got another checkpoint at its path"):
        load(path, model=filled(0.0))


def test_a_reader_never_finds_the_checkpoint_absent_or_half_written(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save(path, model=filled(0.0))

    def keep_saving() -> None:
        for value in range(1, 20):
            save(path, model=filled(float(value)))

    process = multiprocessing.get_context("fork").Process(target=keep_saving)
    process.start()
    seen, refusals = [], []
    while process.is_alive():
        try:
            seen.append(value_at(path))
        except CheckpointDamaged as damage:
            refusals.append(damage.problem)
        except FileNotFoundError as error:
            refusals.append(str(error.strerror))
    process.join()
    assert seen == sorted(seen) and value_at(path) == 19.0
    # Files of a checkpoint replaced after its opening are gone, or belong to another save.
    replaced = "Expected the checkpoint to stay while it is read, got another checkpoint at its path"
    assert all(refusal == replaced or "No such file" in refusal for refusal in refusals)


@pytest.mark.parametrize("content", ["file", "directory"])
def test_a_save_never_replaces_a_path_that_is_no_checkpoint(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes"
    if content == "file":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match="Save to a path of its own"):
        save(path, model=filled(1.0))
    assert "mine" in (path if content == "file" else path / "thesis.tex").read_text()


@pytest.mark.parametrize("kind", ["saving", "replaced", "removed"])
def test_the_name_of_a_leftover_is_refused_as_a_path(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}-0123abcd"
    with pytest.raises(ValueError, match=f"got .*a.{kind}-0123abcd', the name of a leftover of a killed save to 'a'"):
        save(path, model=filled(1.0))
    assert not path.exists()


@pytest.mark.parametrize("has_exchange", [True, False])
@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_full_disk_at_any_moment_is_an_error_with_the_path_and_the_last_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool, has_exchange: bool
) -> None:
    """The data, the metadata, the manifest and the checksums; and the entries of the directory and of its parent."""
    path = tmp_path / "a"
    if is_replaced:
        save(path, model=filled(1.0))
    if not has_exchange:
        monkeypatch.setattr(_directories, "swap", lambda *_: False)
    for num_synced in range(6):
        fsyncs = iter([os.fsync] * num_synced)

        def sync_or_fail(descriptor: int, fsyncs: Iterator[Callable[[int], None]] = fsyncs) -> None:
            fsync = next(fsyncs, None)
            if fsync is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", sync_or_fail)
            with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
                save(path, model=filled(2.0))
        assert [*tmp_path.iterdir()] == [path] * is_replaced
        if is_replaced:
            assert value_at(path) == 1.0
    save(path, model=filled(2.0))
    assert value_at(path) == 2.0 and [*tmp_path.iterdir()] == [path]


def test_an_error_that_is_not_the_systems_keeps_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> NoReturn:
        raise OSError("The quota service is gone.")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"^The quota service is gone\.$"):
        save(tmp_path / "a", model=filled(1.0))


def test_an_empty_directory_may_be_given(tmp_path: Path) -> None:
    save(tmp_path, model=filled(1.0))
    assert value_at(tmp_path) == 1.0


def test_saving_to_a_link_replaces_the_checkpoint_behind_the_link(tmp_path: Path) -> None:
    save(tmp_path / "real", model=filled(1.0))
    (tmp_path / "link").symlink_to("real")
    save(tmp_path / "link", model=filled(2.0))
    assert (tmp_path / "link").is_symlink()
    assert value_at(tmp_path / "real") == 2.0


def test_another_checkpoints_leftovers_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "b.saving-01234567").mkdir()
    (tmp_path / "a.saving-by-hand").mkdir()
    save(tmp_path / "a", model=filled(1.0))
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b.saving-01234567", "a.saving-by-hand"}


def test_a_save_returns_the_absolute_path_and_makes_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert save("runs/first/a", model=filled(1.0)) == tmp_path.resolve() / "runs" / "first" / "a"
    shutil.rmtree("runs")


def test_every_file_is_on_the_disk_before_the_checkpoint_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        assert not (tmp_path / "a").exists() or synced[-1] == tmp_path.name
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    save(tmp_path / "a", model=filled(1.0))
    names = [name.split("-")[0] for name in synced]
    assert names == [
        *("__0_0.distcp", ".metadata.tmp", "lamella.json", "lamella_checksums.json"),
        *("a.saving", tmp_path.name),
    ]


def test_a_model_on_the_host_wakes_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: pytest.fail("a stream was made"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_, **__: pytest.fail("a stream was asked for"))
    save(tmp_path / "a", model=filled(1.0))


def test_saving_reads_and_changes_nothing_else(kit: Kit, tmp_path: Path) -> None:
    model, optimizer = kit.build(sharded=False)
    kit.train(model, optimizer)
    before = kit.state(model, optimizer)
    save(tmp_path / "a", model=model, optimizer=optimizer)
    after = kit.state(model, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(param.requires_grad == ("frozen" not in name) for name, param in model.named_parameters())
