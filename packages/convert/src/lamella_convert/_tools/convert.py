"""`convert`: writes a checkpoint of one format in another, piece by piece, by one process."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import torch

from lamella_checkpoint.extending import Manifest, write_dcp
from lamella_convert._formats.hf_files import (
    CHAT_TEMPLATES,
    copy_side_files,
    read_config,
    write_config,
    write_published,
)
from lamella_convert._formats.open import OpenCheckpoint, find_files
from lamella_convert._formats.safetensors_write import MAX_SHARD_NBYTES
from lamella_convert._formats.untrained import ORIGINALS_FILE
from lamella_convert._formats.write_source import write_safetensors, write_safetensors_file, write_torch
from lamella_convert._tools.between import Between, Convention, MegatronOptions, convention_of
from lamella_convert._tools.plan import KEPT, Plan, Target, Wish, dtypes_of, extra_of, plan_of
from lamella_convert._tools.published import SIDE_FILES, Published, Shapes, beside_of
from lamella_convert._translation.megatron import keys_of
from lamella_convert._translation.translate import Translated
from lamella_files import (
    BUFFER_NBYTES,
    FormatUnknown,
    OnBytes,
    Source,
    TensorInfo,
    WriteOptions,
    check_vacant,
    encode_extra,
    find,
    naming_target,
    publish,
    stage,
    sync,
)

OnProgress = Callable[[int, int], None]
"""Called with the bytes of tensors written so far, and the total."""

_RELEASE: Final = MegatronOptions()


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The report of a conversion.

    Attributes:
        source: The path read.
        target: The path written.
        to: The target's format.
        num_tensors: Number of written tensors.
        nbytes: Bytes of the written tensors.
        left: Names of the source without a place in the format: optimizer state in safetensors, say. And names that the
            rules between Hugging Face's names and Megatron's do not know.
        untrained: Published names of weights from the side files, absent from the source.
        absent: Published names absent from the target; of safetensors only.
        inexact: Reasons, by name, for tensors held inexactly by the target.
        originals: Names, in the source, of tensors that lose bits in the target: norms stored around zero that were
            stored around one. Their values are kept beside the target, and return on the way back for unchanged
            elements.
        side_files: Paths of the copied side files in their folder.
    """

    source: Path
    target: Path
    to: Target
    num_tensors: int
    nbytes: int
    left: tuple[str, ...]
    untrained: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    inexact: Mapping[str, str] = field(default_factory=dict)
    originals: tuple[str, ...] = ()
    side_files: tuple[str, ...] = ()


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: Target,
    translate: Callable[[Source], Source] | None = None,
    dtype: torch.dtype | None = None,
    float8: bool | Callable[[str, TensorInfo], bool] | None = None,
    like: str | os.PathLike[str] | None = None,
    megatron: MegatronOptions = _RELEASE,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    buffer_nbytes: int = BUFFER_NBYTES,
    replace: bool = False,
    complete: Callable[[Path], None] | None = None,
    on_progress: OnProgress = lambda done, total: None,
    trust: bool = False,
    verify: bool = True,
) -> Conversion:
    """Write a checkpoint in another format, piece by piece through a buffer.

    The side files of a Hugging Face directory (configuration, tokenizer) are copied into the folder `hf` of a
    checkpoint, and from there into the next Hugging Face directory. A tied tensor is stored once.

    The target appears whole or not at all.

    Args:
        src: A checkpoint of any format known to `open_checkpoint`.
        dst: A directory; for "torch" a file. Must be absent, or an empty directory, without `replace`.
        to: "dcp" is a checkpoint as of `save`, "hf" safetensors, "torch" one file of `torch.save`, "fsdp_dtensor"
            Megatron's.
        translate: Gives the source other names and cuts (`lamella_convert.translate`): the names of the target's model,
            as `model.<name>`, in Megatron's canonical spelling for "fsdp_dtensor". None translates between Hugging
            Face's and Megatron's names by an installed package's rules for the configuration's
            `model_type`, and leaves other names unchanged.
        dtype: The dtype of floating-point weights in the target, except float8; None keeps each tensor's own.
        float8: True encodes the weights of linear layers in float8, with a scale for each block of 128 by 128; a
            function of name and `TensorInfo` selects weights. None keeps float8 weights between two Hugging Face
            directories, and dequantises float8 weights otherwise.
        like: A Hugging Face directory whose side files are copied in place of the source's own. From a directory of
            `keep_published`, weights that the run did not train are written too.
        megatron: Facts about a Megatron run, and the spelling of `fsdp_dtensor` to write.
        max_shard_nbytes: The size of one file, approximately.
        buffer_nbytes: The size of the buffer; a single row may be larger.
        replace: Replace a checkpoint at `dst`, once the new one is whole. Unrelated folders in the old checkpoint
            are never removed, nor is `src`.
        complete: Called with the target's directory before the directory appears, to add, rename or change files.
        on_progress: Called with the bytes written so far, and the total, piece by piece.
        trust: Allow arbitrary unpickling. **Unsafe: can execute code.**
        verify: Verify checksums while reading; large chunks are read once more.

    Raises:
        CheckpointDamaged: A file is absent, unreadable or damaged; the error names the file.
        CheckpointUntrusted: The checkpoint holds types that may run code, without `trust`.
        FileExistsError: `dst` is occupied, or with `replace` is no checkpoint of the same kind.
        FileNotFoundError: `src` is absent.
        FormatUnknown: `src` is no checkpoint.
        ModelUnknown: No package has rules for the configuration's model type, and the conversion needs them.
        NotImplementedError: `dtype` or `float8` for weights quantised otherwise than in float8 with block scales.
        OSError: The disk has not enough room, checked before the first write, or a write fails.
        SizeUnknown: The conversion needs `megatron.tensor_parallel_size`, or a configuration.
        TypeError: The format lacks a dtype.
        ValueError: Arguments contradict each other, no tensor is left to write, or names cannot be translated; or the
            way to or from Megatron's names needs a layer or a tensor that the checkpoint lacks.
    Effects: no collective; waits until all files are on the disk.
    """
    _check_arguments(to, float8, megatron, complete)
    path = find(Path(os.path.realpath(src)))
    source_folder = beside_of(path)
    published_folder = source_folder if like is None else Path(like)
    config = None if published_folder is None else read_config(published_folder)
    between = Between(config=config, megatron=megatron, strict=True)
    opened = between.open(path, trust=trust, verify=verify)
    _check_padding(opened, megatron)
    _check_ranks(opened, to, megatron)
    if megatron.tensor_parallel_size is None:
        between = between.with_ranks(opened.recorded_ranks)
    published = Published.of(opened, source_folder, published_folder)
    wish = Wish(to=to, translate=translate, dtype=dtype, float8=float8)
    plan = plan_of(opened, wish, between, published)
    if not plan.dtypes:
        raise ValueError(f"Expected weights to write as {to!r}, got none in {str(opened.path)!r}.")
    progress = _progress(on_progress, plan.nbytes)
    options = WriteOptions(max_file_nbytes=max_shard_nbytes, buffer_nbytes=buffer_nbytes, on_bytes=progress)
    target = Path(os.path.realpath(dst))
    check = partial(_check_replaceable, path, to) if replace else check_vacant
    check(target)
    _check_room(target, plan.nbytes)
    with _appearing(target, is_file=to == "torch", check=check) as staged:
        copied = _copy_side_files(plan, to, published_folder, published.shapes, staged)
        manifest = _manifest(opened, SIDE_FILES if copied else None)
        _write(plan, to, staged / target.name if to == "torch" else staged, manifest, options)
        originals = _keep_originals(plan, dtype, staged / SIDE_FILES)
        if complete is not None:
            complete(staged)
            _sync_files(staged)
    for layer in plan.layers:
        if isinstance(layer, Translated):
            layer.read_cut_off()
    return Conversion(
        source=opened.path,
        target=target,
        to=to,
        num_tensors=len(plan.dtypes),
        nbytes=plan.nbytes,
        left=plan.dropped_names,
        untrained=plan.untrained,
        absent=plan.absent,
        inexact=plan.inexact,
        originals=originals,
        side_files=copied,
    )


# -- writing ----------------------------------------------------------------------------------------------------------


def _write(plan: Plan, to: Target, path: Path, manifest: Manifest, options: WriteOptions) -> None:
    """Write the tensors at a staged path, invisible to readers: a file for "torch", otherwise a directory."""
    contents = plan.source, plan.dtypes, path
    match to:
        case "hf":
            write_safetensors(*contents, options=options)
        case "torch":
            write_torch(*contents, aliases=plan.ties, options=options)
        case "dcp":
            write_dcp(*contents, aliases=plan.ties, manifest=manifest, options=options)
        case "fsdp_dtensor":
            write_dcp(*contents, path_of=keys_of, options=options)


def _copy_side_files(
    plan: Plan, to: Target, published_folder: Path | None, published: Shapes, staged: Path
) -> tuple[str, ...]:
    if published_folder is None or to == "torch":
        return ()
    folder = staged if to == "hf" else staged / SIDE_FILES
    folder.mkdir(exist_ok=True)
    copied = copy_side_files(published_folder, folder)
    if to != "hf":
        write_published(folder, published)
    elif plan.config is not None and plan.config != read_config(published_folder):
        write_config(folder, plan.config)
    sync(folder)
    return copied


def _sync_files(folder: Path) -> None:
    for file in filter(Path.is_file, folder.rglob("*")):
        sync(file)


def _keep_originals(plan: Plan, dtype: torch.dtype | None, folder: Path) -> tuple[str, ...]:
    """Keep the original values of tensors that lost bits in a shift, if the folder for them exists."""
    names_of_originals: tuple[str, ...] = ()
    for layer in plan.layers if folder.is_dir() else ():
        if isinstance(layer, Translated) and (names := layer.take_lost()):
            write_safetensors_file(layer.source, dtypes_of(layer.source, names, dtype), folder / ORIGINALS_FILE)
            names_of_originals = names
    return names_of_originals


def _manifest(opened: OpenCheckpoint, side_files: str | None) -> Manifest:
    """The manifest of a converted checkpoint: the still valid part of the source's."""
    stored = opened.manifest
    if stored is None:
        return Manifest(extra=encode_extra(extra_of(opened)), num_ranks=1, optimizer=None, side_files=side_files)
    return Manifest(
        extra=stored.extra,
        num_ranks=stored.num_ranks,  # A rank beyond them must not get rank 0's values by rank.
        optimizer=stored.optimizer,
        side_files=side_files,
        extra_by_rank=stored.extra_by_rank,
    )


def _check_replaceable(source: Path, to: Target, target: Path) -> None:
    """Refuse to replace, and thereby delete, anything but a plain checkpoint without unrelated folders."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    problem = None
    if source.is_relative_to(target):
        problem = "the source"
    elif target.is_dir() == (to == "torch"):
        problem = "a directory" if target.is_dir() else "a file"
    elif target.is_dir():
        known = (SIDE_FILES, CHAT_TEMPLATES)
        folders = sorted(file.name for file in target.iterdir() if file.is_dir() and file.name not in known)
        problem = f"folders: {', '.join(folders)}" if folders else None
    try:
        checkpoint_path = find_files(target)[0]
    except FormatUnknown as error:
        problem = problem or error.problem
    if problem is not None or checkpoint_path != target:
        raise FileExistsError(
            errno.EEXIST,
            f"Expected a checkpoint to replace, and nothing else, got {problem or checkpoint_path}. "
            "Convert to a path of its own",
            str(target),
        )


@contextmanager
def _appearing(target: Path, *, is_file: bool, check: Callable[[Path], None]) -> Iterator[Path]:
    """A staging directory. After the block, the directory becomes `target`; or the file of the target's name in it."""
    staged = stage(target, check=check)
    try:
        with naming_target(staged, target):
            yield staged
            if not is_file:
                publish(staged, target)
                return
            if target.is_dir():
                target.rmdir()  # An empty one.
            (staged / target.name).rename(target)
            staged.rmdir()
            sync(target.parent)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def _check_room(target: Path, nbytes: int) -> None:
    """Detect a too small disk before the first write, or a checkpoint that claims to exceed any disk."""
    folder = next(parent for parent in target.parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise OSError(errno.ENOSPC, f"Expected room for {nbytes} bytes of tensors, got {free}", str(folder))


def _progress(on_progress: OnProgress, total: int) -> OnBytes:
    done = 0

    def on_bytes(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        on_progress(done, total)

    return on_bytes


def _check_arguments(to: str, float8: object, megatron: MegatronOptions, complete: object) -> None:
    if to not in KEPT:
        raise ValueError(f"Expected `to` to be one of {tuple(KEPT)}, got {to!r}.")
    if complete is not None and to == "torch":
        raise ValueError("Expected `complete` with a directory as the target, got to='torch', which is one file.")
    if float8 and to != "hf":
        raise ValueError(f"Expected `float8` with to='hf' only, which has scales for it, got to={to!r}.")
    if megatron.padded_vocabulary is not None and to != "fsdp_dtensor":
        raise ValueError(f"Expected `padded_vocabulary` with to='fsdp_dtensor' only, got to={to!r}.")


def _check_padding(opened: OpenCheckpoint, megatron: MegatronOptions) -> None:
    if megatron.padded_vocabulary is not None and convention_of(opened) is Convention.MEGATRON:
        raise ValueError(f"Expected `padded_vocabulary` from other names than Megatron's, got {str(opened.path)!r}.")


def _check_ranks(opened: OpenCheckpoint, to: str, megatron: MegatronOptions) -> None:
    recorded_size, requested_size = opened.recorded_ranks, megatron.tensor_parallel_size
    if to != "fsdp_dtensor" and recorded_size is not None and requested_size not in (None, recorded_size):
        raise ValueError(
            f"Expected `tensor_parallel_size` to be the number of ranks that wrote {str(opened.path)!r} "
            f"({recorded_size}, as its files tell), got {requested_size}. Leave it out."
        )
