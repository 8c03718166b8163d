"""Automation (workflows, pins, the bootstrap) names existing things, and fails when something is missing."""

import itertools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def sessions() -> set[str]:
    command = ["nox", "-f", str(ROOT / "noxfile.py"), "--list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^[*-] (\S+)", listing, flags=re.MULTILINE))


def _jobs(workflow: Path) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load(workflow.read_text())["jobs"].values()


def _commands(job: dict[str, Any]) -> Iterator[str]:
    """The job's shell commands, for each entry of the job's matrix."""
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    included = matrix.pop("include", [])
    rows = [dict(zip(matrix, values, strict=True)) for values in itertools.product(*matrix.values())] if matrix else []
    for row in [*rows, *included] or [{}]:
        for step in job["steps"]:
            if "run" in step:
                yield re.sub(r"\$\{\{ matrix\.(\w+) \}\}", partial(_value, row), step["run"])


def _value(row: dict[str, Any], name: re.Match[str]) -> str:
    return str(row[name[1]])


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_sessions_that_exist_and_nothing_else(workflow: Path, sessions: set[str]) -> None:
    commands = [command for job in _jobs(workflow) for command in _commands(job)]
    named = [re.fullmatch(r'\./dev "?([\w()-]+)"?( ".*")?', command) for command in commands]
    assert None not in named, commands
    assert {match[1] for match in named if match} <= sessions


def test_continuous_integration_covers_every_package_and_session(sessions: set[str]) -> None:
    run = {command for job in _jobs(ROOT / ".github/workflows/ci.yml") for command in _commands(job)}
    expected = {name for name in sessions if name.startswith("unit(")}
    expected |= {
        "lint",
        "types",
        "contracts",
        "integration(cpu)",
        "docs",
        "fsdp2",
        "megatron(cpu)",
        "clients",
        "lm_eval",
        "narrow_states",
        "release_dry_run",
    }
    near_torch = ("buffers", "engine", "checkpoint", "convert", "lamella", "integration")
    expected |= {f"{release}({name})" for release in ("oldest", "newest") for name in near_torch}
    assert {re.sub(r'\./dev "(.*)"', r"\1", command) for command in run} == expected


def test_every_checking_session_runs_in_a_workflow(sessions: set[str]) -> None:
    run = {command for workflow in WORKFLOWS for job in _jobs(workflow) for command in _commands(job)}
    by_itself = {re.sub(r'\./dev "?([\w()-]+)"?.*', r"\1", command) for command in run}
    by_hand = {"train", "tests", "pins", "gpu_environment"} | {
        name for name in sessions if name.startswith("build(")
    }  # `release` builds
    one_is_enough = {name for name in sessions if name.startswith(("bench(", "oldest(", "newest("))}
    assert sessions - by_itself - by_hand - one_is_enough == set()
    assert {name.partition("(")[0] for name in one_is_enough} <= {name.partition("(")[0] for name in by_itself}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_a_time_limit_and_declared_permissions(workflow: Path) -> None:
    content = yaml.safe_load(workflow.read_text())
    assert content["permissions"] in ({}, {"contents": "read"})
    assert [name for name, job in content["jobs"].items() if "timeout-minutes" not in job] == []


@pytest.mark.parametrize("name", ["release", "pages"])
def test_only_the_job_that_publishes_may_publish(name: str) -> None:
    jobs = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert not list(_commands(jobs["publish"]))


def test_workflows_take_one_version_of_each_action() -> None:
    uses = {
        step["uses"] for workflow in WORKFLOWS for job in _jobs(workflow) for step in job["steps"] if "uses" in step
    }
    assert len(uses) == len({action.partition("@")[0] for action in uses})
    assert [action for action in uses if re.fullmatch(r".*@(main|master|)", action)] == []


FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_github_accepts_each_issue_form(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= set(content)
    fields = [part for part in content["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in fields} <= {"checkboxes", "dropdown", "input", "textarea"}
    assert len({part["id"] for part in fields}) == len(fields) == len({part["attributes"]["label"] for part in fields})


def test_every_workspace_member_has_a_line_in_codeowners() -> None:
    lines = (ROOT / ".github" / "CODEOWNERS").read_text().splitlines()
    paths = {line.split()[0] for line in lines if line and not line.startswith("#")}
    members = {
        f"/{file.parent.relative_to(ROOT)}/"
        for pattern in ("*", "packages/*")
        for file in ROOT.glob(f"{pattern}/pyproject.toml")
    }
    assert {path for path in paths if not (ROOT / path.strip("/")).is_dir()} == set()
    assert members <= paths


def test_the_constraints_are_bare_pins() -> None:
    """No address, no option, no local build's suffix: the file means the same on every machine."""
    assert [line for line in CONSTRAINTS if not re.fullmatch(r"[a-z0-9.-]+==[a-z0-9.]+( ; .*)?", line)] == []


def test_uv_and_the_constraints_pin_the_same_torch() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    [pin] = settings["constraint-dependencies"]
    assert pin in CONSTRAINTS


def test_pins_of_cuda_packages_are_left_to_torch() -> None:
    assert [line for line in CONSTRAINTS if re.match(r"(nvidia|cuda|triton)\b", line)] == []


def test_packages_that_pose_as_a_gpu_are_not_pinned() -> None:
    """Model libraries take the presence of the kernel packages for the presence of a GPU, and fail."""
    poison = {"transformer-engine", "mamba-ssm", "causal-conv1d", "flash-linear-attention", "fla-core"}
    assert poison.isdisjoint(line.partition("==")[0] for line in CONSTRAINTS)


def _fake_torch(folder: Path, num_gpus: int) -> dict[str, str]:
    (folder / "torch.py").write_text(f"class cuda:\n    device_count = staticmethod(lambda: {num_gpus})\n")
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    "command",
    [["gpu", "2"], ["te"], ["megatron", "gpu-2"], ["hybrid", "gpu-2"], ["clients"], ["bench", "2"]],
    ids=" ".join,
)
def test_a_command_for_gpus_fails_without_gpus(tmp_path: Path, command: list[str]) -> None:
    argv = [sys.executable, str(ROOT / "tools" / "here.py"), *command]
    run = subprocess.run(argv, env=_fake_torch(tmp_path, 1), capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.strip() == "Expected at least 2 visible GPUs, got 1."


@pytest.mark.parametrize(("command", "library"), [("megatron", "megatron"), ("ssm", "mamba_ssm")])
def test_a_command_for_a_library_fails_without_the_library(tmp_path: Path, command: str, library: str) -> None:
    argv = [sys.executable, str(ROOT / "tools" / "here.py"), command, "gpu-1"]
    run = subprocess.run(argv, env=_fake_torch(tmp_path, 1), capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert re.match(rf"Expected {library}\S* to be installed in \S+, got: .*No module named '{library}'", run.stderr)


@pytest.mark.parametrize("device", [["--device", "cpu"], ["--device=cpu"]], ids=" ".join)
def test_the_benchmark_on_a_cpu_asks_for_no_gpus(tmp_path: Path, device: list[str]) -> None:
    argv = [sys.executable, str(ROOT / "tools" / "here.py"), "bench", "2", *device]
    run = subprocess.run(argv, env=_fake_torch(tmp_path, 0), capture_output=True, text=True, check=False)
    assert "torch.distributed.run" in run.stderr and "visible GPUs" not in run.stderr


def test_an_unknown_command_of_here_py_is_answered_with_the_known_commands() -> None:
    argv = [sys.executable, str(ROOT / "tools" / "here.py"), "gpus"]
    run = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "gpu 2 [PYTEST ARGS]" in run.stderr


def _pages() -> Iterator[Path]:
    for pattern in ("*.md", "docs/**/*.md", "packages/*/README.md"):
        yield from ROOT.glob(pattern)


def test_the_commands_that_pages_name_exist(sessions: set[str]) -> None:
    named = {
        (str(page.relative_to(ROOT)), match[1] or match[2])
        for page in _pages()
        for match in re.finditer(r'\./dev (?:"([^"]+)"|(\w+))', page.read_text())
    }
    assert {(page, session) for page, session in named if session not in sessions} == set()
    assert {"train", "tests"} <= {session for page, session in named if page == "README.md"}


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in _pages()
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []


@pytest.mark.parametrize(("options", "expected"), [([], 0), (["-k", "nothing_of_this_name"], 5)])
def test_marked_tests_run_by_package_and_finding_none_fails(tmp_path: Path, options: list[str], expected: int) -> None:
    for source in ("tools/here.py", "tools/gpu_status.py", "pyproject.toml"):
        (tmp_path / source).parent.mkdir(exist_ok=True)
        (tmp_path / source).write_text((ROOT / source).read_text())
    for package in ("engine", "layout"):
        tests = tmp_path / "packages" / package / "tests"
        tests.mkdir(parents=True)
        (tests / "test_same_name.py").write_text("import pytest\n@pytest.mark.slow\ndef test_one(): pass\n")
    argv = [sys.executable, str(tmp_path / "tools" / "here.py"), "soak", *options]
    run = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert run.returncode == expected, run.stdout + run.stderr
    assert run.stdout.count("1 passed") == (2 if expected == 0 else 0)
