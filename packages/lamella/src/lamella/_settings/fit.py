"""Checks between the options that fit a model into memory, each refused in one line before anything starts."""

from collections.abc import Iterator

from lamella._settings.options import ConfigError
from lamella._settings.sections import ParallelConfig
from lamella._settings.sizes import budget_nbytes


def check_fit(parallel: ParallelConfig) -> None:
    """Refuse options of [parallel] that contradict each other.

    Raises:
        ConfigError: Names both options and a way out.
    """
    budget_nbytes(parallel.keep_budget)
    if (problem := next(_problems(parallel), None)) is not None:
        raise ConfigError(problem)


def _problems(parallel: ParallelConfig) -> Iterator[str]:
    if parallel.ranks is not None and parallel.ranks % parallel.replicate:
        yield (
            f"Expected --replicate to divide the {parallel.ranks} ranks, got {parallel.replicate}. Pass a divisor, or "
            "--ranks that it divides."
        )
    if parallel.ranks is not None and parallel.ranks % parallel.experts:
        yield (
            f"Expected --experts to divide the {parallel.ranks} ranks, got {parallel.experts}. Pass a divisor, or "
            "--ranks that it divides."
        )
    if parallel.experts > 1 and parallel.replicate > 1:
        yield (
            f"Expected --experts without --replicate, whose instances would each need all experts, got both, "
            f"{parallel.experts} and {parallel.replicate}. Leave one of them out."
        )
    if parallel.experts > 1 and parallel.compile:
        yield (
            "Expected --experts without --compile, which cannot trace the numbers of tokens on their way, got both. "
            "Leave one of them out."
        )
    if parallel.spread_states and parallel.replicate == 1:
        yield "Expected --spread-states with --replicate of 2 or more, got 1. Leave --spread-states out."
    if parallel.spread_states and parallel.stage != 3:
        yield f"Expected --spread-states with --stage 3 only, got {parallel.stage}. Leave one of them out."
    if parallel.stage != 3 and not parallel.reshard_after_forward:
        yield (
            f"Expected --no-reshard-after-forward with --stage 3 only, got {parallel.stage}, which keeps all weights "
            "anyway. Leave one of them out."
        )
    if parallel.keep_budget is not None and (parallel.stage != 3 or not parallel.reshard_after_forward):
        other = f"--stage {parallel.stage}" if parallel.stage != 3 else "--no-reshard-after-forward"
        yield f"Expected --keep-budget without {other}, which keeps all weights, got both. Leave one of them out."
    if parallel.reduce == "bf16" and parallel.precision == "fp32":
        yield "Expected --reduce bf16 with --precision bf16, got fp32. Leave --reduce out, or pass --precision bf16."
    if parallel.recompute_layers is not None and parallel.recompute == "no":
        yield (
            f"Expected --recompute-layers with --recompute selective or full, got --recompute no and "
            f"{parallel.recompute_layers} layers. Pass --recompute, or leave --recompute-layers out."
        )
    if parallel.offload_activations and parallel.compile:
        yield (
            "Expected --offload-activations without --compile, which traces no hooks of saved tensors, got both. Leave "
            "one of them out."
        )
