"""Pickles that run code, or that take more memory than their length can need."""

import os
from typing import Final


class Runs:
    """Makes the directory `ran` when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, ("ran",))


NUMBERED: Final = {"by four bytes": b"r" + (1 << 26).to_bytes(4, "little"), "in digits": b"p67108864\n"}
"""Opcodes that number a value so that the unpickler makes a table of 1 GiB."""


def numbered(content: bytes, how: str) -> bytes:
    """A pickle of protocol 2 or later, with the first value numbered by an opcode of `NUMBERED`."""
    return content[:2] + b"N" + NUMBERED[how] + b"0" + content[2:]
