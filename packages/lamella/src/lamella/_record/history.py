"""The starts and ends of a run over its life, a line each in the run's folder. No checkpoint rewinds the lines."""

import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

_PACKAGES: Final = ("lamella", "torch", "transformers")
_LONGEST_REASON: Final = 300


@contextmanager
def recorded_start(path: Path, facts: Mapping[str, object]) -> Iterator[None]:
    """Append the start of a run to its history, and its end after the block: complete, or ended by an error.

    Args:
        path: The file of the history.
        facts: Facts of the start: the first step, the number of ranks, the device.

    Effects: a history that cannot be written leaves the run alone.
    """
    _append(path, {"event": "start", **facts, "versions": versions()})
    reason = "killed"
    try:
        yield
        reason = "complete"
    except BaseException as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:_LONGEST_REASON]
        raise
    finally:
        _append(path, {"event": "end", "reason": reason})


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages behind the numbers of a run."""
    return {"python": platform.python_version(), **{name: _version_of(name) for name in _PACKAGES}}


def read_history(path: Path) -> list[Mapping[str, object]]:
    """Return the events of a run, the oldest first; damaged lines are passed over."""
    with suppress(OSError):
        return [*_events(path.read_text(encoding="utf-8", errors="replace"))]
    return []


def _events(text: str) -> Iterator[Mapping[str, object]]:
    for line in text.splitlines():
        with suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and event.get("event") in ("start", "end"):
                yield event


def _append(path: Path, event: Mapping[str, object]) -> None:
    with suppress(OSError), path.open("a", encoding="utf-8") as file:
        time = datetime.now(UTC).isoformat(timespec="seconds")
        file.write(json.dumps({"time": time, **event}) + "\n")


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # Sources on PYTHONPATH.
        return "from sources"
