"""A plain loop on lamella's engine with the weights, batches and learning rates of a `lamella train` run.

    torchrun --nproc-per-node 2 -m lamella_integration.recipe_loop RUN_DIR [--compile]

No program lies around the steps: batches are on the device before the first step, losses stay there to the end, and no
process watches another. The difference to `lamella train --no-capture` is the price of the program.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist

import lamella_optim
from lamella.testing import RunDirectory, learning_rate, load_spec, make_optimizer, read_file, resolve
from lamella_engine import MixedPrecisionPolicy, fully_shard
from lamella_integration.repeated_run import batches_of, synchronize, take_device
from lamella_transformers import balance_coefficient, build_model, choose_loss, sharding_units


def main() -> None:
    """Train, and print one JSON line on rank 0: tokens/s, reserved memory, and losses as `recipe_peer` groups them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--num-skipped", type=int, default=20)
    options = parser.parse_args()
    directory = RunDirectory(options.run)
    run = resolve(read_file(str(directory.config)))
    optim, parallel = run.optim, run.parallel
    settings = (parallel.precision, parallel.stage, parallel.recompute, parallel.float8, run.model.kernels)
    if (*settings, optim.accumulation) != ("bf16", 3, "no", "no", "none", 1):
        parser.error(f"Expected a run of plain steps in bf16, got {settings} and accumulation {optim.accumulation}.")
    device = take_device()
    dist.init_process_group(device_id=device if device.type == "cuda" else None)
    lamella_optim.install()

    spec = load_spec(str(directory.model))
    model = build_model(spec, device, run.run.seed)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    units = sharding_units(model)
    for unit in units:
        fully_shard(unit, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    loss_function = choose_loss(model, spec.vocab_size, balance_coefficient(spec), device)
    if options.compile:
        for unit in units:
            unit.compile(dynamic=False)
    optimizer = make_optimizer(model, optim)
    stream = batches_of(run, directory)
    batches = [
        stream.batch(step, dist.get_rank(), dist.get_world_size()).on_device(device) for step in range(optim.steps)
    ]
    losses, began = [], 0.0
    for step, batch in enumerate(batches):
        if step == options.num_skipped:
            synchronize()
            began = time.perf_counter()
        inputs, targets, positions, starts = batch.arguments()
        loss, _ = loss_function(model, inputs, targets, targets.numel(), positions, starts)
        loss.backward()  # type: ignore[no-untyped-call]
        lamella_optim.clip_grad_norm_(model.parameters(), optim.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, optim)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    synchronize()
    seconds = time.perf_counter() - began
    dist.all_reduce(means := torch.stack(losses) / dist.get_world_size())
    first, *later = means.tolist()
    num_skipped = options.num_skipped
    if dist.get_rank() == 0:
        record = {
            "tokens_per_s": (optim.steps - num_skipped) * optim.batch_size * run.data.sequence_length / seconds,
            "peak_gib": torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else 0.0,
            "losses": [first, fmean(later[: num_skipped - 1]), fmean(later[num_skipped - 1 :])],
        }
        print(json.dumps(record), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
