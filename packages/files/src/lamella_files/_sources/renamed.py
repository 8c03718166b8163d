"""A checkpoint under other names, or with more objects: a `Source` over a `Source` that reads the same files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Self

from lamella_files._sources.source import Over, Source, Wanted


class Renamed(Over):
    """A `Source` over another with other names; made by `rename`.

    Attributes:
        source: The `Source` below, under its own names.
        left_over: Names of the `Source` below without a name here, in order.
    """

    def __init__(self, source: Source, origins: Mapping[str, str], left_over: Iterable[str] = ()) -> None:
        """Give names to tensors and objects of another source.

        Args:
            source: The tensors and objects under their present names.
            origins: Present names by new names.
            left_over: Present names without a new name.
        """
        tensors = source.tensors
        super().__init__(source, {new: tensors[old] for new, old in origins.items() if old in tensors})
        self._origins = dict(origins)
        self.left_over = tuple(left_over)

    def leaving(self, names: Iterable[str]) -> Self:
        """The same source with another `left_over`: of several layers of names, the caller picks the relevant layer."""
        other = copy(self)
        other.left_over = tuple(names)
        return other

    @property
    def origins(self) -> dict[str, str]:
        """Names of tensors in the source below, by the names here."""
        return {new: self._origins[new] for new in self._tensors}

    @property
    def objects(self) -> Sequence[str]:
        """Objects under their new names."""
        return tuple(new for new in self._origins if new not in self._tensors)

    def read(self, requests: Sequence[Wanted]) -> None:
        """As `Source.read`, in one read of the source below."""
        self.source.read([Wanted(self._origins[name], chunk, into) for name, chunk, into in requests])

    def read_object(self, name: str) -> object:
        """As `Source.read_object`."""
        return self.source.read_object(self._origins[name])


class WithObjects(Over):
    """A `Source` with further objects of given values, which take precedence over stored objects of the same name."""

    def __init__(self, source: Source, objects: Mapping[str, object]) -> None:
        super().__init__(source)
        self._added_objects = dict(objects)

    @property
    def objects(self) -> Sequence[str]:
        """The underlying objects, and the given ones."""
        return (*(name for name in self.source.objects if name not in self._added_objects), *self._added_objects)

    def read_object(self, name: str) -> object:
        """The given value, or the underlying value."""
        return self._added_objects[name] if name in self._added_objects else self.source.read_object(name)


def rename(source: Source, names: Callable[[str], str | None]) -> Renamed:
    """A checkpoint under other names, as when a format's sections become native names.

    Args:
        source: Any names.
        names: Maps each name to the new name; None drops the name.

    Raises:
        ValueError: Two names would become one.

    Effects: reads nothing.
    """
    origins: dict[str, str] = {}
    left_over = []
    for name in (*source.tensors, *source.objects):
        new = names(name)
        if new is None:
            left_over.append(name)
            continue
        if new in origins:
            raise ValueError(two_names(new, [name]))
        origins[new] = name
    return Renamed(source, origins, left_over)


def two_names(name: str, made_of: Iterable[str]) -> str:
    """The message for two stored names that would become one."""
    return (
        f"Expected one value for {name!r}, got another, made of {sorted(made_of)!r}. Two names became one: "
        f"the rules are for other names, or the checkpoint has names of both sides."
    )
