"""Templates of names: `{layer}` is a number, `{rest*}` any text, and a leading `**.` any names before, or none."""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Final

_PLACEHOLDER: Final = re.compile(r"^\*\*\.|\{(\w+)(\*?)\}")
_NUMBERS: Final = re.compile(r"[0-9]+")


class Names:
    """Names grouped by form without numbers: a template finds matches among thousands without a full scan."""

    def __init__(self, names: Iterable[str]) -> None:
        self._by_look: dict[str, list[tuple[int, str]]] = {}
        for position, name in enumerate(names):
            self._by_look.setdefault(_NUMBERS.sub("0", name), []).append((position, name))

    def matches(self, template: str) -> Iterator[re.Match[str]]:
        """The names that match a template, in order."""
        look = _look(template)
        looks = (
            [look]
            if isinstance(look, str)
            else [text_of_look for text_of_look in self._by_look if look.fullmatch(text_of_look)]
        )
        templates = [template for look in looks for template in self._by_look.get(look, ())]
        for _, name in templates if len(looks) == 1 else sorted(templates):
            if match := _pattern(template).fullmatch(name):
                yield match


def captures_of(template: str) -> list[str]:
    """The names of a template's placeholders; `before` for a leading `**.`."""
    return [match[1] or "before" for match in _PLACEHOLDER.finditer(template)]


def fill(template: str, captures: Mapping[str, str]) -> str:
    """A template with the captures filled in; other placeholders stay open."""
    return _PLACEHOLDER.sub(lambda match: captures.get(match[1] or "before", match[0]), template)


@cache
def _pattern(template: str) -> re.Pattern[str]:
    parts, end = [], 0
    for match in _PLACEHOLDER.finditer(template):
        parts.append(re.escape(template[end : match.start()]))
        if match[1] is None:
            parts.append(r"(?P<before>(?:.*\.)?)")
        else:
            parts.append(rf"(?P<{match[1]}>{'.+' if match[2] else '0|[1-9][0-9]*'})")
        end = match.end()
    return re.compile("".join([*parts, re.escape(template[end:])]))


@cache
def _look(template: str) -> str | re.Pattern[str]:
    """The form of names that match a template, with a 0 for each number; a pattern for a template with open text."""
    is_open = template.startswith("**.") or "*}" in template
    numbered = _PLACEHOLDER.sub(lambda match: "0" if match[1] and not match[2] else match[0], template)
    look = _NUMBERS.sub("0", numbered)
    return _pattern(look) if is_open else look
