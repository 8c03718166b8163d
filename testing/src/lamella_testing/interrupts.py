"""KeyboardInterrupt before a chosen line of some packages, for tests that interrupt a step at every line."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

_NEVER: Final = -1


class Interrupt:
    """Raises KeyboardInterrupt before a line of some packages runs, and counts the lines before.

    Attributes:
        num_lines: The lines that have run.
        place: File, line and function of the interrupt; empty before it.
    """

    def __init__(self, packages: Sequence[ModuleType], at: int = _NEVER) -> None:
        """Choose the line.

        Args:
            packages: Packages whose lines count, in all of their modules.
            at: The number of lines that run before the interrupt; by default no line is interrupted, and all count.
        """
        self._sources = tuple(str(Path(package.__file__ or "").parent) for package in packages)
        self._at = at
        self.num_lines = 0
        self.place = ""

    def during(self, run: Callable[[], object]) -> None:
        """Run a function up to the interrupt. Effects: replaces the thread's trace function until it returns."""
        outer = sys.gettrace()
        try:
            sys.settrace(self._call)
            run()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(outer)

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._sources) else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            if self.num_lines == self._at:
                sys.settrace(None)
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt
            self.num_lines += 1
        return self._line
