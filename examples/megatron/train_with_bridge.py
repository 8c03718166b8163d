"""Train a Hugging Face folder in megatron-core: Megatron-Bridge's own code imports and publishes, lamella shards.

    torchrun --nproc-per-node 2 examples/megatron/train_with_bridge.py FOLDER runs/bridge --tensor-parallel 2
    torchrun --nproc-per-node 1 examples/megatron/train_with_bridge.py FOLDER runs/bridge --publish trained/

FOLDER has a text model. The first start writes the folder's weights to `runs/bridge/imported`. Later starts go on from
the newest checkpoint, on any number of ranks. Batches are drawn tokens, and the model computes in fp32. Bridge's
modules are Transformer Engine's, which need a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func

from lamella_megatron import load_checkpoint, save_checkpoint
from lamella_megatron.training import ShardedModel, sharded_optimizer

SIZES = "run_config.yaml"  # Of the model, for Bridge's export. The last file of a save, and of an import.


def main() -> None:
    """Train, or publish the newest checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of Hugging Face, with a text model")
    parser.add_argument("run", type=Path, help="folder of the checkpoints, in torch_dist")
    parser.add_argument("--publish", type=Path, help="write a folder of Hugging Face, and train nothing")
    parser.add_argument("--steps", type=int, default=100, help="number of the last step")
    parser.add_argument("--save-interval", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--rows", type=int, default=8, help="sequences of a step, over all data-parallel ranks")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks")
    parser.add_argument("--expert-parallel", type=int, default=1, help="ranks, of a mixture of experts")
    parser.add_argument("--deterministic", action="store_true", help="repeatable kernels of one Triton cache")
    options = parser.parse_args()
    bridge = AutoBridge.from_hf_pretrained(str(options.folder))
    if hasattr(bridge.hf_pretrained.config, "vision_config"):
        parser.error(f"Expected a text model, got one with vision: {options.folder}")
    if not options.publish:
        train(bridge, options)
    elif (checkpoint := newest_checkpoint(options.run)) is None:
        parser.error(f"Expected a checkpoint to publish, got none in {options.run}. Train first, without --publish.")
    else:
        bridge.export_ckpt(str(checkpoint), str(options.publish))


def train(bridge: Any, options: argparse.Namespace) -> None:
    """Train to the last step, from the newest checkpoint or the folder's weights."""
    if options.deterministic:
        # Without the first, megatron-core refuses Transformer Engine's attention. Without torch's switch the sums of an
        # embedding's gradient, and of tokens that experts return, depend on the order in which the GPU adds them. The
        # gated delta rule is torch's, but a norm of flash-linear-attention's is tuned by each process, and another
        # choice adds in another order: only runs with the same TRITON_CACHE_DIR are equal.
        os.environ.update(NVTE_ALLOW_NONDETERMINISTIC_ALGO="0", CUBLAS_WORKSPACE_CONFIG=":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    imported = options.run / "imported" / "iter_0000000"
    checkpoint = newest_checkpoint(options.run)
    model = sharded_model(bridge, options, imported=imported)
    optimizer: Any = sharded_optimizer(OptimizerConfig(optimizer="adam", lr=options.lr, weight_decay=0.0), [model])
    if checkpoint is None:
        entries = load_checkpoint(imported, model=model)
    else:
        entries = load_checkpoint(checkpoint, model=model, optimizer=optimizer.optimizer)
    for step in range(entries["iteration"] + 1, options.steps + 1):
        loss = train_step(model, optimizer, batch_of(bridge, options, step))
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        if dist.get_rank() == 0:
            print(f"step: {step}  loss: {loss.item() / parallel_state.get_data_parallel_world_size():.6f}", flush=True)
        if step % options.save_interval == 0 or step == options.steps:
            folder = options.run / f"iter_{step:07}"
            save_checkpoint(folder, model=model, optimizer=optimizer.optimizer, format="torch_dist", iteration=step)
            if dist.get_rank() == 0:
                shutil.copy(imported / SIZES, folder)
    dist.barrier()
    dist.destroy_process_group()


def newest_checkpoint(run: Path) -> Path | None:
    """Return the folder of the last complete save; an interrupted save has another name, or lacks the file of sizes."""
    folders = [path for path in run.glob("iter_*") if re.fullmatch(r"iter_\d+", path.name) and (path / SIZES).is_file()]
    return max(folders, default=None)


def sharded_model(bridge: Any, options: argparse.Namespace, *, imported: Path) -> ShardedModel:
    """Build Bridge's model with its parallel sizes, and shard it over the data-parallel ranks.

    Args:
        bridge: Megatron-Bridge's, which has read the folder.
        options: The command line's.
        imported: The checkpoint that Bridge writes of the folder's weights, if an earlier start has not.

    Raises:
        SystemExit: Ranks cannot share rows or tokens evenly.
    """
    is_imported = (imported / SIZES).is_file()
    provider = bridge.to_megatron_provider(load_weights=not is_imported)
    provider.tensor_model_parallel_size = options.tensor_parallel
    provider.sequence_parallel = options.tensor_parallel > 1  # Mixtures of experts refuse tensor parallelism alone.
    provider.expert_model_parallel_size = options.expert_parallel
    provider.expert_tensor_parallel_size = 1
    provider.gradient_accumulation_fusion = False  # a kernel of Apex
    provider.deterministic_mode = options.deterministic
    provider.bf16, provider.params_dtype = False, torch.float32
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    num = parallel_state.get_data_parallel_world_size()
    if options.rows % num or options.length % options.tensor_parallel:
        raise SystemExit(
            f"Expected --rows to divide by the {num} data-parallel ranks and --length by the "
            f"{options.tensor_parallel} tensor-parallel ranks, got {options.rows} and {options.length}."
        )
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, bf16=False)
    if not is_imported:
        if dist.get_rank() == 0:
            shutil.rmtree(imported, ignore_errors=True)  # the leftover of a killed import
        dist.barrier()
        bridge.save_megatron_model([model], str(imported.parent))
    shards = DistributedDataParallelConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params", grad_reduce_in_fp32=True
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    return ShardedModel(config=model.config, ddp_config=shards, module=model)


def batch_of(bridge: Any, options: argparse.Namespace, step: int) -> torch.Tensor:
    """Draw this data-parallel rank's rows of a step's tokens, one more than the sequence's length."""
    num, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    vocabulary = bridge.hf_pretrained.config.vocab_size
    draws = torch.Generator().manual_seed(step)
    rows = torch.randint(vocabulary, (options.rows, options.length + 1), generator=draws)
    return rows.chunk(num)[rank].cuda()


def train_step(model: ShardedModel, optimizer: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Train on a batch, and return this rank's mean loss."""

    def forward(batches: Iterator[torch.Tensor], chunk: torch.nn.Module) -> Any:
        tokens = next(batches)
        positions = torch.arange(tokens.shape[1] - 1, device=tokens.device).expand(len(tokens), -1)
        losses = chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        return losses, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})

    optimizer.zero_grad()
    (record,) = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter([tokens]),
        model=[model],
        num_microbatches=1,
        seq_length=tokens.shape[1] - 1,
        micro_batch_size=len(tokens),
    )
    optimizer.step()
    loss: torch.Tensor = record["loss"]
    return loss


if __name__ == "__main__":
    main()
