"""Sizes in bytes: texts of options, and texts for people."""

import math
import re
from typing import Final

from lamella._settings.options import ConfigError

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_PREFIXES: Final = "KMGT"


def budget_nbytes(text: str | None) -> int:
    """Return the bytes of a `--keep-budget`; 0 for None.

    Raises:
        ConfigError: The text is no size.
    """
    return 0 if text is None else nbytes_of(text, "--keep-budget")


def nbytes_of(text: str, flag: str) -> int:
    """Return the bytes of a size: 2GiB, or 2Gi, is 2 * 2^30 bytes, and 2GB, or 2G, is 2 * 10^9.

    Args:
        text: The size, in upper or lower case; bytes where it has no unit.
        flag: The option of the size, for errors.

    Raises:
        ConfigError: The text is no size.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*(?:([KMGT])(I?))?B?", text.upper())
    if match is None:
        raise ConfigError(f"Expected {flag} to be a size such as 2GiB or 500MiB, got {text!r}.")
    number, prefix, binary = match.groups()
    unit = (1024 if binary else 1000) ** (_PREFIXES.index(prefix) + 1) if prefix else 1
    return int(float(number) * unit)


def size(nbytes: int) -> str:
    """Return bytes in GiB, in MiB below a GiB, or plainly where MiB would be 0.00."""
    if 0 < abs(nbytes) < _MIB // 100:
        return f"{nbytes:,} bytes"
    return f"{nbytes / _GIB:,.2f} GiB" if abs(nbytes) >= _GIB else f"{nbytes / _MIB:,.2f} MiB"


def sufficient_size(nbytes: int) -> str:
    """Return a size that holds the bytes, as options take sizes: in GiB, rounded up to a hundredth."""
    return f"{math.ceil(100 * nbytes / _GIB) / 100:.2f}GiB"
