"""Checkpoints of one state, on one disk, in one call: lamella, torch DCP and `torch.save` side by side.

    torchrun --nproc-per-node 2 -m lamella_integration.bench_checkpoint --device cpu --mib 500 --folder /data/bench

The state is a stack of square layers, sharded by torch's `fully_shard`, with AdamW's moments. Every figure is the
median over repetitions, of the slowest rank's seconds. A save counts until its files are on the disk; *stall* is how
long a save in the background keeps training from going on, and *complete* how long until its checkpoint is there.
`torch.save` writes each rank's shards to a file of its own, which only the same ranks can read: what a save costs at
least. Loads find the files in the host's memory if it is large enough.
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

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

_WIDTH: Final = 1024
_LAYER_MIB: Final = 3 * 4 * _WIDTH * _WIDTH / 2**20  # A weight and two moments, fp32.


@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds of one way to save and load, medians; None for what it does not do."""

    name: str
    save_s: float | None = None
    load_s: float | None = None
    stall_s: float | None = None
    complete_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class State:
    """A sharded model and its optimizer, stepped once."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def build(cls, num_layers: int, device: torch.device) -> "State":
        """Effects: collective."""
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False, device=device) for _ in range(num_layers)))
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return cls(model=model, optimizer=optimizer)

    def named(self) -> dict[str, Any]:
        """As torch DCP takes it, with lamella's names."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        return {"model": self.model.state_dict(), "optimizer": optimizer}

    def shards(self) -> dict[str, torch.Tensor]:
        """This rank's part of every tensor."""
        flat = {
            f"{section}.{name}": value for section, values in self.named().items() for name, value in values.items()
        }
        return {name: value.to_local() for name, value in flat.items() if isinstance(value, DTensor)}


class Bench:
    """The ways to save and load, each measured on the same state in a fresh folder, by turns."""

    def __init__(self, state: State, folder: Path) -> None:
        self._state, self._folder = state, folder
        self._saver = AsyncSaver()
        self._host_group = dist.new_group(backend="gloo")  # For the objects that DCP exchanges from a thread.

    def rows(self, num_times: int) -> list[Row]:
        """Measure each way so many times, after one that is not counted.

        Effects: collective; writes under the folder and removes it again.
        """
        model, optimizer = self._state.model, self._state.optimizer
        ways: dict[str, Callable[[Path], Row]] = {
            "lamella": self._blocking(
                lambda path: save(path, model=model, optimizer=optimizer),
                lambda path: load(path, model=model, optimizer=optimizer),
            ),
            "torch DCP": self._blocking(
                lambda path: state_dict_saver.save(self._state.named(), checkpoint_id=path),
                lambda path: state_dict_loader.load(self._state.named(), checkpoint_id=path),
            ),
            "torch.save of shards": self._blocking(self._save_shards, self._load_shards),
            "lamella, in the background": self._in_background(
                lambda path: self._saver.save(path, model=model, optimizer=optimizer).wait
            ),
            "torch DCP, in the background": self._in_background(self._begin_dcp),
        }
        found: dict[str, list[Row]] = {name: [] for name in ways}
        for _ in range(num_times + 1):
            for name, measure in ways.items():
                self._make_room()
                found[name].append(measure(self._folder / "checkpoint"))
        self._saver.close()
        self._make_room(again=False)
        return [_median(name, rows[1:]) for name, rows in found.items()]

    def _blocking(self, write: Callable[[Path], object], read: Callable[[Path], object]) -> Callable[[Path], Row]:
        def measure(path: Path) -> Row:
            return Row(name="", save_s=_slowest(partial(write, path)), load_s=_slowest(partial(read, path)))

        return measure

    def _in_background(self, begin: Callable[[Path], Callable[[], object]]) -> Callable[[Path], Row]:
        """A way to measure saves that `begin` begins, and whose end it returns a way to wait for."""

        def measure(path: Path) -> Row:
            waits: list[Callable[[], object]] = []
            began = time.perf_counter()
            stall = _slowest(lambda: waits.append(begin(path)))
            waits[0]()
            return Row(name="", stall_s=stall, complete_s=_over_ranks(time.perf_counter() - began))

        return measure

    def _begin_dcp(self, path: Path) -> Callable[[], object]:
        future: Any = state_dict_saver.async_save(
            self._state.named(), checkpoint_id=path, process_group=self._host_group
        )
        return future.result  # type: ignore[no-any-return]

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
        found = torch.load(path / f"{dist.get_rank()}.pt", map_location="cpu", weights_only=True)
        for name, shard in self._state.shards().items():
            shard.copy_(found[name])


def _slowest(work: Callable[[], object]) -> float:
    """The slowest rank's seconds. Effects: collective."""
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


def _median(name: str, rows: Sequence[Row]) -> Row:
    def median(figure: str) -> float | None:
        seconds = [getattr(row, figure) for row in rows]
        return None if None in seconds else statistics.median(seconds)

    return Row(name=name, **{figure: median(figure) for figure in ("save_s", "load_s", "stall_s", "complete_s")})


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""

    def text(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds:.3f}"

    lines = ["| | save s | load s | stall s | complete s |", "|---|--:|--:|--:|--:|"]
    for row in rows:
        figures = (row.save_s, row.load_s, row.stall_s, row.complete_s)
        lines.append(f"| {row.name} | {' | '.join(map(text, figures))} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; rank 0 prints the table."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="lamella_integration.bench_checkpoint", description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=500, help="of weights and moments, all ranks together")
    parser.add_argument("--times", type=int, default=5, help="repetitions, after one that is not counted")
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure; is emptied")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    values = parser.parse_args(arguments)
    if values.mib < 1 or values.times < 1:
        parser.error(f"Expected --mib and --times of at least 1, got {values.mib} and {values.times}.")
    num_layers = max(1, round(values.mib / _LAYER_MIB))
    with process_group(values.device) as device:
        rows = Bench(State.build(num_layers, device), values.folder / "checkpoints").rows(values.times)
        if dist.get_rank() == 0:
            print(f"{num_layers * _LAYER_MIB:.0f} MiB on {dist.get_world_size()} ranks\n\n{table(rows)}", flush=True)
            if values.out is not None:
                values.out.mkdir(parents=True, exist_ok=True)
                content = {"command": shlex.join(arguments), "rows": [asdict(row) for row in rows]}
                (values.out / "checkpoints.json").write_text(json.dumps(content, indent=2) + "\n")
        dist.barrier()
    return 0


if __name__ == "__main__":
    leave(main())
