"""Models, records and settings for other tools' trainers: TRL's and `transformers.Trainer`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\n' }}"
    "{%- else %}{{ message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def model_folder(folder: Path, template: str, **sizes: int) -> Path:
    """Write a Llama and a tokenizer of bytes with a chat template into a folder, as published models lie.

    Args:
        folder: The folder, which is made.
        template: The tokenizer's chat template.
        **sizes: Fields of `LlamaConfig` other than a tiny model's.

    Returns:
        The folder.
    """
    write_tokenizer(folder, template)
    torch.manual_seed(0)
    tiny = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    make_config: Any = LlamaConfig
    LlamaForCausalLM(make_config(**{"vocab_size": 272, **tiny, **sizes})).save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path, template: str, texts: Iterable[str] = (), vocab_size: int = 259) -> None:
    """Write a tokenizer of bytes and of the pairs in texts, with a chat template, into a folder.

    Args:
        folder: The folder, which is made.
        template: The chat template.
        texts: Texts to merge pairs in; bytes alone without.
        vocab_size: Number of tokens, at most.
    """
    names = ("<|im_start|>", "<|im_end|>", "<pad>")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(names),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def let_accelerate_shard_on_cpus() -> None:
    """Let Accelerate accept the plugin for FSDP on CPUs, by the kind of the distributed ranks; the device stays."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    if dist.get_backend() == "gloo":
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_XPU
