"""Saves in the background whose writer is held up, and their files, for tests of any device."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lamella_checkpoint import AsyncSaver
from lamella_megatron import save_checkpoint

FORMATS: list[Any] = ["fsdp_dtensor", "torch_dist"]


@contextmanager
def _stopped(saver: AsyncSaver) -> Iterator[None]:
    """The process that writes does not run."""
    assert saver._process is not None
    pid = saver._process._popen.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def save_thrice(path: Path, meanwhile: Callable[[], object], **arguments: Any) -> None:
    """Save one state blocking, in the background, and again before something that the writer sees nothing of."""
    save_checkpoint(path / "blocking", **arguments)
    with AsyncSaver() as saver:
        save_checkpoint(path / "earlier", saver=saver, **arguments).wait()
        with _stopped(saver):
            handle = save_checkpoint(path / "saved", saver=saver, **arguments)
            meanwhile()
            assert not handle.done
        assert handle.wait() == path / "saved"


def assert_same_files(path: Path) -> None:
    """The three saves of one state have the same files, byte by byte."""
    expected = _files(path / "blocking")
    assert ".metadata" in expected and len(expected) > 1
    assert _files(path / "saved") == _files(path / "earlier") == expected


def _files(path: Path) -> dict[str, object]:
    """The bytes of a checkpoint's files; of the metadata, all but the record of the save."""
    files: dict[str, object] = {file.name: file.read_bytes() for file in path.iterdir()}
    metadata = pickle.loads((path / ".metadata").read_bytes())
    return files | {".metadata": dataclasses.replace(metadata, storage_meta=None)}
