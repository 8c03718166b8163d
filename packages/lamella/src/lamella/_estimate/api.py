"""`lamella.estimate`: of a run's configuration, or of any module that a function shards."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import singledispatch
from typing import Any, Literal, SupportsIndex

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lamella._estimate.compiled_layers import compiles, is_estimated_compiled
from lamella._estimate.estimated_bytes import CONTEXT_NBYTES, LIBRARIES_NBYTES, Estimate, estimate_of
from lamella._estimate.fake_ranks import FusedSteps, fake_ranks, no_memory
from lamella._estimate.gpu_operators import gpu_operators
from lamella._estimate.kinds import on_host
from lamella._estimate.live_bytes import LiveBytes
from lamella._estimate.recipe_step import record_recipe
from lamella._estimate.recorded_step import RecordedStep, TrainingStep, Watch, record, unwatched
from lamella._model.capture import captures
from lamella._settings.config import Config
from lamella._settings.options import ConfigError
from lamella_engine.extending import unit_of

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_AS_EAGER = "compiled layers are estimated as eager ones, which save more for backward: an upper bound"
_CAPTURED = "the graph of captured steps keeps their memory: a validation's comes on top (--no-capture)"
_COMPILES = "layers are estimated as compiled, which they are by default in a run of so many steps (--no-compile)"
_DOCUMENTS = "a sequence is estimated as one document"


def estimate_run(config: Config, rank: int = 0) -> Estimate:
    """Estimate the bytes of a rank of `lamella train`.

    Args:
        config: The run's settings, with ranks, device and precision.
        rank: The rank.

    Raises:
        ConfigError: The settings cannot be met, or the process has a process group.

    Effects: none on the disk; allocates no memory for weights or activations.
    """
    return estimate_recorded(record_recipe(config, rank), config, rank)


def estimate_recorded(recorded: RecordedStep, config: Config, rank: int) -> Estimate:
    """Return the estimate of a recorded step of `lamella train`.

    Args:
        recorded: The step of the rank.
        config: The run's settings.
        rank: The rank.
    """
    parallel = config.parallel
    return _estimate(
        recorded,
        rank,
        parallel.ranks or 1,
        parallel.device,
        rests_on_cpu=parallel.rest == "cpu",
        notes=tuple(_notes(config)),
    )


def _estimate(
    recorded: RecordedStep, rank: int, num_ranks: int, device: str, *, rests_on_cpu: bool, notes: tuple[str, ...] = ()
) -> Estimate:
    return estimate_of(
        recorded,
        rank=rank,
        num_ranks=num_ranks,
        host=on_host(rests_on_cpu),
        context_nbytes=context_nbytes(device),
        libraries_nbytes=LIBRARIES_NBYTES if device == "cuda" else 0,
        notes=notes,
    )


def _notes(config: Config) -> Iterator[str]:
    is_compiled = compiles(config)
    if is_compiled and not is_estimated_compiled(config):
        yield _AS_EAGER
    elif is_compiled and config.parallel.compile is None:
        yield _COMPILES
    if config.data.packing == "documents":
        yield _DOCUMENTS
    if captures(config):
        yield _CAPTURED


def estimate_module(
    module: nn.Module,
    *,
    loss: Callable[[nn.Module], torch.Tensor],
    shard: Callable[[nn.Module, DeviceMesh], object],
    optimizer: MakeOptimizer = torch.optim.AdamW,
    mesh: Sequence[int] = (8,),
    rank: int = 0,
    num_microbatches: int = 1,
    vocab_size: int | None = None,
    clip: Callable[[nn.Module], object] = lambda module: None,
    rests_on_cpu: bool = False,
    device: Literal["cpu", "cuda"] = "cuda",
) -> Estimate:
    """Estimate the bytes of a rank of any training loop over `fully_shard`.

        with torch.device("meta"):
            model = Decoder(config)
        estimate = lamella.estimate(
            model, shard=shard_blocks, loss=lambda model: model(torch.zeros(1, 4096, dtype=torch.int64)).sum()
        )

    The step runs on tensors without memory: the functions see shapes and dtypes, and no values.

    Args:
        module: On the meta device, not sharded. Sharded in place.
        loss: Runs the forward of a microbatch on inputs that it makes on the CPU; returns a 0-D loss.
        shard: Calls `fully_shard` on the units and last on the module, with the mesh.
        optimizer: Makes the optimizer of the module's parameters.
        mesh: Ranks along each axis; with two, the first axis is of replicas.
        rank: The rank.
        num_microbatches: Microbatches whose gradients a step adds up.
        vocab_size: The last size of the logits, to list them apart.
        clip: Clips the module's gradients.
        rests_on_cpu: Count main weights, gradients and optimizer state as the host's: `shard` passes a
            `CPUOffloadPolicy`.
        device: "cuda" counts NCCL's memory, "cpu" gloo's.

    Raises:
        ConfigError: The process has a process group, the rank is outside the mesh, or `mesh`, `num_microbatches` or
            `device` has no such meaning.

    Effects: allocates no memory; the default process group is a fake one meanwhile.
    """
    recorded = record_module(
        module,
        loss=loss,
        shard=shard,
        optimizer=optimizer,
        mesh=mesh,
        rank=rank,
        num_microbatches=num_microbatches,
        vocab_size=vocab_size,
        clip=clip,
        device=device,
    )
    return _estimate(recorded, rank, torch.Size(mesh).numel(), device, rests_on_cpu=rests_on_cpu)


def record_module(
    module: nn.Module,
    *,
    loss: Callable[[nn.Module], torch.Tensor],
    shard: Callable[[nn.Module, DeviceMesh], object],
    optimizer: MakeOptimizer = torch.optim.AdamW,
    mesh: Sequence[int] = (8,),
    rank: int = 0,
    num_microbatches: int = 1,
    vocab_size: int | None = None,
    clip: Callable[[nn.Module], object] = lambda module: None,
    device: Literal["cpu", "cuda"] = "cuda",
    watch: Watch = unwatched,
) -> RecordedStep:
    """Record a step of a training loop, with the arguments, errors and effects of `estimate_module`.

    Args:
        watch: Entered around the steps.
    """
    _check_loop(mesh, num_microbatches, device)
    live = LiveBytes()
    with fake_ranks(torch.Size(mesh).numel(), rank, device):
        names = ("replicas", "shards")[-len(mesh) :] if len(mesh) <= 2 else None
        shard(module, init_device_mesh("cpu", tuple(mesh), mesh_dim_names=names))
        with no_memory(), gpu_operators(device), live:
            module.to_empty(device="cpu")
            step = TrainingStep(
                model=module,
                units=[unit for unit in module.modules() if unit is not module and unit_of(unit) is not None],
                loss=lambda: loss(module),
                optimizer=optimizer(module.parameters()),
                clip=lambda: clip(module),
                num_microbatches=num_microbatches,
                vocab_size=vocab_size,
            )
            with watch(step, live), FusedSteps():
                return record(step, live)


def _check_loop(mesh: object, num_microbatches: object, device: object) -> None:
    if not (isinstance(mesh, Sequence) and mesh and all(map(_is_count, mesh))):
        raise ConfigError(
            f"Expected `mesh` to be a sequence of numbers of ranks, each at least 1, got {mesh!r}. Pass (8,) for eight."
        )
    if not _is_count(num_microbatches):
        raise ConfigError(f"Expected `num_microbatches` to be an int of at least 1, got {num_microbatches!r}.")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"Expected `device` to be 'cpu' or 'cuda', got {device!r}.")


def _is_count(number: object) -> bool:
    return isinstance(number, SupportsIndex) and not isinstance(number, bool) and number.__index__() >= 1


@singledispatch
def estimate(subject: object, **options: Any) -> Estimate:
    """Estimate the bytes of one rank over an optimizer step, by kind and moment, without weights or GPUs.

    Args:
        subject: A run's settings (`Config`), with the options of `estimate_run`; or an `nn.Module`, with the options of
            `estimate_module`.
        options: `rank` for settings; at least `loss` and `shard` for a module.

    Raises:
        ConfigError: The settings cannot be met, or the process has a process group.
        TypeError: The subject is neither.

    Effects: allocates no memory for weights or activations; the default process group is a fake one meanwhile.
    """
    raise TypeError(f"Expected a Config or an nn.Module to estimate, got {type(subject).__name__}.")


estimate.register(Config, estimate_run)
estimate.register(nn.Module, estimate_module)


def context_nbytes(device: str) -> int:
    """Return the bytes of a CUDA context; none for the CPU."""
    return CONTEXT_NBYTES if device == "cuda" else 0
