"""A trace's report as files."""

from pathlib import Path

from lamella_trace._account import overlap_report
from lamella_trace._html import as_html
from lamella_trace._tables import as_json, as_text
from lamella_trace._trace import read_trace
from lamella_trace._verdict import verdict


def write_report(trace: Path, folder: Path) -> str:
    """Write the overlap report of a trace as `overlap.txt`, `overlap.json` and `overlap.html` into a folder.

    Args:
        trace: A rank's trace by `torch.profiler`, `.json` or `.json.gz`.
        folder: A folder that exists.

    Returns:
        The verdict: the largest loss of a step and the setting to change.

    Raises:
        TraceError: The file is no trace of steps.
        OSError: A file cannot be read or written.
    """
    report = overlap_report(read_trace(trace), str(trace))
    (folder / "overlap.txt").write_text(as_text(report) + "\n", encoding="utf-8")
    (folder / "overlap.json").write_text(as_json(report) + "\n", encoding="utf-8")
    (folder / "overlap.html").write_text(as_html(report), encoding="utf-8")
    return verdict(report)
