"""The tested versions of another vendor's library, held against the installed version.

Note [Errors below, warnings above]
    An older version lacks names and behaviour read by the package: an error at first use. A newer version is most
    often right: containers bring fixed builds, and an error would keep their users out of a working version.
    Doors to vendors' libraries refuse a missing part by name, so a warning suffices.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import metadata


@dataclass(frozen=True, kw_only=True)
class VendorVersions:
    """The tested versions of a vendor's library.

        VendorVersions(distribution="apex", floor="1.2", ceiling="1.4", extra="package[apex]").check()

    Attributes:
        distribution: Name of the distribution.
        floor: The oldest working version, such as "2.11"; later numbers count as 0.
        ceiling: The first untested version.
        extra: The extra that installs a tested version, with the package.
    """

    distribution: str
    floor: str
    ceiling: str
    extra: str

    def check(self) -> None:
        """Refuse a version below the floor. A library without metadata, as from a source tree, passes.

        Raises:
            ImportError: The installed version is below the floor; the way out is in the message.

        Warns:
            UserWarning: The installed version is not below the ceiling; once a process. Note [Errors below, warnings
                above].

        Effects: reads the distribution's metadata on disk, once a process. No import.
        """
        installed = _installed(self.distribution)
        if installed is None:
            return
        if _numbers(installed) < _numbers(self.floor):
            raise ImportError(
                f"Expected {self.distribution} {self.floor} or newer, as {self.extra} needs, got {installed}. Install "
                f"'{self.distribution}>={self.floor},<{self.ceiling}', the tested versions, by the extra {self.extra}."
            )
        if _numbers(installed) >= _numbers(self.ceiling):
            _warn_once(self, installed)


@cache
def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def _warn_once(versions: VendorVersions, installed: str) -> None:
    warnings.warn(
        f"Expected {versions.distribution} below {versions.ceiling}, as tested with {versions.extra} from "
        f"{versions.floor} on, got {installed}, which may work. Install {versions.extra} for a tested version.",
        UserWarning,
        stacklevel=4,
    )


def _numbers(version: str) -> tuple[int, ...]:
    """The release's numbers without zeros at the end: 2.11 for 2.11.0+cu13, 2.3.2 for 2.3.2.post1."""
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
