"""A rank's plan and a save's, among up to 16,384 ranks that do not exist: seconds, bytes by axis, checkpoint metadata.

    python -m lamella_integration.scale --model llama-405b --ranks 16384
    python -m lamella_integration.scale --model llama-405b --ranks 16384 --mesh hsdp --replicas 128 --checkpoint
    python -m lamella_integration.scale --model deepseek-v3 --ranks 16384 --mesh hsdp --replicas 128 --experts 64

No weights, no GPU: parameters are shapes, and the process group moves nothing. Seconds are of one CPU, so that a busy
machine changes little; MiB are the growth of the process. *Owned* are this rank's fp32 main weights, *unit* is the
largest unit in bf16, *padding* the bytes that a gather of all units moves beyond the model's. Bytes of a step are
received by this rank, for two gathers and a reduction of each layer.
"""

import argparse
from collections.abc import Sequence

from lamella_integration.scale_checkpoint import (
    CheckpointFiles,
    SavePlan,
    SimulatedState,
    checkpoint_files,
    save_plan,
)
from lamella_integration.scale_models import MODELS
from lamella_integration.scale_plan import RankPlan, ScaleCase, rank_plan

_GIB, _MIB, _KIB = 1 << 30, 1 << 20, 1 << 10


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of the cases that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m lamella_integration.scale")
    parser.add_argument("--model", choices=MODELS, default="llama-405b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 512, 16384])
    parser.add_argument("--mesh", choices=("fsdp", "hsdp", "hfsdp"), default="fsdp")
    parser.add_argument("--replicas", type=int, default=1, help="ranks along the outer axis of hsdp and hfsdp")
    parser.add_argument("--experts", type=int, default=1, help="ranks that share the experts")
    parser.add_argument("--flat", action="store_true", help="one buffer a unit, cut between rows")
    parser.add_argument("--rank", type=int, default=3)
    parser.add_argument("--step", action="store_true", help="count the bytes of a step")
    parser.add_argument("--checkpoint", action="store_true", help="plan a save, and write its metadata")
    options = parser.parse_args(arguments)
    for num_ranks in options.ranks:
        case = ScaleCase(
            shapes=MODELS[options.model],
            num_ranks=num_ranks,
            mesh=options.mesh,
            num_replicas=options.replicas,
            num_experts_ranks=options.experts,
            is_flat=options.flat,
        )
        print(f"{options.model}, {num_ranks} ranks, {options.mesh} x {options.replicas}, experts {options.experts}, "
              f"{'flat' if options.flat else 'even'}", flush=True)  # fmt: skip
        with rank_plan(case, options.rank) as plan:
            print("\n".join(plan_lines(plan)), flush=True)
            if options.step:
                print("\n".join(step_lines(plan)), flush=True)
        if options.checkpoint:
            with rank_plan(case, options.rank) as plan:
                state = SimulatedState(plan)
                print("\n".join(save_lines(save_plan(state, options.rank))), flush=True)
                print("\n".join(file_lines(checkpoint_files(state))), flush=True)


def plan_lines(plan: RankPlan) -> list[str]:
    """Describe a rank's plan."""
    return [
        (
            f"  model built in {plan.build_seconds:.2f} s, sharded in {plan.shard_seconds:.2f} s "
            f"and {plan.shard_nbytes / _MIB:.1f} MiB"
        ),
        (
            f"  owned {plan.owned_nbytes() / _MIB:.1f} MiB, {plan.main_nbytes() / _MIB:.1f} MiB with padding; "
            f"unit {plan.largest_unit_nbytes() / _GIB:.2f} GiB; padding {plan.padding_nbytes() / _GIB:.2f} GiB "
            f"of {2 * plan.case.shapes.numel() / _GIB:.1f} GiB"
        ),
    ]


def step_lines(plan: RankPlan) -> list[str]:
    """Describe the bytes of a rank's step."""
    return [f"  step: {axis}, {kind}: {nbytes / _GIB:.2f} GiB" for (axis, kind), nbytes in plan.step_traffic().items()]


def save_lines(save: SavePlan) -> list[str]:
    """Describe a rank's part in a save."""
    return [
        (
            f"  save: {save.seconds:.2f} s, {save.num_items} items; messages {save.digests_nbytes} B "
            f"and {save.placed_nbytes / _KIB:.1f} KiB; {save.num_chunks:,} boxes in all"
        )
    ]


def file_lines(files: CheckpointFiles | None) -> list[str]:
    """Describe the files beside the data."""
    if files is None:
        return ["  metadata not written: too many boxes"]
    return [
        (
            f"  metadata: written in {files.write_seconds:.1f} s; .metadata {files.metadata_nbytes / _MIB:.1f} MiB, "
            f"checksums {files.checksums_nbytes / _MIB:.1f} MiB, manifest {files.manifest_nbytes / _KIB:.1f} KiB; "
            f"opened in {files.open_seconds:.1f} s, {files.num_names} names"
        )
    ]


if __name__ == "__main__":
    main()
