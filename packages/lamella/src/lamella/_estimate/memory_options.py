"""The options of a run that trade memory for time, and their combinations."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Final, NamedTuple

from lamella._settings.config import Config
from lamella._settings.options import ConfigError
from lamella._settings.sizes import budget_nbytes

_MIB: Final = 1 << 20
_WEIGHTS: Final = ("stage 2", "keep", "reshard")
_KINDS: Final = ("no", "selective", "full")
_NUM_BUDGETS: Final = 4


class MemoryOptions(NamedTuple):
    """Options that trade memory for time.

    Attributes:
        weights: "stage 2", "keep" or "reshard": the weights kept from forward to backward, all but for "reshard".
        recompute: "no", "selective" or "full".
        num_recomputed: Number of layers that run again; None for all.
        keep_nbytes: Bytes of the weights kept with "reshard", whole MiB.
        offload_activations: Whether saved tensors lie in the host's memory.
        home_device: "gpu" or "cpu": the memory of main weights and optimizer state.
    """

    weights: str = "reshard"
    recompute: str = "no"
    num_recomputed: int | None = None
    keep_nbytes: int = 0
    offload_activations: bool = False
    home_device: str = "gpu"

    @property
    def is_plain(self) -> bool:
        """True without recomputation and without the host's memory."""
        return self.recompute == "no" and not self.takes_host_memory

    @property
    def takes_host_memory(self) -> bool:
        """True with tensors in the host's memory."""
        return self.offload_activations or self.home_device == "cpu"

    @property
    def memory_ranks(self) -> tuple[int, ...]:
        """The place of each option among its choices, which take less memory from one to the next."""
        weights = _WEIGHTS.index("keep" if self.keep_nbytes else self.weights)
        ranks = (weights, _KINDS.index(self.recompute), self.offload_activations, self.home_device == "cpu")
        return (*map(int, ranks), int(self.num_recomputed is None))

    def is_leaner_than(self, other: "MemoryOptions") -> bool:
        """True if no option takes more memory than the same option of the other, apart from numbers of layers."""
        ranks = zip(self.memory_ranks[:-1], other.memory_ranks[:-1], strict=True)
        return all(rank >= rank_of_other for rank, rank_of_other in ranks)

    def applied(self, config: Config) -> Config:
        """Return the settings with these options.

        Raises:
            ConfigError: The options contradict further settings.
        """
        changes: dict[str, Any] = {
            "stage": 2 if self.weights == "stage 2" else 3,
            "reshard_after_forward": self.weights != "keep",
            "recompute": self.recompute,
            "recompute_layers": self.num_recomputed,
            "offload_activations": self.offload_activations,
            "rest": self.home_device,
            "keep_budget": f"{self.keep_nbytes // _MIB}MiB" if self.keep_nbytes else None,
        }
        return replace(config, parallel=replace(config.parallel, **changes))

    def is_allowed(self, config: Config) -> bool:
        """True if the options contradict no further setting of a run, such as --compile."""
        try:
            self.applied(config)
        except ConfigError:
            return False
        return True

    def flags(self) -> str:
        """Return the options in the spelling of the command line."""
        flags = [{"stage 2": "--stage 2", "keep": "--no-reshard-after-forward", "reshard": ""}[self.weights]]
        flags += [f"--recompute {self.recompute}"] * (self.recompute != "no")
        flags += [f"--recompute-layers {self.num_recomputed}"] * (self.num_recomputed is not None)
        flags += [f"--keep-budget {self.keep_nbytes // _MIB}MiB"] * (self.keep_nbytes > 0)
        flags += ["--offload-activations"] * self.offload_activations
        flags += ["--rest cpu"] * (self.home_device == "cpu")
        return " ".join(filter(None, flags)) or "(no options)"


def options_of(config: Config) -> MemoryOptions:
    """Return the options of a run's settings."""
    parallel = config.parallel
    return MemoryOptions(
        weights="stage 2" if parallel.stage < 3 else "reshard" if parallel.reshard_after_forward else "keep",
        recompute=parallel.recompute,
        num_recomputed=parallel.recompute_layers,
        keep_nbytes=budget_nbytes(parallel.keep_budget),
        offload_activations=parallel.offload_activations,
        home_device=parallel.rest,
    )


def all_options(num_layers: int, gathered_nbytes: int) -> Iterator[MemoryOptions]:
    """Yield the combinations, with each number of recomputed layers and a few keep budgets.

    Args:
        num_layers: The layers of the model.
        gathered_nbytes: Bytes of all weights, unsharded.
    """
    budgets = [gathered_nbytes * part // _NUM_BUDGETS // _MIB * _MIB for part in range(1, _NUM_BUDGETS)]
    weights = [(name, 0) for name in _WEIGHTS] + [("reshard", nbytes) for nbytes in budgets if nbytes]
    numbers = (*range(1, num_layers), None)
    recomputed = [("no", None), *((kind, number) for kind in _KINDS[1:] for number in numbers)]
    for (name, budget), (kind, number), is_offloaded, home_device in product(
        weights, recomputed, (False, True), ("gpu", "cpu")
    ):
        yield MemoryOptions(name, kind, number, budget, is_offloaded, home_device)


def coarse_options() -> Iterator[MemoryOptions]:
    """Yield the combinations that recompute all layers or none, without keep budgets."""
    yield from (options for options in all_options(1, 0))
