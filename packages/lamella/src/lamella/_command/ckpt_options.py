"""The options of the commands of `lamella ckpt`. Help needs no torch: the commands themselves are in `ckpt`."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
DIALECTS: Final = ("release-0.19", "bridge")
MTP_LAYERS: Final = ("mtp_model_layer", "transformer_layer")
TARGETS: Final = ("dcp", "hf", "torch", "fsdp_dtensor")
NUM_LINES: Final = 60
"""How many lines of a report fit a screen or two."""


class DamageError(Exception):
    """An unreadable checkpoint: one line with the name of the file."""


@dataclass(frozen=True, kw_only=True)
class _Command:
    """The arguments of a command."""

    help: str
    paths: tuple[str, ...]
    options: Mapping[str, Mapping[str, Any]]


def add_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `ckpt` and its own commands to a parser."""
    text = "inspect, diff, convert or verify checkpoints"
    group = commands.add_parser("ckpt", help=text, description=f"{text.capitalize()}.", allow_abbrev=False)
    inner = group.add_subparsers(dest="ckpt_command", required=True, metavar="command")
    for name, command in _COMMANDS.items():
        parser = inner.add_parser(name, help=command.help, description=_sentence(command.help), allow_abbrev=False)
        for path in command.paths:
            parser.add_argument(path.lower(), metavar=path)
        for flag, settings in command.options.items():
            parser.add_argument(flag, **settings)


def options_of(name: str) -> Sequence[str]:
    """The options of a command."""
    return tuple(_COMMANDS[name].options)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


_TRUST: Final = {
    "--trust": {"action": "store_true", "help": "build types that it pickles, which runs their code"},
}
_JSON: Final = {
    "--json": {"metavar": "PATH", "help": "write the same as JSON; - prints that in place of the text"},
}
_MODEL: Final = {
    "--config": {
        "metavar": "PATH",
        "help": "the model's Hugging Face folder, or its config.json, where the checkpoint has none",
    },
    "--tp": {"metavar": "N", "help": "tensor-parallel ranks, where tensors of fsdp_dtensor lie in their order"},
}

_COMMANDS: Final[Mapping[str, _Command]] = {
    "inspect": _Command(
        help="list what a checkpoint holds: names, shapes, dtypes, bytes, chunks",
        paths=("PATH",),
        options={
            "--depth": {
                "metavar": "N",
                "help": "how many parts of a name are shown; the rest is summed up [all; on a terminal, what fits "
                f"{NUM_LINES} lines]",
            },
            **_JSON,
            **_TRUST,
        },
    ),
    "diff": _Command(
        help="compare two checkpoints of any formats; exit code 1 where they differ",
        paths=("A", "B"),
        options={
            "--rtol": {"metavar": "X", "default": "0", "help": "how far apart values may be, in relation to B's [0]"},
            "--atol": {"metavar": "X", "default": "0", "help": "how far apart values may be besides [0]"},
            "--names-only": {"action": "store_true", "help": "compare names, shapes and dtypes, and no values"},
            "--limit": {"metavar": "N", "default": "20", "help": "how many differences are printed [20]"},
            **_MODEL,
            **_JSON,
            **_TRUST,
        },
    ),
    "convert": _Command(
        help="write a checkpoint in another format, holding no more of it than a buffer",
        paths=("SRC", "DST"),
        options={
            "--to": {
                "required": True,
                "metavar": "FORMAT",
                "help": "dcp (torch.distributed.checkpoint), hf (safetensors), torch (torch.save) or "
                "fsdp_dtensor (Megatron)",
            },
            "--dtype": {"metavar": "DTYPE", "help": f"of the weights: {', '.join(DTYPES)} [as they are]"},
            "--dialect": {
                "metavar": "NAME",
                "help": f"of fsdp_dtensor: {' or '.join(DIALECTS)} [{DIALECTS[0]}]",
            },
            "--mtp-layer": {
                "metavar": "NAME",
                "help": f"what fsdp_dtensor calls the layer that predicts further tokens: {' or '.join(MTP_LAYERS)} "
                f"[as in the source, or {MTP_LAYERS[0]}]",
            },
            "--padded-vocab": {
                "metavar": "N",
                "help": "rows that fsdp_dtensor has for tokens, zeros behind the model's own [as many as the model]",
            },
            **_MODEL,
            "--float8": {
                "action": argparse.BooleanOptionalAction,
                "help": "weights in float8 with a scale a block, with --to hf [as they are]",
            },
            "--max-shard-size": {"metavar": "SIZE", "default": "5GB", "help": "about how much one file holds [5GB]"},
            "--force": {"action": "store_true", "help": "replace the checkpoint that is at DST"},
            "--verify": {
                "action": argparse.BooleanOptionalAction,
                "default": True,
                "help": "hold what is read against its checksums [yes]",
            },
            **_TRUST,
        },
    ),
    "verify": _Command(
        help="read all of a checkpoint and say what is wrong with it; exit code 1 where something is",
        paths=("PATH",),
        options={**_JSON, **_TRUST},
    ),
}
NAMES: Final = tuple(_COMMANDS)
