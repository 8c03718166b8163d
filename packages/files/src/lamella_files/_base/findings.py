"""Results of a verification: problems file by file, and the bytes that were read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lamella_files._base.directories import unless_gone
from lamella_files._base.errors import CheckpointDamaged, CheckpointUntrusted
from lamella_files._base.text import printable

T = TypeVar("T")

OnProgress = Callable[[int, int], None]
"""Called with the number of bytes read so far, and the total."""


class Problem(NamedTuple):
    """A problem of a file."""

    file: str
    problem: str

    def __str__(self) -> str:
        return printable(f"{self.file}: {self.problem}")


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of a verification; true when the checkpoint is whole.

    Attributes:
        path: The path of the file or directory.
        problems: Problems, file by file.
        unneeded: Names of data files without a reference from the checkpoint. Harmless.
        notes: Sentences about whole files in a form that checkpoint readers may not expect.
        num_bytes: Number of bytes read.
        num_unverified_bytes: The bytes without a checksum among these: present, and of the right shape.
    """

    path: Path
    problems: tuple[Problem, ...]
    unneeded: tuple[str, ...]
    num_bytes: int
    num_unverified_bytes: int
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.problems

    def lines(self) -> Iterator[str]:
        """The findings as text."""
        yield from map(str, self.problems)
        if self.unneeded:
            yield printable(f"not needed: {', '.join(self.unneeded)}")
        yield from map(printable, self.notes)
        if self.num_unverified_bytes:
            yield f"{self.num_unverified_bytes} of {self.num_bytes} bytes have no checksum"
        state = "whole" if self else f"damaged, {len(self.problems)} problems"
        yield printable(f"{self.path}: {state}, {self.num_bytes} bytes read")

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def as_json(self) -> dict[str, Any]:
        """The same for programs: plain data that JSON can hold."""
        return {
            "path": str(self.path),
            "whole": bool(self),
            "problems": [problem._asdict() for problem in self.problems],
            "unneeded": list(self.unneeded),
            "notes": list(self.notes),
            "num_bytes": self.num_bytes,
            "num_unverified_bytes": self.num_unverified_bytes,
        }


class Findings:
    """A verification under way: problems are noted, bytes counted.

    Attributes:
        path: The file or directory.
        total: Number of bytes to read; set before the first `count`.
        problems: The problems found so far, file by file.
        unneeded: Names of data files without a reference from the checkpoint.
        notes: Sentences about files in a form that readers of checkpoints may not expect.
        num_bytes: The number of bytes read so far.
        num_unverified_bytes: The number of bytes read so far that have no checksum.
    """

    def __init__(self, path: Path, on_progress: OnProgress) -> None:
        """Begin with no problem and no byte read."""
        self.path = path
        self.total = 0
        self.problems: list[Problem] = []
        self.unneeded: list[str] = []
        self.notes: list[str] = []
        self.num_bytes = 0
        self.num_unverified_bytes = 0
        self._on_progress = on_progress

    def attempt(self, work: Callable[[], T]) -> T | None:
        """The result of `work`; None on damage, which is noted."""
        try:
            return work()
        except CheckpointDamaged as error:
            self.note(error)
            return None

    def note(self, error: CheckpointDamaged) -> None:
        """Add a problem, once."""
        problem = Problem(error.file, error.problem)
        if problem not in self.problems:
            self.problems.append(problem)

    def count(self, num_bytes: int) -> None:
        """Add read bytes, and report progress."""
        self.num_bytes += num_bytes
        self._on_progress(self.num_bytes, self.total)


def verification(path: Path, on_progress: OnProgress, check: Callable[[Findings], None]) -> Verification:
    """Run `check`, and sum up its findings.

    Raises:
        FileNotFoundError: The path was removed or replaced during the check.
        CheckpointUntrusted: `check` meets a type that may run code. Other damage is a problem in the result.
    """
    findings = Findings(path, on_progress)
    try:
        with unless_gone(path):
            check(findings)
    except CheckpointUntrusted:
        raise
    except CheckpointDamaged as error:
        findings.note(error)
    return Verification(
        path=path,
        problems=tuple(findings.problems),
        unneeded=tuple(findings.unneeded),
        notes=tuple(findings.notes),
        num_bytes=findings.num_bytes,
        num_unverified_bytes=findings.num_unverified_bytes,
    )
