"""Let the reference pages see what a package exports.

Packages here say it as type checkers read it, `from package._module import Name as Name`. Griffe, which reads the
sources for those pages, knows `__all__` only. This extension tells it.
"""

from typing import Any

import griffe


class ExportsOwnNames(griffe.Extension):
    """Take what a package's `__init__` imports from the package's own modules for its `__all__`."""

    def on_module(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """Griffe calls this for each module it has read."""
        if mod.is_init_module and mod.exports is None:
            aliases = [member for member in mod.members.values() if isinstance(member, griffe.Alias)]
            mod.exports = [alias.name for alias in aliases if alias.target_path.startswith(f"{mod.path}.")]
