"""Train a Hugging Face folder in megatron-core: Megatron-Bridge's own code imports and publishes, lamella shards.

    torchrun --nproc-per-node 2 examples/megatron/train_with_bridge.py Qwen3.5-0.8B/ runs/bridge --steps 100
    torchrun --nproc-per-node 1 examples/megatron/train_with_bridge.py Qwen3.5-0.8B/ runs/bridge --publish trained/

The first start writes the folder's weights to `runs/bridge/imported`, and later ones go on from the newest checkpoint,
with any `--tensor-parallel` and `--expert-parallel`. Batches are drawn tokens. Bridge's modules are Transformer
Engine's, which need a GPU.
"""

from __future__ import annotations

import argparse
import os
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


def main() -> None:
    """Train, or publish the newest checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of Hugging Face")
    parser.add_argument("run", type=Path, help="checkpoints, in torch_dist")
    parser.add_argument("--publish", type=Path, help="write a folder of Hugging Face, and train nothing")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-interval", type=int, default=50)
    parser.add_argument("--rows", type=int, default=4, help="of a step, over all data-parallel ranks")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--deterministic", action="store_true", help="torch's gated delta rule, not a kernel")
    options = parser.parse_args()
    bridge = AutoBridge.from_hf_pretrained(str(options.folder))
    if options.publish:
        bridge.export_ckpt(str(options.run), str(options.publish))
    else:
        train(bridge, options)


def train(bridge: Any, options: argparse.Namespace) -> None:
    """Train to the last step, from the newest checkpoint or the folder's weights."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    imported = options.run / "imported" / "iter_0000000"
    start = max(options.run.glob("iter_*"), default=imported)
    model = sharded_model(bridge, options, imported=None if start.is_dir() else imported)
    fields = {"lr": options.lr, "weight_decay": 0.0, "clip_grad": 1.0, "bf16": options.bf16}
    optimizer: Any = sharded_optimizer(OptimizerConfig(optimizer="adam", **fields), [model])
    has_steps = start != imported
    entries = load_checkpoint(start, model=model, optimizer=optimizer.optimizer if has_steps else None)
    vocabulary = bridge.hf_pretrained.config.get_text_config().vocab_size
    for step in range(entries["iteration"] + 1, options.steps + 1):
        loss = train_step(model, optimizer, batch_of(vocabulary, options, step))
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        if dist.get_rank() == 0:
            print(f"step: {step}  loss: {loss.item() / parallel_state.get_data_parallel_world_size():.6f}", flush=True)
        if step % options.save_interval == 0 or step == options.steps:
            folder = options.run / f"iter_{step:07}"
            save_checkpoint(folder, model=model, optimizer=optimizer.optimizer, format="torch_dist", iteration=step)
            if dist.get_rank() == 0:  # Bridge reads the model's sizes there.
                shutil.copy(imported / "run_config.yaml", folder)
    dist.barrier()
    dist.destroy_process_group()


def sharded_model(bridge: Any, options: argparse.Namespace, *, imported: Path | None) -> ShardedModel:
    """Build Bridge's model with its parallel sizes, and shard it over the data-parallel ranks.

    Args:
        bridge: Of the folder.
        options: The command line's.
        imported: Where Bridge writes the folder's weights; None leaves the model's weights to a checkpoint.
    """
    provider = bridge.to_megatron_provider(load_weights=imported is not None)
    provider.tensor_model_parallel_size = options.tensor_parallel
    provider.expert_model_parallel_size = options.expert_parallel
    provider.expert_tensor_parallel_size = 1
    provider.gradient_accumulation_fusion = False  # a kernel of Apex
    provider.deterministic_mode = options.deterministic
    provider.bf16 = options.bf16
    provider.params_dtype = torch.bfloat16 if options.bf16 else torch.float32
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, bf16=options.bf16)
    if imported is not None:
        bridge.save_megatron_model([model], str(imported.parent), hf_tokenizer_path=str(options.folder))
    shards = DistributedDataParallelConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params", grad_reduce_in_fp32=True
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    return ShardedModel(config=model.config, ddp_config=shards, module=model)


def batch_of(vocabulary: int, options: argparse.Namespace, step: int) -> torch.Tensor:
    """Draw this data-parallel rank's rows of a step's tokens, one more than the sequence's length."""
    num, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
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
