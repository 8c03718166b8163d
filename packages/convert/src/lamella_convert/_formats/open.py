"""Any checkpoint, opened: the format is detected, and tensors get native names."""

import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from lamella_checkpoint.extending import Keys, LiveNames, Manifest, Opened, StoredCheckpoint, is_dcp, native, opened_dcp
from lamella_convert._formats.float8 import Dequantised, block_of, is_quantised
from lamella_convert._formats.hf_files import read_config
from lamella_convert._formats.megatron_files import (
    RUN_CONFIG,
    TRAIN_STATE,
    is_torch_dist,
    iteration_directory,
    megatron_checkpoint,
)
from lamella_convert._formats.rank_parts import MEGATRON_WAY_OUT
from lamella_convert._formats.safetensors import SafetensorsSource
from lamella_convert._formats.safetensors_files import INDEX_FILE, WEIGHTS_FILE, has_weights, parts_without_index
from lamella_convert._formats.torch_file import TorchFile
from lamella_convert._translation.megatron import is_fsdp_dtensor
from lamella_convert._translation.torch_dist import BUCKETS_WAY_OUT, is_of_buckets
from lamella_files import METADATA_FILE, FormatUnknown, Source, TensorInfo, Wanted, find

_PICKLE_MAGIC: Final = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_TORCH_SUFFIXES: Final = frozenset({".pt", ".pth", ".bin", ".ckpt", ".tar"})


class Format(Enum):
    """A checkpoint's format on the disk."""

    LAMELLA = "lamella"
    DCP = "dcp"
    TORCH = "torch"
    SAFETENSORS = "safetensors"
    FSDP_DTENSOR = "fsdp_dtensor"
    TORCH_DIST = "torch_dist"


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """An open checkpoint; no tensor has been read. A `Source` under native names.

    Attributes:
        format: The format of its files.
        raw: The source under stored names.
        make_source: Makes `source`.
        paths: The keys on the path to a value, by stored name, where native names depend on a live model.
        extra: Plain values beside the tensors: `extra` of `save`, or counters and the like of other programs.
        stripped: Keys and prefixes removed from the stored names.
        lacking: Values missing for a resumed run of the writing program (Megatron's formats).
        manifest: The manifest, for a checkpoint from `save`.
        identity: Differs between two saves to the same path; None for a format without such a mark.
        recorded_ranks: The number of tensor-parallel ranks that wrote Megatron's `fsdp_dtensor`, as files tell; None
            for other formats, and for files that do not tell.
    """

    format: Format
    raw: Source
    make_source: Callable[[], Source]
    paths: Mapping[str, Keys] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    stripped: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    manifest: Manifest | None = None
    identity: str | None = None
    recorded_ranks: int | None = None

    @cached_property
    def source(self) -> Source:
        """Native names: `model.<name>`, `optimizer.state.<name>.<slot>`, `optimizer.param_groups.<name>.<option>`.

        Raises:
            SizeUnknown: Tensors are stored rank-major, and the checkpoint does not tell the number of ranks.
            ValueError: The names are not the format's.
        """
        return self.make_source()

    @property
    def path(self) -> Path:
        """The file or directory; the directory of one iteration, if the opened path has several."""
        return self.raw.path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """As `Source.tensors`, under native names."""
        return self.source.tensors

    @property
    def objects(self) -> Sequence[str]:
        """As `Source.objects`, under native names."""
        return self.source.objects

    def read(self, requests: Sequence[Wanted]) -> None:
        """As `Source.read`, under native names."""
        self.source.read(requests)

    def read_object(self, name: str) -> object:
        """As `Source.read_object`, under native names."""
        return self.source.read_object(name)

    def with_sizes(self, sizes: Mapping[str, int]) -> "OpenCheckpoint":
        """The same checkpoint with other `sizes`, as of `open_checkpoint`. Effects: reads small files."""
        return _open_dcp(self.raw, sizes) if isinstance(self.raw, StoredCheckpoint) else self

    def for_live(self, names: LiveNames) -> Opened:
        """Native names for a live model, with float8 weights dequantised: for `lamella_checkpoint.load`.

        Raises:
            SizeUnknown: The conditions of `source`.
            ValueError: The conditions of `source`.
        """
        if self.paths is None:
            way_out = BUCKETS_WAY_OUT if any(map(is_of_buckets, self.raw.objects)) else ""
            opened = Opened(
                source=self.source,
                extra=self.extra,
                manifest=self.manifest,
                identity=self.identity,
                way_out=way_out,
            )
        else:
            opened = native(self.raw, self.paths, names, identity=self.identity)
        return replace(opened, source=_numbers(opened.source))


def open_checkpoint(
    path: str | os.PathLike[str], *, trust: bool = False, verify: bool = True, sizes: Mapping[str, int] | None = None
) -> OpenCheckpoint:
    """Detect a checkpoint's format, and open the checkpoint.

    Supports checkpoints of `save`, torch's DCP, files of `torch.save`, safetensors (a file, or a Hugging Face
    directory), Megatron's `fsdp_dtensor` and `torch_dist`, and the directories with iterations of Megatron-LM and
    Megatron-Bridge (the newest iteration).

    Args:
        path: The checkpoint's file or directory.
        trust: Allow unpickling of types beyond plain data and torch's own. **Unsafe: can execute code.**
        verify: Verify checksums while reading, if there are any.
        sizes: The sizes of the parts of Megatron's rank-major tensors, where the checkpoint does not tell.

    Raises:
        CheckpointDamaged: A file is absent, unreadable, or inconsistent with its name.
        CheckpointUntrusted: The metadata holds other types than torch's own.
        FileNotFoundError: `path` does not exist.
        FormatUnknown: No format has these files.

    Effects: reads metadata and small files, and no tensor; no collective.
    """
    path_of_files, kind = find_files(path)
    if kind is Format.DCP:
        return _open_dcp(StoredCheckpoint(path_of_files, trust=trust, verify=verify), sizes)
    if kind is Format.SAFETENSORS:
        raw = SafetensorsSource(path_of_files)
        # Each name is one key: a leading `model` is a module of the model, and no section.
        return _open_plain(raw, {name: (name,) for name in raw.tensors}, Format.SAFETENSORS)
    file = TorchFile(path_of_files, trust=trust, verify=verify)
    return _open_plain(file, file.paths, Format.TORCH)


def find_files(path: str | os.PathLike[str]) -> tuple[Path, Literal[Format.DCP, Format.SAFETENSORS, Format.TORCH]]:
    """The path of a checkpoint's files, and the kind of files; any writer's DCP counts as DCP.

    Raises:
        FileNotFoundError: The path does not exist.
        FormatUnknown: No format has these files.

    Effects: reads names, and the first bytes of a file.
    """
    path_of_files = find(Path(os.path.realpath(path)))
    if path_of_files.is_dir():
        path_of_files = iteration_directory(path_of_files)
    if is_dcp(path_of_files):
        return path_of_files, Format.DCP
    if _is_safetensors(path_of_files):
        return path_of_files, Format.SAFETENSORS
    if path_of_files.is_file() and _is_torch_file(path_of_files):
        return path_of_files, Format.TORCH
    raise _unknown(path_of_files)


def _open_dcp(stored: StoredCheckpoint, sizes: Mapping[str, int] | None) -> OpenCheckpoint:
    if stored.is_own:
        opened = opened_dcp(stored)
        return OpenCheckpoint(
            format=Format.LAMELLA,
            raw=stored,
            make_source=lambda: stored,
            extra=opened.extra,
            manifest=opened.manifest,
            identity=opened.identity,
        )
    if _is_megatrons(stored):
        megatrons = megatron_checkpoint(stored, sizes=sizes)
        return OpenCheckpoint(
            format=Format(megatrons.format),
            raw=stored,
            make_source=lambda: megatrons.source,
            extra=dict(megatrons.counters.found),
            lacking=megatrons.counters.lacking,
            identity=stored.save_id,
            recorded_ranks=megatrons.recorded_ranks if megatrons.format == "fsdp_dtensor" else None,
        )
    return _open_plain(stored, stored.metadata.paths, Format.DCP, stored.save_id)


def _open_plain(raw: Source, paths: Mapping[str, Keys], kind: Format, identity: str | None = None) -> OpenCheckpoint:
    opened = native(raw, paths)
    return OpenCheckpoint(
        format=kind,
        raw=raw,
        make_source=lambda: opened.source,
        paths=paths,
        extra=opened.extra,
        stripped=opened.stripped,
        identity=identity,
    )


def _numbers(source: Source) -> Source:
    """The source with float8 weights dequantised, if any."""
    if not is_quantised(source):
        return source
    config = read_config(source.path if source.path.is_dir() else source.path.parent)
    return Dequantised(source, block=block_of(config or {}))


def _is_megatrons(stored: StoredCheckpoint) -> bool:
    if is_torch_dist(stored):
        return True
    # DDP's names have the same prefix, so a second sign of Megatron is required.
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


def _unknown(path: Path) -> FormatUnknown:
    if not path.is_dir():
        return FormatUnknown(str(path), "a file that is neither torch.save's nor safetensors")
    if parts := parts_without_index(path):
        problem = f"{len(parts)} parts of a model, {parts[0]!r} the first, and no {INDEX_FILE}"
        return FormatUnknown(str(path), problem)
    if folders := sorted(folder.name for folder in path.glob("mp_rank_*/")):
        problem = f"folders of ranks from {folders[0]!r} to {folders[-1]!r}, as of Megatron's legacy format `torch`"
        return FormatUnknown(str(path), problem, way_out=MEGATRON_WAY_OUT)
    file_names = sorted(file.name for file in path.iterdir())[:8]
    no_format = f"{file_names} and no {METADATA_FILE}, {WEIGHTS_FILE} or iteration"
    return FormatUnknown(str(path), no_format if file_names else "an empty directory")
