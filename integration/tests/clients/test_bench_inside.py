"""The benchmark of other tools' trainers: each method on each engine, with equal losses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lamella_integration.bench_inside import ENGINES, main


@pytest.mark.parametrize("method", ["trainer --late-gradients", "sft --lora"])
def test_every_engine_has_a_row_with_the_losses_of_fsdp2(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--size", "tiny", "--steps", "3", "--num-skipped", "1", "--out", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", ["bench_inside", *options, f"{method} --length 16 --batch-size 1"])
    main()
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert len(rows) == len(ENGINES)
    assert [row["losses"] for row in rows] == [rows[0]["losses"]] * len(ENGINES)
