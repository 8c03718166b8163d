"""A plugin of pytest's that writes each test's end to a file at once: a process that is ended leaves all it knew."""

import json
import os

import pytest


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write that a test begins."""
    _write(nodeid, "started")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write how a test ended."""
    if report.when == "call" or report.outcome != "passed":
        _write(report.nodeid, report.outcome, report.longreprtext)


def _write(nodeid: str, word: str, text: str = "") -> None:
    with open(os.environ["TORCH_TESTS_EVENTS"], "a", encoding="utf-8") as events:
        events.write(json.dumps({"test": nodeid.partition("::")[2], "word": word, "text": text}) + "\n")
