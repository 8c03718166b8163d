"""The preparation of a run under torchrun: once in a folder shared by all hosts, else once on each host."""

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress

import torch.distributed as dist

from lamella._processes.agreement import agreed_failure, from_first_rank
from lamella._processes.hosts import Hosts, Probe
from lamella._processes.lock import locked, locked_folder
from lamella._record.output import refused_paths
from lamella._settings.config import Config
from lamella._settings.options import ConfigError
from lamella._training.checks import run_directory
from lamella._training.preparation import PreparedRun, prepare
from lamella_checkpoint import CheckpointDirectory

Preparation = PreparedRun | ConfigError | None
"""A rank's prepared run, the reason to refuse the run, or None on ranks that leave the preparation to another."""


def prepare_on_hosts(
    config: Config, hosts: Hosts, locks: ExitStack, prepare_first: Callable[[Config], PreparedRun]
) -> Preparation:
    """Prepare on rank 0, and on the first rank of each host without a view of rank 0's folder.

    Args:
        config: The run's settings, placed on this machine.
        hosts: This rank among all ranks.
        locks: Receives the locks of the run's folders.
        prepare_first: Prepares on rank 0, and may print.

    Effects: waits until every rank is prepared; prepared ranks write the run's directory of their host.
    """
    outcome: Preparation = None
    prepares = False
    with ExitStack() as probes:
        try:
            prepares = _look(config, hosts, locks, probes)
        except ConfigError as error:
            outcome = error
        may_go_on = hosts.agree("look", refuses=outcome is not None)
    if may_go_on and prepares:
        try:
            outcome = prepare_first(config) if hosts.rank == 0 else _prepare_next(config)
        except ConfigError as error:
            outcome = error
    hosts.agree("preparation")
    return outcome


def _look(config: Config, hosts: Hosts, locks: ExitStack, probes: ExitStack) -> bool:
    """Lock a host's folders, and write or look for the probes; return True on the ranks to prepare.

    Raises:
        ConfigError: Another run holds a lock, or the folder of the checkpoints is not shared.
    """
    with refused_paths():
        if hosts.rank == 0:
            lock(config, locks)
            directory = run_directory(config)
            probes.enter_context(hosts.probed((directory.root, directory.checkpoints)))
            return True
        probe = hosts.probe() if hosts.is_leader else None
        return probe is not None and _has_own_folder(config, probe, hosts.rank, locks)


def lock(config: Config, locks: ExitStack) -> tuple[int, ...]:
    """Lock the run's folder and the folder of its checkpoints; return the descriptors.

    Raises:
        ConfigError: Another run holds a lock.

    Effects: ends the saves that a killed run has left unfinished.
    """
    directory = run_directory(config)
    descriptors = locks.enter_context(locked(directory.root))
    has_option = config.run.checkpoints is not None
    if has_option and os.path.realpath(directory.checkpoints) != os.path.realpath(directory.root):
        descriptors += locks.enter_context(locked(directory.checkpoints, "--checkpoints"))
    option = "--checkpoints" if has_option else "--run-dir"
    descriptors += locks.enter_context(locked_folder(directory.checkpoints, option))
    # Before the choice of a checkpoint: one that appeared after it would be loaded, without the records before it.
    with suppress(OSError):  # `prepare` refuses a folder that cannot be written to.
        CheckpointDirectory(directory.checkpoints).discard_unfinished()
    return descriptors


def _has_own_folder(config: Config, probe: Probe, rank: int, locks: ExitStack) -> bool:
    directory = run_directory(config)
    if not probe.is_in(directory.checkpoints):
        raise ConfigError(
            f"Expected a folder for checkpoints that all hosts share, got {str(directory.checkpoints)!r}, in which "
            f"{_place(rank)} does not see the files of {_place(0, probe.host)}. Pass a shared folder as --checkpoints, "
            "or as --run-dir."
        )
    if probe.is_in(directory.root):
        return False
    locks.enter_context(locked(directory.root))
    return True


def _prepare_next(config: Config) -> PreparedRun:
    with refused_paths():
        return prepare(config, is_first=False)


def _place(rank: int, host: str | None = None) -> str:
    return f"rank {rank} on {host or socket.gethostname()}"


def agreed_preparation(outcome: Preparation) -> PreparedRun:
    """Return rank 0's prepared run on every rank, after a comparison with the runs of the other hosts.

    Raises:
        ConfigError: A rank refused the run, or a host has another text, tokenizer or setting. On every rank.

    Effects: collective exchanges of objects between hosts.
    """
    refusal = f"{outcome}" if isinstance(outcome, ConfigError) else None
    if (error := agreed_failure(refusal)) is not None:
        raise ConfigError(error)
    first, host = from_first_rank((outcome, socket.gethostname()))
    assert isinstance(first, PreparedRun)
    difference = None
    if isinstance(outcome, PreparedRun):
        difference = _difference(first.identity, outcome.identity, host)
    if (error := agreed_failure(difference)) is not None:
        raise ConfigError(error)
    return first


def num_preparations(outcome: Preparation) -> int:
    """Return the number of preparing hosts. Effects: collective exchange of objects between hosts."""
    outcomes: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(outcomes, isinstance(outcome, PreparedRun))
    return sum(outcomes)


def _difference(first: Mapping[str, str], identity: Mapping[str, str], host: str) -> str | None:
    """Return one line on the first difference between rank 0's run and this rank's; None for equal runs."""
    # A file of this host alone comes first: the tokenizer differs as a consequence.
    names = (*(name for name in identity if name not in first), *first)
    name = next((name for name in names if first.get(name) != identity.get(name)), None)
    if name is None:
        return None
    return (
        f"Expected every host to prepare the same run, got {name} {identity.get(name, 'absent')} for "
        f"{_place(dist.get_rank())}, and {first.get(name, 'absent')} for {_place(0, host)}. Give all hosts the same "
        "text, model and options, or a --run-dir that they share."
    )
