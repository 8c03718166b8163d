"""Run PyTorch's own test files on torch and on lamella, and print the results of both.

    python tools/here.py python tools/torch_tests.py FOLDER [--device cuda] [--ranks 2] [--file NAME] [--test WORD]

FOLDER holds files of `test/distributed/_composable/fsdp` in PyTorch's sources, of the installed release. The files are
copied, with an import of `torch_tests_stand_in.py` in front and, on a CPU, with the device's name replaced. PyTorch's
test helpers need the package `expecttest`. Only tests passed by torch count for lamella.
"""

import argparse
import collections
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
IMPLEMENTATIONS = ("torch", "lamella")
RAISED = re.compile(r"^(?:E +)?((?:\w+\.)*\w*(?:Error|Exception|Exit|Warning|Unsupported)\b.*)$", re.MULTILINE)
ON_CPU = (
    (r'"cuda(:\d)?"', '"cpu"'),
    (r"device_ids=\[self\.rank\]", "device_ids=None"),
    (r"\.cuda\(\)", '.to("cpu")'),
    (r"torch\.cuda\.", "torch.cpu."),
    (
        r"torch\.device\(\s*device_type\.type, torch\.get_device_module\(device_type\)\.current_device\(\)\s*\)",
        "device_type",
    ),
    (r"min_world_size = (\d+)", r"min_world_size = min(\1, torch.cpu.device_count())"),
)
PRIVATE = ((r"(?m)^ *self\.assertTrue\(backward_count >= .*\)$", ""),)  # counts calls of a private torch function


@dataclass
class Outcome:
    """The outcome of a test, with a one-line reason."""

    word: str
    reason: str = ""


@dataclass
class FileRun:
    """One file on one implementation."""

    file: Path
    implementation: str
    timeout_s: float  # for one test
    ends_at: float  # as `time.monotonic()` counts
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def finish(self, environment: dict[str, str], selected: list[str]) -> "FileRun":
        """Run tests until each has an outcome: after a hang or a crash of the process, run the remaining tests."""
        while time.monotonic() < self.ends_at:
            skipped = [f"--deselect={self.file.name}::{test}" for test in self.outcomes]
            started = self._run_once(environment, [*selected, *skipped])
            if started is None:
                break
            self.outcomes[started] = Outcome("stopped", "ran past the time limit or ended the process")
        return self

    def _run_once(self, environment: dict[str, str], args: list[str]) -> str | None:
        """Run the tests without an outcome. Return the test in which the process ended, None if all tests ended."""
        command = [sys.executable, "-m", "pytest", "-p", "torch_tests_events", "-p", "no:cacheprovider", "-q"]
        command += ["-c", "/dev/null", "--rootdir", str(self.file.parent), self.file.name, *args]
        with tempfile.NamedTemporaryFile("r") as events, tempfile.TemporaryFile("w+") as output:
            variables = {
                **environment,
                "TORCH_TESTS_IMPLEMENTATION": self.implementation,
                "TORCH_TESTS_EVENTS": events.name,
            }
            process = subprocess.Popen(
                command,
                cwd=self.file.parent,
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            while process.poll() is None and time.monotonic() < self.ends_at and _age_s(events.name) < self.timeout_s:
                time.sleep(0.5)
            _end(process)
            output.seek(0)
            return self._take(events.read().splitlines(), output.read())

    def _take(self, events: list[str], output: str) -> str | None:
        started = None
        for event in map(json.loads, events):
            if event["word"] == "started":
                started = event["test"]
            else:
                started = None
                self.outcomes[event["test"]] = Outcome(event["word"], _last_error(event["text"]))
        if not events and not self.outcomes:
            self.outcomes["(the file)"] = Outcome("failed", _last_error(output))
        return started


def main(arguments: list[str]) -> int:
    """Run the files and print a table. The exit code is 0 if lamella passes every test passed by torch."""
    options = _options(arguments)
    environment = _environment(options)
    selected = ["-k", options.test] if options.test else []
    is_same = True
    with tempfile.TemporaryDirectory() as folder:
        for file in _adapted(options, Path(folder)):
            ends_at = time.monotonic() + options.limit
            runs = [FileRun(file, name, options.timeout + 30.0, ends_at) for name in options.implementation]
            with ThreadPoolExecutor(len(runs) if options.together else 1) as pool:
                finished = list(pool.map(lambda run: run.finish(environment, selected), runs))
            is_same &= _print_table(file.stem, finished)
    return not is_same


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="on a CPU, as how many accelerators it counts")
    parser.add_argument("--file", default="", help="only files whose names end with this")
    parser.add_argument("--test", default="", help="only tests that pytest's -k selects with this")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one test")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for one file")
    parser.add_argument("--together", action="store_true", help="run the implementations at the same time")
    parser.add_argument("--implementation", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    return parser.parse_args(arguments)


def _environment(options: argparse.Namespace) -> dict[str, str]:
    on_cpu = {"TORCH_TESTS_RANKS_ON_CPU": str(options.ranks), "CUDA_VISIBLE_DEVICES": ""}
    path = os.pathsep.join(filter(None, [str(TOOLS), os.environ.get("PYTHONPATH")]))
    once = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    once["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(int(options.timeout))  # limit inside PyTorch's tests
    return {**os.environ, **once, "PYTHONPATH": path, **(on_cpu if options.device == "cpu" else {})}


def _adapted(options: argparse.Namespace, folder: Path) -> Iterator[Path]:
    """Copy each selected file, with the import of the stand-ins before all other imports."""
    for file in sorted(options.folder.glob("test_*.py")):
        if file.stem.endswith(options.file):
            text = file.read_text(encoding="utf-8")
            for pattern, replacement in (*PRIVATE, *(ON_CPU if options.device == "cpu" else ())):
                text = re.sub(pattern, replacement, text)
            adapted = folder / file.name
            adapted.write_text(f"import torch_tests_stand_in\n{text}", encoding="utf-8")
            yield adapted


def _age_s(file: str) -> float:
    return time.time() - os.stat(file).st_mtime


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process with all ranks of its tests: the ranks belong to the process's session and group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def _last_error(text: str) -> str:
    if "Skipped: " in text:
        return text.rpartition("Skipped: ")[2].rstrip("')")
    errors = RAISED.findall(text)
    return " ".join(errors[-1].split())[:200] if errors else text.strip()[-200:]


def _print_table(file: str, runs: list[FileRun]) -> bool:
    """Print the outcome of each test. Return True if the last implementation passes every test the first passes."""
    counts = [collections.Counter(outcome.word for outcome in run.outcomes.values()) for run in runs]
    print(f"\n## {file}")
    for run, count in zip(runs, counts, strict=True):
        print(f"{run.implementation}: {', '.join(f'{count[word]} {word}' for word in sorted(count))}")
    for test in dict.fromkeys(test for run in runs for test in run.outcomes):
        ends = [run.outcomes.get(test, Outcome("missing")) for run in runs]
        if any(end.word != "passed" for end in ends):
            print(f"  {test}: {' | '.join(f'{end.word} {end.reason}'.strip() for end in ends)}")
    sys.stdout.flush()
    first, last = runs[0].outcomes, runs[-1].outcomes
    return all(last.get(test, Outcome("")).word == "passed" for test, end in first.items() if end.word == "passed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
