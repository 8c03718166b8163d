"""The sources, names and dtypes of a conversion: decided before the first write."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final, Literal, cast

import torch

from lamella_checkpoint.extending import is_of_extra
from lamella_convert._formats.float8 import (
    BLOCK,
    Dequantised,
    Quantised,
    block_of,
    is_quantised,
    is_scale,
    linear_weights,
    plain_config,
    quantised_config,
    quantised_otherwise,
)
from lamella_convert._formats.hf_files import with_dtype
from lamella_convert._formats.open import Format, OpenCheckpoint
from lamella_convert._formats.safetensors_write import stored_dtype
from lamella_convert._formats.untrained import Completed
from lamella_convert._tools.between import Between, Convention, convention_of, layers_along, route
from lamella_convert._tools.overflows import CountedOverflows
from lamella_convert._tools.published import Published, ties_of
from lamella_convert._translation.megatron_args import EXPECTED_OBJECTS
from lamella_convert._translation.torch_dist import is_of_buckets
from lamella_convert._translation.translate import Translated
from lamella_convert._translation.translation_plan import short_dtype
from lamella_files import (
    MODEL,
    Renamed,
    Source,
    TensorInfo,
    WithObjects,
    encode_extra,
    in_model,
    is_of_model,
    own_name,
    rename,
)

Target = Literal["dcp", "hf", "torch", "fsdp_dtensor"]
"""A format for `convert` to write."""

_OF_TARGET: Final[Mapping[Target, Convention]] = {
    "dcp": Convention.MODULES,
    "torch": Convention.MODULES,
    "hf": Convention.PUBLISHED,
    "fsdp_dtensor": Convention.MEGATRON,
}


@dataclass(frozen=True, kw_only=True)
class Wish:
    """The arguments of `convert` for names, dtypes and encodings of the target."""

    to: Target
    translate: Callable[[Source], Source] | None
    dtype: torch.dtype | None
    float8: bool | Callable[[str, TensorInfo], bool] | None

    @property
    def wants_numbers(self) -> bool:
        """Whether float8 weights are dequantised."""
        return self.float8 is False or (self.float8 is None and self.to != "hf")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A source under the target's names; the tensors to write, and their dtypes.

    Attributes:
        source: The tensors and objects to read.
        dtypes: The tensors to write, by name.
        ties: Further names of tensors.
        dropped_names: Unwritten names of the source.
        layers: Sources between the checkpoint and `source`, each over the previous one.
        absent: Unwritten published names.
        config: The configuration for the tensors, if any.
        rounded: Reasons, by name, for weights whose main weights are not read.
    """

    source: Source
    dtypes: Mapping[str, torch.dtype]
    ties: Mapping[str, str]
    dropped_names: tuple[str, ...]
    layers: tuple[Source, ...]
    absent: tuple[str, ...]
    config: Mapping[str, Any] | None
    rounded: Mapping[str, str]

    @property
    def untrained(self) -> tuple[str, ...]:
        """Published names of weights from the side files, not trained by the run."""
        added = [name for layer in self.layers if isinstance(layer, Completed) for name in layer.added]
        return tuple(map(own_name, added))

    @property
    def inexact(self) -> dict[str, str]:
        """Reasons, by name, for tensors without an exact way back; for values, known after the read."""
        translated = [layer for layer in self.layers if isinstance(layer, Translated)]
        overflows = self.source.reasons if isinstance(self.source, CountedOverflows) else {}
        reasons = {name: why for layer in translated for name, why in layer.inexact.items()}
        return {**self.rounded, **reasons, **overflows}

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the written tensors."""
        tensors = self.source.tensors
        return sum(prod(tensors[name].shape) * dtype.itemsize for name, dtype in self.dtypes.items())


def plan_of(opened: OpenCheckpoint, wish: Wish, between: Between, published: Published) -> Plan:
    """Lay the source under the target's names, layer by layer."""
    ties = ties_of(opened, between.names_of_published(opened.source, published.shapes))
    source, written_ties = _without_ties(_stored(opened, wish), ties, wish, published)
    source = _as_numbers(source, wish, between)
    layers = list(_translations(source, opened, wish, between, published))
    named = rename(layers[-1] if layers else source, KEPT[wish.to])
    written = _as_float8(named, wish)
    if wish.to == "dcp" and (extra_by_rank := extra_by_rank_of(opened)):
        written = WithObjects(written, extra_by_rank)
    names = (name for name in written.tensors if name not in written_ties)
    dtypes = dtypes_of(written, names, wish.dtype, have_sections=wish.to != "hf")
    return Plan(
        source=written if wish.dtype is None else CountedOverflows(written),
        dtypes=dtypes,
        ties=written_ties,
        dropped_names=(*_unknown_names(layers), *_dropped_names(opened, wish, named)),
        layers=(*layers, named),
        absent=_absent(written, wish, published, ties),
        config=_config_of(written, between.config, _config_dtype(opened, wish, written, dtypes)),
        rounded=_rounded(opened, written, dtypes),
    )


def _stored(opened: OpenCheckpoint, wish: Wish) -> Source:
    """Native names; float8 weights of safetensors as stored if they stay float8."""
    keeps_float8 = opened.format is Format.SAFETENSORS and not wish.wants_numbers
    return rename(opened.raw, in_model) if keeps_float8 else opened.source


def _without_ties(
    source: Source, ties: Mapping[str, str], wish: Wish, published: Published
) -> tuple[Source, Mapping[str, str]]:
    """One name for each tensor if names are about to change or the target has no ties; and the remaining ties."""
    if wish.translate is None and wish.to in ("dcp", "torch") and published.untrained is None:
        return source, ties
    return rename(source, lambda name: None if name in ties else name), {}


def _as_numbers(source: Source, wish: Wish, between: Between) -> Source:
    method = quantised_otherwise(source, between.config)
    if method is not None and (wish.dtype is not None or wish.float8):
        raise NotImplementedError(
            f"Expected plain weights for `dtype` and `float8`, or fp8 with block scales, got weights quantised by "
            f"{method!r}: their scales would be rounded or lost. Leave both out, or dequantise with the library that "
            f"quantised."
        )
    if not (is_quantised(source) and wish.wants_numbers):
        return source
    return Dequantised(source, dtype=wish.dtype or torch.bfloat16, block=block_of(between.config or {}))


def _as_float8(source: Source, wish: Wish) -> Source:
    if not wish.float8 or is_quantised(source):
        return source
    quantised = Quantised(source, is_chosen=linear_weights if wish.float8 is True else wish.float8)
    if not is_quantised(quantised):
        raise ValueError(
            f"Expected weights to encode in float8 (of linear layers, with rows and columns in blocks of "
            f"{BLOCK[0]} by {BLOCK[1]}), got none among {len(source.tensors)} tensors of {str(source.path)!r}. Leave "
            f"`float8` out, or choose weights by a function."
        )
    return quantised


def _translations(
    source: Source, opened: OpenCheckpoint, wish: Wish, between: Between, published: Published
) -> Iterator[Source]:
    """The layers from a checkpoint's names to the target's, each over the previous one."""
    layers: Iterable[Source]
    if wish.translate is not None:
        layers = [rename(wish.translate(source), lambda name: name)]
    else:
        layers = layers_along(source, _route(opened, wish, published), between, published)
    for layer in layers:
        yield (source := layer)
    if wish.to == "fsdp_dtensor":
        counters = {name: value for name, value in opened.extra.items() if name in EXPECTED_OBJECTS}
        lacking = {name: value for name, value in counters.items() if name not in source.objects}
        yield between.write(WithObjects(source, lacking), opened)


def _route(opened: OpenCheckpoint, wish: Wish, published: Published) -> list[tuple[Convention, Convention]]:
    """The route; a run's untrained weights join under the published names, except between two Megatron formats."""
    start, goal = convention_of(opened), _OF_TARGET[wish.to]
    joins = published.untrained is not None and not start == goal == Convention.MEGATRON
    return route(start, goal, by_published=joins)


def _unknown_names(layers: Iterable[Source]) -> Iterator[str]:
    """Names that a family's rules do not know, under the names before the step."""
    for layer in layers:
        if isinstance(layer, Renamed) and not isinstance(layer, Translated):
            yield from layer.left_over


def _dropped_names(opened: OpenCheckpoint, wish: Wish, named: Renamed) -> tuple[str, ...]:
    """Names without a place in the target; random states of a Megatron checkpoint's processes."""
    keys_by_rank = opened.manifest.extra_by_rank if opened.manifest is not None else ()
    kept = set(_names_by_rank(opened))  # Their keys are listed, if any.
    if wish.to == "dcp":
        kept.update(extra_of(opened), keys_by_rank)
    elif wish.to == "fsdp_dtensor":
        kept.update(EXPECTED_OBJECTS)
    is_megatrons = convention_of(opened) is Convention.MEGATRON and isinstance(opened.source, Renamed)
    dropped = cast(Renamed, opened.source).left_over if is_megatrons else ()
    # A manifest's `extra` is no object of the source: `left_over` lacks the names.
    names = dict.fromkeys((*named.left_over, *opened.extra, *keys_by_rank))
    return (*dropped, *(name for name in names if name not in kept))


def _rounded(opened: OpenCheckpoint, source: Source, names: Iterable[str]) -> dict[str, str]:
    """Reasons, by name, for weights whose wider main weights stay behind in buckets: Note [Buckets]."""
    if not any(map(is_of_buckets, opened.raw.objects)):
        return {}
    dtypes = {name: source.tensors[name].dtype for name in names}
    return {
        name: f"{short_dtype(dtype)}: its main weight is left out; save with --dist-ckpt-optim-fully-reshardable"
        for name, dtype in dtypes.items()
        if dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
    }


def _absent(source: Source, wish: Wish, published: Published, ties: Mapping[str, str]) -> tuple[str, ...]:
    if wish.to != "hf" or wish.translate is not None:
        return ()
    return tuple(name for name in published.shapes if name not in source.tensors and in_model(name) not in ties)


def _config_dtype(
    opened: OpenCheckpoint, wish: Wish, source: Source, dtypes: Mapping[str, torch.dtype]
) -> torch.dtype | None:
    """The dtype to write into the configuration; None keeps the present one."""
    if opened.format is Format.SAFETENSORS:
        return wish.dtype
    return wish.dtype or _most_common(source, dtypes)


def section_name(name: str) -> str | None:
    """The name, for a model's or an optimizer's; else None."""
    return name if name.startswith((MODEL, "optimizer.")) else None


def _model_name(name: str) -> str | None:
    return own_name(name) if is_of_model(name) else None


KEPT: Final[Mapping[Target, Callable[[str], str | None]]] = {
    "dcp": section_name,
    "torch": section_name,
    "hf": _model_name,
    "fsdp_dtensor": lambda name: name,
}
"""The name of a native name in each format; None if the format has no place for the value."""


def dtypes_of(
    source: Source, names: Iterable[str], dtype: torch.dtype | None, *, have_sections: bool = True
) -> dict[str, torch.dtype]:
    """The dtype of each tensor in the target: weights are cast; scales and optimizer state are not.

    Args:
        source: The tensors to write.
        names: The names of some of them.
        dtype: The dtype of cast weights; None casts none.
        have_sections: Whether names tell the optimizer's state by `optimizer.`; False for a model's own names, among
            which a submodule may be called so.
    """

    def keeps_dtype(name: str) -> bool:
        return (have_sections and name.startswith("optimizer.")) or is_scale(source, name)

    infos = {name: source.tensors[name] for name in names}
    return {name: info.dtype if keeps_dtype(name) else stored_dtype(info.dtype, dtype) for name, info in infos.items()}


def _most_common(source: Source, dtypes: Mapping[str, torch.dtype]) -> torch.dtype | None:
    """The dtype of most elements, float8 aside: trained weights are fp32, whatever the published dtype."""
    numels: dict[torch.dtype, int] = {}
    for name, dtype in dtypes.items():
        if dtype.is_floating_point and dtype.itemsize > 1:
            numels[dtype] = numels.get(dtype, 0) + prod(source.tensors[name].shape)
    return max(numels, key=lambda dtype: numels[dtype], default=None)


def _config_of(source: Source, config: Mapping[str, Any] | None, dtype: torch.dtype | None) -> Mapping[str, Any] | None:
    """The configuration with the dtype and the encoding of the weights."""
    if config is None:
        return None
    if isinstance(source, Quantised):
        config = quantised_config(config, source.left_alone)
    elif not is_quantised(source) and quantised_otherwise(source, config) is None:
        config = plain_config(config)
    return config if dtype is None else with_dtype(config, dtype)


def extra_of(opened: OpenCheckpoint) -> dict[str, Any]:
    """Values beside the sections that `extra` of a checkpoint holds."""
    return {name: value for name, value in opened.extra.items() if _is_plain(name, value)}


def extra_by_rank_of(opened: OpenCheckpoint) -> dict[str, object]:
    """The objects of `extra` whose values differ between the ranks that saved, by their names in a checkpoint."""
    return {name: opened.source.read_object(name) for name in _names_by_rank(opened)}


def _names_by_rank(opened: OpenCheckpoint) -> list[str]:
    if opened.manifest is None or not opened.manifest.extra_by_rank:
        return []
    return [name for name in opened.source.objects if is_of_extra(name)]


def _is_plain(name: str, value: object) -> bool:
    try:
        encode_extra({name: value})
    except TypeError:
        return False
    return True
