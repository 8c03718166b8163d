"""The options of `lamella plan` beside those of `lamella train`."""

import argparse
from typing import Final

DESCRIPTION: Final = (
    "Predict the time of a step and the bytes that it sends on a cluster, by unit: takes the options of train, starts "
    "nothing, and writes nothing but the files of --json and --cluster-out. Any number of --ranks, 8 by default. With "
    "--calibrate, fit the rates of the cluster to the profile of a run with these options."
)
USAGE: Final = "%(prog)s [CONFIG] [--ranks N] [--cluster NAME|FILE] [--search] [options of train]"


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options to the verb's parser."""
    command.add_argument(
        "subject", nargs="?", default=None, metavar="CONFIG", help="a model, as for --model; or settings in TOML"
    )
    command.add_argument(
        "--cluster",
        default="h100",
        metavar="NAME|FILE",
        help="h100, h200, or a file in TOML or JSON with GPUs a host, bandwidths, latencies and rates [h100]",
    )
    command.add_argument(
        "--search", action="store_true", default=False, help="plan stages and meshes, the fastest that fits first"
    )
    command.add_argument(
        "--calibrate", default=None, metavar="TRACE", help="fit the rates to a profile, .json or .json.gz, of this run"
    )
    command.add_argument(
        "--step-time", default=None, metavar="SECONDS", help="the median step of this run without a profiler"
    )
    command.add_argument("--cluster-out", default=None, metavar="FILE", help="write the fitted cluster, for --cluster")
