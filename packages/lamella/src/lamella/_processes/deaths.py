"""Words for processes ended without a traceback: exit code or signal, likely cause, and a way out."""

import resource
import signal
import traceback
from collections.abc import Mapping
from typing import Final

_LESS_MEMORY: Final = "Give it more memory, or take a smaller --batch-size, fewer --ranks or another sharding."
_FAULT: Final = (
    "a library gave up, of a fault of its own or for want of memory; its last words, if any, are printed above"
)
_CAUSES: Final[Mapping[int, str]] = {
    signal.SIGKILL: "nothing in a run sends it: the kernel does, where memory runs out (`dmesg` tells), or a "
    f"scheduler. {_LESS_MEMORY}",
    signal.SIGABRT: f"{_FAULT}.",
    signal.SIGSEGV: f"{_FAULT}.",
    signal.SIGBUS: f"{_FAULT}. A full /dev/shm or a file that was cut while it was mapped end so too.",
    signal.SIGILL: f"{_FAULT}. So do kernels that were compiled for another processor.",
    signal.SIGFPE: f"{_FAULT}.",
    signal.SIGTRAP: f"{_FAULT}.",
    signal.SIGXCPU: "the limit on processor time (`ulimit -t`) is used up. Raise it; the same command resumes.",
    signal.SIGXFSZ: "a file would pass the limit on sizes (`ulimit -f`). Raise it; the same command resumes.",
}
_LOADER_FAILED: Final = 127
_MEMORY_WORDS: Final = ("MemoryError", "allocate memory", "bad_alloc", "failed to map segment", "memory allocation of")
_LIMITS: Final = {resource.RLIMIT_AS: "ulimit -v", resource.RLIMIT_DATA: "ulimit -d"}
_AMPLE_NBYTES: Final = 4 << 30  # of address space: torch's libraries and a small run take half


def describe_death(code: int) -> str:
    """Describe in a line the end of a process without an error, by the return code of `subprocess`."""
    if code < 0:
        cause = _CAUSES.get(-code)
        text = f"It was ended by {_signal_name(-code)}{'.' if cause is None else f': {cause}'}"
    elif code == _LOADER_FAILED:
        text = "It left with exit code 127: the loader could not load a library, or had no memory for one."
    else:
        text = f"It left with exit code {code} and no traceback: a library called exit. Its words, if any, are above."
    return f"{text} {memory_limits()}".rstrip()


def _signal_name(number: int) -> str:
    """Return a signal's name; real-time signals between the first and the last have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_memory_error(error: MemoryError) -> str:
    """Name in a line the place of the failed allocation, and the limits on memory or a way out."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f", in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"Memory ran out{where}. {memory_limits() or _LESS_MEMORY}"


def with_memory_limits(report: str) -> str:
    """Append the limits on memory to a traceback about memory."""
    return f"{report.rstrip()}\n{memory_limits()}".rstrip() if any(word in report for word in _MEMORY_WORDS) else report


def memory_limits() -> str:
    """Name the limits on this process's memory, inherited by workers; empty without a limit."""
    limits = [
        f"{soft >> 20} MiB (`{command}`)"
        for kind, command in _LIMITS.items()
        if (soft := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]
    return f"Each process is limited to {' and '.join(limits)} of memory: raise the limit." if limits else ""


def warning_of_tight_limits() -> str | None:
    """Return a line on limits tight enough to abort libraries before Python can say why; None for ample memory."""
    tightest = min((soft for kind in _LIMITS if (soft := resource.getrlimit(kind)[0]) >= 0), default=_AMPLE_NBYTES)
    if tightest >= _AMPLE_NBYTES:
        return None
    return f"{memory_limits()} Libraries that find no memory end the process without a reason."
