"""`lamella plan`: the time and the traffic of a run's step on a cluster, before there is one."""

import argparse
import json
from pathlib import Path

from lamella._command.choices import number
from lamella._command.estimate import placed
from lamella._command.parser import config_of
from lamella._record.output import check_destination, say, show, write
from lamella._settings.config import Config
from lamella._settings.options import ConfigError


def run(arguments: argparse.Namespace) -> None:
    """Plan, search or calibrate, and print the text, or write what the options ask for.

    Raises:
        ConfigError: The settings or the cluster cannot be met, or a file cannot be written.
        TraceError: The profile of `--calibrate` cannot be read.

    Effects: writes the files of `--json` and `--cluster-out`, and nothing else.
    """
    _check(arguments)
    check_destination(arguments.json)
    from lamella._plan.cluster import read_cluster
    from lamella._plan.run_plan import plan_run
    from lamella._plan.search import search
    from lamella._plan.text import lines, search_lines

    cluster = read_cluster(arguments.cluster)
    config = placed(config_of(arguments))
    if config.parallel.device != "cuda":
        raise ConfigError("Expected a plan of GPUs, got --device cpu. Leave --device out.")
    if arguments.calibrate is not None:
        _calibrate(arguments, config)
        return
    if not arguments.search:
        plan = plan_run(config, cluster)
        show([*lines(plan)], lambda: json.dumps(plan.to_json(), indent=2) + "\n", arguments.json)
        return
    candidates = search(config, cluster)
    values = [{"options": candidate.flags} | candidate.plan.to_json() for candidate in candidates]
    text = [*search_lines(candidates), "", *lines(candidates[0].plan)]
    show(text, lambda: json.dumps(values, indent=2) + "\n", arguments.json)


def _calibrate(arguments: argparse.Namespace, config: Config) -> None:
    from lamella._plan.cluster import read_cluster
    from lamella._plan.run_plan import calibrate_run
    from lamella._plan.text import calibration_lines

    step_time = None if arguments.step_time is None else number("--step-time", arguments.step_time, float)
    calibration = calibrate_run(config, read_cluster(arguments.cluster), Path(arguments.calibrate), step_time)
    say([*calibration_lines(calibration)])
    if arguments.cluster_out is not None:
        write(arguments.cluster_out, calibration.cluster.to_json())


def _check(arguments: argparse.Namespace) -> None:
    """Refuse options that belong to another use of the verb."""
    if arguments.memory is not None:
        raise ConfigError(
            f"Expected no --memory, got {arguments.memory!r}: a plan takes gpu_memory of its --cluster. Set it there."
        )
    for flag, option in (("--cluster-out", arguments.cluster_out), ("--step-time", arguments.step_time)):
        if option is not None and arguments.calibrate is None:
            raise ConfigError(f"Expected {flag} with --calibrate alone, got {option!r}. Pass --calibrate TRACE.")
    for flag, is_set in (("--search", arguments.search), ("--json", arguments.json is not None)):
        if is_set and arguments.calibrate is not None:
            raise ConfigError(f"Expected --calibrate without {flag}, got both. Plan in a second call.")
