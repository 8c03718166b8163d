"""One tool's trainer over FSDP2 or lamella on equal weights and records: a row of `bench_inside`.

    torchrun --nproc-per-node 2 -m lamella_integration.inside_peer MODEL_FOLDER sft --engine lamella [--lora] [--packed]

Methods: `trainer` (transformers), `sft`, `dpo`, `grpo` (TRL). Without GPUs Accelerate is told to shard on CPUs, for a
trial of the harness.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from lamella_integration.recipe_peer import StepTimer
from lamella_integration.tool_models import let_accelerate_shard_on_cpus

Arguments = argparse.Namespace


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options of one row."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("model", type=Path)
    options.add_argument("method", choices=METHODS)
    options.add_argument("--engine", choices=["fsdp2", "lamella"], default="fsdp2")
    for flag in ("--lora", "--qlora", "--packed", "--offload", "--bf16", "--overlap", "--late-gradients"):
        options.add_argument(flag, action="store_true")
    options.add_argument("--keep-budget", type=int, help="bytes")
    options.add_argument("--length", type=int, default=2048, help="tokens of a row")
    options.add_argument("--batch-size", type=int, default=4, help="rows of a rank")
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--num-skipped", type=int, default=20)
    return options


def training_arguments(options: Arguments, folder: str, config: Any = TrainingArguments, **more: Any) -> Any:
    """Return settings of Trainer's or TRL's class, over FSDP2. Accelerate may then shard on CPUs."""
    arguments = config(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        bf16=options.bf16,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "reshard_after_forward": True,
            "offload_params": options.offload,
        },
        per_device_train_batch_size=options.batch_size,
        learning_rate=1e-4,
        max_steps=options.steps,
        max_grad_norm=0.0 if options.late_gradients else 1.0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **more,
    )
    let_accelerate_shard_on_cpus()
    return arguments


def texts(options: Arguments) -> list[str]:
    """Return a text for each row of all steps and ranks, of `length` bytes: equal on every rank."""
    draw = torch.Generator().manual_seed(0)
    num_rows = options.steps * options.batch_size * dist.get_world_size()
    letters = torch.randint(97, 123, (num_rows, options.length), generator=draw)
    return [bytes(row.tolist()).decode() for row in letters]


# -- trainers ---------------------------------------------------------------------------------------------------------


def model_kwargs(options: Arguments) -> dict[str, Any]:
    """Return arguments of `from_pretrained`: four-bit weights for QLoRA, else fp32."""
    if not options.qlora:
        return {"dtype": "float32"}
    from transformers import BitsAndBytesConfig

    make_config: Any = BitsAndBytesConfig
    storage = torch.bfloat16  # FSDP shards storage of one dtype, the compute dtype.
    return {
        "dtype": storage,
        "quantization_config": make_config(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=storage,
            bnb_4bit_quant_storage=storage,
        ),
    }


def adapters(options: Arguments) -> dict[str, Any]:
    """Return TRL's argument for LoRA, if there are adapters."""
    if not (options.lora or options.qlora):
        return {}
    from peft import LoraConfig

    return {"peft_config": LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")}


def _trl() -> Any:
    return import_module("trl")  # by name: typed where installed, and absent where types are checked


def transformers_trainer(options: Arguments, folder: str) -> Any:
    """Return transformers' Trainer, on rows of bytes."""
    rows: Any = [{"input_ids": list(text.encode()), "labels": list(text.encode())} for text in texts(options)]
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, **model_kwargs(options))
    return Trainer(model=model, args=training_arguments(options, folder), train_dataset=rows)


def sft(options: Arguments, folder: str) -> Any:
    """Return TRL's trainer for supervised fine-tuning, on texts."""
    from datasets import Dataset

    trl = _trl()

    more = {"max_length": options.length, "packing": options.packed, "model_init_kwargs": model_kwargs(options)}
    args = training_arguments(options, folder, trl.SFTConfig, **more)
    records = Dataset.from_list([{"text": text} for text in texts(options)])
    return trl.SFTTrainer(str(options.model), args=args, train_dataset=records, **adapters(options))


def dpo(options: Arguments, folder: str) -> Any:
    """Return TRL's trainer for direct preferences: half of a text is preferred to its reverse."""
    from datasets import Dataset

    trl = _trl()

    half = options.length // 2
    args = training_arguments(
        options, folder, trl.DPOConfig, max_length=options.length, model_init_kwargs=model_kwargs(options)
    )
    records = [{"prompt": t[:half], "chosen": t[half:], "rejected": t[:half:-1]} for t in texts(options)]
    return trl.DPOTrainer(str(options.model), args=args, train_dataset=Dataset.from_list(records), **adapters(options))


def grpo(options: Arguments, folder: str) -> Any:
    """Return TRL's trainer for GRPO, which generates by transformers; the reward counts a letter."""
    from datasets import Dataset

    trl = _trl()

    def letters(completions: list[str], **_: Any) -> list[float]:
        return [completion.count("a") / 10 for completion in completions]

    more = {"max_completion_length": options.length // 2, "num_generations": 2}
    args = training_arguments(options, folder, trl.GRPOConfig, model_init_kwargs=model_kwargs(options), **more)
    records = Dataset.from_list([{"prompt": text[: options.length // 2]} for text in texts(options)])
    return trl.GRPOTrainer(
        str(options.model), reward_funcs=letters, args=args, train_dataset=records, **adapters(options)
    )


METHODS: dict[str, Callable[[Arguments, str], Any]] = {
    "trainer": transformers_trainer,
    "sft": sft,
    "dpo": dpo,
    "grpo": grpo,
}


def main() -> None:
    """Train, and print one JSON line on rank 0."""
    options = parser().parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if options.offload else "nccl")
    else:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    if options.engine == "lamella":
        from lamella_transformers.trainer import ShardedTraining, add_to_trainers

        overlaps = options.overlap or options.late_gradients
        add_to_trainers(
            ShardedTraining(overlap=overlaps, late_gradients=options.late_gradients, keep_budget=options.keep_budget)
        )
    with TemporaryDirectory() as folder:
        trainer = METHODS[options.method](options, folder)
        clock = StepTimer(options.num_skipped)
        trainer.add_callback(clock)
        trainer.train()
    if dist.get_rank() == 0:
        tokens = options.batch_size * dist.get_world_size() * options.length
        record = {
            "tokens_per_s": clock.num_steps * tokens / clock.seconds,
            "peak_gib": torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0,
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        }
        print(json.dumps(record), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
