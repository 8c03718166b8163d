"""Options: dataclass fields annotated with help, command-line name and bounds.

A field is declared once, `steps: Annotated[int, Option("Optimizer steps.", at_least=1)] = 250`. The command line,
its help and the checks of a configuration file follow from the declaration.
"""

import dataclasses
import difflib
import math
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

if typing.TYPE_CHECKING:
    from _typeshed import DataclassInstance


LARGEST: Final = 2**63 - 1
"""The largest integer of a setting."""

_SHOWN_LENGTH: Final = 80


class ConfigError(ValueError):
    """A run cannot start with the given settings. The message is one line and names the way out."""


@dataclass(frozen=True)
class Option:
    """A field's help, its command-line name if different from the field's name, and the bounds of its value.

    `metavar` stands for a text in the help; without it, the option's name does, and PATH in a list. A value is finite
    unless `may_be_infinite`.
    """

    help: str
    name: str | None = None
    metavar: str | None = None
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    may_be_infinite: bool = False

    def bounds(self) -> str:
        """Return the bounds in words, or an empty string."""
        words = {"of at least": self.at_least, "above": self.above, "below": self.below}
        return " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)

    def admits(self, value: float) -> bool:
        """True for values within the bounds; integers fit into 64 bits, as they must in tensors and files."""
        return (
            (abs(value) <= LARGEST if isinstance(value, int) else self.may_be_infinite or math.isfinite(value))
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a group of options, with its type and default."""

    name: str
    kind: object
    option: Option
    default: object

    @property
    def flag(self) -> str:
        """The name on the command line, with its dashes."""
        return "--" + (self.option.name or self.name).replace("_", "-")


def fields_of(cls: "type[DataclassInstance]") -> tuple[Field, ...]:
    """Return the options declared by a dataclass, in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(_field(field, *typing.get_args(hints[field.name])) for field in dataclasses.fields(cls))


def _field(field: "dataclasses.Field[object]", kind: object, option: Option) -> Field:
    return Field(name=field.name, kind=kind, option=option, default=field.default)


def check_fields(values: "DataclassInstance") -> None:
    """Refuse values of the wrong type or out of bounds.

    Raises:
        ConfigError: Names the command-line option, the expected type or bounds, and the value.
    """
    for field in fields_of(type(values)):
        _check(getattr(values, field.name), field)


def _check(value: object, field: Field) -> None:
    if not _is_kind(value, field.kind):
        raise ConfigError(f"Expected {field.flag} to be {describe(field.kind)}, got {shown(value)}.")
    if isinstance(value, int | float) and not isinstance(value, bool) and not field.option.admits(value):
        bounds = field.option.bounds()
        if isinstance(value, int) and value > LARGEST:
            bounds = f"of at most {LARGEST}"
        elif isinstance(value, float) and not field.option.may_be_infinite and not math.isfinite(value):
            bounds = f"to be a finite number {bounds}".rstrip()
        raise ConfigError(f"Expected {field.flag} {bounds}, got {shown(value)}.")
    if value == "" and field.option.metavar == "FOLDER":  # else an unset variable would name the current folder
        raise ConfigError(f"Expected {field.flag} to be a folder, got ''. Leave it out for the default.")
    texts = value if isinstance(value, tuple) else (value,)
    if any(isinstance(text, str) and "\0" in text for text in texts):
        raise ConfigError(f"Expected {field.flag} without NUL characters, got {shown(value)}.")


def _is_kind(value: object, kind: object) -> bool:
    if typing.get_origin(kind) is Literal:
        return isinstance(value, str) and value in typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(isinstance(text, str) for text in value)
    if isinstance(kind, types.UnionType):
        return any(_is_kind(value, member) for member in typing.get_args(kind))
    return type(value) is kind or (kind is float and type(value) is int)


def describe(kind: object) -> str:
    """Return a field's type in words."""
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(kind)))
    if isinstance(kind, types.UnionType):
        return describe(inner(kind))
    words: Mapping[object, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return words.get(kind, "a list of texts")


def inner(kind: object) -> object:
    """Return a type without its `| None`."""
    if isinstance(kind, types.UnionType):
        return next(member for member in typing.get_args(kind) if member is not type(None))
    return kind


def nearest(word: str, words: Iterable[str]) -> str:
    """Return ` Did you mean ...?` with the closest known word, else an empty string."""
    close = difflib.get_close_matches(word, list(words), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def shown(value: object) -> str:
    """Return a value for an error message, cut to a readable length."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or an integer of thousands of digits
        return f"{type(value).__name__} too long to print"
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}..."


def in_short(error: Exception) -> str:
    """Return a library's error message on one line of at most 240 characters, ending in a full stop."""
    return textwrap.shorten(" ".join(str(error).split()), 240).rstrip(".") + "."
