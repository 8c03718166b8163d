"""A page of HTML in one file: elements with escaped texts, and a style for light and dark, narrow and wide."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

_VOID: Final = frozenset({"circle", "line", "meta", "polyline", "rect"})


class Html(str):
    """Markup out of `element`, escaped; a plain text is none."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: object) -> Html:
    """Return an element.

    Args:
        name: The name of the element.
        children: The content: markup unchanged, and plain texts, escaped here.
        attributes: The element's attributes; `class_` is `class`, and other underscores are hyphens.
    """
    spelled = (
        f' {attribute.rstrip("_").replace("_", "-")}="{escape(str(text))}"' for attribute, text in attributes.items()
    )
    start = f"<{name}{''.join(spelled)}"
    # A slash: inside an SVG drawing, an element without a slash would go on.
    return Html(f"{start}/>" if name in _VOID else f"{start}>{joined(children)}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    """Return parts in a row: markup unchanged, and plain texts escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """Return a table that scrolls sideways alone on a narrow screen."""
    head = element("tr", *(element("th", cell) for cell in header))
    body = (element("tr", *(element("td", cell) for cell in row)) for row in rows)
    cells = element("table", element("thead", head), element("tbody", *body))
    return element("div", cells, class_="wide")


def folded(summary: str, *children: str) -> Html:
    """Return content to unfold by a click on its summary."""
    return element("details", element("summary", summary), *children)


def section(title: str, *children: str) -> Html:
    """Return a part of the page under a heading."""
    return element("section", element("h2", title), *children)


def page(title: str, *body: str) -> str:
    """Return a whole page, which fetches nothing and runs no script."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(_STYLE)),
    )
    document = element("html", head, element("body", element("main", *body)), lang="en")
    return f"<!DOCTYPE html>\n{document}\n"


_STYLE: Final = """
:root { --ink: #1d2429; --dim: #5b6770; --line: #d5dbe0; --paper: #fff; --card: #f6f8f9; --accent: #00796b;
  --c0: #2a78b5; --c1: #d9662b; --c2: #3c8d5a; --c3: #7b4fa6; --c4: #b08a2e; --c5: #c2415b }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ec; --dim: #9aa7b1; --line: #3a444c; --paper: #14191d;
  --card: #1c2328; --accent: #4db6ac; --c0: #64b0ea; --c1: #f0925c; --c2: #74c794; --c3: #b794dd; --c4: #dcb95c;
  --c5: #ef7f95 } }
* { box-sizing: border-box }
body { margin: 0; font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper) }
main { max-width: 1340px; margin: 0 auto; padding: 1rem }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; border-bottom: 1px solid var(--line) }
p { margin: .4rem 0; overflow-wrap: anywhere }
a { color: var(--accent) }
.dim, figcaption small, th { color: var(--dim); font-weight: normal }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: .6rem; margin: 1rem 0 }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .5rem .7rem }
.figures b { display: block; font-size: 1.15rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 23rem), 1fr)); gap: 1rem }
figure { margin: 0; max-width: 44rem; background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: .6rem }
figcaption { display: flex; flex-wrap: wrap; gap: .1rem .8rem; align-items: baseline }
figure > svg { display: block; width: 100%; height: auto }
svg text { fill: var(--dim); font-size: 12px }
svg .grid { stroke: var(--line) }
svg polyline { fill: none !important; stroke-width: 1.6; stroke-linejoin: round }
svg .faint { opacity: .35; stroke-width: 1 }
.c0 { stroke: var(--c0); fill: var(--c0) } .c1 { stroke: var(--c1); fill: var(--c1) }
.c2 { stroke: var(--c2); fill: var(--c2) } .c3 { stroke: var(--c3); fill: var(--c3) }
.c4 { stroke: var(--c4); fill: var(--c4) } .c5 { stroke: var(--c5); fill: var(--c5) }
.key { display: inline-block; width: .7em; height: .7em; margin-right: .3em; border-radius: 2px }
.key.c0 { background: var(--c0) } .key.c1 { background: var(--c1) } .key.c2 { background: var(--c2) }
.key.c3 { background: var(--c3) } .key.c4 { background: var(--c4) } .key.c5 { background: var(--c5) }
.wide { overflow-x: auto; max-width: 100% }
table { border-collapse: collapse; font-size: .92rem }
td, th { text-align: left; vertical-align: top; padding: .15rem .9rem .15rem 0; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; overflow-wrap: break-word }
td:first-child, th:first-child { white-space: nowrap }
code, pre { font: 12.5px/1.45 ui-monospace, monospace }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .6rem }
pre.text { white-space: pre-wrap; overflow-wrap: anywhere }
summary { cursor: pointer; margin: .4rem 0 }
"""
