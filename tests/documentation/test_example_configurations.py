"""The configurations in examples/configurations are settings of `lamella train`, each for the command in its head."""

import re
from pathlib import Path

import pytest

from lamella._settings.config import resolve
from lamella._settings.files import read_config

ROOT = Path(__file__).parents[2]
CONFIGURATIONS = sorted((ROOT / "examples" / "configurations").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_a_configuration_resolves_and_its_head_says_the_command(path: Path) -> None:
    config = resolve(read_config(str(path)))
    head = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    (named,) = re.findall(r"--config (\S+)", head)
    assert ROOT / named == path
    assert config.run.directory == f"runs/{path.stem}"


def test_no_two_configurations_train_alike() -> None:
    configs = [resolve(read_config(str(path))) for path in CONFIGURATIONS]
    assert len(configs) >= 8
    assert len({repr((c.model, c.data, c.optim, c.parallel)) for c in configs}) == len(configs)
