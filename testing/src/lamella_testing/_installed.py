"""A package's entry points, where it runs from its sources and was never installed."""

from collections.abc import Mapping
from pathlib import Path


def write_entry_points(folder: Path, distribution: str, group: str, entry_points: Mapping[str, str]) -> None:
    """Write what an installer writes: with `folder` on `sys.path`, the entry points of a distribution are found.

    Args:
        folder: Is made.
        distribution: Its name.
        group: Of the entry points.
        entry_points: Name -> object, as in `pyproject.toml`.
    """
    metadata = folder / f"{distribution.replace('-', '_')}-0.dist-info"
    metadata.mkdir(parents=True)
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entry_points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0\n", encoding="utf-8")
