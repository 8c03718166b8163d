"""The command line: `lamella train`, its options derived from the configuration's fields, and `overlap-report`."""

import argparse
import dataclasses
import os
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lamella import __version__
from lamella._config import GROUPS, Config, Group, Values, read_file, resolve, to_toml
from lamella._launch import WorkerError
from lamella._models import named_settings
from lamella._options import ConfigError, Field, describe, fields_of, inner, nearest
from lamella._pretrained import pretrained_settings
from lamella._run import train
from lamella.overlap import TraceError, as_html, as_json, as_text, overlap_report, read_trace

DEFAULT_MODEL = "llama-small"

_FAILED, _REFUSED, _INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (1: a worker died, 2: refused, 130: interrupted)."""
    try:
        _run(sys.argv[1:] if argv is None else argv)
        return 0
    except (ConfigError, TraceError) as error:
        return _leave(f"error: {error}", _REFUSED)
    except WorkerError as error:
        return _leave(f"error: {error}", _FAILED)
    except KeyboardInterrupt:
        return _leave("interrupted; the same command goes on from the last checkpoint.", _INTERRUPTED)


def _leave(message: str, code: int) -> int:
    if os.environ.get("RANK", "0") == "0":  # Every rank of a torchrun knows; one says it.
        print(f"lamella: {message}", file=sys.stderr)
    return code


def _run(argv: Sequence[str]) -> None:
    arguments = parse(argv)
    if arguments.command == "overlap-report":
        _report_overlap(arguments)
    elif arguments.print_config:
        print(to_toml(config_of(arguments)))
    else:
        train(config_of(arguments))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """What a command line says.

    Raises:
        ConfigError: A command or an option does not exist, or lacks what it needs.
    """
    arguments, unknown = _parser().parse_known_args(argv)
    if unknown:
        raise ConfigError(_unknown(unknown[0], arguments.command))
    return arguments


def config_of(arguments: argparse.Namespace) -> Config:
    """The configuration that the options of `train` ask for.

    Raises:
        ConfigError: An option does not take its value.
    """
    layers = [read_file(path) for path in arguments.config]
    layers.append(_values(arguments))
    name = next((layer["model"]["name"] for layer in reversed(layers) if "name" in layer.get("model", {})), None)
    if name is None and not arguments.config:
        name = DEFAULT_MODEL
        layers.append({"model": {"name": name}})
    return resolve(named_settings(str(name)), pretrained_settings(str(name)), *layers)


def _unknown(argument: str, command: str) -> str:
    known = ["--json", "--html"]
    if command == "train":
        known = ["--config", *(field.flag for cls in GROUPS.values() for field in fields_of(cls))]
    word = argument.split("=")[0]
    return f"Expected an option of `lamella {command}`, got {word!r}.{nearest(word, known)}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lamella", description="Fully sharded training in thin layers.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"lamella {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    command = commands.add_parser(
        "train",
        help="train a causal language model on text",
        description="Train a causal language model on text; run again, it goes on from its last checkpoint.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    command.add_argument("--config", action="append", default=[], metavar="FILE", help="settings from TOML or JSON")
    command.add_argument("--print-config", action="store_true", default=False, help="print the settings and leave")
    for group, cls in GROUPS.items():
        _add_group(command, group, cls)
    command = commands.add_parser(
        "overlap-report",
        help="say of a profile what was exposed, copied and waited for",
        description="Say of a profile, unit by unit, what communication was exposed, what was copied, and how long the "
        "GPU waited for the host.",
        allow_abbrev=False,
    )
    command.add_argument("trace", metavar="TRACE", help="what torch.profiler exported on one rank, .json or .json.gz")
    command.add_argument("--json", metavar="PATH", help="write the report as JSON; - prints that in place of the text")
    command.add_argument("--html", metavar="PATH", help="write the report as a page with a timeline")
    return parser


def _report_overlap(arguments: argparse.Namespace) -> None:
    report = overlap_report(read_trace(Path(arguments.trace)), arguments.trace)
    print(as_json(report) if arguments.json == "-" else as_text(report))
    if arguments.json not in (None, "-"):
        _write(arguments.json, as_json(report))
    if arguments.html is not None:
        _write(arguments.html, as_html(report))


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Expected to write {path!r}, got {error.strerror}.") from error


def _add_group(parser: argparse.ArgumentParser, group: str, cls: type[Group]) -> None:
    section = parser.add_argument_group(group, (cls.__doc__ or "").strip())
    for field in fields_of(cls):
        # Both spellings, `--lr` and `--optim.lr`, as in the printed settings.
        names = [field.flag, f"--{group}.{field.name}"]
        dest = f"{group}.{field.name}"
        shown = field.default not in (None, (), dataclasses.MISSING)
        text = field.option.help + (f" [{field.default}]" if shown else "")
        if inner(field.kind) is bool:
            section.add_argument(*names, dest=dest, help=text, action=argparse.BooleanOptionalAction)
        else:
            nargs = "+" if typing.get_origin(field.kind) is tuple else None
            metavar = field.flag.removeprefix("--").upper()
            section.add_argument(*names, dest=dest, help=text, nargs=nargs, metavar=metavar)


def _values(arguments: argparse.Namespace) -> Values:
    """The settings given on the command line, as the types of their fields."""
    given = vars(arguments)
    return {
        group: {
            field.name: _typed(given[f"{group}.{field.name}"], field)
            for field in fields_of(cls)
            if f"{group}.{field.name}" in given
        }
        for group, cls in GROUPS.items()
    }


def _typed(given: str | bool | list[str], field: Field) -> object:
    kind = inner(field.kind)
    if isinstance(given, list):
        return tuple(given)
    try:
        return int(given) if kind is int else float(given) if kind is float else given
    except ValueError:
        raise ConfigError(f"Expected {field.flag} to be {describe(kind)}, got {given!r}.") from None
