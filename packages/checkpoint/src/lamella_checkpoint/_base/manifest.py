"""`lamella.json`: a plain-text description of a checkpoint, and the caller's `extra`."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from lamella_checkpoint._base.errors import CheckpointDamaged
from lamella_checkpoint._base.small_files import file_size, read_json, unreadable
from lamella_checkpoint._base.text import short

MANIFEST_FILE = "lamella.json"
_FORMAT = "lamella-checkpoint"
_FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """An optimizer's class and declared options: enough to refuse a resume by an incompatible optimizer.

    `local_slots`: slots kept as plain tensors of a rank's elements; a fresh optimizer's are made alike.
    """

    class_name: str
    options: frozenset[str]
    local_slots: frozenset[str] = frozenset()

    def can_resume(self, other: "OptimizerKind") -> bool:
        """Whether the options of one include the other's, as between releases of one class, or Adam and AdamW."""
        return self.options <= other.options or other.options <= self.options


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of `lamella.json`.

    `extra` is the caller's; `checksums` is the name of the checksum file; `side_files` is the folder with the files
    beside the weights in the Hugging Face directory behind a conversion.
    """

    extra: Mapping[str, Any]
    num_ranks: int
    optimizer: OptimizerKind | None
    checksums: str | None = None
    side_files: str | None = None

    def write(self, directory: Path) -> None:
        """Write the file, and wait until the contents are on the disk.

        Raises:
            TypeError: `extra` holds a value outside JSON.
        """
        with (directory / MANIFEST_FILE).open("w", encoding="utf-8") as file:
            json.dump(self._as_json(), file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read the file.

        Raises:
            CheckpointDamaged: The file is absent or unreadable, or of a later format.
        """
        file = directory / MANIFEST_FILE
        file_size(directory, MANIFEST_FILE)
        content = read_json(file)
        try:
            version = content["format_version"]
            if version != _FORMAT_VERSION:
                raise CheckpointDamaged(
                    str(file),
                    f"expected format version {_FORMAT_VERSION}, got {version!r}; "
                    f"a newer lamella-checkpoint may read it",
                )
            return cls._from_json(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointDamaged):
                raise
            raise unreadable(file, error) from error

    def _as_json(self) -> dict[str, object]:
        kind = self.optimizer
        return {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "num_ranks": self.num_ranks,
            "torch": torch.__version__,
            "packages": _packages(),
            "optimizer": kind
            and {
                "class": kind.class_name,
                "options": sorted(kind.options),
                "local_slots": sorted(kind.local_slots),
            },
            "checksums": self.checksums,
            "side_files": self.side_files,
            "extra": dict(self.extra),
        }

    @classmethod
    def _from_json(cls, content: Mapping[str, Any]) -> "Manifest":
        if not isinstance(content["extra"], dict):
            raise ValueError(f"expected extra to be a dict, got {type(content['extra']).__name__}")
        return cls(
            extra=content["extra"],
            num_ranks=content["num_ranks"],
            optimizer=content["optimizer"] and _kind_from_json(content["optimizer"]),
            checksums=content.get("checksums"),
            side_files=content.get("side_files"),
        )


def _kind_from_json(content: Mapping[str, Any]) -> OptimizerKind:
    options, local_slots = content["options"], content.get("local_slots", [])
    for value in (content["class"], *options, *local_slots):
        if not isinstance(value, str):
            raise ValueError(f"expected names of the optimizer's, got {short(value)}")
    return OptimizerKind(class_name=content["class"], options=frozenset(options), local_slots=frozenset(local_slots))


def check_extra(extra: Mapping[str, object]) -> None:
    """Refuse an `extra` that would not survive a round trip through JSON.

    Raises:
        TypeError: A value that JSON cannot encode, or a key that is no string (JSON would convert the key).
    """
    try:
        json.dumps(dict(extra))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"Expected `extra` to hold what JSON can, got {short(extra)}: {error}.") from error
    _check_keys(extra, "extra")


def _check_keys(value: object, path: str) -> None:
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                raise TypeError(f"Expected the keys of {path} to be strings, got {key!r}.")
            _check_keys(each, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for each in value:
            _check_keys(each, path)


@cache  # Listing the installed distributions takes a tenth of a second.
def _packages() -> dict[str, str]:
    """The installed lamella distributions and versions: records the software that wrote a checkpoint."""
    names = sorted((each.name, each.version) for each in distributions() if each.name.startswith("lamella"))
    return dict(names)
