"""Any checkpoint, opened: its format is found, and its tensors get native names."""

import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from lamella_checkpoint._base.directories import METADATA_FILE, find
from lamella_checkpoint._base.errors import CheckpointUntrusted, FormatUnknown
from lamella_checkpoint._base.manifest import FILE as MANIFEST_FILE
from lamella_checkpoint._base.manifest import Manifest
from lamella_checkpoint._base.source import Source
from lamella_checkpoint._formats.dcp_read import StoredCheckpoint
from lamella_checkpoint._formats.megatron_files import (
    RUN_CONFIG,
    TRAIN_STATE,
    is_torch_dist,
    iteration_directory,
    megatron_checkpoint,
)
from lamella_checkpoint._formats.safetensors import WEIGHTS_FILE, SafetensorsSource, has_weights
from lamella_checkpoint._formats.torch_file import TorchFile
from lamella_checkpoint._state.optimizer import is_plain
from lamella_checkpoint._translation.megatron import is_fsdp_dtensor
from lamella_checkpoint._translation.sections import Keys, LiveNames, to_native

Translate = Callable[[Source], Source]

_PICKLE_MAGIC: Final = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_TORCH_SUFFIXES: Final = frozenset({".pt", ".pth", ".bin", ".ckpt", ".tar"})


class Format(Enum):
    """How a checkpoint lies on the disk."""

    LAMELLA = "lamella"
    DCP = "dcp"
    TORCH = "torch"
    SAFETENSORS = "safetensors"
    FSDP_DTENSOR = "fsdp_dtensor"
    TORCH_DIST = "torch_dist"


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint that has been opened; nothing of its tensors has been read.

    Attributes:
        format: Of its files.
        raw: Names as they are stored.
        make_source: What `source` is made by.
        extra: Plain values that are beside: what `save` was given, or counters and the like of other programs.
        stripped: Keys and prefixes that are in the stored names and not in the native ones.
        lacking: What a resumed run of the program that wrote it would look for and not find (Megatron's formats).
        manifest: What `save` says of a checkpoint of its own.
        identity: What tells this checkpoint from another at the same path.
    """

    format: Format
    raw: Source
    make_source: Callable[[], Source]
    extra: dict[str, Any] = field(default_factory=dict)
    stripped: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    manifest: Manifest | None = None
    identity: str | None = None

    @cached_property
    def source(self) -> Source:
        """Native names: `model.<name>`, `optimizer.state.<name>.<slot>`, `optimizer.param_groups.<name>.<option>`.

        Raises:
            SizeUnknown: Tensors are stored in the order of ranks that the checkpoint does not tell the number of.
            ValueError: The names are not what the format has.
        """
        return self.make_source()

    @property
    def path(self) -> Path:
        """The file or directory that holds it: of one iteration, where the path that was opened has several."""
        return self.raw.path


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    trust: bool = False,
    verify: bool = True,
    sizes: Mapping[str, int] | None = None,
    live: LiveNames | None = None,
) -> OpenCheckpoint:
    """Find out what wrote a checkpoint, and open it.

    Knows what `save` wrote, torch's DCP, files of `torch.save`, safetensors (a file, or a directory as Hugging Face has
    it), Megatron's `fsdp_dtensor` and `torch_dist`, and the directories with iterations of Megatron-LM and
    Megatron-Bridge, of which the newest is taken.

    Args:
        path: The checkpoint's file or directory.
        trust: Whether types are made that are neither plain data nor torch's own, which can run anything.
        verify: Whether what is read is held against its checksum, where there is one.
        sizes: What Megatron's rank-major tensors are made of, where the checkpoint does not tell.
        live: Names of a live model, by which shared prefixes are told from names.

    Raises:
        CheckpointDamaged: A file is absent, unreadable, or not what its name says.
        CheckpointUntrusted: Its metadata holds other types than torch's own.
        FileNotFoundError: There is nothing.
        FormatUnknown: There is no format that has these files.

    Effects: no collective; reads metadata and small files, and no tensor.
    """
    found, kind = find_files(path)
    if kind is Format.DCP:
        return _open_dcp(found, trust=trust, verify=verify, sizes=sizes, live=live)
    if kind is Format.SAFETENSORS:
        return _open_safetensors(found, live)
    file = TorchFile(found, trust=trust, verify=verify)
    return _open_plain(file, file.paths, Format.TORCH, live)


def find_files(path: str | os.PathLike[str]) -> tuple[Path, Literal[Format.DCP, Format.SAFETENSORS, Format.TORCH]]:
    """Where a checkpoint's files are, and which kind of files they are: whoever wrote DCP's, it is DCP.

    Raises:
        FileNotFoundError: There is nothing.
        FormatUnknown: There is no format that has these files.

    Effects: looks at names, and at the first bytes of a file.
    """
    found = find(Path(os.path.realpath(path)))
    if found.is_dir():
        found = iteration_directory(found)
    if _is_dcp(found):
        return found, Format.DCP
    if _is_safetensors(found):
        return found, Format.SAFETENSORS
    if found.is_file() and _is_torch_file(found):
        return found, Format.TORCH
    raise FormatUnknown(str(found), _unknown(found))


def _open_dcp(
    directory: Path, *, trust: bool, verify: bool, sizes: Mapping[str, int] | None, live: LiveNames | None
) -> OpenCheckpoint:
    stored = StoredCheckpoint(directory, trust=trust, verify=verify)
    if stored.is_own:
        assert stored.manifest is not None
        return OpenCheckpoint(
            format=Format.LAMELLA,
            raw=stored,
            make_source=lambda: stored,
            extra=dict(stored.manifest.extra),
            manifest=stored.manifest,
            identity=stored.save_id,
        )
    if _is_megatrons(stored):
        opened = megatron_checkpoint(stored, sizes=sizes)
        return OpenCheckpoint(
            format=Format(opened.format),
            raw=stored,
            make_source=lambda: opened.source,
            extra=dict(opened.counters.found),
            lacking=opened.counters.lacking,
            identity=stored.save_id,
        )
    return _open_plain(stored, stored.metadata.paths, Format.DCP, live, stored.save_id)


def _open_plain(
    raw: Source, paths: Mapping[str, Keys], kind: Format, live: LiveNames | None, identity: str | None = None
) -> OpenCheckpoint:
    native = to_native(raw, paths, live)
    return OpenCheckpoint(
        format=kind,
        raw=raw,
        make_source=lambda: native.source,
        extra=_beside(raw, native.source, paths),
        stripped=native.stripped,
        identity=identity,
    )


def _open_safetensors(path: Path, live: LiveNames | None) -> OpenCheckpoint:
    raw = SafetensorsSource(path)
    # Each name is one key: the `model` in many of them is a module of the model, and no section.
    native = to_native(raw, {name: (name,) for name in raw.tensors}, live)
    return OpenCheckpoint(
        format=Format.SAFETENSORS, raw=raw, make_source=lambda: native.source, stripped=native.stripped
    )


def _beside(raw: Source, native: Source, paths: Mapping[str, Keys]) -> dict[str, Any]:
    """Plain values that lie beside the sections: an epoch, a step."""
    found: dict[str, Any] = {}
    of_raw = frozenset(raw.objects)
    for name in native.objects:
        if name in of_raw and len(paths.get(name, (name,))) == 1:
            try:
                value = raw.read_object(name)
            except CheckpointUntrusted:
                continue  # Whoever wants it asks for it, and hears why not.
            if is_plain(value) or isinstance(value, dict):
                found[name] = value
    return found


def _is_dcp(path: Path) -> bool:
    """Whether the files are DCP's, the one that lists them absent perhaps."""
    if not path.is_dir():
        return False
    return any(each.name in (METADATA_FILE, MANIFEST_FILE) or each.suffix == ".distcp" for each in path.iterdir())


def _is_megatrons(stored: StoredCheckpoint) -> bool:
    if is_torch_dist(stored):
        return True
    # DDP's own names begin alike, so something else has to say that it is Megatron.
    is_told = (
        "checkpoint_version" in stored.objects
        or any((stored.path / file).is_file() for file in (RUN_CONFIG, TRAIN_STATE))
        or any(
            name.startswith(("optimizer.param_to_group_meta.", "optimizer.state.module.module."))
            for name in (*stored.tensors, *stored.objects)
        )
    )
    return is_told and is_fsdp_dtensor(stored)


def _is_safetensors(path: Path) -> bool:
    return has_weights(path) if path.is_dir() else path.suffix == ".safetensors"


def _is_torch_file(file: Path) -> bool:
    with file.open("rb") as stream:
        begins = stream.read(2)
    return file.suffix in _TORCH_SUFFIXES or zipfile.is_zipfile(file) or begins in _PICKLE_MAGIC


def _unknown(path: Path) -> str:
    if not path.is_dir():
        return "a file that is neither torch.save's nor safetensors"
    held = sorted(each.name for each in path.iterdir())[:8]
    return f"{held} and no {METADATA_FILE}, {WEIGHTS_FILE} or iteration" if held else "an empty directory"
