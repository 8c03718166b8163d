"""Where a command's report goes: to the terminal as text or JSON, and to files."""

import os
import sys
from collections.abc import Iterable
from io import TextIOWrapper
from pathlib import Path

from lamella._options import ConfigError


def show(lines: Iterable[str], as_json: str, to: str | None) -> None:
    """Print a report.

    Args:
        lines: As text.
        as_json: The same as JSON.
        to: A file to write that to besides; "-" prints it in place of the text.

    Raises:
        ConfigError: The file cannot be written.
    """
    say([as_json] if to == "-" else lines)
    if to is not None and to != "-":
        write(to, as_json)


def say(lines: Iterable[str]) -> None:
    """Print lines, with escapes for what the terminal has no letters for; a reader (`| head`) may leave."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Else the interpreter complains at exit.


def printable(text: str) -> str:
    """Text with escapes in place of what moves a terminal's cursor, ends a line or cannot be encoded."""
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def one_line(text: str) -> str:
    """The same, where the lines of a text follow each other on one."""
    return printable(" ".join(text.split()))


def write(path: str, text: str) -> None:
    """Write a file.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Expected to write {path!r}, got {error.strerror}.") from error
