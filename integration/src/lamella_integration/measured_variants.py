"""The variants of a benchmark in turn: a program for each, a table, and rows as JSON."""

import json
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar


@dataclass(frozen=True, kw_only=True)
class VariantRow(ABC):
    """The measurements of a variant.

    Attributes:
        variant: The variant, as spelled on the command line.
        lines: Lines of the program's output to print under the row.
    """

    variant: str
    lines: tuple[str, ...] = ()

    @abstractmethod
    def line(self) -> str:
        """Return a row of the table."""


RowT = TypeVar("RowT", bound=VariantRow)
_GRACE_S = 60.0  # twice the time after which torchrun kills ranks


def measured(
    variants: Iterable[str], measure: Callable[[str], RowT], columns: Sequence[str], out: Path | None = None
) -> list[RowT]:
    """Measure variants in turn; print each row, and all rows as a table at the end.

    A failed variant has no row: the error is printed, and the next variant runs.

    Args:
        variants: The variants, in order.
        measure: Runs a variant's program. A RuntimeError is a failure of the variant.
        columns: The heads of the table; the first column is text, the rest are numbers.
        out: File for the rows as JSON, written anew after each row: a call cut off leaves the finished rows.

    Returns:
        The rows of the successful variants.
    """
    rows: list[RowT] = []
    for variant in variants:
        try:
            row = measure(variant)
        except RuntimeError as error:
            print(f"{variant}: {error}", flush=True)
            continue
        rows.append(row)
        print(row.line(), *row.lines, sep="\n    ", flush=True)
        if out is not None:
            out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    print("", f"| {' | '.join(columns)} |", f"|---|{'--:|' * (len(columns) - 1)}", sep="\n")
    print(*(row.line() for row in rows), sep="\n")
    return rows


def output_of(command: Sequence[str], timeout: float) -> str:
    """Run a command and return the standard output.

    Raises:
        RuntimeError: The command fails, or runs for more than `timeout` seconds; ends with the last lines of output.

    Effects: a command out of time is told to terminate, and killed a minute later. torchrun ends the ranks when told; a
        kill at once would leave the ranks on the GPUs, beside the next variant.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
        failure = f"exit {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            stdout, stderr = process.communicate(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
        failure = f"no end after {timeout:.0f} s"
    if failure:
        # Without torchrun's own traceback, which follows the rank's.
        output, *_ = (stdout + stderr).partition("ChildFailedError")
        raise RuntimeError(f"{failure}: " + "\n    ".join(output.strip().splitlines()[-80:]))
    return stdout
