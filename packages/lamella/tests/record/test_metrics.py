"""The records of a run: damaged lines are read past, and a killed run loses none."""

from pathlib import Path

import pytest

from lamella._record.metrics import Record, SampleRecord, StepRecord, append, read, rewind


def step_record(step: int) -> StepRecord:
    return StepRecord(step=step, loss=1.0, grad_norm=1.0, lr=1.0, tokens_per_s=1.0, memory_nbytes=1, mfu=None)


@pytest.mark.parametrize(
    "damage",
    [
        '{"step": 3, "lo',
        "\0" * 40,
        '{"step": 3}\n',
        '{"step": 3, "nats_per_byte": null}\n',
        '{"step": 3, "nats_per_byte": 1.0, "nats_per_token": 2.0}\n',
        "12\n",
        pytest.param("[" * 100_000 + "\n", id="nested"),
        pytest.param('{"step": 3, "nats_per_byte": ' + "9" * 400 + "}\n", id="huge"),
        "\xff\n",
    ],
)
def test_damaged_lines_are_read_past_and_dropped(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "metrics.jsonl"
    records: list[Record] = [step_record(1), SampleRecord(step=2, number=1, prompt="\u2028", text="\n")]
    append(path, records)
    with path.open("a", encoding="latin-1") as file:
        file.write(damage)
    assert read(path) == records
    assert rewind(path, 2) == 1
    assert read(path) == records and rewind(path, 1) == 0
    assert read(path) == records[:1]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_metrics_records_survive_a_kill_during_a_rewind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "metrics.jsonl"
    append(path, [step_record(1)])
    monkeypatch.setattr("lamella._record.metrics.append", killed)
    with pytest.raises(KeyboardInterrupt):
        rewind(path, 1)
    assert read(path) == [step_record(1)]
