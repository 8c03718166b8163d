"""`lamella export`: the model of a run as a Hugging Face folder."""

import argparse
import os
from pathlib import Path

from lamella import __version__
from lamella._command.choices import number, one_of
from lamella._command.ckpt_options import DamageError
from lamella._command.inference_options import EXPORT_DTYPES
from lamella._export.export import Export, export
from lamella._export.trained_run import earlier_steps, open_run
from lamella._record.output import file_error, one_line, printable, say
from lamella._record.progress import ByteBar
from lamella._settings.options import ConfigError
from lamella._settings.sizes import size
from lamella_checkpoint import CheckpointDamaged


def run(arguments: argparse.Namespace) -> int:
    """Export a run's model, and print the commands that use the folder; return the exit code.

    Raises:
        ConfigError: The arguments, or the run's folder, are refused.
        DamageError: A file of the checkpoint is absent or damaged.

    Effects: no collective, no accelerator.
    """
    one_of("--dtype", arguments.dtype, EXPORT_DTYPES)
    step = None if arguments.step is None else number("--step", arguments.step, int)
    out = None if arguments.out is None else Path(arguments.out)
    try:
        with ByteBar("writing") as bar:
            exported = export(
                Path(arguments.run),
                out,
                dtype=arguments.dtype,
                merge=arguments.merge,
                step=step,
                version=__version__,
                on_progress=bar.to,
            )
    except CheckpointDamaged as error:
        raise DamageError(one_line(f"{error}".rstrip(".")) + f". {_way_out(arguments.run, step)}") from error
    except FileExistsError as error:
        raise ConfigError(
            f"Expected OUT to be absent or an empty folder, got {str(error.filename or out)!r}, which is neither. Pass "
            "another OUT, or remove it."
        ) from error
    except OSError as error:
        raise ConfigError(f"{file_error(error)} Pass another OUT.") from error
    except (NotImplementedError, TypeError, ValueError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(one_line(f"{error}")) from error
    say(map(printable, _lines(exported)))
    return 0


def _way_out(path: str, step: int | None) -> str:
    """Name the newest checkpoint before the damaged one."""
    if steps := earlier_steps(open_run(Path(path), step)):
        return f"Pass --step {steps[-1]} for the checkpoint before it, or put back what it lacks."
    return "There is no checkpoint before it: put back what it lacks, or train on."


def _lines(exported: Export) -> list[str]:
    conversion, folder = exported.conversion, os.path.relpath(exported.conversion.target)
    contents = f"{conversion.num_tensors} tensors of {size(conversion.nbytes)} in {exported.dtype}"
    lines = [f"exported: {folder}: step {exported.run.step}, {contents}"]
    if conversion.untrained:
        lines.append(f"as they were published, not trained: {len(conversion.untrained)} tensors")
    return lines
