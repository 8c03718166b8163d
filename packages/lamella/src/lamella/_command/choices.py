"""Arguments of the command line that are numbers or names, checked one by one."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

from lamella._settings.options import ConfigError, nearest

T = TypeVar("T")


def number(flag: str, text: str, kind: Callable[[str], T], *, at_least: float = 0) -> T:
    """Return the number in the text of an option.

    Raises:
        ConfigError: The text is no number of this kind, or a smaller one; names the option.
    """
    try:
        parsed = kind(text)
    except ValueError:
        parsed = None
    if parsed is None or not cast(float, parsed) >= at_least:
        kind_in_words = "an integer" if kind is int else "a number"
        raise ConfigError(f"Expected {flag} to be {kind_in_words} of at least {at_least:g}, got {text!r}.")
    return parsed


def one_of(flag: str, choice: str, choices: Sequence[str] | Mapping[str, object]) -> str:
    """Return a choice among names.

    Raises:
        ConfigError: The choice is another name; names the option and the nearest choice.
    """
    if choice not in choices:
        raise ConfigError(
            f"Expected {flag} to be one of {', '.join(choices)}, got {choice!r}.{nearest(choice, choices)}"
        )
    return choice
