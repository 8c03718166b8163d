"""The host's time for a step: for operators, for hooks of recomputed layers, and for units' collectives.

Note [Times of a host]
    Python launches the kernels of a step, and the GPU waits if launches take longer than kernels. A recomputed layer
    takes the host further time, beside the operators run again: autograd calls a hook for each saved tensor, and
    selective recomputation decides in Python for each operator. A trial measures the hooks, and an operator, by a
    small layer on the CPU. A run's operator takes more than the trial's: the trial launches no kernel of a GPU, and
    has few modules around an operator.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

import torch
from torch import nn

from lamella._estimate.live_bytes import LiveBytes
from lamella._model.activations import recompute

HOOKS: Final = {"no": 0.0, "full": 1.5, "selective": 10.0}
"""Further time for an operator of a recomputed layer's forward, which runs twice, over that of a launch: full's is
fitted to two steps on H100s, selective's to the row in docs/benchmarks/0025, 255 and 281 ms on two H200s, 250 on
H100s. A later run of the row took 206 ms, 8 % more than planned."""

_LAUNCH_S, _VIEW_S = 10.5e-6, 3.3e-6
_OF_A_GPU: Final = 3.0
"""A run's operator over the trial's, an assumption: 13.8 us on the host of an H200, 4.5 us in the trial of another."""

_OF_A_COLLECTIVE: Final = 28.0
"""A unit's gather or reduction over an operator: 390 us and 13.8 us on the host of an H200."""

_WIDTH, _HEADS, _LENGTH = 16, 2, 4
_NUM_TRIALS: Final = 31


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """The times of a host in a run on GPUs; see Note [Times of a host].

    Attributes:
        operator_seconds: Seconds for an operator with a kernel, and for the views before the operator.
        hook_seconds: Kind of recomputation -> further seconds for an operator of a recomputed layer's forward, half
            in the first run and half in backward's second run.
    """

    operator_seconds: float
    hook_seconds: Mapping[str, float]

    @property
    def collective_seconds(self) -> float:
        """Seconds for a unit's gather or reduction, with the engine's hooks."""
        return _OF_A_COLLECTIVE * self.operator_seconds


ASSUMED_HOST: Final = HostTimes(
    operator_seconds=_LAUNCH_S + _VIEW_S,
    hook_seconds={kind: share * _LAUNCH_S for kind, share in HOOKS.items()},
)
"""The host of an H200."""

IDLE_HOST: Final = HostTimes(operator_seconds=0.0, hook_seconds=dict.fromkeys(HOOKS, 0.0))
"""A host that no GPU waits for: one launch runs a graph of operators."""


def measured_host() -> HostTimes:
    """Return the times of this machine's host, by a trial.

    Effects: takes about 0.1 s on the CPU, and seconds more for torch's imports in the first call of a process.
    """
    plain, full, selective = _trial("no"), _trial("full"), _trial("selective")
    operator_seconds = plain.seconds / plain.num_operators
    return HostTimes(
        operator_seconds=_OF_A_GPU * operator_seconds,
        hook_seconds={
            "no": 0.0,
            **{
                kind: max(0.0, trial.seconds - trial.num_operators * operator_seconds) / trial.num_forward
                for kind, trial in (("full", full), ("selective", selective))
            },
        },
    )


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """A forward and backward of a small layer: the median seconds, and the operators with a kernel."""

    seconds: float
    num_operators: int
    num_forward: int


def _trial(kind: Literal["no", "full", "selective"]) -> _Trial:
    layer = _SmallLayer()
    if kind != "no":
        recompute([layer], kind)
    inputs = torch.ones(1, _LENGTH, _WIDTH, requires_grad=True)
    with torch.enable_grad(), LiveBytes() as live:
        output = layer(inputs)
        num_forward = len(live.log.operators)
        output.sum().backward()
    return _Trial(
        seconds=median(_timed(layer, inputs) for _ in range(_NUM_TRIALS)),
        num_operators=len(live.log.operators),
        num_forward=num_forward,
    )


@torch.enable_grad()
def _timed(layer: nn.Module, inputs: torch.Tensor) -> float:
    start = time.perf_counter()
    layer(inputs).sum().backward()
    return time.perf_counter() - start


class _SmallLayer(nn.Module):
    """Attention and a gated product, each behind a norm, too small to take more than the host's time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(_WIDTH)
        self.inputs = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(3))
        self.mixed, self.gate, self.up, self.down = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        query, key, value = (linear(normed).unflatten(-1, (_HEADS, -1)).transpose(1, 2) for linear in self.inputs)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.mixed(attended.transpose(1, 2).flatten(2))
        normed = self.norm(hidden)
        output: torch.Tensor = hidden + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return output
