"""One GPTModel of megatron-core under lamella and megatron-core's own wrappers: losses, step time and memory.

    for engine in ddp megatron_fsdp lamella; do
        torchrun --nproc-per-node 2 -m lamella_integration.bench_megatron --engine $engine --tp 2 --out rows.jsonl
    done
    python -m lamella_integration.bench_megatron --table rows.jsonl

Losses of one engine with and without `--flip-rows` are as far apart as rounding alone takes them: the measure for
another engine's distance.

Each engine has processes of its own, because megatron-core's wrappers change classes of the process. All start from
the same weights, read the same bytes of text, and run megatron-core's driver and finalization of gradients. `ddp` is
`DistributedDataParallel` with `DistributedOptimizer` (ZeRO-1), `megatron_fsdp` is `FullyShardedDataParallel` with
ZeRO-3, `lamella` is `ShardedModel` with the stage of `--stage`. Layers are Transformer Engine's on GPUs, torch's on a
CPU.
"""

import argparse
import importlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from lamella_integration.launch import leave, process_group
from lamella_integration.megatron_models import float16_model

ENGINES: Final = ("ddp", "megatron_fsdp", "lamella")
STAGES: Final = {"1": "optim", "2": "optim_grads", "3": "optim_grads_params"}
_WARMUP_STEPS: Final = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with one engine and append a row, or print the table of a file's rows."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(table([json.loads(line) for line in options.table.read_text(encoding="utf-8").splitlines()]))
        return 0
    if options.engine is None:
        parser.error("Expected --engine or --table, got neither.")
    if options.steps <= _WARMUP_STEPS:
        parser.error(f"Expected --steps of more than {_WARMUP_STEPS}, the steps without a time, got {options.steps}.")
    testing = importlib.import_module("lamella_testing.megatron")
    with process_group(options.device), testing.megatron_on_cpu() if options.device == "cpu" else nullcontext():
        row = _train(options)
        if dist.get_rank() == 0:
            print(json.dumps(row))
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lamella_integration.bench_megatron", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--engine", choices=ENGINES)
    add("--table", type=Path, metavar="FILE", help="print the rows of a file as a table, and train nothing")
    add("--out", type=Path, metavar="FILE", help="append the row")
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--data", type=Path, default=Path("docs"), help="folder of texts (*.md), read as bytes")
    add("--steps", type=int, default=100)
    add("--microbatches", type=int, default=2)
    add("--rows", type=int, default=2, help="sequences a microbatch and data-parallel rank")
    add("--length", type=int, default=2048, help="bytes a sequence")
    add("--layers", type=int, default=16)
    add("--hidden", type=int, default=2048)
    add("--experts", type=int, default=0, help="experts a layer, two a token; 0: dense layers")
    for name in ("tp", "ep", "cp"):
        add(f"--{name}", type=int, default=1)
    add("--lr", type=float, default=3e-4, help="learning rate of Adam, constant")
    add("--stage", choices=STAGES, default="3", help="ZeRO's stage of lamella")
    add("--flip-rows", action="store_true", help="sequences of a microbatch in reverse: how far rounding alone goes")
    return parser


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown: the last columns compare losses with the first row's of the same layout."""
    head = [
        "layout",
        "engine",
        "ms a step",
        "peak GiB",
        "loss, first",
        "last",
        "apart from the first row: largest",
        "mean",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "--:|" * (len(head) - 2)]
    first: dict[str, list[float]] = {}
    for row in rows:
        expected = first.setdefault(row["layout"], row["losses"])
        apart = [abs(a - b) for a, b in zip(row["losses"], expected, strict=True)]
        values = [row["layout"], row["engine"], f"{row['ms']:.1f}", f"{row['gib']:.2f}"]
        values += [f"{row['losses'][i]:.4f}" for i in (0, -1)]
        values += [f"{max(apart):.4f}", f"{statistics.mean(apart):.4f}"]
        lines.append("| " + " | ".join(values) + " |")
    return "\n".join(lines)


def _train(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the row. Effects: collective over all ranks."""
    state = importlib.import_module("megatron.core.parallel_state")
    state.initialize_model_parallel(
        tensor_model_parallel_size=options.tp,
        context_parallel_size=options.cp,
        expert_model_parallel_size=options.ep,
        expert_tensor_parallel_size=1,
    )
    sizes = {name: getattr(options, name) for name in ("layers", "hidden", "length", "experts", "tp", "ep", "cp")}
    config, module = float16_model(device=options.device, **sizes)
    wrapped, optimizer = _wrapped(options, config, module)
    config.finalize_model_grads_func = importlib.import_module("megatron.core.distributed").finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    run = importlib.import_module("megatron.core.pipeline_parallel").get_forward_backward_func()
    iterator = _batches(options)
    losses, times = [], []
    for step in range(options.steps):
        if step == _WARMUP_STEPS and options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        stored = run(
            forward_step_func=_forward_step(options),
            data_iterator=iterator,
            model=[wrapped],
            num_microbatches=options.microbatches,
            seq_length=options.length,
            micro_batch_size=options.rows,
        )
        is_updated, _, _ = optimizer.step()
        assert is_updated, f"step {step} was skipped"
        loss = torch.stack([losses_of_microbatch["loss"] for losses_of_microbatch in stored]).mean()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())  # The host sync ends the step's time.
        times.append(time.perf_counter() - begin)
    assert all(map(math.isfinite, losses)), losses
    peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else 0
    engine = f"lamella, ZeRO-{options.stage}" if options.engine == "lamella" else options.engine
    return {
        "layout": _layout(options),
        "engine": f"{engine}, rows flipped" if options.flip_rows else engine,
        "ms": 1e3 * statistics.median(times[_WARMUP_STEPS:]),
        "gib": peak / 2**30,
        "losses": losses,
    }


def _layout(options: argparse.Namespace) -> str:
    sizes = {
        "TP": options.tp,
        "EP": options.ep,
        "CP": options.cp,
        "DP": dist.get_world_size() // options.tp // options.cp,
    }
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 rank"


def _wrapped(options: argparse.Namespace, config: Any, module: nn.Module) -> tuple[Any, Any]:
    """The engine's wrapper around the model, and its optimizer."""
    distributed = importlib.import_module("megatron.core.distributed")
    optim = importlib.import_module("megatron.core.optimizer")
    is_sharded = options.engine != "ddp"
    ddp_config = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        # Megatron-FSDP sums and keeps gradients in the weights' bf16 otherwise, at half of the bytes of the others.
        megatron_fsdp_main_grads_dtype=torch.float32,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        use_distributed_optimizer=True,
        use_megatron_fsdp=is_sharded,
        data_parallel_sharding_strategy=STAGES[options.stage if options.engine == "lamella" else "3"]
        if is_sharded
        else "no_shard",
    )
    optimizer_config = optim.OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        weight_decay=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        clip_grad=1.0,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
    )
    if options.engine == "lamella":
        training = importlib.import_module("lamella_megatron.training")
        wrapped = training.ShardedModel(config, ddp_config, module)
        return wrapped, training.sharded_optimizer(optimizer_config, [wrapped])
    kind = distributed.DistributedDataParallel if options.engine == "ddp" else distributed.FullyShardedDataParallel
    wrapped = kind(config=config, ddp_config=ddp_config, module=module)
    config.no_sync_func = wrapped.no_sync
    if options.engine == "ddp":
        config.grad_sync_func, config.param_sync_func = wrapped.start_grad_sync, wrapped.start_param_sync
    return wrapped, optim.get_megatron_optimizer(optimizer_config, [wrapped])


def _batches(options: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Rows of text for this data-parallel rank, (rows, length + 1), the same for every engine."""
    state = importlib.import_module("megatron.core.parallel_state")
    rank, num_ranks = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    text = b"".join(path.read_bytes() for path in sorted(options.data.rglob("*.md")))
    size = options.length + 1
    if len(text) < size:
        raise ValueError(f"Expected at least {size} bytes of text in {options.data}, got {len(text)}. Set --data.")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(len(text) - size + 1, (num_ranks, options.rows), generator=generator)[rank]
        rows = torch.stack([data[start : start + size] for start in starts.tolist()])
        # Means over rows, and balances of experts, are the same in exact arithmetic.
        rows = rows.flip(0) if options.flip_rows else rows
        yield rows.to(options.device, torch.int64, non_blocking=True)


def _forward_step(
    options: argparse.Namespace,
) -> Callable[[Iterator[torch.Tensor], nn.Module], tuple[torch.Tensor, Any]]:
    state = importlib.import_module("megatron.core.parallel_state")
    # A context-parallel rank has a part from the start and a part from the end: causal attention is balanced then.
    parts = torch.arange(options.length, device=options.device).chunk(2 * options.cp)
    at = state.get_context_parallel_rank()
    positions = torch.cat([parts[at], parts[-1 - at]])
    mask = None if options.device == "cuda" else torch.ones(1, 1, *2 * (options.length,), dtype=torch.bool).triu(1)

    def forward(iterator: Iterator[torch.Tensor], model: nn.Module) -> tuple[torch.Tensor, Any]:
        rows = next(iterator)
        tokens, labels = rows[:, :-1][:, positions], rows[:, 1:][:, positions]
        losses = model(tokens, positions.expand(len(rows), -1), mask, labels=labels)

        def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mean = losses.float().mean()
            return mean / options.cp, {"loss": mean.detach()}

        return losses, loss_of

    return forward


if __name__ == "__main__":
    leave(main())
