"""`lamella.estimate` and torch's `FSDPMemTracker`, each beside the counted bytes of its engine, on a CPU.

    python -m lamella_integration.bench_trackers

The step of a transformers Llama with AdamW runs on rank 0 of two, without rank 1. All storages made, resized and freed
by operators in a second step with memory are counted. torch's tracker follows FSDP2 and
`lamella.estimate` lamella's engine, both without memory.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import lamella
from lamella.testing import LiveBytes

_MIB: Final = 1 << 20
_NUM_SEQUENCES, _NUM_TOKENS, _NUM_RANKS = 2, 256, 2
_CONFIG: Final[Mapping[str, Any]] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class StepBytes(NamedTuple):
    """Bytes between steps, and the most of a step."""

    at_rest: float
    peak: float


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    print("| tool | engine | recompute | at rest MiB | counted | peak | counted | difference | seconds |")
    print("|---|---|---|--:|--:|--:|--:|--:|--:|")
    for recomputes in (False, True):
        _print("torch, FSDPMemTracker", "FSDP2", _tracked, _shard_by_torch, recomputes=recomputes)
        _print("lamella.estimate", "lamella", _estimated, _shard_by_lamella, recomputes=recomputes)


def _print(
    tool: str,
    engine: str,
    follow: Callable[[bool], StepBytes],
    shard: Callable[[nn.Module, DeviceMesh], None],
    *,
    recomputes: bool,
) -> None:
    with _fake_ranks() as mesh:
        counted = _counted(recomputes, shard, mesh)
    start = time.perf_counter()
    stated = follow(recomputes)
    seconds = time.perf_counter() - start
    cells = [tool, engine, "full" if recomputes else "no"]
    cells += [f"{nbytes / _MIB:.2f}" for nbytes in (stated.at_rest, counted.at_rest, stated.peak, counted.peak)]
    print(f"| {' | '.join([*cells, f'{stated.peak / counted.peak - 1:+.1%}', f'{seconds:.1f}'])} |", flush=True)


@contextmanager
def _fake_ranks() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_NUM_RANKS)
    try:
        yield init_device_mesh("cpu", (_NUM_RANKS,))
    finally:
        dist.destroy_process_group()


def _counted(recomputes: bool, shard: Callable[[nn.Module, DeviceMesh], None], mesh: DeviceMesh) -> StepBytes:
    live = LiveBytes()
    with live:
        model, optimizer = _sharded(recomputes, shard, mesh)
        _step(model, optimizer)
        gc.collect()
        first = len(live.log.changes)
        _step(model, optimizer)
        now = most = sum(change.nbytes for change in live.log.changes[:first])
        for change in live.log.changes[first:]:
            now += change.nbytes
            most = max(most, now)
    return StepBytes(now, most)


def _tracked(recomputes: bool) -> StepBytes:
    with _fake_ranks() as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        model, optimizer = _sharded(recomputes, _shard_by_torch, mesh)
        tracker: Any = FSDPMemTracker(model, optimizer)
        with tracker:
            _step(model, optimizer)
            tracker.reset_mod_stats()
            _step(model, optimizer)
        snapshots = [tracker.get_tracker_snapshot(name)[torch.device("cpu")]["Total"] for name in ("current", "peak")]
    return StepBytes(*snapshots)


def _estimated(recomputes: bool) -> StepBytes:
    with torch.device("meta"):
        model = _model(recomputes)
    estimate = lamella.estimate(
        model,
        shard=_shard_by_lamella,
        loss=_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
        mesh=(_NUM_RANKS,),
        vocab_size=_CONFIG["vocab_size"],
        device="cpu",
    )
    return StepBytes(sum(estimate.at_rest.values()), estimate.peak.nbytes)


def _sharded(
    recomputes: bool, shard: Callable[[nn.Module, DeviceMesh], None], mesh: DeviceMesh
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model(recomputes)
    shard(model, mesh)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def _model(recomputes: bool) -> Any:
    model = LlamaForCausalLM(LlamaConfig(**_CONFIG, use_cache=False))
    for layer in model.model.layers if recomputes else ():
        layer.forward = _recomputed(layer.forward)
    return model


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs, **options: checkpoint(forward, *inputs, use_reentrant=False, **options)


def _shard_by_torch(model: Any, mesh: DeviceMesh) -> None:
    policy = TorchPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model):
        torch_fully_shard(module, mesh=mesh, mp_policy=policy)


def _shard_by_lamella(model: Any, mesh: DeviceMesh) -> None:
    policy = lamella.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model):
        lamella.fully_shard(module, mesh=mesh, mp_policy=policy)


def _loss(model: nn.Module) -> torch.Tensor:
    tokens = torch.zeros(_NUM_SEQUENCES, _NUM_TOKENS, dtype=torch.int64)
    loss: torch.Tensor = model(tokens, labels=tokens).loss
    return loss


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    _loss(model).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
