"""Two profiled steps: the time of rank 0 by phase, and a check for copies of parameter size.

    torchrun --nproc-per-node 4 -m lamella_integration.profile

The default size is made for the proof: no shard has as many elements as an unsharded parameter, and the number of
tokens is prime. Sizes alone therefore tell copies of shards, parameters and activations apart.
"""

import argparse
import math
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from lamella_integration.backends import REDUCE_DTYPES, Training, Workload
from lamella_integration.launch import leave, process_group
from lamella_integration.llama import SIZES, Llama, LlamaConfig
from lamella_integration.trace import ParameterSizes, check_zero_copy
from lamella_integration.variants import backend_of
from lamella_trace import Breakdown, Kernel, KernelKind, breakdown, kernels_of, operators_of, read_trace

PROOF = LlamaConfig(dim=1536, num_layers=4, num_heads=12, num_kv_heads=4, ffn_dim=4096, vocab_size=5120)
PROOF_SMALL = LlamaConfig(dim=96, num_layers=3, num_heads=6, num_kv_heads=2, ffn_dim=256, vocab_size=320)
NUM_TOKENS = 1021
NUM_STEPS = 2
SLOT_PADDING = 256  # Largest number of padding elements between the parameters of a flat shard.
NUM_WARMUP_STEPS = 3

PROFILE_SIZES = {"proof": PROOF, "proof_small": PROOF_SMALL, **SIZES}


def profile_steps(
    training: Training,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    keep: Path | None = None,
    *,
    num_warmup_steps: int = NUM_WARMUP_STEPS,
    has_operators: bool = True,
) -> list[Kernel]:
    """Return this rank's kernels of `NUM_STEPS` steps, after a warm-up; operators on a CPU.

    Args:
        training: The backend's training.
        tokens: Input of every step.
        labels: Targets of every step.
        keep: File to write the trace to; None keeps no trace.
        num_warmup_steps: Steps before the profiled steps.
        has_operators: Record the host's operators too, for the tensor sizes of kernels. Recording slows the host down,
            and a device waiting for the host is idle for longer.

    Raises:
        RuntimeError: The profiler recorded no kernel.

    Effects: collective over all ranks: trains for `num_warmup_steps` + `NUM_STEPS` steps.
    """
    for _ in range(num_warmup_steps):
        training.step(tokens, labels)
    activities = [ProfilerActivity.CPU] if has_operators or not tokens.is_cuda else []
    if tokens.is_cuda:
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch_profile(activities=activities, record_shapes=has_operators, acc_events=True) as profiler:
        for step in range(NUM_STEPS):
            with record_function(f"ProfilerStep#{step}"):  # marks a step, as torch's schedules do
                training.step(tokens, labels)
        if tokens.is_cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = read_trace(path)
    kernels = kernels_of(trace) if tokens.is_cuda else operators_of(trace)
    if not kernels:
        raise RuntimeError("Expected kernels in the profile, got none. Does CUPTI work on this machine?")
    return kernels


def load_profiler(device: torch.device) -> None:
    """Load the profiler's libraries: on a GPU they stay loaded, and timings before and after would differ."""
    if device.type == "cuda":
        with torch_profile(activities=[ProfilerActivity.CUDA], acc_events=True):
            torch.zeros(1, device=device)


def parameter_sizes(workload: Workload, num_tokens: int) -> ParameterSizes:
    """Return the sizes for `check_zero_copy` of a decoder sharded over the default group.

    Casts of shards: every unit's shard to the communication dtype before forward, every block's again before backward,
    and every reduced gradient back to fp32. With sums in fp32, the last cast is this rank's piece, copied beside the
    pieces of its peers. On a CPU casts are not limited: gloo copies each reduced tensor once more.

    Raises:
        ValueError: Sizes cannot tell a shard from an unsharded parameter, or a parameter from an activation.
    """
    with torch.device("meta"):
        model = Llama(workload.config)
    num_ranks = dist.get_world_size()
    blocks = [list(unit.parameters()) for unit in model.units()]
    root = [*model.embedding.parameters(), *model.head.parameters()]
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    full = {parameter.numel() for parameter in matrices if parameter.shape[0] % num_ranks == 0}
    shards = {_shard_numel([parameter], num_ranks, padding=0) for parameter in matrices}
    ambiguous = full & shards | {numel for numel in full | shards if numel % num_tokens == 0}
    if ambiguous:
        raise ValueError(
            f"Expected sizes that tell shards, whole parameters and activations apart on {num_ranks} ranks, got "
            f"{sorted(ambiguous)} elements for two kinds. Use the size 'proof' and a prime number of tokens."
        )
    in_blocks, in_root = sum(_shard_numel(block, num_ranks) for block in blocks), _shard_numel(root, num_ranks)
    return ParameterSizes(
        full_numels=frozenset(full),
        largest_shard_numel=max(_shard_numel(unit, num_ranks) for unit in (*blocks, root)),
        cast_numel=NUM_STEPS * (3 * in_blocks + 2 * in_root) if workload.device.type == "cuda" else None,
        num_tokens=num_tokens,
    )


def _shard_numel(parameters: Iterable[torch.Tensor], num_ranks: int, padding: int = SLOT_PADDING) -> int:
    return sum(math.ceil(parameter.numel() / num_ranks) + padding for parameter in parameters)


def markdown(name: str, kernels: Breakdown) -> str:
    """Return a row of the table of phases, in milliseconds per step."""
    columns = [
        KernelKind.MATMUL,
        KernelKind.ATTENTION,
        KernelKind.ELEMENTWISE,
        KernelKind.COPY,
        KernelKind.FILL,
        KernelKind.OPTIMIZER,
    ]
    columns += [KernelKind.ALL_GATHER, KernelKind.REDUCE_SCATTER, KernelKind.ALL_TO_ALL]
    header = ["backend", "span", *(kind.name.lower() for kind in columns), "collectives", "exposed", "idle"]
    figures = [
        kernels.span,
        *(kernels.by_kind[kind] for kind in columns),
        kernels.collectives,
        kernels.exposed,
        kernels.idle,
    ]
    row = [name, *(f"{figure / NUM_STEPS:.1f}" for figure in figures)]
    return "\n".join(["| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), row)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile a backend. Returns 1 if a size made for the proof shows a copied parameter, else 0."""
    parser = argparse.ArgumentParser(prog="lamella_integration.profile", description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=PROFILE_SIZES, default="proof", help="other sizes are profiled, not proved")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--backend", default="lamella", metavar="BACKEND[:OPTION=VALUE,...]", help="as for the bench")
    parser.add_argument("--reduce", choices=REDUCE_DTYPES, default="bf16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, help="file for rank 0's trace, for `lamella overlap-report`")
    options = parser.parse_args(arguments)
    try:
        backend = backend_of(options.backend)
    except ValueError as error:
        parser.error(str(error))
    config = PROFILE_SIZES[options.size]
    with process_group(options.device) as device:
        workload = Workload(config=config, device=device, reduce_dtype=REDUCE_DTYPES[options.reduce])
        # On every rank: if only rank 0 computed the sizes and raised, its peers would wait in a collective.
        sizes = parameter_sizes(workload, options.tokens) if options.size.startswith("proof") else None
        keep = options.out if dist.get_rank() == 0 else None
        kernels = profile_steps(backend(workload), *workload.batch(options.tokens), keep)
        is_zero_copy = True
        if dist.get_rank() == 0:
            print(markdown(options.backend, breakdown(kernels)), flush=True)
            is_zero_copy = sizes is None or _is_zero_copy(kernels, sizes)
        dist.barrier()
    return 0 if is_zero_copy else 1


def _is_zero_copy(kernels: list[Kernel], sizes: ParameterSizes) -> bool:
    try:
        check_zero_copy(kernels, sizes)
    except RuntimeError as error:
        print(error, flush=True)
        return False
    print("Zero-copy: nothing of parameter size was copied.", flush=True)
    return True


if __name__ == "__main__":
    leave(main())
