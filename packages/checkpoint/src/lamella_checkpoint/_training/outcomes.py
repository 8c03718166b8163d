"""The one outcome of a save in the background, the same on every rank.

Note [One outcome]
    A rank that read the outcome from the disk could differ from its peers: a program may move a finished
    checkpoint away, and a network file system shows a new directory to some clients seconds late. Therefore the
    outcome is a value in the store of the default process group, set once by an atomic compare-and-set; for any
    belief of a rank, the first value counts for all. Rank 0 proposes success, once its process has
    published the checkpoint. Any rank proposes a failure: of its own part, or of a peer silent for too long.

    A store needs no collective, so a save may end at another time on each rank, and callers need not wait. Rank 0
    may hold the store's server, and reports a success to the caller only when all peers have read the outcome, or ten
    seconds later. A rank whose store is gone (rank 0 has ended) reads the outcome from the disk.
"""

import json
import threading
import time
from collections.abc import Mapping
from typing import Final

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from lamella_checkpoint._base.ranks import num_ranks, rank

Failures = Mapping[int, str]
"""Reasons of a failed save, by rank; empty if the checkpoint is in place."""

_PAUSE_S: Final = 0.02
_LONGEST_READ_S: Final = 10.0


class Outcomes:
    """The outcomes of a saver's saves, by Note [One outcome]. Thread-safe."""

    def __init__(self, token: str) -> None:
        """Use the store of the default group.

        Args:
            token: Names the saver, the same on every rank.

        Effects: no collective.
        """
        self._rank, self._num_ranks = rank(), num_ranks()  # The group may end before the last save does.
        store: Store = dist.distributed_c10d._get_default_store() if self._num_ranks > 1 else HashStore()
        self._store = PrefixStore(f"lamella_checkpoint/{token}", store)

    def agree(self, save: str, proposal: Failures) -> Failures:
        """Return the outcome of a save: the proposal, or an earlier proposal.

        Raises:
            RuntimeError: The store is gone.

        Effects: no collective; one request to the store.
        """
        return _decoded(self._store.compare_set(save, "", json.dumps(dict(proposal))))

    def read(self, save: str) -> Failures | None:
        """Return the outcome of a save; None before any rank has proposed one.

        Raises:
            RuntimeError: The store is gone.

        Effects: no collective; one request to the store, two once there is an outcome.
        """
        return _decoded(self._store.get(save)) if self._store.check([save]) else None

    def acknowledge(self, save: str, departure: threading.Event) -> None:
        """Count this rank among the readers of an outcome; on rank 0, wait until all other ranks have been counted.

        Args:
            save: The save's name.
            departure: Ends rank 0's wait early.

        Raises:
            RuntimeError: The store is gone.

        Effects: rank 0 sleeps for up to ten seconds, and removes an outcome that all ranks have read.
        """
        if self._rank != 0:
            self._store.add(_readers(save), 1)
            return
        deadline = time.monotonic() + _LONGEST_READ_S
        while self._store.add(_readers(save), 0) < self._num_ranks - 1:
            if time.monotonic() > deadline or departure.wait(_PAUSE_S):
                return
        for key in (save, _readers(save)):
            self._store.delete_key(key)


def _readers(save: str) -> str:
    return f"{save}/readers"


def _decoded(value: bytes) -> Failures:
    return {int(index): text for index, text in json.loads(value).items()}
