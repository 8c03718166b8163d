"""Lines of the documentation that install packages: found, expanded as a shell expands them, and tried by pip.

    python tools/install_lines.py                 lists pip's lines, each once
    python tools/install_lines.py --try [WORD...] installs each line that has all the words, in an empty environment

A try makes an environment, runs the line in the root of the clone, and imports what the line names.
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = ("*.md", "docs/**/*.md", "packages/*/README.md", "packages/*/src/**/*.py")
COMMAND = re.compile(r"\b(?P<uv>uv )?pip install (?P<arguments>[^`#|\n]*)")
TABLE = re.compile(
    r"^\|.*\| `uv pip install` and \| `pip install` and \|\n\|[-|]+\n(?P<rows>(?:\|.*\n)+)", re.MULTILINE
)
CELL = re.compile(r"^`(\S*\./packages/[^`]*)`$")
PATH = re.compile(r"^\./packages/(?P<names>\{[\w,]+\}|\w+)(?:\[(?P<extras>[\w,{}]+)\])?$")


@dataclass(frozen=True)
class InstallLine:
    """One line that installs packages of this repository.

    Attributes:
        file: The file, below the root.
        arguments: The words after `install`, without quotes.
        is_uv: Whether uv reads the line, which finds siblings by itself; else pip does.
    """

    file: Path
    arguments: tuple[str, ...]
    is_uv: bool

    def __str__(self) -> str:
        return f"{self.file}: {'uv ' if self.is_uv else ''}pip install {' '.join(self.arguments)}"

    @property
    def packages(self) -> list[tuple[str, list[str]]]:
        """Folders' names below `packages`, and the extras of each.

        Raises:
            ValueError: An argument is neither a package's folder nor constraints.txt.
        """
        packages = []
        for argument in self.arguments:
            if argument in ("-c", "constraints.txt"):
                continue
            path = PATH.match(argument)
            if path is None:
                raise ValueError(f"{self}: expected ./packages/NAME, got {argument!r}")
            extras = [extra for extra in (path["extras"] or "").split(",") if extra and "{" not in extra]
            packages += [(name, extras) for name in path["names"].strip("{}").split(",")]
        return packages


def install_lines(root: Path = ROOT) -> Iterator[InstallLine]:
    """Return the lines of all pages, READMEs and sources, and the cells of the table in how-to/install.md."""
    for path in (path for pattern in PATTERNS for path in sorted(root.glob(pattern))):
        text, file = path.read_text(encoding="utf-8"), path.relative_to(root)
        for command in COMMAND.finditer(text):
            if "./packages" in command["arguments"]:
                yield InstallLine(file, _words(command["arguments"]), bool(command["uv"]))
        for row in (row for table in TABLE.finditer(text) for row in table["rows"].splitlines()):
            for column, cell in enumerate(row.strip("|").split("|")[1:]):
                if line := CELL.match(cell.strip()):
                    yield InstallLine(file, _words(line[1]), is_uv=column == 0)


def try_line(line: InstallLine) -> None:
    """Install a line by pip into a new environment outside the clone, and import the packages.

    Raises:
        subprocess.CalledProcessError: pip refuses the line, or a package cannot be imported.
    """
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        paths = [f"./packages/{name}" + (f"[{','.join(extras)}]" if extras else "") for name, extras in line.packages]
        constraints = ["-c", "constraints.txt"] if "-c" in line.arguments else []
        subprocess.run([python, "-m", "pip", "install", "--quiet", *constraints, *paths], cwd=ROOT, check=True)
        modules = [name if name == "lamella" else f"lamella_{name}" for name, _ in line.packages]
        subprocess.run([python, "-I", "-c", f"import {', '.join(modules)}"], cwd=folder, check=True)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.rstrip(".,") for word in text.replace("'", " ").replace('"', " ").split())


def main(arguments: list[str]) -> None:
    """List pip's lines, or try those with all the words."""
    lines = {line.arguments: line for line in install_lines() if not line.is_uv}
    words = arguments[1:]
    for line in lines.values():
        if all(word in str(line) for word in words):
            print(line, flush=True)
            if arguments[:1] == ["--try"]:
                try_line(line)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    main(sys.argv[1:])
