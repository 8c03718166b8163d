"""The ranks of torchrun before their process group: who prepares, and the folders shared by hosts.

Note [A folder is shared if its probe is seen]
    Neither a path nor the name of a file system tells whether two hosts see the same folder. Rank 0 therefore writes a
    file with a name drawn at random into each folder, and the first rank of each further host looks for the name. No
    host has looked for the name before: a network file system has no outdated answer in a cache.

Note [A store outlives its ranks]
    torchrun keeps a store over all restarts, with the keys of killed ranks. A process group in the bare store may read
    the address of a killed rank and fail with "Connection refused", at the cost of another restart. The group therefore
    has a prefix, drawn by rank 0 at each start.
"""

import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

from lamella._settings.options import ConfigError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PROBE: Final = "probe"
_PREFIX: Final = "prefix"
_PREPARATION: Final = timedelta(days=7)  # A large text takes hours to become tokens.
_LATE_S: Final = 2.0  # for a file system whose hosts see a new file after some time

Stage = Literal["look", "preparation"]
"""The stages before the process group: every host has looked for the probes; every host has prepared."""

_LAST_STAGE: Final[Stage] = "preparation"


class Probe(NamedTuple):
    """A file in each of rank 0's folders.

    Attributes:
        name: The name of each file.
        host: The host of rank 0.
    """

    name: str
    host: str

    def is_in(self, folder: Path) -> bool:
        """Return True if this host sees the folder of rank 0. Effects: waits for seconds before a False."""
        deadline = time.monotonic() + _LATE_S
        while not (is_seen := (folder / self.name).exists()) and time.monotonic() < deadline:
            time.sleep(_LATE_S / 10)
        return is_seen


class Hosts:
    """This rank among the ranks of all hosts, who talk by torchrun's store.

    Attributes:
        store: torchrun's store, under a prefix of lamella's.
        rank: The rank's number, from 0 on.
        num_ranks: Number of ranks.
        is_leader: True on the first rank of a host.
    """

    def __init__(self, store: "Store", rank: int, num_ranks: int, *, is_leader: bool) -> None:
        self.store, self.rank, self.num_ranks, self.is_leader = store, rank, num_ranks, is_leader
        self._has_announced = False

    @classmethod
    def joined(cls) -> "Hosts":
        """Return this process's rank, by torchrun's variables. Effects: waits for the store of torchrun."""
        from torch._C._distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        shared = next(rendezvous("env://", rank, num_ranks, timeout=_PREPARATION))[0]
        is_leader = os.environ["LOCAL_RANK"] == "0"
        return cls(PrefixStore("lamella", shared), rank, num_ranks, is_leader=is_leader)

    @contextmanager
    def probed(self, folders: Sequence[Path]) -> Iterator[None]:
        """Let hosts look for a probe in the folders until the block ends. For rank 0.

        Raises:
            ConfigError: A probe cannot be written.

        Effects: creates the folders; removes the probes after the block, and folders created and still empty.
        """
        probe = Probe(f".probe-{secrets.token_hex(8)}", socket.gethostname())
        with ExitStack() as files:
            for folder in folders:
                files.enter_context(_written(folder / probe.name))
            self._announce(f"{probe.name} {probe.host}")
            yield

    def _announce(self, text: str) -> None:
        self._has_announced = True
        self.store.set(_PROBE, text)

    def probe(self) -> Probe | None:
        """Return rank 0's probe; None if rank 0 refuses the run. Effects: waits for rank 0."""
        self.store.wait([_PROBE], _PREPARATION)
        name, _, host = self.store.get(_PROBE).decode().partition(" ")
        return Probe(name, host) if name else None

    def agree(self, stage: Stage, *, refuses: bool = False) -> bool:
        """Wait until every rank has completed a stage, for days if need be; return False if a rank refuses the run."""
        if self.rank == 0 and not self._has_announced:
            self._announce("")  # A refused run ends without a wait for the probe.
        if self.rank == 0 and stage == _LAST_STAGE:
            self.store.set(_PREFIX, secrets.token_hex(8))  # Before rank 0's arrival, awaited by all ranks.
        if refuses:
            self.store.set(f"{stage} refused", "")
        if self.store.add(f"{stage} arrivals", 1) == self.num_ranks:
            self.store.set(f"{stage} over", "")
        self.store.wait([f"{stage} over"], _PREPARATION)
        return not self.store.check([f"{stage} refused"])

    def store_of_group(self) -> "Store":
        """Return the store of the process group, after the last stage: Note [A store outlives its ranks]."""
        from torch._C._distributed_c10d import PrefixStore

        return PrefixStore(self.store.get(_PREFIX).decode(), self.store)

    def forget(self) -> None:
        """Empty the store after the last stage: a second run of these processes waits anew."""
        if self.rank == 0:
            stages: tuple[Stage, ...] = get_args(Stage)
            for key in (
                _PROBE,
                _PREFIX,
                *(f"{stage} {word}" for stage in stages for word in ("refused", "arrivals", "over")),
            ):
                self.store.delete_key(key)


@contextmanager
def _written(file: Path) -> Iterator[None]:
    absent_folders = [folder for folder in (file.parent, *file.parent.parents) if not folder.exists()]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise ConfigError(
            f"Expected to write to {str(file.parent)!r}, got {error.strerror}. Pass another --run-dir or --checkpoints."
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()
            for folder in absent_folders:
                folder.rmdir()
