"""`convert`: a checkpoint of one format written in another, piece by piece, by one process."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

import torch

from lamella_checkpoint._dcp_read import StoredCheckpoint
from lamella_checkpoint._directories import check_vacant, find, publish, stage, sync
from lamella_checkpoint._errors import CheckpointDamaged, FormatUnknown, ModelUnknown
from lamella_checkpoint._families import Family, find_family, known_model_types
from lamella_checkpoint._float8 import (
    Dequantised,
    Quantised,
    block_of,
    is_quantised,
    is_scale,
    linear_weights,
    plain_config,
    quantised_config,
)
from lamella_checkpoint._hf_files import (
    copy_side_files,
    read_config,
    read_published,
    with_dtype,
    write_config,
    write_published,
)
from lamella_checkpoint._manifest import Manifest, check_extra
from lamella_checkpoint._megatron import BRIDGE, EXPECTED_OBJECTS, RELEASE_0_19, Dialect
from lamella_checkpoint._megatron import write_fsdp_dtensor as with_fsdp_dtensor_names
from lamella_checkpoint._open import Format, OpenCheckpoint, find_files, open_checkpoint
from lamella_checkpoint._rules import Rules
from lamella_checkpoint._safetensors import INDEX_FILE, WEIGHTS_FILE, SafetensorsSource
from lamella_checkpoint._safetensors_write import MAX_SHARD_NBYTES, stored_dtype
from lamella_checkpoint._source import Source, TensorInfo
from lamella_checkpoint._stream import BUFFER_NBYTES, OnBytes
from lamella_checkpoint._translate import Side, Translated, WithObjects, parameter_shapes, rename
from lamella_checkpoint._translate import translate as translated
from lamella_checkpoint._write_source import write_dcp, write_safetensors, write_torch

Target = Literal["dcp", "hf", "torch", "fsdp_dtensor"]

OnProgress = Callable[[int, int], None]
"""Told the bytes of tensors written so far, and all."""

SIDE_FILES: Final = "hf"
"""The folder of a checkpoint that keeps what lay beside the weights in a Hugging Face directory."""

_DIALECTS: Final[Mapping[str, Dialect]] = {dialect.name: dialect for dialect in (RELEASE_0_19, BRIDGE)}
_OF_MODEL: Final = "model."
_MEGATRONS: Final = frozenset({Format.FSDP_DTENSOR, Format.TORCH_DIST})

_Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a conversion did.

    Attributes:
        source: What was read.
        target: What was written.
        to: Its format.
        num_tensors: How many tensors were written.
        nbytes: Their bytes.
        left: Names of the source that the format has no place for: optimizer state in safetensors, say.
        inexact: Names of tensors that cannot be brought back exactly from what was written, and why.
        side_files: Names of the files that came along.
    """

    source: Path
    target: Path
    to: Target
    num_tensors: int
    nbytes: int
    left: tuple[str, ...]
    inexact: Mapping[str, str] = field(default_factory=dict)
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
    dialect: str = RELEASE_0_19.name,
    tensor_parallel_size: int | None = None,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    buffer_nbytes: int = BUFFER_NBYTES,
    replace: bool = False,
    on_progress: OnProgress = lambda done, total: None,
    trust: bool = False,
    verify: bool = True,
) -> Conversion:
    """Write a checkpoint in another format, holding no more of it than a buffer.

    What lies beside the weights in a Hugging Face directory (configuration, tokenizer) comes along: into the folder
    `hf` of a checkpoint, and from there into the next Hugging Face directory. A tied tensor is stored once.

    The target appears whole or not at all.

    Args:
        src: A checkpoint of any format that `open_checkpoint` knows: of this package, torch's DCP or `torch.save`, a
            Hugging Face directory or safetensors file, Megatron's `fsdp_dtensor` and `torch_dist`.
        dst: A directory; for "torch" a file. It must not exist, or be an empty directory, without `replace`.
        to: "dcp" is a checkpoint as `save` writes it, "hf" safetensors, "torch" one file of `torch.save`,
            "fsdp_dtensor" Megatron's.
        translate: What gives the source other names and cuts (`lamella_checkpoint.translate`): those of the target's
            model, as `model.<name>`, in Megatron's canonical names for "fsdp_dtensor". None translates between Hugging
            Face's and Megatron's names by the rules that an installed package has for the configuration's
            `model_type`, and leaves other names as they are.
        dtype: To cast weights of floating point to, other than float8; None keeps each tensor's own.
        float8: Whether weights are to be float8 with a scale a block of 128 by 128: those of linear layers, or those of
            which a function of name and `TensorInfo` says so. None keeps what is float8 from Hugging Face to Hugging
            Face, and makes numbers of it elsewhere.
        like: A Hugging Face directory whose side files come along instead of the source's own.
        dialect: Of `fsdp_dtensor` to write: "release-0.19" or "bridge".
        tensor_parallel_size: Of the ranks that wrote or will read `fsdp_dtensor`, where tensors are stored rank-major.
        max_shard_nbytes: About how much one file holds.
        buffer_nbytes: How much is held of tensors, unless a single row is more.
        replace: Whether a checkpoint at `dst` gives way to the new one, once that is whole. Folders in it that are not
            a checkpoint's are never removed, nor is `src`.
        on_progress: Is told how far it is, piece by piece.
        trust: Whether types that a checkpoint pickles are made that are neither plain data nor torch's own, which can
            run anything.
        verify: Whether all that has a checksum is held against it, which reads large chunks once more.

    Raises:
        CheckpointDamaged: A file is absent or unreadable or not what it should be; it is named.
        CheckpointUntrusted: The checkpoint holds other types, without `trust`.
        FileExistsError: `dst` holds something, and with `replace` something else than a checkpoint of its kind.
        FileNotFoundError: `src` is absent.
        FormatUnknown: `src` is no checkpoint.
        ModelUnknown: No package has rules for the configuration's model type, and they are needed.
        OSError: There is not enough room on the disk, which is looked at first, or it cannot be written to.
        SizeUnknown: `tensor_parallel_size`, or a configuration, is needed.
        TypeError: The format lacks a dtype.
        ValueError: Arguments contradict each other, nothing is left to write, or the names cannot be translated.

    Effects: no collective; waits until all is on the disk.
    """
    _check_arguments(to, float8, dialect)
    path = find(Path(os.path.realpath(src)))
    beside = _beside(path) if like is None else Path(like)
    config = None if beside is None else read_config(beside)
    between = _Between(config=config, dialect=_DIALECTS[dialect], tensor_parallel_size=tensor_parallel_size)
    opened = open_checkpoint(path, trust=trust, verify=verify, sizes=between.sizes())
    published = _published(opened, beside)
    wish = _Wish(to=to, translate=translate, dtype=dtype, float8=float8)
    plan = _plan(opened, wish, between, published)
    if not plan.dtypes:
        raise ValueError(f"Expected weights to write as {to!r}, got none in {str(opened.path)!r}.")
    options: _Options = {"buffer_nbytes": buffer_nbytes, "on_bytes": _progress(on_progress, plan.nbytes)}
    target = Path(os.path.realpath(dst))
    check = partial(_check_replaceable, path, to) if replace else check_vacant
    check(target)
    _check_room(target, plan.nbytes)
    with _appearing(target, is_file=to == "torch", check=check) as staged:
        copied = _copy_side_files(plan, to, beside, published, staged)
        manifest = _manifest(opened, SIDE_FILES if copied else None)
        _write(plan, to, staged / target.name if to == "torch" else staged, manifest, max_shard_nbytes, options)
    return Conversion(
        source=opened.path,
        target=target,
        to=to,
        num_tensors=len(plan.dtypes),
        nbytes=plan.nbytes,
        left=plan.left,
        inexact={name: why for layer in plan.layers for name, why in layer.inexact.items()},
        side_files=copied,
    )


def open_both(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    tensor_parallel_size: int | None = None,
    trust: bool = False,
    verify: bool = True,
) -> tuple[Source, Source]:
    """Two checkpoints of any formats under names that they can be compared by.

    Those of Hugging Face's files are read as those of the model's modules, by the rules that an installed package has
    for the configuration's `model_type`; so are Megatron's where only one side has them, and then what lies beside the
    model and the optimizer is left out. Weights in float8 are read as numbers unless both sides have them.

    Args:
        a: As `src` of `convert`.
        b: The other.
        like: A Hugging Face directory whose configuration counts for a checkpoint that has none. The other
            checkpoint's is the next that is asked.
        tensor_parallel_size: As for `convert`.
        trust: As for `convert`.
        verify: As for `convert`.

    Raises:
        CheckpointDamaged: As for `convert`.
        FileNotFoundError: There is nothing.
        FormatUnknown: As for `convert`.
        ModelUnknown: As for `convert`.
        SizeUnknown: As for `convert`.
        ValueError: As for `convert`.

    Effects: reads metadata and small files.
    """
    paths = [find(Path(os.path.realpath(each))) for each in (a, b)]
    besides = [_beside(path) for path in paths]
    configs = [None if beside is None else read_config(beside) for beside in besides]
    folders = [Path(like)] if like is not None else []
    shared = next((config for config in (*map(read_config, folders), *configs) if config is not None), None)
    betweens = [
        _Between(config=config or shared, dialect=RELEASE_0_19, tensor_parallel_size=tensor_parallel_size)
        for config in configs
    ]
    opened = [
        open_checkpoint(path, trust=trust, verify=verify, sizes=between.sizes())
        for path, between in zip(paths, betweens, strict=True)
    ]
    are_megatrons = all(each.format in _MEGATRONS for each in opened)
    are_quantised = all(is_quantised(each.raw) for each in opened)

    def read(each: OpenCheckpoint, between: _Between, beside: Path | None) -> Source:
        source = each.source
        if is_quantised(source) and not are_quantised:
            source = Dequantised(source, block=block_of(between.config or {}))
        if each.format is Format.SAFETENSORS:
            return between.modules(source, _published(each, beside), "right")
        if each.format in _MEGATRONS and not are_megatrons:
            return rename(between.translate(source, "left"), _of_sections)
        return source

    return read(opened[0], betweens[0], besides[0]), read(opened[1], betweens[1], besides[1])


# -- what is read -----------------------------------------------------------------------------------------------------


def _beside(path: Path) -> Path | None:
    """Where a checkpoint keeps what lay beside the weights in a Hugging Face directory."""
    if (path / SIDE_FILES).is_symlink():
        raise CheckpointDamaged(str(path / SIDE_FILES), f"it leads outside, to {str((path / SIDE_FILES).resolve())!r}")
    if (path / SIDE_FILES).is_dir():
        return path / SIDE_FILES
    return path if _has_weights(path) else None


def _has_weights(directory: Path) -> bool:
    return (directory / WEIGHTS_FILE).exists() or (directory / INDEX_FILE).exists()


def _published(opened: OpenCheckpoint, beside: Path | None) -> _Shapes:
    """The names and shapes that the weights were published with; none where nobody kept them."""
    published: Source | None = opened.raw if opened.format is Format.SAFETENSORS else None
    if published is None and beside is not None and _has_weights(beside):
        published = SafetensorsSource(beside)
    if published is None:
        return {} if beside is None else read_published(beside)
    return {name: info.shape for name, info in published.tensors.items() if not is_scale(published, name)}


def _ties(opened: OpenCheckpoint, published: _Shapes) -> dict[str, str]:
    """Names of tensors that lie where another lies, by that other's name; of a checkpoint of this package's own.

    The other is the one that was published, if either was.
    """
    stored = opened.raw
    if opened.format is not Format.LAMELLA or not isinstance(stored, StoredCheckpoint):
        return {}
    firsts: dict[object, str] = {}
    ties: dict[str, str] = {}
    for name in sorted(stored.tensors, key=lambda name: name.removeprefix(_OF_MODEL) not in published):
        chunks = stored.tensors[name].chunks
        places = tuple(sorted((chunk, stored.metadata.items[name, chunk.offsets]) for chunk in chunks))
        first = firsts.setdefault(places, name) if places else name
        if first != name:
            ties[name] = first
    return ties


# -- what is written --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Wish:
    """What the caller wants written; as `convert` has it."""

    to: Target
    translate: Callable[[Source], Source] | None
    dtype: torch.dtype | None
    float8: bool | Callable[[str, TensorInfo], bool] | None

    @property
    def wants_numbers(self) -> bool:
        """Whether what is float8 is to be numbers."""
        return self.float8 is False or (self.float8 is None and self.to != "hf")


@dataclass(frozen=True, kw_only=True)
class _Between:
    """What it takes to go from Hugging Face's names to Megatron's and back."""

    config: Mapping[str, Any] | None
    dialect: Dialect
    tensor_parallel_size: int | None

    def write(self, source: Source) -> Translated:
        """From Megatron's canonical names to those of `fsdp_dtensor`."""
        return with_fsdp_dtensor_names(source, self.dialect, sizes=self.sizes())

    def modules(self, source: Source, published: _Shapes, to: Side) -> Translated:
        """Between the names in Hugging Face's files (left) and those of modules (right), where a family's differ."""
        family = self._family()
        rules = Rules(()) if family is None or self.config is None else family.modules(self.config)
        return translated(source, rules.match(published, "left"), to=to)

    def translate(self, source: Source, to: Side) -> Translated:
        """Between modules' names (left) and Megatron's canonical ones (right)."""
        if self.config is None:
            raise ValueError(
                f"Expected a config.json that says which model {str(source.path)!r} is, to go between Hugging Face's "
                f"names and Megatron's, got none. Pass `like` (on the command line --config), or `translate`."
            )
        family = self._family()
        if family is None:
            raise ModelUnknown(str(self.config.get("model_type")), known_model_types())
        rules = family.megatron(self.config)
        return translated(source, rules.match(parameter_shapes(source), "left" if to == "right" else "right"), to=to)

    def _family(self) -> Family | None:
        return None if self.config is None else find_family(str(self.config.get("model_type")))

    def sizes(self) -> Mapping[str, int]:
        """What Megatron's rank-major tensors are made of, as far as it is known."""
        family, tp = self._family(), self.tensor_parallel_size
        if family is None or self.config is None or tp is None:
            return {} if tp is None else {"tp": tp}
        return family.megatron_sizes(self.config, tensor_parallel_size=tp)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """A source under the target's names; which of its tensors are written, and as what.

    Attributes:
        source: What is read.
        dtypes: What is written of it.
        ties: Further names of tensors.
        left: Names of the source that are not.
        layers: The translations on the way.
        config: The configuration that goes with the tensors, if there is one.
    """

    source: Source
    dtypes: Mapping[str, torch.dtype]
    ties: Mapping[str, str]
    left: tuple[str, ...]
    layers: tuple[Translated, ...]
    config: Mapping[str, Any] | None

    @property
    def nbytes(self) -> int:
        """The bytes of tensors that are written."""
        return sum(prod(self.source.tensors[name].shape) * dtype.itemsize for name, dtype in self.dtypes.items())


def _plan(opened: OpenCheckpoint, wish: _Wish, between: _Between, published: _Shapes) -> _Plan:
    source, ties, config = opened.source, _ties(opened, published), between.config
    if opened.format is Format.SAFETENSORS and not wish.wants_numbers:
        source = rename(opened.raw, lambda name: f"{_OF_MODEL}{name}")  # Opened, what is float8 is numbers.
    if wish.translate is not None or wish.to in ("hf", "fsdp_dtensor"):
        source, ties = rename(source, {name: name for name in _names(source) if name not in ties}.get), {}
    if is_quantised(source) and wish.wants_numbers:
        source = Dequantised(source, dtype=wish.dtype or torch.bfloat16, block=block_of(config or {}))
    layers = list(_translations(source, opened, wish, between, published))
    layers.append(rename(layers[-1] if layers else source, _KEPT[wish.to]))
    source = layers[-1]
    if wish.float8 and not is_quantised(source):
        source = Quantised(source, which=linear_weights if wish.float8 is True else wish.float8)
    kept_beside = _extra(opened) if wish.to == "dcp" else {}
    return _Plan(
        source=source,
        dtypes=_dtypes(source, ties, wish.dtype),
        ties=ties,
        left=(*_dropped(opened), *(name for name in layers[-1].left_over if name not in kept_beside)),
        layers=tuple(layers),
        config=None if config is None else _config_of(source, config, wish.dtype),
    )


def _dropped(opened: OpenCheckpoint) -> tuple[str, ...]:
    """What Megatron's checkpoints hold and no format has a place for: random states of the processes that wrote it."""
    source = opened.source
    return source.left_over if opened.format in _MEGATRONS and isinstance(source, Translated) else ()


def _translations(
    source: Source, opened: OpenCheckpoint, wish: _Wish, between: _Between, published: _Shapes
) -> Iterator[Translated]:
    """The layers from a checkpoint's names to the target's, each over the one before.

    Between formats, the names are those of modules; what goes from Hugging Face to Hugging Face keeps its own.
    """
    is_megatrons = opened.format in _MEGATRONS
    if wish.translate is not None:
        yield (source := rename(wish.translate(source), lambda name: name))
    else:
        if opened.format is Format.SAFETENSORS and wish.to != "hf":
            yield (source := between.modules(source, published, "right"))
        if is_megatrons != (wish.to == "fsdp_dtensor"):
            yield (source := between.translate(source, "left" if is_megatrons else "right"))
        if wish.to == "hf" and published:
            yield (source := between.modules(source, published, "left"))
    if wish.to == "fsdp_dtensor":
        counters = {name: value for name, value in opened.extra.items() if name in EXPECTED_OBJECTS}
        lacking = {name: value for name, value in counters.items() if name not in source.objects}
        yield between.write(WithObjects(source, lacking))


def _names(source: Source) -> tuple[str, ...]:
    return (*source.tensors, *source.objects)


def _of_sections(name: str) -> str | None:
    return name if name.startswith(("model.", "optimizer.")) else None


def _of_model(name: str) -> str | None:
    return name.removeprefix(_OF_MODEL) if name.startswith(_OF_MODEL) else None


_KEPT: Final[Mapping[Target, Callable[[str], str | None]]] = {
    "dcp": _of_sections,
    "torch": _of_sections,
    "hf": _of_model,
    "fsdp_dtensor": lambda name: name,
}
"""What each format calls a native name; None where it has no place for it."""


def _dtypes(source: Source, ties: Mapping[str, str], dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """What each tensor is written as: weights are cast, and neither their scales nor optimizer state."""
    kept = {name for name in source.tensors if name.startswith("optimizer.") or is_scale(source, name)}
    return {
        name: info.dtype if name in kept else stored_dtype(info.dtype, dtype)
        for name, info in source.tensors.items()
        if name not in ties
    }


def _config_of(source: Source, config: Mapping[str, Any], dtype: torch.dtype | None) -> Mapping[str, Any]:
    """A configuration that says of weights what they are."""
    if isinstance(source, Quantised):
        config = quantised_config(config, source.left_alone)
    elif not is_quantised(source):
        config = plain_config(config)
    return config if dtype is None else with_dtype(config, dtype)


# -- writing ----------------------------------------------------------------------------------------------------------


class _Options(TypedDict):
    """What every format's writer takes."""

    buffer_nbytes: int
    on_bytes: OnBytes


def _write(plan: _Plan, to: Target, path: Path, manifest: Manifest, max_file_nbytes: int, options: _Options) -> None:
    """Write the tensors at a path that nobody sees yet: a file for "torch", a directory for the rest."""
    contents = plan.source, plan.dtypes, path
    match to:
        case "hf":
            write_safetensors(*contents, max_shard_nbytes=max_file_nbytes, **options)
        case "torch":
            write_torch(*contents, aliases=plan.ties, **options)
        case "dcp":
            write_dcp(*contents, aliases=plan.ties, manifest=manifest, max_file_nbytes=max_file_nbytes, **options)
        case "fsdp_dtensor":
            write_dcp(*contents, path_of=_megatrons_path, max_file_nbytes=max_file_nbytes, **options)


def _megatrons_path(name: str) -> tuple[str, ...]:
    """The keys of Megatron's nested dicts: a parameter's whole name is one of them."""
    section, *rest = name.split(".")
    if section == "optimizer" and len(rest) > 2:
        return section, rest[0], ".".join(rest[1:-1]), rest[-1]
    return (section, ".".join(rest)) if rest else (section,)


def _copy_side_files(plan: _Plan, to: Target, beside: Path | None, published: _Shapes, staged: Path) -> tuple[str, ...]:
    if beside is None or to == "torch":
        return ()
    folder = staged if to == "hf" else staged / SIDE_FILES
    folder.mkdir(exist_ok=True)
    copied = copy_side_files(beside, folder)
    if to != "hf":
        write_published(folder, published)
    elif plan.config is not None and plan.config != read_config(beside):
        write_config(folder, plan.config)
    sync(folder)
    return copied


def _manifest(opened: OpenCheckpoint, side_files: str | None) -> Manifest:
    """What a converted checkpoint says about itself: what the source said, as far as it still holds."""
    kind = None if opened.manifest is None else opened.manifest.optimizer
    return Manifest(extra=_extra(opened), num_ranks=1, optimizer=kind, side_files=side_files)


def _extra(opened: OpenCheckpoint) -> dict[str, Any]:
    """What lay beside the sections, as far as it is plain."""
    return {name: value for name, value in opened.extra.items() if _is_plain(name, value)}


def _is_plain(name: str, value: object) -> bool:
    try:
        check_extra({name: value})
    except TypeError:
        return False
    return True


def _check_replaceable(source: Path, to: Target, target: Path) -> None:
    """What is replaced is deleted: it must be a checkpoint, and hold nothing else that is known of."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    problem = None
    if source.is_relative_to(target):
        problem = "the source"
    elif target.is_dir() == (to == "torch"):
        problem = "a directory" if target.is_dir() else "a file"
    elif target.is_dir():
        folders = sorted(each.name for each in target.iterdir() if each.is_dir() and each.name != SIDE_FILES)
        problem = f"folders: {', '.join(folders)}" if folders else None
    try:
        found = find_files(target)[0]
    except FormatUnknown as error:
        problem = problem or error.problem
    if problem is not None or found != target:
        raise FileExistsError(
            errno.EEXIST,
            f"Expected a checkpoint to replace, and nothing else, got {problem or found}. Convert to a path of its own",
            str(target),
        )


@contextmanager
def _appearing(target: Path, *, is_file: bool, check: Callable[[Path], None]) -> Iterator[Path]:
    """A directory to write in. After the block, it is `target`; or the file of that name in it is."""
    staged = stage(target, check=check)
    try:
        yield staged
        if not is_file:
            publish(staged, target)
            return
        if target.is_dir():
            target.rmdir()  # An empty one.
        (staged / target.name).rename(target)
        staged.rmdir()
        sync(target.parent)
    except BaseException as error:
        shutil.rmtree(staged, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(target)
        raise


def _check_room(target: Path, nbytes: int) -> None:
    """Find out now that a disk is too small, or that a checkpoint says that it is larger than any disk."""
    folder = next(each for each in target.parents if each.exists())
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


def _check_arguments(to: str, float8: object, dialect: str) -> None:
    if to not in _KEPT:
        raise ValueError(f"Expected `to` to be one of {tuple(_KEPT)}, got {to!r}.")
    if float8 and to != "hf":
        raise ValueError(f"Expected `float8` with to='hf' only, which has scales for it, got to={to!r}.")
    if dialect not in _DIALECTS:
        raise ValueError(f"Expected `dialect` to be one of {tuple(_DIALECTS)}, got {dialect!r}.")
