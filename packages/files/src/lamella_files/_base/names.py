"""Native names: `model.<name>`, `optimizer.state.<name>.<slot>`, `optimizer.param_groups.<name>.<option>`."""

from collections.abc import Container
from typing import Final

MODEL: Final = "model."
STATE: Final = "optimizer.state."
OPTIONS: Final = "optimizer.param_groups."
GROUP_SIZES: Final = "optimizer.group_sizes"
"""The object of an optimizer with numbers for names: the number of parameters of each group, in the groups' order."""


def in_model(name: str) -> str:
    """The native name of a model's tensor, by the model's own name."""
    return f"{MODEL}{name}"


def is_of_model(name: str) -> bool:
    """Whether a native name is of a model's tensor."""
    return name.startswith(MODEL)


def own_name(name: str) -> str:
    """A model's own name of a tensor, by the native name; any other name unchanged."""
    return name.removeprefix(MODEL)


def split_section(name: str) -> tuple[str, str]:
    """A native name's section, as above, and the rest; an empty section if none matches."""
    section = next((prefix for prefix in (MODEL, STATE, OPTIONS) if name.startswith(prefix)), "")
    return section, name.removeprefix(section)


def longest_known(entry: str, known_names: Container[str]) -> tuple[str | None, str]:
    """`<parameter>.<slot>`, split: the longest known parameter, since components continue fused names."""
    end = entry.rfind(".")
    while end != -1:
        if entry[:end] in known_names:
            return entry[:end], entry[end + 1 :]
        end = entry.rfind(".", 0, end)
    return None, entry
