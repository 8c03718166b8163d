"""The documentation's program with megatron-core runs, and its table of options leaves nothing out."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from lamella_megatron._model import configuration as tables
from lamella_testing import run_ranks

ROOT = Path(__file__).parents[4]
HERE = Path(__file__).parent
GUIDE = ROOT / "docs/how-to/move-a-megatron-lm-script.md"
OPTIONS = ROOT / "docs/reference/megatron_fsdp.md"


def test_the_guides_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE)
    program = compile("\n".join(blocks), GUIDE, "exec")

    def on_each_rank() -> None:
        monkeypatch.setattr(dist, "init_process_group", lambda: None)  # The ranks here are in a group already,
        monkeypatch.setattr(dist, "destroy_process_group", lambda: None)  # and leave it by themselves.
        exec(program, {"__name__": "__main__"})
        # Attention's dropout on a GPU refuses to run without this state; the stand-ins for torch.cuda do not.
        tracker = importlib.import_module("megatron.core.tensor_parallel").get_cuda_rng_tracker()
        assert "model-parallel-rng" in tracker.get_states()

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize(
    ("title", "options"),
    [("Used", tables._USED), ("Without effect", tables._NO_EFFECT), ("Refused", tables._REFUSED.keys())],
)
def test_the_table_has_every_option_in_its_place(title: str, options: frozenset[str]) -> None:
    [section] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", OPTIONS.read_text(), flags=re.DOTALL | re.MULTILINE)
    named = [name for row in re.findall(r"^\| (`.*?`) \|", section, flags=re.MULTILINE) for name in row.split(", ")]
    assert sorted(name.strip("`") for name in named) == sorted(options)


def test_the_tests_that_the_table_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+\.py)::(\w+)`", OPTIONS.read_text()))
    assert named
    assert not [name for file, name in named if f"def {name}(" not in (HERE / file).read_text()]
