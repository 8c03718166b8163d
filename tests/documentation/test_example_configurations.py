"""The configurations in examples/configurations are settings of `lamella train`, each for the command in its head."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import lamella
from lamella._command.estimate import placed
from lamella._settings.config import resolve
from lamella._settings.files import read_config
from lamella_testing import start_autograd

ROOT = Path(__file__).parents[2]
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
CONFIGURATIONS = sorted((ROOT / "examples" / "configurations").glob("*.toml"))
# Adapters, frozen layers, replicas of shards: the others' options are estimated in lamella's own tests.
ESTIMATED_IN_THE_GATE = ("adapters", "last-layers", "many-hosts")


@pytest.fixture(autouse=True, scope="module")
def _forks_after_an_estimate() -> None:
    start_autograd()


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


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.stem in ESTIMATED_IN_THE_GATE else pytest.mark.slow, id=path.stem)
        for path in CONFIGURATIONS
    ],
)
def test_a_configuration_is_estimated_for_a_tiny_model(path: Path, tmp_path: Path) -> None:
    config = resolve(read_config(str(path)))
    model = tmp_path / "config.json"
    model.write_text(json.dumps({"model_type": "llama", **SIZES, "num_hidden_layers": 25 if config.optim.train else 2}))
    ranks = 1 if path.stem == "one-gpu" else 8
    config = replace(
        config,
        model=replace(config.model, name=str(model)),
        parallel=replace(config.parallel, ranks=ranks, device="cuda"),
    )
    estimate = lamella.estimate(placed(config))
    assert estimate.num_ranks == ranks
    assert estimate.peak.nbytes > sum(estimate.at_rest.values())
