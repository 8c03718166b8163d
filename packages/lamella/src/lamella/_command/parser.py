"""The options of every verb: those of `lamella train` are derived from the configuration's fields."""

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, Literal, NoReturn

from lamella import __version__
from lamella._command import ckpt_options, inference_options, plan_options
from lamella._processes.endings import EXIT_CODES_IN_WORDS
from lamella._record.output import refused_paths
from lamella._settings.config import GROUPS, Config, Group, Values, merged, resolve
from lamella._settings.files import read_config
from lamella._settings.options import ConfigError, Field, describe, fields_of, inner, nearest, shown
from lamella._settings.spellings import option_of_spelling
from lamella._settings.streaming import check_steps

DEFAULT_MODEL = "llama-small"
COMMANDS: Final = ("train", "estimate", "plan", *inference_options.VERBS, "run", "ckpt", "report", "overlap-report")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line.

    Raises:
        ConfigError: A command or an option is unknown, or a required argument is missing.
    """
    _check_command(argv, COMMANDS, "lamella")
    if argv[0] == "ckpt":
        _check_command(argv[1:], ckpt_options.NAMES, "lamella ckpt")
    try:
        arguments, unknown = _parser().parse_known_args(argv)
    except ConfigError as error:
        raise ConfigError(f"{error}{_hint_on_dashes(argv, str(error))}") from None
    unknown = _without_late_folder(unknown, arguments)
    if unknown:
        raise ConfigError(_unknown(unknown[0], arguments))
    return arguments


def _hint_on_dashes(argv: Sequence[str], error: str) -> str:
    """Return a way to pass an argument that argparse takes for an option; empty where `argv` has none."""
    if argv[0] not in inference_options.VERBS or "--" in argv or " are required: " not in error:
        return ""
    options = inference_options.options_of(argv[0])
    # Not the value of an option, and no misspelt option.
    arguments = (word for before, word in pairwise(argv) if before not in options)
    is_dashed = any(word.startswith("-") and not nearest(word.split("=")[0], options) for word in arguments)
    return " Pass an argument that begins with - after --, and options before it." if is_dashed else ""


def _without_late_folder(unknown: list[str], arguments: argparse.Namespace) -> list[str]:
    """Take the folder of `export` behind an option: argparse of Python 3.11 decides before it that there is none."""
    is_delimited = unknown[:1] == ["--"]
    late = unknown[is_delimited:]
    if arguments.command != "export" or arguments.out is not None or not late:
        return unknown
    if late[0].startswith("-") and not is_delimited:
        return unknown
    arguments.out, *others = late
    return others


def config_of(arguments: argparse.Namespace) -> Config:
    """Build the configuration from the options of `train`, configuration files and the model's defaults.

    Raises:
        ConfigError: An option's value has the wrong type or is out of bounds.
    """
    layers = [read_config(source) for source in arguments.config]
    if (subject := getattr(arguments, "subject", None)) is not None:
        layers.append(read_config(subject) if subject.endswith(".toml") else {"model": {"name": subject}})
    layers.append(_values(arguments))
    if arguments.command == "train":
        check_steps(layers)
    name = next((layer["model"]["name"] for layer in reversed(layers) if "name" in layer.get("model", {})), None)
    if name is None and len(layers) == 1:
        name = DEFAULT_MODEL
        layers.append({"model": {"name": name}})
    with refused_paths():
        return resolve(*_settings_of_model(str(name), layers), *layers)


def _settings_of_model(name: str, layers: Sequence[Values]) -> tuple[Values, Values]:
    from lamella._model.spec import named_settings
    from lamella._model.weights import pretrained_settings

    return _within_the_steps(named_settings(name), layers), pretrained_settings(name)


def _within_the_steps(named: Values, layers: Sequence[Values]) -> Values:
    """Return the settings of a named model, without a warm-up longer than the steps that the user asks for."""
    steps, model_optim = merged(named, *layers)["optim"].get("steps"), dict(named.get("optim", {}))
    warmup = model_optim.get("warmup_steps")
    if isinstance(steps, int) and isinstance(warmup, int) and warmup > steps:
        del model_optim["warmup_steps"]
    return {**named, "optim": model_optim}


def _check_command(argv: Sequence[str], commands: Sequence[str], program: str) -> None:
    command = argv[0] if argv else ""
    if command in commands or command.startswith("-"):
        return
    got = f"{command!r}.{nearest(command, commands)}" if argv else f"none. `{program} --help` says what they do."
    raise ConfigError(f"Expected a command of `{program}`, one of {', '.join(commands)}, got {got}")


def _unknown(argument: str, arguments: argparse.Namespace) -> str:
    command = arguments.command
    options: Sequence[str] = ["--json", "--html"] if command == "overlap-report" else []
    if takes_settings := command in ("train", "estimate", "plan"):
        options = ["--config", "--memory", *(field.flag for cls in GROUPS.values() for field in fields_of(cls))]
    elif command in inference_options.VERBS:
        options = inference_options.options_of(command)
    elif command == "ckpt":
        options = ckpt_options.options_of(arguments.ckpt_command)
        command = f"ckpt {arguments.ckpt_command}"
    word = argument.split("=")[0]
    if word in options:
        return f"Expected no option after --, got {word!r}. Pass options before --."
    hint = (option_of_spelling(word) if takes_settings else "") or nearest(word, options)
    return f"Expected an option of `lamella {command}`, got {word!r}.{hint}"


class _Formatter(argparse.HelpFormatter):
    """Keeps the line breaks of the epilog."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text == EXIT_CODES_IN_WORDS else super()._fill_text(text, width, indent)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}. See `{self.prog} --help`.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lamella", description="Fully sharded training in thin layers.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"lamella {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    command = commands.add_parser(
        "train",
        usage="%(prog)s [--model MODEL] [--data PATH ...] [options]",
        help="train a causal language model on text",
        description="Train a causal language model on text. The same command again goes on from the last checkpoint. "
        "Defaults are in brackets; --model may bring others, which --print-config shows.",
        epilog=EXIT_CODES_IN_WORDS,
        formatter_class=_Formatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    _add_run_options(command)
    command = commands.add_parser(
        "estimate",
        usage="%(prog)s [CONFIG] [--ranks N] [options of train]",
        help="estimate the memory of a run, without GPUs or weights",
        description="Estimate the memory of each GPU of a run: takes the options of train, starts nothing, and writes "
        "nothing but the files of --json and --svg. Any number of --ranks, 8 by default.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    command.add_argument(
        "subject", nargs="?", default=None, metavar="CONFIG", help="a model, as for --model; or settings in TOML"
    )
    command.add_argument("--rank", type=int, default=0, metavar="N", help="the rank to estimate [0]")
    _add_json(command, "estimate")
    command.add_argument("--svg", default=None, metavar="PATH", help="write a picture of bytes over the step")
    _add_run_options(command)
    command = commands.add_parser(
        "plan",
        usage=plan_options.USAGE,
        help="predict the time of a run's step on a described cluster",
        description=plan_options.DESCRIPTION,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    plan_options.add_options(command)
    _add_json(command, "plan")
    _add_run_options(command, memory_help=argparse.SUPPRESS)  # a plan takes the memory of its cluster, and says so
    inference_options.add_verbs(commands)
    command = commands.add_parser(
        "run",
        usage="%(prog)s [OPTION ...] [-m] SCRIPT [ARGUMENT ...]",
        help="run a program written for FSDP2, with lamella in FSDP2's place",
        description="Run a Python script, or with -m a module, unchanged: what it shards by torch's fully_shard is "
        "sharded by lamella. On several ranks: torchrun --nproc-per-node N -m lamella run SCRIPT; ranks "
        "that the program itself spawns keep torch's, unless it calls lamella_engine.install() at its top. Options "
        "before SCRIPT set the transformers.Trainers (TRL's too) of the program.",
        allow_abbrev=False,
    )
    _add_trainer_options(command)
    command.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
    command.add_argument("program", metavar="SCRIPT", help="file of a script")
    remainder = command.add_argument(
        "arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="arguments of the program"
    )
    remainder.required = False  # as it is: argparse would name ARGUMENT beside an absent SCRIPT
    command = commands.add_parser(
        "report",
        help="write a run's report again: losses, speed, memory, samples and settings",
        description="Write RUN/report.html from the run's records, also of a run in progress: losses, speed, memory, "
        "samples and settings, on one page without scripts.",
        allow_abbrev=False,
    )
    command.add_argument("run", metavar="RUN", help="folder of a run of `lamella train`")
    command = commands.add_parser(
        "overlap-report",
        help="show exposed communication, copies and waits for the host in a profile",
        description="Report, for each unit in a profile, exposed communication, copies, and the time the GPU waited "
        "for the host.",
        allow_abbrev=False,
    )
    command.add_argument("trace", metavar="TRACE", help="trace of one rank by torch.profiler, .json or .json.gz")
    _add_json(command, "report")
    command.add_argument("--html", metavar="PATH", help="write the report as a page with a timeline")
    ckpt_options.add_commands(commands)
    return parser


def _add_json(command: argparse.ArgumentParser, subject: str) -> None:
    text = f"write the {subject} as JSON; - prints JSON in place of the text"
    command.add_argument("--json", default=None, metavar="PATH", help=text)


_MEMORY_HELP: Final = (
    "choose the fastest --stage, --recompute, resharding and offloading that fit into this memory of a GPU, such as "
    "78GiB (GB are 10^9 bytes)"
)


def _add_run_options(command: argparse.ArgumentParser, *, memory_help: str = _MEMORY_HELP) -> None:
    command.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="settings from TOML or JSON, or from a name in a Python file, such as runs.py:name",
    )
    command.add_argument("--print-config", action="store_true", default=False, help="print the settings and exit")
    command.add_argument("--memory", default=None, metavar="SIZE", help=memory_help)
    for group, cls in GROUPS.items():
        _add_group(command, group, cls)


def _add_trainer_options(command: argparse.ArgumentParser) -> None:
    texts = {
        "--overlap": "let the optimizer's step hide the first gathers of the next forward",
        "--late-gradients": "and the last reductions of backward too; needs max_grad_norm=0",
        "--local-clipping": "clip on plain shards; norms differ from torch's by rounding",
    }
    dests = ("overlap", "late_gradients", "clips_local_shards")
    for (flag, text), dest in zip(texts.items(), dests, strict=True):
        command.add_argument(flag, dest=dest, action="store_true", help=text)
    command.add_argument(
        "--keep-budget", metavar="SIZE", help="bytes of weights that stay from forward to backward, such as 2GiB"
    )
    command.add_argument(
        "--profile", dest="num_profiled_steps", type=int, default=0, metavar="N", help="profile N steps of rank 0"
    )


def _add_group(parser: argparse.ArgumentParser, group: str, cls: type[Group]) -> None:
    section = parser.add_argument_group(group, (cls.__doc__ or "").strip())
    for field in fields_of(cls):
        dest = f"{group}.{field.name}"
        shown = field.default not in (None, (), dataclasses.MISSING)
        text = field.option.help + (f" [{_spelled(field.default)}]" if shown else "")
        # `--lr` and `--optim.lr`, the name in the printed settings, are both accepted; the help lists `--lr`.
        section.add_argument(field.flag, dest=dest, help=text, **_taking(field))
        section.add_argument(f"--{dest}", dest=dest, help=argparse.SUPPRESS, **_taking(field))


def _taking(field: Field) -> dict[str, Any]:
    """Return argparse's keywords for an option's value and its name in the help."""
    kind = inner(field.kind)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is tuple:
        return {"nargs": "+", "metavar": field.option.metavar or "PATH"}
    if typing.get_origin(kind) is Literal:
        return {"metavar": "|".join(typing.get_args(kind))}
    text = field.option.metavar or field.flag.removeprefix("--").upper()
    return {"metavar": "N" if kind is int else "X" if kind is float else text}


def _spelled(default: object) -> object:
    return {True: "yes", False: "no"}[default] if isinstance(default, bool) else default


def _values(arguments: argparse.Namespace) -> Values:
    """Return the settings given on the command line, converted to the types of their fields."""
    settings = vars(arguments)
    return {
        group: {
            field.name: _typed(settings[f"{group}.{field.name}"], field)
            for field in fields_of(cls)
            if f"{group}.{field.name}" in settings
        }
        for group, cls in GROUPS.items()
    }


def _typed(text: str | bool | list[str], field: Field) -> object:
    kind = inner(field.kind)
    if isinstance(text, list):
        return tuple(text)
    try:
        return int(text) if kind is int else float(text) if kind is float else text
    except ValueError:
        raise ConfigError(f"Expected {field.flag} to be {describe(kind)}, got {shown(text)}.") from None
