"""Sizes in bytes: texts of options, and texts for people."""

import math
import re
from typing import Final

from lamella._settings.options import ConfigError

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def budget_nbytes(text: str | None, flag: str = "--keep-budget") -> int:
    """Return the bytes of a size such as 2GiB; 0 for None.

    Raises:
        ConfigError: The text is no size.
    """
    if text is None:
        return 0
    match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*(?:([KMGT]?)I?B)?", text.upper())
    if match is None:
        raise ConfigError(f"Expected {flag} to be a size such as 2GiB or 500MiB, got {text!r}.")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def size(nbytes: int) -> str:
    """Return bytes in GiB, in MiB below a GiB, or plainly where MiB would be 0.00."""
    if 0 < abs(nbytes) < _MIB // 100:
        return f"{nbytes:,} bytes"
    return f"{nbytes / _GIB:,.2f} GiB" if abs(nbytes) >= _GIB else f"{nbytes / _MIB:,.2f} MiB"


def sufficient_size(nbytes: int) -> str:
    """Return a size that holds the bytes, as options take sizes: in GiB, rounded up to a hundredth."""
    return f"{math.ceil(100 * nbytes / _GIB) / 100:.2f}GiB"
