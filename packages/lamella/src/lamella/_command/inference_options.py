"""The options of the verbs that use a trained model. Their help needs no torch, so the verbs run elsewhere."""

import argparse
from typing import Any, Final

EXPORT_DTYPES: Final = ("auto", "fp32", "bf16")
VERBS: Final = ("export",)


def add_verbs(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `export` to a parser's commands."""
    _add_export(commands)


def options_of(verb: str) -> list[str]:
    """Return the options of a verb."""
    return list(_OPTIONS[verb])


_OPTIONS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "export": {
        "--dtype": {
            "metavar": "|".join(EXPORT_DTYPES),
            "default": "auto",
            "help": "dtype of the weights; auto is that of the weights that the run started from, else fp32 [auto]",
        },
        "--step": {"metavar": "N", "help": "export the checkpoint of this step [the newest]"},
    },
}


def _add_options(parser: argparse.ArgumentParser, verb: str) -> None:
    for flag, settings in _OPTIONS[verb].items():
        parser.add_argument(flag, **settings)


def _add_export(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "export",
        help="write a run's model as a Hugging Face folder",
        description="Write a run's model as a Hugging Face folder: weights, config, tokenizer, generation config and "
        "a model card with the figures of the run. A run in progress is left alone.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run of `lamella train`")
    parser.add_argument("out", metavar="OUT", nargs="?", help="folder to write [RUN/exports/step_N]")
    _add_options(parser, "export")
