"""`lamella estimate`: the memory of a run before it starts."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from lamella._command.parser import config_of
from lamella._record.output import say
from lamella._settings.config import Config
from lamella._settings.options import ConfigError

_NUM_RANKS = 8


def run(arguments: argparse.Namespace) -> None:
    """Estimate, and print the text, or write what the options ask for.

    Raises:
        ConfigError: The settings cannot be met, or a file cannot be written.

    Effects: writes the files of `--json` and `--svg`, and nothing else.
    """
    from lamella._estimate.api import estimate_run
    from lamella._estimate.choice import fit_options
    from lamella._estimate.svg import svg
    from lamella._estimate.text import lines

    config = placed(config_of(arguments))
    num_ranks = config.parallel.ranks or 1
    if not 0 <= arguments.rank < num_ranks:
        raise ConfigError(
            f"Expected --rank from 0 to {num_ranks - 1}, below --ranks {num_ranks}, got {arguments.rank}. Pass another "
            "--rank, or more --ranks."
        )
    if arguments.memory is not None:
        options = fit_options(config, arguments.memory)
        config = options.config
        say([*options.lines(), ""] if arguments.json != "-" else [])
    estimate = estimate_run(config, arguments.rank)
    if arguments.svg is not None:
        _write(arguments.svg, svg(estimate))
    if arguments.json is not None:
        _write(arguments.json, json.dumps(estimate.to_json(), indent=2) + "\n")
    if arguments.json != "-":
        say([*lines(estimate)])


def placed(config: Config) -> Config:
    """Decide ranks, device and precision of a run that this machine need not hold: GPUs, unless it says otherwise.

    Raises:
        ConfigError: Ranks times `--accumulation` does not divide `--batch-size`.
    """
    from lamella._processes.placement import check_batch

    asked = config.parallel
    device = "cuda" if asked.device == "auto" else asked.device
    precision = asked.precision if asked.precision != "auto" else "bf16" if device == "cuda" else "fp32"
    parallel = replace(asked, ranks=asked.ranks or _NUM_RANKS, device=device, precision=precision)
    config = replace(config, parallel=parallel)
    check_batch(config)
    return config


def _write(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Expected a path to write to, got {path!r}: {error.strerror}.") from error
