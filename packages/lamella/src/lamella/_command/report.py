"""`lamella report`: the page on a run, written again from the run's records."""

import argparse
from pathlib import Path

from lamella._record.output import printable, refused_paths, say
from lamella._record.report import write_report
from lamella._record.run_directory import RunDirectory
from lamella._settings.options import ConfigError


def run(arguments: argparse.Namespace) -> int:
    """Write the page on a run, which may be in progress, and print its path; return the exit code.

    Raises:
        ConfigError: The folder is no run's, or the page cannot be written.
    """
    directory = RunDirectory(Path(arguments.run))
    with refused_paths():
        if not (directory.config.is_file() and directory.model.is_dir()):
            raise ConfigError(
                f"Expected the folder of a run of `lamella train` (its --run-dir), got {arguments.run!r}, which has no "
                "config.json and model."
            )
        path = write_report(directory)
    say([printable(f"report: {path}")])
    return 0
