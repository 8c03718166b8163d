"""`lamella overlap-report`: the communication that a profile shows to be exposed."""

import argparse
from pathlib import Path

from lamella._record.output import show, write
from lamella_trace import as_html, as_json, as_text, overlap_report, read_trace


def run(arguments: argparse.Namespace) -> None:
    """Print the report of a trace, and write it where the arguments say.

    Raises:
        ConfigError: The report cannot be written.
        TraceError: The file is no trace.
    """
    report = overlap_report(read_trace(Path(arguments.trace)), arguments.trace)
    show([as_text(report)], lambda: as_json(report), arguments.json)
    if arguments.html is not None:
        write(arguments.html, as_html(report))
