"""An open checkpoint, ready for a live model: native names, and the values beside the tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lamella_checkpoint._base.manifest import Manifest
from lamella_checkpoint._base.sections import Keys, LiveNames, to_native
from lamella_files import CheckpointUntrusted, Source, is_plain


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A checkpoint under native names; no tensor has been read.

    Attributes:
        source: Names as `model.<name>`, `optimizer.state.<name>.<slot>`, `optimizer.param_groups.<name>.<option>`.
        extra: Plain values beside the tensors: `save`'s `extra`, or the entries of other programs.
        stripped: Keys and prefixes removed from stored names.
        manifest: The manifest, for a checkpoint from `save`.
        identity: Differs between two saves to the same path; None for a format without such a mark.
        way_out: A sentence for the error if the names are not the model's.
    """

    source: Source
    extra: dict[str, Any] = field(default_factory=dict)
    stripped: tuple[str, ...] = ()
    manifest: Manifest | None = None
    identity: str | None = None
    way_out: str = ""

    @property
    def path(self) -> Path:
        """The file or directory."""
        return self.source.path


@runtime_checkable
class ForLive(Protocol):
    """An open checkpoint whose native names depend on the live model."""

    def for_live(self, names: LiveNames) -> Opened:
        """The checkpoint under the native names of a live model."""


def native(
    raw: Source, paths: Mapping[str, Keys], live: LiveNames | None = None, *, identity: str | None = None
) -> Opened:
    """A checkpoint of another program under native names: Notes [Locating sections] and [Optimizers by group].

    Args:
        raw: With the stored names.
        paths: The keys on the path to a value, by name; an absent name is a single key.
        live: The names to find; None strips only the prefix that DDP adds.
        identity: A mark that differs between two saves to the same path; None for a format without such a mark.

    Raises:
        ValueError: Two names would become one.

    Effects: reads plain values beside the sections, the options of an optimizer that keeps groups, and no tensor.
    """
    sections = to_native(raw, paths, live)
    extra = _extra_values(raw, sections.source, paths)
    return Opened(source=sections.source, extra=extra, stripped=sections.stripped, identity=identity)


def _extra_values(raw: Source, source: Source, paths: Mapping[str, Keys]) -> dict[str, Any]:
    """Plain values beside the sections: an epoch, a step."""
    extra: dict[str, Any] = {}
    raw_objects = frozenset(raw.objects)
    for name in source.objects:
        if name in raw_objects and len(paths.get(name, (name,))) == 1:
            try:
                value = raw.read_object(name)
            except CheckpointUntrusted:
                continue  # The error is raised when a caller asks for the value.
            if is_plain(value) or isinstance(value, dict):
                extra[name] = value
    return extra
