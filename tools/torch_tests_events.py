"""A pytest plugin that writes each test's outcome to a file at once: a killed process loses no outcome."""

import json
import os

import pytest


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write the start of a test."""
    _write(nodeid, "started")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the outcome of a test."""
    if report.when == "call" or report.outcome != "passed":
        _write(report.nodeid, report.outcome, report.longreprtext)


def _write(nodeid: str, word: str, text: str = "") -> None:
    with open(os.environ["TORCH_TESTS_EVENTS"], "a", encoding="utf-8") as events:
        events.write(json.dumps({"test": nodeid.partition("::")[2], "word": word, "text": text}) + "\n")
