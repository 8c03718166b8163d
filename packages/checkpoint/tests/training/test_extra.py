"""What the caller keeps in a checkpoint is readable, and comes back as it went."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from lamella_checkpoint import load, save
from lamella_testing import run_ranks
from lamella_testing.tiny import Kit


def round_trip(tmp_path: Path, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    model = nn.Linear(1, 1)
    save(tmp_path / "a", model=model, extra=extra)
    return load(tmp_path / "a", model=model)


def test_json_comes_back_as_it_went(tmp_path: Path) -> None:
    extra = {"step": 3, "loss": 0.1, "best": None, "done": False, "data": {"file": "ä.txt", "at": [1, [2]]}}
    assert round_trip(tmp_path, extra) == extra


def test_random_states_fit(tmp_path: Path) -> None:
    python, torchs = random.getstate(), torch.get_rng_state()
    extra = round_trip(tmp_path, {"python": python, "torch": torchs.tolist()})
    version, internal, gauss = extra["python"]
    random.setstate((version, tuple(internal), gauss))
    assert random.getstate() == python
    assert torch.equal(torch.tensor(extra["torch"], dtype=torch.uint8), torchs)


def test_any_mapping_will_do(tmp_path: Path) -> None:
    assert round_trip(tmp_path, MappingProxyType({"step": 3})) == {"step": 3}


def test_nothing_is_an_empty_mapping(tmp_path: Path) -> None:
    assert round_trip(tmp_path, None) == {}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"model": nn.Linear(1, 1)}, "what JSON can.*not JSON serializable"),
        ({"rank": {0: "a"}}, r"keys of extra\['rank'\] to be strings, got 0"),
    ],
)
def test_what_would_not_come_back_is_refused_before_anything_is_written(
    tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        round_trip(tmp_path, extra)
    assert list(tmp_path.iterdir()) == []


def test_rank_zeros_extra_is_every_ranks(kit: Kit, tmp_path: Path) -> None:
    def save_and_load() -> dict[str, Any]:
        model, _ = kit.build(sharded=True)
        save(tmp_path / "a", model=model, extra={"rank": torch.distributed.get_rank()})
        return load(tmp_path / "a", model=model)

    assert run_ranks(save_and_load, 2) == [{"rank": 0}] * 2


def test_the_manifest_says_what_wrote_the_checkpoint(tmp_path: Path) -> None:
    round_trip(tmp_path, {"step": 3})
    content = json.loads((tmp_path / "a" / "lamella.json").read_text())
    assert content["format"] == "lamella-checkpoint" and content["format_version"] == 1
    assert content["torch"] == torch.__version__ and content["num_ranks"] == 1
    assert content["extra"] == {"step": 3}
