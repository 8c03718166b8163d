"""An exception that is of FSDP2's type and of the type that fits."""


class MisuseError(ValueError, AssertionError):
    """A value that cannot be used. FSDP2 raises an AssertionError for it; code that catches that goes on working."""
