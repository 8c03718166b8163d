"""A rank of `bench_estimate`: takes real steps of one row after another, and prints a record of each as JSON.

The rank ends at the first failure, in a collective or not: peers may wait in another, and are ended by the parent.
"""

import argparse
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lamella.testing import Rank, RunDirectory, bare_steps
from lamella_integration.estimate_decoder import decoder_steps
from lamella_integration.estimate_meters import CpuMeter, CudaMeter, Meter, PeaksOfMoments, StepClock
from lamella_integration.estimate_rows import SMALLEST_VOCABULARY, model_folder, recipe_config
from lamella_integration.launch import leave
from lamella_testing import take_gpu

_NUM_TOKENS = 1 << 17


def main() -> None:
    """Take the steps of the row of each line of standard input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=4, help="of a row; fewer, but 3, where they take long")
    parser.add_argument("--moments", action="store_true", help="one more step, whose moments are measured")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    rank = take_rank(options.device)
    meter: Meter = CudaMeter() if options.device == "cuda" else CpuMeter()
    with TemporaryDirectory() as folder:
        for line in sys.stdin:
            request = json.loads(line)
            row = request["row"]
            _limit(request["limit_nbytes"], rank.device)
            record = _record(row, Path(folder), options, rank, meter)
            records: list[Any] = [None] * rank.num_ranks
            dist.all_gather_object(records, record)
            if rank.rank == 0:
                print(json.dumps({"row": row, "ranks": records}), flush=True)
    dist.barrier()


def take_rank(device_type: str) -> Rank:
    """Return this process's rank on a CPU or on a GPU of its own.

    Effects: collective over all ranks, whose default process group starts.
    """
    device = take_gpu(int(os.environ["LOCAL_RANK"])) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)  # as in `lamella train`
    else:
        dist.init_process_group("gloo")
    return Rank(rank=dist.get_rank(), num_ranks=dist.get_world_size(), device=device)


def _limit(nbytes: int | None, device: torch.device) -> None:
    """Let the caching allocator take at most `nbytes`, segments included; None for all of the GPU's."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if nbytes is None else min(1.0, nbytes / total), device)


def _record(row: str, folder: Path, options: argparse.Namespace, rank: Rank, meter: Meter) -> Mapping[str, Any]:
    """Take the steps of a row; return the rank's bytes.

    Returns:
        `peak_nbytes` of all steps but the first, and `first_peak_nbytes`; `reserved_nbytes`, the segments of
        the caching allocator at most; `step_seconds` of all steps but the first two; `at_rest_nbytes` after the last;
        `moments` by name, of a further step, none for compiled units: hooks would compile the units anew;
        `libraries_nbytes` of cuBLAS's workspaces, part of the peaks; `leftover_nbytes` of the row before.
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
        clock = StepClock(rank.device)
        losses += [step(1)]
        num_steps = clock.num_steps(options.steps)
        clock.mark()
        for number in range(2, num_steps):
            losses.append(step(number))
            clock.mark()
        peak, reserved = meter.peak(), meter.reserved()
        peaks = PeaksOfMoments(meter)
        if options.moments and not is_compiled:
            with peaks.recorded_step(model, units):
                losses.append(step(num_steps))
        at_rest = meter.now()
        loss = torch.stack(losses).tolist()
        del losses, model, units, step
    before = meter.now() if rank.device.type == "cuda" else 0
    _clear_workspaces()
    return {
        "peak_nbytes": peak - leftover,
        "first_peak_nbytes": first - leftover,
        "reserved_nbytes": reserved,
        "step_seconds": clock.seconds(),
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
    """Yield the model of a row, the units, and the function that takes a step and returns the loss.

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
