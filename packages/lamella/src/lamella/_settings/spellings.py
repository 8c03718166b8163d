"""Names that other trainers give to settings, and the options of `lamella train` for them."""

from collections.abc import Mapping
from typing import Final

from lamella._settings.config import GROUPS
from lamella._settings.options import fields_of

_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "--model": ("model-name-or-path", "model-name", "model-path", "base-model", "pretrained-model-name-or-path"),
    "--lora-rank": ("lora-r", "lora", "use-lora", "use-peft", "peft", "adapter", "lora-dim"),
    "--lora-targets": ("lora-target-modules", "target-modules", "lora-target"),
    "--dora": ("use-dora",),
    "--attention": ("attn-implementation", "attention-implementation", "attn-impl", "attention-backend"),
    "--attention flash_attention_2": ("flash-attention", "flash-attn", "use-flash-attn", "use-flash-attention-2"),
    "--attention sdpa": ("sdp-attention", "use-sdpa"),
    "--kernels liger": ("use-liger-kernel", "use-liger", "liger", "enable-liger-kernel"),
    "--data": ("dataset", "datasets", "dataset-name", "dataset-path", "train-file", "train-data", "data-path"),
    "--validation-data": (
        *("validation-file", "validation-dataset", "eval-file", "eval-data", "eval-dataset", "eval-datasets"),
        *("test-datasets", "val-data", "valid-data"),
    ),
    "--mixture": ("data-mix", "data-blend", "blend", "interleave-probs", "mix-weights", "dataset-weights"),
    "--streaming": ("stream", "use-streaming", "streaming-dataset", "data-streaming", "streaming-mode"),
    "--shuffle-buffer": ("shuffle-buffer-size", "buffer-size", "streaming-buffer-size", "shuffle-buffer-len"),
    "--sequence-length": (
        *("max-seq-length", "max-seq-len", "seq-length", "seq-len", "sequence-len", "max-length", "block-size"),
        *("context-length", "cutoff-len"),
    ),
    "--epochs": ("num-train-epochs", "num-epochs", "epoch", "train-epochs", "n-epochs"),
    "--steps": ("max-steps", "train-steps", "num-steps", "train-iters", "max-iters", "total-steps"),
    "--accumulation": ("gradient-accumulation-steps", "grad-accum", "grad-accum-steps", "accumulate-grad-batches"),
    "--lr": ("learning-rate", "max-lr", "peak-lr"),
    "--schedule": ("lr-scheduler-type", "lr-scheduler", "scheduler", "lr-decay-style", "lr-schedule"),
    "--warmup-steps": ("num-warmup-steps", "lr-warmup-iters", "lr-warmup-steps", "warmup", "warmup-ratio"),
    "--final-lr-fraction": ("min-lr", "min-lr-ratio", "min-lr-rate"),
    "--optimizer": ("optim", "optimizer-name"),
    "--weight-decay": ("wd",),
    "--beta1": ("adam-beta1",),
    "--beta2": ("adam-beta2",),
    "--eps": ("adam-epsilon", "adam-eps", "epsilon"),
    "--clip-norm": ("max-grad-norm", "gradient-clip-val", "grad-clip", "clip-grad", "gradient-clipping"),
    "--train": ("freeze", "trainable", "freeze-layers", "unfreeze", "unfrozen-parameters", "trainable-parameters"),
    "--ranks": ("num-processes", "nproc-per-node", "num-gpus", "gpus", "devices", "world-size"),
    "--precision": ("dtype", "torch-dtype", "mixed-precision"),
    "--precision bf16": ("bf16", "bfloat16", "bf16-mixed"),
    "--precision fp32": ("fp32",),
    "--deterministic": ("full-determinism", "use-deterministic-algorithms", "deterministic-mode"),
    "--recompute full": ("gradient-checkpointing", "activation-checkpointing", "recompute-activations"),
    "--recompute": ("recompute-granularity",),
    "--stage": ("zero-stage", "zero"),
    "--experts": ("expert-parallel-size", "expert-model-parallel-size", "expert-parallel", "ep-size", "ep"),
    "--tensor-parallel": ("tensor-parallel-size", "tensor-model-parallel-size", "tp-size", "tp"),
    "--context-parallel": ("context-parallel-size", "cp-size", "cp", "sequence-parallel-size", "ring-attention"),
    "--offload-activations": ("activation-offloading",),
    "--rest cpu": ("cpu-offload", "fsdp-offload-params", "offload-params"),
    "--packing": ("sample-packing", "pack", "padding-free"),
    "--loss-on": ("train-on-inputs", "assistant-only-loss", "completion-only-loss", "mask-prompt", "train-on-prompt"),
    "--float8": ("fp8", "fp8-recipe"),
    "--compile": ("torch-compile",),
    "--capture": ("cuda-graph", "cuda-graphs", "enable-cuda-graph"),
    "--run-dir": ("output-dir", "output", "out-dir", "save-dir", "save", "checkpoint-dir", "logging-dir"),
    "--resume": ("resume-from-checkpoint", "resume-from", "load"),
    "--log-interval": ("logging-steps", "log-every", "log-every-n-steps", "log-freq"),
    "--validation-interval": ("eval-steps", "eval-interval", "val-check-interval", "evaluation-interval"),
    "--checkpoint-interval": ("save-steps", "save-interval", "save-every", "checkpoint-every"),
    "--keep-checkpoints": ("save-total-limit", "max-checkpoints", "keep-last"),
    "--trackers": ("report-to", "wandb", "tensorboard", "mlflow", "trackio", "logger", "use-wandb", "log-with"),
}

_SENTENCES: Final[Mapping[str, str]] = {
    "per-device-train-batch-size": "Pass --batch-size, which counts the sequences of all ranks, and --accumulation.",
    "micro-batch-size": "Pass --batch-size, which counts the sequences of all ranks, and --accumulation.",
    "global-batch-size": "Pass --batch-size, which counts the sequences of all ranks.",
    "train-batch-size": "Pass --batch-size, which counts the sequences of all ranks.",
    "fp16": "Pass --precision bf16, which needs no loss scaling; there is no fp16.",
    "qlora": "Pass --lora-rank, which keeps the frozen weights unquantised.",
    "deepspeed": "Parameters, gradients and optimizer state are sharded already, as ZeRO-3 does: leave it out, or "
    "pass --stage.",
}

_OTHERS: Final[Mapping[str, tuple[str, ...]]] = {
    "per-device-train-batch-size": ("per-gpu-train-batch-size", "per-device-batch-size"),
    "qlora": ("use-qlora",),
    "deepspeed": ("fsdp", "fsdp-config", "use-fsdp", "deepspeed-config"),
}


def _hints() -> dict[str, str]:
    hints = {name: f"Pass {option}." for option, names in _OPTIONS.items() for name in names}
    hints |= _SENTENCES
    return hints | {name: _SENTENCES[spelling] for spelling, names in _OTHERS.items() for name in names}


_HINTS: Final = _hints()


def option_of_spelling(flag: str) -> str:
    """Return ` Pass ...` for an option of another trainer, `--learning-rate` or `--learning_rate`; else no text."""
    hint = _HINTS.get(_spelled(flag))
    return "" if hint is None else f" {hint}"


def field_of_spelling(name: str) -> str:
    """Return ` Did you mean ...?` for a field of another trainer in a configuration file; else no text."""
    hint = _HINTS.get(_spelled(name))
    if hint is None:
        return ""
    flag = hint.removeprefix("Pass ").removesuffix(".")
    for group, cls in GROUPS.items():
        for field in fields_of(cls):
            if field.flag == flag:
                return f" Did you mean {field.name!r} in [{group}]?"
    return f" On the command line: {hint[:1].lower()}{hint[1:]}" if hint.startswith("Pass") else f" {hint}"


def _spelled(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()
