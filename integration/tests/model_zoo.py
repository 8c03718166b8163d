"""Models of many structures at the smallest sizes: architectures of transformers, and of torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

Inputs = dict[str, Any]

VOCAB = 64
IMAGE = 60  # the token that stands for a part of an image
NUM_ROWS = 2
LENGTH = 12


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, and what it is given.

    Attributes:
        make: Builds it with random weights, in training mode.
        draw: Its keyword arguments, from a generator. Labels are among them where the model computes its own loss.
        generate: Whether it has transformers' `generate`.
        recomputes: Whether it has `gradient_checkpointing_enable`.
    """

    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Inputs]
    generates: bool = False
    recomputes: bool = True


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated layers: what outermost lists of modules hold. One that comes twice (shared layers) counts once."""
    blocks: dict[nn.Module, None] = {}
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            blocks.update(dict.fromkeys(block for block in child if any(True for _ in block.parameters())))
        else:
            blocks.update(dict.fromkeys(blocks_of(child)))
    return list(blocks)


# -- sizes ------------------------------------------------------------------------------------------------------------

# What configs of transformers call their sizes. A config takes those that it has.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "lru_width"), 32),
    **dict.fromkeys(("attention_hidden_size", "word_embed_proj_dim", "projection_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "d_kv", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "dim_ff"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "embedding_size"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "mamba_n_heads", "mamba_d_head"), 8),
    **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("sliding_window", "attention_window", "relative_attention_num_buckets"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), VOCAB),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "vocab_size"), VOCAB),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), None),
    "image_size": 16,
    "patch_size": 8,
    "num_channels": 3,
    "conv_kernel": 4,
    "use_mamba_kernels": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    # Ranks that leave out different layers gather different units: no implementation can have that.
    **dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0.0),
}


def small(kind: str | type[PreTrainedConfig], *, without: tuple[str, ...] = (), **settings: Any) -> PreTrainedConfig:
    """A config with the sizes above, of its parts too, and with one layer at least of each kind that it has.

    Args:
        kind: The class, or its `model_type`.
        without: Sizes that it computes itself.
        settings: What goes before the sizes; a dict for each part.
    """
    cls = CONFIG_MAPPING[kind] if isinstance(kind, str) else kind
    names, defaults = cls.__dataclass_fields__, cls()
    chosen: dict[str, Any] = {
        name: size
        for name, size in _SIZES.items()
        if name in names and name not in without and not isinstance(getattr(defaults, name, None), list | tuple)
    }
    for name, part in getattr(cls, "sub_configs", {}).items():
        part_settings = dict(settings.pop(name, {}))
        if "model_type" in part_settings:
            part = part_settings.pop("model_type")
        elif part is AutoConfig:
            part = type(getattr(defaults, name))
        chosen[name] = small(part, **part_settings).to_dict()
    if kinds := getattr(defaults, "layer_types", None) if "layer_types" in names else None:
        different = list(dict.fromkeys(kinds))
        chosen["layer_types"] = (different * 2)[: max(2, len(different))]
        chosen["num_hidden_layers"] = len(chosen["layer_types"])
    config: PreTrainedConfig = cls(**(chosen | settings))
    return config


# -- what models are given --------------------------------------------------------------------------------------------


def _tokens(generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(6, IMAGE - 4, (NUM_ROWS, length), generator=generator)


def _next_tokens(generator: torch.Generator) -> Inputs:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens}


def _other_tokens(generator: torch.Generator) -> Inputs:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator)}


def _translations(generator: torch.Generator) -> Inputs:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator, 6)}


def _pixels(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(NUM_ROWS, 3, 16, 16, generator=generator)


def _classes(generator: torch.Generator) -> Inputs:
    return {"pixel_values": _pixels(generator), "labels": torch.randint(0, 2, (NUM_ROWS,), generator=generator)}


def _pairs(generator: torch.Generator) -> Inputs:
    return {"pixel_values": _pixels(generator), "input_ids": _tokens(generator), "return_loss": True}


def _transcripts(generator: torch.Generator) -> Inputs:
    return {"input_values": torch.randn(NUM_ROWS, 2000, generator=generator), "labels": _tokens(generator, 4)}


def _spectra(generator: torch.Generator) -> Inputs:
    features = torch.randn(NUM_ROWS, 80, 2 * VOCAB, generator=generator)
    return {"input_features": features, "labels": _tokens(generator, 6)}


def _images_in_text(generator: torch.Generator, *, kinds: str = "", patches: int = 0) -> Inputs:
    """Four tokens of each row stand for an image. Some models are told which, or given patches of images in a list."""
    tokens = _tokens(generator)
    tokens[:, 1:5] = IMAGE
    is_image = tokens == IMAGE
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": _pixels(generator)}
    inputs["labels"] = tokens.masked_fill(is_image, -100)
    if kinds:
        inputs[kinds] = is_image.long()
    if patches:
        inputs["pixel_values"] = torch.randn(NUM_ROWS * 16, patches, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * NUM_ROWS)
    return inputs


def _vectors(generator: torch.Generator, *shape: int) -> Inputs:
    return {"x": torch.randn(*(shape or (NUM_ROWS, 7, 16)), generator=generator)}


# -- architectures of transformers ------------------------------------------------------------------------------------


def _new(head: str, config: Callable[[], PreTrainedConfig]) -> nn.Module:
    cls = getattr(transformers, head)
    model: nn.Module = cls.from_config(config()) if head.startswith("Auto") else cls(config())
    return model.train()  # a model that is made by itself is for inference


def _of(head: str, draw: Callable[[torch.Generator], Inputs], *, generates: bool = False) -> Callable[..., Subject]:
    def subject(kind: str, *, recomputes: bool = True, **settings: Any) -> Subject:
        make = partial(_new, head, partial(small, kind, **settings))
        return Subject(make=make, draw=draw, generates=generates, recomputes=recomputes)

    return subject


_decoder = _of("AutoModelForCausalLM", _next_tokens, generates=True)
_encoder = _of("AutoModelForMaskedLM", _other_tokens)
_translator = _of("AutoModelForSeq2SeqLM", _translations, generates=True)
_classifier = _of("AutoModelForImageClassification", _classes)
_listener = _of("AutoModelForCTC", _transcripts)


def _reader_of_images(head: str, config: Callable[[], PreTrainedConfig], **inputs: Any) -> Subject:
    return Subject(make=partial(_new, head, config), draw=partial(_images_in_text, **inputs), generates=True)


_SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_MLA: dict[str, Any] = {"without": ("head_dim",), "num_key_value_heads": 4}
_WAV: dict[str, Any] = {
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [10, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
}
_PATCHES: dict[str, Any] = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_heads": 4,
    "intermediate_size": 48,
    "hidden_size": 32,
    "out_hidden_size": 32,
}
_QWEN_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": 61,
    "vision_start_token_id": 58,
    "vision_end_token_id": 59,
}


def _qwen2_vl() -> PreTrainedConfig:
    vision = {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 4, "patch_size": 4}
    return small("qwen2_vl", text_config={"rope_parameters": _MROPE}, vision_config=vision, **_QWEN_TOKENS)


def _qwen3_vl() -> PreTrainedConfig:
    vision = {**_PATCHES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    return small("qwen3_vl", text_config={"rope_parameters": _MROPE}, vision_config=vision, **_QWEN_TOKENS)


def _llava() -> PreTrainedConfig:
    parts: dict[str, Any] = {
        "text_config": {"model_type": "llama"},
        "vision_config": {"model_type": "clip_vision_model"},
    }
    parts["vision_config"]["num_hidden_layers"] = 3
    return small("llava", image_token_index=IMAGE, **parts)


def _paligemma() -> PreTrainedConfig:
    parts: dict[str, Any] = {"text_config": {"model_type": "gemma"}, "vision_config": _SIGLIP}
    return small("paligemma", image_token_index=IMAGE, **parts)


def _gemma3() -> PreTrainedConfig:
    tokens: dict[str, Any] = {"image_token_index": IMAGE, "mm_tokens_per_image": 4}
    tokens |= {"boi_token_index": 58, "eoi_token_index": 59}
    return small("gemma3", text_config={}, vision_config=_SIGLIP, **tokens)


def _gemma3_without_images() -> Subject:
    make = partial(_new, "Gemma3ForConditionalGeneration", _gemma3)
    return Subject(make=make, draw=_next_tokens, generates=True)


# -- models of torch alone --------------------------------------------------------------------------------------------


class _Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = self.layers(x)
        return x + update


class _Chain(nn.Module):
    """Blocks, one after another."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Attention(nn.Module):
    """Hands the weights of a child to a function of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = self.attention(x, x, x)[0]
        return x + update


class _Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(16, 4, 2, 2, 32, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        translated: torch.Tensor = self.transformer(x, x[:, :4])
        return translated


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(16, 16, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = self.layer(x)[0]
        return x + update


class _Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(VOCAB, 16)
        self.blocks = nn.ModuleList(_Residual(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return x


class _Adapted(nn.Module):
    """A frozen linear layer and a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down = nn.Linear(16, 3, bias=False)
        self.up = nn.Linear(3, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.base(x) + self.up(self.down(x))
        return adapted


class _Spectral(nn.Module):
    """Real and complex parameters in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)
        self.filter = nn.Parameter(torch.randn(9, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = torch.fft.irfft(torch.fft.rfft(self.mix(x)) * self.filter, n=16)
        return x + update


def _convolution() -> nn.Module:
    return _Residual(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())


def _chain(block: Callable[[], nn.Module], *shape: int) -> Subject:
    make = partial(_chained, block)
    return Subject(make=make, draw=lambda generator: _vectors(generator, *shape), recomputes=False)


def _chained(block: Callable[[], nn.Module]) -> nn.Module:
    return _Chain(block(), block())


def _normed(norm: Callable[[nn.Module], nn.Module]) -> Subject:
    return _chain(lambda: _Residual(norm(nn.Linear(16, 16)), nn.Tanh()))


def _plain(make: Callable[[], nn.Module], draw: Callable[[torch.Generator], Inputs] = _vectors) -> Subject:
    return Subject(make=make, draw=draw, recomputes=False)


# -- all of them ------------------------------------------------------------------------------------------------------

# Of different structure, for every run of the tests.
FEW: dict[str, Subject] = {
    "llama": _decoder("llama"),
    "gpt2": _decoder("gpt2"),  # tied, weights transposed
    "gemma3": _decoder("gemma3_text"),  # tied, two kinds of attention
    "mixtral": _decoder("mixtral"),
    "deepseek_v3": _decoder("deepseek_v3", **_MLA),
    "qwen3_5": _decoder("qwen3_5_text"),  # attention and a linear recurrence
    "falcon_mamba": _decoder("falcon_mamba"),
    "jamba": _decoder("jamba", attn_layer_period=2, attn_layer_offset=1),
    "bert": _encoder("bert"),
    "t5": _translator("t5", decoder_start_token_id=0),
    "vit": _classifier("vit"),
    "wav2vec2": _listener("wav2vec2", **_WAV),  # weight norm
    "llava": _reader_of_images("LlavaForConditionalGeneration", _llava),  # a layer without gradients
    "transformer of torch": _plain(_Translator),
    "lstm": _chain(_Recurrent),
    "low-rank adapters": _chain(lambda: _Residual(_Adapted(), nn.Tanh())),
    "batch norm": _chain(_convolution, NUM_ROWS, 4, 8, 8),
}

_DECODERS = (
    "afmoe apertus arcee aria_text bart beam bert bert-generation big_bird bigbird_pegasus biogpt bitnet blenderbot "
    "bloom cohere cohere2 cohere2_moe cwm data2vec-text diffllama doge electra emu3 ernie ernie4_5 ernie4_5_moe "
    "exaone4 exaone_moe falcon flex_olmo flint fuyu gemma gemma2 glm glm4 glm4_moe gpt_bigcode gpt_neox "
    "gpt_neox_japanese gpt_oss granite granite_swa granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe "
    "hy_v3 hyperclovax internlm3 iquestcoder jais2 laguna lfm2 lfm3 llama4_text mamba marian mbart megatron-bert "
    "mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text ministral ministral3 mistral modernbert-decoder moshi mvp "
    "nanochat nemotron olmo olmo2 olmo3 olmo_hybrid olmoe opt pegasus persimmon phi phi3 phimoe plbart prophetnet "
    "qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next roberta roberta-prelayernorm roformer seed_oss smollm3 solar_open "
    "stablelm starcoder2 trocr vaultgemma whisper xglm xlm-roberta xlm-roberta-xl"
)
_ENCODERS = (
    "camembert convbert deberta deberta-v2 distilbert electra ernie esm eurobert gte ibert jina_embeddings_v3 layoutlm "
    "longformer modernbert nomic_bert nystromformer rembert roberta roformer tapas xlm-roberta yoso"
)
_TRANSLATORS = (
    "bart bigbird_pegasus blenderbot blenderbot-small led m2m_100 marian mbart mt5 nllb-moe pegasus pegasus_x "
    "plbart prophetnet t5gemma umt5"
)


_DO_NOT_RECOMPUTE = {"gpt_neox_japanese", "ibert"}


def _all() -> Iterator[tuple[str, Subject]]:
    for kind in _DECODERS.split():
        yield f"{kind} decoder", _decoder(kind, recomputes=kind not in _DO_NOT_RECOMPUTE)
    for kind in _ENCODERS.split():
        yield f"{kind} encoder", _encoder(kind, recomputes=kind not in _DO_NOT_RECOMPUTE)
    for kind in _TRANSLATORS.split():
        yield f"{kind} translator", _translator(kind)
    for kind in ("beit", "dinov2", "dinov2_with_registers", "ijepa", "siglip", "vit_msn"):
        yield f"{kind} classifier", _classifier(kind)
    for kind in ("deepseek_v2", "minicpm3", "youtu"):
        yield kind, _decoder(kind, **_MLA)
    yield "unispeech-sat", _listener("unispeech-sat", **_WAV)
    yield "mpt", _decoder("mpt", recomputes=False)
    yield "bamba", _decoder("bamba", attn_layer_indices=[1])
    yield "codegen", _decoder("codegen", rotary_dim=4)
    yield "falcon_h1", _decoder("falcon_h1", mamba_d_ssm=64)
    yield "gpt_neo", _decoder("gpt_neo", attention_types=[[["global", "local"], 1]])
    yield "gptj", _decoder("gptj", rotary_dim=4)
    yield "granitemoehybrid", _decoder("granitemoehybrid", layer_types=["mamba", "attention"])
    yield "lfm2_moe", _decoder("lfm2_moe", layer_types=["conv", "full_attention"], num_dense_layers=1)
    yield "mamba2", _decoder("mamba2", num_heads=8)
    yield "recurrent_gemma", _decoder("recurrent_gemma", block_types=["recurrent", "attention"])
    yield "siglip", Subject(make=partial(_new, "AutoModel", partial(small, "siglip")), draw=_pairs)
    yield "whisper", _of("AutoModelForSpeechSeq2Seq", _spectra, generates=True)("whisper")
    type_inputs = {"kinds": "token_type_ids"}
    yield "paligemma", _reader_of_images("PaliGemmaForConditionalGeneration", _paligemma, **type_inputs)
    yield "gemma3 with images", _reader_of_images("Gemma3ForConditionalGeneration", _gemma3, **type_inputs)
    patch_inputs = {"kinds": "mm_token_type_ids", "patches": 96}
    yield "qwen2_vl", _reader_of_images("Qwen2VLForConditionalGeneration", _qwen2_vl, **patch_inputs)
    yield "qwen3_vl", _reader_of_images("Qwen3VLForConditionalGeneration", _qwen3_vl, **patch_inputs)
    yield "attention of torch", _chain(_Attention)
    yield "weight norm", _normed(parametrizations.weight_norm)
    yield "spectral norm", _normed(parametrizations.spectral_norm)
    yield "embedding bag", _plain(_Bags, lambda generator: {"input_ids": _tokens(generator)})


MANY: dict[str, Subject] = {name: subject for name, subject in _all() if name not in FEW}

# With gradients reduced in a dtype of their own, FSDP2 raises on these.
FSDP2_RAISES: dict[str, Subject] = {
    "a vision tower without images, two microbatches": _gemma3_without_images(),
    "real and complex parameters in one unit": _chain(_Spectral),
}
