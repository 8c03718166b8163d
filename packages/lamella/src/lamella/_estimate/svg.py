"""An estimate as a picture: bytes by kind, stacked, over the moments of a step."""

from collections.abc import Iterator
from html import escape
from typing import Final

from lamella._estimate.estimated_bytes import Estimate, MomentBytes
from lamella._estimate.kinds import KINDS
from lamella._settings.sizes import size

_WIDTH, _HEIGHT, _LEFT, _TOP = 860, 300, 80, 30
_COLOURS: Final = (
    *(
        "#4e79a7",
        "#76b7b2",
        "#59a14f",
        "#f28e2b",
        "#e15759",
        "#b07aa1",
        "#edc948",
        "#9c755f",
        "#bab0ac",
        "#8cd17d",
        "#d3d3d3",
    ),
)


def svg(estimate: Estimate) -> str:
    """Return the picture as an SVG document."""
    kinds = [kind for kind in KINDS if any(kind in moment.kinds for moment in estimate.moments)]
    height = _TOP + _HEIGHT + 40 + 20 * len(kinds)
    body = [*_title(estimate), *_bars(estimate, kinds), *_axis(estimate), *_legend(kinds)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n' + "\n".join(body) + "\n</svg>\n"
    )


def _title(estimate: Estimate) -> Iterator[str]:
    text = f"rank {estimate.rank} of {estimate.num_ranks}: {size(estimate.peak.nbytes)} at {estimate.peak.name}"
    yield f'<text x="{_LEFT}" y="18">{escape(text)}</text>'


def _bars(estimate: Estimate, kinds: list[str]) -> Iterator[str]:
    width = _WIDTH / len(estimate.moments)
    for index, moment in enumerate(estimate.moments):
        yield f"<g><title>{escape(moment.name)}: {size(moment.nbytes)}</title>"
        yield from _bar(moment, kinds, _LEFT + index * width, width, _HEIGHT / max(1, estimate.peak.nbytes))
        yield "</g>"


def _bar(moment: MomentBytes, kinds: list[str], x: float, width: float, scale: float) -> Iterator[str]:
    y = float(_TOP + _HEIGHT)
    for kind in kinds:
        height = moment.kinds.get(kind, 0) * scale
        y -= height
        yield (
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{_colour(kind)}" '
            'shape-rendering="crispEdges"/>'
        )


def _axis(estimate: Estimate) -> Iterator[str]:
    for share in (0.0, 0.5, 1.0):
        y = _TOP + _HEIGHT * (1 - share)
        label = size(int(share * estimate.peak.nbytes))
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{label}</text>'
    names = (estimate.moments[0].name, estimate.moments[-1].name)
    yield f'<text x="{_LEFT}" y="{_TOP + _HEIGHT + 18}">{escape(names[0])}</text>'
    yield f'<text x="{_LEFT + _WIDTH}" y="{_TOP + _HEIGHT + 18}" text-anchor="end">{escape(names[1])}</text>'


def _legend(kinds: list[str]) -> Iterator[str]:
    for index, kind in enumerate(kinds):
        y = _TOP + _HEIGHT + 34 + 20 * index
        yield f'<rect x="{_LEFT}" y="{y}" width="12" height="12" fill="{_colour(kind)}"/>'
        yield f'<text x="{_LEFT + 18}" y="{y + 11}">{escape(kind)}</text>'


def _colour(kind: str) -> str:
    return _COLOURS[KINDS.index(kind)]
