"""Run tests, benchmarks or any Python command in this interpreter, straight from the sources.

For machines with GPUs, an installed torch and no package index. Needs only the tests' imports (torch, pytest, ...);
makes no environment and installs nothing.

    python tools/here.py gpu 2 [PYTEST ARGS]        tests marked gpu2; fails with fewer than two GPUs. With
                                                    --status FILE first, as in the next five: writes each test's
                                                    outcome, for tools/gpu_status.py; goes on where a command with
                                                    the same FILE was cut off
    python tools/here.py te [PYTEST ARGS]           tests marked te; fails without two GPUs and Transformer Engine
    python tools/here.py ssm gpu-1 [PYTEST ARGS]    tests marked ssm; fails without a GPU and mamba-ssm
    python tools/here.py megatron gpu-2 [PYTEST ARGS]
                                                    tests of the Megatron adapter marked gpu2; fails with fewer
                                                    GPUs, and without megatron-core and Transformer Engine
    python tools/here.py hybrid gpu-2 [PYTEST ARGS] tests of HybridModel with its kernels, marked hybrid; fails without
                                                    two GPUs, megatron-core, Transformer Engine, mamba-ssm,
                                                    causal-conv1d and flash-linear-attention
    python tools/here.py clients [PYTEST ARGS]      tests of libraries that shard by FSDP2: two GPUs and the libraries
    python tools/here.py bench 4 [BENCH ARGS]       the benchmark harness on four GPUs, through torchrun; with
                                                    --device cpu on four CPU ranks
    python tools/here.py soak [PYTEST ARGS]         tests marked slow: minutes
    python tools/here.py python -m lamella train    any Python command with the sources on its path

Commands for GPUs name installed versions that differ from constraints-gpu.txt, the tested ones, and go on.

With LAMELLA_RANKS_PER_GPU=2 in the environment two ranks of a test share a GPU, so that `gpu 2` needs one: the same
results, at the speed of sockets. `-n 4` shares the tests of a folder among four processes (pytest-xdist); tests marked
`alone` run after them, one at a time.
"""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import gpu_status

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = ROOT / "integration" / "tests" / "clients"
MEGATRON = ROOT / "packages" / "megatron" / "tests" / "mcore"
TESTS = [*sorted(ROOT.glob("packages/*/tests")), ROOT / "integration" / "tests", ROOT / "tests" / "soak"]
# The tests of `lamella train`, which refuses to share a GPU among ranks.
COMMAND_TESTS = ROOT / "packages" / "lamella" / "tests" / "training" / "test_gpu.py"
HYBRID_LIBRARIES = ("megatron.core", "transformer_engine", "mamba_ssm", "causal_conv1d", "fla")
NO_TESTS_RAN = 5  # pytest's exit code
RANKS_PER_GPU = int(os.environ.get("LAMELLA_RANKS_PER_GPU", "1"))  # as lamella_testing reads it
_ALL_THE_SAME = ("-q", "-v", "-x", "-s")  # arguments of pytest's that select no tests
_ALL_THE_SAME_WITH_VALUE = ("-n", "-p", "-W", "--timeout", "--durations", "--maxfail")


def main(args: list[str]) -> int:
    match args:
        case ["gpu", num_gpus, *rest] if num_gpus.isdecimal():
            return _require_gpus_for(int(num_gpus)) or _pytest(f"gpu{num_gpus}", rest, session=f"gpu({num_gpus})")
        case ["te", *rest]:
            return _require_gpus_for(2) or _pytest("te", rest, session="te")
        case ["ssm", "gpu-1", *rest]:
            return _require_gpus(1) or _require("mamba_ssm") or _pytest("ssm", rest, session="ssm(gpu-1)")
        case ["megatron", "gpu-1" | "gpu-2" | "gpu-4" as device, *rest]:
            num_gpus = device.removeprefix("gpu-")
            missing = _require_gpus_for(int(num_gpus)) or _require("megatron.core", "transformer_engine")
            return missing or _pytest(f"gpu{num_gpus}", rest, session=f"megatron({device})", folders=[MEGATRON])
        case ["hybrid", "gpu-2", *rest]:
            missing = _require_gpus_for(2) or _require(*HYBRID_LIBRARIES)
            return missing or _pytest("hybrid", rest, session="hybrid(gpu-2)", folders=[MEGATRON])
        case ["clients", *rest]:
            shows_warnings = ["-W", "default"]  # the libraries' own
            return _require_gpus(2) or _pytest(
                "gpu2", rest, session="clients", folders=[CLIENTS], options=shows_warnings
            )
        case ["bench", num_gpus, *rest] if num_gpus.isdecimal():
            is_on_cpu = "--device cpu" in " ".join(rest).replace("=", " ")
            return (0 if is_on_cpu else _require_gpus(int(num_gpus))) or _bench(num_gpus, rest)
        case ["soak", *rest]:
            return _pytest("slow", rest, session="soak")
        case ["python", *rest]:
            _become(*rest)
    print(f"Expected one of the commands below, got {' '.join(args)!r}.\n\n{__doc__}", file=sys.stderr)
    return 2


def _pytest(
    marker: str, args: list[str], *, session: str, folders: list[Path] = TESTS, options: Sequence[str] = ()
) -> int:
    """Run the marked tests, one folder at a time: pytest rejects test files of the same name in two folders.

    `options` are pytest's before `args`, which may override them.
    """
    status = None
    if args[:1] == ["--status"]:
        if not args[1:] or args[1].startswith("-"):
            argument = args[1] if args[1:] else "nothing"
            print(f"Expected a file after --status, got {argument}. Give one, such as runs.jsonl.", file=sys.stderr)
            return 2
        status, args = Path(args[1]), args[2:]
        if not status.absolute().parent.is_dir():
            print(f"Expected a file in a folder that exists after --status, got {str(status)!r}.", file=sys.stderr)
            return 2
    recorded = session if RANKS_PER_GPU == 1 else f"{session}, {RANKS_PER_GPU} ranks a GPU"
    ignored = [] if folders == [CLIENTS] else [CLIENTS]  # needs libraries that no other test needs
    if session.startswith("gpu("):
        ignored.append(MEGATRON)
    if RANKS_PER_GPU > 1 and marker != "gpu1":
        ignored.append(COMMAND_TESTS)
    ignores = [f"--ignore={path}" for path in ignored]
    marked = [folder for folder in folders if _marked(folder, [marker], ignored)]
    results: list[int] = []
    selected = _selected(marked, args)
    if args and not selected:
        print(f"Expected tests of the session {session} in {' '.join(args)}, got none.", file=sys.stderr)
    for folder, chosen in selected.items():
        writes: list[str] = []
        if status is not None:
            selection = _selection([arg for arg in chosen if ROOT / arg != folder])
            run = gpu_status.description(session=recorded, folder=folder, selection=selection)
            writes = ["-p", "outcomes", f"--outcomes={status}", f"--outcomes-of={json.dumps(run)}"]
        for expression, arguments in _parts(marker, folder, chosen, ignored):
            results.append(_pytest_in(expression, [*options, *writes, *ignores, *arguments]))
            if results[-1] < 0:
                print(f"pytest in {folder} was killed by signal {-results[-1]}.", file=sys.stderr)
    # The first that failed, not the greatest: a child killed by a signal has a negative code.
    ran = [result for result in results if result != NO_TESTS_RAN]
    return next((result for result in ran if result), 0 if ran else NO_TESTS_RAN)


@cache
def _name_differences() -> None:
    """Name installed versions that differ from the tested ones, once."""
    pins = (ROOT / "constraints-gpu.txt").read_text(encoding="utf-8").splitlines()
    if differences := ", ".join(_differences(pins)):
        print(f"Not the versions of constraints-gpu.txt: {differences}", file=sys.stderr)


def _differences(pins: Iterable[str]) -> Iterator[str]:
    """Installed versions other than pinned, by the pinned distributions that are installed."""
    for pin in pins:
        name, _, version = pin.partition("==")
        try:
            installed = metadata.version(name).partition("+")[0]  # without the build, as in 2.11.0+cu130
        except metadata.PackageNotFoundError:
            continue
        if installed != version:
            yield f"{name} {installed}, not {version}"


def _parts(marker: str, folder: Path, args: list[str], ignored: Sequence[Path] = ()) -> list[tuple[str, list[str]]]:
    """The runs of pytest for a folder, each a marker expression and arguments.

    Tests marked `hybrid`, which need more libraries than the other sessions ask for, run in their own session alone.
    With several processes (`-n`) a second run has the tests marked `alone`: beside others on the GPU they would fail.
    """
    if marker == "slow":  # also of files whose marks stand in a module that they import
        return [(marker, args)]
    hybrid = marker != "hybrid" and _marked(folder, ["hybrid"])
    expression = f"{marker} and not hybrid" if hybrid else marker
    marked = _marked(folder, [marker], ignored)
    alone = _marked(folder, [marker, "alone"], ignored)
    if "-n" not in args or not alone:
        return [(expression, _narrowed(args, folder, marked))]
    value = args.index("-n") + 1
    by_itself = [*args[:value], "0", *args[value + 1 :]]
    return [
        (f"{expression} and not alone", _narrowed(args, folder, marked)),
        (f"{expression} and alone", _narrowed(by_itself, folder, alone)),
    ]


def _marked(folder: Path, markers: list[str], ignored: Sequence[Path] = ()) -> list[Path]:
    """The test files of a folder whose source, or a conftest.py beside or above, may have each marker.

    Files within `ignored` are left out.
    """
    files = [file for file in sorted(folder.rglob("test_*.py")) if not any(map(file.is_relative_to, ignored))]
    return [file for file in files if all(_may_have(marker, file, folder) for marker in markers)]


def _may_have(marker: str, file: Path, folder: Path) -> bool:
    conftests = [parent / "conftest.py" for parent in file.parents if parent.is_relative_to(folder)]
    sources = "".join(_source(path) for path in (file, *conftests))
    is_computed = 'getattr(pytest.mark, f"gpu' in sources and marker.startswith("gpu")
    return f"mark.{marker}" in sources or is_computed


@cache
def _source(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _narrowed(args: list[str], folder: Path, files: list[Path]) -> list[str]:
    """`args` with the folder replaced by its marked files.

    To deselect the tests of a file, pytest imports the file: of all files of `integration` for twenty seconds, and an
    import of flash-linear-attention by one of them would use CUDA, after which no rank could be forked.
    """
    return [path for arg in args for path in (map(str, files) if ROOT / arg == folder else [arg])]


def _selected(folders: list[Path], args: list[str]) -> dict[Path, list[str]]:
    """Arguments by folder: the paths among `args` inside the folder; without paths, every folder as a path."""
    paths = [arg for arg in args if "/" in arg and (ROOT / arg.partition("::")[0]).exists()]
    options = [arg for arg in args if arg not in paths]
    if not paths:
        return {folder: [str(folder), *options] for folder in folders}
    within = {folder: [path for path in paths if (ROOT / path).is_relative_to(folder)] for folder in folders}
    return {folder: [*selected, *options] for folder, selected in within.items() if selected}


def _selection(args: list[str]) -> str:
    """The arguments that leave tests out."""
    before = ["", *args]
    return " ".join(
        arg
        for arg, last in zip(args, before, strict=False)
        if arg.partition("=")[0] not in (*_ALL_THE_SAME, *_ALL_THE_SAME_WITH_VALUE)
        and last not in _ALL_THE_SAME_WITH_VALUE
    )


def _pytest_in(marker: str, args: list[str]) -> int:
    if marker != "slow":  # of any device
        _name_differences()
    config = ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), *(["-p", "xdist"] if "-n" in args else [])]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # Plugins installed on the machine could change results.
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # Ranks share the cores; sums must not depend on the number of cores.
    # The import of megatron-core asks for GPUs. After a question to the driver, the process's forks could use no GPU.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return _python("-m", "pytest", *config, "-m", marker, *args, path=[ROOT / "tools"])


def _bench(num_gpus: str, args: list[str]) -> int:
    _name_differences()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_gpus]
    return _python(*torchrun, "-m", "lamella_integration.bench", *args)


def _require_gpus_for(num_ranks: int) -> int:
    return _require_gpus(-(-num_ranks // RANKS_PER_GPU))


def _require_gpus(num_gpus: int) -> int:
    """Fail early without enough GPUs: tests must not pass by skipping. Counts in a child, to leave no CUDA context."""
    count = f"import sys, torch; n = torch.cuda.device_count(); print(n); sys.exit(n < {num_gpus})"
    child = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=False)
    if child.returncode:
        problem = child.stdout.strip() or child.stderr.strip()
        print(f"Expected at least {num_gpus} visible GPUs, got {problem}.", file=sys.stderr)
    return child.returncode


def _require(*modules: str) -> int:
    """Fail early without a library. Looked for in a child: an import may leave a CUDA context."""
    for module in modules:
        child = subprocess.run([sys.executable, "-c", f"import torch, {module}"], capture_output=True, check=False)
        if child.returncode:
            problem = child.stderr.decode().strip().rpartition("\n")[2]
            print(f"Expected {module} to be installed in {sys.executable}, got: {problem}", file=sys.stderr)
            return child.returncode
    return 0


def _become(*args: str) -> NoReturn:
    """Replace this process by Python: signals then reach `lamella train` directly, which saves before it ends."""
    os.execve(sys.executable, [sys.executable, *args], _environment())


def _python(*args: str, path: Sequence[Path] = ()) -> int:
    return subprocess.run([sys.executable, *args], env=_environment(path), check=False).returncode


def _environment(path: Sequence[Path] = ()) -> dict[str, str]:
    members = [*ROOT.glob("packages/*/src"), ROOT / "testing" / "src", ROOT / "integration" / "src"]
    folders = [*map(str, [*members, *path, _entry_points()]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


def _entry_points() -> Path:
    """Write the entry points of all packages as an installer would; adapters and families are found by them."""
    folder = ROOT / ".nox" / "entry-points"
    for file in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        metadata = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        lines = [
            line
            for group, entry_points in project.get("entry-points", {}).items()
            for line in (f"[{group}]", *(f"{name} = {target}" for name, target in entry_points.items()))
        ]
        if lines:
            metadata.mkdir(parents=True, exist_ok=True)
            (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
            named = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
            (metadata / "METADATA").write_text(named, encoding="utf-8")
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
