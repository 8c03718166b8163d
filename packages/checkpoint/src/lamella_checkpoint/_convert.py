"""`convert`: a checkpoint of one format written in another, piece by piece, by one process."""

import dataclasses
import errno
import os
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

import torch

from lamella_checkpoint._correspondence import Correspondence
from lamella_checkpoint._dcp_read import StoredCheckpoint
from lamella_checkpoint._directories import check_vacant, find, publish, stage, sync
from lamella_checkpoint._errors import CheckpointDamaged, FormatUnknown, ModelUnknown
from lamella_checkpoint._families import PADDED_VOCABULARY, Family, find_family, known_model_types
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
from lamella_checkpoint._megatron import BRIDGE, EXPECTED_OBJECTS, MTP_LAYERS, RELEASE_0_19, Dialect, MtpLayer
from lamella_checkpoint._megatron import write_fsdp_dtensor as with_fsdp_dtensor_names
from lamella_checkpoint._open import Format, OpenCheckpoint, find_files, open_checkpoint
from lamella_checkpoint._safetensors import INDEX_FILE, WEIGHTS_FILE, SafetensorsSource
from lamella_checkpoint._safetensors_write import MAX_SHARD_NBYTES, stored_dtype
from lamella_checkpoint._source import Source, TensorInfo
from lamella_checkpoint._stream import BUFFER_NBYTES, OnBytes
from lamella_checkpoint._torch_file import TorchFile
from lamella_checkpoint._translate import Side, Translated, WithObjects, parameter_shapes, rename
from lamella_checkpoint._translate import translate as translated
from lamella_checkpoint._untrained import ORIGINALS_FILE, UNTRAINED_FILE, Completed, kept_in
from lamella_checkpoint._write_source import write_dcp, write_safetensors, write_safetensors_file, write_torch

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
        untrained: Names, in the files that were published, of weights that the source lacks and that came along from
            where they were kept.
        absent: With safetensors, names that were published and that the target lacks.
        inexact: Names of tensors that cannot be brought back exactly from what was written, and why.
        originals: Names, in the source, of tensors that lose bits in what was written: norms stored around zero that
            were stored around one. Their values are kept beside it, and come back from there where nothing has changed.
        side_files: Names of the files that came along.
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
    dialect: str = RELEASE_0_19.name,
    mtp_layer: MtpLayer = RELEASE_0_19.mtp_layer,
    tensor_parallel_size: int | None = None,
    padded_vocabulary: int | None = None,
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
        like: A Hugging Face directory whose side files come along instead of the source's own. Of a directory of
            `keep_published`, what was not trained comes along as well.
        dialect: Of `fsdp_dtensor` to write: "release-0.19" or "bridge".
        mtp_layer: What `fsdp_dtensor` calls the layer inside one that predicts further tokens: "mtp_model_layer", or
            "transformer_layer" as newer releases of megatron-core. Both are read.
        tensor_parallel_size: Of the ranks that wrote or will read `fsdp_dtensor`, where tensors are stored rank-major.
        padded_vocabulary: The rows that Megatron is to have for tokens, zeros behind the configuration's. None for as
            many as the configuration has. From Megatron, rows behind these are always left out, and told where not
            zero.
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
    _check_arguments(to, float8, dialect, mtp_layer)
    if padded_vocabulary is not None and to != "fsdp_dtensor":
        raise ValueError(f"Expected `padded_vocabulary` with to='fsdp_dtensor' only, got to={to!r}.")
    path = find(Path(os.path.realpath(src)))
    own = _beside(path)
    beside = own if like is None else Path(like)
    config = None if beside is None else read_config(beside)
    written = dataclasses.replace(_DIALECTS[dialect], mtp_layer=mtp_layer)
    between = _Between(
        config=config,
        dialect=written,
        tensor_parallel_size=tensor_parallel_size,
        padded_vocabulary=padded_vocabulary,
    )
    opened = open_checkpoint(path, trust=trust, verify=verify, sizes=between.sizes())
    if padded_vocabulary is not None and opened.format in _MEGATRONS:
        raise ValueError(f"Expected `padded_vocabulary` from other names than Megatron's, got {str(opened.path)!r}.")
    published = _Published.of(opened, own, beside)
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
        copied = _copy_side_files(plan, to, beside, published.shapes, staged)
        manifest = _manifest(opened, SIDE_FILES if copied else None)
        _write(plan, to, staged / target.name if to == "torch" else staged, manifest, max_shard_nbytes, options)
        originals = _keep_originals(plan, dtype, staged / SIDE_FILES)
    for layer in plan.layers:
        if isinstance(layer, Translated):
            layer.read_cut_off()
    return Conversion(
        source=opened.path,
        target=target,
        to=to,
        num_tensors=len(plan.dtypes),
        nbytes=plan.nbytes,
        left=plan.left,
        untrained=plan.untrained,
        absent=plan.absent,
        inexact=plan.inexact,
        originals=originals,
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
    given = None if like is None else Path(like)
    besides = [_beside(path) for path in paths]
    folders = [(beside, given, *besides) for beside in besides]
    betweens = [
        _Between(config=_first_config(each), dialect=RELEASE_0_19, tensor_parallel_size=tensor_parallel_size)
        for each in folders
    ]
    opened = [
        open_checkpoint(path, trust=trust, verify=verify, sizes=between.sizes())
        for path, between in zip(paths, betweens, strict=True)
    ]
    publisheds = [
        _Published.of(each, of_each[0], next((folder for folder in of_each if folder is not None), None))
        for each, of_each in zip(opened, folders, strict=True)
    ]
    are_megatrons = all(each.format in _MEGATRONS for each in opened)
    are_quantised = all(is_quantised(each.raw) for each in opened)

    def read(each: OpenCheckpoint, between: _Between, published: _Published) -> Source:
        source = each.source
        if is_quantised(source) and not are_quantised:
            source = Dequantised(source, block=block_of(between.config or {}))
        if each.format in _MEGATRONS:
            return (
                source
                if are_megatrons
                else rename(between.translate(source, "left", published.originals), _of_sections)
            )
        if each.format is not Format.SAFETENSORS:
            if not between.is_part(source, published.shapes) and published.untrained is None:
                return source
            source = _completed(between.as_published(source, published.shapes), published.untrained)
        return between.modules(source, published.shapes)

    return read(opened[0], betweens[0], publisheds[0]), read(opened[1], betweens[1], publisheds[1])


def _first_config(folders: Iterable[Path | None]) -> dict[str, Any] | None:
    """The configuration in the first folder that has one."""
    configs = (read_config(folder) for folder in folders if folder is not None)
    return next((config for config in configs if config is not None), None)


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


@dataclass(frozen=True, kw_only=True)
class _Published:
    """What is known of the Hugging Face directory that a checkpoint came from.

    Attributes:
        shapes: Of its weights by name; none where nobody kept them.
        untrained: Those of its weights that were kept because the checkpoint is without them.
        originals: Values that the checkpoint cannot hold exactly, from where it came.
    """

    shapes: _Shapes
    untrained: Source | None
    originals: Source | None

    @classmethod
    def of(cls, opened: OpenCheckpoint, own: Path | None, beside: Path | None) -> "_Published":
        """Of a checkpoint with a folder of its own perhaps, by the folder that counts."""
        weights: Source | None = opened.raw if opened.format is Format.SAFETENSORS else None
        untrained = kept_in(beside, UNTRAINED_FILE) if weights is None else None
        originals = kept_in(own, ORIGINALS_FILE) or kept_in(beside, ORIGINALS_FILE)
        if weights is None and beside is not None and _has_weights(beside):
            weights = SafetensorsSource(beside)
        if weights is None:
            shapes = {} if beside is None else read_published(beside)
            return cls(shapes=shapes, untrained=untrained, originals=originals)
        shapes = {name: info.shape for name, info in weights.tensors.items() if not is_scale(weights, name)}
        return cls(shapes=shapes, untrained=untrained, originals=originals)


def _completed(source: Source, untrained: Source | None) -> Source:
    return source if untrained is None else Completed(source, untrained)


def _ties(opened: OpenCheckpoint, published: Container[str]) -> dict[str, str]:
    """Names of tensors that lie where another lies, by that other's name.

    Of this package's own checkpoints, and of files of `torch.save`; other formats cannot tell.
    The other is the one that was published, if either was: `published` are its names for what was.
    """
    firsts: dict[object, str] = {}
    ties: dict[str, str] = {}
    places = _places(opened)
    for name in sorted(places, key=lambda name: name.removeprefix(_OF_MODEL) not in published):
        first = firsts.setdefault(places[name], name)
        if first != name:
            ties[name] = first
    return ties


def _places(opened: OpenCheckpoint) -> dict[str, object]:
    """Where each tensor lies in the files, by its native name, in formats in which two can lie in one place."""
    stored = opened.raw
    if opened.format is Format.LAMELLA and isinstance(stored, StoredCheckpoint):
        return {
            name: tuple(sorted((chunk, stored.metadata.items[name, chunk.offsets]) for chunk in info.chunks))
            for name, info in stored.tensors.items()
            if info.chunks
        }
    if isinstance(stored, TorchFile):
        native = opened.source.source if isinstance(opened.source, WithObjects) else opened.source
        origins = native.origins if isinstance(native, Translated) else {name: name for name in stored.tensors}
        return {
            name: stored.place(origin)
            for name, origin in origins.items()
            if name.startswith(_OF_MODEL) and origin in stored.tensors and stored.tensors[origin].chunks[0].numel
        }
    return {}


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
    padded_vocabulary: int | None = None

    def write(self, source: Source) -> Translated:
        """From Megatron's canonical names to those of `fsdp_dtensor`."""
        return with_fsdp_dtensor_names(source, self.dialect, sizes=self.sizes())

    def modules(self, source: Source, published: _Shapes) -> Translated:
        """From the names in Hugging Face's files to those of modules, where a family's differ."""
        return translated(source, self._matched(self.config, published), to="right")

    def as_published(self, source: Source, published: _Shapes) -> Translated:
        """Back from the names of modules: of the whole model, or of the text model in it."""
        return translated(source, self._matched(self._config_of(source, published), published), to="left")

    def names_of_published(self, source: Source, published: _Shapes) -> set[str]:
        """What the names that were published are in the source, which has those of modules."""
        found = self._matched(self._config_of(source, published), published)
        taken = {name for each in found for name in each.left}
        return {name for each in found for name in each.right} | (set(published) - taken)

    def is_part(self, source: Source, published: _Shapes) -> bool:
        """Whether a source with the names of modules is the text model of one that has further parts."""
        return self._config_of(source, published) is not self.config

    def _config_of(self, source: Source, published: _Shapes) -> Mapping[str, Any] | None:
        text = None if self.config is None else _text_config(self.config)
        held = parameter_shapes(source)
        is_text = text is not None and any(
            all(name in held for name in each.right) for each in self._matched(text, published)
        )
        return text if is_text else self.config

    @staticmethod
    def _matched(config: Mapping[str, Any] | None, published: _Shapes) -> list[Correspondence]:
        """What corresponds between files (left) and the modules of a configuration (right)."""
        family = None if config is None else find_family(str(config.get("model_type")))
        return [] if family is None or config is None else family.modules(config).match(published, "left")

    def translate(self, source: Source, to: Side, originals: Source | None = None) -> Translated:
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
        if self.padded_vocabulary is not None:
            rules = dataclasses.replace(rules, sizes={**rules.sizes, PADDED_VOCABULARY: self.padded_vocabulary})
        found = rules.match(parameter_shapes(source), "left" if to == "right" else "right")
        return translated(source, found, to=to, originals=originals)

    def _family(self) -> Family | None:
        return None if self.config is None else find_family(str(self.config.get("model_type")))

    def sizes(self) -> Mapping[str, int]:
        """What Megatron's rank-major tensors are made of, as far as it is known."""
        family, tp = self._family(), self.tensor_parallel_size
        if family is None or self.config is None or tp is None:
            return {} if tp is None else {"tp": tp}
        return family.megatron_sizes(self.config, tensor_parallel_size=tp)


def _text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of the text model in a model of several parts; None for that of a text model."""
    text = config.get("text_config")
    # The outer configuration decides on ties: the inner value may be a library's default.
    return {**text, "tie_word_embeddings": bool(config.get("tie_word_embeddings"))} if isinstance(text, dict) else None


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """A source under the target's names; which of its tensors are written, and as what.

    Attributes:
        source: What is read.
        dtypes: What is written of it.
        ties: Further names of tensors.
        left: Names of the source that are not.
        layers: What is on the way, one over the other.
        absent: Published names that are not written.
        config: The configuration that goes with the tensors, if there is one.
    """

    source: Source
    dtypes: Mapping[str, torch.dtype]
    ties: Mapping[str, str]
    left: tuple[str, ...]
    layers: tuple[Source, ...]
    absent: tuple[str, ...]
    config: Mapping[str, Any] | None

    @property
    def untrained(self) -> tuple[str, ...]:
        """The published names of what came from where it was kept."""
        added = [name for layer in self.layers if isinstance(layer, Completed) for name in layer.added]
        return tuple(name.removeprefix(_OF_MODEL) for name in added)

    @property
    def inexact(self) -> dict[str, str]:
        """What cannot be brought back, as far as is known; of values, once they have been read."""
        return {
            name: why for layer in self.layers if isinstance(layer, Translated) for name, why in layer.inexact.items()
        }

    @property
    def nbytes(self) -> int:
        """The bytes of tensors that are written."""
        return sum(prod(self.source.tensors[name].shape) * dtype.itemsize for name, dtype in self.dtypes.items())


def _plan(opened: OpenCheckpoint, wish: _Wish, between: _Between, published: _Published) -> _Plan:
    source, config = opened.source, between.config
    ties = all_ties = _ties(opened, between.names_of_published(source, published.shapes))
    if opened.format is Format.SAFETENSORS and not wish.wants_numbers:
        source = rename(opened.raw, lambda name: f"{_OF_MODEL}{name}")  # Opened, what is float8 is numbers.
    if wish.translate is not None or wish.to in ("hf", "fsdp_dtensor") or published.untrained is not None:
        source, ties = rename(source, {name: name for name in _names(source) if name not in ties}.get), {}
    if is_quantised(source) and wish.wants_numbers:
        source = Dequantised(source, dtype=wish.dtype or torch.bfloat16, block=block_of(config or {}))
    layers: list[Source] = list(_translations(source, opened, wish, between, published))
    last = rename(layers[-1] if layers else source, _KEPT[wish.to])
    layers.append(last)
    source = last
    if wish.float8 and not is_quantised(source):
        source = Quantised(source, which=linear_weights if wish.float8 is True else wish.float8)
    kept_beside = _extra(opened) if wish.to == "dcp" else {}
    dtypes = _dtypes(source, (name for name in source.tensors if name not in ties), wish.dtype)
    dtype = wish.dtype if opened.format is Format.SAFETENSORS else wish.dtype or _most_common(source, dtypes)
    absent = (name for name in published.shapes if name not in source.tensors and f"{_OF_MODEL}{name}" not in all_ties)
    return _Plan(
        source=source,
        dtypes=dtypes,
        ties=ties,
        left=(*_dropped(opened), *(name for name in last.left_over if name not in kept_beside)),
        layers=tuple(layers),
        absent=tuple(absent) if wish.to == "hf" and wish.translate is None else (),
        config=None if config is None else _config_of(source, config, dtype),
    )


def _dropped(opened: OpenCheckpoint) -> tuple[str, ...]:
    """What Megatron's checkpoints hold and no format has a place for: random states of the processes that wrote it."""
    source = opened.source
    return source.left_over if opened.format in _MEGATRONS and isinstance(source, Translated) else ()


def _translations(
    source: Source, opened: OpenCheckpoint, wish: _Wish, between: _Between, published: _Published
) -> Iterator[Source]:
    """The layers from a checkpoint's names to the target's, each over the one before.

    Between formats, the names are those of modules; what goes from Hugging Face to Hugging Face keeps its own.
    """
    to_megatron = wish.to == "fsdp_dtensor"
    if wish.translate is not None:
        yield (source := rename(wish.translate(source), lambda name: name))
    elif not (opened.format in _MEGATRONS and to_megatron):
        if opened.format in _MEGATRONS:
            yield (source := between.translate(source, "left", published.originals))
        are_published = opened.format is Format.SAFETENSORS
        if published.untrained is not None or (wish.to == "hf" and published.shapes and not are_published):
            yield (source := between.as_published(source, published.shapes))
            yield (source := _completed(source, published.untrained))
            are_published = True
        if are_published and wish.to != "hf":
            yield (source := between.modules(source, published.shapes))
        if to_megatron:
            yield (source := between.translate(source, "right", published.originals))
    if to_megatron:
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


def _dtypes(source: Source, names: Iterable[str], dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """What each tensor is written as: weights are cast, and neither their scales nor optimizer state."""
    infos = {name: source.tensors[name] for name in names}
    return {
        name: info.dtype if name.startswith("optimizer.") or is_scale(source, name) else stored_dtype(info.dtype, dtype)
        for name, info in infos.items()
    }


def _most_common(source: Source, dtypes: Mapping[str, torch.dtype]) -> torch.dtype | None:
    """What most weights are, of those that are numbers: trained ones are fp32, whatever was published."""
    numels: dict[torch.dtype, int] = {}
    for name, dtype in dtypes.items():
        if dtype.is_floating_point and dtype.itemsize > 1:
            numels[dtype] = numels.get(dtype, 0) + prod(source.tensors[name].shape)
    return max(numels, key=lambda dtype: numels[dtype], default=None)


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


def _keep_originals(plan: _Plan, dtype: torch.dtype | None, folder: Path) -> tuple[str, ...]:
    """Keep, as it was, what a shift took bits from, if there is a folder for it."""
    kept: tuple[str, ...] = ()
    for layer in plan.layers if folder.is_dir() else ():
        if isinstance(layer, Translated) and (names := layer.take_lost()):
            write_safetensors_file(layer.source, _dtypes(layer.source, names, dtype), folder / ORIGINALS_FILE)
            kept = names
    return kept


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


def _check_arguments(to: str, float8: object, dialect: str, mtp_layer: str) -> None:
    if to not in _KEPT:
        raise ValueError(f"Expected `to` to be one of {tuple(_KEPT)}, got {to!r}.")
    if float8 and to != "hf":
        raise ValueError(f"Expected `float8` with to='hf' only, which has scales for it, got to={to!r}.")
    if dialect not in _DIALECTS:
        raise ValueError(f"Expected `dialect` to be one of {tuple(_DIALECTS)}, got {dialect!r}.")
    if mtp_layer not in MTP_LAYERS:
        raise ValueError(f"Expected `mtp_layer` to be one of {MTP_LAYERS}, got {mtp_layer!r}.")
