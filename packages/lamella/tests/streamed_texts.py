"""Texts to stream: records of unequal lengths, as JSON lines and in Parquet files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

datasets = pytest.importorskip("datasets", reason="an extra of lamella, which a host with GPUs may lack")

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]


def texts(number: int, count: int) -> list[dict[str, Any]]:
    """Return records of unequal lengths, no two of them alike."""
    return [
        {"text": " ".join([f"file {number} row {row}", *WORDS[: 1 + (row * 7 + number) % 12]])} for row in range(count)
    ]


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_folder(parent: Path) -> Path:
    """Write a folder of three Parquet files, in row groups of 50, and a file of JSON lines."""
    folder = parent / "streamed"
    folder.mkdir()
    for number in range(3):
        table = datasets.Dataset.from_list(texts(number, 120 + 30 * number))
        table.to_parquet(folder / f"part-{number}.parquet", batch_size=50)
    write_lines(folder / "more.jsonl", texts(3, 140))
    return folder
