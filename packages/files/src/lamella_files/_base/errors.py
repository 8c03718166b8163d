"""Errors of saves and loads, raised on every rank alike, and their messages."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from lamella_files._base.text import printable, short

_LINES_SHOWN = 10

TIED: Final = "tied to it"
"""`NameDifference.live` of a name tied in the model, whose values in the checkpoint differ from the tie's."""


class NameDifference(NamedTuple):
    """One name absent on one side (checkpoint or live), with different shapes, or with other values than its tie.

    `saved` and `live` are shapes as text; None means absent on this side. See `Differences.tied` for ties.
    """

    name: str
    saved: str | None
    live: str | None

    def __str__(self) -> str:
        saved = "absent from the checkpoint" if self.saved is None else f"{self.saved} in the checkpoint"
        live = "unknown here" if self.live is None else f"{self.live} here"
        return printable(f"{self.name}: {saved}, {live}")


class OptionConflict(NamedTuple):
    """One option with two checkpoint values for parameters of one live parameter group.

    A parameter without the option in the checkpoint has a value that prints as "no value".
    """

    option: str
    group: int
    first: str
    first_value: object
    second: str
    second_value: object

    def __str__(self) -> str:
        first, second = short(self.first_value), short(self.second_value)
        return printable(
            f"{self.option}: {first} for {self.first} and {second} for {self.second} in the checkpoint, "
            f"both in parameter group {self.group} here"
        )


@dataclass(frozen=True, kw_only=True)
class Differences:
    """All differences between a checkpoint and the live state, in the live model's order; false if none.

    `kinds` is set when the saved optimizer cannot resume as the live one: the two classes by name.
    """

    names: tuple[NameDifference, ...] = ()
    conflicts: tuple[OptionConflict, ...] = ()
    kinds: tuple[str, str] | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        """Live names absent from the checkpoint."""
        return tuple(difference.name for difference in self.names if difference.saved is None)

    @property
    def unexpected(self) -> tuple[str, ...]:
        """Checkpoint names unknown on the live side."""
        return tuple(difference.name for difference in self.names if difference.live is None)

    @property
    def shapes(self) -> tuple[NameDifference, ...]:
        """Common names with different shapes."""
        return tuple(
            difference
            for difference in self.names
            if difference.saved is not None and difference.live not in (None, TIED)
        )

    @property
    def tied(self) -> tuple[str, ...]:
        """Names tied in the model to another name, which has other values in the checkpoint."""
        return tuple(difference.name for difference in self.names if difference.live == TIED)

    def __bool__(self) -> bool:
        return bool(self.names or self.conflicts or self.kinds)

    def lines(self) -> Iterator[str]:
        """The differences as text, first differences first."""
        if self.kinds is not None:
            yield printable(f"optimizer: a {self.kinds[0]} in the checkpoint, a {self.kinds[1]} here")
        yield from map(str, self.names)
        yield from map(str, self.conflicts)

    def __str__(self) -> str:
        lines = [f"  {line}" for line in islice(self.lines(), _LINES_SHOWN)]
        num_hidden = len(self.names) + len(self.conflicts) + (self.kinds is not None) - len(lines)
        return "\n".join([*lines, f"  and {num_hidden} more"] if num_hidden else lines)


class CheckpointMismatch(ValueError):
    """A checkpoint of another model, or of the same model with another optimizer. Nothing has been loaded.

    `way_out` is a hint besides `strict=False`.
    """

    def __init__(self, path: str, differences: Differences, way_out: str = "") -> None:
        super().__init__(path, differences, way_out)
        self.path = path
        self.differences = differences
        self.way_out = way_out

    def __str__(self) -> str:
        return (
            f"Expected the checkpoint {self.path!r} to hold this model, got these differences:\n"
            f"{self.differences}\nTo load every match and leave the rest, pass strict=False. {self.way_out}".rstrip()
        )

    @property
    def missing(self) -> tuple[str, ...]:
        """Live names absent from the checkpoint."""
        return self.differences.missing

    @property
    def unexpected(self) -> tuple[str, ...]:
        """Checkpoint names unknown on the live side."""
        return self.differences.unexpected

    @property
    def shapes(self) -> tuple[NameDifference, ...]:
        """Common names with different shapes."""
        return self.differences.shapes


class CheckpointDamaged(ValueError):
    """A checkpoint with a missing, truncated or corrupt file."""

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(file, problem)
        self.file = file
        self.problem = problem

    def __str__(self) -> str:
        return f"Expected a whole checkpoint, got a damaged file {self.file!r}: {self.problem}"


class CheckpointUntrusted(CheckpointDamaged):
    """A checkpoint with more than data: a type that could run code when unpickled. Nothing has run.

    `type_name` is the type's full name, and `entry` the stored name of the value, unless the type is in the file's own
    data.
    """

    def __init__(self, file: str, type_name: str, entry: str | None = None) -> None:
        super().__init__(file, f"it holds {type_name}")
        self.type_name = type_name
        self.entry = entry

    def __str__(self) -> str:
        where = repr(self.file) if self.entry is None else f"{self.entry!r} of {self.file!r}"
        return (
            f"Expected plain data in {where}, got {self.type_name}, which may run code when it is read. "
            f"If you trust where the checkpoint comes from, pass trust=True (on the command line --trust)."
        )


class FormatUnknown(CheckpointDamaged):
    """Files in no checkpoint format known to the reader.

    `expected` names the formats, and `way_out` suggests how to go on.
    """

    def __init__(
        self, file: str, problem: str, *, expected: str = "a checkpoint of a format that is known", way_out: str = ""
    ) -> None:
        super().__init__(file, problem)
        self.expected = expected
        self.way_out = way_out

    def __str__(self) -> str:
        return f"Expected {self.expected} in {self.file!r}, got {self.problem}. {self.way_out}".rstrip()


class CheckpointFailed(RuntimeError):
    """A save or a load that failed on other ranks; each failed rank raises its own error."""

    def __init__(self, step: str, failures: Mapping[int, str]) -> None:
        super().__init__(step, failures)
        self.step = step
        self.failures = failures

    def __str__(self) -> str:
        failures = "\n".join(f"  rank {rank}: {text}" for rank, text in sorted(self.failures.items()))
        return f"Expected every rank to {self.step}, got errors:\n{failures}"
