"""Examples of a package's README."""

import re
from importlib.metadata import metadata
from pathlib import Path
from typing import Any


def run_examples(file: Path, distribution: str) -> dict[str, Any]:
    """Run a README's Python examples one after another; returns the names that they define.

    Args:
        file: The README. Where it is absent, beside the tests of an installed package, the distribution's metadata hold
            the text.
        distribution: Name of the distribution.

    Raises:
        AssertionError: An example has more than 14 lines.
    """
    text = file.read_text() if file.is_file() else str(metadata(distribution).get_payload())  # type: ignore[attr-defined]
    names: dict[str, Any] = {}
    for example in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        assert len(example.strip().splitlines()) <= 14
        exec(example, names)
    return names
