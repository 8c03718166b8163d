import tomllib
from pathlib import Path

import pytest

from lamella_checkpoint import find_family


@pytest.fixture
def family(tmp_path_factory, monkeypatch):
    """The package as it is installed: found by its entry points, which a source tree has none of."""
    if find_family("qwen3_5_text") is None:
        project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
        metadata = tmp_path_factory.mktemp("site") / "lamella_qwen-0.dist-info"
        metadata.mkdir()
        lines = [f"{name} = {value}" for name, value in project["entry-points"]["lamella.families"].items()]
        (metadata / "entry_points.txt").write_text("\n".join(["[lamella.families]", *lines]))
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lamella-qwen\nVersion: 0\n")
        monkeypatch.syspath_prepend(str(metadata.parent))
