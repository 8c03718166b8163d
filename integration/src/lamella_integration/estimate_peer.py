"""A rank of `bench_estimate`: takes real steps of one row after another, and prints a record of each as JSON.

The rank ends at the first failure, in a collective or not: its peers may wait in another one, and the parent ends them.
"""

import argparse
import gc
import json
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lamella.testing import LiveBytes, Rank, RunDirectory, adopt_model, bare_steps, moments_of_units
from lamella_integration.estimate_decoder import decoder_steps
from lamella_integration.estimate_rows import SMALLEST_VOCABULARY, model_folder, recipe_config
from lamella_integration.launch import leave
from lamella_testing import take_gpu

_NUM_TOKENS = 1 << 17


class Meter(Protocol):
    """Counts the bytes of tensors."""

    def reset(self) -> None:
        """Begin a new peak, at the bytes of now."""

    def peak(self) -> int:
        """Return the most bytes since `reset`."""
        ...

    def now(self) -> int:
        """Return the bytes of now."""
        ...

    def watch(self) -> AbstractContextManager[object]:
        """Count in the block."""
        ...

    def adopt(self, model: nn.Module) -> None:
        """Count a model that is made."""


class CudaMeter:
    """The caching allocator's own count: blocks of 512 bytes."""

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def now(self) -> int:
        return torch.cuda.memory_allocated()

    @contextmanager
    def watch(self) -> Iterator[None]:
        yield

    def adopt(self, model: nn.Module) -> None:
        """Nothing: all tensors count."""


class CpuMeter:
    """The bytes of the storages of CPU tensors that operators make."""

    def __init__(self) -> None:
        self._live = LiveBytes()
        self._first = 0

    def reset(self) -> None:
        self._first = len(self._live.log.changes)

    def peak(self) -> int:
        now = sum(change.nbytes for change in self._live.log.changes[: self._first])
        most = now
        for change in self._live.log.changes[self._first :]:
            now += change.nbytes
            most = max(most, now)
        return most

    def now(self) -> int:
        return sum(change.nbytes for change in self._live.log.changes)

    def watch(self) -> AbstractContextManager[object]:
        self._live = LiveBytes()
        self._first = 0
        return self._live

    def adopt(self, model: nn.Module) -> None:
        adopt_model(self._live, model)


class PeaksOfMoments:
    """The peak of each moment of a step, by the meter.

    Attributes:
        in_backward: A forward that runs now is recomputed.
        nbytes: Moment -> its most bytes.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter, self._moment = meter, ""
        self.in_backward = False
        self.nbytes: dict[str, int] = {}

    def begin(self, moment: str) -> None:
        """End the moment before, and begin another."""
        if self._moment:
            self.nbytes[self._moment] = max(self._meter.peak(), self.nbytes.get(self._moment, 0))
        self._moment = moment
        self._meter.reset()

    @contextmanager
    def of_a_step(self, model: nn.Module, units: Sequence[nn.Module]) -> Iterator[None]:
        """Note the moments of the step in the block, under the names of an estimate's."""
        names = {module: name for name, module in model.named_modules()}
        with ExitStack() as hooks:
            hooks.enter_context(moments_of_units({unit: names[unit] for unit in units}, self))
            hooks.callback(model.register_forward_pre_hook(lambda *_: self.begin("forward begins")).remove)
            hooks.callback(register_optimizer_step_pre_hook(lambda *_: self.begin("optimizer step")).remove)
            hooks.callback(register_optimizer_step_post_hook(lambda *_: self.begin("at rest")).remove)
            hooks.enter_context(patch.object(torch.Tensor, "backward", self._backward(torch.Tensor.backward)))
            yield
        self.begin("")

    def _backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        def noted(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
            self.begin("backward head and loss")
            self.in_backward = True
            backward(tensor, *args, **options)
            self.in_backward = False
            self.begin("clipping")

        return noted


def main() -> None:
    """Take the steps of each row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="JSON: the names of the rows")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = take_gpu(int(os.environ["LOCAL_RANK"])) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)  # as `lamella train` has it
    else:
        dist.init_process_group("gloo")
    meter: Meter = CudaMeter() if options.device == "cuda" else CpuMeter()
    with TemporaryDirectory() as folder:
        for row in json.loads(options.rows.read_text()):
            record = _record(row, Path(folder), options, Rank(rank=rank, num_ranks=num_ranks, device=device), meter)
            records: list[Any] = [None] * num_ranks
            dist.all_gather_object(records, record)
            if rank == 0:
                print(json.dumps({"row": row, "ranks": records}), flush=True)
    dist.barrier()


def _record(row: str, folder: Path, options: argparse.Namespace, rank: Rank, meter: Meter) -> Mapping[str, Any]:
    """Take the steps of a row; return the bytes of this rank.

    Returns:
        `peak_nbytes` of all steps but the first, which `first_peak_nbytes` tells; `at_rest_nbytes` after the last;
        `moments` by name, of one more step, none for compiled units, which hooks would compile anew; `libraries_nbytes`
        of cuBLAS's workspaces, which the peaks contain; `leftover_nbytes` of the row before.
    """
    is_compiled = "--compile" in row.split()
    release(is_compiled=is_compiled)
    leftover = meter.now() if rank.device.type == "cuda" else 0
    with meter.watch(), row_steps(row, folder, options, rank) as (model, units, step):
        meter.adopt(model)
        meter.reset()
        losses = [step(0)]
        first = meter.peak()
        gc.collect()  # Cycles of the first step would count as the next one's.
        meter.reset()
        losses += [step(number) for number in range(1, options.steps)]
        peak = meter.peak()
        peaks = PeaksOfMoments(meter)
        if not is_compiled:
            with peaks.of_a_step(model, units):
                losses.append(step(options.steps))
        at_rest = meter.now()
        loss = torch.stack(losses).tolist()
        del losses, model, units, step
    before = meter.now() if rank.device.type == "cuda" else 0
    _clear_workspaces()
    return {
        "peak_nbytes": peak - leftover,
        "first_peak_nbytes": first - leftover,
        "at_rest_nbytes": at_rest - leftover,
        "leftover_nbytes": leftover,
        "libraries_nbytes": before - (meter.now() if rank.device.type == "cuda" else 0),
        "moments": {name: nbytes - leftover for name, nbytes in peaks.nbytes.items()},
        "losses": loss,
    }


@contextmanager
def row_steps(
    row: str, folder: Path, options: argparse.Namespace, rank: Rank
) -> Iterator[tuple[nn.Module, Sequence[nn.Module], Callable[[int], torch.Tensor]]]:
    """Yield the model of a row, its units, and the function that takes a step and returns its loss.

    Effects: collective over all ranks; writes the folder.
    """
    if row.startswith("decoder "):
        with decoder_steps(row, rank.num_ranks, rank.device, is_tiny=options.tiny) as steps:
            yield steps
        return
    config = recipe_config(row, folder, rank.num_ranks, options.device, is_tiny=options.tiny)
    directory = RunDirectory(folder / "run")
    _write_tokens(directory.tokens)
    directory.model.unlink(missing_ok=True)
    directory.model.symlink_to(model_folder(folder, row.split()[0], is_tiny=options.tiny), target_is_directory=True)
    with bare_steps(config, directory, rank) as steps:
        yield steps


def _write_tokens(folder: Path) -> None:
    """Write random tokens as a run's text, once."""
    if folder.exists():
        return
    folder.mkdir(parents=True)
    bound = 1024  # of every model's vocabulary
    tokens = torch.randint(bound, (_NUM_TOKENS,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    for split in ("train", "validation"):
        tokens.numpy().tofile(folder / f"{split}.bin")
    units = torch.ones(SMALLEST_VOCABULARY, dtype=torch.int32)
    index = {"packing": "stream", "units": units, "unit": "token", "num_rewritten": 0, "fingerprint": "random"}
    torch.save(index, folder / "index.pt")


def release(*, is_compiled: bool) -> None:
    """Free the memory of a row, and the code of compiled layers."""
    if is_compiled:
        torch.compiler.reset()  # torch limits how often the code of a layer is compiled anew.
    gc.collect()  # Hooks and parameters form cycles.
    _clear_workspaces()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _clear_workspaces() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()


if __name__ == "__main__":
    try:
        main()
    except Exception:  # noqa: BLE001  The parent reads the error, and peers wait in no collective for its end.
        traceback.print_exc()
        leave(1)
    leave(0)
