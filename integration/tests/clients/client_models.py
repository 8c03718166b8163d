"""Set-ups of the clients' tests: tiny language models, rows of tokens, and leave for Accelerate to shard on CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor._random
from accelerate import PartialState
from accelerate.utils import DistributedType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 61
TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\n' }}"
    "{%- else %}{{ message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def tiny_llama() -> Any:
    """Two layers; the same weights on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes))


def tokens(num_rows: int = 16, length: int = 8, *, seed: int = 0) -> torch.Tensor:
    """(num_rows, length), from the seed alone."""
    return torch.randint(VOCABULARY, (num_rows, length), generator=torch.Generator().manual_seed(seed))


def model_folder(folder: Path, template: str) -> Path:
    """Write a tiny Llama and a tokenizer of bytes with a chat template into a folder, as published models lie."""
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ("<|im_start|>", "<|im_end|>", "<pad>")
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=272, **sizes)).save_pretrained(folder)
    return folder


def let_accelerate_shard_on_cpus() -> None:
    """Let Accelerate accept the plugin for FSDP on CPUs, by the kind of the distributed ranks; the device stays."""
    if dist.get_backend() == "gloo":
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_XPU
