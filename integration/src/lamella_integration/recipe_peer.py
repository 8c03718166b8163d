"""`transformers.Trainer` on the weights, batches and learning rates of a `lamella train` run: the recipe's peer.

    torchrun --nproc-per-node 2 -m lamella_integration.recipe_peer RUN_DIR --engine fsdp2 [--kernels liger] [--compile]

Every rank builds the run's model from the run's seed, and trains on the batches that the run's stream has for this
rank: the first losses are equal, later ones differ by rounding. A run of adapters has the same adapters here, by peft.
`--engine lamella` puts lamella's engine in FSDP2's place (`lamella_engine.install`).
"""

import argparse
import json
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from lamella import Config
from lamella.testing import (
    BatchStream,
    RunDirectory,
    build_model,
    learning_rate,
    load_spec,
    lora_settings,
    read_file,
    resolve,
)
from lamella_checkpoint import fill
from lamella_integration.repeated_run import batches_of, synchronize, take_device
from lamella_transformers import FreshLora, FreshWeights, LoraSettings, lora_config, lora_layers


def run_rows(stream: BatchStream, num_steps: int) -> list[dict[str, torch.Tensor]]:
    """Return the sequences of a run's steps in memory: step by step, and rank by rank within a step.

    A row holds inputs and targets of one sequence, (sequence_length,) int64 each.
    """
    rows = []
    for step in range(num_steps):
        batch = stream.batch(step, 0, 1)
        rows += [
            {"input_ids": sequence, "labels": labels.contiguous(), "shift_labels": labels.contiguous()}
            for sequence, labels in zip(batch.inputs, batch.targets, strict=True)
        ]
    return rows


class StepTimer(TrainerCallback):
    """Times steps between synchronizations of the device, after `num_skipped` steps."""

    def __init__(self, num_skipped: int) -> None:
        self._num_skipped = num_skipped
        self._began = 0.0
        self.num_steps = 0
        self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Read the clock once when timing begins, and after each later step without waiting for the device."""
        if state.global_step == self._num_skipped:
            synchronize()
            self._began = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the time of the steps since."""
        synchronize()
        self.num_steps = state.global_step - self._num_skipped
        self.seconds = time.perf_counter() - self._began


class RunTrainer(Trainer):
    """A Trainer with a run's order of batches and learning rates."""

    run: Config

    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return torch.utils.data.SequentialSampler(cast(list[object], self.train_dataset))

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the run's schedule of the learning rate."""
        optim = self.run.optim

        def fraction(step: int) -> float:
            return learning_rate(step, optim) / optim.lr

        optimizer = cast(torch.optim.Optimizer, optimizer or self.optimizer)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, fraction)
        return self.lr_scheduler


def main() -> None:
    """Train, and print one JSON line on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--engine", choices=["fsdp2", "lamella"], default="fsdp2")
    parser.add_argument("--kernels", choices=["none", "liger"], default="none")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--num-skipped", type=int, default=20)
    options = parser.parse_args()
    if options.engine == "lamella":
        import lamella_engine
        import lamella_optim

        lamella_engine.install()
        lamella_optim.install()
    directory = RunDirectory(options.run)
    run = resolve(read_file(str(directory.config)))
    with TemporaryDirectory() as folder:
        trainer = _trainer(run, directory, options, folder)
        clock = StepTimer(options.num_skipped)
        trainer.add_callback(clock)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tokens = run.optim.batch_size * run.data.sequence_length
    if dist.get_rank() == 0:
        record = {
            "tokens_per_s": clock.num_steps * tokens / clock.seconds,
            "peak_gib": torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0,
            "losses": losses,
        }
        print(json.dumps(record), flush=True)
    dist.destroy_process_group()


def _trainer(run: Config, directory: RunDirectory, options: argparse.Namespace, folder: str) -> RunTrainer:
    stream = batches_of(run, directory)
    num_ranks = int(os.environ["WORLD_SIZE"])
    make_arguments: Any = TrainingArguments  # The type of `fsdp` differs between releases.
    arguments = make_arguments(
        output_dir=folder,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        fsdp=True,
        fsdp_config={
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": run.parallel.reshard_after_forward,
        },
        per_device_train_batch_size=run.optim.batch_size // (num_ranks * run.optim.accumulation),
        gradient_accumulation_steps=run.optim.accumulation,
        learning_rate=run.optim.lr,
        weight_decay=run.optim.weight_decay,
        adam_beta1=run.optim.beta1,
        adam_beta2=run.optim.beta2,
        adam_epsilon=run.optim.eps,
        max_grad_norm=run.optim.clip_norm,
        max_steps=run.optim.steps,
        use_liger_kernel=options.kernels == "liger",
        torch_compile=options.compile,
        logging_steps=1 if run.optim.steps <= options.num_skipped else options.num_skipped,
        logging_first_step=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_num_workers=0,
    )
    device = take_device()
    spec = load_spec(str(directory.model))
    model: Any = build_model(spec, device, run.run.seed)
    if (settings := lora_settings(run.model)) is not None:
        model = _with_adapters(model, FreshWeights(spec, device, run.run.seed), settings, run.run.seed)
    trainer = RunTrainer(model=model, args=arguments, train_dataset=run_rows(stream, run.optim.steps))
    trainer.run = run
    return trainer


def _with_adapters(model: nn.Module, weights: FreshWeights, settings: LoraSettings, seed: int) -> nn.Module:
    """Return the model as peft wraps it, with the adapters that a run of the seed starts from."""
    from peft import get_peft_model

    layers = lora_layers(model, settings.targets)
    adapted: nn.Module = get_peft_model(cast(Any, model), lora_config(model, settings))
    names = {name.removeprefix("base_model.model."): parameter for name, parameter in adapted.named_parameters()}
    adapters: dict[str, Any] = {name: parameter for name, parameter in names.items() if ".lora_" in name}
    fill(adapters, FreshLora(weights, layers, settings, seed))
    return adapted


if __name__ == "__main__":
    main()
