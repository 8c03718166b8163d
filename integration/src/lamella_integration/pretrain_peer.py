"""A program of examples/megatron on one engine, with its peak of memory at the end: a row of `bench_pretrain`.

`torchrun --nproc-per-node 2 -m lamella_integration.pretrain_peer PROGRAM ENGINE [flags of Megatron-LM]`
"""

import faulthandler
import json
import runpy
import signal
import sys
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

MEMORY = "peak memory: "
_GIB = 1 << 30


def main() -> None:
    """Run the program; rank 0 prints the largest rank's peaks, in GiB. Effects: all-reduce over all ranks."""
    faulthandler.register(signal.SIGTERM, chain=True)  # A run out of time shows where each rank waited.
    program, engine, *flags = sys.argv[1:]
    if engine != "lamella":  # The programs install lamella by one call of this name.
        vars(import_module("lamella_megatron"))["install"] = lambda: None
    sys.argv = [program, *flags]
    sys.path.insert(0, str(Path(program).parent))
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:  # `--exit-interval`, and the end of training, where megatron leaves its process group.
        if end.code:
            raise
    peaks = torch.tensor([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()], device="cuda")
    if dist.is_initialized():
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
    print(MEMORY + json.dumps([peak / _GIB for peak in peaks.tolist()]), flush=True)


if __name__ == "__main__":
    main()
