"""Output of a command's report: to the terminal as text or JSON, and to files."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path

from lamella._settings.options import ConfigError, shown


def show(lines: Iterable[str], as_json: Callable[[], str], to: str | None) -> None:
    """Print a report.

    Args:
        lines: The report as text.
        as_json: Makes the report as JSON; called only if the JSON goes somewhere.
        to: A file to write the JSON to; "-" prints the JSON in place of the text. None prints only the text.

    Raises:
        ConfigError: The file cannot be written.
    """
    say([as_json()] if to == "-" else lines)
    if to is not None and to != "-":
        write(to, as_json())


def check_destination(to: str | None) -> None:
    """Refuse a file for `show` that has no folder, before the report takes time.

    Raises:
        ConfigError: The folder is absent, or the path is one.
    """
    if to is None or to == "-":
        return
    path = Path(to)
    if path.is_dir() or not path.parent.is_dir():
        got = f"{to!r}, a folder" if path.is_dir() else f"{to!r}, without the folder {str(path.parent)!r}"
        raise ConfigError(f"Expected a file to write to as --json, in a folder that exists, got {got}.")


def say(lines: Iterable[str], end: str = "\n") -> None:
    """Print lines, each followed by `end`; escape characters the terminal cannot encode, and tolerate a closed pipe.

    Raises:
        ConfigError: The output cannot be written.
    """
    try:
        _write(lines, end)
    except BrokenPipeError as error:
        leave_output(error)
    except OSError as error:
        _discard(sys.stdout.fileno())
        raise ConfigError(f"Expected to write to standard output, got {error.strerror}.") from error


def log(lines: Iterable[str]) -> None:
    """Print lines of a run, which goes on where its log cannot be written."""
    try:
        _write(lines, "\n")
    except OSError as error:
        leave_output(error)


def _write(lines: Iterable[str], end: str) -> None:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    for line in lines:
        sys.stdout.write(f"{line}{end}")  # Not `print`, which asks an unbuffered output twice for each line.
    sys.stdout.flush()


def leave_output(error: OSError) -> None:
    """Discard standard output from now on, and say so on standard error, but of a pipe that its reader has closed."""
    _discard(sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        with suppress(OSError):
            print(f"lamella: the output cannot be written ({error.strerror}): its lines are left out.", file=sys.stderr)


def flush_outputs() -> None:
    """Write out what both outputs hold back, or discard it.

    Where a terminal has ended or a disk is full, the interpreter's own flush at exit would fail, and change the exit
    code to 120.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        leave_output(error)
    try:
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr.fileno())


def _discard(descriptor: int) -> None:
    """Let writes to a descriptor go nowhere: otherwise each line would raise, and the interpreter's flush at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    if null != descriptor:
        os.close(null)
    os.set_inheritable(descriptor, True)


def open_closed_outputs() -> None:
    """Discard standard output and errors where a process was started without them, as by `>&-`.

    Effects: sets `sys.stdout` and `sys.stderr` where they are None; started processes inherit the descriptors.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            _discard(descriptor)
            stream = open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def printable(text: str) -> str:
    """Escape characters that move a terminal's cursor, end a line or cannot be printed."""
    return (
        text
        if text.isprintable()
        else "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    )


def one_line(text: str) -> str:
    """Join the lines of a text into one, then escape as `printable`."""
    return printable(" ".join(text.split()))


def write(path: str, text: str) -> None:
    """Write a text file.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Expected to write {path!r}, got {error.strerror}.") from error


def file_error(error: OSError) -> str:
    """Return one sentence on a file that could not be read or written: the system's reason, and the path."""
    where = f": {str(error.filename)!r}" if error.filename is not None else ""
    text = one_line(error.strerror or str(error)).rstrip(".")
    # Errors of lamella's own packages are sentences already.
    return f"{text}{where}." if text.startswith("Expected") else f"Expected usable files, got {text}{where}."


@contextmanager
def refused_paths() -> Iterator[None]:
    """Turn errors of the file system into refusals: a name that is too long, a path that may not be searched.

    Raises:
        ConfigError: Names the path and the reason. Errors without a path pass.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise ConfigError(f"Expected a usable path, got {error.strerror}: {shown(error.filename)}.") from error
