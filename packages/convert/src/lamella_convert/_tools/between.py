"""Names of tensors in three conventions, and the rules from each convention to the next."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from lamella_convert._errors import ModelUnknown
from lamella_convert._formats.open import Format, OpenCheckpoint, open_checkpoint
from lamella_convert._tools.published import Published, Shapes, completed
from lamella_convert._translation.families import PADDED_VOCABULARY, Family, find_family, known_model_types
from lamella_convert._translation.megatron import BRIDGE, MTP_LAYERS, RELEASE_0_19, Dialect, MtpLayer, spelled_as
from lamella_convert._translation.megatron import write_fsdp_dtensor as with_fsdp_dtensor_names
from lamella_convert._translation.rules import Rules, parameter_shapes
from lamella_convert._translation.translate import Translated
from lamella_convert._translation.translate import translate as translated
from lamella_files import (
    MODEL,
    Correspondence,
    Renamed,
    Side,
    Source,
    is_of_model,
    longest_known,
    own_name,
    rename,
    split_section,
)

_DIALECTS: Final[Mapping[str, Dialect]] = {dialect.name: dialect for dialect in (RELEASE_0_19, BRIDGE)}


class Convention(IntEnum):
    """A convention for names, in the order of the rules' steps."""

    PUBLISHED = 0
    """Hugging Face's files."""
    MODULES = 1
    """transformers' modules: a run's own checkpoints."""
    MEGATRON = 2
    """Megatron's canonical names."""


_OF_FORMAT: Final = {
    Format.SAFETENSORS: Convention.PUBLISHED,
    Format.FSDP_DTENSOR: Convention.MEGATRON,
    Format.TORCH_DIST: Convention.MEGATRON,
}


def convention_of(opened: OpenCheckpoint) -> Convention:
    """The convention of an open checkpoint's native names."""
    return _OF_FORMAT.get(opened.format, Convention.MODULES)


@dataclass(frozen=True, kw_only=True)
class MegatronOptions:
    """Facts about a Megatron run absent from its checkpoint, and the spelling of `fsdp_dtensor` to write.

    Attributes:
        dialect: The dialect of `fsdp_dtensor` to write: "release-0.19" or "bridge".
        mtp_layer: The name in `fsdp_dtensor` of the layer inside a multi-token prediction layer: "mtp_model_layer",
            or "transformer_layer" as in newer releases of megatron-core. Both are read. None for the spelling of the
            `fsdp_dtensor` that is read, or the release's.
        tensor_parallel_size: Number of ranks that wrote or will read `fsdp_dtensor`, for rank-major tensors. From one
            `fsdp_dtensor` to another: of the readers, and of the writers too where the checkpoint does not tell. None
            for the writers' number.
        padded_vocabulary: Rows for tokens in Megatron, with zeros behind the configuration's rows. None for the
            configuration's number. From Megatron, padding rows are always dropped, and listed in `inexact`
            if nonzero.

    Raises:
        ValueError: The dialect or the layer's name is unknown, or a number is below 1.
    """

    dialect: str = RELEASE_0_19.name
    mtp_layer: MtpLayer | None = None
    tensor_parallel_size: int | None = None
    padded_vocabulary: int | None = None

    def __post_init__(self) -> None:
        if self.dialect not in _DIALECTS:
            raise ValueError(f"Expected `dialect` to be one of {tuple(_DIALECTS)}, got {self.dialect!r}.")
        if self.mtp_layer not in (None, *MTP_LAYERS):
            raise ValueError(f"Expected `mtp_layer` to be one of {MTP_LAYERS}, got {self.mtp_layer!r}.")
        for name in ("tensor_parallel_size", "padded_vocabulary"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ValueError(f"Expected `{name}` of at least 1, or None, got {number!r}.")

    @property
    def written(self) -> Dialect:
        """The dialect to write."""
        dialect = _DIALECTS[self.dialect]
        return dialect if self.mtp_layer is None else dataclasses.replace(dialect, mtp_layer=self.mtp_layer)


@dataclass(frozen=True, kw_only=True)
class Between:
    """The rules between Hugging Face's names and Megatron's, for one configuration.

    Attributes:
        config: The model's configuration, or None without one.
        megatron: Facts about the Megatron run.
        strict: Refuse a model without all of its layers, experts or tensors of a rule, and drop tensors that no rule
            names on the way to or from Megatron: they are in the `left_over` of a layer. False: such tensors keep their
            names.
    """

    config: Mapping[str, Any] | None
    megatron: MegatronOptions
    strict: bool

    def write(self, source: Source, opened: OpenCheckpoint) -> Renamed:
        """`fsdp_dtensor`'s names over Megatron's canonical names, spelled as in the checkpoint that was opened."""
        dialect = self.megatron.written
        if opened.format is Format.FSDP_DTENSOR:
            dialect = spelled_as(opened.raw, dialect)
            dialect = dataclasses.replace(dialect, mtp_layer=self.megatron.mtp_layer or dialect.mtp_layer)
        elif opened.format is Format.TORCH_DIST:
            dialect = dataclasses.replace(dialect, final_norm=spelled_as(opened.raw, dialect).final_norm)
        return with_fsdp_dtensor_names(source, dialect, sizes=self.sizes())

    def modules(self, source: Source, published: Shapes) -> Translated:
        """Names of modules over the names in Hugging Face's files."""
        return translated(source, self._matched(self.config, published), to="right")

    def as_published(self, source: Source, published: Shapes) -> Translated:
        """Published names over the names of modules: of the whole model, or of its text model."""
        return translated(source, self._matched(self._config_of(source, published), published), to="left")

    def names_of_published(self, source: Source, published: Shapes) -> set[str]:
        """The names of modules for all published tensors."""
        matches = self._matched(self._config_of(source, published), published)
        matched_names = {name for match in matches for name in match.left}
        return {name for match in matches for name in match.right} | (set(published) - matched_names)

    def is_part(self, source: Source, published: Shapes) -> bool:
        """Whether a source with the names of modules is the text model of a larger model."""
        return self._config_of(source, published) is not self.config

    def _config_of(self, source: Source, published: Shapes) -> Mapping[str, Any] | None:
        text = None if self.config is None else _text_config(self.config)
        stored_shapes = parameter_shapes(source)
        is_text = text is not None and any(
            all(name in stored_shapes for name in match.right) for match in self._matched(text, published)
        )
        return text if is_text else self.config

    def _matched(self, config: Mapping[str, Any] | None, published: Shapes) -> list[Correspondence]:
        """Correspondences of files (left) and the modules of a configuration (right)."""
        family = None if config is None else find_family(str(config.get("model_type")))
        return (
            [] if family is None or config is None else self._counted(family.modules(config)).match(published, "left")
        )

    def translate(self, source: Source, to: Side, originals: Source | None = None) -> Translated:
        """Translate between the names of modules (left) and Megatron's canonical names (right)."""
        if self.config is None:
            raise ValueError(
                f"Expected a config.json that says which model {str(source.path)!r} is, to go between Hugging Face's "
                f"names and Megatron's, got none. Pass `like` (on the command line --config), or `translate`."
            )
        matches = self._rules(self.config).match(parameter_shapes(source), "left" if to == "right" else "right")
        return translated(source, matches, to=to, originals=originals)

    def without_unknown_names(self, translation: Translated, to: Side) -> Renamed:
        """A result of `translate` without the tensors that no rule names, which are in `left_over`.

        Raises:
            ValueError: A layer is missing, or one of the tensors that a rule joins.
        """
        assert self.config is not None  # `translate` would have refused.
        source = translation.source
        unknown = {own_name(name) for name in translation.left_over if name in source.tensors and is_of_model(name)}
        rules = self._rules(self.config)
        rules.check_complete(parameter_shapes(source), unknown, "left" if to == "right" else "right")
        rules.check_numbers(parameter_shapes(source if to == "right" else translation))

        def known_name(name: str) -> str | None:
            section, entry = split_section(name)
            parameter = entry if section == MODEL else longest_known(entry, unknown)[0] if section else None
            return None if parameter in unknown else name

        return rename(translation, known_name)

    def _rules(self, config: Mapping[str, Any]) -> Rules:
        family = self._family()
        if family is None:
            raise ModelUnknown(str(config.get("model_type")), known_model_types())
        rules = self._counted(family.megatron(config))
        if self.megatron.padded_vocabulary is None:
            return rules
        return dataclasses.replace(rules, sizes={**rules.sizes, PADDED_VOCABULARY: self.megatron.padded_vocabulary})

    def _counted(self, rules: Rules) -> Rules:
        """A family's rules, with the numbers of terms in stacks if these are checked."""
        return rules if self.strict else dataclasses.replace(rules, stacked={})

    def _family(self) -> Family | None:
        return None if self.config is None else find_family(str(self.config.get("model_type")))

    def open(self, path: Path, *, trust: bool, verify: bool) -> OpenCheckpoint:
        """Open a checkpoint. Where its files tell how many tensor-parallel ranks wrote, their number counts."""
        opened = open_checkpoint(path, trust=trust, verify=verify, sizes=self.sizes())
        return (
            opened
            if opened.recorded_ranks is None
            else opened.with_sizes(self.with_ranks(opened.recorded_ranks).sizes())
        )

    def with_ranks(self, tensor_parallel_size: int | None) -> "Between":
        """The same rules for another number of tensor-parallel ranks."""
        megatron = dataclasses.replace(self.megatron, tensor_parallel_size=tensor_parallel_size)
        return dataclasses.replace(self, megatron=megatron)

    def sizes(self) -> Mapping[str, int]:
        """Known sizes of the parts of Megatron's rank-major tensors."""
        family, tp = self._family(), self.megatron.tensor_parallel_size
        if family is None or self.config is None or tp is None:
            return {} if tp is None else {"tp": tp}
        return family.megatron_sizes(self.config, tensor_parallel_size=tp)


def _text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The text model's configuration in a model of several parts; None for a text model's configuration."""
    text = config.get("text_config")
    # The outer configuration decides on ties: the inner value may be a library's default.
    return {**text, "tie_word_embeddings": bool(config.get("tie_word_embeddings"))} if isinstance(text, dict) else None


def route(start: Convention, goal: Convention, *, by_published: bool) -> list[tuple[Convention, Convention]]:
    """The steps between two conventions, each between neighbours; via the published names if requested."""
    stops = [start, *([Convention.PUBLISHED] if by_published else []), goal]
    return [step for stop_pair in pairwise(stops) for step in _steps(*stop_pair)]


def _steps(start: Convention, goal: Convention) -> Iterator[tuple[Convention, Convention]]:
    towards = 1 if goal > start else -1
    return pairwise(map(Convention, range(start, goal + towards, towards)))


def layers_along(
    source: Source,
    steps: Iterable[tuple[Convention, Convention]],
    between: Between,
    published: Published,
) -> Iterator[Source]:
    """The layers of a route, each over the previous one.

    Args:
        source: The first layer.
        steps: The steps of the route.
        between: The rules of the steps.
        published: The Hugging Face directory behind the source.

    Raises:
        ModelUnknown: No package has rules for the configuration's model type.
        ValueError: The configuration is absent, or names cannot be translated; or the model is incomplete, by strict
            rules.
    """
    for start, goal in steps:
        for layer in _LAYERS[start, goal]:
            yield (source := layer(source, between, published))
        if between.strict and Convention.MEGATRON in (start, goal):
            assert isinstance(source, Translated)
            yield (source := between.without_unknown_names(source, "right" if goal is Convention.MEGATRON else "left"))


_Layer = Callable[[Source, Between, Published], Source]

_LAYERS: Final[Mapping[tuple[Convention, Convention], tuple[_Layer, ...]]] = {
    (Convention.MEGATRON, Convention.MODULES): (
        lambda source, between, published: between.translate(source, "left", published.originals),
    ),
    (Convention.MODULES, Convention.PUBLISHED): (
        lambda source, between, published: between.as_published(source, published.shapes),
        lambda source, _, published: completed(source, published.untrained),
    ),
    (Convention.PUBLISHED, Convention.MODULES): (
        lambda source, between, published: between.modules(source, published.shapes),
    ),
    (Convention.MODULES, Convention.MEGATRON): (
        lambda source, between, published: between.translate(source, "right", published.originals),
    ),
}
