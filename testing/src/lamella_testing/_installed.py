"""Entry points of a package running from its sources, without installation."""

from collections.abc import Mapping
from pathlib import Path


def write_entry_points(folder: Path, distribution: str, group: str, entry_points: Mapping[str, str]) -> None:
    """Write an installer's metadata: with `folder` on `sys.path`, importlib finds the entry points of a distribution.

    Args:
        folder: Created if missing.
        distribution: Name of the distribution.
        group: Group of the entry points.
        entry_points: Name -> object, as in `pyproject.toml`.

    Raises:
        FileExistsError: `folder` holds metadata of the distribution already.
    """
    metadata = folder / f"{distribution.replace('-', '_')}-0.dist-info"
    metadata.mkdir(parents=True)
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entry_points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0\n", encoding="utf-8")
