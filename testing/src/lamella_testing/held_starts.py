"""Python processes held at their start until a test releases them: late starts, as on a busy machine."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_DEADLINE_S = 120.0


@dataclass(frozen=True)
class HeldStart:
    """The start of a process whose parent hands `sys.path` on as PYTHONPATH. Any process may release the start.

    Attributes:
        folder: A path for a new folder, different for each held process.
    """

    folder: Path

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold the process started in the block. Effects: Python runs the folder's `sitecustomize` in the process."""
        self.folder.mkdir()
        code = (
            "import atexit, pathlib, time\n"
            f"folder = pathlib.Path({str(self.folder)!r})\n"
            "atexit.register((folder / 'ended').touch)\n"
            "while not (folder / 'released').exists():\n"
            "    time.sleep(0.01)\n"
        )
        (self.folder / "sitecustomize.py").write_text(code, encoding="utf-8")
        sys.path.insert(0, str(self.folder))
        try:
            yield
        finally:
            sys.path.remove(str(self.folder))

    def release(self) -> None:
        """Let the process go on."""
        (self.folder / "released").touch()

    def run_to_end(self) -> None:
        """Let the process go on, and wait for the exit.

        Raises:
            TimeoutError: The process has not exited after two minutes.
        """
        self.release()
        deadline = time.monotonic() + _DEADLINE_S
        while not (self.folder / "ended").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"Expected the process held in {str(self.folder)!r} to exit, got one that runs.")
            time.sleep(0.01)
