"""Hugging Face Accelerate with its plugin for FSDP2, on lamella's engine: `install()` is the only line of lamella.

    torchrun --nproc-per-node 2 examples/loops/accelerate_loop.py --folder /tmp/accelerate --steps 20

Accelerate shards, clips and saves by torch's names, which are lamella's until the program ends. Accelerate shards on
accelerators only: for ranks on CPUs, Accelerate ignores the plugin and replicates the model.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import lamella_engine
import lamella_optim


def tiny_llama() -> LlamaForCausalLM:
    """Build a Llama of two layers; in place of `from_pretrained`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, max_position_embeddings=32, **sizes))


def main() -> None:
    """Train on rows that count upwards, and save the state."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    lamella_engine.install()
    lamella_optim.install()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    if accelerator.distributed_type != DistributedType.FSDP:
        parser.error(
            "Expected ranks that Accelerate shards over, started by torchrun on GPUs, got "
            f"{accelerator.num_processes} of kind {accelerator.distributed_type.value}"
        )
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = (torch.arange(16)[None] + torch.randint(48, (8 * options.steps, 1))) % 64
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(rows), batch_size=4))

    for step, (ids,) in enumerate(loader, start=1):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            accelerator.print(f"step {step}: loss {accelerator.gather(loss.detach()).mean().item():.4f}", flush=True)
    accelerator.save_state(str(options.folder))
    accelerator.end_training()


if __name__ == "__main__":
    main()
