"""An exception of FSDP2's type and of the fitting type at once."""


class MisuseError(ValueError, AssertionError):
    """An unusable value. FSDP2 raises an AssertionError for the same misuse; code that catches it goes on working."""
