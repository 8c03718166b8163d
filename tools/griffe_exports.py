"""A Griffe extension: a package's exports for the reference pages.

Packages here export by type checkers' convention, `from package._module import Name as Name`. Griffe reads the sources
for the reference pages and knows only `__all__`.
"""

from typing import Any

import griffe


class ExportsOwnNames(griffe.Extension):
    """Treats the imports of a package's `__init__` from the package's own modules as its `__all__`."""

    def on_module(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """Set the exports of a package. Called by Griffe for each module."""
        if mod.is_init_module and mod.exports is None:
            aliases = [member for member in mod.members.values() if isinstance(member, griffe.Alias)]
            mod.exports = [alias.name for alias in aliases if alias.target_path.startswith(f"{mod.path}.")]
