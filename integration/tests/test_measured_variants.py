"""The loop over the variants of a benchmark: rows, the table, and JSON."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lamella_integration.measured_variants import VariantRow, measured, output_of

SLOW = """
import pathlib, signal, sys, time

def end(*_):
    pathlib.Path(sys.argv[1]).touch()
    raise SystemExit

signal.signal(signal.SIGTERM, end)
print("begun", flush=True)
time.sleep(60)
"""


@dataclass(frozen=True, kw_only=True)
class Speed(VariantRow):
    """A variant's speed."""

    tokens_per_s: float

    def line(self) -> str:
        return f"| {self.variant} | {self.tokens_per_s:.0f} |"


def test_a_variant_that_fails_costs_its_own_row_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"

    def measure(variant: str) -> Speed:
        if variant == "broken":
            output_of([sys.executable, "-c", "raise SystemExit('no memory')"], 60)
        if variant == "slow":
            assert len(json.loads(out.read_text(encoding="utf-8"))) == 1, "rows so far are written at once"
            output_of([sys.executable, "-c", SLOW, str(tmp_path / "ended")], 2.0)
        return Speed(variant=variant, tokens_per_s=len(variant), lines=("loss: 1.0",))

    rows = measured(["lamella", "broken", "slow", "peer"], measure, ("variant", "tokens/s"), out)
    assert [row.variant for row in rows] == ["lamella", "peer"]
    assert json.loads(out.read_text(encoding="utf-8")) == [
        {"variant": variant, "lines": ["loss: 1.0"], "tokens_per_s": len(variant)} for variant in ("lamella", "peer")
    ]
    printed = capsys.readouterr().out
    assert "broken: exit 1: no memory\n" in printed
    assert "slow: no end after 2 s: begun\n" in printed
    assert (tmp_path / "ended").exists(), "a program out of time ends its own ranks"
    table = "\n| variant | tokens/s |\n|---|--:|\n| lamella | 7 |\n| peer | 4 |\n"
    assert printed.endswith(table)
    assert "| lamella | 7 |\n    loss: 1.0\n" in printed
