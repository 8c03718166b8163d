"""TRL's trainers over Accelerate's plugin for FSDP2: SFT, preferences, rewards and GRPO, whole models and adapters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trl
from client_models import TEMPLATE, let_accelerate_shard_on_cpus, model_folder
from datasets import Dataset
from peft import LoraConfig

from lamella_integration.in_place import Device, run_in_both, units, unsharded_copy

# Without a device map TRL spreads a reference model over the GPUs of each rank: under FSDP it knows no ranks by then.
FP32 = {"model_init_kwargs": {"dtype": "float32", "device_map": None}}
SHORT = {"max_length": 48}
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def questions(number: int) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": "q" * (1 + 3 * index % 7)}] for index in range(number)]


def conversations() -> Dataset:
    answers = [{"role": "assistant", "content": "abc"[index % 3] * (1 + index % 5)} for index in range(32)]
    return Dataset.from_list([{"messages": [*q, a]} for q, a in zip(questions(32), answers, strict=True)])


def preferences() -> Dataset:
    def answer(content: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": content}]

    return Dataset.from_list(
        [
            {"prompt": q, "chosen": answer("yes" * (1 + index % 2)), "rejected": answer("no")}
            for index, q in enumerate(questions(32))
        ]
    )


def judged() -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
            for row in preferences()
            for kind in ("chosen", "rejected")
        ]
    )


def length_of_answers(completions: list[Any], **_: Any) -> list[float]:
    return [len(str(completion)) / 100 for completion in completions]


# -- trainers by method -----------------------------------------------------------------------------------------------


def sft(model: str, arguments: Any, **options: Any) -> Any:
    adapters = {"peft_config": options.pop("peft_config")} if "peft_config" in options else {}
    args = arguments(trl.SFTConfig, **SHORT, **FP32, **options)
    return trl.SFTTrainer(model, args=args, train_dataset=conversations(), **adapters)


def dpo(model: str, arguments: Any, **adapters: Any) -> Any:
    args = arguments(trl.DPOConfig, **SHORT, **FP32)
    return trl.DPOTrainer(model, args=args, train_dataset=preferences(), **adapters)


def kto(model: str, arguments: Any) -> Any:
    args = arguments(trl.KTOConfig, **SHORT, **FP32)
    return trl.KTOTrainer(model, args=args, train_dataset=judged())


def reward(model: str, arguments: Any) -> Any:
    args = arguments(trl.RewardConfig, **SHORT, **FP32)
    return trl.RewardTrainer(model, args=args, train_dataset=preferences())


def grpo(model: str, arguments: Any, **adapters: Any) -> Any:
    args = arguments(trl.GRPOConfig, max_completion_length=6, num_generations=2, **FP32)
    prompts = Dataset.from_list([{"prompt": prompt} for prompt in questions(32)])
    return trl.GRPOTrainer(model, reward_funcs=length_of_answers, args=args, train_dataset=prompts, **adapters)


def with_lora(method: Callable[..., Any], *, dora: bool = False) -> Callable[..., Any]:
    def trainer(model: str, arguments: Any) -> Any:
        return method(model, arguments, peft_config=LoraConfig(**LORA, use_dora=dora))

    return trainer


METHODS: dict[str, Callable[..., Any]] = {
    "SFT": sft,
    "SFT packed": partial(sft, packing=True),
    "SFT on answers": partial(sft, assistant_only_loss=True),
    "SFT accumulated": partial(sft, gradient_accumulation_steps=2),
    "SFT LoRA": with_lora(sft),
    "SFT DoRA": with_lora(sft, dora=True),
    "DPO": dpo,
    "DPO LoRA": with_lora(dpo),
    "KTO": kto,
    "reward": reward,
    "GRPO": grpo,
    "GRPO LoRA": with_lora(grpo),
}


# -- runs -------------------------------------------------------------------------------------------------------------


def arguments_in(folder: Path, config: type, **options: Any) -> Any:
    """A config of TRL's for four steps over Accelerate's FSDP2, saved after two and after four."""
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.1,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "gradient_checkpointing": False,
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "FULL_STATE_DICT",
        },
    }
    config_object = config(**arguments, **options)
    let_accelerate_shard_on_cpus()  # after the config: `TrainingArguments` detects ranks again
    return config_object


def trained(folder: Path, *, model: Path, method: Callable[..., Any]) -> object:
    """Losses, norms, weights and files of a run."""
    trainer = method(str(model), partial(arguments_in, folder / "run"))
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    figures = ("loss", "grad_norm", "reward", "rewards/margins")
    log = [{name: entry[name] for name in figures if name in entry} for entry in trainer.state.log_history]
    losses = [entry for entry in log if "loss" in entry]
    assert len(losses) == 4
    weights = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    dist.barrier()  # Rank 0 writes.
    files = sorted(path.name for path in (folder / "saved").iterdir())
    return [units(trainer.model), losses, unsharded_copy(weights), files]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu2)])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_trls_trainer_trains(method: Callable[..., Any], device: Device, tmp_path: Path) -> None:
    """Bit for bit: losses, norms, trained weights, and the names of saved files."""
    model = model_folder(tmp_path / "model", TEMPLATE)
    run_in_both(partial(trained, model=model, method=method), device=device, timeout_s=200.0)
