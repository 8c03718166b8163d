"""The refusal of a model, and other libraries' errors inside of it."""

import textwrap


class ModelError(ValueError):
    """A model or its files cannot be built, sharded or read. The message is one line and names the way out."""


def in_short(error: Exception) -> str:
    """Return a library's error message on one line of at most 240 characters, ending in a full stop."""
    return textwrap.shorten(" ".join(str(error).split()), 240).rstrip(".") + "."
