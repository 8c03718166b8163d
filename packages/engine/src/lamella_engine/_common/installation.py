"""Stand-ins under the names of a library's classes and functions, in every module of the process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Self


class Installation:
    """Stand-ins in place of a library's classes and functions, until `undo()` or the end of a `with` statement.

    Attributes:
        replaced: The replaced names, sorted, such as "torch.distributed.fsdp.fully_shard"; none if the stand-ins were
            in place before.
    """

    def __init__(self, pairs: Sequence[tuple[object, object]], *, keeps: Callable[[ModuleType, object], bool]) -> None:
        """Replace classes and functions, by identity, in the globals of all modules, under any name.

        Args:
            pairs: Each class or function with its stand-in. A stand-in is bound by no other module than those that
                keep their names: `undo` would replace it there.
            keeps: Whether a module keeps its name for a class, a function or a stand-in, such as the module that
                defines a function and finds the function's state by name.

        Effects: none beyond this process. Modules imported later find the stand-ins in the library's modules.
        """
        self._pairs, self._keeps = pairs, keeps
        self.replaced = tuple(sorted(self._replace({id(original): stand_in for original, stand_in in pairs})))
        self._is_undone = not self.replaced

    def undo(self) -> None:
        """Give all names back to the library's classes and functions, also in modules imported since.

        Sharded models stay sharded. Nothing happens if no name was replaced, or after an earlier `undo()`.
        """
        if not self._is_undone:
            self._is_undone = True
            # Listed for the effect: a generator by itself replaces nothing.
            list(self._replace({id(stand_in): original for original, stand_in in self._pairs}))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()

    def _replace(self, by_identity: Mapping[int, object]) -> Iterator[str]:
        """Replace members of all modules, and list the replaced names."""
        for title, module in list(sys.modules.items()):
            for name, member in list(getattr(module, "__dict__", {}).items()):  # some entries are no modules, or None
                if id(member) in by_identity and not self._keeps(module, member):
                    setattr(module, name, by_identity[id(member)])
                    yield f"{title}.{name}"
