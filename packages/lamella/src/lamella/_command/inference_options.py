"""The options of the verbs that use a trained model. Their help needs no torch, so the verbs run elsewhere."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

EXPORT_DTYPES: Final = ("auto", "fp32", "bf16")
DEVICES: Final = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class _Verb:
    """A verb's help, its arguments by name, and its options by flag, with argparse's keywords for both."""

    help: str
    description: str
    arguments: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Mapping[str, Any]]


_MODEL: Final = {
    "model": {"metavar": "RUN|FOLDER", "help": "folder of a run of `lamella train`, or a Hugging Face folder"}
}
_STEP: Final = {"--step": {"metavar": "N", "help": "take a run's checkpoint of this step [the newest]"}}
_DEVICE: Final = {
    "--device": {
        "metavar": "|".join(DEVICES),
        "default": "auto",
        "help": "auto takes a GPU if there is one, in bf16; the CPU computes in fp32 [auto]",
    }
}

_VERBS: Final[Mapping[str, _Verb]] = {
    "export": _Verb(
        help="write a run's model as a Hugging Face folder",
        description="Write a run's model as a Hugging Face folder: weights, config, tokenizer, generation config and "
        "a model card with the figures of the run. A run in progress is left alone.",
        arguments={
            "run": {"metavar": "RUN", "help": "folder of a run of `lamella train`"},
            "out": {"metavar": "OUT", "nargs": "?", "help": "folder to write [RUN/exports/step_N]"},
        },
        options={
            "--dtype": {
                "metavar": "|".join(EXPORT_DTYPES),
                "default": "auto",
                "help": "dtype of the weights; auto is that of the weights that the run started from, else fp32 [auto]",
            },
            "--merge": {"action": "store_true", "help": "merge a run's adapters into its layers [a folder for peft]"},
            **_STEP,
        },
    ),
    "generate": _Verb(
        help="generate text with a trained model",
        description="Generate text with a run's model, or with that of a Hugging Face folder. Writes nothing.",
        arguments={**_MODEL, "prompt": {"metavar": "PROMPT", "help": "text to go on from; with --chat a message"}},
        options={
            "--max-tokens": {"metavar": "N", "default": "128", "help": "tokens to generate, at most [128]"},
            "--temperature": {
                "metavar": "X",
                "help": "0 takes the likeliest token each time [as the model's generation config says]",
            },
            "--chat": {"action": "store_true", "help": "render the prompt by the tokenizer's chat template"},
            "--seed": {"metavar": "N", "default": "0", "help": "seed of random choices [0]"},
            **_STEP,
            **_DEVICE,
        },
    ),
    "eval": _Verb(
        help="evaluate a trained model on text or on tasks",
        description="Evaluate a run's model, or that of a Hugging Face folder: the loss on text by the validation of "
        "training, in nats a byte or a token, and scores in tasks of lm-eval.",
        arguments=_MODEL,
        options={
            "--data": {
                "metavar": "PATH",
                "nargs": "+",
                "default": [],
                "help": "text files and folders of them [the text that the run held out]",
            },
            "--tasks": {
                "metavar": "TASK",
                "nargs": "+",
                "default": [],
                "help": "tasks of lm-eval (lamella[eval]), whose data it may download, or YAML files of tasks",
            },
            "--sequence-length": {
                "metavar": "N",
                "help": "tokens predicted in a sequence [the run's; else 1024, at most the model's positions]",
            },
            "--sequences": {"metavar": "N", "help": "sequences, at most [all of --data; of held-out text the run's]"},
            "--limit": {"metavar": "N", "help": "documents of each task, at most [all]"},
            "--json": {"metavar": "PATH", "help": "write the same as JSON; - prints that in place of the text"},
            **_STEP,
            **_DEVICE,
        },
    ),
}
VERBS: Final = tuple(_VERBS)


def add_verbs(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the verbs to a parser's commands."""
    for name, verb in _VERBS.items():
        parser = commands.add_parser(name, help=verb.help, description=verb.description, allow_abbrev=False)
        for argument, settings in verb.arguments.items():
            parser.add_argument(argument, **settings)
        for flag, settings in verb.options.items():
            parser.add_argument(flag, **settings)


def options_of(verb: str) -> list[str]:
    """Return the flags of a verb."""
    return list(_VERBS[verb].options)
