"""Set-ups of the clients' tests: tiny language models, rows of tokens, and Accelerate's leave to shard on CPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor._random
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 61


def tiny_llama() -> Any:
    """Two layers; the same weights on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes))


def tokens(num_rows: int = 16, length: int = 8, *, seed: int = 0) -> torch.Tensor:
    """(num_rows, length), from the seed alone."""
    return torch.randint(VOCABULARY, (num_rows, length), generator=torch.Generator().manual_seed(seed))


def let_accelerate_shard_on_cpus() -> None:
    """Let Accelerate accept the plugin for FSDP on CPUs, by the kind of the distributed ranks; the device stays."""
    if dist.get_backend() == "gloo":
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_XPU
