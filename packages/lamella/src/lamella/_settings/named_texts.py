"""Texts by name: `wiki=w.jsonl code=c.jsonl` on the command line, a table in a file of settings."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from lamella._settings.options import ConfigError, shown

_NAME: Final = r"[A-Za-z0-9_-]+"
_NAMED: Final = re.compile(rf"({_NAME})=(.+)", re.DOTALL)


def check_name(name: object, table: str, path: str) -> None:
    """Refuse a name that NAME=X would not be split at: the text would be one path.

    Args:
        name: A key of a table of paths.
        table: The table's name, for errors.
        path: The file of settings, for errors.

    Raises:
        ConfigError: The name has another character than those of names.
    """
    if re.fullmatch(_NAME, str(name)) is None:
        raise ConfigError(
            f"Expected names of ASCII letters, digits, '-' and '_' in [{table}] of {path!r}, got {shown(name)}. "
            "Rename it."
        )


def named_texts(flag: str, paths: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return the paths of each name, in the order of the names; all under the name "" where none has a name.

    Args:
        flag: The option that the paths come from.
        paths: Paths, or names with paths, as `wiki=w.jsonl`; a name may come several times.

    Raises:
        ConfigError: Some paths have a name and some have none.
    """
    matches = [(_NAMED.fullmatch(path), path) for path in paths]
    texts: dict[str, tuple[str, ...]] = {}
    for match, path in matches:
        name, path_of_name = ("", path) if match is None else (match[1], match[2])
        texts[name] = (*texts.get(name, ()), path_of_name)
    if "" in texts and len(texts) > 1:
        named = next(name for name in texts if name)
        raise ConfigError(
            f"Expected a name for each path of {flag} or for none, got {shown(texts[''][0])} beside {named!r}. "
            f"Pass NAME={texts[''][0]}; a path that holds '=' is written with its folder, as ./{named}=..."
        )
    return texts
