"""The harness for the host's time runs, and the counts are right; nothing is timed."""

import subprocess
import sys


def test_every_backend_has_a_row_and_lamella_costs_fewer_operators_and_calls_than_fsdp2() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "lamella_integration.host_time", "--layers", "2", "--steps", "2"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = {cells[1].strip(): cells for line in printed.splitlines()[2:] if len(cells := line.split("|")) > 2}
    assert list(rows) == ["plain", "fsdp2", "lamella", "lamella_copy_engines"]
    operators, calls = ({name: int(cells[i].replace(",", "")) for name, cells in rows.items()} for i in (-3, -2))
    for name in ("lamella", "lamella_copy_engines"):
        assert 0 < operators[name] < operators["fsdp2"]
        assert 0 < calls[name] < calls["fsdp2"] / 2
