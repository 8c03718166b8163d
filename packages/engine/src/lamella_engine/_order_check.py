"""Whether ranks run and communicate in one order: compared before each collective, so that none is entered by a part.

Note [Agreement]. Messages go through the default process group's store, not through a collective: a rank that waits for
one that will never come can look around meanwhile. Each comparison ends in a verdict that is written once, atomically,
by the first rank that reaches one. So either every rank goes on to the collective, or none does, also where one gave up
waiting in the moment in which the last one came. A rank that raises leaves word for those that wait on other groups.
"""

from __future__ import annotations

import json
import os
import time
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

DEFAULT_TIMEOUT_S = 300.0
_NUM_RECENT = 20
_AGREED, _DIFFERENT, _MISSING, _ELSEWHERE = "agreed", "different", "missing", "elsewhere"


@dataclass
class _Point:
    """Where a rank is: what it is about to do, a checksum of all that it did before, and the last of that."""

    about_to: str
    checksum: int
    recent: Sequence[str]

    def __str__(self) -> str:
        return f"is about to {self.about_to}, after: {', '.join(self.recent) or 'nothing'}"


@dataclass
class _Progress:
    """What this process has compared within one process group."""

    number: int = 0
    last: str = "its start"
    num_failures: int = 0  # of the default group: in any


_progress: weakref.WeakKeyDictionary[dist.ProcessGroup, _Progress] = weakref.WeakKeyDictionary()


class OrderCheck:
    """Compares the order of one tree's passes and collectives with the other ranks'.

    Args:
        timeout_s: How long to wait for a rank before it counts as missing.
    """

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._recent: deque[str] = deque(maxlen=_NUM_RECENT)
        self._checksum = 0

    @classmethod
    def from_environment(cls) -> OrderCheck | None:
        """One, if `LAMELLA_DEBUG` names "order"; it may name several things, with commas between them."""
        return cls() if "order" in os.environ.get("LAMELLA_DEBUG", "").split(",") else None

    def note(self, what: str) -> None:
        """Remember what this rank does; it is compared at the next collective.

        Effects: none.
        """
        self._recent.append(what)
        self._checksum = zlib.crc32(what.encode(), self._checksum)

    def before(self, what: str, groups: Iterable[dist.ProcessGroup], detail: str = "") -> None:
        """Compare where the ranks of some groups are, and what they are about to do.

        Args:
            what: Is remembered afterwards.
            groups: Whose ranks must agree.
            detail: Is compared and reported too, but not remembered.

        Raises:
            RuntimeError: They differ, a rank did not come in time, or ranks of another group differ. Every rank of the
                groups raises, if it comes here at all.

        Effects: not a collective; blocks the host until every rank of the groups has come.
        """
        point = _Point(what + detail, self._checksum, tuple(self._recent))
        for group in groups:
            if group.size() > 1:
                _Comparison(group, point, self._timeout_s).settle()
        self.note(what)

    def forget(self) -> None:
        """Begin anew after an exception, which may have come at different points."""
        self._recent.clear()
        self._checksum = 0


class _Comparison:
    """One comparison of a group's ranks."""

    def __init__(self, group: dist.ProcessGroup, mine: _Point, timeout_s: float) -> None:
        self._group = group
        self._mine = mine
        self._timeout_s = timeout_s
        self._keys = [str(rank) for rank in dist.get_process_group_ranks(group)]
        self._me = self._keys[group.rank()]
        self._progress = _progress.setdefault(group, _Progress())
        self._number = self._progress.number
        self._progress.number += 1

    def settle(self) -> None:
        """Say where this rank is, wait for the others, and raise unless all agree."""
        store = self._store(self._number)
        store.set(self._me, json.dumps(vars(self._mine)))
        verdict = store.compare_set("verdict", "", self._wait(store)).decode()
        if verdict != _AGREED:
            _fail(self._report(verdict, self._points(store)))
        self._progress.last = self._mine.about_to
        self._clean_up(self._number - 1)

    def _store(self, number: int) -> Store:
        return PrefixStore(f"{self._group.group_name}/{number}", _store())

    def _wait(self, store: Store) -> str:
        """This rank's verdict, as soon as it can have one."""
        deadline, pause = time.monotonic() + self._timeout_s, 0.0005
        while not store.check(self._keys):
            if _failure() is not None:
                return _ELSEWHERE
            if time.monotonic() > deadline:
                return _MISSING
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        points = self._points(store).values()
        return _AGREED if all(_is_same(point, self._mine) for point in points) else _DIFFERENT

    def _points(self, store: Store) -> dict[str, _Point]:
        """The points of the ranks that have come."""
        return {key: _Point(**json.loads(store.get(key))) for key in self._keys if store.check([key])}

    def _clean_up(self, number: int) -> None:
        """Delete what every rank has read: each that came to this comparison was done with the one before."""
        if number >= 0:
            store = self._store(number)
            store.delete_key(self._me)
            if self._me == self._keys[0]:
                store.delete_key("verdict")

    def _report(self, verdict: str, points: Mapping[str, _Point]) -> str:
        lines = [f"rank {self._me} (this one) {self._mine}"]
        other = next((key for key, point in points.items() if not _is_same(point, self._mine)), None)
        if other is not None:
            lines.append(f"rank {other} {points[other]}")
        missing = [key for key in self._keys if key not in points]
        if missing and verdict == _MISSING:
            lines.append(
                f"rank {', '.join(missing)} did not come within {self._timeout_s:g} s, and was last seen when it was "
                f"about to {self._progress.last}"
            )
        if verdict == _ELSEWHERE:
            lines.append(f"elsewhere: {_failure()}")
        return "\n  ".join(lines)


def _is_same(a: _Point, b: _Point) -> bool:
    return (a.about_to, a.checksum) == (b.about_to, b.checksum)


def _store() -> Store:
    return PrefixStore("lamella/order", dist.distributed_c10d._get_default_store())


def _of_all_groups() -> _Progress:
    assert dist.group.WORLD is not None
    return _progress.setdefault(dist.group.WORLD, _Progress())


def _failure_key() -> str:
    # Numbered, so that a program that catches the error and resets can go on.
    return f"failure/{_of_all_groups().num_failures}"


def _failure() -> str | None:
    """What another rank left when it raised."""
    store, key = _store(), _failure_key()
    return store.get(key).decode() if store.check([key]) else None


def _fail(report: str) -> None:
    _store().compare_set(_failure_key(), "", report)
    _of_all_groups().num_failures += 1
    raise RuntimeError(
        f"Expected every rank to run the same units and communicate in the same order, got:\n  {report}\n"
        "Which units run must follow from what every rank knows: not from a rank's own data, number, time or memory. "
        "Then call reset_iter_state() to go on."
    )
