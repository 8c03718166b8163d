"""A pytest plugin that writes the outcome of each test to a file of JSON lines as soon as the test has ended.

`tools/here.py ... --status FILE` loads it. A session that is cut off keeps its outcomes, and the same command with the
same file goes on: tests that passed or were skipped at the same commit are deselected.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_status import lines_of


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the file and of the run's fields."""
    group = parser.getgroup("outcomes")
    group.addoption("--outcomes", type=Path, required=True, help="file of JSON lines, a line an outcome")
    group.addoption("--outcomes-of", type=json.loads, required=True, help="fields of gpu_status.FolderRun, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Write outcomes from the process that gathers them all, and deselect in every process."""
    outcomes = _OutcomeWriter(config.getoption("--outcomes"), config.getoption("--outcomes-of"), config)
    config.pluginmanager.register(outcomes)


class _OutcomeWriter:
    def __init__(self, file: Path, run: dict[str, str], config: pytest.Config) -> None:
        self._file = file
        self._run = run
        worker: dict[str, Any] | None = getattr(config, "workerinput", None)  # of a process of pytest-xdist
        self._writes = worker is None
        # A process that replaces one that died must collect the tests that the first ones did: the file has grown.
        self._before: dict[str, str] = worker["outcomes"] if worker else outcomes_of(run, file)
        self._expected = set(self._before)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["outcomes"] = self._before

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = [item for item in items if self._before.get(item.nodeid) in ("passed", "skipped")]
        if done:
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item not in done]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._expect(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped or report.when == "call":
            self._write([report.nodeid], report.outcome)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._before:
            session.exitstatus = pytest.ExitCode.OK  # all have passed before

    def _expect(self, tests: list[str]) -> None:
        self._write([test for test in tests if test not in self._expected], "not run")
        self._expected |= set(tests)  # every process of pytest-xdist collects them

    def _write(self, tests: list[str], outcome: str) -> None:
        if self._writes:
            lines = [json.dumps({**self._run, "test": test, "outcome": outcome}) + "\n" for test in tests]
            # Begun by the end of a line that may lack its own: the process before may have been killed at any moment.
            start = "" if _ends_a_line(self._file) else "\n"
            with self._file.open("ab", buffering=0) as file:
                file.write("".join([start, *lines]).encode())


def outcomes_of(run: dict[str, str], file: Path) -> dict[str, str]:
    """The outcomes of earlier commands of the same run, by test; none for code that no commit names."""
    if run["commit"].endswith("-dirty") or run["commit"] == "unknown":
        return {}
    names = run.keys() - {"date"}
    lines = [line for line in lines_of(file) if "test" in line and all(line.get(name) == run[name] for name in names)]
    return {line["test"]: line["outcome"] for line in lines}


def _ends_a_line(file: Path) -> bool:
    return not file.is_file() or not file.stat().st_size or file.read_bytes().endswith(b"\n")
