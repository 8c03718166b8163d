"""The sequences of a source, window after window: the next window is read in a thread while a window is in use."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from threading import Thread
from typing import Any, Generic, TypeVar

import torch

from lamella._data.batches import TokenBatch
from lamella._settings.options import ConfigError
from lamella._streaming.documents import StreamPosition
from lamella._streaming.windows import StreamWindow, WindowReader, WindowStart

T = TypeVar("T")


class Background(Generic[T]):
    """A call in a separate thread. Effects: starts a daemon thread: an answer of the network may never come."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._future: Future[T] = Future()
        Thread(target=self._run, name="lamella-stream", daemon=True).start()

    def _run(self) -> None:
        try:
            self._future.set_result(self._function())
        except Exception as error:  # noqa: BLE001  # of any reader; `result` raises the error in the waiting thread
            self._future.set_exception(error)

    def result(self) -> T:
        """Return the call's result, or raise the error. Effects: waits for the thread."""
        return self._future.result()


class WindowedSequences:
    """The endless sequences of a source, by number and in order.

    Args:
        reader: Reads the windows.
    """

    def __init__(self, reader: WindowReader) -> None:
        self._reader = reader
        self._window: StreamWindow | None = None
        self._start = WindowStart()
        self._digest: str | None = None
        self._next: Background[StreamWindow] | None = None

    @property
    def name(self) -> str:
        """The name of the source; empty without names."""
        return self._reader.name

    def begin(self, state: Mapping[str, Any] | None) -> None:
        """Begin to read, at the place in `state` or at the beginning. Effects: starts a thread."""
        if state is not None:
            position = StreamPosition(**state["position"])
            self._start = WindowStart(
                position, tuple(state["carry"]), int(state["num_windows"]), int(state["num_sequences"])
            )
            self._digest = state["digest"]
        self._read(self._start)

    def state(self) -> dict[str, object]:
        """Return the place of the window in use: plain data.

        Of a window that is used up too: read again, it tells whether the text before the next window has changed.
        """
        window = self._window
        start, digest = (self._start, self._digest) if window is None else (window.start, window.digest)
        return start._asdict() | {"position": start.position._asdict(), "carry": [*start.carry], "digest": digest}

    def batch(self, start: int, count: int) -> TokenBatch:
        """Return the sequences with the numbers from `start` on, not before the numbers of the last call.

        Raises:
            ConfigError: A file cannot be read, a record holds no document, or the text at the place of the
                resumption has changed.
        """
        batches: list[TokenBatch] = []
        while count:
            window = self.window(start)
            first = start - window.start.num_sequences
            assert first >= 0, "a negative index counts from the end of the window"
            indices = window.order[first : first + count]
            batches.append(window.sequences.batch(indices))
            start, count = start + len(indices), count - len(indices)
        positions = [batch.positions for batch in batches if batch.positions is not None]
        return TokenBatch(torch.cat([batch.tokens for batch in batches]), torch.cat(positions) if positions else None)

    def window(self, number: int) -> StreamWindow:
        """Return the window with a sequence. Effects: may wait for the thread, and starts to read the next window.

        Raises:
            ConfigError: The conditions of `batch`.
        """
        while self._window is None or number >= self._window.after.num_sequences:
            assert self._next is not None
            try:
                window = self._next.result()
            except ConfigError as error:
                raise error if self._digest is None else self._changed(f": {error}") from error
            if self._digest not in (None, window.digest):
                raise self._changed(".")
            self._window, self._digest = window, None
            self._read(window.after)
        return self._window

    def _changed(self, details: str) -> ConfigError:
        """Return the refusal of another text, or of an error, where the run goes on: this text was read before."""
        return ConfigError(
            "Expected the text at the place at which the run goes on to stay as it was, got another in "
            f"{self._reader.documents.described(self._start.position)}{details} Pass the former --data, or another "
            "--run-dir."
        )

    def _read(self, start: WindowStart) -> None:
        self._next = Background(lambda: self._reader.window_with_targets(start))
