"""The command line: a verb is run, and its errors end in one line and an exit code."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from lamella._command import ckpt_options, overlap_report
from lamella._command.parser import config_of, parse
from lamella._processes.deaths import describe_memory_error, warning_of_tight_limits
from lamella._processes.endings import EXIT_CODES, FAILED, Stopped
from lamella._processes.launch import WorkerError, WorkerTimeoutError
from lamella._record.output import open_closed_outputs, printable, say
from lamella._settings.config import to_toml
from lamella_trace import TraceError

_REFUSED: Final = 2
_INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code. For `train`, see `EXIT_CODES_IN_WORDS`. For the other commands, 1: checkpoints differ, or a
        checkpoint is damaged; 2: refused; 130: interrupted.

    Raises:
        BaseException: The program of `run` has ended, with this error or `SystemExit`.
    """
    open_closed_outputs()
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        exit_code = _run(arguments)
    except TraceError as error:
        return _leave(f"error: {error}", _REFUSED)
    except (WorkerError, WorkerTimeoutError, ckpt_options.DamageError) as error:
        return _leave(f"error: {error}", FAILED)
    except tuple(EXIT_CODES) as error:
        return _leave(f"error: {printable(str(error))}", EXIT_CODES[type(error)])
    except Stopped as stopped:
        return _leave(f"{stopped}", stopped.exit_code)
    except KeyboardInterrupt:
        return _leave("interrupted.", _INTERRUPTED)
    except MemoryError as error:
        return _leave(f"error: {describe_memory_error(error)}", FAILED)
    if arguments.command == "run":
        # Outside of the `try`: the program's errors end in its own traceback, as under `python`.
        from lamella._command import script

        script.run(arguments)
    return exit_code


def _leave(message: str, code: int) -> int:
    _print(message)
    return code


def _print(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # Every rank under torchrun ends here; only rank 0 prints.
        with suppress(OSError):  # In a shell pipeline Ctrl-C also ends the reader of this process's standard error.
            print(f"lamella: {message}", file=sys.stderr)


def _run(arguments: argparse.Namespace) -> int:
    if (warning := warning_of_tight_limits()) is not None:
        _print(f"warning: {warning}")
    # Imports per command: torch takes seconds, transformers as many again.
    if arguments.command == "ckpt":
        from lamella._command import ckpt

        return ckpt.run(arguments)
    if arguments.command == "export":
        from lamella._command import export

        return export.run(arguments)
    if arguments.command == "report":
        from lamella._command import report

        return report.run(arguments)
    if arguments.command in ("generate", "eval"):
        from lamella._command import inference

        return inference.run_generate(arguments) if arguments.command == "generate" else inference.run_eval(arguments)
    if arguments.command == "run":
        from lamella._command import script

        script.prepare(arguments)
    elif arguments.command == "overlap-report":
        overlap_report.run(arguments)
    elif arguments.print_config:
        say([to_toml(config_of(arguments))])
    elif arguments.command == "estimate":
        from lamella._command import estimate

        estimate.run(arguments)
    elif arguments.command == "plan":
        from lamella._command import plan

        plan.run(arguments)
    else:
        from lamella._command.train import train

        config = config_of(arguments)
        if arguments.memory is not None:
            from lamella._command.fitting import fitted  # recorded steps, with torch's compiler

            config = fitted(config, arguments.memory)
        train(config)
    return 0
