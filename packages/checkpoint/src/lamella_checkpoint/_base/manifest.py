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

from lamella_files import CheckpointDamaged, encode_extra, file_size, has_tags, read_json, short, unreadable

MANIFEST_FILE = "lamella.json"
_FORMAT = "lamella-checkpoint"
_FORMAT_VERSION = 2
"""Of a manifest with tagged values or with values by rank; any other has version 1, for earlier releases."""


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

    Attributes:
        extra: The caller's values on rank 0, as `encode_extra` makes them.
        num_ranks: The number of ranks that wrote the checkpoint.
        optimizer: The optimizer's kind; None without an optimizer.
        checksums: The name of the checksum file.
        side_files: The folder with the files beside the weights in the Hugging Face directory behind a conversion.
        extra_by_rank: Keys of `extra` whose values differ between ranks; those of other ranks are objects of the
            checkpoint.
    """

    extra: Mapping[str, Any]
    num_ranks: int
    optimizer: OptimizerKind | None
    checksums: str | None = None
    side_files: str | None = None
    extra_by_rank: tuple[str, ...] = ()

    def write(self, directory: Path) -> None:
        """Write the file, and wait until the contents are on the disk."""
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
            if version not in range(1, _FORMAT_VERSION + 1):
                raise CheckpointDamaged(
                    str(file),
                    f"expected format version {_FORMAT_VERSION} or less, got {version!r}; "
                    f"a newer lamella-checkpoint may read it",
                )
            return cls._from_json(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointDamaged):
                raise
            raise unreadable(file, error) from error

    def _as_json(self) -> dict[str, object]:
        kind = self.optimizer
        is_plain = not self.extra_by_rank and not has_tags(self.extra)
        return {
            "format": _FORMAT,
            "format_version": 1 if is_plain else _FORMAT_VERSION,
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
            **({"extra_by_rank": sorted(self.extra_by_rank)} if self.extra_by_rank else {}),
        }

    @classmethod
    def _from_json(cls, content: Mapping[str, Any]) -> "Manifest":
        extra, num_ranks = content["extra"], content["num_ranks"]
        if not isinstance(extra, dict):
            raise ValueError(f"expected extra to be a dict, got {type(extra).__name__}")
        by_rank = content.get("extra_by_rank", [])
        if not isinstance(by_rank, list) or not all(isinstance(key, str) for key in by_rank):
            raise ValueError(f"expected extra_by_rank to be keys, got {short(by_rank)}")
        if not isinstance(num_ranks, int) or num_ranks < 1:
            raise ValueError(f"expected a number of ranks, got {short(num_ranks)}")
        return cls(
            # In version 1 a dict with the tag's key is the caller's.
            extra=encode_extra(extra) if content["format_version"] == 1 else extra,
            num_ranks=num_ranks,
            optimizer=content["optimizer"] and _kind_from_json(content["optimizer"]),
            checksums=content.get("checksums"),
            side_files=content.get("side_files"),
            extra_by_rank=tuple(by_rank),
        )


def _kind_from_json(content: Mapping[str, Any]) -> OptimizerKind:
    options, local_slots = content["options"], content.get("local_slots", [])
    for value in (content["class"], *options, *local_slots):
        if not isinstance(value, str):
            raise ValueError(f"expected names of the optimizer's, got {short(value)}")
    return OptimizerKind(class_name=content["class"], options=frozenset(options), local_slots=frozenset(local_slots))


@cache  # Listing the installed distributions takes a tenth of a second.
def _packages() -> dict[str, str]:
    """The installed lamella distributions and versions: records the software that wrote a checkpoint."""
    names = sorted(
        (distribution.name, distribution.version)
        for distribution in distributions()
        if distribution.name.startswith("lamella")
    )
    return dict(names)
