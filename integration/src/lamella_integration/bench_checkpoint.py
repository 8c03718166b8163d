"""Checkpoints of one state, on one disk, in one run: lamella, torch DCP and `torch.save` side by side.

    torchrun --nproc-per-node 2 -m lamella_integration.bench_checkpoint --device cpu --mib 500 --folder /data/bench

The state is a stack of square layers, sharded by torch's `fully_shard`, with AdamW's moments. Every figure is the
median over repetitions, of the slowest rank's seconds. A save ends when its files are on the disk. `torch.save` writes
each rank's shards to a separate file, readable only by the same number of ranks: the lower bound of a save's cost.
Loads read from the page cache if the host's memory is large enough.

A background save starts after a step, and training goes on for a window of steps, about twice as long as a blocking
save. *stall* is the window's time minus the time of the same steps just before, without a save: the whole loss of
training, device time included. *call* is the part of the stall to start the save, *held* the host's wait before the
next optimizer step. *complete* is the time from the start of the save to the complete checkpoint.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lamella_checkpoint import AsyncSaver, load, save
from lamella_integration.launch import leave, process_group

_MOST_STEPS: Final = 50


@dataclass(frozen=True, kw_only=True)
class CheckpointRow:
    """Seconds of one method of saving and loading, medians; None for figures absent from the method."""

    name: str
    save_s: float | None = None
    load_s: float | None = None
    stall_s: float | None = None
    call_s: float | None = None
    held_s: float | None = None
    complete_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A background save: `wait` for the checkpoint, and the seconds the host has waited for copies."""

    wait: Callable[[], object]
    held_seconds: Callable[[], float] = lambda: 0.0


@dataclass(frozen=True, kw_only=True)
class TrainedState:
    """A sharded model and its optimizer after one step, and each rank's rows of input."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    rows: torch.Tensor

    @classmethod
    def build(cls, num_layers: int, device: torch.device, *, width: int = 1024, num_rows: int = 64) -> "TrainedState":
        """Build the state. Effects: collective over all ranks."""
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(num_layers)))
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in model:
            nn.init.normal_(cast(torch.Tensor, layer.weight), std=width**-0.5)  # Activations keep their magnitude.
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        state = cls(model=model, optimizer=optimizer, rows=torch.randn(num_rows, width, device=device))
        state.train()
        return state

    def train(self) -> None:
        """Run one step. Effects: collective over all ranks; no host sync."""
        self.model(self.rows).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def named(self) -> dict[str, Any]:
        """Return the state for torch DCP, under lamella's names."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        return {"model": self.model.state_dict(), "optimizer": optimizer}

    def shards(self) -> dict[str, torch.Tensor]:
        """Return this rank's shard of every tensor."""
        flat = {
            f"{section}.{name}": value for section, values in self.named().items() for name, value in values.items()
        }
        return {name: value.to_local() for name, value in flat.items() if isinstance(value, DTensor)}


_FIGURES: Final = [field.name for field in fields(CheckpointRow) if field.name != "name"]


class CheckpointBench:
    """The methods of saving and loading, measured in turn on the same state, each in a fresh folder."""

    def __init__(self, state: TrainedState, folder: Path) -> None:
        self._state, self._folder = state, folder
        self._saver = AsyncSaver()
        self.step_s = 0.0
        self.num_steps = 1
        self._host_group = dist.new_group(backend="gloo")  # For DCP's exchange of objects from a thread.

    def rows(self, num_times: int) -> list[CheckpointRow]:
        """Measure each method `num_times` times, after an uncounted first time.

        Effects: collective over all ranks; writes to the folder and finally removes the folder.
        """
        model, optimizer = self._state.model, self._state.optimizer
        ways: dict[str, Callable[[Path], CheckpointRow]] = {
            "lamella": self._blocking(
                lambda path: save(path, model=model, optimizer=optimizer),
                lambda path: load(path, model=model, optimizer=optimizer),
            ),
            "torch DCP": self._blocking(
                lambda path: state_dict_saver.save(self._state.named(), checkpoint_id=path),
                lambda path: state_dict_loader.load(self._state.named(), checkpoint_id=path),
            ),
            "torch.save of shards": self._blocking(self._save_shards, self._load_shards),
            "lamella, in the background": self._in_background(self._begin_lamella),
            "torch DCP, in the background": self._in_background(self._begin_dcp),
        }
        rows_by_way: dict[str, list[CheckpointRow]] = {name: [] for name in ways}
        for index in range(num_times + 1):
            if index == 1:
                self._choose_window(rows_by_way["lamella"][0].save_s or 0.0)
            for name, measure in ways.items():
                self._make_room()
                rows_by_way[name].append(measure(self._folder / "checkpoint"))
        self._saver.close()
        self._make_room(again=False)
        return [_median(name, rows[1:]) for name, rows in rows_by_way.items()]

    def _blocking(
        self, write: Callable[[Path], object], read: Callable[[Path], object]
    ) -> Callable[[Path], CheckpointRow]:
        def measure(path: Path) -> CheckpointRow:
            return CheckpointRow(name="", save_s=_slowest(partial(write, path)), load_s=_slowest(partial(read, path)))

        return measure

    def _in_background(self, begin: Callable[[Path], Begun]) -> Callable[[Path], CheckpointRow]:
        """Return a function to measure the background saves started by `begin`."""

        def measure(path: Path) -> CheckpointRow:
            saves: list[tuple[float, float, Begun, Future[float]]] = []

            def save_and_train() -> None:
                began = time.perf_counter()
                begun = begin(path)
                called = time.perf_counter()
                saves.append((began, called, begun, pool.submit(lambda: (begun.wait(), time.perf_counter())[1])))
                self._train()

            usual = _slowest(self._train)
            with ThreadPoolExecutor(1) as pool:
                stall = _slowest(save_and_train) - usual
                [(began, called, begun, completed)] = saves
                seconds = [called - began, begun.held_seconds(), completed.result() - began]
            call_s, held_s, complete_s = map(_over_ranks, seconds)
            return CheckpointRow(name="", stall_s=stall, call_s=call_s, held_s=held_s, complete_s=complete_s)

        return measure

    def _train(self) -> None:
        for _ in range(self.num_steps):
            self._state.train()

    def _choose_window(self, save_s: float) -> None:
        """Choose the number of steps in the window: about twice a blocking save. Effects: collective over all ranks."""
        self.step_s = statistics.median(_slowest(self._state.train) for _ in range(3))
        self.num_steps = min(_MOST_STEPS, max(2, math.ceil(2 * save_s / self.step_s)))

    def _begin_lamella(self, path: Path) -> Begun:
        handle = self._saver.save(path, model=self._state.model, optimizer=self._state.optimizer)
        return Begun(wait=handle.wait, held_seconds=lambda: handle.held_seconds)

    def _begin_dcp(self, path: Path) -> Begun:
        future: Any = state_dict_saver.async_save(
            self._state.named(), checkpoint_id=path, process_group=self._host_group
        )
        return Begun(wait=future.result)

    def _make_room(self, *, again: bool = True) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            if again:
                self._folder.mkdir(parents=True)
                os.sync()
        dist.barrier()

    def _save_shards(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        with (path / f"{dist.get_rank()}.pt").open("wb") as file:
            torch.save({name: shard.cpu() for name, shard in self._state.shards().items()}, file)
            file.flush()
            os.fsync(file.fileno())

    def _load_shards(self, path: Path) -> None:
        shards = torch.load(path / f"{dist.get_rank()}.pt", map_location="cpu", weights_only=True)
        for name, shard in self._state.shards().items():
            shard.copy_(shards[name])


def _slowest(work: Callable[[], object]) -> float:
    """Return the slowest rank's seconds for `work`. Effects: collective over all ranks; waits for the device."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    work()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return _over_ranks(time.perf_counter() - began)


def _over_ranks(seconds: float) -> float:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seconds)
    return float(max(every))


def _median(name: str, rows: Sequence[CheckpointRow]) -> CheckpointRow:
    def median(figure: str) -> float | None:
        seconds = [getattr(row, figure) for row in rows]
        return None if None in seconds else statistics.median(seconds)

    return CheckpointRow(name=name, **{figure: median(figure) for figure in _FIGURES})


def table(rows: Sequence[CheckpointRow]) -> str:
    """Return the rows in Markdown."""

    def text(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds:.3f}"

    heads = [figure.removesuffix("_s") + " s" for figure in _FIGURES]
    lines = [f"| | {' | '.join(heads)} |", "|---" + "|--:" * len(heads) + "|"]
    lines += [f"| {row.name} | {' | '.join(text(getattr(row, figure)) for figure in _FIGURES)} |" for row in rows]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; rank 0 prints the table."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="lamella_integration.bench_checkpoint", description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=500, help="MiB of weights and moments, all ranks together")
    parser.add_argument("--width", type=int, default=1024, help="width of a layer")
    parser.add_argument("--rows", type=int, default=64, help="rows of input per rank and step")
    parser.add_argument("--times", type=int, default=5, help="repetitions, after an uncounted first")
    parser.add_argument("--folder", type=Path, required=True, help="folder on the measured disk; emptied first")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    values = parser.parse_args(arguments)
    if least := [f"--{name}" for name in ("mib", "width", "rows", "times") if getattr(values, name) < 1]:
        parser.error(f"Expected sizes of at least 1, got {getattr(values, least[0][2:])} for {least[0]}.")
    layer_mib = 3 * 4 * values.width**2 / 2**20  # A weight and two moments, fp32.
    num_layers = max(1, round(values.mib / layer_mib))
    torch.set_float32_matmul_precision("high")
    with process_group(values.device) as device:
        state = TrainedState.build(num_layers, device, width=values.width, num_rows=values.rows)
        bench = CheckpointBench(state, values.folder / "checkpoints")
        rows = bench.rows(values.times)
        if dist.get_rank() == 0:
            print(f"{num_layers * layer_mib:.0f} MiB on {dist.get_world_size()} ranks", end=", ")
            print(f"windows of {bench.num_steps} steps of {bench.step_s:.3f} s\n\n{table(rows)}", flush=True)
            if values.out is not None:
                values.out.mkdir(parents=True, exist_ok=True)
                content = {"command": shlex.join(arguments), "rows": [asdict(row) for row in rows]}
                (values.out / "checkpoints.json").write_text(json.dumps(content, indent=2) + "\n")
        dist.barrier()
    return 0


if __name__ == "__main__":
    leave(main())
