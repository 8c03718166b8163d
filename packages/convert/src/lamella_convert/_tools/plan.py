"""What a conversion reads, under which names, and as what: decided before anything is written."""

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, Literal

import torch

from lamella_checkpoint import CheckpointDamaged, Correspondence, Source, TensorInfo
from lamella_checkpoint.dcp import StoredCheckpoint, check_extra
from lamella_checkpoint.sources import MODEL, Renamed, Side, WithObjects, in_model, is_of_model, own_name, rename
from lamella_convert._errors import ModelUnknown
from lamella_convert._formats.float8 import (
    Dequantised,
    Quantised,
    block_of,
    is_quantised,
    is_scale,
    linear_weights,
    plain_config,
    quantised_config,
)
from lamella_convert._formats.hf_files import read_published, with_dtype
from lamella_convert._formats.open import Format, OpenCheckpoint
from lamella_convert._formats.safetensors import SafetensorsSource, has_weights
from lamella_convert._formats.safetensors_write import stored_dtype
from lamella_convert._formats.torch_file import TorchFile
from lamella_convert._formats.untrained import ORIGINALS_FILE, UNTRAINED_FILE, Completed, kept_in
from lamella_convert._translation.families import PADDED_VOCABULARY, Family, find_family, known_model_types
from lamella_convert._translation.megatron import EXPECTED_OBJECTS, Dialect
from lamella_convert._translation.megatron import write_fsdp_dtensor as with_fsdp_dtensor_names
from lamella_convert._translation.translate import Translated, parameter_shapes
from lamella_convert._translation.translate import translate as translated

Target = Literal["dcp", "hf", "torch", "fsdp_dtensor"]
"""A format that `convert` writes."""

SIDE_FILES: Final = "hf"
"""The folder of a checkpoint that keeps what lay beside the weights in a Hugging Face directory."""

MEGATRONS: Final = frozenset({Format.FSDP_DTENSOR, Format.TORCH_DIST})

Shapes = Mapping[str, tuple[int, ...]]


# -- what is read -----------------------------------------------------------------------------------------------------


def beside_of(path: Path) -> Path | None:
    """Where a checkpoint keeps what lay beside the weights in a Hugging Face directory."""
    if (path / SIDE_FILES).is_symlink():
        raise CheckpointDamaged(str(path / SIDE_FILES), f"it leads outside, to {str((path / SIDE_FILES).resolve())!r}")
    if (path / SIDE_FILES).is_dir():
        return path / SIDE_FILES
    return path if has_weights(path) else None


@dataclass(frozen=True, kw_only=True)
class Published:
    """What is known of the Hugging Face directory that a checkpoint came from.

    Attributes:
        shapes: Of its weights by name; none where nobody kept them.
        untrained: Those of its weights that were kept because the checkpoint is without them.
        originals: Values that the checkpoint cannot hold exactly, from where it came.
    """

    shapes: Shapes
    untrained: Source | None
    originals: Source | None

    @classmethod
    def of(cls, opened: OpenCheckpoint, own: Path | None, beside: Path | None) -> "Published":
        """Of a checkpoint with a folder of its own perhaps, by the folder that counts."""
        weights: Source | None = opened.raw if opened.format is Format.SAFETENSORS else None
        untrained = kept_in(beside, UNTRAINED_FILE) if weights is None else None
        originals = kept_in(own, ORIGINALS_FILE) or kept_in(beside, ORIGINALS_FILE)
        if weights is None and beside is not None and has_weights(beside):
            weights = SafetensorsSource(beside)
        if weights is None:
            shapes = {} if beside is None else read_published(beside)
            return cls(shapes=shapes, untrained=untrained, originals=originals)
        shapes = {name: info.shape for name, info in weights.tensors.items() if not is_scale(weights, name)}
        return cls(shapes=shapes, untrained=untrained, originals=originals)


def completed(source: Source, untrained: Source | None) -> Source:
    """With what was kept because nobody trained it."""
    return source if untrained is None else Completed(source, untrained)


def _ties(opened: OpenCheckpoint, published: Container[str]) -> dict[str, str]:
    """Names of tensors that lie where another lies, by that other's name.

    Of this package's own checkpoints, and of files of `torch.save`; other formats cannot tell.
    The other is the one that was published, if either was: `published` are its names for what was.
    """
    firsts: dict[object, str] = {}
    ties: dict[str, str] = {}
    places = _places(opened)
    for name in sorted(places, key=lambda name: own_name(name) not in published):
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
        origins = native.origins if isinstance(native, Renamed) else {name: name for name in stored.tensors}
        return {
            name: stored.place(origin)
            for name, origin in origins.items()
            if is_of_model(name) and origin in stored.tensors and stored.tensors[origin].chunks[0].numel
        }
    return {}


# -- what is written --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Wish:
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
class Between:
    """What it takes to go from Hugging Face's names to Megatron's and back."""

    config: Mapping[str, Any] | None
    dialect: Dialect
    tensor_parallel_size: int | None
    padded_vocabulary: int | None = None

    def write(self, source: Source) -> Renamed:
        """From Megatron's canonical names to those of `fsdp_dtensor`."""
        return with_fsdp_dtensor_names(source, self.dialect, sizes=self.sizes())

    def modules(self, source: Source, published: Shapes) -> Translated:
        """From the names in Hugging Face's files to those of modules, where a family's differ."""
        return translated(source, self._matched(self.config, published), to="right")

    def as_published(self, source: Source, published: Shapes) -> Translated:
        """Back from the names of modules: of the whole model, or of the text model in it."""
        return translated(source, self._matched(self._config_of(source, published), published), to="left")

    def names_of_published(self, source: Source, published: Shapes) -> set[str]:
        """What the names that were published are in the source, which has those of modules."""
        found = self._matched(self._config_of(source, published), published)
        taken = {name for each in found for name in each.left}
        return {name for each in found for name in each.right} | (set(published) - taken)

    def is_part(self, source: Source, published: Shapes) -> bool:
        """Whether a source with the names of modules is the text model of one that has further parts."""
        return self._config_of(source, published) is not self.config

    def _config_of(self, source: Source, published: Shapes) -> Mapping[str, Any] | None:
        text = None if self.config is None else _text_config(self.config)
        held = parameter_shapes(source)
        is_text = text is not None and any(
            all(name in held for name in each.right) for each in self._matched(text, published)
        )
        return text if is_text else self.config

    @staticmethod
    def _matched(config: Mapping[str, Any] | None, published: Shapes) -> list[Correspondence]:
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
class Plan:
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
        return tuple(map(own_name, added))

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


def plan_of(opened: OpenCheckpoint, wish: Wish, between: Between, published: Published) -> Plan:
    """Lay what is read under what is wanted, layer by layer."""
    source, config = opened.source, between.config
    ties = all_ties = _ties(opened, between.names_of_published(source, published.shapes))
    if opened.format is Format.SAFETENSORS and not wish.wants_numbers:
        source = rename(opened.raw, in_model)  # Opened, what is float8 is numbers.
    if wish.translate is not None or wish.to in ("hf", "fsdp_dtensor") or published.untrained is not None:
        source, ties = rename(source, {name: name for name in _names(source) if name not in ties}.get), {}
    if is_quantised(source) and wish.wants_numbers:
        source = Dequantised(source, dtype=wish.dtype or torch.bfloat16, block=block_of(config or {}))
    layers: list[Source] = list(_translations(source, opened, wish, between, published))
    last = rename(layers[-1] if layers else source, KEPT[wish.to])
    layers.append(last)
    source = last
    if wish.float8 and not is_quantised(source):
        source = Quantised(source, which=linear_weights if wish.float8 is True else wish.float8)
    kept_beside = extra_of(opened) if wish.to == "dcp" else {}
    dtypes = dtypes_of(source, (name for name in source.tensors if name not in ties), wish.dtype)
    dtype = wish.dtype if opened.format is Format.SAFETENSORS else wish.dtype or _most_common(source, dtypes)
    absent = (name for name in published.shapes if name not in source.tensors and in_model(name) not in all_ties)
    return Plan(
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
    return source.left_over if opened.format in MEGATRONS and isinstance(source, Renamed) else ()


def _translations(
    source: Source, opened: OpenCheckpoint, wish: Wish, between: Between, published: Published
) -> Iterator[Source]:
    """The layers from a checkpoint's names to the target's, each over the one before.

    Between formats, the names are those of modules; what goes from Hugging Face to Hugging Face keeps its own.
    """
    to_megatron = wish.to == "fsdp_dtensor"
    if wish.translate is not None:
        yield (source := rename(wish.translate(source), lambda name: name))
    elif not (opened.format in MEGATRONS and to_megatron):
        if opened.format in MEGATRONS:
            yield (source := between.translate(source, "left", published.originals))
        are_published = opened.format is Format.SAFETENSORS
        if published.untrained is not None or (wish.to == "hf" and published.shapes and not are_published):
            yield (source := between.as_published(source, published.shapes))
            yield (source := completed(source, published.untrained))
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


def of_sections(name: str) -> str | None:
    """A name of the model or its optimizer, and of nothing else."""
    return name if name.startswith((MODEL, "optimizer.")) else None


def _of_model(name: str) -> str | None:
    return own_name(name) if is_of_model(name) else None


KEPT: Final[Mapping[Target, Callable[[str], str | None]]] = {
    "dcp": of_sections,
    "torch": of_sections,
    "hf": _of_model,
    "fsdp_dtensor": lambda name: name,
}
"""What each format calls a native name; None where it has no place for it."""


def dtypes_of(source: Source, names: Iterable[str], dtype: torch.dtype | None) -> dict[str, torch.dtype]:
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


def extra_of(opened: OpenCheckpoint) -> dict[str, Any]:
    """What lay beside the sections, as far as it is plain."""
    return {name: value for name, value in opened.extra.items() if _is_plain(name, value)}


def _is_plain(name: str, value: object) -> bool:
    try:
        check_extra({name: value})
    except TypeError:
        return False
    return True
