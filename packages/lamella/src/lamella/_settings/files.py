"""Settings from files: TOML, JSON, and names in Python files."""

import importlib.util
import json
import os
import sys
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from lamella._settings.config import GROUPS, Config, Values, merged, to_values
from lamella._settings.named_texts import check_name
from lamella._settings.options import ConfigError, fields_of, in_short, nearest, shown
from lamella._settings.parsing import parse_json, parse_toml, read_settings
from lamella._settings.spellings import field_of_spelling

_BASE: Final = "base"


def read_config(source: str) -> Values:
    """Read the settings that `--config` names: a file, or a name in a Python file, as `runs.py:name`.

    Raises:
        ConfigError: The file cannot be read or run, or names an unknown group or field.
    """
    path, colon, name = source.rpartition(":")
    if colon and path.endswith(".py"):
        return _read_python(path, name)
    if source.endswith(".py"):
        raise ConfigError(f"Expected a name in the Python file, as --config {source}:NAME, got {source!r}.")
    return read_file(source)


def read_file(path: str) -> Values:
    """Read settings from a TOML file, or from a run's config.json, over the settings of its `base`.

    A line `base = "other.toml"` names a file, from the folder of this one.

    Raises:
        ConfigError: A file cannot be read, is its own base, or names an unknown group or field.
    """
    return merged(*_layers(path, ()))


def _layers(path: str, above: tuple[str, ...]) -> Iterator[Values]:
    """Yield the settings of the bases of a file, the farthest first, then of the file.

    Args:
        path: The file.
        above: The real paths of the files that the file is a base of.
    """
    groups = dict(_loaded(path))
    base = groups.pop(_BASE, None)
    if base is not None:
        if not isinstance(base, str) or "\0" in base:
            raise ConfigError(f"Expected {_BASE!r} in {path!r} to be the path of a file, got {shown(base)}.")
        above = (*above, os.path.realpath(path))
        base_path = os.path.join(os.path.dirname(path), base)
        if os.path.realpath(base_path) in above:
            raise ConfigError(
                f"Expected {_BASE!r} in {path!r} to be another file, got {base!r}, which leads back to it."
            )
        yield from _layers(base_path, above)
    yield {group: _checked_group(group, fields, path) for group, fields in groups.items()}


def _loaded(path: str) -> Mapping[str, object]:
    try:
        text = read_settings(Path(path))
        loaded = parse_json(text) if path.endswith(".json") else parse_toml(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Expected a configuration in {path!r}, got {_reason(error)}.") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"Expected groups of settings in {path!r}, got {type(loaded).__name__}.")
    return loaded


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error).rstrip(".")


def _checked_group(group: str, fields: object, path: str) -> Mapping[str, object]:
    if group not in GROUPS:
        raise ConfigError(f"Expected one of {sorted(GROUPS)} in {path!r}, got {shown(group)}.{nearest(group, GROUPS)}")
    if not isinstance(fields, Mapping):
        raise ConfigError(f"Expected a table [{group}] in {path!r}, got {shown(fields)}.")
    names = [field.name for field in fields_of(GROUPS[group])]
    for name in fields:
        if name not in names:
            hint = field_of_spelling(str(name)) or nearest(str(name), names)
            raise ConfigError(f"Expected a field of [{group}] in {path!r}, got {shown(name)}.{hint}")
    lists = [field.name for field in fields_of(GROUPS[group]) if typing.get_origin(field.kind) is tuple]
    return {
        name: _named_texts(f"{group}.{name}", setting, path)
        if name in lists and isinstance(setting, Mapping)
        else tuple(setting)
        if isinstance(setting, list)
        else setting
        for name, setting in fields.items()
    }


def _named_texts(field: str, table: Mapping[str, object], path: str) -> tuple[str, ...]:
    """Return a table in the place of a field's list as NAME=X texts, which the command line has."""
    has_lists = field.endswith("paths")  # A name has several paths, but one option, which may be a list.
    for name in table if has_lists else ():
        check_name(name, field, path)
    return tuple(
        f"{name}={text if isinstance(text, str) else json.dumps(text, default=str)}"
        for name, texts in table.items()
        for text in (texts if has_lists and isinstance(texts, list | tuple) else [texts])
    )


def _read_python(path: str, name: str) -> Values:
    """Return the settings that a variable or a function without arguments gives: groups of fields, or a `Config`."""
    where = f"{path}:{name}"
    if not os.path.isfile(path):
        raise ConfigError(f"Expected a Python file in {path!r}, got none.")
    try:
        names = _names_in(path)
        if name not in names:
            raise ConfigError(f"Expected a name in {path!r} as --config {where}, got {name!r}, which it lacks.")
        settings = names[name]
        settings = settings() if callable(settings) else settings
    except ConfigError:
        raise
    except Exception as error:  # The file is code of a user.
        raise ConfigError(f"Expected settings from {where!r}, got {type(error).__name__}: {in_short(error)}") from error
    if isinstance(settings, Config):
        return to_values(settings)
    if not isinstance(settings, Mapping):
        raise ConfigError(f"Expected a lamella.Config or groups of settings from {where!r}, got {shown(settings)}.")
    return {str(group): _checked_group(str(group), fields, where) for group, fields in settings.items()}


def _names_in(path: str) -> Mapping[str, object]:
    spec = importlib.util.spec_from_file_location("lamella_settings_of_a_user", path)
    if spec is None or spec.loader is None:
        raise OSError("no Python file")
    module = importlib.util.module_from_spec(spec)
    with _siblings_importable(path):
        spec.loader.exec_module(module)
    return vars(module)


@contextmanager
def _siblings_importable(path: str) -> Iterator[None]:
    """Let a file import the files beside it, as Python does for a program."""
    folder = os.path.dirname(os.path.abspath(path))
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
