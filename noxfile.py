"""All sessions of the project.

`./dev NAME` runs one session, `./dev "unit(engine)"` one with a choice, and `./dev tests` the sessions a change must
pass. A session installs its requirements in a separate environment, pinned by constraints.txt. Sessions for GPUs
(`gpu`, `te`, `ssm`, `hybrid`, `bench`, `megatron(gpu-1)`) install nothing: such sessions run in the interpreter named
by the variable PYTHON, and name versions that differ from constraints-gpu.txt; `gpu_environment` installs these
versions.
"""

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nox
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent
PACKAGES = [
    *("layout", "schedule", "trace", "buffers", "precision", "engine", "optim", "files", "checkpoint", "convert"),
    *("transformers", "mamba", "qwen", "megatron", "lamella"),
]
FOLDERS = {
    **{package: ROOT / "packages" / package for package in PACKAGES},
    "testing": ROOT / "testing",
    "integration": ROOT / "integration",
}
GPU_EXTRAS = {"precision": "te", "mamba": "ssm", "megatron": "mcore"}  # of vendors' libraries
CLIENTS = FOLDERS["integration"] / "tests" / "clients"
BYTECODE = ROOT / ".nox" / "bytecode"  # of libraries, compiled once for all environments
_BUILT_WHEELS: list[TemporaryDirectory[str]] = []  # none or one
SOURCES = [str(folder.relative_to(ROOT) / "src") for folder in FOLDERS.values()]
TESTS = [*(f"packages/{name}/tests" for name in PACKAGES), "testing/tests", "integration/tests", "tests"]
CPU_ONLY = "not gpu1 and not gpu2 and not gpu4 and not te and not ssm and not hybrid and not slow and not peer"
CPU_PEER = CPU_ONLY.replace("not peer", "peer")
MEGATRON_CORE = "megatron-core==0.19.2"
TORCHTITAN = ["torchtitan==0.3.0", "spmd-types==0.2.3"]
FINE_TUNERS = ["axolotl==0.19.0", "addict==2.4.0", "llamafactory==0.9.5", "nemo-automodel==0.7.0"]
TRITON = "triton>=3.7"  # Not in constraints.txt: torch's CUDA build pins triton, see `pins`.
PLAIN_PINS = ["--quiet", "--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
OLDEST_TORCH = "torch==2.11.*"
NEWEST_TORCH = "torch==2.15.*"
OLDEST_PYTHON = "3.11"  # uv resolves for 3.11.0: Debian's python3 is no newer than 3.11.2.

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv"


@nox.session
def tests(session: nox.Session) -> None:
    """Run every check of a change that needs no GPU."""
    units = [f"unit({package})" for package in [*PACKAGES, "testing"]]
    for name in ["lint", "types", "contracts", *units, "integration(cpu)", "megatron(cpu)", "docs"]:
        session.notify(name, [])


@nox.session(default=False, reuse_venv=True)
def train(session: nox.Session) -> None:
    """Train a small language model on real text, on two CPU ranks or every GPU; a second run resumes.

    Arguments go to `lamella train`: ./dev train --steps 50 --data book.txt
    """
    _install(session, *_editable("lamella", "qwen"))
    session.chdir(session.invoked_from)
    # Interrupted, the run finishes and saves its step. Ctrl-C interrupts nox too: nox must wait for the save.
    session.run("lamella", "train", *session.posargs, interrupt_timeout=None)


@nox.session(default=False)
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff; `./dev lint --fix` applies ruff's repairs."""
    _install(session, "--group", "lint")
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []))
    session.run("ruff", "format", *([] if fix else ["--check", "--diff"]))


@nox.session(default=False)
def types(session: nox.Session) -> None:
    """Check the annotations of every package and of the tests with mypy --strict; name paths to check fewer."""
    _install(session, *_editable(*FOLDERS), "--group", "types")
    session.run("mypy", "--num-workers", "2", *(session.posargs or [*SOURCES, "tools", "noxfile.py"]))
    # A run for each folder of tests: `conftest` is a module in nearly all. The runs share a cache, and take seconds.
    with ThreadPoolExecutor(max_workers=2) as runs:
        list(runs.map(lambda folder: session.run("mypy", folder), [] if session.posargs else TESTS))


@nox.session(default=False)
def contracts(session: nox.Session) -> None:
    """Hold imports against the layers and the declared dependencies, and the workspace against its rules."""
    _install(session, "--group", "contracts", "--group", "parallel")
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(SOURCES)})
    for folder in FOLDERS.values():
        session.chdir(folder)
        session.run("deptry", "src")
    session.chdir(ROOT)
    session.run("python", "-m", "pytest", *_processes(session.posargs), "tests/workspace", *session.posargs)


@nox.session(default=False)
@nox.parametrize("package", [*PACKAGES, "testing"], ids=[*PACKAGES, "testing"])
def unit(session: nox.Session, package: str) -> None:
    """Test one package as it ships: from the wheel, with declared dependencies only."""
    _install_shipped(session, package, _wheels(session, _siblings(package, tested=True)))
    _pytest_installed(session, FOLDERS[package] / "tests", "--ignore-glob", "*/tests/mcore")


@nox.session(default=False)
@nox.parametrize("device", ["cpu"], ids=["cpu"])
def integration(session: nox.Session, device: str) -> None:
    """Test the packages together, from their wheels: parity, the command line, the documentation's code."""
    _install_shipped(session, "integration", _wheels(session, _siblings("integration", tested=True)))
    folders = [FOLDERS["integration"] / "tests", ROOT / "tests" / "documentation"]
    _pytest_installed(session, *folders, "--ignore", CLIENTS)


@nox.session(default=False)
def fsdp2(session: nox.Session) -> None:
    """Run the suite that lamella shares with FSDP2 on FSDP2 itself: after a change of torch or of the suite."""
    _install_shipped(session, "integration", _wheels(session, _siblings("integration", tested=True)))
    _pytest_installed(session, FOLDERS["integration"] / "tests" / "fsdp2", marks=CPU_PEER)


@nox.session(default=False)
@nox.parametrize("package", [*PACKAGES, "testing", "integration"], ids=[*PACKAGES, "testing", "integration"])
def oldest(session: nox.Session, package: str) -> None:
    """Test one package, or all packages together, under the oldest supported torch."""
    _test_under(session, package, OLDEST_TORCH)


@nox.session(default=False)
@nox.parametrize("package", [*PACKAGES, "testing", "integration"], ids=[*PACKAGES, "testing", "integration"])
def newest(session: nox.Session, package: str) -> None:
    """Test one package, or all packages together, under the newest torch that was tried."""
    _test_under(session, package, NEWEST_TORCH)


# On GPUs without an environment: False, where None is nox's own interpreter.
@nox.session(default=False)
@nox.parametrize(
    ("python", "device"),
    [(None, "cpu"), (False, "gpu-1"), (False, "gpu-2"), (False, "gpu-4")],
    ids=["cpu", "gpu-1", "gpu-2", "gpu-4"],
)
def megatron(session: nox.Session, device: str) -> None:
    """Test the Megatron adapter against a real megatron-core: on CPU, or on GPUs with Transformer Engine too."""
    if device != "cpu":
        _run_here(session, "megatron", device)
        return
    _install_shipped(session, "megatron", _wheels(session, _siblings("megatron", tested=True)))
    _install_megatron_core(session)
    _pytest_installed(session, FOLDERS["megatron"] / "tests")


@nox.session(default=False)
def clients(session: nox.Session) -> None:
    """Train with libraries that shard by FSDP2, and with lamella in place of FSDP2, on CPU: results must be equal."""
    _install_shipped(session, "integration", _wheels(session, _siblings("integration", tested=True)))
    _install(session, "--group", "clients", TRITON)  # torchtitan imports Triton kernels, and runs none on a CPU
    # Their metadata requires data sets, trackers and other versions of libraries; code that shards needs none of them.
    _install(session, "--no-deps", *TORCHTITAN, *FINE_TUNERS)
    _pytest_installed(session, CLIENTS, "-W", "default")  # the libraries' warnings


@nox.session(default=False)
def narrow_states(session: nox.Session) -> None:
    """Test the optimizer states of `lamella[torchao]` apart: `import transformers` imports an installed torchao."""
    _install_shipped(session, "lamella", _wheels(session, _siblings("lamella", tested=True)))
    # Compiled by uv: Python would warn of escapes in torchao's texts, and tests turn warnings into errors.
    _install(session, "--compile-bytecode", "torchao")
    _pytest_installed(session, FOLDERS["lamella"] / "tests" / "training" / "test_narrow_states.py")


@nox.session(default=False)
def lm_eval(session: nox.Session) -> None:
    """Test the tasks of `lamella[eval]` with lm-eval itself, which brings some forty packages."""
    _install_shipped(session, "lamella", _wheels(session, _siblings("lamella", tested=True)))
    _install(session, "lm-eval[hf]")
    _pytest_installed(session, FOLDERS["lamella"] / "tests" / "inference" / "test_lm_eval.py")


@nox.session(default=False, venv_backend="none")
def gpu_environment(session: nox.Session) -> None:
    """Install all packages, the vendors' libraries and the tests' into the interpreter named by PYTHON.

    At the versions of constraints-gpu.txt. Needs a package index, an installed torch and CUDA's compiler, since some
    wheels are built. The sessions for GPUs name installed versions that differ from the file.
    """
    members = [f"{FOLDERS[name]}[{extra}]" for name, extra in GPU_EXTRAS.items()]
    members += [str(FOLDERS[name]) for name in FOLDERS if name not in GPU_EXTRAS]
    editable = [part for member in members for part in ("--editable", member)]
    # `--no-config`: pyproject.toml pins another torch, of the sessions without a GPU.
    options = ["--no-config", "--constraint", str(ROOT / "constraints-gpu.txt")]
    # Their builds compile against the torch that is installed.
    for built in ("transformer-engine-torch", "mamba-ssm", "causal-conv1d"):
        options += ["--no-build-isolation-package", built]
    _uv(session, "pip", "install", "--python", os.environ.get("PYTHON", "python3"), *options, *editable, "pytest")


@nox.session(default=False, venv_backend="none")
@nox.parametrize("num_gpus", [1, 2, 4], ids=["1", "2", "4"])
def gpu(session: nox.Session, num_gpus: int) -> None:
    """Run the tests for this number of GPUs, in the interpreter named by PYTHON; fail with fewer GPUs."""
    _run_here(session, "gpu", str(num_gpus))


@nox.session(default=False, venv_backend="none")
def te(session: nox.Session) -> None:
    """Run the tests for Transformer Engine and two GPUs, in the interpreter named by PYTHON; fail without either."""
    _run_here(session, "te")


@nox.session(default=False, venv_backend="none")
@nox.parametrize("device", ["gpu-1"], ids=["gpu-1"])
def ssm(session: nox.Session, device: str) -> None:
    """Run the tests for mamba-ssm's kernels, in the interpreter named by PYTHON; fail without mamba-ssm or a GPU."""
    _run_here(session, "ssm", device)


@nox.session(default=False, venv_backend="none")
@nox.parametrize("device", ["gpu-2"], ids=["gpu-2"])
def hybrid(session: nox.Session, device: str) -> None:
    """Test megatron-core's HybridModel with its kernels, in the interpreter named by PYTHON.

    Fails without two GPUs, megatron-core, Transformer Engine, mamba-ssm, causal-conv1d and flash-linear-attention.
    """
    _run_here(session, "hybrid", device)


@nox.session(default=False, venv_backend="none")
@nox.parametrize("num_gpus", [1, 2, 4], ids=["1", "2", "4"])
def bench(session: nox.Session, num_gpus: int) -> None:
    """Measure lamella and its peers on this number of GPUs, in the interpreter named by PYTHON."""
    _run_here(session, "bench", str(num_gpus))


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """Run every test marked slow (creeping memory, repeatedly killed runs, all meshes and models), for minutes."""
    _install(session, *_editable(*FOLDERS), *(part for name in FOLDERS for part in _group(name, "test")))
    _install_megatron_core(session)
    session.run("python", str(ROOT / "tools" / "here.py"), "soak", *session.posargs)


@nox.session(default=False)
def model_types(session: nox.Session) -> None:
    """Train and export every causal model type of transformers beside transformers, and write the table; minutes.

    Names of types print their rows and leave the page: ./dev model_types llama mamba
    """
    _install(session, *_editable("integration", "testing", "lamella", "transformers", "qwen", "mamba"))
    page = [] if session.posargs else ["--page", str(ROOT / "docs" / "reference" / "model-types.md")]
    session.run("python", "-W", "ignore", "-m", "lamella_integration.model_types", *page, *session.posargs)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation into site/, refusing warnings; `./dev docs serve` serves and rebuilds the pages."""
    _install(session, "--group", "docs")
    advertising_off = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", *(session.posargs or ["build", "--strict", "--quiet"]), env=advertising_off)


@nox.session(default=False)
def install_lines(session: nox.Session) -> None:
    """Try each line of the documentation that pip reads, in an empty environment; words choose lines that have them."""
    session.run("python", str(ROOT / "tools" / "install_lines.py"), "--try", *session.posargs)


@nox.session(default=False)
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def build(session: nox.Session, package: str) -> None:
    """Build one package for release into dist/ and test the wheel outside the workspace.

    Sibling packages are built from this tree; `--published` takes them from the index, as users will.
    """
    _uv(session, "build", "--no-sources", "--out-dir", ROOT / "dist", FOLDERS[package])
    [wheel] = (ROOT / "dist").glob(f"{_distribution(package).replace('-', '_')}-{_version(package)}-*.whl")
    siblings = ["testing"] if "--published" in session.posargs else _siblings(package, tested=True)[:-1]
    _install_shipped(session, package, [wheel, *_wheels(session, siblings)])
    outside = Path(session.create_tmp()).resolve() / package
    shutil.rmtree(outside, ignore_errors=True)
    shutil.copytree(FOLDERS[package], outside, ignore=shutil.ignore_patterns("src", "mcore"))
    _pytest_installed(session, outside / "tests")


@nox.session(default=False, venv_backend="none")
def release(session: nox.Session) -> None:
    """Build the package named by a tag, if the package is at the tag's version: ./dev release layout-v0.1.0."""
    package, _, version = "".join(session.posargs).partition("-v")
    if package not in PACKAGES or version != _version(package):
        versions = ", ".join(f"{name}-v{_version(name)}" for name in PACKAGES)
        session.error(f"Expected the tag of a package at its present version ({versions}), got {session.posargs}")
    session.notify(f"build({package})", ["--published"])


@nox.session(default=False)
def release_dry_run(session: nox.Session) -> None:
    """Build what the index will hold, install `lamella` from the result alone, and show changes of public names.

    A package whose version has a tag is built from the tag, every other package from this tree. See RELEASING.md.
    """
    index = Path(session.create_tmp()).resolve() / "index"
    shutil.rmtree(index, ignore_errors=True)
    for package in PACKAGES:
        source = _released(session, package) or FOLDERS[package]
        # The index's layout (PEP 503): uv takes a name from the first index with the name, and looks no further.
        _uv(session, "build", "--quiet", "--no-sources", "--out-dir", index / _distribution(package), source)
        files = sorted((index / _distribution(package)).glob("*.*"))
        links = "".join(f'<a href="{file.name}">{file.name}</a>\n' for file in files)
        (index / _distribution(package) / "index.html").write_text(links)
    _install(
        session,
        "--no-sources",
        "--no-config",
        "--index",
        index.as_uri(),
        "lamella[mamba,qwen]",
        "lamella-megatron",
    )
    outside = Path(session.create_tmp()).resolve()
    session.chdir(outside)
    modules = ", ".join(_distribution(package).replace("-", "_") for package in PACKAGES)
    session.run("python", "-I", "-W", "error", "-c", f"import {modules}")
    session.run("lamella", "--version")
    _install(session, "griffelib")
    session.chdir(ROOT)
    session.run("python", "tools/api_diff.py", *PACKAGES)


@nox.session(default=False, venv_backend="none")
def pins(session: nox.Session) -> None:
    """Rewrite constraints.txt with the newest compatible versions; `--upgrade-package NAME` moves one package only."""
    projects = [folder / "pyproject.toml" for folder in FOLDERS.values()]
    groups = [part for name in FOLDERS for part in _group(name, "test")]
    groups += [part for name in _toml(ROOT)["dependency-groups"] for part in ("--group", f"pyproject.toml:{name}")]
    ours = [part for name in FOLDERS for part in ("--no-emit-package", _distribution(name))]
    target = ROOT / "constraints.txt"
    upgrade = session.posargs or ["--upgrade"]
    options = [*PLAIN_PINS, "--python-version", OLDEST_PYTHON, *ours, *groups, *upgrade]
    _uv(session, "pip", "compile", *options, *projects, "--output-file", target)
    # A local build's suffix is specific to a machine, and torch's CUDA build pins CUDA libraries.
    target.write_text(re.sub(r"\+\w+$|^(nvidia|cuda|triton)\b.*\n", "", target.read_text(), flags=re.MULTILINE))


def _released(session: nox.Session, package: str) -> Path | None:
    """A package's folder at the tag of the present version; None for a version without a tag."""
    tag = f"{package}-v{_version(package)}"
    if subprocess.run(
        ["git", "rev-parse", "--quiet", "--verify", f"refs/tags/{tag}"], cwd=ROOT, check=False
    ).returncode:
        return None
    folder = Path(session.create_tmp()).resolve() / tag
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    session.run("git", "-C", str(ROOT), "archive", "--output", f"{folder}.tar", tag, external=True)
    shutil.unpack_archive(f"{folder}.tar", folder, filter="data")
    return folder / "packages" / package


def _install(session: nox.Session, *args: str | Path) -> None:
    """Install into the session's environment, with nothing else importable."""
    session.env["PYTHONPATH"] = ""
    session.install("--constraint", str(ROOT / "constraints.txt"), *map(str, args))


def _editable(*names: str) -> list[str]:
    """Return options to install members and their dependencies straight from the sources."""
    members = dict.fromkeys(sibling for name in names for sibling in _siblings(name))
    return [part for member in members for part in ("--editable", str(FOLDERS[member]))]


def _install_shipped(session: nox.Session, name: str, wheels: list[Path]) -> None:
    """Install a member's wheel, with declared and tests' dependencies; siblings only if among the wheels."""
    _install(session, *wheels, "--no-sources", "--group", "parallel", *_group(name, "test"))


def _test_under(session: nox.Session, package: str, torch: str) -> None:
    """Test a package under another torch than the one pinned by constraints.txt and pyproject.toml."""
    _install_shipped(session, package, _wheels(session, _siblings(package, tested=True)))
    session.install("--no-config", torch)
    documentation = [ROOT / "tests" / "documentation"] if package == "integration" else []
    ignored = "--ignore-glob", "*/tests/mcore", "--ignore", CLIENTS
    _pytest_installed(session, FOLDERS[package] / "tests", *documentation, *ignored)


def _install_megatron_core(session: nox.Session) -> None:
    """Install megatron-core, and megatron-core's imports on a CPU."""
    _install(session, "--group", "megatron", TRITON)
    # megatron-core's metadata requires Python 3.12, more than the code, and packages available only for CUDA.
    pip = ["pip", "--python", str(Path(session.virtualenv.location) / "bin" / "python"), "install", "--quiet"]
    session.run(*pip, "--no-deps", "--ignore-requires-python", MEGATRON_CORE, external=True)


def _pytest_installed(session: nox.Session, *args: str | Path, marks: str = CPU_ONLY) -> None:
    """Run tests in a folder, and in a mode (`-I`), where no source tree can be imported by accident."""
    session.chdir(session.create_tmp())
    config = ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    options = [option for option in session.posargs if option != "--published"]
    # Ranks share the cores, and a sum must not depend on the number of cores.
    session.env["OMP_NUM_THREADS"] = "1"
    session.env["PYTHONDONTWRITEBYTECODE"] = ""  # Else every process started by a test compiles torch once more.
    session.env["CUDA_VISIBLE_DEVICES"] = (
        ""  # If torch sees GPUs, forks of a process that ran backward cannot run backward.
    )
    [libraries] = Path(session.virtualenv.location).glob("lib/python*/site-packages")
    _link_bytecode(BYTECODE, libraries)
    # By the environment: pytest-xdist's processes load a plugin of `-p` after the tests' conftest, and so after torch.
    shutil.copy(ROOT / "tools" / "quick_tests.py", libraries)
    session.env["PYTEST_PLUGINS"] = "quick_tests"
    session.run("python", "-I", "-m", "pytest", *config, "-m", marks, *_processes(options), *map(str, args), *options)
    _link_bytecode(libraries, BYTECODE)


def _link_bytecode(source: Path, target: Path) -> None:
    """Link libraries' compiled modules from one folder of libraries to another: to compile torch takes 5 s a process.

    Python takes a file if the module has the size and the time written in the file, and else replaces the link. Modules
    of this workspace are left out: in wheels all have one time.
    """
    for library in source.iterdir() if source.is_dir() else ():
        for file in library.rglob("__pycache__/*.pyc") if not library.name.startswith("lamella") else ():
            link = target / file.relative_to(source)
            # Only beside modules: a new folder could be imported, as if the library were installed.
            if not link.exists() and (target == BYTECODE or link.parent.parent.is_dir()):
                link.parent.mkdir(parents=True, exist_ok=True)
                with suppress(OSError):  # a file system without links: Python compiles
                    link.hardlink_to(file)


def _processes(options: Sequence[str]) -> list[str]:
    """Return pytest's options to share all tests of a folder among up to four processes.

    Arguments select tests or look into tests: pytest then stays in this process, unless arguments say otherwise
    (`-n 2`).
    """
    return [] if options else ["--numprocesses", "logical", "--maxprocesses", "4", "--dist", "worksteal"]


def _wheels(session: nox.Session, names: Iterable[str]) -> list[Path]:
    """Return the paths of the named members' wheels.

    By path: uv knows a cached wheel by name and version only, and would install the old 0.1.0 for a rebuilt one.
    """
    folder = Path(_built_wheels(session).name)
    return [wheel for name in names for wheel in folder.glob(f"{_distribution(name).replace('-', '_')}-*.whl")]


def _built_wheels(session: nox.Session) -> TemporaryDirectory[str]:
    """Build all members' wheels, all in the time of one and once in a run of nox, at whose end they are removed.

    A source edited during the run is not in the wheels of later sessions: a run tests the tree that it began with.
    """
    if not _BUILT_WHEELS:
        folder = TemporaryDirectory(prefix="wheels-")
        _uv(session, "build", "--quiet", "--wheel", "--no-sources", "--all-packages", "--out-dir", folder.name, ROOT)
        _BUILT_WHEELS.append(folder)
    return _BUILT_WHEELS[0]


def _siblings(name: str, *, tested: bool = False) -> list[str]:
    """Return a member and its direct and indirect dependencies among the members: the lowest first, itself last.

    Args:
        tested: Include the dependencies of the member's own tests.
    """
    project = _toml(FOLDERS[name])
    declared = [*project["project"]["dependencies"], *(project["dependency-groups"]["test"] if tested else [])]
    members = {_distribution(member): member for member in FOLDERS}
    required = [Requirement(text).name for text in declared]
    below = [sibling for item in required if item in members for sibling in _siblings(members[item])]
    return list(dict.fromkeys([*below, name]))


def _group(name: str, group: str) -> list[str]:
    return ["--group", f"{FOLDERS[name] / 'pyproject.toml'}:{group}"]


def _distribution(name: str) -> str:
    return str(_toml(FOLDERS[name])["project"]["name"])


def _version(name: str) -> str:
    return str(_toml(FOLDERS[name])["project"]["version"])


def _toml(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def _run_here(session: nox.Session, *args: str) -> None:
    python = os.environ.get("PYTHON", "python3")
    session.run(python, str(ROOT / "tools" / "here.py"), *args, *session.posargs, external=True)


def _uv(session: nox.Session, *args: str | Path) -> None:
    session.run("uv", *map(str, args), external=True, log="--quiet" not in args)
