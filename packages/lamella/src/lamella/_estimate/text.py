"""An estimate as text: a table of kinds, the terms beside them, and a picture of bytes over the step."""

from collections.abc import Iterator, Mapping
from typing import Final

from lamella._estimate.estimated_bytes import Estimate, MomentBytes
from lamella._estimate.kinds import KINDS
from lamella._settings.sizes import size

_NUM_ROWS: Final = 24
_WIDTH: Final = 44


def lines(estimate: Estimate) -> Iterator[str]:
    """Yield the lines of an estimate."""
    peak = estimate.peak
    yield f"rank {estimate.rank} of {estimate.num_ranks}: {size(estimate.total_nbytes)} at {peak.name!r}"
    yield ""
    yield f"  {'':24s}{'at rest':>14s}{'at the peak':>14s}"
    for kind in KINDS:
        if kind in estimate.at_rest or kind in peak.kinds:
            yield _row(kind, estimate.at_rest.get(kind, 0), peak.kinds.get(kind, 0))
    yield _row("tensors", sum(estimate.at_rest.values()), peak.nbytes)
    yield _row("rounding of blocks", None, estimate.rounding_nbytes)
    yield _row("idle windows", None, estimate.window_nbytes)
    yield _row("segments", None, estimate.segment_nbytes)
    yield _row("CUDA context (assumed)", None, estimate.context_nbytes)
    yield _row("GPU", None, estimate.total_nbytes)
    if estimate.host_nbytes:
        yield ""
        yield f"  in the host's memory, a rank: {size(estimate.host_nbytes)}, {_listed(estimate.host_at_rest)}"
    yield ""
    yield from picture(estimate)
    for note in estimate.notes:
        yield f"  note: {note}"


def picture(estimate: Estimate) -> Iterator[str]:
    """Yield a bar for each part of the step, with the most bytes of the part."""
    name_width = max(len(moment.name) for moment in estimate.moments)
    for moment in _parts(estimate.moments):
        bar = "#" * max(1, round(_WIDTH * moment.nbytes / max(1, estimate.peak.nbytes)))
        yield f"  {moment.name:{name_width}s} {size(moment.nbytes):>12s} {bar}"


def _parts(moments: tuple[MomentBytes, ...]) -> Iterator[MomentBytes]:
    """Yield the highest moment of each of a few equal parts of the step."""
    length = -(-len(moments) // _NUM_ROWS)
    for start in range(0, len(moments), length):
        yield max(moments[start : start + length], key=lambda moment: moment.nbytes)


def _row(name: str, at_rest: int | None, peak: int) -> str:
    return f"  {name:24s}{'' if at_rest is None else size(at_rest):>14s}{size(peak):>14s}"


def _listed(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in kinds.items()) or "none at rest"
