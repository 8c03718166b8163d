import tomllib
from pathlib import Path

import pytest

from lamella_convert import find_family
from lamella_testing import write_entry_points


@pytest.fixture
def family(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as it is installed: found by its entry points, which a source tree has none of."""
    if find_family("qwen3_5_text") is None:
        project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
        site = tmp_path_factory.mktemp("site")
        write_entry_points(site, "lamella-qwen", "lamella.families", project["entry-points"]["lamella.families"])
        monkeypatch.syspath_prepend(str(site))
