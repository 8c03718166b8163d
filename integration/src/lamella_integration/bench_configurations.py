"""The ready configurations in examples/configurations, each trained for few steps: tokens/s, memory and losses.

    python -m lamella_integration.bench_configurations --ranks 2 --out configurations.json [options of lamella train]

A configuration that starts from a folder gets a folder of `--base-model` with drawn weights, and drawn conversations;
the others train their models on the standard library's sources. Kernels, dtype, recompute and sequence length are the
configuration's. A configuration that accumulates takes `--batch-size` and `--accumulation`: a step with its own may
take a minute. one-gpu has one rank, with a rank's share of the batch; many-hosts trains as two instances.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from lamella.testing import ConfigError, build_model, config_of, load_spec, parse
from lamella_integration.bench_packing import pairs, write_rows
from lamella_integration.bench_recipe import RecipeRow, measured_speed, short_run, trained
from lamella_integration.measured_variants import measured
from lamella_integration.tool_models import CHAT_TEMPLATE, write_tokenizer

COLUMNS: Final = ("configuration", "tokens/s", "reserved GiB", "first loss", "last loss")
CONFIGURATIONS: Final = Path("examples", "configurations")  # from the root of a clone
_ON_FOLDERS: Final = ("fine-tune", "adapters", "last-layers", "one-gpu")
_COMPILED: Final = ("pretrain", "many-hosts")  # By default in their own 20,000 steps, not in these few.
_BASE: Final = {  # Qwen3-0.6B with the depth and the head of Qwen3-8B, which last-layers.toml is written for.
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}


def main() -> None:
    """Train by each configuration, and print a table."""
    names = sorted(path.stem for path in CONFIGURATIONS.glob("*.toml"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--base-model", type=Path, help="config.json of the model that folders hold")
    parser.add_argument("--num-documents", type=int, default=4000, help="conversations")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--num-skipped", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--out", type=Path)
    options, more = parser.parse_known_args()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        commands = {name: [*_arguments(name, folder, options), *more] for name in options.only}
        for name, command in commands.items():
            try:
                config_of(parse(["train", *command]))
            except ConfigError as error:
                parser.error(f"{name}: {error}")
        if any(name in _ON_FOLDERS for name in options.only):
            _draw(folder, options)
        measured(options.only, lambda name: _row(name, commands[name], folder, options), COLUMNS, options.out)


def _arguments(name: str, folder: Path, options: argparse.Namespace) -> list[str]:
    ranks = 1 if name == "one-gpu" else options.ranks
    file = str(CONFIGURATIONS / f"{name}.toml")
    arguments = ["--config", file, *short_run(folder / name, options, ranks)]
    if config_of(parse(["train", "--config", file])).optim.accumulation > 1:
        batch_size = options.batch_size * ranks // options.ranks
        arguments += ["--batch-size", str(batch_size), "--accumulation", str(options.accumulation)]
    if name in _COMPILED:
        arguments.append("--compile")
    if name in _ON_FOLDERS:
        arguments += ["--model", str(folder / "model"), "--data", str(folder / "conversations.jsonl")]
    return arguments


def _draw(folder: Path, options: argparse.Namespace) -> None:
    """Write a folder of a model, with a tokenizer of the conversations' words, and the conversations."""
    drawn = list(pairs(options.num_documents))
    turns = [
        ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer}) for prompt, answer in drawn
    ]
    write_rows(folder / "conversations.jsonl", ({"messages": messages} for messages in turns))
    config = options.base_model or folder / "config.json"
    if options.base_model is None:
        config.write_text(json.dumps(_BASE), encoding="utf-8")
    spec = load_spec(str(config))
    write_tokenizer(folder / "model", CHAT_TEMPLATE, (text for pair in drawn for text in pair), spec.vocab_size)
    model: Any = build_model(spec, torch.device("cpu"), 0).to(torch.bfloat16)
    model.save_pretrained(folder / "model")


def _row(name: str, command: list[str], folder: Path, options: argparse.Namespace) -> RecipeRow:
    records, output = trained(command, folder / name, options.timeout)
    return RecipeRow(
        variant=name,
        tokens_per_s=measured_speed(records, options.num_skipped),
        peak_gib=max(record.memory_nbytes for record in records) / 2**30,
        losses=[record.loss for record in records],
        lines=tuple(line for line in output.splitlines() if line.startswith(("loss:", "float8:", "trained:"))),
    )


if __name__ == "__main__":
    main()
