"""The search for the files of a text: folders are walked in the order of names, and no file is found twice."""

import os
import stat
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from lamella._data.tables import HUB, SourceFile, is_table, scan_hub, scan_table
from lamella._data.text_files import scan_text, unreadable
from lamella._settings.named_texts import named_texts
from lamella._settings.options import ConfigError

_ARROW_SUFFIX: Final = ".arrow"
_BESIDE_ARROW: Final = ("dataset_info.json", "state.json")
_OVER_ARROW: Final = "dataset_dict.json"


class Search:
    """The search for the files of several sources.

    Args:
        without: Folder to leave out.

    Attributes:
        num_skipped: Files so far that are not text.
    """

    def __init__(self, without: Path | None) -> None:
        self.num_skipped = 0
        self._visited: set[str] = set() if without is None else {os.path.realpath(without)}
        self._has_files = False

    def texts(self, flag: str, paths: Sequence[str]) -> list[SourceFile]:
        """Return the files under paths, the sources one after another, the files of each in the order of names.

        Args:
            flag: The option that the paths come from.
            paths: Files and folders, with or without names of sources; none for the standard library's sources.

        Raises:
            ConfigError: A path does not exist, cannot be read or is not text, or the files of a source are empty.

        Effects: reads every file.
        """
        sources = named_texts(flag, paths) or {"": ()}
        return [file for source, named in sources.items() for file in self._texts_of(source, named, flag)]

    def _texts_of(self, source: str, paths: Sequence[str], flag: str) -> list[SourceFile]:
        files = list(self._files(paths, flag))
        texts = [replace(file, source=source) for file in files if file is not None and file.nbytes]
        if not texts:
            elsewhere = " apart from the files that other names or --validation-data hold" if self._has_files else ""
            raise ConfigError(
                f"Expected text in {description(paths)}{elsewhere}, got {len(files)} files with no text in them."
            )
        self._has_files = True
        self.num_skipped += files.count(None)
        return sorted(texts, key=lambda file: file.name)

    def _files(self, paths: Sequence[str], flag: str) -> Iterator[SourceFile | None]:
        """Yield the files; None for a file that is not text."""
        if not paths:
            # Tests hold generated tables, and some distributions leave them out; site-packages is not the library.
            skip = ("site-packages", "dist-packages", "test", "tests", "idle_test")
            yield from self._walk(Path(sysconfig.get_path("stdlib")), suffix=".py", skip=skip)
        for path in paths:
            if path.startswith(HUB):
                yield from self._data_set(path)
            elif os.path.isdir(path):
                yield from self._walk(Path(path))
            elif self._is_unvisited(Path(path)):
                yield _named(Path(path), flag)

    def _data_set(self, name: str) -> Iterator[SourceFile]:
        if name not in self._visited:
            self._visited.add(name)
            yield scan_hub(name)

    def _is_unvisited(self, path: Path) -> bool:
        """True when no earlier path led to `path`; records files. Folders may be visited again for their files."""
        real = os.path.realpath(path)
        is_unvisited = real not in self._visited
        if not os.path.isdir(real):
            self._visited.add(real)
        return is_unvisited

    def _walk(self, root: Path, *, suffix: str = "", skip: Sequence[str] = ()) -> Iterator[SourceFile | None]:
        def refuse(error: OSError) -> None:
            raise unreadable(Path(error.filename), error) from error

        for folder, subfolders, names in os.walk(root, onerror=refuse):
            subfolders[:] = sorted(name for name in subfolders if name not in skip and not name.startswith("."))
            subfolders[:] = [name for name in subfolders if self._is_unvisited(Path(folder, name))]
            for path in (Path(folder, name) for name in sorted(_documents(names)) if name.endswith(suffix)):
                # Pipes are skipped: reading a pipe waits for the writer.
                if path.is_file() and self._is_unvisited(path):
                    yield _scanned(path.relative_to(root).as_posix(), path, is_named=False)


def description(paths: Sequence[str]) -> str:
    """Return the paths in words."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return ", ".join(paths) if paths else f"the Python {version} standard library"


def _documents(names: Sequence[str]) -> Iterator[str]:
    """Yield the names of a folder's files but those that `datasets` writes beside its Arrow files."""
    has_arrow = any(name.endswith(_ARROW_SUFFIX) for name in names)
    return (name for name in names if name != _OVER_ARROW and not (has_arrow and name in _BESIDE_ARROW))


def _named(path: Path, flag: str) -> SourceFile:
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        raise ConfigError(
            f"Expected a text file or a folder as {flag}, got {str(path)!r}, which does not exist."
        ) from None
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(kind):  # Reading a pipe waits for the writer, and a pipe cannot be read twice.
        raise ConfigError(f"Expected a text file or a folder as {flag}, got {str(path)!r}, which is neither.")
    file = _scanned(path.name, path, is_named=True)
    assert file is not None
    return file


def _scanned(name: str, path: Path, *, is_named: bool) -> SourceFile | None:
    """Return a file, or None for one that is not text and that only its folder was named for."""
    if is_table(path) and (table := scan_table(name, path, is_named=is_named)) is not None:
        return table
    return scan_text(name, path, is_named=is_named)
