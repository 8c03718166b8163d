"""Names, sizes and tables as people read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def clean_name(name: str) -> str:
    """The name of a parameter or module without the parts added by activation checkpointing and compilation."""
    for prefix in _PREFIXES:
        name = name.replace(prefix, "").removesuffix(f".{prefix[:-1]}")
    return name


def size_text(nbytes: int) -> str:
    """Bytes in the largest unit that leaves a number of at least 1."""
    power = min(max(nbytes, 1).bit_length() - 1, 10 * (len(_UNITS) - 1)) // 10
    return f"{nbytes} B" if power == 0 else f"{nbytes / 1024**power:.1f} {_UNITS[power]}"


def range_text(names: Sequence[str]) -> str:
    """Names of equal things in one cell: the first and the last."""
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"


def table(rows: Sequence[Sequence[str]], *, right: Collection[str] = ()) -> str:
    """Columns as wide as their widest cell.

    Args:
        rows: Rows of equal length; the first holds the columns' names.
        right: Names of the columns to align to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = list(zip(rows[0], widths, strict=True))

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, (name, width) in zip(row, columns, strict=True)
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(line(row) for row in rows)
