"""Tiny models of every kind of the family, and checkpoints that are dicts of tensors."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from lamella_checkpoint import TensorInfo, Wanted, parameter_shapes, translate
from lamella_layout import Chunk

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
DENSE = TEXT | {"intermediate_size": 48}
MOE = TEXT | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
}
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
}


def make_config(kind):
    match kind:
        case "dense":
            return AutoConfig.for_model("qwen3_5_text", **DENSE)
        case "moe":
            return AutoConfig.for_model("qwen3_5_moe_text", **MOE)
        case "vision":
            text = DENSE | {"tie_word_embeddings": True}
            return Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=True)
        case "vision-moe":
            return Qwen3_5MoeConfig(text_config=MOE, vision_config=VISION)


KINDS = ["dense", "moe", "vision", "vision-moe"]


def make_model(kind):
    """A model with no two weights alike: norms that are all ones would hide a wrong offset."""
    config = make_config(kind)
    torch.manual_seed(0)
    match kind:
        case "vision":
            model = Qwen3_5ForConditionalGeneration(config)
        case "vision-moe":
            model = Qwen3_5MoeForConditionalGeneration(config)
        case _:
            model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def config_of(kind):
    """What `config.json` says."""
    return make_config(kind).to_dict()


def weights_of(model):
    """A model's tensors by name, a tied one once, in bf16 values: what a published checkpoint holds."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    persistent = model.state_dict()
    return {name: tensor.detach().bfloat16().float() for name, tensor in named.items() if name in persistent}


def make_mtp(kind, prefix, *, packed):
    """Weights of the layer that predicts further tokens, which transformers has no module for: an attention layer's."""
    weights = weights_of(make_model(kind))
    torch.manual_seed(1)
    mtp = {name: torch.randn(32) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    mtp = {f"mtp.{name}.weight": tensor for name, tensor in mtp.items()} | {"mtp.fc.weight": torch.randn(32, 64)}
    layer = {name: tensor for name, tensor in weights.items() if name.startswith(f"{prefix}layers.3.")}
    mtp |= {name.replace(f"{prefix}layers.3.", "mtp.layers.0."): tensor + 1 for name, tensor in layer.items()}
    return mtp if packed else one_by_one(mtp)


def one_by_one(weights):
    """The experts as `save_pretrained` writes them."""
    single = {}
    for name, tensor in weights.items():
        head, found, kind = name.partition(".mlp.experts.")
        if not found:
            single[name] = tensor
        for index, expert in enumerate(tensor if found else ()):
            parts = {"gate_proj": expert[:16], "up_proj": expert[16:]} if kind == "gate_up_proj" else {kind: expert}
            single |= {f"{head}.mlp.experts.{index}.{part}.weight": rows for part, rows in parts.items()}
    return single


class MemorySource:
    """A checkpoint that is a dict."""

    def __init__(self, tensors, objects=()):
        self.held, self.values = dict(tensors), dict(objects)
        self.path = Path("memory")
        self.tensors = {
            name: TensorInfo(tuple(tensor.shape), tensor.dtype, (whole(tensor.shape),))
            for name, tensor in tensors.items()
        }

    @property
    def objects(self):
        return tuple(self.values)

    def read(self, wanted):
        for want in wanted:
            box = self.held[want.name]
            for dim, (offset, size) in enumerate(zip(*want.chunk, strict=True)):
                box = box.narrow(dim, offset, size)
            want.into.copy_(box)

    def read_object(self, name):
        return self.values[name]


def whole(shape):
    return Chunk((0,) * len(shape), tuple(shape))


def held(source):
    """A checkpoint as one in memory."""
    return MemorySource(read_all(source), {name: source.read_object(name) for name in source.objects})


def read_all(source):
    """Every tensor of a source."""
    tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in source.tensors.items()}
    source.read([Wanted(name, whole(into.shape), into) for name, into in tensors.items()])
    return tensors


def translated(source, rules, to):
    """A checkpoint under the names of the other side."""
    found = rules.match(parameter_shapes(source), "left" if to == "right" else "right")
    return translate(source, found, to=to)


def to_megatron(weights, rules):
    return _moved(weights, rules, "right")


def to_hugging_face(tensors, rules):
    return _moved(tensors, rules, "left")


def _moved(weights, rules, to):
    """A model's tensors by their names on the other side; all of them, and nothing lost."""
    source = translated(MemorySource({f"model.{name}": tensor for name, tensor in weights.items()}), rules, to)
    tensors = read_all(source)
    assert not source.left_over and not source.inexact
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
