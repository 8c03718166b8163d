"""Compares the ranks' order of units and collectives before each collective: all ranks enter the collective, or none.

Note [Agreement]. Messages go through the default process group's store, not through a collective: a rank that waits for
a missing rank can look for failures elsewhere meanwhile. Each comparison ends in a verdict, written once and atomically
by the first rank with a verdict. All ranks go on to the collective, or no rank does, even if a rank gave up waiting
just as the last rank came. A raising rank leaves a report for ranks waiting in other groups.
"""

from __future__ import annotations

import json
import time
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

_NUM_RECENT = 20
_AGREED, _DIFFERENT, _MISSING, _ELSEWHERE = "agreed", "different", "missing", "elsewhere"


@dataclass
class _Point:
    """A rank's place in its program: the next act, a checksum of all earlier acts, and the last few earlier acts."""

    about_to: str
    checksum: int
    recent: Sequence[str]

    def __str__(self) -> str:
        return f"is about to {self.about_to}, after: {', '.join(self.recent) or 'nothing'}"


@dataclass
class _Progress:
    """Counts this process's comparisons within one process group."""

    number: int = 0
    last: str = "its start"
    num_failures: int = 0  # the default group counts failures in all groups


# The process's: trees over one group count together, as the numbers are keys in the store that the ranks share.
# Weak keys: a destroyed process group must not live on here, with its communicator.
_progress: weakref.WeakKeyDictionary[dist.ProcessGroup, _Progress] = weakref.WeakKeyDictionary()


class OrderCheck:
    """Compares the order of a tree's passes and collectives between ranks.

    Args:
        timeout_s: The longest wait for a rank, in seconds, before the rank counts as missing.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._recent: deque[str] = deque(maxlen=_NUM_RECENT)  # for reports alone; ranks compare the checksum
        self._checksum = 0

    def note(self, action: str) -> None:
        """Remember an act of this rank, for comparison at the next collective."""
        self._recent.append(action)
        self._checksum = zlib.crc32(action.encode(), self._checksum)

    def before(self, action: str, groups: Iterable[dist.ProcessGroup], detail: str = "") -> None:
        """Compare the places of the ranks of some groups, and their next act.

        Args:
            action: The act; remembered afterwards.
            groups: Process groups whose ranks must agree.
            detail: Compared and reported too, but not remembered.

        Raises:
            RuntimeError: Ranks differ, a rank did not come in time, or ranks of another group differ. Every rank of the
                groups raises, if the rank comes here.

        Effects: not a collective; blocks the host until every rank of the groups has come.
        """
        point = _Point(action + detail, self._checksum, tuple(self._recent))
        for group in groups:
            if group.size() > 1:
                _OrderComparison(group, point, self.timeout_s).settle()
        self.note(action)

    def forget(self) -> None:
        """Begin anew after an exception, which ranks may have met at different points."""
        self._recent.clear()
        self._checksum = 0


class _OrderComparison:
    """One comparison of a group's ranks."""

    def __init__(self, group: dist.ProcessGroup, mine: _Point, timeout_s: float) -> None:
        self._group = group
        self._mine = mine
        self._timeout_s = timeout_s
        self._keys = [str(rank) for rank in dist.get_process_group_ranks(group)]
        self._me = self._keys[group.rank()]
        self._progress = _progress.setdefault(group, _Progress())
        self._number = self._progress.number
        # Used up even if the comparison raises: numbers are keys in the store, and must stay equal on all ranks.
        self._progress.number += 1

    def settle(self) -> None:
        """Write this rank's place, wait for the other ranks, and raise unless all agree."""
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
        """This rank's verdict, as soon as the ranks' messages suffice."""
        # Short pauses first, as ranks in step meet within a millisecond; longer ones spare the store for a late rank.
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
        """The places of ranks that have come."""
        return {key: _Point(**json.loads(store.get(key))) for key in self._keys if store.check([key])}

    def _clean_up(self, number: int) -> None:
        """Delete an earlier comparison's messages: every rank has come to the next comparison."""
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


def _progress_of_all_groups() -> _Progress:
    assert dist.group.WORLD is not None
    return _progress.setdefault(dist.group.WORLD, _Progress())


def _failure_key() -> str:
    # Numbered: with a fixed key an old report would fail each later comparison of a program that catches the error.
    return f"failure/{_progress_of_all_groups().num_failures}"


def _failure() -> str | None:
    """Another rank's report from before raising."""
    store, key = _store(), _failure_key()
    return store.get(key).decode() if store.check([key]) else None


def _fail(report: str) -> None:
    _store().compare_set(_failure_key(), "", report)
    _progress_of_all_groups().num_failures += 1
    raise RuntimeError(
        f"Expected every rank to run the same units and communicate in the same order, got:\n  {report}\n"
        "The choice of units must follow from facts that every rank knows: not from a rank's own data, number, time or "
        "memory. Then call reset_iter_state() to go on."
    )
